// SPDX-License-Identifier: Apache-2.0
//
// test_sim.c - is the simulated GPU itself right? Each rule of streams, events, memory and
// collectives is kept, and each mistake it is there to find is found.
//
// Settings are read once in a process, so every body runs in children of its own, one for each rank
// of a collective; they tell what went wrong on stderr and end with a status.
#define _GNU_SOURCE
#include "api.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

#define N 1024
#define BYTES (N * sizeof(float))
#define FLOAT32 7
#define SUM 0
#define PATIENCE_S 60

typedef struct place {
    int rank, n_ranks;
    nccl_id_t ids[2];
    void *shared; // a page that the children of a test have in common
} place_t;
typedef void (*body_fn)(const place_t *place);

// --- Children ------------------------------------------------------------------------------------

static void set_all(const char *environment)
{
    char text[512];
    snprintf(text, sizeof text, "%s", environment);
    for (char *at = strtok(text, " "); at != NULL; at = strtok(NULL, " ")) {
        putenv(strdup(at));
    }
}

// Runs the body in n_ranks children, and gives the worst status of waitpid.
static int run_ranks(int n_ranks, const char *environment, body_fn body)
{
    place_t place = {.n_ranks = n_ranks};
    place.shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_int_equal(ncclGetUniqueId(&place.ids[0]), 0);
    assert_int_equal(ncclGetUniqueId(&place.ids[1]), 0);
    pid_t children[8];
    fflush(NULL);
    for (int r = 0; r < n_ranks; r++) {
        if ((children[r] = fork()) == 0) {
            signal(SIGSEGV, SIG_DFL); // not cmocka's
            alarm(PATIENCE_S);
            set_all(environment);
            place.rank = r;
            body(&place);
            _exit(0);
        }
    }
    int worst = 0;
    for (int r = 0; r < n_ranks; r++) {
        int status;
        waitpid(children[r], &status, 0);
        worst = status != 0 ? status : worst;
    }
    munmap(place.shared, 4096);
    return worst;
}

static void *use_device(int device)
{
    void *context;
    MUST(cuInit(0) == 0);
    MUST(cuDevicePrimaryCtxRetain(&context, device) == 0);
    MUST(cuCtxSetCurrent(context) == 0);
    return context;
}

static void *new_stream(void)
{
    void *stream;
    MUST(cuStreamCreate(&stream, 1) == 0);
    return stream;
}

static void *new_event(void)
{
    void *event;
    MUST(cuEventCreate(&event, 2) == 0);
    return event;
}

static uintptr_t new_memory(size_t bytes)
{
    uintptr_t memory;
    MUST(cuMemAlloc_v2(&memory, bytes) == 0);
    return memory;
}

static float *new_pinned(float value)
{
    void *memory;
    MUST(cuMemHostAlloc(&memory, BYTES, 0) == 0);
    for (int i = 0; i < N; i++) {
        ((float *)memory)[i] = value;
    }
    return memory;
}

static bool all_are(const float *values, float value)
{
    for (int i = 0; i < N; i++) {
        if (values[i] != value) {
            return false;
        }
    }
    return true;
}

// --- Streams and memory --------------------------------------------------------------------------

static const char *const schedules[] = {
    "GPUSIM_SCHEDULE=eager",
    "GPUSIM_SCHEDULE=random GPUSIM_SEED=7",
    "GPUSIM_SCHEDULE=lazy",
    "GPUSIM_SCHEDULE=user-lazy",
};

// The default stream makes a tensor, a side stream copies it, the default stream reads the copy:
// how often is the result wrong if one of the two waits is left out?
static int wrong_copies(bool waits_for_producer, bool waits_for_copy)
{
    use_device(0);
    void *side = new_stream();
    uintptr_t source = new_memory(BYTES), copy = new_memory(BYTES);
    float *produced = new_pinned(3), *result = new_pinned(0), *before = new_pinned(-1);
    int n_wrong = 0;
    for (int i = 0; i < 20; i++) {
        void *ready = new_event(), *done = new_event();
        MUST(cuMemcpyHtoDAsync_v2(source, before, BYTES, NULL) == 0);
        MUST(cuMemcpyHtoDAsync_v2(copy, before, BYTES, NULL) == 0);
        MUST(cuCtxSynchronize() == 0);
        MUST(cuMemcpyHtoDAsync_v2(source, produced, BYTES, NULL) == 0);
        MUST(cuEventRecord(ready, NULL) == 0);
        if (waits_for_producer) {
            MUST(cuStreamWaitEvent(side, ready, 0) == 0);
        }
        MUST(cuMemcpyDtoDAsync_v2(copy, source, BYTES, side) == 0);
        MUST(cuEventRecord(done, side) == 0);
        if (waits_for_copy) {
            MUST(cuStreamWaitEvent(NULL, done, 0) == 0);
        }
        MUST(cuMemcpyDtoHAsync_v2(result, copy, BYTES, NULL) == 0);
        MUST(cuStreamSynchronize(NULL) == 0);
        n_wrong += !all_are(result, 3);
        MUST(cuCtxSynchronize() == 0);
        MUST(cuEventDestroy_v2(ready) == 0 && cuEventDestroy_v2(done) == 0);
    }
    return n_wrong;
}

static void right_order(const place_t *place)
{
    (void)place;
    MUST(wrong_copies(true, true) == 0);
    MUST(gpusim_mistakes() == 0);
}

static void test_right_order_is_right_under_every_schedule(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++) {
        assert_int_equal(run_ranks(1, schedules[i], right_order), 0);
    }
}

static void no_wait_for_producer(const place_t *place)
{
    (void)place;
    MUST(wrong_copies(false, true) > 0);
}

static void no_wait_for_copy(const place_t *place)
{
    (void)place;
    MUST(wrong_copies(true, false) > 0);
}

static void test_missing_waits_are_found(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, "GPUSIM_SCHEDULE=user-lazy", no_wait_for_producer), 0);
    assert_int_equal(run_ranks(1, "GPUSIM_SCHEDULE=random", no_wait_for_producer), 0);
    assert_int_equal(run_ranks(1, "GPUSIM_SCHEDULE=lazy", no_wait_for_copy), 0);
    assert_int_equal(run_ranks(1, "GPUSIM_SCHEDULE=random", no_wait_for_copy), 0);
}

// The same, but nobody says which streams: the context has recorded, and waits.
static void whole_contexts(const place_t *place)
{
    void *context = use_device(0);
    void *side = new_stream(), *ready = new_event(), *done = new_event();
    uintptr_t source = new_memory(BYTES), copy = new_memory(BYTES);
    float *produced = new_pinned(3), *result = new_pinned(0);
    (void)place;
    for (int i = 0; i < 10; i++) {
        MUST(cuMemsetD8Async(copy, 0, BYTES, side) == 0);
        MUST(cuMemsetD8Async(source, 0, BYTES, NULL) == 0);
        MUST(cuCtxSynchronize() == 0);
        MUST(cuMemcpyHtoDAsync_v2(source, produced, BYTES, NULL) == 0);
        MUST(cuCtxRecordEvent(context, ready) == 0);
        MUST(cuStreamWaitEvent(side, ready, 0) == 0);
        MUST(cuMemcpyDtoDAsync_v2(copy, source, BYTES, side) == 0);
        MUST(cuEventRecord(done, side) == 0);
        MUST(cuCtxWaitEvent(context, done) == 0);
        MUST(cuMemcpyDtoHAsync_v2(result, copy, BYTES, NULL) == 0);
        MUST(cuStreamSynchronize(NULL) == 0 && all_are(result, 3));
    }
    MUST(gpusim_mistakes() == 0);
}

static void test_contexts_record_and_wait(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++) {
        assert_int_equal(run_ranks(1, schedules[i], whole_contexts), 0);
    }
}

static void touch_from_host(const place_t *place)
{
    (void)place;
    use_device(0);
    volatile const char *memory = (const char *)new_memory(BYTES);
    (void)*memory;
}

static void test_host_access_is_a_fault(void **state)
{
    (void)state;
    int status = run_ranks(1, "ASAN_OPTIONS=handle_segv=0", touch_from_host);
    bool faulted = WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
    assert_true(faulted || (WIFEXITED(status) && WEXITSTATUS(status) != 0)); // with a sanitizer
}

static void set_flag(void *flag)
{
    atomic_store((atomic_int *)flag, 1);
}

static void use_after_free(const place_t *place)
{
    (void)place;
    use_device(0);
    void *stream = new_stream();
    uintptr_t memory = new_memory(BYTES), other = new_memory(BYTES);
    static atomic_int called;
    MUST(cuMemFree_v2(memory) == 0);
    MUST(cuMemsetD8Async(memory, 0, BYTES, stream) == 0); // found when it runs
    MUST(cuLaunchHostFunc(stream, set_flag, &called) == 0);
    MUST(cuStreamSynchronize(stream) == 700);
    MUST(cuMemsetD8Async(other, 0, BYTES, stream) == 700); // the error sticks
    MUST(atomic_load(&called) == 0); // and no host function is called on a broken device
    MUST(gpusim_mistakes() == 1 && strstr(gpusim_last_mistake(), "freed") != NULL);
    MUST(cuMemFree_v2(memory) == 1);
}

static void past_the_end(const place_t *place)
{
    (void)place;
    use_device(0);
    uintptr_t memory = new_memory(512);
    new_memory(512);
    MUST(cuMemsetD8Async(memory, 0, 513, NULL) == 0);
    MUST(cuCtxSynchronize() == 700);
}

static void test_memory_mistakes_are_found(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, "", use_after_free), 0);
    assert_int_equal(run_ranks(1, "", past_the_end), 0);
}

static void wrong_device(const place_t *place)
{
    (void)place;
    MUST(cuInit(0) == 0);
    MUST(cuStreamSynchronize(NULL) == 201); // no context is current
    void *first = use_device(0), *stream = new_stream();
    void *second = use_device(1), *event = new_event();
    MUST(cuEventRecord(event, stream) == 400);
    MUST(cuEventRecord(event, NULL) == 0); // the default stream of device 1
    MUST(cuCtxPushCurrent_v2(first) == 0);
    MUST(cuEventRecord(event, NULL) == 400);        // of device 0
    MUST(cuStreamWaitEvent(stream, event, 0) == 0); // devices may wait for each other
    MUST(cuCtxPopCurrent_v2(&second) == 0 && second == first);
    MUST(cuEventRecord(event, NULL) == 0);
    MUST(cuEventDestroy_v2(event) == 0 && cuEventQuery(event) == 400);
    MUST(cuStreamDestroy_v2(stream) == 0 && cuStreamQuery(stream) == 400);
}

static void test_wrong_devices_and_handles_are_refused(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, "GPUSIM_DEVICES=2", wrong_device), 0);
}

static void legacy_order(const place_t *place)
{
    (void)place;
    use_device(0);
    void *blocking, *free_one = new_stream();
    MUST(cuStreamCreate(&blocking, 0) == 0);
    uintptr_t a = new_memory(BYTES), b = new_memory(BYTES);
    float *ones = new_pinned(1), *result = new_pinned(0), *unordered = new_pinned(0);
    MUST(cuMemcpyHtoDAsync_v2(a, ones, BYTES, blocking) == 0);
    MUST(cuMemcpyDtoDAsync_v2(b, a, BYTES, NULL) == 0);          // waits for it without being told
    MUST(cuMemcpyDtoHAsync_v2(result, b, BYTES, blocking) == 0); // and so does this
    MUST(cuMemcpyDtoHAsync_v2(unordered, b, BYTES, free_one) == 0);
    MUST(cuStreamSynchronize(free_one) == 0);
    MUST(!all_are(unordered, 1)); // under a lazy schedule nothing else has run
    MUST(cuStreamSynchronize(blocking) == 0);
    MUST(all_are(result, 1));
}

static void test_default_stream_orders_blocking_ones(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, "GPUSIM_SCHEDULE=lazy GPUSIM_LAZY_MS=1000", legacy_order), 0);
}

static void pinned_and_pageable(const place_t *place)
{
    (void)place;
    use_device(0);
    void *stream = new_stream();
    uintptr_t a = new_memory(BYTES), b = new_memory(BYTES);
    float *pinned = new_pinned(1);
    static float pageable[N], result[N];
    memcpy(pageable, pinned, BYTES);
    MUST(cuMemcpyHtoDAsync_v2(a, pinned, BYTES, stream) == 0);
    MUST(cuMemcpyHtoDAsync_v2(b, pageable, BYTES, stream) == 0);
    memset(pinned, 0, BYTES); // too early: the copy reads it later
    memset(pageable, 0, BYTES);
    MUST(cuMemcpyDtoHAsync_v2(result, a, BYTES, stream) == 0);
    MUST(all_are(result, 0));
    MUST(cuMemcpyDtoHAsync_v2(result, b, BYTES, stream) == 0); // pageable: it is there at once
    MUST(all_are(result, 1));
}

static void test_pinned_memory_is_read_later(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, "GPUSIM_SCHEDULE=lazy", pinned_and_pageable), 0);
}

static void out_of_memory(const place_t *place)
{
    (void)place;
    use_device(0);
    void *pinned;
    uintptr_t memory = new_memory(900 << 10), more;
    MUST(cuMemAlloc_v2(&more, 200 << 10) == 2);
    MUST(cuMemFree_v2(memory) == 0);
    MUST(cuMemAlloc_v2(&more, 200 << 10) == 0);
    MUST(cuMemHostAlloc(&pinned, 64, 0) == 0);
    MUST(cuMemHostAlloc(&pinned, 64, 0) == 2); // the second is told to fail
    MUST(cuMemHostAlloc(&pinned, 64, 0) == 0);
}

static void test_memory_ends_on_demand(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, "GPUSIM_MEMORY_MB=1 GPUSIM_FAIL=host_alloc:2", out_of_memory), 0);
}

static void capture(const place_t *place)
{
    (void)place;
    use_device(0);
    void *stream = new_stream(), *joined = new_stream(), *event = new_event(), *graph;
    uintptr_t memory = new_memory(BYTES);
    int capturing;
    float *ones = new_pinned(1), *result = new_pinned(0);
    MUST(cuStreamBeginCapture_v2(stream, 0) == 0);
    MUST(cuStreamIsCapturing(stream, &capturing) == 0 && capturing == 1);
    MUST(cuMemcpyHtoDAsync_v2(memory, ones, BYTES, stream) == 0); // drawn, not done
    MUST(cuEventRecord(event, stream) == 0);
    MUST(cuStreamWaitEvent(joined, event, 0) == 0);
    MUST(cuStreamIsCapturing(joined, &capturing) == 0 && capturing == 1);
    MUST(cuStreamEndCapture(stream, &graph) == 0);
    MUST(cuStreamIsCapturing(joined, &capturing) == 0 && capturing == 0);
    MUST(cuMemcpyDtoHAsync_v2(result, memory, BYTES, stream) == 0);
    MUST(cuStreamSynchronize(stream) == 0 && !all_are(result, 1));
    MUST(cuStreamBeginCapture_v2(stream, 0) == 0);
    MUST(cuStreamSynchronize(stream) == 900); // not while it is captured
    MUST(cuStreamEndCapture(stream, &graph) == 901);
}

static void test_capture(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, "", capture), 0);
}

// --- Seeds and logs ------------------------------------------------------------------------------

static void race(const place_t *place)
{
    use_device(0);
    void *streams[2] = {new_stream(), new_stream()};
    uintptr_t memory = new_memory(BYTES);
    float *ones = new_pinned(1), *twos = new_pinned(2), *result = new_pinned(0);
    for (int i = 0; i < 20; i++) {
        MUST(cuMemcpyHtoDAsync_v2(memory, ones, BYTES, streams[0]) == 0);
        MUST(cuMemcpyHtoDAsync_v2(memory, twos, BYTES, streams[1]) == 0);
    }
    MUST(cuCtxSynchronize() == 0);
    MUST(cuMemcpyDtoHAsync_v2(result, memory, BYTES, streams[0]) == 0);
    MUST(cuCtxSynchronize() == 0);
    *(float *)place->shared = result[0];
    MUST(all_are(result, result[0]));
}

static size_t read_file(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t n = fread(text, 1, bytes, file);
    fclose(file);
    return n;
}

static void test_a_log_can_be_replayed(void **state)
{
    (void)state;
    char first[64], second[64], settings[256];
    static char log_a[8192], log_b[8192];
    snprintf(first, sizeof first, "/tmp/gpusim-%d-a.log", (int)getpid());
    snprintf(second, sizeof second, "/tmp/gpusim-%d-b.log", (int)getpid());
    for (int seed = 1; seed <= 3; seed++) {
        snprintf(settings, sizeof settings, "GPUSIM_SCHEDULE=random GPUSIM_SEED=%d GPUSIM_LOG=%s",
                 seed, first);
        assert_int_equal(run_ranks(1, settings, race), 0);
        snprintf(settings, sizeof settings, "GPUSIM_REPLAY=%s GPUSIM_LOG=%s", first, second);
        assert_int_equal(run_ranks(1, settings, race), 0);
        size_t n = read_file(first, log_a, sizeof log_a);
        assert_true(n > 0);
        assert_int_equal(read_file(second, log_b, sizeof log_b), n);
        assert_memory_equal(log_a, log_b, n);
    }
    unlink(first);
    unlink(second);
}

// --- Collectives ---------------------------------------------------------------------------------

typedef struct rank {
    void *comm, *stream;
    uintptr_t memory;
    float *host;
} rank_t;

static rank_t join_ranks(const place_t *place)
{
    use_device(place->rank);
    rank_t r = {.stream = new_stream()};
    MUST(ncclCommInitRank(&r.comm, place->n_ranks, place->ids[0], place->rank) == 0);
    r.memory = new_memory(BYTES * 4);
    r.host = new_pinned((float)place->rank + 1);
    MUST(cuMemcpyHtoDAsync_v2(r.memory, r.host, BYTES, r.stream) == 0);
    return r;
}

static int async_error(void *comm)
{
    int result;
    MUST(ncclCommGetAsyncError(comm, &result) == 0);
    return result;
}

static void collectives(const place_t *place)
{
    rank_t r = join_ranks(place);
    int n = place->n_ranks, total = n * (n + 1) / 2, op;
    void *at = (void *)r.memory, *behind = (void *)(r.memory + BYTES);
    float factor = 0.5f;
    MUST(ncclRedOpCreatePreMulSum(&op, &factor, FLOAT32, 1, r.comm) == 0);
    MUST(ncclAllReduce(at, behind, N, FLOAT32, op, r.comm, r.stream) == 0);
    MUST(cuMemcpyDtoHAsync_v2(r.host, (uintptr_t)behind, BYTES, r.stream) == 0);
    MUST(cuStreamSynchronize(r.stream) == 0);
    MUST(all_are(r.host, (float)total * factor));
    MUST(ncclAllReduce(at, at, N, FLOAT32, SUM, r.comm, r.stream) == 0);
    MUST(ncclBroadcast(at, behind, N, FLOAT32, n - 1, r.comm, r.stream) == 0);
    MUST(cuMemcpyDtoHAsync_v2(r.host, (uintptr_t)behind, BYTES, r.stream) == 0);
    MUST(cuStreamSynchronize(r.stream) == 0);
    MUST(all_are(r.host, (float)total));
    MUST(ncclAllGather(at, behind, N / 2, FLOAT32, r.comm, r.stream) == 0);
    MUST(ncclReduceScatter(behind, at, N / 2, FLOAT32, SUM, r.comm, r.stream) == 0);
    MUST(cuMemcpyDtoHAsync_v2(r.host, r.memory, BYTES / 2, r.stream) == 0);
    MUST(cuStreamSynchronize(r.stream) == 0);
    MUST(r.host[0] == (float)(total * n) && r.host[N / 2 - 1] == r.host[0]);
    MUST(async_error(r.comm) == 0 && gpusim_mistakes() == 0);
    MUST(ncclCommDestroy(r.comm) == 0);
    MUST(ncclAllReduce(at, at, N, FLOAT32, SUM, r.comm, r.stream) == 4); // destroyed
}

static void messages_in_a_group(const place_t *place)
{
    rank_t r = join_ranks(place);
    uintptr_t out = r.memory + BYTES;
    size_t n = N / (size_t)place->n_ranks;
    MUST(ncclGroupStart() == 0);
    for (int peer = 0; peer < place->n_ranks; peer++) {
        size_t at = (size_t)peer * n * sizeof(float);
        MUST(ncclSend((void *)(r.memory + at), n, FLOAT32, peer, r.comm, r.stream) == 0);
        MUST(ncclRecv((void *)(out + at), n, FLOAT32, peer, r.comm, r.stream) == 0);
    }
    MUST(cuStreamSynchronize(r.stream) == 0); // would hang if the group had been queued in parts
    MUST(ncclGroupEnd() == 0);
    MUST(cuMemcpyDtoHAsync_v2(r.host, out, BYTES, r.stream) == 0);
    MUST(cuStreamSynchronize(r.stream) == 0);
    for (int peer = 0; peer < place->n_ranks; peer++) {
        MUST(r.host[(size_t)peer * n] == (float)peer + 1);
    }
    MUST(ncclGroupEnd() == 5); // none is open
}

static void test_collectives(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof schedules / sizeof schedules[0]; i++) {
        assert_int_equal(run_ranks(2, schedules[i], collectives), 0);
        assert_int_equal(run_ranks(2, schedules[i], messages_in_a_group), 0);
    }
    assert_int_equal(run_ranks(3, "GPUSIM_DEVICES=3", collectives), 0);
    assert_int_equal(run_ranks(3, "GPUSIM_DEVICES=3", messages_in_a_group), 0);
}

// Waits until the communicator has that error, and aborts it: the stream goes on, with garbage.
static void expect_error(rank_t *r, int expected)
{
    for (int i = 0; i < 3000 && async_error(r->comm) != expected; i++) {
        usleep(10000);
    }
    MUST(async_error(r->comm) == expected);
    MUST(cuStreamQuery(r->stream) == 600); // it hangs
    MUST(ncclCommAbort(r->comm) == 0);
    MUST(cuStreamSynchronize(r->stream) == 0);
}

static void disagree(const place_t *place)
{
    rank_t r = join_ranks(place);
    void *at = (void *)r.memory;
    size_t n = place->rank == 0 ? N : N / 2;
    MUST(ncclAllReduce(at, at, n, FLOAT32, SUM, r.comm, r.stream) == 0);
    expect_error(&r, 5);
    MUST(strstr(gpusim_last_mistake(), "1024") != NULL);
    MUST(strstr(gpusim_last_mistake(), "512") != NULL);
}

static void lose_a_rank(const place_t *place)
{
    rank_t r = join_ranks(place);
    void *at = (void *)r.memory;
    if (place->rank == 1) {
        MUST(cuStreamSynchronize(r.stream) == 0);
        _exit(0);
    }
    MUST(ncclAllReduce(at, at, N, FLOAT32, SUM, r.comm, r.stream) == 0);
    expect_error(&r, 6);
    MUST(cuMemcpyDtoHAsync_v2(r.host, r.memory, BYTES, r.stream) == 0);
    MUST(cuStreamSynchronize(r.stream) == 0);
    MUST(!all_are(r.host, 1) && !all_are(r.host, 3)); // neither the old values nor a result
}

static void test_errors_come_later_and_aborts_wake(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, "", disagree), 0);
    assert_int_equal(run_ranks(2, "GPUSIM_SCHEDULE=random", lose_a_rank), 0);
}

static void cross_orders(const place_t *place)
{
    rank_t r = join_ranks(place);
    void *second, *other = new_stream();
    uintptr_t more = new_memory(BYTES);
    static atomic_int begun;
    MUST(ncclCommInitRank(&second, 2, place->ids[1], place->rank) == 0);
    bool first = place->rank == 0;
    MUST(cuLaunchHostFunc(r.stream, set_flag, &begun) == 0);
    MUST(ncclAllReduce((void *)r.memory, (void *)r.memory, N, FLOAT32, SUM, first ? r.comm : second,
                       r.stream) == 0);
    while (atomic_load(&begun) == 0) {
        usleep(1000);
    }
    usleep(500000); // it is in the allreduce, which is next
    MUST(ncclAllReduce((void *)more, (void *)more, N, FLOAT32, SUM, first ? second : r.comm,
                       other) == 0);
    void *stuck = first ? r.comm : second;
    for (int i = 0; i < 3000 && async_error(stuck) != 3; i++) {
        usleep(10000);
    }
    MUST(async_error(stuck) == 3);
    MUST(strstr(gpusim_last_mistake(), "wait for each other") != NULL);
    char me[32];
    snprintf(me, sizeof me, "process %d is in allreduce 1", (int)getpid());
    MUST(strstr(gpusim_last_mistake(), me) != NULL);
    atomic_int *n_found = place->shared;
    atomic_fetch_add(n_found, 1);
    for (int i = 0; i < 3000 && atomic_load(n_found) < 2; i++) {
        usleep(10000); // the other side reads this one's board
    }
}

static void orders_do_not_matter(const place_t *place)
{
    rank_t r = join_ranks(place);
    void *second, *other = new_stream();
    uintptr_t more = new_memory(BYTES);
    MUST(ncclCommInitRank(&second, 2, place->ids[1], place->rank) == 0);
    bool first = place->rank == 0;
    MUST(ncclAllReduce((void *)r.memory, (void *)r.memory, N, FLOAT32, SUM, first ? r.comm : second,
                       r.stream) == 0);
    MUST(ncclAllReduce((void *)more, (void *)more, N, FLOAT32, SUM, first ? second : r.comm,
                       other) == 0);
    MUST(cuCtxSynchronize() == 0 && gpusim_mistakes() == 0);
}

static void test_a_cycle_is_told_by_name(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, "GPUSIM_ONE_KERNEL=1 GPUSIM_DEADLOCK_MS=300", cross_orders), 0);
    assert_int_equal(run_ranks(2, "GPUSIM_ONE_KERNEL=0", orders_do_not_matter), 0);
}

static void hang_in_abort(const place_t *place)
{
    rank_t r = join_ranks(place);
    alarm(1);
    ncclCommAbort(r.comm);
}

static void test_an_abort_may_hang(void **state)
{
    (void)state;
    int status = run_ranks(1, "GPUSIM_ABORT_HANGS=1", hang_in_abort);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM);
}

static void make_without_blocking(const place_t *place)
{
    use_device(place->rank);
    nccl_config_t config = {.bytes = 24, .magic = 0xcafebeef, .version = 21400, .blocking = 0};
    void *comm, *stream = new_stream();
    uintptr_t memory = new_memory(BYTES);
    MUST(ncclCommInitRankConfig(&comm, 2, place->ids[0], place->rank, &config) == 7);
    int result = 7, n_polls = 0;
    for (; result == 7 && n_polls < 5000; n_polls++) {
        MUST(ncclCommGetAsyncError(comm, &result) == 0);
        usleep(1000);
    }
    MUST(result == 0 && n_polls > 1);
    MUST(ncclAllReduce((void *)memory, (void *)memory, N, FLOAT32, SUM, comm, stream) == 0);
    MUST(cuStreamSynchronize(stream) == 0);
}

static void use_too_early(const place_t *place)
{
    use_device(0);
    nccl_config_t config = {.bytes = 24, .magic = 0xcafebeef, .version = 21400, .blocking = 0};
    void *comm, *stream = new_stream();
    uintptr_t memory = new_memory(BYTES);
    MUST(ncclCommInitRankConfig(&comm, 2, place->ids[0], 0, &config) == 7); // nobody else comes
    MUST(ncclAllReduce((void *)memory, (void *)memory, N, FLOAT32, SUM, comm, stream) == 5);
    MUST(strstr(gpusim_last_mistake(), "still being made") != NULL);
}

static void share_a_device(const place_t *place)
{
    use_device(0);
    void *comm;
    MUST(ncclCommInitRank(&comm, 2, place->ids[0], place->rank) == 5);
}

static void wrong_stream(const place_t *place)
{
    rank_t r = join_ranks(place);
    use_device(1);
    void *stream = new_stream();
    uintptr_t memory = new_memory(BYTES);
    MUST(ncclAllReduce((void *)memory, (void *)memory, N, FLOAT32, SUM, r.comm, stream) == 5);
    use_device(0);
    MUST(ncclAllReduce((void *)memory, (void *)memory, N, FLOAT32, SUM, r.comm, r.stream) == 0);
    MUST(cuStreamSynchronize(r.stream) == 700);
    MUST(strstr(gpusim_last_mistake(), "memory of device 1") != NULL);
}

static void test_making_communicators(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, "GPUSIM_NCCL_INIT_MS=20", make_without_blocking), 0);
    assert_int_equal(run_ranks(1, "", use_too_early), 0);
    assert_int_equal(run_ranks(2, "", share_a_device), 0);
    assert_int_equal(run_ranks(1, "", wrong_stream), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_order_is_right_under_every_schedule),
        cmocka_unit_test(test_missing_waits_are_found),
        cmocka_unit_test(test_contexts_record_and_wait),
        cmocka_unit_test(test_host_access_is_a_fault),
        cmocka_unit_test(test_memory_mistakes_are_found),
        cmocka_unit_test(test_wrong_devices_and_handles_are_refused),
        cmocka_unit_test(test_default_stream_orders_blocking_ones),
        cmocka_unit_test(test_pinned_memory_is_read_later),
        cmocka_unit_test(test_memory_ends_on_demand),
        cmocka_unit_test(test_capture),
        cmocka_unit_test(test_a_log_can_be_replayed),
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_errors_come_later_and_aborts_wake),
        cmocka_unit_test(test_a_cycle_is_told_by_name),
        cmocka_unit_test(test_an_abort_may_hang),
        cmocka_unit_test(test_making_communicators),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
