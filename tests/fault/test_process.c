// SPDX-License-Identifier: Apache-2.0
//
// test_process.c - processes that die, stop, fall silent, leave or skip something, in real jobs.
//
// Each case is a row of the table of failures in docs/troubleshooting.md: what is done to one rank,
// what every other rank must be told, and how soon. The harness sees to it that nothing stays
// behind.
#define _GNU_SOURCE
#include "fault.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define OVER 2    // numbers all ranks see: how many have seen the end,
#define AT_WORK 3 // how many have begun to work

static void check_soon(fault_rank_t *f, double seconds)
{
    double took = fault_since(f);
    if (took > seconds * LOADED) {
        check_failed(f->r, __FILE__, __LINE__, "was told after %.2f s, allowed are %.2f x %d: %s",
                     took, seconds, LOADED, f->r->text);
    }
}

static int victim_of(const rank_t *r)
{
    return r->size - 2; // neither the first rank of a host nor the last, where there is a choice
}

// --- Killed -------------------------------------------------------------------------------------

typedef struct fault_case {
    size_t n;       // elements of each operation; 0: the others do nothing
    int signal;     // sent to the victim by the lowest rank that is not it
    int victim;     // -1: victim_of
    double seconds; // within which everybody must know
    bool has_child; // the victim has forked one, which lives on with copies of all its descriptors
    bool spreads;   // the operations are broadcasts from rank 0
} fault_case_t;

static int victim_in(const rank_t *r, const fault_case_t *c)
{
    return c->victim >= 0 ? c->victim : victim_of(r);
}

static void *kill_later(void *arg)
{
    rank_t *r = ((void **)arg)[0];
    const fault_case_t *c = ((void **)arg)[1];
    usleep(150000);
    fault_mark(r);
    kill(fault_pid(r, victim_in(r, c)), c->signal);
    return NULL;
}

// As a data loader has it: it does nothing with what it inherited, and outlives its parent.
static void fork_child(fault_rank_t *f)
{
    pid_t child = fork();
    CHECK(f->r, child >= 0);
    if (child == 0) {
        rank_wait_for(f->r, rank_shared(f->r, OVER), f->r->size - 1);
        _exit(0);
    }
}

// The victim works on until the signal ends it.
static void be_victim(fault_rank_t *f, const fault_case_t *c)
{
    if (c->has_child) {
        fork_child(f);
    }
    rank_will_die(f->r);
    signal(c->signal, SIG_DFL); // sanitizers would end the process in their own way
    if (c->n > 0) {
        fault_work(f, c->n, 60);
    } else {
        fault_idle(f, 60);
    }
    check_failed(f->r, __FILE__, __LINE__, "the victim is still alive: %s", f->r->text);
}

static void killed(rank_t *r, void *arg)
{
    const fault_case_t *c = arg;
    int victim = victim_in(r, c);
    fault_rank_t *f = fault_open(r);
    pthread_t thread;
    void *pair[2] = {r, arg};
    f->spreads = c->spreads;
    rank_barrier(r);
    if (r->rank == victim) {
        be_victim(f, c);
    }
    bool kills = r->rank == (victim == 0 ? 1 : 0);
    if (kills) {
        CHECK_INT(r, pthread_create(&thread, NULL, kill_later, pair), 0);
    }
    rank_step(r, "works until rank %d is killed", victim);
    CHECK_STATUS(r, c->n > 0 ? fault_work(f, c->n, 10) : fault_idle(f, 10), HVD_PEER_LOST);
    check_soon(f, c->seconds);
    CHECK_NAMES(f, victim);
    if (r->layout == LAYOUT_ONE) { // the process table of the host has it
        char fate[64];
        snprintf(fate, sizeof fate, "its process was killed by signal %d (", c->signal);
        CHECK_HAS(r, r->text, fate);
    }
    if (kills) {
        pthread_join(thread, NULL);
    }
    CHECK(r, fault_step(f, "after", 10) != HVD_OK); // and so it stays
    CHECK_NAMES(f, victim);
    atomic_fetch_add(rank_shared(r, OVER), 1);
    fault_leave(f);
}

// Dies as soon as init has returned: what tells of it must be in place by then.
static void killed_at_once(rank_t *r, void *arg)
{
    const fault_case_t *c = arg;
    int victim = victim_in(r, c);
    fault_rank_t *f = fault_new(r);
    hvd_status_t status = fault_join(f);
    if (r->rank == victim) {
        CHECK_OK(r, status);
        rank_will_die(r);
        fault_mark(r);
        kill(getpid(), c->signal);
    }
    rank_step(r, "works until rank %d, which never did, is missed", victim);
    status = status == HVD_OK ? fault_work(f, c->n, 10) : status;
    CHECK_STATUS(r, status, HVD_PEER_LOST);
    check_soon(f, c->seconds);
    CHECK_NAMES(f, victim);
    fault_leave(f);
}

static void *kill_self_when_entered(void *arg)
{
    fault_rank_t *f = arg;
    fault_wait_logged(f, "by env, turn 1,", 10);
    fault_mark(f->r);
    kill(getpid(), SIGKILL);
    return NULL;
}

// Dies in the rendezvous, while the last rank has not come yet. Those who wait there are told at
// once, and the last when it comes: of the same rank, although by then all others have left too.
static void killed_while_starting(rank_t *r, void *arg)
{
    (void)arg;
    int victim = victim_of(r), last = r->size - 1;
    fault_rank_t *f = fault_new(r);
    pthread_t thread;

    if (r->rank == victim) {
        rank_will_die(r);
        CHECK_INT(r, pthread_create(&thread, NULL, kill_self_when_entered, f), 0);
    }
    if (r->rank == last) {
        rank_wait_for(r, rank_shared(r, OVER), r->size - 2);
        fault_mark(r);
    }
    rank_step(r, "starts, until rank %d is missed", victim);
    CHECK_STATUS(r, fault_join(f), HVD_PEER_LOST);
    check_soon(f, 0.5);
    CHECK_NAMES(f, victim);
    CHECK_HAS(r, r->text, "left before all ranks had started");
    atomic_fetch_add(rank_shared(r, OVER), 1);
    fault_leave(f);
}

// A rank that is killed while it starts leaves a segment with a name: the next job removes it, and
// not one that is in use.
static void starts_after_a_crash(rank_t *r, void *arg)
{
    (void)arg;
    static const char *const names[] = {"/hvd-test-abandoned", "/hvd-test-in-use"};
    const struct timespec long_ago[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    int kept = -1;
    for (size_t i = 0; r->rank == 0 && i < N_ELEMENTS(names); i++) {
        int fd = shm_open(names[i], O_CREAT | O_RDWR | O_CLOEXEC, 0600);
        CHECK(r, fd >= 0 && futimens(fd, long_ago) == 0);
        if (i == 0) {
            close(fd);
        } else {
            kept = fd;
            CHECK_INT(r, flock(kept, LOCK_SH), 0);
        }
    }
    fault_rank_t *f = fault_open(r);
    if (r->rank == 0) {
        CHECK(r, access("/dev/shm/hvd-test-abandoned", F_OK) != 0);
        CHECK(r, access("/dev/shm/hvd-test-in-use", F_OK) == 0);
        close(kept);
        shm_unlink(names[1]);
    }
    rank_barrier(r);
    fault_leave(f);
}

// --- Stopped ------------------------------------------------------------------------------------

// Past the limit everybody else is told; the one that continues is told too, and ends by itself.
static void stopped(rank_t *r, void *arg)
{
    const fault_case_t *c = arg;
    int victim = victim_in(r, c);
    fault_rank_t *f = fault_open(r);
    pthread_t thread;
    void *pair[2] = {r, arg};
    rank_barrier(r);
    bool stops = r->rank == (victim == 0 ? 1 : 0);
    if (stops) {
        CHECK_INT(r, pthread_create(&thread, NULL, kill_later, pair), 0);
    }
    rank_step(r, "works until rank %d is stopped", victim);
    CHECK_STATUS(r, c->n > 0 ? fault_work(f, c->n, 30) : fault_idle(f, 30), HVD_PEER_LOST);
    if (r->rank == victim) {
        check_soon(f, 2); // after it was continued
        CHECK_HAS(r, r->text, "did not run for");
        CHECK_HAS(r, r->text, "the other ranks have gone on without it. They said: ");
        CHECK(r, fault_logged(f, "this process did not run for"));
    } else {
        check_soon(f, c->seconds);
        CHECK_NAMES(f, victim);
        CHECK_HAS(r, r->text, "has been silent for");
        CHECK_HAS(r, r->text, "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS");
        bool watches = r->layout == LAYOUT_ONE && stops;
        if (watches) {
            CHECK_HAS(r, r->text, "stopped (state T)");
            CHECK(r, fault_logged(f, "has been silent for"));
            CHECK(r, fault_logged(f, "stopped (state T)"));
        }
        atomic_fetch_add(rank_shared(r, OVER), 1);
    }
    if (stops) {
        rank_wait_for(r, rank_shared(r, OVER), r->size - 1);
        fault_mark(r);
        kill(fault_pid(r, victim), SIGCONT);
        pthread_join(thread, NULL);
    }
    fault_leave(f);
}

// A short stop is only reported; the work goes on afterwards and is right.
static void stopped_briefly(rank_t *r, void *arg)
{
    (void)arg;
    int victim = victim_of(r);
    fault_rank_t *f = fault_open(r);

    rank_barrier(r);
    if (r->rank == 0) {
        kill(fault_pid(r, victim), SIGSTOP);
        fault_wait_logged(f, "has been silent for", 4);
        CHECK(r, fault_logged(f, "stopped (state T)"));
        kill(fault_pid(r, victim), SIGCONT);
        fault_wait_logged(f, "is heard again after", 2);
    }
    for (int i = 0; i < 20; i++) {
        CHECK_OK(r, fault_step(f, "goes on", 20000));
    }
    CHECK_OK(r, hvd_health(r->ctx, r->text, sizeof r->text));
    rank_barrier(r);
    fault_leave(f);
}

// Keeps the thread of the engine busy for a while: silent, but the kernel would let it run, as on a
// host with more work than cores.
static void spin(void *arg, hvd_handle_t handle, hvd_status_t status)
{
    (void)arg;
    (void)handle;
    (void)status;
    for (double end = fault_now() + 5; fault_now() < end;) {
    }
}

// Silent for more than twice the timeout, for want of a core: the others wait.
static void starved(rank_t *r, void *arg)
{
    (void)arg;
    int victim = victim_of(r);
    fault_rank_t *f = fault_open(r);

    hvd_handle_t handle;
    hvd_request_t barrier = {.op = HVD_BARRIER, .name = "busy"};
    barrier.done = r->rank == victim ? spin : NULL;
    CHECK_OK(r, hvd_submit(r->ctx, &barrier, &handle, r->text, sizeof r->text));
    if (r->rank == (victim == 0 ? 1 : 0)) {
        fault_wait_logged(f, "has more work than cores", 4);
        fault_wait_logged(f, "is heard again after", 6);
        atomic_fetch_add(rank_shared(r, OVER), 1);
    }
    rank_wait_for(r, rank_shared(r, OVER), 1); // in no operation: only the engine's thread is there
    CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
    hvd_release(r->ctx, handle);
    CHECK_OK(r, fault_step(f, "goes on", 20000));
    CHECK_OK(r, hvd_health(r->ctx, r->text, sizeof r->text));
    rank_barrier(r);
    fault_leave(f);
}

// --- Leaves -------------------------------------------------------------------------------------

// Ends without a word while the others work: exit(0) where nothing calls shutdown.
static void exits_normally(rank_t *r, void *arg)
{
    (void)arg;
    int victim = victim_of(r);
    fault_rank_t *f = fault_open(r);

    rank_barrier(r);
    if (r->rank == victim) {
        rank_wait_for(r, rank_shared(r, AT_WORK), r->size - 1);
        usleep(100000 * PATIENCE); // they wait in it
        fault_mark(r);
        _exit(0);
    }
    atomic_fetch_add(rank_shared(r, AT_WORK), 1);
    CHECK_STATUS(r, fault_work(f, 50000, 10), HVD_PEER_LOST);
    check_soon(f, 3);
    CHECK_NAMES(f, victim);
    CHECK_HAS(r, r->text, "its process ");
    CHECK_HAS(r, r->text, "waited in 'work'");
    fault_leave(f);
}

// Ends as Python does: shutdown at exit, while the others wait for something it never submitted.
static void shuts_down_early(rank_t *r, void *arg)
{
    (void)arg;
    int victim = victim_of(r);
    fault_rank_t *f = fault_open(r);
    char name[128];

    rank_barrier(r);
    if (r->rank == victim) {
        usleep(500000); // the others shall wait by then
        fault_mark(r);
        fault_leave(f);
        return;
    }
    rank_step(r, "waits for a rank that leaves");
    CHECK_STATUS(r, fault_work(f, 1000, 10), HVD_SHUTDOWN);
    check_soon(f, 3);
    CHECK_STARTS(r, r->text, "Horovod has been shut down.");
    fault_name(r, victim, name);
    name[0] = 'R';
    CHECK_HAS(r, r->text, name);
    CHECK_HAS(r, r->text, "left the job, but others wait in 'work'");
    fault_leave(f);
}

// --- Skips --------------------------------------------------------------------------------------

// One rank goes another way through the program. The job has shown its rhythm, so one line comes
// long before the minute of the knob.
static void skips(rank_t *r, void *arg)
{
    (void)arg;
    int victim = victim_of(r);
    char last[128];
    fault_rank_t *f = fault_open(r);
    f->flags = 0;
    snprintf(last, sizeof last, "Rank %d has not submitted 'step' for 1", victim);
    for (int i = 0; i < 40; i++) {
        CHECK_OK(r, fault_step(f, "step", 1000));
        usleep(1000);
    }
    if (r->rank == victim) {
        fault_wait_logged(f, last, 13);
    }
    rank_step(r, "waits for rank %d", victim);
    CHECK_OK(r, fault_step(f, "step", 1000));
    CHECK_INT(r, fault_n_logged(f, last), 1);
    CHECK_INT(r, fault_n_logged(f, "Missing ranks:"), 0);
    rank_barrier(r);
    fault_leave(f);
}

// It never comes: past the limit everybody is told, also the one that was missing.
static void never_comes(rank_t *r, void *arg)
{
    (void)arg;
    int victim = victim_of(r);
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    double start = fault_now();
    CHECK_STATUS(r, r->rank == victim ? fault_idle(f, 10) : fault_step(f, "waited for", 1000),
                 HVD_STALLED);
    CHECK_WITHIN(f, start, 4);
    CHECK_HAS(r, r->text, "Missing ranks:");
    CHECK_HAS(r, r->text, "[waited for]");
    char verdict[64];
    snprintf(verdict, sizeof verdict, "ank %d did not submit 'waited for' within 2 sec", victim);
    CHECK_HAS(r, r->text, verdict);
    CHECK_HAS(r, r->text, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS");
    fault_leave(f);
}

// The same name in different process sets is not the same tensor: both wait, and the report tells
// them apart. Different ideas of what a set is are told at once.
static void takes_another_set(rank_t *r, void *arg)
{
    (void)arg;
    const int members[] = {0, 1, 2}, other[] = {0, 1, r->rank == 2 ? 3 : 2};
    int64_t shape[1] = {1}, value = 1;
    int set = -1;
    fault_rank_t *f = fault_open(r);
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, other, 3, &set, r->text, sizeof r->text),
                 HVD_MISMATCH);
    CHECK_HAS(r, r->text, "Mismatched process sets: rank 0 submitted [0, 1, 2] and ");
    CHECK_HAS(r, r->text, "[0, 1, 3]");
    CHECK_OK(r, hvd_process_set_add(r->ctx, members, 3, &set, r->text, sizeof r->text));
    hvd_tensor_t tensor = {.input = &value, .output = &value, .n_dims = 1, .shape = shape};
    hvd_request_t request = {
        .op = HVD_ALLREDUCE,
        .name = "loss",
        .dtype = HVD_INT64,
        .reduce = HVD_SUM,
        .process_set = r->rank == 2 || r->rank == 3 ? 0 : set,
        .tensors = &tensor,
        .n_tensors = 1,
    };
    rank_step(r, "waits in another set than others");
    hvd_handle_t handle;
    CHECK_OK(r, hvd_submit(r->ctx, &request, &handle, r->text, sizeof r->text));
    fault_wait_logged(f, "2: [loss of process set 1]", 3);
    fault_wait_logged(f, "[loss of process set 1] 0-1", 1);
    fault_wait_logged(f, "0: [loss]", 3);
    fault_wait_logged(f, "[loss] 2-3", 1);
    // Each now takes part in what it lacked.
    request.process_set = r->rank == 2 ? set : 0;
    CHECK_OK(r, r->rank < 3 ? rank_call(r, &request) : HVD_OK);
    CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
    hvd_release(r->ctx, handle);
    rank_barrier(r);
    fault_leave(f);
}

// --- Table --------------------------------------------------------------------------------------

static const fault_case_t kill_small = {.n = 10, .signal = SIGKILL, .victim = -1, .seconds = 0.5};
static const fault_case_t kill_large = {
    .n = 300000, .signal = SIGKILL, .victim = -1, .seconds = 0.5};
static const fault_case_t kill_first = {
    .n = 300000, .signal = SIGKILL, .victim = 0, .seconds = 0.5};
static const fault_case_t kill_receiver = {
    .n = 3000000, .signal = SIGKILL, .victim = -1, .seconds = 0.5, .spreads = true};
static const fault_case_t kill_root = {
    .n = 3000000, .signal = SIGKILL, .victim = 0, .seconds = 0.5, .spreads = true};
static const fault_case_t kill_idle = {.signal = SIGKILL, .victim = -1, .seconds = 0.5};
static const fault_case_t kill_parent = {
    .n = 50000, .signal = SIGKILL, .victim = -1, .seconds = 0.5, .has_child = true};
static const fault_case_t kill_idle_parent = {
    .signal = SIGKILL, .victim = -1, .seconds = 0.5, .has_child = true};
static const fault_case_t kill_at_once = {
    .n = 1000, .signal = SIGKILL, .victim = -1, .seconds = 0.5};
static const fault_case_t kill_first_at_once = {
    .n = 1000, .signal = SIGKILL, .victim = 0, .seconds = 0.5};
static const fault_case_t segfault = {.n = 1000, .signal = SIGSEGV, .victim = -1, .seconds = 0.5};
static const fault_case_t stop_busy = {.n = 50000, .signal = SIGSTOP, .victim = -1, .seconds = 4};
static const fault_case_t stop_idle = {.signal = SIGSTOP, .victim = -1, .seconds = 4};
static const fault_case_t stop_first = {.n = 1000, .signal = SIGSTOP, .victim = 0, .seconds = 4};

#define SHORT_HEARTBEAT                                                                            \
    {"HOROVOD_HEARTBEAT_WARNING_SECONDS=1", "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=3",                 \
     "HOROVOD_HEARTBEAT_INTERVAL_SECONDS=0.25"}

static const subtest_t subtests[] = {
    {.name = "killed, small", .fn = killed, .arg = (void *)&kill_small, .min_ranks = 3},
    {.name = "killed, large", .fn = killed, .arg = (void *)&kill_large, .min_ranks = 3},
    {.name = "killed, first rank", .fn = killed, .arg = (void *)&kill_first, .min_ranks = 3},
    {
        .name = "killed, receives",
        .fn = killed,
        .arg = (void *)&kill_receiver,
        .min_ranks = 3,
        .env = {"HOROVOD_ALGORITHM=broadcast=direct"},
    },
    {
        .name = "killed, sends",
        .fn = killed,
        .arg = (void *)&kill_root,
        .min_ranks = 3,
        .env = {"HOROVOD_ALGORITHM=broadcast=direct"},
    },
    {.name = "killed, idle", .fn = killed, .arg = (void *)&kill_idle, .min_ranks = 3},
    {.name = "killed, with a child", .fn = killed, .arg = (void *)&kill_parent, .min_ranks = 3},
    {
        .name = "killed, idle with a child",
        .fn = killed,
        .arg = (void *)&kill_idle_parent,
        .min_ranks = 3,
    },
    {.name = "killed, fault", .fn = killed, .arg = (void *)&segfault, .min_ranks = 3},
    {.name = "killed at once", .fn = killed_at_once, .arg = (void *)&kill_at_once, .min_ranks = 3},
    {
        .name = "first killed at once",
        .fn = killed_at_once,
        .arg = (void *)&kill_first_at_once,
        .min_ranks = 3,
    },
    {
        .name = "killed while starting",
        .fn = killed_while_starting,
        .min_ranks = 3,
        .env = {"HOROVOD_LOG_LEVEL=debug"},
    },
    {.name = "crashed before", .fn = starts_after_a_crash, .layouts = ONLY_LAYOUT(LAYOUT_ONE)},
    {
        .name = "stopped, busy",
        .fn = stopped,
        .arg = (void *)&stop_busy,
        .min_ranks = 3,
        .env = SHORT_HEARTBEAT,
    },
    {
        .name = "stopped, idle",
        .fn = stopped,
        .arg = (void *)&stop_idle,
        .min_ranks = 3,
        .env = SHORT_HEARTBEAT,
    },
    {
        .name = "stopped, first rank",
        .fn = stopped,
        .arg = (void *)&stop_first,
        .min_ranks = 3,
        .env = SHORT_HEARTBEAT,
    },
    {.name = "stopped briefly", .fn = stopped_briefly, .layouts = ONLY_LAYOUT(LAYOUT_ONE)},
    {
        .name = "starved",
        .fn = starved,
        .layouts = ONLY_LAYOUT(LAYOUT_ONE),
        .env = {"HOROVOD_HEARTBEAT_INTERVAL_SECONDS=0.25", "HOROVOD_HEARTBEAT_WARNING_SECONDS=1",
                "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=2"},
    },
    {.name = "skips", .fn = skips, .min_ranks = 3},
    {
        .name = "never comes",
        .fn = never_comes,
        .min_ranks = 3,
        .env = {"HOROVOD_STALL_CHECK_TIME_SECONDS=1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=2",
                "HOROVOD_HEARTBEAT_WARNING_SECONDS=60"}, // a busy machine is another matter
    },
    {
        .name = "takes another set",
        .fn = takes_another_set,
        .min_ranks = 4,
        .env = {"HOROVOD_STALL_CHECK_TIME_SECONDS=1", "HOROVOD_DYNAMIC_PROCESS_SETS=1"},
    },
    {.name = "exits normally", .fn = exits_normally, .min_ranks = 3},
    {.name = "shuts down early", .fn = shuts_down_early, .min_ranks = 3},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
