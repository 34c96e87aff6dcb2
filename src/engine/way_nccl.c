// SPDX-License-Identifier: Apache-2.0
//
// way_nccl.c - tensors of GPUs, moved from GPU to GPU by NCCL.
//
// What the members call must not depend on where their tensors lie, only on what the agreement has
// told all of them: an allreduce packs small tensors into one buffer on the device and takes large
// ones where they are, in one group; blocks that are equal are one collective, others one for each
// member. A rank that has joined brings zeros, and drops what it gets.
//
// The batch is over when all is queued behind the user's streams: launched. The device carries it
// out, and housekeeping sees when it has landed.
// Threads: the holder of the engine. NCCL does not block it: what it has not queued yet is asked
// for again in the next step.
#include "engine/run.h"
#include "engine/staging.h"

#include <stdio.h>
#include <stdlib.h>

#define LARGE_BYTES ((size_t)1 << 20) // not packed: two more passes over memory cost more
#define PACK_ALIGN ((size_t)16)

typedef struct piece {
    const uint8_t *in;
    uint8_t *out;
    size_t at, bytes; // in the buffer
} piece_t;

bool way_nccl_takes(const way_case_t *given)
{
    return given->on_device;
}

// --- What to call --------------------------------------------------------------------------------

static bool add_call(runner_t *r, nccl_kind_t kind, const void *in, void *out, size_t n,
                     hvd_dtype_t dtype, int peer)
{
    const coll_task_t *task = &r->task;
    nccl_call_t call = {
        .kind = kind,
        .in = in,
        .out = out,
        .n = n,
        .dtype = dtype,
        .reduce = task->args.reduce,
        .factor = task->prescale * task->finish.factor / (double)task->finish.divisor,
        .peer = peer,
    };
    return buf_append(&r->nccl.calls, &call, sizeof call) != NULL;
}

static bool add_reduction(runner_t *r, const void *in, void *out, size_t bytes)
{
    hvd_dtype_t dtype = r->task.args.dtype;
    return add_call(r, NCCL_ALLREDUCE, in, out, bytes / hvd_dtype_bytes(dtype), dtype, 0);
}

// Small ones get a place in the buffer, large ones a call. A rank that has joined knows but sizes.
static bool add_tensor(runner_t *r, const decision_entry_t *entry, tensor_view_t *view, int member)
{
    nccl_state_t *n = &r->nccl;
    (void)entry;
    (void)member;
    if (view->bytes == 0) {
        return true;
    }
    if (view->bytes < LARGE_BYTES) {
        piece_t piece = {view->input, view->output, n->packed_bytes, view->bytes};
        n->packed_bytes += (view->bytes + PACK_ALIGN - 1) & ~(PACK_ALIGN - 1);
        return buf_append(&n->pieces, &piece, sizeof piece) != NULL;
    }
    n->zero_bytes = MAX(n->zero_bytes, view->bytes);
    return add_reduction(r, view->input, view->output, view->bytes);
}

static size_t n_pieces(const nccl_state_t *n)
{
    return n->pieces.len / sizeof(piece_t);
}

static const piece_t *piece_at(const nccl_state_t *n, size_t i)
{
    return (const piece_t *)(const void *)n->pieces.data + i;
}

// Every call brings zeros and drops its result. They may run at once, so these are two places.
static hvd_status_t bring_zeros(hvd_ctx_t *ctx, runner_t *r, err_t *err)
{
    nccl_state_t *n = &r->nccl;
    device_t *device = ctx->staging->device;
    size_t bytes = MAX(n->zero_bytes, n->packed_bytes);
    hvd_status_t status = device_take(device, 2 * bytes, true, &n->scratch, err);
    if (status != HVD_OK) {
        return status;
    }
    uint8_t *zeros = n->scratch->data;
    nccl_call_t *calls = (nccl_call_t *)(void *)n->calls.data;
    for (size_t i = 0; i < n->calls.len / sizeof *calls; i++) {
        calls[i].in = zeros;
        calls[i].out = zeros + bytes;
    }
    if (n->packed_bytes > 0 && !add_reduction(r, zeros, zeros + bytes, n->packed_bytes)) {
        return fail(err, HVD_NO_MEMORY, "no memory for calls of NCCL");
    }
    n->pieces.len = 0;
    return nccl_copy(ctx->staging->nccl, zeros, NULL, bytes, err);
}

static hvd_status_t pack(hvd_ctx_t *ctx, runner_t *r, err_t *err)
{
    nccl_state_t *n = &r->nccl;
    if (n_pieces(n) == 0) {
        return HVD_OK;
    }
    hvd_status_t status =
        device_take(ctx->staging->device, n->packed_bytes, true, &n->scratch, err);
    for (size_t i = 0; status == HVD_OK && i < n_pieces(n); i++) {
        const piece_t *piece = piece_at(n, i);
        status = nccl_copy(ctx->staging->nccl, n->scratch->data + piece->at, piece->in,
                           piece->bytes, err);
    }
    if (status == HVD_OK &&
        !add_reduction(r, n->scratch->data, n->scratch->data, n->packed_bytes)) {
        status = fail(err, HVD_NO_MEMORY, "no memory for calls of NCCL");
    }
    return status;
}

// The buffer may be taken again at once: whatever uses it is queued in the same stream.
static hvd_status_t unpack(hvd_ctx_t *ctx, runner_t *r, err_t *err)
{
    nccl_state_t *n = &r->nccl;
    hvd_status_t status = HVD_OK;
    for (size_t i = 0; status == HVD_OK && i < n_pieces(n); i++) {
        const piece_t *piece = piece_at(n, i);
        status = nccl_copy(ctx->staging->nccl, piece->out, n->scratch->data + piece->at,
                           piece->bytes, err);
    }
    device_give_back(ctx->staging->device, n->scratch);
    n->scratch = NULL;
    return status;
}

static hvd_status_t call_allreduce(hvd_ctx_t *ctx, runner_t *r, err_t *err)
{
    if (!each_tensor(r, add_tensor, 0)) {
        return fail(err, HVD_NO_MEMORY, "no memory for calls of NCCL");
    }
    return r->batch->requests[0] == NULL ? bring_zeros(ctx, r, err) : pack(ctx, r, err);
}

static bool add_broadcast(runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                          int member)
{
    (void)entry;
    (void)member;
    bool is_root = r->task.args.member == r->task.args.root;
    const void *in = is_root ? view->input : view->output;
    return view->bytes == 0 ||
           add_call(r, NCCL_BROADCAST, in, view->output, view->bytes, HVD_UINT8, r->task.args.root);
}

static int64_t rows_of(const decision_entry_t *entry, int member, int t)
{
    return entry->sizes[member * entry->signature->n_tensors + t];
}

static bool add_gather(runner_t *r, const decision_entry_t *entry, tensor_view_t *view, int member)
{
    int size = r->task.args.size;
    int64_t rows = rows_of(entry, 0, view->index);
    bool is_equal = true;
    for (int m = 1; m < size; m++) {
        is_equal &= rows_of(entry, m, view->index) == rows;
    }
    (void)member;
    if (is_equal) {
        size_t bytes = (size_t)rows * view->row_bytes;
        return bytes == 0 ||
               add_call(r, NCCL_ALLGATHER, view->input, view->output, bytes, HVD_UINT8, 0);
    }
    bool added = true;
    uint8_t *at = view->output;
    for (int m = 0; added && m < size; m++) {
        size_t bytes = (size_t)rows_of(entry, m, view->index) * view->row_bytes;
        const void *in = m == r->task.args.member ? view->input : at;
        added = bytes == 0 || add_call(r, NCCL_BROADCAST, in, at, bytes, HVD_UINT8, m);
        at += bytes;
    }
    return added;
}

static bool add_scatter(runner_t *r, const decision_entry_t *entry, tensor_view_t *view, int member)
{
    int size = r->task.args.size;
    hvd_dtype_t dtype = r->task.args.dtype;
    size_t row = view->row_bytes / hvd_dtype_bytes(dtype);
    (void)entry;
    (void)member;
    if (view->rows % size == 0) {
        size_t n = (size_t)(view->rows / size) * row;
        return n == 0 || add_call(r, NCCL_REDUCESCATTER, view->input, view->output, n, dtype, 0);
    }
    bool added = true;
    const uint8_t *at = view->input;
    for (int m = 0; added && m < size; m++) {
        size_t n = (size_t)(view->rows / size + (m < view->rows % size)) * row;
        added = n == 0 || add_call(r, NCCL_REDUCE, at, view->output, n, dtype, m);
        at += n * hvd_dtype_bytes(dtype);
    }
    return added;
}

static bool add_exchange(runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                         int member)
{
    const coll_args_t *a = &r->task.args;
    const uint8_t *from = view->input;
    uint8_t *to = view->output;
    bool added = true;
    (void)entry;
    (void)member;
    for (int m = 0; added && m < a->size; m++) {
        added = (a->send_bytes[m] == 0 ||
                 add_call(r, NCCL_SEND, from, NULL, a->send_bytes[m], HVD_UINT8, m)) &&
                (a->recv_bytes[m] == 0 ||
                 add_call(r, NCCL_RECV, NULL, to, a->recv_bytes[m], HVD_UINT8, m));
        from += a->send_bytes[m];
        to += a->recv_bytes[m];
    }
    return added;
}

static hvd_status_t find_calls(hvd_ctx_t *ctx, runner_t *r, err_t *err)
{
    static const visit_fn visits[N_OP_LAYOUTS] = {
        [LAYOUT_WHOLE] = add_broadcast,
        [LAYOUT_GATHERED] = add_gather,
        [LAYOUT_SCATTERED] = add_scatter,
        [LAYOUT_EXCHANGED] = add_exchange,
    };
    if (r->task.args.op == HVD_ALLREDUCE) {
        return call_allreduce(ctx, r, err);
    }
    return each_tensor(r, visits[op_infos[r->task.args.op].layout], 0)
               ? HVD_OK
               : fail(err, HVD_NO_MEMORY, "no memory for calls of NCCL");
}

// --- The way -------------------------------------------------------------------------------------

// NCCL's stream goes on when the tensors of all requests are there.
static hvd_status_t await_tensors(hvd_ctx_t *ctx, runner_t *r, err_t *err)
{
    const batch_t *b = r->batch;
    void *stream = nccl_stream(ctx->staging->nccl);
    hvd_status_t status = HVD_OK;
    for (int i = 0; status == HVD_OK && i < b->n_entries; i++) {
        if (b->requests[i] != NULL) {
            status = device_order(ctx->staging->device, stream,
                                  staging_ready(b->requests[i])->event, err);
        }
    }
    return status;
}

static void note_times(hvd_ctx_t *ctx, const runner_t *r, const launch_t *launch)
{
    const batch_t *b = r->batch;
    device_work_t work = {.lane = LANE_NCCL,
                          .op = r->task.args.op,
                          .n_fused = b->n_entries,
                          .bytes = r->task.args.bytes,
                          .queued = launch->launched};
    if (launch->done->has_time) {
        snprintf(work.name, sizeof work.name, "%s", launch->name);
        times_note(ctx, &work, (device_times_t){mark_hold(launch->begun), mark_hold(launch->done)});
    }
}

// All is queued: its requests are launched.
static hvd_status_t end_launch(hvd_ctx_t *ctx, runner_t *r, err_t *err)
{
    staging_t *staging = ctx->staging;
    const batch_t *b = r->batch;
    launch_t *launch = r->nccl.launch;
    hvd_status_t status = unpack(ctx, r, err);
    if (status == HVD_OK) {
        status = device_mark(staging->device, nccl_stream(staging->nccl), launch->begun->has_time,
                             &launch->done, err);
    }
    if (status != HVD_OK) {
        return status;
    }
    note_times(ctx, r, launch);
    r->nccl.launch = NULL;
    for (int i = 0; i < b->n_entries; i++) {
        if (b->requests[i] != NULL) {
            staging_launched(b->requests[i], launch->done);
        }
    }
    lock_take(&staging->lock);
    device_unmark(staging->device, staging->newest);
    staging->newest = mark_hold(launch->done);
    lock_release(&staging->lock);
    *staging->last_launch = launch;
    staging->last_launch = &launch->next;
    return HVD_OK;
}

hvd_status_t way_nccl_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    HELD(ctx);
    nccl_state_t *n = &r->nccl;
    staging_t *staging = ctx->staging;
    (void)task;
    buf_clear(&n->calls);
    buf_clear(&n->pieces);
    n->packed_bytes = n->zero_bytes = 0;
    n->staging = staging;
    n->comm = comms_of_set(staging, r->batch->set->id)->comm;
    n->launch = calloc(1, sizeof *n->launch);
    if (n->launch == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to run a batch");
    }
    n->launch->batch = r->batch->number;
    n->launch->launched_ns = clock_ns();
    n->launch->launched = ticks_now();
    snprintf(n->launch->name, sizeof n->launch->name, "%s", r->batch->entries[0].name);
    hvd_status_t status = await_tensors(ctx, r, err);
    if (status == HVD_OK) {
        bool has_time = observe_has_timeline(ctx->observe);
        status = device_mark(staging->device, nccl_stream(staging->nccl), has_time,
                             &n->launch->begun, err);
    }
    if (status == HVD_OK) {
        status = find_calls(ctx, r, err);
    }
    if (status == HVD_OK) {
        const nccl_call_t *calls = (const nccl_call_t *)(const void *)n->calls.data;
        status = comm_run(n->comm, calls, n->calls.len / sizeof *calls, err);
        staging->asks_nccl = status == HVD_IN_PROGRESS;
    }
    return status == HVD_IN_PROGRESS ? HVD_OK : status;
}

hvd_status_t way_nccl_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
{
    HELD(ctx);
    hvd_status_t status = comm_poll(r->nccl.comm, err);
    ctx->staging->asks_nccl = status == HVD_IN_PROGRESS;
    *moved_p |= status == HVD_OK;
    return status == HVD_OK ? end_launch(ctx, r, err) : status;
}

void way_nccl_abandon(runner_t *r)
{
    nccl_state_t *n = &r->nccl;
    n->staging->asks_nccl = false;
    device_give_back(n->staging->device, n->scratch);
    n->scratch = NULL;
    if (n->launch != NULL) {
        device_unmark(n->staging->device, n->launch->begun);
        free(n->launch);
        n->launch = NULL;
    }
}
