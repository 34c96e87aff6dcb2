// SPDX-License-Identifier: Apache-2.0
//
// submit.c - hvd_submit: from what the user asks for to a request that is on its way.
//
// What this rank can check by itself is checked here; what other ranks must agree to is checked by
// coord and shows in the handle. The signature is made here, once, and handed on by pointer. All of
// it happens under the lock and copies what the user may change afterwards; tensors stay where they
// are. Whoever asks for the same as before under that name gets the object that did it, in which
// all of that still stands: then only what may have changed is checked and copied.
#include "engine/staging.h"

#include <stdio.h>

#define MAX_TENSORS 65536

// --- Is the request well formed ------------------------------------------------------------------

// Of all tensors together.
typedef struct extent {
    size_t n_dims, n_elements;
} extent_t;

static int64_t rows_of(const hvd_tensor_t *tensor)
{
    return tensor->n_dims > 0 ? tensor->shape[0] : 0;
}

// Adds the tensor to the extent.
static hvd_status_t check_tensor(const hvd_request_t *asked, const char *name, int i,
                                 extent_t *extent, err_t *err)
{
    const hvd_tensor_t *tensor = &asked->tensors[i];
    if (tensor->n_dims < 0 || tensor->n_dims > HVD_MAX_DIMS ||
        (tensor->n_dims > 0 && tensor->shape == NULL)) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "tensor %d of '%s' has %d dimensions; 0 to %d are allowed", i, name,
                    tensor->n_dims, HVD_MAX_DIMS);
    }
    int64_t n = 1;
    bool is_empty = false, is_too_large = false; // a row of an empty one must be countable, too
    for (int d = 0; d < tensor->n_dims; d++) {
        if (tensor->shape[d] < 0) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "dimension %d of tensor %d of '%s' is negative: %lld", d, i, name,
                        (long long)tensor->shape[d]);
        }
        is_empty |= tensor->shape[d] == 0;
        is_too_large |= __builtin_mul_overflow(n, MAX(tensor->shape[d], 1), &n);
    }
    if (is_too_large || n > INT64_MAX / 16) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "tensor %d of '%s' is too large: its dimensions multiply to more than 2^59", i,
                    name);
    }
    if (!is_empty && tensor->input == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT, "tensor %d of '%s' has no data", i, name);
    }
    extent->n_dims += (size_t)tensor->n_dims;
    extent->n_elements += is_empty ? 0 : (size_t)n;
    return HVD_OK;
}

static hvd_status_t check_root(const hvd_request_t *asked, const process_set_t *set, err_t *err)
{
    for (int m = 0; m < set->n; m++) {
        if (set->ranks[m] == asked->root) {
            return HVD_OK;
        }
    }
    return fail(err, HVD_INVALID_ARGUMENT,
                "%s received invalid root rank %d for provided process set", hvd_op_name(asked->op),
                asked->root);
}

static hvd_status_t check_splits(const hvd_request_t *asked, const process_set_t *set, err_t *err)
{
    int64_t rows = rows_of(&asked->tensors[0]);
    if (asked->splits == NULL) {
        return rows % set->n == 0
                   ? HVD_OK
                   : fail(err, HVD_INVALID_ARGUMENT,
                          "splits not provided, but first dimension of tensor is not an even "
                          "multiple of the number of workers.");
    }
    if (asked->n_splits != set->n) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "Number of entries in splits does not equal number of workers.");
    }
    int64_t sum = 0;
    for (int m = 0; m < set->n; m++) {
        if (asked->splits[m] < 0) {
            return fail(err, HVD_INVALID_ARGUMENT, "splits[%d] of alltoall is negative: %d", m,
                        asked->splits[m]);
        }
        sum += asked->splits[m];
    }
    if (sum > rows) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "Sum of splits entries is greater than the first dimension of tensor.");
    }
    return HVD_OK;
}

static hvd_status_t check_reduction(const hvd_request_t *asked, const char *name, err_t *err)
{
    if ((unsigned)asked->reduce >= HVD_N_REDUCES) {
        return fail(err, HVD_INVALID_ARGUMENT, "'%s' asks for an unknown reduction: %d", name,
                    asked->reduce);
    }
    bool sums = asked->reduce == HVD_SUM || asked->reduce == HVD_AVERAGE;
    if (op_has(asked->op, OP_SUMS_ONLY) && !sums) {
        return fail(err, HVD_UNSUPPORTED, "%s currently only supports AVERAGE and SUM.",
                    op_infos[asked->op].title);
    }
    if (asked->reduce == HVD_ADASUM && !dtype_is_floating(asked->dtype)) {
        return fail(err, HVD_INVALID_ARGUMENT, "Adasum needs floating point; '%s' is %s", name,
                    hvd_dtype_name(asked->dtype));
    }
    return HVD_OK;
}

static hvd_status_t check_tensors(const hvd_request_t *asked, const char *name, extent_t *extent,
                                  err_t *err)
{
    hvd_status_t status = HVD_OK;
    for (int i = 0; i < asked->n_tensors && status == HVD_OK; i++) {
        status = check_tensor(asked, name, i, extent, err);
    }
    return status;
}

static hvd_status_t check_request(const hvd_request_t *asked, const char *name,
                                  const process_set_t *set, extent_t *extent, err_t *err)
{
    if ((unsigned)asked->dtype >= HVD_N_DTYPES) {
        return fail(err, HVD_INVALID_ARGUMENT, "'%s' has an unknown dtype: %d", name, asked->dtype);
    }
    bool bare = op_infos[asked->op].layout == LAYOUT_NOTHING;
    if (bare ? asked->n_tensors != 0 : (asked->n_tensors < 1 || asked->tensors == NULL)) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s '%s' has %d tensor%s; it takes %s",
                    hvd_op_name(asked->op), name, asked->n_tensors, plural(asked->n_tensors),
                    bare ? "none" : "one or more");
    }
    if (op_has(asked->op, OP_ONE_TENSOR) && asked->n_tensors != 1) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s takes one tensor, not %d",
                    hvd_op_name(asked->op), asked->n_tensors);
    }
    if (asked->n_tensors > MAX_TENSORS) {
        return fail(err, HVD_INVALID_ARGUMENT, "group '%s' has %d tensors; at most %d are allowed",
                    name, asked->n_tensors, MAX_TENSORS);
    }
    hvd_status_t status = check_tensors(asked, name, extent, err);
    if (status == HVD_OK && op_has(asked->op, OP_ROOTED)) {
        status = check_root(asked, set, err);
    }
    if (status == HVD_OK && op_infos[asked->op].sizes == SIZES_PER_MEMBER) {
        status = check_splits(asked, set, err);
    }
    if (status == HVD_OK && op_has(asked->op, OP_REDUCES)) {
        status = check_reduction(asked, name, err);
    }
    return status;
}

// --- Copying it ----------------------------------------------------------------------------------

static char *copy_text(request_t *request, const char *text)
{
    size_t bytes = strlen(text) + 1;
    return memcpy(request_cut(request, bytes), text, bytes);
}

// Room for everything a request keeps: tensors, shapes twice (as given, and as all must agree),
// sizes, texts, and what rides along.
static size_t storage_bytes(const hvd_ctx_t *ctx, const hvd_request_t *asked, const char *name,
                            int n_members, const extent_t *extent)
{
    size_t n = (size_t)asked->n_tensors;
    size_t texts = strlen(name) + 1 + (asked->where != NULL ? strlen(asked->where) + 1 : 0);
    size_t n_words =
        2 * extent->n_dims + 2 * n + (size_t)n_members; // sizes: per tensor, or per member
    return n * (sizeof(hvd_tensor_t) + sizeof(void *)) + n_words * sizeof(int64_t) + texts +
           MIN(extent->n_elements * sizeof(double), ctx->config.inline_bytes) + 64;
}

static void copy_tensors(request_t *request, const hvd_request_t *asked, size_t n_dims)
{
    size_t n = (size_t)asked->n_tensors;
    bool first_differs = op_infos[asked->op].sizes != SIZES_NONE;
    request->tensors = request_cut(request, n * sizeof *request->tensors);
    request->owned = request_cut(request, n * sizeof *request->owned);
    int64_t *shapes = request_cut(request, n_dims * sizeof *shapes);
    int64_t *words = request_cut(request, (n_dims + n) * sizeof *words);
    request->signature.dims = words;
    request->signature.n_dims_words = (int)(n_dims + n);
    for (size_t i = 0; i < n; i++) {
        const hvd_tensor_t *tensor = &asked->tensors[i];
        request->tensors[i] = *tensor;
        request->tensors[i].shape = shapes;
        request->owned[i] = NULL;
        *words++ = tensor->n_dims;
        for (int d = 0; d < tensor->n_dims; d++) {
            *shapes++ = tensor->shape[d];
            *words++ = d == 0 && first_differs ? -1 : tensor->shape[d];
        }
    }
}

static void note_sizes(request_t *request, const hvd_request_t *asked, int n_members)
{
    bool per_member = op_infos[asked->op].sizes == SIZES_PER_MEMBER;
    for (int i = 0; i < request->n_sizes; i++) {
        request->sizes[i] = !per_member             ? rows_of(&asked->tensors[i])
                            : asked->splits != NULL ? asked->splits[i]
                                                    : rows_of(&asked->tensors[0]) / n_members;
    }
}

static void copy_sizes(request_t *request, const hvd_request_t *asked, int n_members)
{
    request->n_sizes = signature_n_sizes(&request->signature, n_members);
    request->sizes = request_cut(request, (size_t)request->n_sizes * sizeof *request->sizes);
    note_sizes(request, asked, n_members);
}

void request_make_room(const hvd_ctx_t *ctx, request_t *request)
{
    LOCKED(ctx);
    if (signature_rides(&request->signature, ctx->config.inline_bytes, &request->payload_bytes)) {
        request->payload = request_cut(request, request->payload_bytes);
    }
}

static signature_t signature_of(const hvd_request_t *asked)
{
    bool scaled = (asked->flags & HVD_SCALED) != 0;
    return (signature_t){
        .op = asked->op,
        .dtype = asked->dtype,
        .reduce = op_has(asked->op, OP_REDUCES) ? asked->reduce : HVD_SUM,
        .root = op_has(asked->op, OP_ROOTED) ? asked->root : 0,
        .prescale = scaled ? asked->prescale : 1.0,
        .postscale = scaled ? asked->postscale : 1.0,
        .n_tensors = asked->n_tensors,
    };
}

static hvd_status_t copy_request(hvd_ctx_t *ctx, request_t *request, const hvd_request_t *asked,
                                 const char *name, const process_set_t *set, const extent_t *extent,
                                 err_t *err) REQUIRES(ctx->lock)
{
    buf_clear(&request->storage);
    if (!buf_reserve(&request->storage, storage_bytes(ctx, asked, name, set->n, extent))) {
        return fail(err, HVD_NO_MEMORY, "no memory to submit '%s'", name);
    }
    request->signature = signature_of(asked);
    request->process_set = asked->process_set;
    request->set_hash = set->hash;
    request->alloc = asked->alloc;
    request->done = asked->done;
    request->arg = asked->arg;
    copy_tensors(request, asked, extent->n_dims);
    copy_sizes(request, asked, set->n);
    if (LIKELY((asked->flags & HVD_ON_DEVICE) == 0)) { // else it is not known yet
        request_make_room(ctx, request);
    }
    request->name = copy_text(request, name);
    request->where = asked->where != NULL ? copy_text(request, asked->where) : NULL;
    trace_describe(&request->trace, &request->signature, request->tensors, request->name,
                   request->where, request->process_set);
    request->trace.bytes = extent->n_elements * hvd_dtype_bytes(asked->dtype);
    return HVD_OK;
}

// --- The same again ------------------------------------------------------------------------------

static bool same_text(const char *a, const char *b)
{
    return a == NULL || b == NULL ? a == b : strcmp(a, b) == 0;
}

// But for the first dimension where members tell it.
static bool same_shapes(const request_t *request, const hvd_request_t *asked)
{
    const int64_t *words = request->signature.dims;
    for (int i = 0; i < asked->n_tensors; i++) {
        const hvd_tensor_t *tensor = &asked->tensors[i];
        if (*words++ != tensor->n_dims || (tensor->n_dims > 0 && tensor->shape == NULL)) {
            return false;
        }
        for (int d = 0; d < tensor->n_dims; d++, words++) {
            if (*words != tensor->shape[d] && *words >= 0) {
                return false;
            }
        }
    }
    return true;
}

// Does the object at rest stand for the same? Then nothing that it keeps need be checked again.
static bool is_the_same(const request_t *request, const hvd_request_t *asked,
                        const process_set_t *set)
{
    const signature_t *was = &request->signature;
    bool scaled = (asked->flags & HVD_SCALED) != 0;
    return request->is_remembered &&
           atomic_load_explicit(&request->state, memory_order_relaxed) == REQUEST_FREE &&
           was->op == asked->op && was->dtype == asked->dtype &&
           was->n_tensors == asked->n_tensors && request->set_hash == set->hash &&
           (was->reduce == asked->reduce || !op_has(was->op, OP_REDUCES)) &&
           (was->root == asked->root || !op_has(was->op, OP_ROOTED)) &&
           was->prescale == (scaled ? asked->prescale : 1.0) &&
           was->postscale == (scaled ? asked->postscale : 1.0) &&
           (asked->flags & HVD_ON_DEVICE) == 0 && (asked->tensors != NULL || was->n_tensors == 0) &&
           same_shapes(request, asked) && same_text(request->where, asked->where);
}

static bool all_have_data(const hvd_request_t *asked)
{
    bool all = true;
    for (int i = 0; i < asked->n_tensors; i++) {
        all &= asked->tensors[i].input != NULL;
    }
    return all;
}

// What members tell each other anew.
static void renew_sizes(request_t *request, const hvd_request_t *asked, int n_members,
                        const extent_t *extent)
{
    note_sizes(request, asked, n_members);
    request->trace.bytes = extent->n_elements * hvd_dtype_bytes(asked->dtype);
}

// Its addresses, and rows, in whose place may stand those of its last output.
static void renew_request(request_t *request, const hvd_request_t *asked)
{
    for (int i = 0; i < asked->n_tensors; i++) {
        const hvd_tensor_t *tensor = &asked->tensors[i];
        request->tensors[i].input = tensor->input;
        request->tensors[i].output = tensor->output;
        if (tensor->n_dims > 0) {
            *(int64_t *)(uintptr_t)request->tensors[i].shape = tensor->shape[0];
        }
    }
    request->alloc = asked->alloc;
    request->done = asked->done;
    request->arg = asked->arg;
}

// --- Submitting ----------------------------------------------------------------------------------

// The set this rank may use, or an error.
static process_set_t *usable_set(const hvd_ctx_t *ctx, int id, err_t *err) REQUIRES(ctx->lock)
{
    process_set_t *set = set_find(ctx, id);
    if (set == NULL) {
        fail(err, HVD_UNKNOWN_SET,
             "Process set provided does not exist, or has not been registered.");
    } else if (set->member < 0) {
        fail(err, HVD_NOT_MEMBER, "Rank %d is not a member of the provided process set.",
             ctx->job.rank);
        set = NULL;
    }
    return set;
}

#define SERIES_BYTES 80 // what names show of one

// Ranks submit the nameless operations of a series in the same order, so counting names them alike.
// Each join has numbers of its own: what was submitted before may still be in flight. NULL: no
// memory.
static const char *name_of(const hvd_ctx_t *ctx, const hvd_request_t *asked, process_set_t *set,
                           char *made, size_t bytes) REQUIRES(ctx->lock)
{
    if (asked->name != NULL) {
        return asked->name;
    }
    series_t *series = set_series(set, asked->series != NULL ? asked->series : "");
    if (series == NULL) {
        return NULL;
    }
    char joins[16] = "";
    if (ctx->n_joins > 0) {
        snprintf(joins, sizeof joins, "%u.", ctx->n_joins);
    }
    snprintf(made, bytes, "%s.noname.%.*s%s%s%llu", hvd_op_name(asked->op), SERIES_BYTES,
             series->name, series->name[0] == '\0' ? "" : ".", joins,
             (unsigned long long)++series->n[asked->op]);
    return made;
}

static hvd_status_t fail_duplicate(const hvd_ctx_t *ctx, const request_t *first, err_t *err)
{
    const char *where = first->where;
    return fail(
        err, HVD_DUPLICATE_NAME,
        "Requested to %s a tensor with the same name as another tensor that is currently being "
        "processed: '%s' on rank %d%s%s%s. Give each tensor in flight a name of its own.",
        hvd_op_name(first->signature.op), first->name, ctx->job.rank,
        where != NULL ? " (that one was submitted at " : "", where != NULL ? where : "",
        where != NULL ? ")" : "");
}

// The object at rest that did the same under this name.
static hvd_status_t take_again(hvd_ctx_t *ctx, const hvd_request_t *asked, const process_set_t *set,
                               request_t *request, err_t *err) REQUIRES(ctx->lock)
{
    hvd_status_t status = HVD_OK;
    if (request->n_sizes > 0 || !all_have_data(asked)) { // else its shapes have been checked
        extent_t extent = {0};
        status = check_tensors(asked, request->name, &extent, err);
        if (status == HVD_OK && op_infos[asked->op].sizes == SIZES_PER_MEMBER) {
            status = check_splits(asked, set, err);
        }
        if (status != HVD_OK) {
            return status;
        }
        renew_sizes(request, asked, set->n, &extent);
    }
    request_again(ctx, request);
    renew_request(request, asked);
    return HVD_OK;
}

// Another one. `known`: has that name; NULL: none has.
static hvd_status_t take_new(hvd_ctx_t *ctx, const hvd_request_t *asked, const char *name,
                             uint64_t hash, const process_set_t *set, const request_t *known,
                             request_t **request_p, err_t *err) REQUIRES(ctx->lock)
{
    extent_t extent = {0};
    hvd_status_t status = check_request(asked, name, set, &extent, err);
    if (status != HVD_OK) {
        return status;
    }
    if (known != NULL &&
        atomic_load_explicit(&known->state, memory_order_relaxed) == REQUEST_IN_FLIGHT) {
        return fail_duplicate(ctx, known, err);
    }
    request_t *request = request_new(ctx);
    if (request == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to submit '%s'", name);
    }
    if ((status = copy_request(ctx, request, asked, name, set, &extent, err)) != HVD_OK) {
        ctx->requests.newest = NULL; // it may have been this object
        request_recycle(ctx, request);
        return status;
    }
    request->hash = hash;
    request->is_remembered = asked->name != NULL && (asked->flags & HVD_ON_DEVICE) == 0;
    request_register(ctx, request);
    *request_p = request;
    return HVD_OK;
}

// The job has ended, as `err` says. A request that is wrong in itself is told so all the same: what
// a rank hears of its own mistake must not depend on whether another has left already.
static hvd_status_t refuse(hvd_ctx_t *ctx, const hvd_request_t *asked, const process_set_t *set,
                           hvd_status_t status, err_t *err) REQUIRES(ctx->lock)
{
    err_t wrong = {0};
    extent_t extent = {0};
    const char *name = asked->name != NULL ? asked->name : hvd_op_name(asked->op);
    if (check_request(asked, name, set, &extent, &wrong) != HVD_OK) {
        *err = wrong;
        return wrong.status;
    }
    note_blame(ctx);
    return status;
}

static hvd_status_t submit_locked(hvd_ctx_t *ctx, const hvd_request_t *asked,
                                  hvd_handle_t *handle_p, err_t *err) REQUIRES(ctx->lock)
{
    if ((unsigned)asked->op >= HVD_N_OPS) {
        return fail(err, HVD_INVALID_ARGUMENT, "unknown operation %d", asked->op);
    }
    process_set_t *set = usable_set(ctx, asked->process_set, err);
    if (set == NULL) {
        return err->status;
    }
    hvd_status_t status = check_running(ctx, err);
    if (UNLIKELY(status != HVD_OK)) {
        return refuse(ctx, asked, set, status, err);
    }
    char made[64 + SERIES_BYTES];
    const char *name = name_of(ctx, asked, set, made, sizeof made);
    if (name == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to name a %s", hvd_op_name(asked->op));
    }
    uint64_t hash = hash_bytes(name, strlen(name), (uint64_t)asked->process_set);
    request_t *request = request_by_name(ctx, hash, asked->process_set, name);
    status = request != NULL && is_the_same(request, asked, set)
                 ? take_again(ctx, asked, set, request, err)
                 : take_new(ctx, asked, name, hash, set, request, &request, err);
    if (status != HVD_OK) {
        return status;
    }
    bool on_device = (asked->flags & HVD_ON_DEVICE) != 0;
    bool on_board = !on_device && board_arrive(ctx, request, set, asked->flags);
    // On the board, what follows is done while the contributions travel between the cores.
    atomic_store_explicit(&request->board.waits, on_board, memory_order_relaxed);
    ctx->requests.n_submitted++;
    ctx->requests.newest = request;
    observe_submitted(ctx->observe, &request->trace, on_board);
    if (UNLIKELY(on_device)) {
        atomic_store(&request->held_by_device, true);
    } else if (!on_board) {
        request_enqueue(ctx, request);
    }
    *handle_p = atomic_load_explicit(&request->handle, memory_order_relaxed);
    return HVD_OK;
}

// Its tensors are a GPU's: copies are queued without the lock. One that cannot be is forgotten.
static hvd_status_t submit_staged(hvd_ctx_t *ctx, const hvd_request_t *asked, hvd_handle_t handle,
                                  err_t *err)
{
    request_t *request = request_find(ctx, handle);
    hvd_status_t status = staging_begin(ctx, asked, request, err);
    if (status != HVD_OK) {
        atomic_fetch_add_explicit(&ctx->requests.n_in_flight, 1, memory_order_relaxed);
        request_complete(ctx, request, status, err->text);
        hvd_release(ctx, handle);
    }
    return status;
}

hvd_status_t hvd_submit(hvd_ctx_t *ctx, const hvd_request_t *request, hvd_handle_t *handle_p,
                        char *text, size_t text_bytes)
{
    err_t err;
    err.text[0] = '\0';
    hvd_status_t status = check_context(ctx, &err);
    if (status == HVD_OK) {
        if (UNLIKELY(ctx->config.check_numerics)) {
            numerics_check(ctx, request);
        }
        lock_take(&ctx->lock);
        status = submit_locked(ctx, request, handle_p, &err);
        lock_release(&ctx->lock);
    }
    if (status == HVD_OK && UNLIKELY((request->flags & HVD_ON_DEVICE) != 0)) {
        status = submit_staged(ctx, request, *handle_p, &err);
    }
    if (UNLIKELY(status != HVD_OK)) {
        return err_export(&err, status, text, text_bytes);
    }
    if ((request->flags & HVD_WAITS) == 0) {
        engine_notify(ctx);
    }
    return HVD_OK;
}
