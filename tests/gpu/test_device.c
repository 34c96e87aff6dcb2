// SPDX-License-Identifier: Apache-2.0
//
// test_device.c - tensors in the memory of a (simulated) GPU, through the public API: every
// operation, both ends of it, and what happens when the device fails.
//
// The user's stream gets its values late: an operation that does not wait for it, or a stream that
// is not ordered behind the result, reads old ones. Rows of tests.list choose the schedule.
#define _GNU_SOURCE
#include "device_tensors.h"

#include <signal.h>

static void allreduces(rank_t *r, void *arg)
{
    static const size_t sizes[] = {1, 10, 3000, 300000};
    (void)arg;
    rank_open(r);
    void *stream = use_device(r);
    float total = (float)(r->size * (r->size + 1)) / 2;
    for (int round = 0; round < 5; round++) {
        for (size_t s = 0; s < N_ELEMENTS(sizes); s++) {
            rank_step(r, "round %d, %zu elements", round, sizes[s]);
            tensor_t in = tensor_new(r, sizes[s]), out = tensor_new(r, sizes[s]);
            int64_t shape[] = {(int64_t)in.n};
            void *at = (void *)in.device, *to = round % 2 == 0 ? at : (void *)out.device;
            hvd_tensor_t t = {.input = at, .output = to, .n_dims = 1, .shape = shape};
            hvd_request_t request = request_of(r, HVD_ALLREDUCE, "sum", &t, stream);
            tensor_fill(r, &in, (float)r->rank + 1, stream);
            hvd_handle_t handle = submit(r, &request);
            CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
            hvd_release(r->ctx, handle);
            tensor_check(r, round % 2 == 0 ? &in : &out, 0, in.n, total, (float)r->size, stream);
            tensor_free(r, &in);
            tensor_free(r, &out);
        }
    }
    rank_close(r);
}

// Many at once, a group, and memory that does not grow: the driver gives 40 blocks at most.
static void many_and_grouped(rank_t *r, void *arg)
{
    (void)arg;
    setenv("GPUSIM_FAIL", "host_alloc:40", 1);
    rank_open(r);
    void *stream = use_device(r);
    enum { N_TENSORS = 8 };
    tensor_t all[N_TENSORS];
    hvd_tensor_t tensors[N_TENSORS];
    int64_t shape[] = {1000};
    for (int i = 0; i < N_TENSORS; i++) {
        all[i] = tensor_new(r, 1000);
        void *at = (void *)all[i].device;
        tensors[i] = (hvd_tensor_t){.input = at, .output = at, .n_dims = 1, .shape = shape};
    }
    float total = (float)(r->size * (r->size + 1)) / 2;
    for (int round = 0; round < 20; round++) {
        rank_step(r, "round %d", round);
        hvd_handle_t handles[N_TENSORS];
        int n = round % 2 == 0 ? N_TENSORS : 1; // one by one, or as a group
        for (int i = 0; i < N_TENSORS; i++) {
            tensor_fill(r, &all[i], (float)r->rank + 1, stream);
        }
        for (int i = 0; i < n; i++) {
            char name[32];
            snprintf(name, sizeof name, "one.%d.%d", n, i);
            hvd_request_t request = request_of(r, HVD_ALLREDUCE, name, &tensors[i], stream);
            request.n_tensors = N_TENSORS / n;
            handles[i] = submit(r, &request);
        }
        for (int i = n - 1; i >= 0; i--) {
            CHECK_OK(r, hvd_wait_on(r->ctx, handles[i], stream, LONG_MS));
            hvd_release(r->ctx, handles[i]);
        }
        for (int i = 0; i < N_TENSORS; i++) {
            tensor_check(r, &all[i], 0, 1000, total, (float)r->size, stream);
        }
    }
    CHECK(r, gpusim_timed_events() == 0); // nobody has asked for times
    rank_close(r);
}

// A handle is released while its result is still under way; the next operation of that size, whose
// stream knows nothing of it, must not get its memory before.
static void released_early(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    void *stream = use_device(r), *other = use_device(r);
    enum { N_TENSORS = 30 };
    tensor_t all[N_TENSORS];
    int64_t shape[] = {1000};
    for (int i = 0; i < N_TENSORS; i++) {
        all[i] = tensor_new(r, 1000);
        tensor_fill(r, &all[i], (float)(i + 1), stream);
    }
    CHECK(r, cuCtxSynchronize() == 0);
    for (int i = 0; i < N_TENSORS; i++) {
        void *at = (void *)all[i].device;
        hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
        hvd_request_t request = request_of(r, HVD_ALLREDUCE, "early", &t, other);
        hvd_handle_t handle = submit(r, &request);
        CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
        hvd_release(r->ctx, handle);
    }
    for (int i = 0; i < N_TENSORS; i++) {
        float size = (float)r->size;
        tensor_check(r, &all[i], 0, 1000, (float)(i + 1) * size, size, stream);
    }
    rank_close(r);
}

// Results whose size is not known before: fetched to the device when they are there.
static void gathers(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    void *stream = use_device(r);
    for (int round = 0; round < 5; round++) {
        rank_step(r, "round %d", round);
        tensor_t in = tensor_new(r, 10 * ((size_t)r->rank + 1));
        tensor_t out = tensor_new(r, 10 * (size_t)(r->size * (r->size + 1) / 2));
        int64_t shape[] = {r->rank + 1, 10}, gathered[HVD_MAX_DIMS];
        hvd_tensor_t t = {.input = (void *)in.device, .n_dims = 2, .shape = shape};
        hvd_request_t request = request_of(r, HVD_ALLGATHER, "gather", &t, stream);
        tensor_fill(r, &in, (float)r->rank + 1, stream);
        hvd_handle_t handle = submit(r, &request);
        void *data;
        CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
        CHECK_OK(r, hvd_output(r->ctx, handle, 0, &data, gathered));
        CHECK(r, gathered[0] * gathered[1] == (int64_t)out.n);
        CHECK_OK(r, hvd_fetch(r->ctx, handle, 0, (void *)out.device, stream));
        CHECK(r, hvd_fetch(r->ctx, handle, 1, (void *)out.device, stream) == HVD_INVALID_ARGUMENT);
        hvd_release(r->ctx, handle); // its memory is used again only when the copy is over
        size_t at = 0;
        for (int m = 0; m < r->size; m++) {
            tensor_check(r, &out, at, 10 * ((size_t)m + 1), (float)m + 1, 1, stream);
            at += 10 * ((size_t)m + 1);
        }
        // A broadcast does not read what the others have.
        tensor_fill(r, &out, (float)r->rank + 1, stream);
        int64_t flat[] = {(int64_t)out.n};
        hvd_tensor_t whole = {
            .input = (void *)out.device, .output = (void *)out.device, .n_dims = 1, .shape = flat};
        request = request_of(r, HVD_BROADCAST, "broadcast", &whole, stream);
        request.root = r->size - 1;
        handle = submit(r, &request);
        CHECK_OK(r, hvd_wait(r->ctx, handle, LONG_MS)); // has landed: every stream sees it
        void *other = use_device(r);
        tensor_check(r, &out, 0, out.n, (float)r->size, 1, other);
        hvd_release(r->ctx, handle);
        tensor_free(r, &in);
        tensor_free(r, &out);
    }
    rank_close(r);
}

static void nap(void *ms)
{
    usleep((unsigned)(uintptr_t)ms * 1000);
}

// With work queued before the tensor is there that has no end yet, nothing but hvd_wait_on waits.
static void host_does_not_wait(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    void *stream = use_device(r);
    tensor_t in = tensor_new(r, 100);
    int64_t shape[] = {100};
    void *at = (void *)in.device;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, "late", &t, stream);
    for (int round = 0; round < 3; round++) { // memory is there after the first
        atomic_bool is_open = false;
        CHECK(r, cuLaunchHostFunc(stream, gate_pass, &is_open) == 0);
        CHECK(r, cuMemsetD8Async(in.device, 0, 100 * sizeof *in.host, stream) == 0);
        uint64_t since_ns = clock_ns();
        hvd_handle_t handle = submit(r, &request);
        uint64_t submitted_ns = clock_ns() - since_ns;
        CHECK(r, hvd_poll(r->ctx, handle) == HVD_IN_PROGRESS);
        CHECK(r, hvd_wait_on(r->ctx, handle, stream, 10) == HVD_TIMEOUT);
        CHECK(r, submitted_ns < GATE_MS * NS_PER_MS);
        atomic_store(&is_open, true);
        CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
        hvd_release(r->ctx, handle);
        tensor_check(r, &in, 0, in.n, 0, 0, stream);
    }
    rank_close(r);
}

// One rank brings its share on the device, the others from the host.
static void host_and_device_meet(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    void *stream = use_device(r);
    tensor_t in = tensor_new(r, 5000);
    int64_t shape[] = {5000};
    void *at = r->rank == 0 ? (void *)in.device : in.host;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, "mixed", &t, stream);
    tensor_fill(r, &in, (float)r->rank + 1, stream);
    request.flags = r->rank == 0 ? HVD_ON_DEVICE : 0;
    CHECK(r, r->rank == 0 || cuStreamSynchronize(stream) == 0);
    hvd_handle_t handle = submit(r, &request);
    CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
    hvd_release(r->ctx, handle);
    if (r->rank == 0) {
        float total = (float)(r->size * (r->size + 1)) / 2;
        tensor_check(r, &in, 0, in.n, total, (float)r->size, stream);
    }
    rank_close(r);
}

static void expect_refusal(rank_t *r, const hvd_request_t *request, hvd_status_t expected,
                           const char *part)
{
    hvd_handle_t handle;
    hvd_status_t status = hvd_submit(r->ctx, request, &handle, r->text, sizeof r->text);
    if (status != expected || strstr(r->text, part) == NULL) {
        check_failed(r, __FILE__, __LINE__, "expected %s with \"%s\", got %s: %s",
                     hvd_status_name(expected), part, hvd_status_name(status), r->text);
    }
}

static void refusals(rank_t *r, void *arg)
{
    (void)arg;
    setenv("GPUSIM_FAIL", "host_alloc:2", 1);
    rank_open(r);
    void *stream = use_device(r), *graph;
    tensor_t in = tensor_new(r, 100); // the first pinned memory
    int64_t shape[] = {100};
    void *at = (void *)in.device;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, "refused", &t, stream);
    expect_refusal(r, &request, HVD_NO_MEMORY, "pinned memory"); // the second
    CHECK(r, cuStreamBeginCapture_v2(stream, 0) == 0);
    expect_refusal(r, &request, HVD_UNSUPPORTED, "captured");
    CHECK(r, cuStreamEndCapture(stream, &graph) == 0);
    request.device = 1 - device_of(r);
    expect_refusal(r, &request, HVD_UNSUPPORTED, "one rank uses one GPU");
    request.device = device_of(r);
    tensor_fill(r, &in, 1, stream); // the job, and the name, go on
    hvd_handle_t handle = submit(r, &request);
    CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
    tensor_check(r, &in, 0, in.n, (float)r->size, (float)r->size, stream);
    hvd_release(r->ctx, handle);
    rank_close(r);
}

// A kernel of the program breaks the device of rank 0 before its tensor has come: all are told.
static void broken_device(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    void *stream = use_device(r);
    tensor_t in = tensor_new(r, 100), gone = tensor_new(r, 100);
    int64_t shape[] = {100};
    void *at = (void *)in.device;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, "broken", &t, stream);
    tensor_fill(r, &in, 1, stream);
    CHECK(r, cuLaunchHostFunc(stream, nap, (void *)100) == 0);
    if (r->rank == 0) {
        CHECK(r, cuMemFree_v2(gone.device) == 0);
        CHECK(r, cuLaunchHostFunc(stream, nap, (void *)200) == 0);
        CHECK(r, cuMemsetD8Async(gone.device, 0, 100, stream) == 0); // a mistake
    }
    hvd_handle_t handle = submit(r, &request);
    hvd_result_t result;
    CHECK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS) == HVD_SYSTEM);
    CHECK_OK(r, hvd_result(r->ctx, handle, &result));
    if (strstr(result.text, "illegal memory access") == NULL) {
        check_failed(r, __FILE__, __LINE__, "not told why: %s", result.text);
    }
    hvd_release(r->ctx, handle);
    rank_leave(r);
}

// For as long as it takes to see that a rank is lost.
static void pass_when_open(void *is_open)
{
    gate_wait(is_open, LONG_MS);
}

// A rank is lost while the tensors of the others are still being copied. The job is over then, but
// not these requests: the copies read the tensors, which must live as long.
static void lost_rank(rank_t *r, void *arg)
{
    static atomic_bool is_open;
    (void)arg;
    rank_open(r);
    void *stream = use_device(r);
    tensor_t in = tensor_new(r, 100);
    int64_t shape[] = {100};
    void *at = (void *)in.device;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, "held", &t, stream);
    CHECK(r, cuLaunchHostFunc(stream, pass_when_open, &is_open) == 0);
    hvd_handle_t handle = submit(r, &request);
    atomic_fetch_add(rank_shared(r, 0), 1);
    rank_wait_for(r, rank_shared(r, 0), r->size);
    if (r->rank == r->size - 1) {
        rank_will_die(r);
        kill(getpid(), SIGKILL);
    }
    uint64_t deadline_ns = deadline_in_ms(LONG_MS);
    while (hvd_health(r->ctx, r->text, sizeof r->text) == HVD_OK && clock_ns() < deadline_ns) {
        usleep(1000);
    }
    usleep(100000); // what ends with the job has ended
    CHECK(r, hvd_poll(r->ctx, handle) == HVD_IN_PROGRESS);
    atomic_store(&is_open, true);
    hvd_status_t status = hvd_wait(r->ctx, handle, LONG_MS);
    CHECK(r, status != HVD_OK && status != HVD_TIMEOUT);
    hvd_release(r->ctx, handle);
    rank_leave(r);
    CHECK(r, cuCtxSynchronize() == 0);
}

// The job is shut down while a tensor is still being computed.
static void shutdown_meanwhile(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    void *stream = use_device(r);
    tensor_t in = tensor_new(r, 100);
    int64_t shape[] = {100};
    void *at = (void *)in.device;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, "never", &t, stream);
    CHECK(r, cuLaunchHostFunc(stream, nap, (void *)1500) == 0);
    submit(r, &request);
    rank_barrier(r); // all have
    rank_leave(r);
    CHECK(r, cuStreamQuery(stream) == 0); // what copies the tensor has not outlived the job
    CHECK(r, cuCtxSynchronize() == 0);
}

static const subtest_t subtests[] = {
    {.name = "allreduces", .fn = allreduces},
    {.name = "many and grouped", .fn = many_and_grouped},
    {.name = "released early", .fn = released_early},
    {.name = "gathers", .fn = gathers},
    {.name = "host does not wait", .fn = host_does_not_wait},
    {.name = "host and device meet", .fn = host_and_device_meet},
    {.name = "refusals", .fn = refusals},
    {.name = "broken device", .fn = broken_device},
    {.name = "a lost rank meanwhile", .fn = lost_rank, .min_ranks = 2},
    {.name = "shutdown meanwhile", .fn = shutdown_meanwhile},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
