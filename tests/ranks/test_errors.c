// SPDX-License-Identifier: Apache-2.0
//
// test_errors.c - what goes wrong is said, to everybody concerned, in words users' programs look
// for, and the job goes on where it can.
//
// Three kinds: what one rank can see by itself (refused by hvd_submit, nothing is sent), what only
// shows when ranks compare (HVD_MISMATCH on every member, with one sentence naming both sides), and
// what keeps init from succeeding. Each ends with an operation that must work, where one can.
#define _GNU_SOURCE
#include "cases.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_VALUES 6
#define N_LARGE 20000 // beyond what rides in the agreement

// --- A request to spoil -----------------------------------------------------------------------

typedef struct draft {
    hvd_request_t request;
    hvd_tensor_t tensors[2];
    int64_t shapes[2][3];
    int32_t splits[MAX_RANKS];
    double *in, *out;
} draft_t;

static void draft_free(draft_t *d)
{
    free(d->in);
    free(d->out);
}

// float32 of [2, 3] by one tensor, or [n / 3, 3].
static void draft_new(rank_t *r, draft_t *d, hvd_op_t op, const char *name, int n)
{
    *d = (draft_t){0};
    d->in = calloc((size_t)n * 2, sizeof *d->in);
    d->out = calloc((size_t)n * 2 * (size_t)r->size, sizeof *d->out);
    CHECK(r, d->in != NULL && d->out != NULL);
    for (int t = 0; t < 2; t++) {
        d->shapes[t][0] = n / 3;
        d->shapes[t][1] = 3;
        d->shapes[t][2] = 1;
        d->tensors[t] =
            (hvd_tensor_t){.input = d->in, .output = d->out, .n_dims = 2, .shape = d->shapes[t]};
    }
    d->request = (hvd_request_t){
        .op = op,
        .name = name,
        .dtype = HVD_FLOAT32,
        .reduce = HVD_SUM,
        .tensors = op == HVD_BARRIER ? NULL : d->tensors,
        .n_tensors = op == HVD_BARRIER ? 0 : 1,
    };
    if (op == HVD_ALLTOALL) {
        for (int m = 0; m < r->size; m++) {
            d->splits[m] = m == 0;
        }
        d->request.splits = d->splits;
        d->request.n_splits = r->size;
    }
}

static void still_works(rank_t *r)
{
    rank_check_sum(r, "still works", 0, r->rank + 1, r->size * (r->size + 1) / 2);
}

// --- What only shows when ranks compare -------------------------------------------------------

static void other_dtype(draft_t *d)
{
    d->request.dtype = HVD_INT32;
}

static void other_op(draft_t *d)
{
    d->request.op = HVD_ALLREDUCE;
    d->request.reduce = HVD_SUM;
}

static void other_shape(draft_t *d)
{
    d->shapes[0][1] = 1;
}

static void other_dims(draft_t *d)
{
    d->tensors[0].n_dims = 3;
}

static void other_count(draft_t *d)
{
    d->request.n_tensors = 2;
}

static void other_prescale(draft_t *d)
{
    d->request.flags |= HVD_SCALED;
    d->request.prescale = 0.5;
    d->request.postscale = 1;
}

static void other_postscale(draft_t *d)
{
    d->request.flags |= HVD_SCALED;
    d->request.prescale = 1;
    d->request.postscale = 4;
}

static void other_reduce(draft_t *d)
{
    d->request.reduce = HVD_MAX;
}

static void other_average(draft_t *d)
{
    d->request.reduce = HVD_AVERAGE;
}

static void other_root(draft_t *d)
{
    d->request.root = 1;
}

static void scalar(draft_t *d)
{
    d->tensors[0].n_dims = 0;
}

static const struct {
    const char *what;
    hvd_op_t op;
    void (*spoil)(draft_t *d);
    bool on_all; // every rank does it wrong
    const char *start, *values[2];
} mismatches[] = {
    {"dtype", HVD_ALLREDUCE, other_dtype, false, "Mismatched data types:", {"float32", "int32"}},
    {"dtype", HVD_BROADCAST, other_dtype, false, "Mismatched data types:", {"float32", "int32"}},
    {"op", HVD_ALLGATHER, other_op, false, "Mismatched operations:", {"ALLGATHER", "ALLREDUCE"}},
    {"op", HVD_BROADCAST, other_op, false, "Mismatched operations:", {"BROADCAST", "ALLREDUCE"}},
    {"shape",
     HVD_ALLREDUCE,
     other_shape,
     false,
     "Mismatched ALLREDUCE tensor shapes:",
     {"3]", "1]"}},
    {"shape",
     HVD_BROADCAST,
     other_shape,
     false,
     "Mismatched BROADCAST tensor shapes:",
     {"3]", "1]"}},
    {"shape",
     HVD_ALLGATHER,
     other_shape,
     false,
     "Mismatched ALLGATHER tensor shapes:",
     {"3]", "1]"}},
    {"shape", HVD_ALLTOALL, other_shape, false, "Mismatched ALLTOALL tensor shapes:", {"3]", "1]"}},
    {"shape",
     HVD_REDUCESCATTER,
     other_shape,
     false,
     "Mismatched REDUCESCATTER tensor shapes:",
     {"3]", "1]"}},
    {"dims", HVD_ALLREDUCE, other_dims, false, "Mismatched ALLREDUCE tensor shapes:", {"3]", "1]"}},
    {"dims", HVD_ALLGATHER, other_dims, false, "Mismatched ALLGATHER tensor shapes:", {"3]", "1]"}},
    {"count",
     HVD_ALLREDUCE,
     other_count,
     false,
     "Mismatched ALLREDUCE tensor shapes:",
     {"1 tensor", "2 tensors"}},
    {"prescale",
     HVD_ALLREDUCE,
     other_prescale,
     false,
     "Mismatched prescale and/or postscale factors:",
     {"0.5", "1"}},
    {"postscale",
     HVD_REDUCESCATTER,
     other_postscale,
     false,
     "Mismatched prescale and/or postscale factors:",
     {"4", "1"}},
    {"reduce",
     HVD_ALLREDUCE,
     other_reduce,
     false,
     "Mismatched reduction operation:",
     {"sum", "max"}},
    {"reduce",
     HVD_REDUCESCATTER,
     other_average,
     false,
     "Mismatched reduction operation:",
     {"sum", "average"}},
    {"root",
     HVD_BROADCAST,
     other_root,
     false,
     "Mismatched BROADCAST root ranks:",
     {"root 0", "root 1"}},
    {"scalar",
     HVD_ALLGATHER,
     scalar,
     true,
     "Process-set rank zero tried to ALLGATHER a rank-zero tensor.",
     {"scalar", "scalar"}},
    {"scalar",
     HVD_REDUCESCATTER,
     scalar,
     true,
     "Process-set rank zero tried to REDUCESCATTER a rank-zero tensor.",
     {"scalar", "scalar"}},
};

// All ranks must have been told the same.
static void same_text_everywhere(rank_t *r)
{
    int64_t hash = (int64_t)(hash_bytes(r->text, strlen(r->text), 1) & 0xffffffffu);
    rank_check_sum(r, "same text", 0, hash, hash * r->size);
}

// Once with the odd rank first, once last, and with tensors that ride and tensors that do not.
static void run_mismatch(rank_t *r, size_t row, int odd, int n_values, uint64_t *waited_ns)
{
    draft_t d;
    char name[64];
    char odd_rank[32];
    snprintf(name, sizeof name, "mismatch.%zu.%d.%d", row, odd, n_values);
    snprintf(odd_rank, sizeof odd_rank, "rank %d", odd);
    rank_step(r, "%s of %s, rank %d is odd, %d values", mismatches[row].what,
              hvd_op_name(mismatches[row].op), odd, n_values);
    draft_new(r, &d, mismatches[row].op, name, n_values);
    if (r->rank == odd || mismatches[row].on_all) {
        mismatches[row].spoil(&d);
    }
    uint64_t start_ns = clock_ns();
    CHECK_STATUS(r, rank_call(r, &d.request), HVD_MISMATCH);
    *waited_ns += clock_ns() - start_ns;
    CHECK_STARTS(r, r->text, mismatches[row].start);
    CHECK_HAS(r, r->text, name);
    CHECK_HAS(r, r->text, mismatches[row].values[0]);
    CHECK_HAS(r, r->text, mismatches[row].values[1]);
    if (!mismatches[row].on_all) {
        CHECK_HAS(r, r->text, odd_rank);
    }
    same_text_everywhere(r);
    still_works(r);
    // The name is free again, and means what it is now given.
    draft_t again;
    draft_new(r, &again, HVD_ALLREDUCE, name, n_values);
    CHECK_OK(r, rank_call(r, &again.request));
    draft_free(&d);
    draft_free(&again);
}

static void ranks_disagree(rank_t *r, void *arg)
{
    (void)arg;
    uint64_t waited_ns = 0;
    rank_open(r);
    for (size_t row = 0; row < N_ELEMENTS(mismatches); row++) {
        run_mismatch(r, row, r->size - 1, N_VALUES, &waited_ns);
        run_mismatch(r, row, 0, row % 2 == 0 ? N_LARGE / 3 * 3 : N_VALUES, &waited_ns);
    }
    // At once: 0.1 s, times 3 on a busy machine, on average.
    CHECK(r, waited_ns / (2 * N_ELEMENTS(mismatches)) < 300 * NS_PER_MS * PATIENCE);
    rank_close(r);
}

// A name that was agreed and remembered, and then changes on one rank only.
static void remembered_then_different(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    for (int round = 0; round < 6; round++) {
        draft_t d;
        draft_new(r, &d, HVD_ALLREDUCE, "remembered", round % 2 ? N_LARGE / 3 * 3 : N_VALUES);
        rank_step(r, "round %d", round);
        CHECK_OK(r, rank_call(r, &d.request));
        CHECK_OK(r, rank_call(r, &d.request));
        if (r->rank == round % r->size) {
            other_dtype(&d);
        }
        CHECK_STATUS(r, rank_call(r, &d.request), HVD_MISMATCH);
        CHECK_STARTS(r, r->text, "Mismatched data types:");
        draft_free(&d);
    }
    still_works(r);
    rank_close(r);
}

// --- What one rank sees by itself ---------------------------------------------------------------

static void too_many_dims(draft_t *d)
{
    d->tensors[0].n_dims = HVD_MAX_DIMS + 1;
}

static void negative_dims(draft_t *d)
{
    d->tensors[0].n_dims = -1;
}

static void negative_dimension(draft_t *d)
{
    d->shapes[0][1] = -1;
}

static void enormous(draft_t *d)
{
    d->shapes[0][0] = INT64_MAX / 2;
}

static void empty_rows_without_number(draft_t *d)
{
    d->tensors[0].n_dims = 3;
    d->shapes[0][0] = 0;
    d->shapes[0][1] = d->shapes[0][2] = INT64_MAX;
}

static void no_shape(draft_t *d)
{
    d->tensors[0].shape = NULL;
}

static void no_data(draft_t *d)
{
    d->tensors[0].input = NULL;
}

static void no_tensors(draft_t *d)
{
    d->request.n_tensors = 0;
}

static void unknown_dtype(draft_t *d)
{
    d->request.dtype = HVD_N_DTYPES;
}

static void unknown_op(draft_t *d)
{
    d->request.op = HVD_N_OPS;
}

static void unknown_reduce(draft_t *d)
{
    d->request.reduce = HVD_N_REDUCES;
}

static void unknown_set(draft_t *d)
{
    d->request.process_set = 77;
}

static void negative_set(draft_t *d)
{
    d->request.process_set = -1;
}

static void root_beyond(draft_t *d)
{
    d->request.root = 1000;
}

static void root_negative(draft_t *d)
{
    d->request.root = -1;
}

static void splits_too_large(draft_t *d)
{
    d->splits[0] = 1000;
}

static void splits_negative(draft_t *d)
{
    d->splits[0] = -1;
}

static void splits_too_few(draft_t *d)
{
    d->request.n_splits--;
}

static void splits_missing(draft_t *d)
{
    d->request.splits = NULL;
    d->request.n_splits = 0;
    d->shapes[0][0] = 7; // which neither 2 nor 3 ranks can share
}

static void adasum_of_integers(draft_t *d)
{
    d->request.dtype = HVD_INT32;
    d->request.reduce = HVD_ADASUM;
}

static void scatter_by_min(draft_t *d)
{
    d->request.reduce = HVD_MIN;
}

static void barrier_with_tensor(draft_t *d)
{
    d->request.tensors = d->tensors;
    d->request.n_tensors = 1;
}

static const struct {
    hvd_op_t op;
    void (*spoil)(draft_t *d);
    hvd_status_t status;
    const char *part; // of the sentence
} refusals[] = {
    {HVD_ALLREDUCE, too_many_dims, HVD_INVALID_ARGUMENT, "dimensions"},
    {HVD_ALLREDUCE, negative_dims, HVD_INVALID_ARGUMENT, "dimensions"},
    {HVD_ALLGATHER, negative_dimension, HVD_INVALID_ARGUMENT, "negative"},
    {HVD_ALLREDUCE, enormous, HVD_INVALID_ARGUMENT, "too large"},
    {HVD_ALLREDUCE, empty_rows_without_number, HVD_INVALID_ARGUMENT, "too large"},
    {HVD_ALLGATHER, empty_rows_without_number, HVD_INVALID_ARGUMENT, "too large"},
    {HVD_BROADCAST, empty_rows_without_number, HVD_INVALID_ARGUMENT, "too large"},
    {HVD_ALLTOALL, empty_rows_without_number, HVD_INVALID_ARGUMENT, "too large"},
    {HVD_REDUCESCATTER, empty_rows_without_number, HVD_INVALID_ARGUMENT, "too large"},
    {HVD_ALLREDUCE, no_shape, HVD_INVALID_ARGUMENT, "refused"},
    {HVD_BROADCAST, no_data, HVD_INVALID_ARGUMENT, "no data"},
    {HVD_ALLGATHER, no_tensors, HVD_INVALID_ARGUMENT, "tensors"},
    {HVD_BARRIER, barrier_with_tensor, HVD_INVALID_ARGUMENT, "has 1 tensor; it takes none"},
    {HVD_ALLREDUCE, unknown_dtype, HVD_INVALID_ARGUMENT, "dtype"},
    {HVD_ALLREDUCE, unknown_op, HVD_INVALID_ARGUMENT, "operation"},
    {HVD_ALLREDUCE, unknown_reduce, HVD_INVALID_ARGUMENT, "reduction"},
    {HVD_ALLREDUCE, unknown_set, HVD_UNKNOWN_SET,
     "Process set provided does not exist, or has not been registered."},
    {HVD_BARRIER, negative_set, HVD_UNKNOWN_SET,
     "Process set provided does not exist, or has not been registered."},
    {HVD_BROADCAST, root_beyond, HVD_INVALID_ARGUMENT,
     "broadcast received invalid root rank 1000 for provided process set"},
    {HVD_BROADCAST, root_negative, HVD_INVALID_ARGUMENT,
     "broadcast received invalid root rank -1 for provided process set"},
    {HVD_ALLTOALL, splits_too_large, HVD_INVALID_ARGUMENT,
     "Sum of splits entries is greater than the first dimension of tensor."},
    {HVD_ALLTOALL, splits_negative, HVD_INVALID_ARGUMENT, "negative"},
    {HVD_ALLTOALL, splits_too_few, HVD_INVALID_ARGUMENT,
     "Number of entries in splits does not equal number of workers."},
    {HVD_ALLTOALL, splits_missing, HVD_INVALID_ARGUMENT,
     "splits not provided, but first dimension of tensor is not an even multiple of the number of "
     "workers."},
    {HVD_ALLREDUCE, adasum_of_integers, HVD_INVALID_ARGUMENT, "Adasum"},
    {HVD_REDUCESCATTER, scatter_by_min, HVD_UNSUPPORTED,
     "Reducescatter currently only supports AVERAGE and SUM."},
};

static void refuse_each(rank_t *r)
{
    for (size_t row = 0; row < N_ELEMENTS(refusals); row++) {
        draft_t d;
        hvd_handle_t handle = 12345;
        draft_new(r, &d, refusals[row].op, "refused", N_VALUES);
        refusals[row].spoil(&d);
        rank_step(r, "row %zu, %s: %s", row, hvd_op_name(refusals[row].op), refusals[row].part);
        CHECK_STATUS(r, hvd_submit(r->ctx, &d.request, &handle, r->text, sizeof r->text),
                     refusals[row].status);
        CHECK_HAS(r, r->text, refusals[row].part);
        CHECK_INT(r, handle, 12345); // written on success only
        CHECK(r, hvd_submit(r->ctx, &d.request, &handle, NULL, 0) == refusals[row].status);
        draft_free(&d);
    }
}

static void refused_at_once(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    refuse_each(r);
    still_works(r);
    rank_close(r);
}

// What is wrong in itself is told so by all, also by those who ask when others have left already.
static void refused_after_the_end(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    if (r->rank != 0) {
        draft_t d;
        draft_new(r, &d, HVD_ALLREDUCE, "in vain", N_VALUES);
        CHECK_STATUS(r, rank_call(r, &d.request), HVD_SHUTDOWN);
        CHECK_STATUS(r, rank_call(r, &d.request), HVD_SHUTDOWN);
        draft_free(&d);
        refuse_each(r);
    }
    rank_leave(r);
}

// --- Names and handles --------------------------------------------------------------------------

static void same_name_twice(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    draft_t d;
    hvd_handle_t first;
    hvd_handle_t second;
    draft_new(r, &d, HVD_ALLREDUCE, "twice", N_VALUES);
    if (r->rank == 0) { // nobody else has it yet: it is in flight for sure
        CHECK_OK(r, hvd_submit(r->ctx, &d.request, &first, r->text, sizeof r->text));
        CHECK_STATUS(r, hvd_submit(r->ctx, &d.request, &second, r->text, sizeof r->text),
                     HVD_DUPLICATE_NAME);
        CHECK_HAS(r, r->text, "same name as another tensor that is currently being processed");
        CHECK_HAS(r, r->text, "twice");
        atomic_store(rank_shared(r, 0), 1);
    } else {
        rank_wait_for(r, rank_shared(r, 0), 1);
        CHECK_OK(r, hvd_submit(r->ctx, &d.request, &first, r->text, sizeof r->text));
    }
    CHECK_OK(r, hvd_wait(r->ctx, first, 60000));
    hvd_release(r->ctx, first);
    CHECK_OK(r, rank_call(r, &d.request)); // the name is free again
    draft_free(&d);
    rank_close(r);
}

static void handles(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    hvd_result_t result;
    void *data;
    int64_t shape[HVD_MAX_DIMS];
    const hvd_handle_t strange[] = {0, 1, 4711, UINT64_MAX, (hvd_handle_t)99 << 32 | 1};
    for (size_t i = 0; i < N_ELEMENTS(strange); i++) {
        CHECK_STATUS(r, hvd_wait(r->ctx, strange[i], 0), HVD_UNKNOWN_HANDLE);
        CHECK_STATUS(r, hvd_poll(r->ctx, strange[i]), HVD_UNKNOWN_HANDLE);
        CHECK_STATUS(r, hvd_result(r->ctx, strange[i], &result), HVD_UNKNOWN_HANDLE);
        CHECK_STATUS(r, hvd_output(r->ctx, strange[i], 0, &data, shape), HVD_UNKNOWN_HANDLE);
        hvd_release(r->ctx, strange[i]);
    }
    draft_t d;
    draft_new(r, &d, HVD_ALLREDUCE, "handle", N_VALUES);
    hvd_handle_t before = 0;
    for (int round = 0; round < 50; round++) {
        hvd_handle_t handle;
        CHECK_OK(r, hvd_submit(r->ctx, &d.request, &handle, r->text, sizeof r->text));
        CHECK(r, handle != 0 && handle != before);
        CHECK_STATUS(r, before == 0 ? HVD_UNKNOWN_HANDLE : hvd_poll(r->ctx, before),
                     HVD_UNKNOWN_HANDLE); // the object may be used again, the handle is not
        CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
        CHECK_OK(r, hvd_wait(r->ctx, handle, 0)); // as often as one likes
        CHECK_OK(r, hvd_poll(r->ctx, handle));
        CHECK_OK(r, hvd_result(r->ctx, handle, &result));
        CHECK_STATUS(r, result.status, HVD_OK);
        CHECK(r, result.text[0] == '\0');
        CHECK_OK(r, hvd_output(r->ctx, handle, 0, &data, shape));
        CHECK(r, data == d.out && shape[0] == N_VALUES / 3 && shape[1] == 3);
        CHECK_STATUS(r, hvd_output(r->ctx, handle, 1, &data, shape), HVD_INVALID_ARGUMENT);
        CHECK_STATUS(r, hvd_output(r->ctx, handle, -1, &data, shape), HVD_INVALID_ARGUMENT);
        hvd_release(r->ctx, handle);
        CHECK_STATUS(r, hvd_wait(r->ctx, handle, 0), HVD_UNKNOWN_HANDLE);
        hvd_release(r->ctx, handle);
        before = handle;
    }
    draft_free(&d);
    rank_close(r);
}

static void count_call(void *arg, hvd_handle_t handle, hvd_status_t status)
{
    atomic_int *calls = arg;
    (void)handle;
    atomic_fetch_add(&calls[status == HVD_OK ? 0 : 1], 1);
}

// In vain, then for real; poll says the same; the callback comes once.
static void wait_poll_callback(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    atomic_int calls[2] = {0};
    draft_t d;
    draft_new(r, &d, HVD_ALLREDUCE, "late", N_VALUES);
    d.request.done = count_call;
    d.request.arg = calls;
    hvd_handle_t handle;
    hvd_result_t result;
    if (r->rank == 0) {
        CHECK_OK(r, hvd_submit(r->ctx, &d.request, &handle, r->text, sizeof r->text));
        CHECK_STATUS(r, hvd_poll(r->ctx, handle), HVD_IN_PROGRESS);
        CHECK_STATUS(r, hvd_result(r->ctx, handle, &result), HVD_IN_PROGRESS);
        uint64_t start_ns = clock_ns();
        CHECK_STATUS(r, hvd_wait(r->ctx, handle, 50), HVD_TIMEOUT);
        CHECK(r, clock_ns() - start_ns >= 50 * NS_PER_MS);
        CHECK(r, clock_ns() - start_ns < 5000 * NS_PER_MS * PATIENCE);
        CHECK_STATUS(r, hvd_wait(r->ctx, handle, 0), HVD_TIMEOUT);
        CHECK_INT(r, atomic_load(&calls[0]), 0);
        atomic_store(rank_shared(r, 0), 1);
    } else {
        rank_wait_for(r, rank_shared(r, 0), 1);
        CHECK_OK(r, hvd_submit(r->ctx, &d.request, &handle, r->text, sizeof r->text));
    }
    CHECK_OK(r, hvd_wait(r->ctx, handle, HVD_FOREVER));
    CHECK_OK(r, hvd_poll(r->ctx, handle));
    hvd_release(r->ctx, handle);
    rank_barrier(r);
    rank_wait_for(r, &calls[0], 1);
    // Also when it fails, and also when the handle is let go before.
    d.request.name = "late and wrong";
    d.request.dtype = r->rank == 0 ? HVD_INT64 : HVD_FLOAT64;
    CHECK_OK(r, hvd_submit(r->ctx, &d.request, &handle, r->text, sizeof r->text));
    hvd_release(r->ctx, handle);
    CHECK_STATUS(r, hvd_poll(r->ctx, handle), HVD_UNKNOWN_HANDLE);
    rank_wait_for(r, &calls[1], 1);
    still_works(r);
    rank_close(r);
    CHECK_INT(r, atomic_load(&calls[0]), 1);
    CHECK_INT(r, atomic_load(&calls[1]), 1);
    draft_free(&d);
}

static void *give_nothing(void *arg, int tensor, int n_dims, const int64_t *shape)
{
    (void)arg;
    (void)tensor;
    (void)n_dims;
    (void)shape;
    return NULL;
}

// A rank that gets no memory says so, and nobody waits for it for ever.
static void no_memory_for_output(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    draft_t d;
    draft_new(r, &d, HVD_ALLGATHER, "no memory", N_VALUES);
    d.tensors[0].output = NULL;
    d.request.alloc = r->rank == 0 ? give_nothing : NULL;
    hvd_status_t status = rank_call(r, &d.request);
    if (r->rank == 0) {
        CHECK_STATUS(r, status, HVD_NO_MEMORY);
    } else {
        CHECK(r, status != HVD_TIMEOUT);
    }
    draft_free(&d);
    hvd_shutdown(r->ctx);
}

// --- After the end ------------------------------------------------------------------------------

static void after_shutdown(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    still_works(r);
    if (r->rank == 1) {
        rank_leave(r);
        return;
    }
    draft_t d;
    draft_new(r, &d, HVD_ALLREDUCE, "too late", N_VALUES);
    rank_step(r, "waits for the end");
    uint64_t deadline_ns = deadline_in_ms(20000);
    while (hvd_health(r->ctx, r->text, sizeof r->text) == HVD_OK) {
        CHECK(r, clock_ns() < deadline_ns);
        usleep(1000);
    }
    CHECK_STATUS(r, hvd_health(r->ctx, r->text, sizeof r->text), HVD_SHUTDOWN);
    CHECK_HAS(r, r->text, "Horovod has been shut down.");
    CHECK_STATUS(r, rank_call(r, &d.request), HVD_SHUTDOWN);
    CHECK_HAS(r, r->text, "Horovod has been shut down.");
    draft_free(&d);
    rank_leave(r);
}

static void without_context(rank_t *r, void *arg)
{
    (void)arg;
    hvd_handle_t handle;
    hvd_request_t request = {.op = HVD_BARRIER};
    CHECK_STATUS(r, hvd_submit(NULL, &request, &handle, r->text, sizeof r->text),
                 HVD_NOT_INITIALIZED);
    CHECK_HAS(r, r->text, "Horovod has not been initialized; use hvd.init().");
    CHECK_STATUS(r, hvd_wait(NULL, 1, 0), HVD_NOT_INITIALIZED);
    CHECK_STATUS(r, hvd_poll(NULL, 1), HVD_NOT_INITIALIZED);
    CHECK_STATUS(r, hvd_shutdown(NULL), HVD_NOT_INITIALIZED);
    CHECK_STATUS(r, hvd_health(NULL, r->text, sizeof r->text), HVD_NOT_INITIALIZED);
    CHECK_INT(r, hvd_rank(NULL), HVD_NOT_INITIALIZED);
    CHECK_INT(r, hvd_size(NULL), HVD_NOT_INITIALIZED);
}

// In the child: every door is closed, and the parent's job is not hurt.
static int try_as_child(rank_t *r, hvd_handle_t handle)
{
    hvd_result_t result;
    hvd_handle_t mine;
    int id;
    hvd_request_t request = {.op = HVD_BARRIER};
    CHECK_STATUS(r, hvd_submit(r->ctx, &request, &mine, r->text, sizeof r->text), HVD_FORKED);
    CHECK_HAS(r, r->text, "fork");
    CHECK_STATUS(r, hvd_wait(r->ctx, handle, 1000), HVD_FORKED);
    CHECK_STATUS(r, hvd_poll(r->ctx, handle), HVD_FORKED);
    CHECK_STATUS(r, hvd_result(r->ctx, handle, &result), HVD_FORKED);
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, &r->rank, 1, &id, r->text, sizeof r->text),
                 HVD_FORKED);
    CHECK_STATUS(r, hvd_health(r->ctx, r->text, sizeof r->text), HVD_FORKED);
    CHECK_STATUS(r, hvd_timeline_start(r->ctx, "never.json", false, NULL, 0), HVD_FORKED);
    CHECK_STATUS(r, hvd_timeline_stop(r->ctx), HVD_FORKED);
    hvd_release(r->ctx, handle);
    CHECK_STATUS(r, hvd_shutdown(r->ctx), HVD_FORKED);
    return 0;
}

static void forked_child(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    still_works(r);
    draft_t d;
    draft_new(r, &d, HVD_ALLREDUCE, "over the fork", N_VALUES);
    hvd_handle_t handle;
    if (r->rank == 0) {
        CHECK_OK(r, hvd_submit(r->ctx, &d.request, &handle, r->text, sizeof r->text));
        pid_t child = fork();
        if (child == 0) {
            _exit(try_as_child(r, handle));
        }
        int state = -1;
        CHECK_INT(r, waitpid(child, &state, 0), child);
        CHECK_INT(r, state, 0);
        atomic_store(rank_shared(r, 0), 1);
    } else {
        rank_wait_for(r, rank_shared(r, 0), 1);
        CHECK_OK(r, hvd_submit(r->ctx, &d.request, &handle, r->text, sizeof r->text));
    }
    CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
    hvd_release(r->ctx, handle);
    still_works(r);
    draft_free(&d);
    rank_close(r);
}

// --- What keeps init from succeeding ------------------------------------------------------------

#define DROPPED NULL

// Only one rank comes; all the others are missing. Each row changes up to two variables.
static const struct {
    const char *changes[2][2];
    bool without_secret;
    const char *part;
} bad_environments[] = {
    {{{"HOROVOD_RANK", "2"}}, false, "HOROVOD_RANK"},
    {{{"HOROVOD_RANK", "two"}}, false, "HOROVOD_RANK"},
    {{{"HOROVOD_RANK", "-1"}}, false, "HOROVOD_RANK"},
    {{{"HOROVOD_RANK", DROPPED}}, false, "HOROVOD_RANK"},
    {{{"HOROVOD_SIZE", DROPPED}}, false, "HOROVOD_SIZE"},
    {{{"HOROVOD_SIZE", "0"}}, false, "HOROVOD_SIZE"},
    {{{"HOROVOD_LOCAL_RANK", "1"}}, false, "HOROVOD_LOCAL_RANK"},
    {{{"HOROVOD_LOCAL_SIZE", "9"}}, false, "HOROVOD_LOCAL_SIZE"},
    {{{"HOROVOD_LOCAL_SIZE", DROPPED}}, false, "HOROVOD_LOCAL_SIZE"},
    {{{"HOROVOD_CROSS_RANK", "5"}}, false, "HOROVOD_CROSS_RANK"},
    {{{"HOROVOD_RENDEZVOUS_ADDR", DROPPED}}, false, "HOROVOD_RENDEZVOUS_ADDR"},
    {{{"HOROVOD_RENDEZVOUS_PORT", DROPPED}}, false, "HOROVOD_RENDEZVOUS_PORT"},
    {{{"HOROVOD_RENDEZVOUS_PORT", "70000"}}, false, "HOROVOD_RENDEZVOUS_PORT"},
    {{{"HOROVOD_RENDEZVOUS_PORT", "1"}, {"HOROVOD_START_TIMEOUT", "1"}}, false, "127.0.0.1"},
    {{{"HOROVOD_START_TIMEOUT", "1"}}, false, "rank"},
    {{{"HOROVOD_START_TIMEOUT", "soon"}}, false, "HOROVOD_START_TIMEOUT"},
    {{{"HOROVOD_ENCRYPT", "sometimes"}}, false, "HOROVOD_ENCRYPT"},
    {{{"HOROVOD_INLINE_BYTES", "1G"}}, false, "HOROVOD_INLINE_BYTES"},
    {{{"HOROVOD_CACHE_CAPACITY", "-3"}}, false, "HOROVOD_CACHE_CAPACITY"},
    {{{"HOROVOD_FUSION_THRESHOLD", "lots"}}, false, "HOROVOD_FUSION_THRESHOLD"},
    {{{"HOROVOD_SECRET_FILE", DROPPED}}, true, "HOROVOD_SECRET_FILE"},
    {{{"HOROVOD_SECRET_FILE", "/nowhere/at/all"}}, true, "HOROVOD_SECRET_FILE"},
    {{{"HOROVOD_SECRET_FILE", "/dev/null"}}, true, "HOROVOD_SECRET_FILE"},
};

static void bad_environment(rank_t *r, void *arg)
{
    (void)arg;
    if (r->rank > 0) {
        return;
    }
    for (size_t row = 0; row < N_ELEMENTS(bad_environments); row++) {
        // As rank 0 of two, the other of which never comes.
        static const char *const names[] = {"HOROVOD_RANK",       "HOROVOD_SIZE",
                                            "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
                                            "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"};
        static const char *const values[] = {"0", "2", "0", "1", "0", "2"};
        rank_t spoilt = rank_thread(r, 1);
        for (size_t i = 0; i < N_ELEMENTS(names); i++) {
            rank_setenv(&spoilt, names[i], values[i]);
        }
        rank_setenv(&spoilt, "HOROVOD_RENDEZVOUS_ADDR", "127.0.0.1");
        for (int i = 0; i < r->n_env; i++) {
            if (strncmp(r->env[i], "HOROVOD_RENDEZVOUS_PORT=", 24) == 0) {
                rank_setenv(&spoilt, "HOROVOD_RENDEZVOUS_PORT", r->env[i] + 24);
            }
        }
        for (int i = 0; i < 2 && bad_environments[row].changes[i][0] != NULL; i++) {
            rank_setenv(&spoilt, bad_environments[row].changes[i][0],
                        bad_environments[row].changes[i][1]);
        }
        spoilt.without_secret = bad_environments[row].without_secret;
        rank_step(&spoilt, "row %zu: %s", row, bad_environments[row].changes[0][0]);
        hvd_status_t status = rank_try_open(&spoilt, NULL);
        CHECK(&spoilt, status != HVD_OK);
        CHECK_HAS(&spoilt, spoilt.text, bad_environments[row].part);
        for (int i = 0; i < spoilt.n_env; i++) {
            free(spoilt.env[i]);
        }
    }
}

// Too open, too short, from a pipe that gives too little.
static void bad_secrets(rank_t *r, void *arg)
{
    (void)arg;
    static const struct {
        const char *content;
        mode_t mode;
        const char *part;
    } files[] = {
        {"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", 0644, "chmod 600"},
        {"0123456789abcdef", 0600, "64 hexadecimal digits"},
        {"g123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", 0600,
         "64 hexadecimal digits"},
        {"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", 0600, "secret"},
    };
    if (r->rank > 0) {
        return;
    }
    rank_setenv(r, "HOROVOD_START_TIMEOUT", "3");
    r->without_secret = true;
    for (size_t i = 0; i < N_ELEMENTS(files); i++) {
        char path[] = "/tmp/hvd-test-secret-XXXXXX";
        int fd = mkstemp(path);
        CHECK(r, fd >= 0);
        size_t bytes = strlen(files[i].content);
        CHECK_INT(r, write(fd, files[i].content, bytes), bytes);
        CHECK_INT(r, fchmod(fd, files[i].mode), 0);
        close(fd);
        rank_setenv(r, "HOROVOD_SECRET_FILE", path);
        rank_step(r, "file %zu", i);
        hvd_status_t status = rank_try_open(r, NULL);
        unlink(path);
        CHECK(r, status != HVD_OK);
        CHECK_HAS(r, r->text, files[i].part);
        CHECK(r, strstr(r->text, "0123456789abcdef") == NULL); // no sentence tells it
    }
}

// What all ranks have wrong alike and only shows once they have met.
static void bad_transport(rank_t *r, void *arg)
{
    (void)arg;
    rank_setenv(r, "HOROVOD_TRANSPORTS", "pigeon");
    CHECK(r, rank_try_open(r, NULL) != HVD_OK);
    CHECK_HAS(r, r->text, "pigeon");
    rank_setenv(r, "HOROVOD_TRANSPORTS", NULL);
    rank_open(r); // a failed start leaves nothing behind
    still_works(r);
    rank_close(r);
}

// At init or at the first operation that needs it, but with a sentence, and on all ranks.
static void bad_algorithm(rank_t *r, void *arg)
{
    (void)arg;
    rank_setenv(r, "HOROVOD_ALGORITHM", "allreduce=magic");
    hvd_status_t status = rank_try_open(r, NULL);
    if (status == HVD_OK) {
        draft_t d;
        draft_new(r, &d, HVD_ALLREDUCE, "by magic", N_LARGE / 3 * 3);
        status = rank_call(r, &d.request);
        draft_free(&d);
        hvd_shutdown(r->ctx);
    }
    CHECK_STATUS(r, status, HVD_INVALID_ARGUMENT);
    CHECK_HAS(r, r->text, "HOROVOD_ALGORITHM");
    CHECK_HAS(r, r->text, "magic");
}

// One of three never comes: the others say which.
static void missing_rank(rank_t *r, void *arg)
{
    (void)arg;
    if (r->rank == r->size - 1) {
        return;
    }
    char missing[16];
    snprintf(missing, sizeof missing, "%d", r->size - 1);
    rank_setenv(r, "HOROVOD_START_TIMEOUT", "2");
    rank_step(r, "init in vain");
    uint64_t start_ns = clock_ns();
    hvd_status_t status = rank_try_open(r, NULL);
    CHECK_STATUS(r, status, HVD_TIMEOUT);
    CHECK_HAS(r, r->text, missing);
    CHECK(r, clock_ns() - start_ns < 20 * NS_PER_S * PATIENCE);
}

// Ranks in a world that is not theirs.
static void not_a_member(rank_t *r, void *arg)
{
    (void)arg;
    rank_step(r, "init");
    const int last[] = {r->size - 1};
    const int *sets[] = {last};
    const int sizes[] = {1};
    hvd_options_t more = {.process_sets = sets, .process_set_sizes = sizes, .n_process_sets = 1};
    CHECK_OK(r, rank_try_open(r, &more));
    draft_t d;
    draft_new(r, &d, HVD_BROADCAST, "not mine", N_VALUES);
    d.request.process_set = 1;
    if (r->rank != r->size - 1) {
        char text[64];
        snprintf(text, sizeof text, "Rank %d is not a member of the provided process set.",
                 r->rank);
        CHECK_STATUS(r, rank_call(r, &d.request), HVD_NOT_MEMBER);
        CHECK_HAS(r, r->text, text);
        CHECK_INT(r, hvd_process_set_rank(r->ctx, 1), HVD_NOT_MEMBER);
    } else {
        CHECK_STATUS(r, rank_call(r, &d.request), HVD_INVALID_ARGUMENT); // root 0 is none either
        CHECK_HAS(r, r->text, "broadcast received invalid root rank 0 for provided process set");
        d.request.root = r->rank;
        CHECK_OK(r, rank_call(r, &d.request));
    }
    still_works(r);
    draft_free(&d);
    rank_close(r);
}

static const subtest_t subtests[] = {
    {.name = "ranks disagree", .fn = ranks_disagree, .min_ranks = 2},
    {.name = "remembered, then different", .fn = remembered_then_different, .min_ranks = 2},
    {.name = "refused at once", .fn = refused_at_once, .min_ranks = 2},
    {.name = "refused after the end", .fn = refused_after_the_end, .min_ranks = 2},
    {.name = "same name twice", .fn = same_name_twice, .min_ranks = 2},
    {.name = "handles", .fn = handles},
    {.name = "wait, poll, callback", .fn = wait_poll_callback, .min_ranks = 2},
    {.name = "no memory for output", .fn = no_memory_for_output, .min_ranks = 2},
    {.name = "not a member", .fn = not_a_member, .min_ranks = 2},
    {.name = "after shutdown", .fn = after_shutdown, .min_ranks = 2},
    {.name = "forked child", .fn = forked_child, .min_ranks = 2},
    {.name = "without context", .fn = without_context, .one_world_only = true},
    {.name = "bad environment", .fn = bad_environment, .one_world_only = true},
    {.name = "bad secrets", .fn = bad_secrets, .min_ranks = 2, .one_world_only = true},
    {.name = "bad transport", .fn = bad_transport, .min_ranks = 2},
    {.name = "bad algorithm", .fn = bad_algorithm, .min_ranks = 2},
    {.name = "missing rank", .fn = missing_rank, .min_ranks = 2, .one_world_only = true},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
