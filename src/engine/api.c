// SPDX-License-Identifier: Apache-2.0
//
// api.c - the public functions: checks what can be checked on this rank alone, copies the request,
// hands out the handle. What other ranks must agree to is checked by coord and shows in the handle.
#include "engine/engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_TENSORS 65536

// --- Is the context usable -----------------------------------------------------------------------

static hvd_status_t check_context(const hvd_ctx_t *ctx, err_t *err)
{
    if (ctx == NULL) {
        return fail(err, HVD_NOT_INITIALIZED, "Horovod has not been initialized; use hvd.init().");
    }
    if (UNLIKELY(atomic_load_explicit(ctx->alive, memory_order_relaxed) == 0)) {
        return fail(
            err, HVD_FORKED,
            "this process was forked from rank %d and cannot use its parent's context: call "
            "the library only in the parent, start the child with exec (spawn), or call init in "
            "the children of all ranks, which then are a job of their own",
            ctx->job.rank);
    }
    return HVD_OK;
}

// Under lock.
static hvd_status_t check_running(const hvd_ctx_t *ctx, err_t *err)
{
    if (ctx->ended.status != HVD_OK) {
        return fail(err, ctx->ended.status, "%s", ctx->ended.text);
    }
    return HVD_OK;
}

// --- Is the request well formed ------------------------------------------------------------------

static int64_t n_elements(const hvd_tensor_t *tensor)
{
    int64_t n = 1;
    for (int d = 0; d < tensor->n_dims; d++) {
        n *= tensor->shape[d];
    }
    return n;
}

static hvd_status_t check_tensor(const hvd_request_t *asked, const char *name, int i, err_t *err)
{
    const hvd_tensor_t *tensor = &asked->tensors[i];
    if (tensor->n_dims < 0 || tensor->n_dims > HVD_MAX_DIMS ||
        (tensor->n_dims > 0 && tensor->shape == NULL)) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "tensor %d of '%s' has %d dimensions; 0 to %d are allowed", i, name,
                    tensor->n_dims, HVD_MAX_DIMS);
    }
    double n = 1;
    for (int d = 0; d < tensor->n_dims; d++) {
        if (tensor->shape[d] < 0) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "dimension %d of tensor %d of '%s' is negative: %lld", d, i, name,
                        (long long)tensor->shape[d]);
        }
        n *= (double)tensor->shape[d];
    }
    if (n > (double)(INT64_MAX / 16)) {
        return fail(err, HVD_INVALID_ARGUMENT, "tensor %d of '%s' is too large", i, name);
    }
    if (n > 0 && tensor->input == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT, "tensor %d of '%s' has no data", i, name);
    }
    return HVD_OK;
}

static hvd_status_t check_broadcast(const hvd_request_t *asked, const process_set_t *set,
                                    err_t *err)
{
    for (int m = 0; m < set->n; m++) {
        if (set->ranks[m] == asked->root) {
            return HVD_OK;
        }
    }
    return fail(err, HVD_INVALID_ARGUMENT,
                "broadcast received invalid root rank %d for provided process set", asked->root);
}

static hvd_status_t check_alltoall(const hvd_request_t *asked, const process_set_t *set, err_t *err)
{
    if (asked->n_tensors != 1) {
        return fail(err, HVD_INVALID_ARGUMENT, "alltoall takes one tensor, not %d",
                    asked->n_tensors);
    }
    int64_t rows = asked->tensors[0].n_dims > 0 ? asked->tensors[0].shape[0] : 0;
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
    bool floating = asked->dtype == HVD_FLOAT16 || asked->dtype == HVD_BFLOAT16 ||
                    asked->dtype == HVD_FLOAT32 || asked->dtype == HVD_FLOAT64;
    if (asked->reduce == HVD_ADASUM && !floating) {
        return fail(err, HVD_INVALID_ARGUMENT, "Adasum needs floating point; '%s' is %s", name,
                    hvd_dtype_name(asked->dtype));
    }
    bool sums = asked->reduce == HVD_SUM || asked->reduce == HVD_AVERAGE;
    if (asked->op == HVD_REDUCESCATTER && !sums) {
        return fail(err, HVD_UNSUPPORTED, "Reducescatter currently only supports AVERAGE and SUM.");
    }
    return HVD_OK;
}

static hvd_status_t check_request(const hvd_request_t *asked, const char *name,
                                  const process_set_t *set, err_t *err)
{
    if ((unsigned)asked->dtype >= HVD_N_DTYPES) {
        return fail(err, HVD_INVALID_ARGUMENT, "'%s' has an unknown dtype: %d", name, asked->dtype);
    }
    bool bare = op_infos[asked->op].layout == LAYOUT_NOTHING;
    if (bare ? asked->n_tensors != 0 : (asked->n_tensors < 1 || asked->tensors == NULL)) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s '%s' has %d tensors", hvd_op_name(asked->op),
                    name, asked->n_tensors);
    }
    if (asked->n_tensors > MAX_TENSORS) {
        return fail(err, HVD_INVALID_ARGUMENT, "group '%s' has %d tensors; at most %d are allowed",
                    name, asked->n_tensors, MAX_TENSORS);
    }
    for (int i = 0; i < asked->n_tensors; i++) {
        hvd_status_t status = check_tensor(asked, name, i, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    switch (asked->op) {
    case HVD_BROADCAST:
        return check_broadcast(asked, set, err);
    case HVD_ALLTOALL:
        return check_alltoall(asked, set, err);
    case HVD_ALLREDUCE:
    case HVD_REDUCESCATTER:
        return check_reduction(asked, name, err);
    default:
        return HVD_OK;
    }
}

// --- Copying it ----------------------------------------------------------------------------------

// Cuts `bytes`, aligned, from the storage (which has been reserved whole).
static void *cut(buf_t *storage, size_t bytes)
{
    size_t pad = -storage->len & 7;
    storage->len += pad + bytes;
    return storage->data + storage->len - bytes;
}

static char *cut_text(buf_t *storage, const char *text)
{
    size_t bytes = strlen(text) + 1;
    return memcpy(cut(storage, bytes), text, bytes);
}

// Room for everything a request keeps: tensors, shapes twice (as given, and as all must agree),
// sizes, texts, and what rides along.
static size_t storage_bytes(const hvd_ctx_t *ctx, const hvd_request_t *asked, const char *name,
                            int n_members)
{
    size_t n = (size_t)asked->n_tensors;
    size_t n_dims = 0, n_elements_of_all = 0;
    for (size_t i = 0; i < n; i++) {
        n_dims += (size_t)asked->tensors[i].n_dims;
        n_elements_of_all += (size_t)n_elements(&asked->tensors[i]);
    }
    size_t texts = strlen(name) + 1 + (asked->where != NULL ? strlen(asked->where) + 1 : 0);
    size_t n_words = 2 * n_dims + 2 * n + (size_t)n_members; // sizes: per tensor, or per member
    return n * (sizeof(hvd_tensor_t) + sizeof(void *)) + n_words * sizeof(int64_t) + texts +
           MIN(n_elements_of_all * sizeof(double), ctx->config.inline_bytes) + 64;
}

static void copy_tensors(request_t *request, const hvd_request_t *asked)
{
    size_t n = (size_t)asked->n_tensors;
    bool first_differs = op_infos[asked->op].sizes != SIZES_NONE;
    request->tensors = cut(&request->storage, n * sizeof *request->tensors);
    request->owned = cut(&request->storage, n * sizeof *request->owned);
    size_t n_dims = 0;
    for (size_t i = 0; i < n; i++) {
        n_dims += (size_t)asked->tensors[i].n_dims;
    }
    int64_t *shapes = cut(&request->storage, n_dims * sizeof *shapes);
    int64_t *words = cut(&request->storage, (n_dims + n) * sizeof *words);
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

static int64_t rows_of(const hvd_tensor_t *tensor)
{
    return tensor->n_dims > 0 ? tensor->shape[0] : 0;
}

static void copy_sizes(request_t *request, const hvd_request_t *asked, int n_members)
{
    bool per_member = op_infos[asked->op].sizes == SIZES_PER_MEMBER;
    request->n_sizes = signature_n_sizes(&request->signature, n_members);
    request->sizes = cut(&request->storage, (size_t)request->n_sizes * sizeof *request->sizes);
    for (int i = 0; i < request->n_sizes; i++) {
        request->sizes[i] = !per_member             ? rows_of(&asked->tensors[i])
                            : asked->splits != NULL ? asked->splits[i]
                                                    : rows_of(&asked->tensors[0]) / n_members;
    }
}

// Small allreduces travel inside the agreement's messages, as accumulators.
static void copy_payload(const hvd_ctx_t *ctx, request_t *request)
{
    const signature_t *signature = &request->signature;
    request->payload = NULL;
    request->payload_bytes = 0;
    if (!signature_rides(signature, ctx->config.inline_bytes, &request->payload_bytes)) {
        return;
    }
    request->payload = cut(&request->storage, request->payload_bytes);
    size_t acc_bytes = hvd_dtype_bytes(acc_dtype(signature->dtype));
    uint8_t *at = request->payload;
    for (int i = 0; i < signature->n_tensors; i++) {
        size_t n = (size_t)n_elements(&request->tensors[i]);
        acc_load(signature->dtype, at, request->tensors[i].input, n, signature->prescale);
        at += n * acc_bytes;
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
                                 const char *name, const process_set_t *set, err_t *err)
{
    buf_clear(&request->storage);
    if (!buf_reserve(&request->storage, storage_bytes(ctx, asked, name, set->n))) {
        return fail(err, HVD_NO_MEMORY, "no memory to submit '%s'", name);
    }
    request->asked = *asked;
    request->signature = signature_of(asked);
    copy_tensors(request, asked);
    copy_sizes(request, asked, set->n);
    copy_payload(ctx, request);
    request->asked.name = cut_text(&request->storage, name);
    request->asked.where = asked->where != NULL ? cut_text(&request->storage, asked->where) : NULL;
    request->asked.reduce = request->signature.reduce;
    request->asked.tensors = request->tensors;
    request->asked.splits = NULL; // as rows in `sizes`
    return HVD_OK;
}

// --- Submitting ----------------------------------------------------------------------------------

// Under lock. The set this rank may use, or an error.
static process_set_t *usable_set(const hvd_ctx_t *ctx, int id, err_t *err)
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

// Ranks submit nameless operations in the same order, so counting names them alike. Each join has
// numbers of its own: what was submitted before may still be in flight.
static const char *name_of(const hvd_ctx_t *ctx, const hvd_request_t *asked, process_set_t *set,
                           char *made, size_t bytes)
{
    if (asked->name != NULL) {
        return asked->name;
    }
    char joins[16] = "";
    if (ctx->n_joins > 0) {
        snprintf(joins, sizeof joins, "%u.", ctx->n_joins);
    }
    snprintf(made, bytes, "%s.noname.%s%llu", hvd_op_name(asked->op), joins,
             (unsigned long long)++set->n_nameless[asked->op]);
    return made;
}

static hvd_status_t check_name_is_free(hvd_ctx_t *ctx, const hvd_request_t *asked, const char *name,
                                       uint64_t hash, err_t *err)
{
    const request_t *first = request_by_name(ctx, hash, asked->process_set, name);
    if (first == NULL) {
        return HVD_OK;
    }
    const char *where = first->asked.where;
    return fail(
        err, HVD_DUPLICATE_NAME,
        "Requested to %s a tensor with the same name as another tensor that is currently being "
        "processed: '%s' on rank %d%s%s%s. Give each tensor in flight a name of its own.",
        hvd_op_name(asked->op), name, ctx->job.rank,
        where != NULL ? " (that one was submitted at " : "", where != NULL ? where : "",
        where != NULL ? ")" : "");
}

static void send_off(hvd_ctx_t *ctx, request_t *request, const process_set_t *set)
{
    bool on_board = board_arrive(ctx, request, set);
    // On the board, what follows is done while the contributions travel between the cores.
    atomic_store_explicit(&request->on_board, on_board, memory_order_relaxed);
    request_register(ctx, request);
    ctx->n_submitted++;
    ctx->newest = request;
    observe_submitted(ctx->observe, &request->trace, on_board);
    if (!on_board) {
        request_enqueue(ctx, request);
    }
}

static hvd_status_t submit_locked(hvd_ctx_t *ctx, const hvd_request_t *asked,
                                  hvd_handle_t *handle_p, err_t *err)
{
    hvd_status_t status = check_running(ctx, err);
    if (status != HVD_OK) {
        return status;
    }
    if ((unsigned)asked->op >= HVD_N_OPS) {
        return fail(err, HVD_INVALID_ARGUMENT, "unknown operation %d", asked->op);
    }
    process_set_t *set = usable_set(ctx, asked->process_set, err);
    if (set == NULL) {
        return err->status;
    }
    char made[64];
    const char *name = name_of(ctx, asked, set, made, sizeof made);
    uint64_t hash = hash_bytes(name, strlen(name), (uint64_t)asked->process_set);
    if ((status = check_request(asked, name, set, err)) != HVD_OK ||
        (status = check_name_is_free(ctx, asked, name, hash, err)) != HVD_OK) {
        return status;
    }
    request_t *request = request_new(ctx);
    if (request == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to submit '%s'", name);
    }
    if ((status = copy_request(ctx, request, asked, name, set, err)) != HVD_OK) {
        ctx->newest = NULL; // it may have been this object
        request_recycle(ctx, request);
        return status;
    }
    request->hash = hash;
    send_off(ctx, request, set);
    *handle_p = atomic_load_explicit(&request->handle, memory_order_relaxed);
    return HVD_OK;
}

hvd_status_t hvd_submit(hvd_ctx_t *ctx, const hvd_request_t *request, hvd_handle_t *handle_p,
                        char *text, size_t text_bytes)
{
    err_t err;
    err.text[0] = '\0';
    hvd_status_t status = check_context(ctx, &err);
    if (status == HVD_OK) {
        pthread_mutex_lock(&ctx->lock);
        status = submit_locked(ctx, request, handle_p, &err);
        pthread_mutex_unlock(&ctx->lock);
    }
    if (UNLIKELY(status != HVD_OK)) {
        return err_export(&err, status, text, text_bytes);
    }
    if ((request->flags & HVD_WAITS) == 0) {
        engine_notify(ctx);
    }
    return HVD_OK;
}

// --- Waiting -------------------------------------------------------------------------------------

static void go_on_to_engine(hvd_ctx_t *ctx, request_t *request, bool full)
{
    pthread_mutex_lock(&ctx->lock);
    board_note(request, full);
    bool over = ctx->ended.status != HVD_OK;
    if (over) {
        atomic_store(&ctx->board_busy, false);
    } else {
        request_enqueue(ctx, request);
    }
    pthread_mutex_unlock(&ctx->lock);
    if (over) {
        request_complete(ctx, request, ctx->ended.status, ctx->ended.text);
    } else {
        engine_nudge(ctx);
    }
}

// A request on the board is looked after by whoever asks for it first: it ends there, or goes on
// to the engine. Two threads that wait for one handle take turns here.
static void leave_board(hvd_ctx_t *ctx, request_t *request)
{
    pthread_mutex_lock(&ctx->board_lock);
    if (atomic_load(&request->on_board)) {
        bool full = board_wait(ctx, request);
        if (observe_has_timeline(ctx->observe)) {
            atomic_store_explicit(&request->trace.started, ticks_now(), memory_order_relaxed);
        }
        if (full && request->meeting == 0) {
            bool stored = riding_store(request, request->payload, request->board_members);
            atomic_store_explicit(&request->trace.route, ROUTE_BOARD, memory_order_relaxed);
            request_complete(ctx, request, stored ? HVD_OK : HVD_NO_MEMORY, NULL);
        } else {
            go_on_to_engine(ctx, request, full);
        }
    }
    pthread_mutex_unlock(&ctx->board_lock);
}

hvd_status_t hvd_wait(hvd_ctx_t *ctx, hvd_handle_t handle, int64_t timeout_ms)
{
    hvd_status_t status = check_context(ctx, NULL);
    if (status != HVD_OK) {
        return status;
    }
    request_t *request = request_find(ctx, handle);
    if (request == NULL) {
        return HVD_UNKNOWN_HANDLE;
    }
    if (atomic_load_explicit(&request->on_board, memory_order_relaxed)) {
        leave_board(ctx, request);
    }
    if (atomic_load_explicit(&request->state, memory_order_acquire) != REQUEST_DONE &&
        !engine_wait(ctx, &request->state, deadline_in_ms(timeout_ms))) {
        return HVD_TIMEOUT;
    }
    return request->status;
}

hvd_status_t hvd_poll(hvd_ctx_t *ctx, hvd_handle_t handle)
{
    hvd_status_t status = check_context(ctx, NULL);
    if (status != HVD_OK) {
        return status;
    }
    request_t *request = request_find(ctx, handle);
    if (request == NULL) {
        return HVD_UNKNOWN_HANDLE;
    }
    if (atomic_load_explicit(&request->on_board, memory_order_relaxed)) {
        leave_board(ctx, request);
        engine_notify(ctx); // nobody waits: the engine thread must see to it
    }
    bool done = atomic_load_explicit(&request->state, memory_order_acquire) == REQUEST_DONE;
    return done ? request->status : HVD_IN_PROGRESS;
}

static hvd_status_t find_done(hvd_ctx_t *ctx, hvd_handle_t handle, request_t **request_p)
{
    hvd_status_t status = check_context(ctx, NULL);
    if (status != HVD_OK) {
        return status;
    }
    *request_p = request_find(ctx, handle);
    if (*request_p == NULL) {
        return HVD_UNKNOWN_HANDLE;
    }
    bool done = atomic_load_explicit(&(*request_p)->state, memory_order_acquire) == REQUEST_DONE;
    return done ? HVD_OK : HVD_IN_PROGRESS;
}

hvd_status_t hvd_result(hvd_ctx_t *ctx, hvd_handle_t handle, hvd_result_t *result_p)
{
    request_t *request;
    hvd_status_t status = find_done(ctx, handle, &request);
    if (status == HVD_OK) {
        *result_p = (hvd_result_t){
            .status = request->status,
            .text = request->text != NULL ? request->text : "",
            .n_tensors = request->asked.n_tensors,
            .last_joined = request->last_joined,
            .received_splits = request->received_splits,
            .n_splits = request->received_splits != NULL ? request->n_sizes : 0,
        };
    }
    return status;
}

hvd_status_t hvd_output(hvd_ctx_t *ctx, hvd_handle_t handle, int tensor, void **data_p,
                        int64_t shape[HVD_MAX_DIMS])
{
    request_t *request;
    hvd_status_t status = find_done(ctx, handle, &request);
    if (status != HVD_OK) {
        return status;
    }
    if (request->status != HVD_OK) {
        return request->status;
    }
    if (tensor < 0 || tensor >= request->asked.n_tensors) {
        return HVD_INVALID_ARGUMENT;
    }
    *data_p = request->tensors[tensor].output;
    memcpy(shape, request->tensors[tensor].shape,
           (size_t)request->tensors[tensor].n_dims * sizeof *shape);
    return HVD_OK;
}

void hvd_release(hvd_ctx_t *ctx, hvd_handle_t handle)
{
    if (check_context(ctx, NULL) != HVD_OK) {
        return;
    }
    pthread_mutex_lock(&ctx->lock);
    request_t *request = request_find(ctx, handle);
    if (request != NULL) {
        if (atomic_load(&request->state) == REQUEST_DONE) {
            request_recycle(ctx, request);
        } else {
            atomic_store(&request->released, true);
        }
    }
    pthread_mutex_unlock(&ctx->lock);
}

// --- Process sets --------------------------------------------------------------------------------

// Waits for what coord must agree to and lets go of the request; *set_p: the set it was about.
static hvd_status_t ask_and_wait(hvd_ctx_t *ctx, request_t *request, int *set_p, err_t *err)
{
    hvd_handle_t handle = atomic_load(&request->handle);
    engine_wait(ctx, &request->state, NEVER_NS);
    hvd_status_t status = request->status;
    *set_p = request->set;
    if (status != HVD_OK) {
        fail(err, status, "%s", request->text);
    }
    hvd_release(ctx, handle);
    return status;
}

static int compare_ints(const void *a, const void *b)
{
    int x = *(const int *)a;
    int y = *(const int *)b;
    return (x > y) - (x < y);
}

static hvd_status_t check_set_ranks(const hvd_ctx_t *ctx, const int *ranks, int n, err_t *err)
{
    if (n < 1 || ranks == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT, "a process set needs at least one rank");
    }
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= ctx->job.size) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "a process set names rank %d; the job has ranks 0 to %d", ranks[i],
                        ctx->job.size - 1);
        }
        if (i > 0 && ranks[i] == ranks[i - 1]) {
            return fail(err, HVD_INVALID_ARGUMENT, "a process set names rank %d twice", ranks[i]);
        }
    }
    return HVD_OK;
}

// Under lock: a request object that asks coord for something else than an operation.
static request_t *new_question(hvd_ctx_t *ctx, int ask, const int *ranks, int n, err_t *err)
{
    if (check_running(ctx, err) != HVD_OK) {
        return NULL;
    }
    request_t *request = request_new(ctx);
    if (request != NULL) {
        buf_clear(&request->storage);
    }
    size_t bytes = (size_t)n * sizeof(int);
    if (request == NULL || !buf_reserve(&request->storage, bytes + 32)) {
        fail(err, HVD_NO_MEMORY, "no memory for a process set");
        return NULL;
    }
    request->asked = (hvd_request_t){.name = ""};
    request->trace.asked = NULL;
    request->ask = ask;
    request->n_sizes = n;
    request->set_ranks = cut(&request->storage, bytes);
    if (n > 0) {
        memcpy(request->set_ranks, ranks, bytes);
    }
    request->hash = 1;
    return request;
}

hvd_status_t hvd_process_set_add(hvd_ctx_t *ctx, const int *ranks, int n_ranks, int *id_p,
                                 char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status = check_context(ctx, &err);
    if (status != HVD_OK) {
        return err_export(&err, status, text, text_bytes);
    }
    int *sorted = malloc((size_t)MAX(n_ranks, 1) * sizeof *sorted);
    if (sorted == NULL) {
        return HVD_NO_MEMORY;
    }
    if (ranks != NULL && n_ranks > 0) {
        memcpy(sorted, ranks, (size_t)n_ranks * sizeof *sorted);
        qsort(sorted, (size_t)n_ranks, sizeof *sorted, compare_ints);
    }
    status = check_set_ranks(ctx, ranks != NULL ? sorted : NULL, n_ranks, &err);
    request_t *request = NULL;
    if (status == HVD_OK) {
        pthread_mutex_lock(&ctx->lock);
        request = new_question(ctx, ASK_ADD_SET, sorted, n_ranks, &err);
        if (request != NULL) {
            request_register(ctx, request);
            request_enqueue(ctx, request);
        } else {
            status = err.status;
        }
        pthread_mutex_unlock(&ctx->lock);
    }
    free(sorted);
    int id;
    if (request != NULL && (status = ask_and_wait(ctx, request, &id, &err)) == HVD_OK) {
        *id_p = id;
    }
    return err_export(&err, status, text, text_bytes);
}

hvd_status_t hvd_process_set_remove(hvd_ctx_t *ctx, int id, char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status = check_context(ctx, &err);
    if (status != HVD_OK) {
        return err_export(&err, status, text, text_bytes);
    }
    pthread_mutex_lock(&ctx->lock);
    request_t *request = NULL;
    if (id == 0 || set_find(ctx, id) == NULL) {
        status = fail(&err, HVD_UNKNOWN_SET, "process set %d cannot be removed: %s", id,
                      id == 0 ? "it holds all ranks" : "there is none");
    } else if ((request = new_question(ctx, ASK_REMOVE_SET, NULL, 0, &err)) == NULL) {
        status = err.status;
    } else {
        request->set = id;
        request_register(ctx, request);
        request_enqueue(ctx, request);
    }
    pthread_mutex_unlock(&ctx->lock);
    if (request != NULL) {
        status = ask_and_wait(ctx, request, &id, &err);
    }
    return err_export(&err, status, text, text_bytes);
}

int hvd_process_set_count(hvd_ctx_t *ctx)
{
    pthread_mutex_lock(&ctx->lock);
    int n = ctx->n_sets;
    pthread_mutex_unlock(&ctx->lock);
    return n;
}

hvd_status_t hvd_process_set_ids(hvd_ctx_t *ctx, int *ids, int n_ids)
{
    pthread_mutex_lock(&ctx->lock);
    bool fits = n_ids >= ctx->n_sets;
    for (int i = 0; fits && i < ctx->n_sets; i++) {
        ids[i] = ctx->sets[i]->id;
    }
    pthread_mutex_unlock(&ctx->lock);
    return fits ? HVD_OK : HVD_INVALID_ARGUMENT;
}

int hvd_process_set_size(hvd_ctx_t *ctx, int id)
{
    pthread_mutex_lock(&ctx->lock);
    const process_set_t *set = set_find(ctx, id);
    int n = set != NULL ? set->n : HVD_UNKNOWN_SET;
    pthread_mutex_unlock(&ctx->lock);
    return n;
}

int hvd_process_set_rank(hvd_ctx_t *ctx, int id)
{
    pthread_mutex_lock(&ctx->lock);
    const process_set_t *set = set_find(ctx, id);
    int member = set == NULL ? HVD_UNKNOWN_SET : set->member < 0 ? HVD_NOT_MEMBER : set->member;
    pthread_mutex_unlock(&ctx->lock);
    return member;
}

hvd_status_t hvd_process_set_ranks(hvd_ctx_t *ctx, int id, int *ranks, int n_ranks)
{
    pthread_mutex_lock(&ctx->lock);
    const process_set_t *set = set_find(ctx, id);
    hvd_status_t status = set == NULL        ? HVD_UNKNOWN_SET
                          : n_ranks < set->n ? HVD_INVALID_ARGUMENT
                                             : HVD_OK;
    if (status == HVD_OK) {
        memcpy(ranks, set->ranks, (size_t)set->n * sizeof *ranks);
    }
    pthread_mutex_unlock(&ctx->lock);
    return status;
}

// --- Queries -------------------------------------------------------------------------------------

int hvd_rank(const hvd_ctx_t *ctx)
{
    return ctx != NULL ? ctx->job.rank : HVD_NOT_INITIALIZED;
}
int hvd_size(const hvd_ctx_t *ctx)
{
    return ctx != NULL ? ctx->job.size : HVD_NOT_INITIALIZED;
}
int hvd_local_rank(const hvd_ctx_t *ctx)
{
    return ctx != NULL ? ctx->job.local_rank : HVD_NOT_INITIALIZED;
}
int hvd_local_size(const hvd_ctx_t *ctx)
{
    return ctx != NULL ? ctx->job.local_size : HVD_NOT_INITIALIZED;
}
int hvd_cross_rank(const hvd_ctx_t *ctx)
{
    return ctx != NULL ? ctx->job.cross_rank : HVD_NOT_INITIALIZED;
}
int hvd_cross_size(const hvd_ctx_t *ctx)
{
    return ctx != NULL ? ctx->job.cross_size : HVD_NOT_INITIALIZED;
}
bool hvd_is_homogeneous(const hvd_ctx_t *ctx)
{
    return ctx != NULL && ctx->homogeneous;
}
int hvd_mpi_threads(const hvd_ctx_t *ctx)
{
    return ctx != NULL && ctx->mpi != NULL ? mpi_has_threads(ctx->mpi) : -1;
}

hvd_status_t hvd_health(hvd_ctx_t *ctx, char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status = check_context(ctx, &err);
    if (status == HVD_OK) {
        pthread_mutex_lock(&ctx->lock);
        status = check_running(ctx, &err);
        pthread_mutex_unlock(&ctx->lock);
    }
    return err_export(&err, status, text, text_bytes);
}

hvd_status_t hvd_config(const hvd_ctx_t *ctx, const char *env_name, char *value, size_t bytes,
                        const char **origin_p)
{
    if (ctx == NULL) {
        return HVD_NOT_INITIALIZED;
    }
    for (int id = 0; id < N_KNOBS; id++) {
        if (strcmp(knob_infos[id].env, env_name) == 0) {
            config_format(&ctx->config, (enum knob_id)id, value, bytes);
            *origin_p = ctx->config.origin[id] == FROM_DEFAULT ? "default" : "environment";
            return HVD_OK;
        }
    }
    return HVD_INVALID_ARGUMENT;
}
