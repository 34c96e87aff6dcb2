// SPDX-License-Identifier: Apache-2.0
//
// test_chaos.c - jobs of real processes to which things happen at random, one job after the other.
//
//   test_chaos [--seconds N] [--seed N] [--jobs N]
//
// Each job is a few ranks on one or two hosts that add up tensors and check every sum, and an
// injector, a process beside them, that follows a plan drawn from the job's seed: a few faults a
// job must survive (a short stop, a short cut, lost packets), and in most jobs one at the end that
// it must not (a kill, a long stop, a cut, reset connections). Then
//   - nobody hangs: every rank ends within a bound;
//   - no sum is wrong;
//   - every ending is explained: without a fatal fault all finish; with one every rank that lives
//     is told, by a sentence that names a rank with host and pid;
//   - nothing is left behind, which the harness checks.
// A job that fails prints its seed; --seed N --jobs 1 repeats it, as far as a scheduler does. What
// happens for a seed is in chaos_plan.h; test_agreement_sim does the same in virtual time.
#define _GNU_SOURCE
#include "base/peer.h"
#include "base/testing.h"
#include "chaos_plan.h"
#include "hosts.h"

#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define FATAL_STOP_MS 8000 // at least
#define END_SECONDS 20     // from a fatal fault to the end of every rank

// What ranks and injector see together.
static struct {
    atomic_int pids[MAX_RANKS];
    atomic_int n_ready;
    atomic_int n_over; // ranks that work no more
    atomic_int must_die[MAX_RANKS];
    atomic_int is_over;    // the plan has been carried out, and all live
    atomic_llong fatal_ns; // when the fatal fault was made
} *board;

// --- The plan -----------------------------------------------------------------------------------

static layout_t layout_of(const chaos_plan_t *job)
{
    return job->has_two_hosts ? LAYOUT_BLOCKS : LAYOUT_ONE;
}

static void show(const chaos_plan_t *job)
{
    printf("seed %llu: %d ranks, %s, %zu elements:", (unsigned long long)job->seed, job->n_ranks,
           layout_names[layout_of(job)], job->n);
    for (int i = 0; i < job->n_faults; i++) {
        printf(" %s(%d)", fault_kinds[job->faults[i].kind].name, job->faults[i].victim);
    }
    printf("%s", job->n_faults == 0 ? " nothing" : "");
}

// --- The injector -------------------------------------------------------------------------------

static void pause_ms(int ms)
{
    usleep((useconds_t)ms * 1000);
}

static void stop_for(int rank, int ms)
{
    pid_t pid = (pid_t)atomic_load(&board->pids[rank]);
    kill(pid, SIGSTOP);
    pause_ms(ms);
    kill(pid, SIGCONT);
}

// Until the others have given it up. How long that takes is for them to say: whoever did not run
// meanwhile, as on a busy machine, has less silence to complain of than a clock on the wall.
static void stop_until_given_up(const chaos_plan_t *job, int rank)
{
    pid_t pid = (pid_t)atomic_load(&board->pids[rank]);
    double start = fault_now();
    kill(pid, SIGSTOP);
    pause_ms(FATAL_STOP_MS);
    while (atomic_load(&board->n_over) < job->n_ranks - 1 &&
           fault_now() - start < END_SECONDS * LOADED) {
        pause_ms(2);
    }
    kill(pid, SIGCONT);
}

static bool make_fault(const chaos_plan_t *job, const planned_t *fault)
{
    bool ok = true;
    pause_ms(fault->after_ms);
    if (fault->kind >= N_SURVIVED) {
        atomic_store(&board->fatal_ns, (long long)clock_ns());
    }
    switch (fault->kind) {
    case FAULT_STOP:
        stop_for(fault->victim, fault->lasts_ms);
        break;
    case FAULT_LONG_STOP:
        stop_until_given_up(job, fault->victim);
        break;
    case FAULT_KILL_TWO:
        atomic_store(&board->must_die[(fault->victim + 1) % job->n_ranks], 1);
        atomic_store(&board->must_die[fault->victim], 1);
        break;
    case FAULT_KILL:
        atomic_store(&board->must_die[fault->victim], 1);
        break;
    case FAULT_SHORT_CUT:
    case FAULT_LOSS:
        ok =
            hosts_run(false, fault->kind == FAULT_LOSS ? HOSTS_LOSE("va", "20") : HOSTS_DROP("va"));
        pause_ms(fault->lasts_ms);
        ok &= hosts_run(false, "nft flush ruleset");
        break;
    case FAULT_CUT:
        ok = hosts_run(false, HOSTS_DROP("va")) && hosts_run(true, HOSTS_DROP("vb"));
        break;
    case FAULT_CUT_ONE_WAY:
        ok = hosts_run(true, HOSTS_DROP("vb"));
        break;
    case FAULT_RESET:
        hosts_run(false, "ss -K dst " HOSTS_ADDRESS_B " >/dev/null 2>&1");
        break;
    case N_FAULTS:
        break;
    }
    return ok;
}

static pid_t start_injector(const chaos_plan_t *job)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid != 0) {
        return pid;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (atomic_load(&board->n_ready) < job->n_ranks) {
        pause_ms(2);
    }
    bool ok = true;
    for (int i = 0; i < job->n_faults; i++) {
        ok &= make_fault(job, &job->faults[i]);
    }
    pause_ms(100);
    atomic_store(&board->is_over, !job->is_fatal);
    _exit(ok ? 0 : 1);
}

// --- A rank -------------------------------------------------------------------------------------

static void *die_when_told(void *arg)
{
    rank_t *r = arg;
    while (atomic_load(&board->must_die[r->rank]) == 0) {
        usleep(500);
    }
    rank_will_die(r);
    kill(getpid(), SIGKILL);
    return NULL;
}

// Rank 0 decides when it is enough, and all see it in the same step.
static hvd_status_t work(fault_rank_t *f, size_t n, bool *is_over_p)
{
    rank_t *r = f->r;
    int64_t shape[1] = {1};
    int64_t over = r->rank == 0 && atomic_load(&board->is_over) != 0;
    hvd_tensor_t tensor = {.input = &over, .output = &over, .n_dims = 1, .shape = shape};
    hvd_request_t request = {
        .op = HVD_ALLREDUCE,
        .name = "over?",
        .dtype = HVD_INT64,
        .reduce = HVD_MAX,
        .tensors = &tensor,
        .n_tensors = 1,
        .flags = HVD_WAITS,
    };
    f->flags = f->n_steps % 3 == 0 ? 0 : HVD_WAITS;
    hvd_status_t status = fault_step(f, "work", n);
    if (status == HVD_OK) {
        status = rank_call(r, &request);
    }
    *is_over_p = status == HVD_OK && over != 0;
    return status;
}

static bool names_a_rank(const fault_rank_t *f)
{
    for (int rank = 0; rank < f->r->size; rank++) {
        char name[128];
        fault_name(f->r, rank, name);
        if (strstr(f->r->text, name) != NULL) {
            return true;
        }
    }
    return false;
}

static void check_ending(fault_rank_t *f, const chaos_plan_t *job, hvd_status_t status)
{
    rank_t *r = f->r;
    if (!job->is_fatal) {
        CHECK_OK(r, status);
        return;
    }
    CHECK_STATUS(r, status, HVD_PEER_LOST);
    if (!names_a_rank(f)) {
        check_failed(r, __FILE__, __LINE__, "names no rank: %s", r->text);
    }
}

// Who dies last has nobody to remove what it leaves: somebody stays until all victims are gone.
static void outlive_victims(rank_t *r)
{
    for (int rank = 0; rank < r->size; rank++) {
        while (atomic_load(&board->must_die[rank]) != 0 &&
               !process_is_ending(atomic_load(&board->pids[rank]))) {
            usleep(500);
        }
    }
}

static void chaos_rank(rank_t *r, void *arg)
{
    const chaos_plan_t *job = arg;
    pthread_t thread;
    bool is_over = false;
    hvd_status_t status = HVD_OK;
    hosts_enter(r);
    atomic_store(&board->pids[r->rank], (int)getpid());
    fault_rank_t *f = fault_open(r);
    CHECK_INT(r, pthread_create(&thread, NULL, die_when_told, r), 0);
    pthread_detach(thread);
    atomic_fetch_add(&board->n_ready, 1);
    rank_step(r, "works while things happen");
    while (status == HVD_OK && !is_over) {
        status = work(f, job->n, &is_over);
        long long fatal_ns = atomic_load(&board->fatal_ns);
        if (status == HVD_OK && fatal_ns != 0 &&
            (int64_t)clock_ns() - fatal_ns > (int64_t)(END_SECONDS * LOADED * NS_PER_S)) {
            check_failed(r, __FILE__, __LINE__, "goes on %d s after a fatal fault",
                         END_SECONDS * LOADED);
        }
    }
    atomic_fetch_add(&board->n_over, 1);
    check_ending(f, job, status);
    outlive_victims(r);
    fault_leave(f);
}

// --- One job after the other --------------------------------------------------------------------

static bool run_job(uint64_t seed)
{
    static const char *const env[] = {
        "HOROVOD_HEARTBEAT_WARNING_SECONDS=2",
        "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=6",
        "HOROVOD_NETWORK_TIMEOUT_SECONDS=4",
        NULL,
    };
    chaos_plan_t job = chaos_plan(seed);
    uint64_t start_ns = clock_ns();
    int state = 0;
    memset(board, 0, sizeof *board);
    if (!hosts_mend()) {
        fprintf(stderr, "the network cannot be mended\n");
        return false;
    }
    pid_t injector = start_injector(&job);
    bool ok = ranks_run(job.n_ranks, layout_of(&job), env, chaos_rank, &job);
    if (!ok) {
        kill(injector, SIGKILL);
    }
    waitpid(injector, &state, 0);
    ok &= WIFEXITED(state) && WEXITSTATUS(state) == 0;
    show(&job);
    printf(" %s (%.1f s)\n", ok ? "ok" : "FAILED",
           (double)(clock_ns() - start_ns) / (double)NS_PER_S);
    fflush(stdout);
    return ok;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seconds", 1, 0, 't'}, {"seed", 1, 0, 's'}, {"jobs", 1, 0, 'n'}, {0}};
    double seconds = 20;
    uint64_t seed = 1;
    int n_jobs = INT32_MAX, n_run = 0, n_failed = 0, option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 't':
            seconds = strtod(optarg, NULL);
            break;
        case 's':
            seed = strtoull(optarg, NULL, 10);
            break;
        case 'n':
            n_jobs = (int)strtol(optarg, NULL, 10);
            break;
        default:
            fprintf(stderr, "usage: %s [--seconds N] [--seed N] [--jobs N]\n", argv[0]);
            return 2;
        }
    }
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED || !hosts_make(argv[0])) {
        return 1;
    }
    for (double start = fault_now(); n_run < n_jobs && fault_now() - start < seconds; n_run++) {
        n_failed += !run_job(seed + (uint64_t)n_run);
    }
    hosts_remove();
    printf("%d jobs, %d failed\n", n_run, n_failed);
    return n_run == 0 || n_failed > 0;
}
