// SPDX-License-Identifier: Apache-2.0
//
// harness.c - see harness.h.
//
// The parent forks the ranks first and starts the rendezvous server afterwards, so that no process
// is forked while it has threads. Each rank waits at a pipe for the server's port. What ranks tell
// the parent (the step they are in, that they die on purpose) lies in memory they share with it.
#define _GNU_SOURCE
#include "harness.h"

#include "scene.h"

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define JOB_SECONDS 90            // more than any test of a job allows itself
#define GRACE_NS (10 * NS_PER_S)  // for the other ranks, after one has failed
#define LEFT_MS (6000 * PATIENCE) // for what is about to go: 2 s, times 3 on a busy machine
#define CALL_MS (60000 * PATIENCE)
#define FAILED_CHECK 99
#define SECRET_DIGITS 64

const char *ranks_server_address;

const char *const layout_names[N_LAYOUTS] = {
    [LAYOUT_ONE] = "one",
    [LAYOUT_APART] = "apart",
    [LAYOUT_BLOCKS] = "blocks",
    [LAYOUT_WOVEN] = "woven",
};

// What the ranks of a job and their parent see together.
typedef struct board {
    atomic_int shared[N_SHARED];
    atomic_bool dies[MAX_RANKS];
    char steps[MAX_RANKS][MAX_THREADS][STEP_BYTES];
} board_t;

struct job {
    int n_ranks;
    layout_t layout;
    const options_t *options;
    const char *const *env;
    rank_fn fn;
    void *arg;
    board_t *board;
    char secret[SECRET_DIGITS + 1];
    int port;
};

// --- Checks -------------------------------------------------------------------------------------

void check_failed(const rank_t *r, const char *file, int line, const char *format, ...)
{
    char what[2 * HVD_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    fprintf(stderr, "%s:%d: rank %d of %d (%s), %s: %s\n", file, line, r->rank, r->size,
            layout_names[r->layout], r->step, what);
    fflush(stderr);
    _exit(FAILED_CHECK); // no cleaning up: other ranks are not to be waited for
}

void rank_step(rank_t *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(r->step, STEP_BYTES, format, args);
    va_end(args);
}

void rank_will_die(rank_t *r)
{
    atomic_store(&r->job->board->dies[r->rank], true);
}

atomic_int *rank_shared(const rank_t *r, int i)
{
    return &r->job->board->shared[i];
}

rank_t rank_thread(const rank_t *r, int thread)
{
    rank_t mine = *r;
    mine.step = r->job->board->steps[r->rank][thread];
    mine.n_env = 0;
    return mine;
}

void rank_wait_for(rank_t *r, atomic_int *word, int value)
{
    uint64_t deadline_ns = deadline_in_ms(CALL_MS);
    while (atomic_load(word) != value) {
        if (clock_ns() > deadline_ns) {
            check_failed(r, __FILE__, __LINE__,
                         "waited in vain for a number to become %d; it is %d", value,
                         atomic_load(word));
        }
        usleep(500);
    }
}

// --- Random numbers -----------------------------------------------------------------------------

// The splitmix64 sequence: any seed will do.
uint64_t dice_next(dice_t *dice)
{
    uint64_t x = dice->state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

int dice_below(dice_t *dice, int n)
{
    return (int)(dice_next(dice) % (uint64_t)n);
}

void dice_shuffle(dice_t *dice, int *items, int n)
{
    for (int i = n - 1; i > 0; i--) {
        int j = dice_below(dice, i + 1);
        int kept = items[i];
        items[i] = items[j];
        items[j] = kept;
    }
}

// --- The environment of a rank ------------------------------------------------------------------

int layout_host(layout_t layout, int rank, int size)
{
    const int hosts[N_LAYOUTS] = {
        [LAYOUT_ONE] = 0,
        [LAYOUT_APART] = rank,
        [LAYOUT_BLOCKS] = rank < (size + 1) / 2 ? 0 : 1,
        [LAYOUT_WOVEN] = rank % 2,
    };
    return hosts[layout];
}

// Where a variable is, or n_env.
static int find_variable(const rank_t *r, const char *name)
{
    size_t bytes = strlen(name);
    int i = 0;
    while (i < r->n_env && (strncmp(r->env[i], name, bytes) != 0 || r->env[i][bytes] != '=')) {
        i++;
    }
    return i;
}

const char *rank_getenv(const rank_t *r, const char *name)
{
    int i = find_variable(r, name);
    return i < r->n_env ? r->env[i] + strlen(name) + 1 : NULL;
}

void rank_setenv(rank_t *r, const char *name, const char *value)
{
    int i = find_variable(r, name);
    if (i < r->n_env) {
        free(r->env[i]);
        r->env[i] = r->env[--r->n_env];
        r->env[r->n_env] = NULL;
    }
    if (value != NULL) {
        CHECK(r, r->n_env < MAX_ENV - 2);
        CHECK(r, asprintf(&r->env[r->n_env], "%s=%s", name, value) > 0);
        r->n_env++;
        r->env[r->n_env] = NULL;
    }
}

static void set_number(rank_t *r, const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    rank_setenv(r, name, text);
}

static void set_pair(rank_t *r, const char *pair)
{
    size_t name_bytes = strcspn(pair, "=");
    char name[128];
    CHECK(r, pair[name_bytes] == '=' && name_bytes < sizeof name);
    snprintf(name, sizeof name, "%.*s", (int)name_bytes, pair);
    rank_setenv(r, name, pair + name_bytes + 1);
}

// Where this rank sits, as a launcher would say it.
static void set_place(rank_t *r)
{
    int host = layout_host(r->layout, r->rank, r->size);
    int local_rank = 0;
    int local_size = 0;
    for (int other = 0; other < r->size; other++) {
        bool same = layout_host(r->layout, other, r->size) == host;
        local_size += same;
        local_rank += same && other < r->rank;
    }
    int cross_rank = 0;
    int cross_size = 0;
    for (int h = 0; h < r->size; h++) {
        int n = 0;
        for (int other = 0; other < r->size; other++) {
            n += layout_host(r->layout, other, r->size) == h;
        }
        cross_size += n > local_rank;
        cross_rank += n > local_rank && h < host;
    }
    char name[32];
    snprintf(name, sizeof name, "h%d", host);
    rank_setenv(r, "HOROVOD_HOSTNAME", name);
    set_number(r, "HOROVOD_RANK", r->rank);
    set_number(r, "HOROVOD_SIZE", r->size);
    set_number(r, "HOROVOD_LOCAL_RANK", local_rank);
    set_number(r, "HOROVOD_LOCAL_SIZE", local_size);
    set_number(r, "HOROVOD_CROSS_RANK", cross_rank);
    set_number(r, "HOROVOD_CROSS_SIZE", cross_size);
}

static void set_environment(rank_t *r)
{
    set_place(r);
    rank_setenv(r, "HOROVOD_RENDEZVOUS_ADDR", "127.0.0.1");
    set_number(r, "HOROVOD_RENDEZVOUS_PORT", r->job->port);
    rank_setenv(r, "HOROVOD_GLOO_IFACE", "lo");
    for (int i = 0; i < r->options->n_env; i++) {
        set_pair(r, r->options->env[i]);
    }
    for (int i = 0; r->job->env != NULL && r->job->env[i] != NULL; i++) {
        set_pair(r, r->job->env[i]);
    }
}

static rank_t new_rank(const job_t *job, int rank)
{
    rank_t r = {
        .rank = rank,
        .size = job->n_ranks,
        .layout = job->layout,
        .options = job->options,
        .job = job,
        .step = job->board->steps[rank][0],
    };
    snprintf(r.step, STEP_BYTES, "at the start");
    set_environment(&r);
    return r;
}

static void free_rank(rank_t *r)
{
    for (int i = 0; i < r->n_env; i++) {
        free(r->env[i]);
    }
}

// --- Life of a rank -----------------------------------------------------------------------------

hvd_status_t rank_try_open(rank_t *r, const hvd_options_t *more)
{
    hvd_options_t options = more != NULL ? *more : (hvd_options_t){0};
    int ends[2] = {-1, -1};
    if (r->is_launched) {
        return hvd_init(&options, &r->ctx, r->text, sizeof r->text);
    }
    if (!r->without_secret && r->size > 1) { // a world of one would leave the pipe open
        CHECK_INT(r, pipe(ends), 0);
        CHECK_INT(r, write(ends[1], r->job->secret, SECRET_DIGITS), SECRET_DIGITS);
        close(ends[1]);
        set_number(r, "HOROVOD_SECRET_FD", ends[0]);
    } else {
        rank_setenv(r, "HOROVOD_SECRET_FD", NULL);
    }
    options.env = (const char *const *)r->env;
    return hvd_init(&options, &r->ctx, r->text, sizeof r->text);
}

void rank_open(rank_t *r)
{
    rank_step(r, "init");
    CHECK_OK(r, rank_try_open(r, NULL));
}

void rank_close(rank_t *r)
{
    rank_step(r, "barrier before shutdown");
    rank_barrier(r);
    rank_leave(r);
}

void rank_leave(rank_t *r)
{
    rank_step(r, "shutdown");
    CHECK_OK(r, hvd_shutdown(r->ctx));
    r->ctx = NULL;
}

hvd_status_t rank_call(rank_t *r, const hvd_request_t *request)
{
    hvd_handle_t handle;
    hvd_status_t status = hvd_submit(r->ctx, request, &handle, r->text, sizeof r->text);
    if (status != HVD_OK) {
        return status;
    }
    status = hvd_wait(r->ctx, handle, CALL_MS);
    hvd_result_t result;
    if (hvd_result(r->ctx, handle, &result) == HVD_OK) {
        snprintf(r->text, sizeof r->text, "%s", result.text);
    }
    hvd_release(r->ctx, handle);
    return status;
}

void rank_barrier(rank_t *r)
{
    CHECK_OK(r, rank_call(r, &(hvd_request_t){.op = HVD_BARRIER, .flags = HVD_WAITS}));
}

void rank_check_sum(rank_t *r, const char *name, int set, int64_t mine, int64_t expected)
{
    int64_t shape[1] = {1};
    int64_t value = mine;
    hvd_tensor_t tensor = {.input = &value, .output = &value, .n_dims = 1, .shape = shape};
    hvd_request_t request = {
        .op = HVD_ALLREDUCE,
        .name = name,
        .dtype = HVD_INT64,
        .reduce = HVD_SUM,
        .process_set = set,
        .tensors = &tensor,
        .n_tensors = 1,
    };
    CHECK_OK(r, rank_call(r, &request));
    CHECK_INT(r, value, expected);
}

// --- A job of processes -------------------------------------------------------------------------

typedef struct children {
    pid_t pids[MAX_RANKS]; // 0: has ended
    int n, n_left;
    int n_failed;
} children_t;

static void child_main(job_t *job, int rank, int from_parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (read(from_parent, &job->port, sizeof job->port) != sizeof job->port) {
        _exit(FAILED_CHECK); // the parent has given up and said why
    }
    close(from_parent);
    rank_t r = new_rank(job, rank);
    job->fn(&r, job->arg);
    free_rank(&r);
    exit(0); // not _exit: the leak check runs at exit
}

static bool fork_ranks(job_t *job, children_t *children, int *to_children)
{
    fflush(NULL);
    for (int i = 0; i < job->n_ranks; i++) {
        int ends[2];
        if (pipe(ends) != 0 || (children->pids[i] = fork()) < 0) {
            fprintf(stderr, "cannot start rank %d: %s\n", i, strerror(errno));
            children->pids[i] = 0;
            return false;
        }
        if (children->pids[i] == 0) {
            close(ends[1]);
            for (int other = 0; other < i; other++) {
                close(to_children[other]);
            }
            child_main(job, i, ends[0]);
        }
        close(ends[0]);
        to_children[i] = ends[1];
        children->n++;
        children->n_left++;
    }
    return true;
}

static bool ended_well(const job_t *job, int rank, int state)
{
    if (WIFEXITED(state)) {
        if (WEXITSTATUS(state) != 0 && WEXITSTATUS(state) != FAILED_CHECK) {
            fprintf(stderr, "rank %d ended with exit status %d\n", rank, WEXITSTATUS(state));
        }
        return WEXITSTATUS(state) == 0;
    }
    if (atomic_load(&job->board->dies[rank])) {
        return true;
    }
    fprintf(stderr, "rank %d was killed by signal %d (%s), in: %s\n", rank, WTERMSIG(state),
            strsignal(WTERMSIG(state)), job->board->steps[rank][0]);
    return false;
}

// Ranks that die on purpose come last: until then the process table says how they ended.
static bool may_collect(const job_t *job, const children_t *children, int rank)
{
    bool others_live = false;
    for (int i = 0; i < children->n; i++) {
        others_live |= children->pids[i] != 0 && !atomic_load(&job->board->dies[i]);
    }
    return !others_live || !atomic_load(&job->board->dies[rank]);
}

static void reap_ended(const job_t *job, children_t *children)
{
    for (int i = 0; i < children->n; i++) {
        int state;
        if (children->pids[i] != 0 && may_collect(job, children, i) &&
            waitpid(children->pids[i], &state, WNOHANG) > 0) {
            children->pids[i] = 0;
            children->n_left--;
            children->n_failed += !ended_well(job, i, state);
        }
    }
}

static void show_steps(const job_t *job, int rank, const char *why)
{
    fprintf(stderr, "rank %d %s, in:", rank, why);
    for (int t = 0; t < MAX_THREADS; t++) {
        const char *step = job->board->steps[rank][t];
        fprintf(stderr, "%s%s", step[0] != '\0' && t > 0 ? " | " : " ", step);
    }
    fprintf(stderr, "\n");
}

// All are looked at before the first is killed: from then on the others are told of its end.
static void kill_rest(const job_t *job, children_t *children, const char *why)
{
    for (int i = 0; i < children->n; i++) {
        if (children->pids[i] != 0) {
            show_steps(job, i, why);
        }
    }
    for (int i = 0; i < children->n; i++) {
        if (children->pids[i] == 0) {
            continue;
        }
        kill(children->pids[i], SIGKILL);
        waitpid(children->pids[i], NULL, 0);
        children->pids[i] = 0;
        children->n_left--;
        children->n_failed++;
    }
}

static void reap_all(const job_t *job, children_t *children)
{
    uint64_t deadline_ns = clock_ns() + JOB_SECONDS * PATIENCE * NS_PER_S;
    bool grace = false;
    while (children->n_left > 0) {
        reap_ended(job, children);
        if (children->n_failed > 0 && !grace) {
            grace = true;
            deadline_ns = MIN(deadline_ns, clock_ns() + GRACE_NS);
        }
        if (clock_ns() > deadline_ns) {
            kill_rest(job, children, grace ? "did not end after another failed" : "hung");
        }
        usleep(1000);
    }
}

static bool make_secret(job_t *job, uint8_t secret[32])
{
    err_t err;
    if (random_bytes(secret, 32, &err) != HVD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return false;
    }
    for (int i = 0; i < 32; i++) {
        snprintf(job->secret + 2 * i, 3, "%02x", secret[i]);
    }
    return true;
}

static bool run_processes(job_t *job)
{
    uint8_t secret[32];
    if (!make_secret(job, secret)) {
        return false;
    }
    children_t children = {0};
    int to_children[MAX_RANKS];
    bool started = fork_ranks(job, &children, to_children);
    hvd_rendezvous_t *server = NULL;
    char text[HVD_TEXT_BYTES];
    if (started && hvd_rendezvous_start(ranks_server_address, 0, secret, &server, text,
                                        sizeof text) != HVD_OK) {
        fprintf(stderr, "%s\n", text);
        started = false;
    }
    for (int i = 0; i < children.n; i++) {
        int port = started ? hvd_rendezvous_port(server) : 0;
        if (started && write(to_children[i], &port, sizeof port) != sizeof port) {
            fprintf(stderr, "rank %d was gone before it began\n", i);
        }
        close(to_children[i]);
    }
    reap_all(job, &children);
    hvd_rendezvous_stop(server);
    return started && children.n_failed == 0;
}

static board_t *new_board(void)
{
    void *at =
        mmap(NULL, sizeof(board_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return at != MAP_FAILED ? at : NULL;
}

static bool run_job(job_t *job)
{
    job->board = new_board();
    if (job->board == NULL || job->n_ranks > MAX_RANKS) {
        fprintf(stderr, "no memory for a job of %d ranks\n", job->n_ranks);
        return false;
    }
    scene_t *before = scene_look();
    bool ok = run_processes(job);
    const char *left = scene_left(before, LEFT_MS);
    if (left[0] != '\0') {
        fprintf(stderr, "left behind:\n%s", left);
        ok = false;
    }
    scene_free(before);
    munmap(job->board, sizeof *job->board);
    return ok;
}

bool ranks_run(int n_ranks, layout_t layout, const char *const *env, rank_fn fn, void *arg)
{
    static const options_t no_options;
    job_t job = {
        .n_ranks = n_ranks,
        .layout = layout,
        .options = &no_options,
        .env = env,
        .fn = fn,
        .arg = arg,
    };
    return run_job(&job);
}

// --- A job of threads ---------------------------------------------------------------------------

typedef struct thread_start {
    const job_t *job;
    int rank;
} thread_start_t;

static void *thread_main(void *arg)
{
    const thread_start_t *start = arg;
    rank_t r = new_rank(start->job, start->rank);
    start->job->fn(&r, start->job->arg);
    free_rank(&r);
    return NULL;
}

void ranks_in_threads(const rank_t *outer, int n_ranks, layout_t layout, rank_fn fn, void *arg)
{
    job_t job = {
        .n_ranks = n_ranks,
        .layout = layout,
        .options = outer->options,
        .env = outer->job->env,
        .fn = fn,
        .arg = arg,
        .board = new_board(),
    };
    uint8_t secret[32];
    hvd_rendezvous_t *server;
    char text[HVD_TEXT_BYTES];
    CHECK(outer, job.board != NULL && make_secret(&job, secret));
    CHECK_OK(outer, hvd_rendezvous_start(NULL, 0, secret, &server, text, sizeof text));
    job.port = hvd_rendezvous_port(server);
    pthread_t threads[MAX_RANKS];
    thread_start_t starts[MAX_RANKS];
    for (int i = 0; i < n_ranks; i++) {
        starts[i] = (thread_start_t){.job = &job, .rank = i};
        CHECK_INT(outer, pthread_create(&threads[i], NULL, thread_main, &starts[i]), 0);
    }
    for (int i = 0; i < n_ranks; i++) {
        pthread_join(threads[i], NULL);
    }
    hvd_rendezvous_stop(server);
    munmap(job.board, sizeof *job.board);
}

// --- The program --------------------------------------------------------------------------------

static const char usage[] =
    "usage: %s [--ranks 2,3] [--layout one,apart,blocks,woven] [--env NAME=value]...\n"
    "       [--only PART] [--except PART] [--full] [--seed N] [--count N]\n"
    "       [--alone] fails where it cannot see all that jobs leave behind\n"
    "       [--launched] as a rank that mpirun has started: subtests run in that job\n";

static bool parse_ranks(options_t *o, char *list)
{
    o->n_ranks = 0;
    for (char *save = NULL, *word = strtok_r(list, ",", &save); word != NULL;
         word = strtok_r(NULL, ",", &save)) {
        int n = atoi(word);
        if (n < 1 || n > MAX_RANKS || o->n_ranks == MAX_RANKS) {
            return false;
        }
        o->ranks[o->n_ranks++] = n;
    }
    return o->n_ranks > 0;
}

static bool parse_layouts(options_t *o, char *list)
{
    o->n_layouts = 0;
    for (char *save = NULL, *word = strtok_r(list, ",", &save); word != NULL;
         word = strtok_r(NULL, ",", &save)) {
        int i = 0;
        while (i < N_LAYOUTS && strcmp(layout_names[i], word) != 0) {
            i++;
        }
        if (i == N_LAYOUTS || o->n_layouts == N_LAYOUTS) {
            return false;
        }
        o->layouts[o->n_layouts++] = (layout_t)i;
    }
    return o->n_layouts > 0;
}

static bool parse_option(options_t *o, int option)
{
    switch (option) {
    case 'r':
        return parse_ranks(o, optarg);
    case 'l':
        return parse_layouts(o, optarg);
    case 'e':
        o->env[o->n_env++] = optarg;
        return strchr(optarg, '=') != NULL && o->n_env < MAX_ENV;
    case 'o':
        o->only = optarg;
        return true;
    case 'x':
        o->except = optarg;
        return true;
    case 'm':
        o->launched = true;
        return true;
    case 'a':
        o->alone = true;
        return true;
    case 'f':
        o->full = true;
        return true;
    case 's':
        o->seed = strtoull(optarg, NULL, 10);
        return true;
    case 'c':
        o->count = atoi(optarg);
        return true;
    default:
        return false;
    }
}

static bool parse_options(int argc, char **argv, options_t *o)
{
    static const struct option long_options[] = {
        {"ranks", 1, 0, 'r'},
        {"layout", 1, 0, 'l'},
        {"env", 1, 0, 'e'},
        {"only", 1, 0, 'o'},
        {"except", 1, 0, 'x'},
        {"full", 0, 0, 'f'},
        {"seed", 1, 0, 's'},
        {"count", 1, 0, 'c'},
        {"launched", 0, 0, 'm'},
        {"alone", 0, 0, 'a'},
        {0},
    };
    *o = (options_t){
        .ranks = {2, 3}, .n_ranks = 2, .layouts = {LAYOUT_ONE, LAYOUT_APART}, .n_layouts = 2};
    o->seed = 1;
    int option;
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (!parse_option(o, option)) {
            fprintf(stderr, usage, argv[0]);
            return false;
        }
    }
    return optind == argc;
}

static bool wanted(const options_t *o, const subtest_t *s, int n_ranks, layout_t layout)
{
    return n_ranks >= s->min_ranks && (s->layouts == 0 || (s->layouts & ONLY_LAYOUT(layout))) &&
           (o->only == NULL || strstr(s->name, o->only) != NULL) &&
           (o->except == NULL || strstr(s->name, o->except) == NULL);
}

static bool run_subtest(const options_t *o, const subtest_t *s, int n_ranks, layout_t layout)
{
    job_t job = {
        .n_ranks = n_ranks,
        .layout = layout,
        .options = o,
        .env = s->env,
        .fn = s->fn,
        .arg = s->arg,
    };
    uint64_t start_ns = clock_ns();
    bool ok = run_job(&job);
    printf("%-6s %s, %d ranks, %s (%.2f s)\n", ok ? "ok" : "FAILED", s->name, n_ranks,
           layout_names[layout], (double)(clock_ns() - start_ns) / 1e9);
    fflush(stdout);
    return ok;
}

// Rank and size as mpirun of MPICH, Intel MPI and Open MPI tell them, horovodrun and srun.
static bool find_place(int *rank_p, int *size_p)
{
    static const char *const names[][2] = {{"PMI_RANK", "PMI_SIZE"},
                                           {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                           {"HOROVOD_RANK", "HOROVOD_SIZE"},
                                           {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}};
    for (size_t i = 0; i < N_ELEMENTS(names); i++) {
        const char *rank = getenv(names[i][0]), *size = getenv(names[i][1]);
        if (rank != NULL && size != NULL) {
            *rank_p = atoi(rank);
            *size_p = atoi(size);
            return true;
        }
    }
    return false;
}

// A check that fails ends the process, and mpirun the job.
static int run_launched(const options_t *o, const subtest_t *subtests, int n_subtests)
{
    job_t job = {.options = o, .layout = LAYOUT_ONE, .board = new_board()};
    int rank, n_run = 0;
    if (job.board == NULL || !find_place(&rank, &job.n_ranks) || job.n_ranks > MAX_RANKS) {
        fprintf(stderr, "--launched is for ranks that mpirun starts\n");
        return 2;
    }
    for (int i = 0; i < n_subtests; i++) {
        if (wanted(o, &subtests[i], job.n_ranks, job.layout)) {
            rank_t r = new_rank(&job, rank);
            r.is_launched = true;
            subtests[i].fn(&r, subtests[i].arg);
            free_rank(&r);
            n_run++;
        }
    }
    printf("rank %d of %d: %d subtests ok\n", rank, job.n_ranks, n_run);
    munmap(job.board, sizeof *job.board);
    return n_run == 0;
}

int ranks_main(int argc, char **argv, const subtest_t *subtests, int n_subtests)
{
    options_t o;
    if (!parse_options(argc, argv, &o)) {
        return 2;
    }
    if (o.launched) {
        return run_launched(&o, subtests, n_subtests);
    }
    if (!scene_make()) {
        fprintf(stderr,
                "%s needs root, or the right to make namespaces, to see which files and sockets "
                "jobs leave behind%s\n",
                argv[0], o.alone ? ": nothing was tested" : "");
        if (o.alone) {
            return 1;
        }
    }
    int n_run = 0;
    int n_failed = 0;
    for (int i = 0; i < n_subtests; i++) {
        int n_worlds = 0;
        for (int w = 0; w < o.n_ranks * o.n_layouts; w++) {
            int n_ranks = o.ranks[w / o.n_layouts];
            layout_t layout = o.layouts[w % o.n_layouts];
            if (wanted(&o, &subtests[i], n_ranks, layout) &&
                !(subtests[i].one_world_only && n_worlds > 0)) {
                n_worlds++;
                n_failed += !run_subtest(&o, &subtests[i], n_ranks, layout);
            }
        }
        n_run += n_worlds;
    }
    printf("%d jobs, %d failed\n", n_run, n_failed);
    return n_run == 0 || n_failed > 0;
}
