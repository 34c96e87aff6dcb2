// SPDX-License-Identifier: Apache-2.0
//
// test_life.c - beginnings and ends: init again and again, several contexts in one process, ends in
// the middle of work, ranks that are killed, and that a long life costs no memory.
//
// Time limits are those a user would set: a rank that dies is noticed within seconds, by everyone.
#include "cases.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#define NOTICED_NS (5 * NS_PER_S * PATIENCE)

typedef struct vector {
    hvd_request_t request;
    hvd_tensor_t tensor;
    int64_t shape[1];
    char name[32];
    float *values;
    hvd_handle_t handle;
} vector_t;

// An allreduce in place of n ones, by name.
static void vector_new(rank_t *r, vector_t *v, const char *name, size_t n)
{
    *v = (vector_t){.shape = {(int64_t)n}};
    snprintf(v->name, sizeof v->name, "%s", name);
    v->values = malloc((n + 1) * sizeof *v->values);
    CHECK(r, v->values != NULL);
    for (size_t i = 0; i < n; i++) {
        v->values[i] = 1;
    }
    v->tensor =
        (hvd_tensor_t){.input = v->values, .output = v->values, .n_dims = 1, .shape = v->shape};
    v->request = (hvd_request_t){
        .op = HVD_ALLREDUCE,
        .name = v->name,
        .dtype = HVD_FLOAT32,
        .reduce = HVD_SUM,
        .tensors = &v->tensor,
        .n_tensors = 1,
    };
}

static void vector_submit(rank_t *r, vector_t *v)
{
    v->tensor.shape = v->shape; // wherever the vector lies now
    v->request.tensors = &v->tensor;
    v->request.name = v->name;
    CHECK_OK(r, hvd_submit(r->ctx, &v->request, &v->handle, r->text, sizeof r->text));
}

static void vector_check(rank_t *r, vector_t *v)
{
    CHECK_OK(r, hvd_wait(r->ctx, v->handle, 60000 * PATIENCE));
    hvd_release(r->ctx, v->handle);
    for (int64_t i = 0; i < v->shape[0]; i++) {
        CHECK_INT(r, v->values[i], r->size);
    }
}

static void sum_of_ranks(rank_t *r)
{
    rank_check_sum(r, "sum of ranks", 0, r->rank + 1, r->size * (r->size + 1) / 2);
}

// --- Again and again ----------------------------------------------------------------------------

static int open_files(void)
{
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) {
        n += dup2(fd, fd) == fd;
    }
    return n;
}

static void init_again_and_again(rank_t *r, void *arg)
{
    (void)arg;
    int files = 0;
    for (int turn = 0; turn < 20; turn++) {
        rank_step(r, "turn %d", turn);
        CHECK_OK(r, rank_try_open(r, NULL));
        vector_t v;
        vector_new(r, &v, "turn", 5000);
        vector_submit(r, &v);
        vector_check(r, &v);
        free(v.values);
        sum_of_ranks(r);
        rank_close(r);
        if (turn == 2) {
            files = open_files();
        }
    }
    CHECK_INT(r, open_files(), files);
}

// The last operation of a program must not be cut off because another rank got its result earlier.
static void last_operation_finishes(rank_t *r, void *arg)
{
    (void)arg;
    for (int turn = 0; turn < 10; turn++) {
        vector_t v;
        rank_step(r, "turn %d", turn);
        CHECK_OK(r, rank_try_open(r, NULL));
        vector_new(r, &v, "last", turn % 2 ? 300000 : 10000);
        vector_submit(r, &v);
        vector_check(r, &v);
        free(v.values);
        rank_leave(r);
    }
}

// --- Several contexts in one process ------------------------------------------------------------

static void rank_of_threads(rank_t *r, void *arg)
{
    (void)arg;
    int members[MAX_RANKS];
    for (int m = 0; m < r->size; m++) {
        members[m] = m;
    }
    rank_open(r);
    dice_t dice = {.state = 7};
    for (int i = 0; i < FEWER(200); i++) {
        op_case_t c = op_random(&dice, 0, members, r->size, 100 * KIB);
        rank_step(r, "operation %d", i);
        op_run(r, &c, NULL);
    }
    rank_close(r);
}

static void threads_as_ranks(rank_t *r, void *arg)
{
    (void)arg;
    if (r->rank == 0) {
        ranks_in_threads(r, r->size, r->layout, rank_of_threads, NULL);
    }
}

// Two jobs at the same time, each with a context in this process.
static void *second_job(void *arg)
{
    ranks_in_threads(arg, 2, LAYOUT_ONE, rank_of_threads, NULL);
    return NULL;
}

static void two_jobs(rank_t *r, void *arg)
{
    (void)arg;
    if (r->rank == 0) {
        pthread_t thread;
        CHECK_INT(r, pthread_create(&thread, NULL, second_job, r), 0);
        ranks_in_threads(r, 2, LAYOUT_APART, rank_of_threads, NULL);
        pthread_join(thread, NULL);
    }
}

// --- Ends in the middle of work -----------------------------------------------------------------

typedef struct outcome {
    atomic_int n_calls;
    atomic_int status;
} outcome_t;

static void note_outcome(void *arg, hvd_handle_t handle, hvd_status_t status)
{
    outcome_t *outcome = arg;
    (void)handle;
    atomic_store(&outcome->status, status);
    atomic_fetch_add(&outcome->n_calls, 1);
}

// Rank 0 stops while it has something in flight that the others never submit.
static void shutdown_with_work(rank_t *r, void *arg)
{
    (void)arg;
    outcome_t outcome = {0};
    vector_t v;
    rank_open(r);
    sum_of_ranks(r);
    char name[32];
    snprintf(name, sizeof name, "only on rank %d", r->rank);
    vector_new(r, &v, name, 10);
    v.request.done = note_outcome;
    v.request.arg = &outcome;
    vector_submit(r, &v);
    rank_barrier(r);
    uint64_t start_ns = clock_ns();
    if (r->rank == 0) {
        rank_leave(r);
    } else {
        rank_step(r, "waits for what cannot come");
        hvd_result_t result;
        CHECK_STATUS(r, hvd_wait(r->ctx, v.handle, 60000), HVD_SHUTDOWN);
        CHECK_OK(r, hvd_result(r->ctx, v.handle, &result));
        CHECK_STARTS(r, result.text, "Horovod has been shut down.");
        hvd_release(r->ctx, v.handle);
        rank_leave(r);
    }
    CHECK(r, clock_ns() - start_ns < NOTICED_NS);
    CHECK_INT(r, atomic_load(&outcome.n_calls), 1);
    CHECK_STATUS(r, atomic_load(&outcome.status), HVD_SHUTDOWN);
    free(v.values);
}

typedef struct inside {
    rank_t *r;
    hvd_handle_t handle;
    hvd_status_t status;
} inside_t;

static void *wait_for_ever(void *arg)
{
    inside_t *inside = arg;
    inside->status = hvd_wait(inside->r->ctx, inside->handle, HVD_FOREVER);
    return NULL;
}

static void *add_a_set(void *arg)
{
    inside_t *inside = arg;
    int ranks[] = {0};
    int id;
    inside->status = hvd_process_set_add(inside->r->ctx, ranks, 1, &id, NULL, 0);
    return NULL;
}

// Threads that are in the library come back when another stops it, and can still use the context.
static void stop_under_threads(rank_t *r, void *arg)
{
    (void)arg;
    vector_t v;
    char name[32];
    rank_open(r);
    snprintf(name, sizeof name, "only on rank %d", r->rank);
    vector_new(r, &v, name, 10);
    vector_submit(r, &v);
    inside_t waits = {.r = r, .handle = v.handle};
    inside_t adds = {.r = r, .status = HVD_SHUTDOWN};
    pthread_t waiter, adder;
    rank_barrier(r);
    CHECK_INT(r, pthread_create(&waiter, NULL, wait_for_ever, &waits), 0);
    if (r->rank == 0) { // the others never agree
        CHECK_INT(r, pthread_create(&adder, NULL, add_a_set, &adds), 0);
        usleep(50000);
    }
    rank_barrier(r);
    CHECK_OK(r, hvd_stop(r->ctx));
    pthread_join(waiter, NULL);
    if (r->rank == 0) {
        pthread_join(adder, NULL);
    }
    CHECK_STATUS(r, waits.status, HVD_SHUTDOWN);
    CHECK_STATUS(r, adds.status, HVD_SHUTDOWN);
    hvd_release(r->ctx, v.handle);
    CHECK_STATUS(r, rank_call(r, &v.request), HVD_SHUTDOWN);
    rank_leave(r);
    free(v.values);
}

// --- Killed -------------------------------------------------------------------------------------

// The victim dies while all are busy with one operation after the other; everyone else must be told
// who it was, soon, and in words that name it.
typedef struct killing {
    size_t n; // elements of each operation
    int victim_from_end;
} killing_t;

static void expect_loss(rank_t *r, vector_t *v, int victim, uint64_t since_ns)
{
    char name[32];
    snprintf(name, sizeof name, "rank %d", victim);
    hvd_status_t status = HVD_OK;
    while (status == HVD_OK) {
        CHECK(r, clock_ns() - since_ns < 60 * NS_PER_S);
        status = rank_call(r, &v->request);
    }
    CHECK_STATUS(r, status, HVD_PEER_LOST);
    CHECK_HAS(r, r->text, name);
    CHECK(r, hvd_health(r->ctx, r->text, sizeof r->text) != HVD_OK);
    CHECK_HAS(r, r->text, name);
    CHECK(r, hvd_status_scope(status) == HVD_SCOPE_PEER);
    CHECK(r, rank_call(r, &v->request) != HVD_OK); // and so it stays
}

static void *kill_soon(void *arg)
{
    rank_t *r = arg;
    usleep(100000);
    atomic_store(rank_shared(r, 0), 1);
    rank_will_die(r);
    kill(getpid(), SIGKILL);
    return NULL;
}

static void killed(rank_t *r, void *arg)
{
    const killing_t *killing = arg;
    int victim = r->size - 1 - killing->victim_from_end;
    vector_t v;
    rank_open(r);
    sum_of_ranks(r);
    vector_new(r, &v, "until the end", killing->n);
    if (r->rank == victim) {
        pthread_t thread;
        CHECK_INT(r, pthread_create(&thread, NULL, kill_soon, r), 0);
        while (rank_call(r, &v.request) == HVD_OK) {
        }
        check_failed(r, __FILE__, __LINE__, "the victim is still alive: %s", r->text);
    }
    rank_step(r, "works until rank %d is killed", victim);
    uint64_t start_ns = clock_ns();
    while (atomic_load(rank_shared(r, 0)) == 0) {
        if (rank_call(r, &v.request) != HVD_OK) {
            rank_wait_for(r, rank_shared(r, 0), 1); // it may only have failed because of the kill
            break;
        }
        CHECK(r, clock_ns() - start_ns < 60 * NS_PER_S);
    }
    uint64_t killed_ns = clock_ns();
    expect_loss(r, &v, victim, killed_ns);
    CHECK(r, clock_ns() - killed_ns < NOTICED_NS);
    free(v.values);
    rank_step(r, "shutdown after the loss");
    uint64_t stop_ns = clock_ns();
    hvd_shutdown(r->ctx);
    CHECK(r, clock_ns() - stop_ns < NOTICED_NS);
}

// Links are made after init, while the ranks already work: lets them settle.
static void settle(rank_t *r)
{
    sum_of_ranks(r);
    usleep(200000 * PATIENCE);
    sum_of_ranks(r);
}

// The others are not busy but wait for something the victim never submits.
static void killed_while_others_wait(rank_t *r, void *arg)
{
    (void)arg;
    int victim = r->size - 1;
    vector_t v;
    rank_open(r);
    settle(r);
    vector_new(r, &v, "never", 10);
    if (r->rank == victim) {
        rank_wait_for(r, rank_shared(r, 0), r->size - 1);
        rank_will_die(r);
        kill(getpid(), SIGKILL);
    }
    vector_submit(r, &v);
    atomic_fetch_add(rank_shared(r, 0), 1);
    rank_step(r, "waits for a rank that is killed");
    CHECK_STATUS(r, hvd_wait(r->ctx, v.handle, NOTICED_NS / NS_PER_MS), HVD_PEER_LOST);
    hvd_result_t result;
    char name[32];
    snprintf(name, sizeof name, "rank %d", victim);
    CHECK_OK(r, hvd_result(r->ctx, v.handle, &result));
    CHECK_HAS(r, result.text, name);
    hvd_release(r->ctx, v.handle);
    free(v.values);
    hvd_shutdown(r->ctx);
}

// Nobody waits, nobody is busy: the engine's own thread must notice.
static void killed_while_idle(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    settle(r);
    if (r->rank == r->size - 1) {
        rank_will_die(r);
        kill(getpid(), SIGKILL);
    }
    rank_step(r, "looks at its health");
    uint64_t start_ns = clock_ns();
    while (hvd_health(r->ctx, r->text, sizeof r->text) == HVD_OK) {
        CHECK(r, clock_ns() - start_ns < NOTICED_NS);
        usleep(2000);
    }
    CHECK_STATUS(r, hvd_health(r->ctx, r->text, sizeof r->text), HVD_PEER_LOST);
    hvd_shutdown(r->ctx);
}

// So early that others may be in init still, which then fails: they tell the same.
static void killed_at_once(rank_t *r, void *arg)
{
    (void)arg;
    rank_step(r, "init");
    hvd_status_t opened = rank_try_open(r, NULL);
    if (r->rank == r->size - 1) {
        CHECK_INT(r, opened, HVD_OK);
        rank_will_die(r);
        kill(getpid(), SIGKILL);
    }
    if (opened != HVD_OK) {
        CHECK_STATUS(r, opened, HVD_PEER_LOST);
        return;
    }
    rank_step(r, "looks at its health");
    uint64_t start_ns = clock_ns();
    while (hvd_health(r->ctx, r->text, sizeof r->text) == HVD_OK) {
        CHECK(r, clock_ns() - start_ns < 4 * NOTICED_NS);
        usleep(2000);
    }
    CHECK_STATUS(r, hvd_health(r->ctx, r->text, sizeof r->text), HVD_PEER_LOST);
    hvd_shutdown(r->ctx);
}

// --- A long life --------------------------------------------------------------------------------

static size_t resident_bytes(rank_t *r)
{
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    size_t kib = 0;
    CHECK(r, file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "VmRSS: %zu kB", &kib) == 1) {
            break;
        }
    }
    fclose(file);
    CHECK(r, kib > 0);
    return kib * KIB;
}

#define AT_ONCE 20

static void name_nth(vector_t *v, int i)
{
    static const int64_t sizes[] = {1, 100, 1000, 5000};
    bool once = i % 4 == 3;
    snprintf(v->name, sizeof v->name, once ? "once.%d" : "again.%d", once ? i : i % 300);
    v->shape[0] = sizes[once ? 0 : i % 300 % 4]; // the shape belongs to the name
}

// Most names come again, some never do: what is remembered of them must be forgotten. Mostly
// several at once, sometimes one by one, which takes other ways.
static void memory_stays_flat(rank_t *r, void *arg)
{
    (void)arg;
    int n_long = r->options->count > 0 ? r->options->count : FEWER(100000);
    size_t after_short = 0;
    vector_t v[AT_ONCE];
    rank_open(r);
    for (int k = 0; k < AT_ONCE; k++) {
        vector_new(r, &v[k], "", 5000);
    }
    for (int i = 0; i < n_long; i += AT_ONCE) {
        bool one_by_one = i / AT_ONCE % 10 == 0;
        rank_step(r, "operation %d", i);
        for (int k = 0; k < AT_ONCE; k++) {
            name_nth(&v[k], i + k);
            v[k].request.flags = one_by_one ? HVD_WAITS : 0;
            vector_submit(r, &v[k]);
            if (one_by_one) {
                CHECK_OK(r, hvd_wait(r->ctx, v[k].handle, HVD_FOREVER));
            }
        }
        for (int k = 0; k < AT_ONCE; k++) {
            CHECK_OK(r, hvd_wait(r->ctx, v[k].handle, HVD_FOREVER));
            hvd_release(r->ctx, v[k].handle);
        }
        if (i <= n_long / 10) {
            after_short = resident_bytes(r);
        }
    }
    size_t after_long = resident_bytes(r);
    if (after_long > after_short + 2 * MIB && !SANITIZED) {
        check_failed(r, __FILE__, __LINE__, "memory grew from %zu to %zu KiB", after_short / KIB,
                     after_long / KIB);
    }
    for (int k = 0; k < AT_ONCE; k++) {
        free(v[k].values);
    }
    rank_close(r);
}

// --- Much at once -------------------------------------------------------------------------------

#define N_MANY 500
#define MANY_FLOATS 2560 // 10 KiB

static void many_at_once(rank_t *r, void *arg)
{
    (void)arg;
    vector_t *many = calloc(N_MANY, sizeof *many);
    int order[N_MANY];
    dice_t dice = {.state = (uint64_t)r->rank};
    rank_open(r);
    for (int i = 0; i < N_MANY; i++) {
        order[i] = i;
    }
    for (int turn = 0; turn < 3; turn++) {
        dice_shuffle(&dice, order, N_MANY);
        rank_step(r, "turn %d", turn);
        for (int i = 0; i < N_MANY; i++) {
            char name[32];
            snprintf(name, sizeof name, "many.%d", order[i]);
            vector_new(r, &many[order[i]], name, MANY_FLOATS);
            vector_submit(r, &many[order[i]]);
        }
        for (int i = 0; i < N_MANY; i++) {
            vector_check(r, &many[i]);
            free(many[i].values);
        }
    }
    free(many);
    rank_close(r);
}

#define N_THREADS 4

typedef struct worker {
    rank_t r;
    int thread;
} worker_t;

static void *worker_main(void *arg)
{
    worker_t *w = arg;
    for (int i = 0; i < FEWER(500); i++) {
        char name[32];
        vector_t v;
        snprintf(name, sizeof name, "thread.%d.%d", w->thread, i % 10);
        rank_step(&w->r, "operation %d", i);
        vector_new(&w->r, &v, name, i % 5 == 4 ? 9000 : 64);
        v.request.flags = i % 2 ? HVD_WAITS : 0;
        vector_submit(&w->r, &v);
        vector_check(&w->r, &v);
        free(v.values);
    }
    return NULL;
}

static void threads_of_one_rank(rank_t *r, void *arg)
{
    (void)arg;
    worker_t workers[N_THREADS];
    pthread_t threads[N_THREADS];
    rank_open(r);
    for (int i = 0; i < N_THREADS; i++) {
        workers[i] = (worker_t){.r = rank_thread(r, 1 + i), .thread = i};
        CHECK_INT(r, pthread_create(&threads[i], NULL, worker_main, &workers[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    rank_close(r);
}

// --- Seeing inside ------------------------------------------------------------------------------

static bool file_has(rank_t *r, const char *path, const char *part)
{
    static char content[1 << 20];
    FILE *file = fopen(path, "r");
    CHECK(r, file != NULL);
    size_t n = fread(content, 1, sizeof content - 1, file);
    fclose(file);
    content[n] = '\0';
    return strstr(content, part) != NULL;
}

static void timeline(rank_t *r, void *arg)
{
    (void)arg;
    char path[64];
    static const char *const parts[] = {"traced", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START",
                                        "start_time_since_epoch_in_micros"};
    snprintf(path, sizeof path, "/tmp/hvd-test-timeline-%d.json", (int)getpid());
    rank_open(r);
    CHECK_OK(r, hvd_timeline_start(r->ctx, path, true, NULL, 0));
    rank_barrier(r);
    for (int i = 0; i < 5; i++) {
        rank_check_sum(r, "traced", 0, 1, r->size);
        vector_t v;
        vector_new(r, &v, "traced too", 5000);
        vector_submit(r, &v);
        vector_check(r, &v);
        free(v.values);
    }
    CHECK_OK(r, hvd_timeline_stop(r->ctx));
    for (size_t i = 0; r->rank == 0 && i < N_ELEMENTS(parts); i++) {
        rank_step(r, "looks for %s", parts[i]);
        CHECK(r, file_has(r, path, parts[i]));
    }
    unlink(path);
    rank_close(r);
}

static const killing_t small = {.n = 10};
static const killing_t large = {.n = 200000};
static const killing_t large_first = {.n = 200000, .victim_from_end = 1};

static const subtest_t subtests[] = {
    {.name = "init again and again", .fn = init_again_and_again},
    {.name = "last operation finishes", .fn = last_operation_finishes},
    {.name = "threads as ranks", .fn = threads_as_ranks},
    {.name = "two jobs", .fn = two_jobs, .one_world_only = true},
    {.name = "shutdown with work", .fn = shutdown_with_work, .min_ranks = 2},
    {
        .name = "stop under threads",
        .fn = stop_under_threads,
        .min_ranks = 2,
        .env = {"HOROVOD_DYNAMIC_PROCESS_SETS=1"},
    },
    {.name = "many at once", .fn = many_at_once},
    {.name = "threads of one rank", .fn = threads_of_one_rank},
    {.name = "timeline", .fn = timeline, .env = {"HOROVOD_TIMELINE=DYNAMIC"}},
    {.name = "killed, small", .fn = killed, .arg = (void *)&small, .min_ranks = 2},
    {.name = "killed, large", .fn = killed, .arg = (void *)&large, .min_ranks = 2},
    {.name = "killed, large, not last", .fn = killed, .arg = (void *)&large_first, .min_ranks = 2},
    {.name = "killed while others wait", .fn = killed_while_others_wait, .min_ranks = 2},
    {.name = "killed while idle", .fn = killed_while_idle, .min_ranks = 2},
    {
        .name = "killed at once",
        .fn = killed_at_once,
        .min_ranks = 3,
        .one_world_only = true,
        .env = {"HOROVOD_GLOO_TIMEOUT_SECONDS=3"},
    },
    {
        .name = "memory stays flat",
        .fn = memory_stays_flat,
        .env = {"HOROVOD_CACHE_CAPACITY=500"}, // full long before the first measurement
    },
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
