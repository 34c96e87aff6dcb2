// SPDX-License-Identifier: Apache-2.0
//
// request.c - the table of submissions of this rank.
//
// A request object is recycled, never freed before the context ends, so a thread that still looks
// at one after another released it reads old news and not freed memory. Handles carry a generation,
// which ends with the object's use, and so recognise their own past. Names are chained through the
// objects themselves: submitting and completing allocate nothing once these exist.
//
// An object at rest stays in the table of names, so that whoever submits the same again finds it as
// it was (submit.c). Those that rest longest are used for other names first, but a nameless
// operation, which never comes again, leaves its object to the very next one. There are always some
// objects, so that a program with a few names in turn is remembered, too.
#include "coll/reduce.h"
#include "engine/staging.h"

#include <stdlib.h>

#define HANDLE_INDEX(handle) ((uint32_t)((handle) & UINT32_MAX) - 1)
#define ONE_GENERATION ((hvd_handle_t)1 << 32)

// --- Objects and handles -------------------------------------------------------------------------

// Chunk k holds FIRST_CHUNK << k objects, those that begin at index FIRST_CHUNK * (2^k - 1).
static int chunk_of(uint32_t index)
{
    return 31 - __builtin_clz(index / FIRST_CHUNK + 1);
}

static request_t *request_at(hvd_ctx_t *ctx, uint32_t index)
{
    int k = chunk_of(index);
    request_t *chunk = atomic_load_explicit(&ctx->requests.chunks[k], memory_order_acquire);
    return &chunk[index - FIRST_CHUNK * ((1u << k) - 1)];
}

static request_t *grow_table(hvd_ctx_t *ctx) REQUIRES(ctx->lock)
{
    uint32_t index = atomic_load_explicit(&ctx->requests.n, memory_order_relaxed);
    int k = chunk_of(index);
    if (k >= N_REQUEST_CHUNKS) {
        return NULL;
    }
    if (atomic_load_explicit(&ctx->requests.chunks[k], memory_order_relaxed) == NULL) {
        request_t *chunk = calloc((size_t)FIRST_CHUNK << k, sizeof *chunk);
        if (chunk == NULL) {
            return NULL;
        }
        atomic_store_explicit(&ctx->requests.chunks[k], chunk, memory_order_release);
    }
    request_t *request = request_at(ctx, index);
    atomic_store_explicit(&request->handle, ONE_GENERATION + index + 1, memory_order_relaxed);
    atomic_store_explicit(&ctx->requests.n, index + 1, memory_order_release);
    return request;
}

static int state_of(const request_t *request)
{
    return atomic_load_explicit(&request->state, memory_order_relaxed);
}

// --- Names ---------------------------------------------------------------------------------------

static request_t **chain_of(hvd_ctx_t *ctx, uint64_t hash) REQUIRES(ctx->lock)
{
    return &ctx->requests.by_name[hash & (uint64_t)(ctx->requests.n_by_name - 1)];
}

static void name_insert(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->lock)
{
    request_t **chain = chain_of(ctx, request->hash);
    request->next_same_hash = *chain;
    *chain = request;
}

static void name_remove(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->lock)
{
    for (request_t **link = chain_of(ctx, request->hash); *link != NULL;
         link = &(*link)->next_same_hash) {
        if (*link == request) {
            *link = request->next_same_hash;
            break;
        }
    }
    request->hash = 0;
}

request_t *request_by_name(hvd_ctx_t *ctx, uint64_t hash, int set, const char *name)
{
    LOCKED(ctx);
    if (ctx->requests.n_by_name == 0) {
        return NULL;
    }
    for (request_t *r = *chain_of(ctx, hash); r != NULL; r = r->next_same_hash) {
        if (r->hash != hash || r->process_set != set || strcmp(r->name, name) != 0) {
            continue;
        }
        if (LIKELY(state_of(r) != REQUEST_DONE)) {
            return r;
        }
        // Somebody still looks at its result. Another object takes the name over.
        r->is_remembered = false;
        name_remove(ctx, r);
        return NULL;
    }
    return NULL;
}

// Keeps the chains short. Failing to grow only makes them longer.
static void names_grow(hvd_ctx_t *ctx) REQUIRES(ctx->lock)
{
    int n = ctx->requests.n_by_name > 0 ? 2 * ctx->requests.n_by_name : 1024;
    request_t **table = calloc((size_t)n, sizeof *table);
    if (table == NULL) {
        return;
    }
    free(ctx->requests.by_name);
    ctx->requests.by_name = table;
    ctx->requests.n_by_name = n;
    uint32_t n_requests = atomic_load(&ctx->requests.n);
    for (uint32_t i = 0; i < n_requests; i++) {
        request_t *r = request_at(ctx, i);
        if (r->hash != 0) {
            name_insert(ctx, r);
        }
    }
}

void request_register(hvd_ctx_t *ctx, request_t *request)
{
    LOCKED(ctx);
    if ((unsigned)ctx->requests.n_by_name <
        atomic_load_explicit(&ctx->requests.n, memory_order_relaxed)) {
        uint64_t hash = request->hash;
        request->hash = 0; // not in the table yet: the growing must not insert it
        names_grow(ctx);
        request->hash = hash;
    }
    name_insert(ctx, request);
}

// --- Lives ---------------------------------------------------------------------------------------

// A new life of an object.
static void begin(request_t *request)
{
    INVARIANT(state_of(request) == REQUEST_FREE);
    request->status = HVD_OK;
    request->last_joined = -1;
    request->board.place = NULL;
    request->board.closed = 0;
    request->board.stream = 0;
    atomic_store_explicit(&request->board.waits, false, memory_order_relaxed);
    atomic_store_explicit(&request->held_by_device, false, memory_order_relaxed);
    trace_begin(&request->trace);
    atomic_store_explicit(&request->released, false, memory_order_release);
    atomic_store_explicit(&request->state, REQUEST_IN_FLIGHT, memory_order_release);
}

static void rest(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->lock)
{
    request_table_t *table = &ctx->requests;
    bool first = !request->is_remembered;
    request->next = first ? table->rest_first : NULL;
    request->previous = first ? NULL : table->rest_last;
    *(request->next != NULL ? &request->next->previous : &table->rest_last) = request;
    *(request->previous != NULL ? &request->previous->next : &table->rest_first) = request;
}

static void rest_no_more(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->lock)
{
    request_table_t *table = &ctx->requests;
    *(request->next != NULL ? &request->next->previous : &table->rest_last) = request->previous;
    *(request->previous != NULL ? &request->previous->next : &table->rest_first) = request->next;
    request->next = NULL;
}

// One that may be used for another name; NULL: no memory.
static request_t *any_at_rest(hvd_ctx_t *ctx) REQUIRES(ctx->lock)
{
    request_t *request = ctx->requests.rest_first;
    uint32_t n = atomic_load_explicit(&ctx->requests.n, memory_order_relaxed);
    if (request == NULL || (request->is_remembered && n < FIRST_CHUNK)) {
        request_t *more = grow_table(ctx);
        if (more != NULL || request == NULL) {
            return more;
        }
    }
    rest_no_more(ctx, request);
    if (request->hash != 0) {
        name_remove(ctx, request);
    }
    request->is_remembered = false;
    request->signature.n_tensors = 0;
    request->payload = NULL;
    request->payload_bytes = 0;
    return request;
}

request_t *request_new(hvd_ctx_t *ctx)
{
    LOCKED(ctx);
    request_t *request = any_at_rest(ctx);
    if (request == NULL) {
        return NULL;
    }
    request->board.hash = 0;
    begin(request);
    return request;
}

void request_again(hvd_ctx_t *ctx, request_t *request)
{
    LOCKED(ctx);
    INVARIANT(request->is_remembered && request->hash != 0);
    rest_no_more(ctx, request);
    begin(request);
}

// The handle is looked at last: if what was seen before is of the object's next life, the handle is
// no longer the old one.
request_t *request_find(hvd_ctx_t *ctx, hvd_handle_t handle)
{
    uint32_t index = HANDLE_INDEX(handle);
    if (index >= atomic_load_explicit(&ctx->requests.n, memory_order_acquire)) {
        return NULL;
    }
    request_t *request = request_at(ctx, index);
    bool live = !atomic_load_explicit(&request->released, memory_order_acquire) &&
                atomic_load_explicit(&request->state, memory_order_acquire) != REQUEST_FREE &&
                atomic_load_explicit(&request->handle, memory_order_acquire) == handle;
    return live ? request : NULL;
}

void request_recycle(hvd_ctx_t *ctx, request_t *request)
{
    LOCKED(ctx);
    INVARIANT(state_of(request) != REQUEST_FREE);
    for (int i = 0; i < request->signature.n_tensors; i++) {
        free(request->owned[i]);
        request->owned[i] = NULL;
    }
    if (UNLIKELY(request->staged != NULL)) {
        staging_release(request);
    }
    free(request->text);
    request->text = NULL;
    free(request->received_splits);
    request->received_splits = NULL;
    if (!request->is_remembered && request->hash != 0) {
        name_remove(ctx, request);
    }
    hvd_handle_t handle = atomic_load_explicit(&request->handle, memory_order_relaxed);
    atomic_store_explicit(&request->handle, handle + ONE_GENERATION, memory_order_relaxed);
    atomic_store_explicit(&request->state, REQUEST_FREE, memory_order_relaxed);
    rest(ctx, request);
}

void requests_free(hvd_ctx_t *ctx)
{
    uint32_t n = atomic_load(&ctx->requests.n);
    lock_take(&ctx->lock);
    for (uint32_t i = 0; i < n; i++) {
        request_t *request = request_at(ctx, i);
        if (state_of(request) != REQUEST_FREE) {
            request_recycle(ctx, request);
        }
        buf_free(&request->storage);
    }
    lock_release(&ctx->lock);
    for (int k = 0; k < N_REQUEST_CHUNKS; k++) {
        free(atomic_load(&ctx->requests.chunks[k]));
    }
    free(ctx->requests.by_name);
}

static void load_bytes(const request_t *request, uint8_t *to)
{
    const int64_t *dims = request->signature.dims;
    for (int t = 0; t < request->signature.n_tensors; t++) {
        size_t bytes = shape_elements(&dims) * hvd_dtype_bytes(request->signature.dtype);
        if (bytes > 0) {
            memcpy(to, request->tensors[t].input, bytes);
        }
        to += bytes;
    }
}

// What this rank brings to an operation that rides: its values, or of bytes that come from one rank
// that rank brings them, and all others zeros.
static void load_riding(const hvd_ctx_t *ctx, request_t *request)
{
    if (op_has(request->signature.op, OP_REDUCES)) {
        request_load(request, request->payload);
    } else if (request->signature.root == ctx->job.rank) {
        load_bytes(request, request->payload);
    } else {
        memset(request->payload, 0, request->payload_bytes);
    }
}

void request_enqueue(hvd_ctx_t *ctx, request_t *request)
{
    LOCKED(ctx);
    INVARIANT(state_of(request) == REQUEST_IN_FLIGHT);
    atomic_fetch_add_explicit(&ctx->requests.n_in_flight, 1, memory_order_relaxed);
    atomic_store_explicit(&request->board.waits, false, memory_order_relaxed);
    if (request->trace.submitted == 0) {
        request->trace.submitted = ticks_now();
    }
    if (request->payload != NULL) {
        load_riding(ctx, request);
    }
    request->next = atomic_load_explicit(&ctx->requests.queue, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&ctx->requests.queue, &request->next, request,
                                                  memory_order_release, memory_order_relaxed)) {
    }
}

// --- Results -------------------------------------------------------------------------------------

void *request_output(request_t *request, int t)
{
    hvd_tensor_t *tensor = &request->tensors[t];
    if (tensor->output != NULL) {
        return tensor->output;
    }
    if (request->alloc != NULL) {
        tensor->output = request->alloc(request->arg, t, tensor->n_dims, tensor->shape);
        return tensor->output;
    }
    size_t bytes = hvd_dtype_bytes(request->signature.dtype);
    for (int d = 0; d < tensor->n_dims; d++) {
        bytes *= (size_t)tensor->shape[d];
    }
    if (request->staged != NULL) {
        tensor->output = staging_output(request, t, bytes);
        return tensor->output;
    }
    request->owned[t] = malloc(MAX(bytes, 1));
    tensor->output = request->owned[t];
    return tensor->output;
}

void request_load(const request_t *request, void *accumulators)
{
    const signature_t *signature = &request->signature;
    bool is_plain = signature->n_tensors == 1 && !dtype_is_half(signature->dtype);
    if (LIKELY(is_plain && signature->prescale == 1.0)) {
        memcpy(accumulators, request->tensors[0].input, request->trace.bytes);
        return;
    }
    size_t acc_bytes = hvd_dtype_bytes(acc_dtype(signature->dtype));
    uint8_t *to = accumulators;
    const int64_t *dims = signature->dims;
    for (int t = 0; t < signature->n_tensors; t++) {
        size_t n = shape_elements(&dims);
        acc_load(signature->dtype, to, request->tensors[t].input, n, signature->prescale);
        to += n * acc_bytes;
    }
}

bool request_store(request_t *request, const void *result, int n_members)
{
    const signature_t *signature = &request->signature;
    size_t acc_bytes = hvd_dtype_bytes(acc_dtype(signature->dtype));
    finish_t finish = signature_finish(signature, n_members);
    const uint8_t *from = result;
    const int64_t *dims = signature->dims;
    for (int t = 0; t < signature->n_tensors; t++) {
        size_t n = shape_elements(&dims);
        void *output = request_output(request, t);
        if (output == NULL && n > 0) {
            return false;
        }
        acc_store(signature->dtype, output, from, n, finish);
        from += n * acc_bytes;
    }
    return true;
}

// --- Completion ----------------------------------------------------------------------------------

void requests_wake(hvd_ctx_t *ctx)
{
    if (UNLIKELY(atomic_load(&ctx->baton.n_waiting) > 0)) {
        engine_wake_waiters(ctx);
    }
}

// A waiter that sleeps has counted itself in n_waiting and then looked at the state under the lock,
// so after the lock here either it has seen DONE or it is seen.
void request_complete(hvd_ctx_t *ctx, request_t *request, hvd_status_t status, const char *text)
{
    INVARIANT(state_of(request) == REQUEST_IN_FLIGHT);
    hvd_done_fn done = request->done;
    void *arg = request->arg;
    hvd_handle_t handle = atomic_load_explicit(&request->handle, memory_order_relaxed);
    request->status = status;
    if (UNLIKELY(status != HVD_OK)) {
        request->text = strdup(text != NULL && text[0] != '\0' ? text : hvd_status_text(status));
    }
    lock_take(&ctx->lock);
    observe_completed(ctx->observe, &request->trace, status);
    bool released = atomic_load_explicit(&request->released, memory_order_relaxed);
    if (atomic_load_explicit(&request->board.waits,
                             memory_order_relaxed)) { // never had by the engine
        board_note(ctx, request, status == HVD_OK);
        atomic_store_explicit(&request->board.waits, false, memory_order_relaxed);
    } else {
        INVARIANT(atomic_load(&ctx->requests.n_in_flight) > 0);
        atomic_fetch_sub_explicit(&ctx->requests.n_in_flight, 1, memory_order_relaxed);
        board_reopen(request);
    }
    atomic_store_explicit(&request->state, REQUEST_DONE, memory_order_release);
    if (released) {
        request_recycle(ctx, request);
    }
    lock_release(&ctx->lock);
    atomic_store_explicit(&ctx->baton.has_completed, true, memory_order_relaxed);
    if (done != NULL) {
        done(arg, handle, status);
    }
}

void requests_end(hvd_ctx_t *ctx, hvd_status_t status, const char *text)
{
    HELD(ctx);
    lock_take(&ctx->lock);
    if (ctx->ended.status == HVD_OK) {
        fail(&ctx->ended, status, "%s", text);
    }
    lock_release(&ctx->lock); // nothing is enqueued from here on
    atomic_store(&ctx->requests.queue, NULL);
    uint32_t n = atomic_load(&ctx->requests.n);
    for (uint32_t i = 0; i < n; i++) {
        request_t *request = request_at(ctx, i);
        // Else its waiter ends it, see leave_board, or its device: hand_over.
        bool mine = !atomic_load(&request->board.waits) && !atomic_load(&request->held_by_device);
        if (mine && atomic_load(&request->state) == REQUEST_IN_FLIGHT) {
            request_complete(ctx, request, status, text);
        }
    }
    if (ctx->ended.status != HVD_SHUTDOWN) {
        observe_dump(ctx->observe, DUMP_FAILURE);
    }
    requests_wake(ctx);
}

int requests_in_flight(hvd_ctx_t *ctx, const trace_t **oldest, int n_oldest)
{
    LOCKED(ctx);
    int n_found = 0;
    int n_kept = 0;
    uint32_t n = atomic_load_explicit(&ctx->requests.n, memory_order_relaxed);
    for (uint32_t i = 0; i < n; i++) {
        const request_t *r = request_at(ctx, i);
        if (atomic_load_explicit(&r->state, memory_order_relaxed) != REQUEST_IN_FLIGHT) {
            continue;
        }
        n_found++;
        // One on the board has no time yet (0), and is the youngest there can be.
        int at = n_kept;
        while (at > 0 && r->trace.submitted - 1 < oldest[at - 1]->submitted - 1) {
            at--;
        }
        if (at == n_oldest) {
            continue;
        }
        n_kept = MIN(n_kept + 1, n_oldest);
        memmove(&oldest[at + 1], &oldest[at], (size_t)(n_kept - at - 1) * sizeof *oldest);
        oldest[at] = &r->trace;
    }
    return n_found;
}
