// SPDX-License-Identifier: Apache-2.0
//
// test_nccl.c - tensors of (simulated) GPUs that stay there: every operation by NCCL, who takes
// part, what sends them through the host instead, and that nobody waits for the device.
//
// Which way they have gone is told by the log, line by line; each rank keeps its own.
#define _GNU_SOURCE
#include "device_tensors.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define BY_NCCL "travel by NCCL"
#define BY_HOST "through host memory, not by NCCL"

// --- What a rank logs ----------------------------------------------------------------------------

static struct {
    char text[8192];
    atomic_size_t used;
} told;

static void note(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    size_t bytes = strlen(line);
    size_t at = atomic_fetch_add(&told.used, bytes);
    if (at + bytes < sizeof told.text) {
        memcpy(told.text + at, line, bytes);
    }
}

static void open_noting(rank_t *r)
{
    hvd_options_t more = {.log = note};
    rank_setenv(r, "HOROVOD_LOG_LEVEL", "info");
    CHECK_OK(r, rank_try_open(r, &more));
}

static void expect_told(rank_t *r, const char *part)
{
    if (strstr(told.text, part) == NULL) {
        check_failed(r, __FILE__, __LINE__, "expected \"%s\" in the log, got \"%s\"", part,
                     told.text);
    }
}

// --- Operations ----------------------------------------------------------------------------------

static void finish(rank_t *r, const hvd_request_t *request, void *stream)
{
    hvd_handle_t handle = submit(r, request);
    CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
    hvd_release(r->ctx, handle);
}

static void sum(rank_t *r, const char *name, int set, int n_members, size_t n, void *stream)
{
    tensor_t x = tensor_new(r, n);
    int64_t shape[] = {(int64_t)n};
    void *at = (void *)x.device;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, name, &t, stream);
    request.process_set = set;
    tensor_fill(r, &x, 1, stream);
    finish(r, &request, stream);
    tensor_check(r, &x, 0, n, (float)n_members, (float)n_members, stream);
    tensor_free(r, &x);
}

// Small and large ones at once: packed, and where they are.
static void many_sizes(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    static const size_t sizes[] = {7, 1000, 600000, 3, 300000, 129};
    enum { N_TENSORS = N_ELEMENTS(sizes) };
    tensor_t in[N_TENSORS], out[N_TENSORS];
    hvd_handle_t handles[N_TENSORS];
    for (int i = 0; i < N_TENSORS; i++) {
        in[i] = tensor_new(r, sizes[i]);
        out[i] = tensor_new(r, sizes[i]);
    }
    for (int round = 0; round < 6; round++) {
        rank_step(r, "round %d", round);
        for (int i = 0; i < N_TENSORS; i++) {
            char name[32];
            snprintf(name, sizeof name, "size.%zu", sizes[i]);
            int64_t shape[] = {(int64_t)sizes[i]};
            void *at = (void *)in[i].device;
            hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
            t.output = round % 2 == 0 ? at : (void *)out[i].device;
            hvd_request_t request = request_of(r, HVD_ALLREDUCE, name, &t, stream);
            tensor_fill(r, &in[i], (float)r->rank + 1, stream);
            handles[i] = submit(r, &request);
        }
        float total = (float)(r->size * (r->size + 1)) / 2, size = (float)r->size;
        for (int i = 0; i < N_TENSORS; i++) {
            CHECK_OK(r, hvd_wait_on(r->ctx, handles[i], stream, LONG_MS));
            hvd_release(r->ctx, handles[i]);
            tensor_check(r, round % 2 == 0 ? &in[i] : &out[i], 0, sizes[i], total, size, stream);
        }
    }
    expect_told(r, BY_NCCL);
    CHECK(r, gpusim_mistakes() == 0);
    rank_close(r);
}

// Average, smallest, largest, product, and factors.
static void reductions(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    static const hvd_reduce_t reduces[] = {HVD_SUM, HVD_AVERAGE, HVD_MIN, HVD_MAX, HVD_PRODUCT};
    float size = (float)r->size;
    float expected[] = {3 * size, 3, 3, 3, 3};
    for (int i = 0; i < r->size - 1; i++) {
        expected[4] *= 3;
    }
    for (size_t i = 0; i < N_ELEMENTS(reduces); i++) {
        bool sums = reduces[i] == HVD_SUM || reduces[i] == HVD_AVERAGE;
        for (int scaled = 0; scaled <= sums; scaled++) {
            tensor_t x = tensor_new(r, 1);
            int64_t shape[] = {1};
            void *at = (void *)x.device;
            hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
            hvd_request_t request = request_of(r, HVD_ALLREDUCE, "reduce", &t, stream);
            request.reduce = reduces[i];
            request.flags |= scaled ? HVD_SCALED : 0;
            request.prescale = 0.5;
            request.postscale = 4;
            tensor_fill(r, &x, 3, stream);
            finish(r, &request, stream);
            tensor_check(r, &x, 0, 1, expected[i] * (scaled ? 2 : 1), 0, stream);
            tensor_free(r, &x);
        }
    }
    expect_told(r, BY_NCCL);
    rank_close(r);
}

static void gathers_and_scatters(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    for (int even = 0; even < 2; even++) {
        size_t n = 10 * (even ? 2 : (size_t)r->rank + 1);
        size_t all = even ? 20 * (size_t)r->size : 5 * (size_t)(r->size * (r->size + 1));
        tensor_t in = tensor_new(r, n), out = tensor_new(r, all);
        int64_t shape[] = {(int64_t)n};
        hvd_tensor_t t = {.input = (void *)in.device, .n_dims = 1, .shape = shape};
        hvd_request_t request = request_of(r, HVD_ALLGATHER, "gather", &t, stream);
        tensor_fill(r, &in, (float)r->rank + 1, stream);
        hvd_handle_t handle = submit(r, &request);
        CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
        CHECK_OK(r, hvd_fetch(r->ctx, handle, 0, (void *)out.device, stream));
        hvd_release(r->ctx, handle);
        size_t at = 0;
        for (int m = 0; m < r->size; m++) {
            size_t theirs = 10 * (even ? 2 : (size_t)m + 1);
            tensor_check(r, &out, at, theirs, (float)m + 1, 1, stream);
            at += theirs;
        }
        tensor_free(r, &in);
        tensor_free(r, &out);
    }
    for (int even = 0; even < 2; even++) {
        size_t rows = (size_t)r->size * 2 + (even ? 0 : 1);
        size_t mine = 2 + (size_t)(!even && r->rank == 0);
        tensor_t in = tensor_new(r, rows * 10), out = tensor_new(r, mine * 10);
        int64_t shape[] = {(int64_t)rows, 10};
        hvd_tensor_t t = {.input = (void *)in.device, .n_dims = 2, .shape = shape};
        hvd_request_t request = request_of(r, HVD_REDUCESCATTER, "scatter", &t, stream);
        tensor_fill(r, &in, 1, stream);
        hvd_handle_t handle = submit(r, &request);
        CHECK_OK(r, hvd_wait(r->ctx, handle, LONG_MS));
        CHECK_OK(r, hvd_fetch(r->ctx, handle, 0, (void *)out.device, stream));
        hvd_release(r->ctx, handle);
        tensor_check(r, &out, 0, mine * 10, (float)r->size, (float)r->size, stream);
        tensor_free(r, &in);
        tensor_free(r, &out);
    }
    expect_told(r, BY_NCCL);
    CHECK(r, gpusim_mistakes() == 0);
    rank_close(r);
}

// Everyone sends rank m its number + 1 tens; a broadcast does not read what the others have.
static void exchanges_and_broadcasts(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    int32_t splits[MAX_RANKS];
    int64_t rows = 0;
    for (int m = 0; m < r->size; m++) {
        splits[m] = 10 * (m + 1);
        rows += splits[m];
    }
    size_t mine = (size_t)(10 * (r->rank + 1) * r->size);
    tensor_t in = tensor_new(r, (size_t)rows), out = tensor_new(r, mine);
    hvd_tensor_t t = {.input = (void *)in.device, .n_dims = 1, .shape = &rows};
    hvd_request_t request = request_of(r, HVD_ALLTOALL, "exchange", &t, stream);
    request.splits = splits;
    request.n_splits = r->size;
    tensor_fill(r, &in, (float)r->rank + 1, stream);
    hvd_handle_t handle = submit(r, &request);
    CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
    CHECK_OK(r, hvd_fetch(r->ctx, handle, 0, (void *)out.device, stream));
    hvd_release(r->ctx, handle);
    size_t at = 0;
    for (int m = 0; m < r->size; m++) {
        size_t theirs = (size_t)(10 * (r->rank + 1));
        tensor_check(r, &out, at, theirs, (float)m + 1, 1, stream);
        at += theirs;
    }
    for (int root = 0; root < r->size; root++) {
        hvd_tensor_t whole = {
            .input = (void *)in.device, .output = (void *)in.device, .n_dims = 1, .shape = &rows};
        request = request_of(r, HVD_BROADCAST, "broadcast", &whole, stream);
        request.root = root;
        tensor_fill(r, &in, (float)r->rank + 1, stream);
        finish(r, &request, stream);
        tensor_check(r, &in, 0, in.n, (float)root + 1, 1, stream);
    }
    tensor_free(r, &in);
    tensor_free(r, &out);
    expect_told(r, BY_NCCL);
    CHECK(r, gpusim_mistakes() == 0);
    rank_close(r);
}

// A rank without work brings zeros, of small tensors and large ones.
static void joined(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    sum(r, "before", 0, r->size, 100, stream);
    int n_others = r->size - 1;
    if (r->rank > 0) {
        static const size_t sizes[] = {5, 400000, 100, 500000};
        for (size_t i = 0; i < 3 * N_ELEMENTS(sizes); i++) {
            sum(r, "after", 0, n_others, sizes[i % N_ELEMENTS(sizes)], stream);
        }
    }
    hvd_request_t request = {.op = HVD_JOIN};
    CHECK_OK(r, rank_call(r, &request));
    sum(r, "again", 0, r->size, 100, stream);
    CHECK(r, gpusim_mistakes() == 0);
    rank_close(r);
}

static void process_sets(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    int ranks[MAX_RANKS], id;
    for (int m = 0; m < r->size; m++) {
        ranks[m] = m;
    }
    for (int round = 0; round < 3; round++) {
        rank_step(r, "round %d", round);
        sum(r, "all", 0, r->size, 1000, stream);
        CHECK_OK(r, hvd_process_set_add(r->ctx, ranks + 1, r->size - 1, &id, NULL, 0));
        if (r->rank > 0) {
            sum(r, "some", id, r->size - 1, 1000, stream);
        }
        sum(r, "all", 0, r->size, 1000, stream);
        CHECK_OK(r, hvd_process_set_remove(r->ctx, id, NULL, 0));
    }
    CHECK(r, gpusim_mistakes() == 0);
    rank_close(r);
}

// --- Nobody waits for the device -----------------------------------------------------------------

static void nap(void *ms)
{
    usleep((unsigned)(uintptr_t)ms * 1000);
}

// With work queued before the tensor is there that has no end yet, neither end of it waits.
static void host_does_not_wait(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    tensor_t x = tensor_new(r, 100);
    int64_t shape[] = {100};
    void *at = (void *)x.device;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, "late", &t, stream);
    finish(r, &request, stream); // the communicator is there afterwards
    for (int round = 0; round < 3; round++) {
        tensor_fill(r, &x, 7, stream);
        CHECK(r, cuStreamSynchronize(stream) == 0);
        rank_barrier(r);
        atomic_bool is_open = false;
        CHECK(r, cuLaunchHostFunc(stream, gate_pass, &is_open) == 0);
        CHECK(r, cuMemsetD8Async(x.device, 0, 100 * sizeof *x.host, stream) == 0);
        uint64_t since_ns = clock_ns();
        hvd_handle_t handle = submit(r, &request);
        CHECK_OK(r, hvd_wait_on(r->ctx, handle, stream, LONG_MS));
        uint64_t took_ns = clock_ns() - since_ns;
        CHECK(r, hvd_wait(r->ctx, handle, 10) == HVD_TIMEOUT); // it has not landed
        CHECK(r, took_ns < GATE_MS * NS_PER_MS);
        atomic_store(&is_open, true);
        hvd_release(r->ctx, handle);
        tensor_check(r, &x, 0, x.n, 0, 0, stream);
    }
    expect_told(r, BY_NCCL);
    rank_close(r);
}

// --- What sends them through the host ------------------------------------------------------------

static void expect_host(rank_t *r, const char *why)
{
    void *stream = use_device(r);
    for (int round = 0; round < 3; round++) {
        sum(r, "small", 0, r->size, 10, stream);
        sum(r, "large", 0, r->size, 100000, stream);
    }
    if (r->rank == 0) {
        expect_told(r, BY_HOST);
        expect_told(r, why);
        const char *first = strstr(told.text, BY_HOST);
        CHECK(r, strstr(first + 1, BY_HOST) == NULL); // told once
    }
    CHECK(r, strstr(told.text, BY_NCCL) == NULL);
    rank_close(r);
}

// A row of tests.list has a folder without it.
static void without_nccl(rank_t *r, void *arg)
{
    (void)arg;
    rank_setenv(r, "HOROVOD_NCCL_LIBRARY", arg);
    open_noting(r);
    expect_host(r, arg != NULL ? "/nowhere/libnccl.so cannot be loaded" : "cannot be loaded");
}

static void unusable_on_one_rank(rank_t *r, void *arg)
{
    (void)arg;
    setenv("GPUSIM_NCCL_VERSION", r->rank == 1 ? "21304" : "22703", 1);
    open_noting(r);
    expect_host(r, "rank 1 (host");
}

static void other_version(rank_t *r, void *arg)
{
    (void)arg;
    setenv("GPUSIM_NCCL_VERSION", r->rank == 1 ? "22105" : "22703", 1);
    open_noting(r);
    expect_host(r, "install the same one on all hosts");
}

static void old_version(rank_t *r, void *arg)
{
    (void)arg;
    setenv("GPUSIM_NCCL_VERSION", "21304", 1);
    open_noting(r);
    expect_host(r, "2.14 or newer is needed");
}

static void same_gpu(rank_t *r, void *arg)
{
    (void)arg;
    setenv("GPUSIM_DEVICES", "1", 1);
    open_noting(r);
    expect_host(r, "torch.cuda.set_device(hvd.local_rank())");
}

// What is said of the way without a word to anybody else: the job is asked to, or NCCL cannot.
static void by_choice(rank_t *r, void *arg)
{
    const char *const *pair = arg;
    rank_setenv(r, pair[0], pair[1]);
    open_noting(r);
    void *stream = use_device(r);
    sum(r, "small", 0, r->size, 10, stream);
    sum(r, "large", 0, r->size, 100000, stream);
    CHECK(r, strstr(told.text, BY_NCCL) == NULL);
    rank_close(r);
}

// Some have it on the device and others on the host, in turns.
static void mixed(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    for (int round = 0; round < 6; round++) {
        rank_step(r, "round %d", round);
        for (size_t n = 10; n < 1000000; n *= 100) {
            tensor_t x = tensor_new(r, n);
            bool on_host = round % 2 == 1 && round / 2 % r->size == r->rank;
            int64_t shape[] = {(int64_t)n};
            void *at = on_host ? (void *)x.host : (void *)x.device;
            hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
            hvd_request_t request = request_of(r, HVD_ALLREDUCE, "mixed", &t, stream);
            request.flags = on_host ? 0 : HVD_ON_DEVICE;
            tensor_fill(r, &x, 1, stream);
            CHECK(r, !on_host || cuStreamSynchronize(stream) == 0);
            finish(r, &request, stream);
            float size = (float)r->size;
            if (!on_host) {
                tensor_check(r, &x, 0, n, size, size, stream);
            } else {
                CHECK(r, x.host[n - 1] == size * (float)(1 + (n - 1) % 10));
            }
            tensor_free(r, &x);
        }
    }
    expect_told(r, BY_NCCL);
    rank_close(r);
}

// --- Faults --------------------------------------------------------------------------------------

static bool launched;

// An operation that all ranks have launched, with some work of this rank's before it.
static hvd_handle_t launch_behind(rank_t *r, tensor_t *x, int busy_ms, void *stream)
{
    int64_t shape[] = {(int64_t)x->n};
    void *at = (void *)x->device;
    hvd_tensor_t t = {.input = at, .output = at, .n_dims = 1, .shape = shape};
    hvd_request_t request = request_of(r, HVD_ALLREDUCE, "fatal", &t, stream);
    tensor_fill(r, x, 1, stream);
    if (busy_ms > 0) {
        CHECK(r, cuLaunchHostFunc(stream, nap, (void *)(uintptr_t)busy_ms) == 0);
    }
    hvd_handle_t handle = submit(r, &request);
    hvd_status_t status = hvd_wait_on(r->ctx, handle, stream, LONG_MS);
    launched = status == HVD_OK; // else the job has ended already
    CHECK(r, launched || hvd_health(r->ctx, r->text, sizeof r->text) != HVD_OK);
    atomic_fetch_add(rank_shared(r, 0), 1);
    rank_wait_for(r, rank_shared(r, 0), r->size);
    return handle;
}

static void expect_end(rank_t *r, hvd_handle_t handle, const char *why)
{
    hvd_status_t status = hvd_wait(r->ctx, handle, LONG_MS);
    CHECK(r, status != HVD_OK && status != HVD_TIMEOUT);
    CHECK(r, !launched || hvd_settle(r->ctx, LONG_MS) != HVD_OK);
    CHECK(r, hvd_health(r->ctx, r->text, sizeof r->text) != HVD_OK);
    CHECK_HAS(r, r->text, why);
    uint64_t since_ns = clock_ns();
    rank_leave(r);
    CHECK(r, clock_ns() - since_ns < 25 * NS_PER_S);
}

// It dies while its share of a collective is still being computed, which others wait for.
static void lost_rank(rank_t *r, void *arg)
{
    if (arg != NULL) {
        setenv("GPUSIM_ABORT_HANGS", "1", 1);
    }
    open_noting(r);
    void *stream = use_device(r);
    sum(r, "before", 0, r->size, 100, stream);
    tensor_t x = tensor_new(r, 1000);
    bool dies = r->rank == r->size - 1;
    hvd_handle_t handle = launch_behind(r, &x, dies ? 60000 : 0, stream);
    char who[16];
    snprintf(who, sizeof who, "rank %d", r->size - 1);
    if (dies) {
        rank_will_die(r);
        kill(getpid(), SIGKILL);
    }
    expect_end(r, handle, who);
    if (arg != NULL) {
        expect_told(r, "they are left behind");
    } else {
        CHECK(r, cuCtxSynchronize() == 0); // nothing of it hangs on the device
    }
}

// The second collective of rank 0 breaks, or never ends: all ranks are told.
static void failing(rank_t *r, void *arg)
{
    const char *const *how = arg;
    if (r->rank == 0) {
        setenv("GPUSIM_FAIL", how[0], 1);
    }
    open_noting(r);
    void *stream = use_device(r);
    sum(r, "before", 0, r->size, 100, stream);
    tensor_t x = tensor_new(r, 1000);
    expect_end(r, launch_behind(r, &x, 0, stream), how[1]);
    CHECK(r, cuCtxSynchronize() == 0);
}

// A rank computes for longer than anybody may be silent: that is no fault.
static void late_share(rank_t *r, void *arg)
{
    (void)arg;
    open_noting(r);
    void *stream = use_device(r);
    sum(r, "before", 0, r->size, 100, stream);
    tensor_t x = tensor_new(r, 1000);
    hvd_handle_t handle = launch_behind(r, &x, r->rank == 0 ? 4000 : 0, stream);
    CHECK_OK(r, hvd_wait(r->ctx, handle, LONG_MS));
    CHECK_OK(r, hvd_settle(r->ctx, LONG_MS));
    tensor_check(r, &x, 0, x.n, (float)r->size, (float)r->size, stream);
    if (r->rank == 0) {
        expect_told(r, "has not computed its share of 'fatal'");
    }
    rank_close(r);
}

// A new job has new communicators.
static void again(rank_t *r, void *arg)
{
    (void)arg;
    void *stream = use_device(r);
    for (int life = 0; life < 3; life++) {
        open_noting(r);
        sum(r, "life", 0, r->size, 100000, stream);
        rank_close(r);
    }
    CHECK(r, gpusim_mistakes() == 0);
}

static const char *const breaks[] = {"nccl_kernel:2", "NCCL error 6"};
static const char *const hangs[] = {"nccl_hang:2", "NCCL has not finished it"};
static const char *const always[] = {"HOROVOD_ENCRYPT", "always"};
static const char *const by_host[] = {"HOROVOD_GPU_OPERATIONS", "HOST"};

static const subtest_t subtests[] = {
    {.name = "many sizes", .fn = many_sizes},
    {.name = "reductions", .fn = reductions},
    {.name = "gathers and scatters", .fn = gathers_and_scatters},
    {.name = "exchanges and broadcasts", .fn = exchanges_and_broadcasts},
    {.name = "joined", .fn = joined},
    {.name = "process sets",
     .fn = process_sets,
     .min_ranks = 3,
     .env = {"HOROVOD_DYNAMIC_PROCESS_SETS=1"}},
    {.name = "host does not wait", .fn = host_does_not_wait},
    {.name = "without library", .fn = without_nccl},
    {.name = "without library, by name",
     .fn = without_nccl,
     .arg = (void *)(uintptr_t)"/nowhere/libnccl.so"},
    {.name = "unusable on one rank", .fn = unusable_on_one_rank},
    {.name = "other version", .fn = other_version},
    {.name = "old version", .fn = old_version},
    {.name = "same gpu", .fn = same_gpu},
    {.name = "encrypted", .fn = by_choice, .arg = (void *)(uintptr_t)always},
    {.name = "by choice", .fn = by_choice, .arg = (void *)(uintptr_t)by_host},
    {.name = "mixed", .fn = mixed},
    {.name = "a lost rank", .fn = lost_rank},
    {.name = "a lost rank, and no way out of NCCL",
     .fn = lost_rank,
     .arg = (void *)(uintptr_t)"",
     .one_world_only = true},
    {.name = "a collective breaks", .fn = failing, .arg = (void *)(uintptr_t)breaks},
    {.name = "a collective hangs",
     .fn = failing,
     .arg = (void *)(uintptr_t)hangs,
     .env = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=2"}},
    {.name = "a late share",
     .fn = late_share,
     .env = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=2", "HOROVOD_STALL_CHECK_TIME_SECONDS=1"},
     .one_world_only = true},
    {.name = "again", .fn = again},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
