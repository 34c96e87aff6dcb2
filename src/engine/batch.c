// SPDX-License-Identifier: Apache-2.0
//
// batch.c - from a decision of coord to memory moved.
//
// A batch is one or more submissions of one kind, agreed to run together. Its tensors are strung
// into two vectors, what goes in and what comes out (tensors.c), and take one of the routes of
// routes.c. Batches run one after the other, in the order of the log.
// Threads: the holder of the engine.
#include "engine/runner.h"

#include <stdlib.h>

// --- Life ----------------------------------------------------------------------------------------

hvd_status_t batch_runner_new(hvd_ctx_t *ctx, batch_runner_t **runner_p, err_t *err)
{
    batch_runner_t *r = calloc(1, sizeof *r);
    if (r == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to run batches");
    }
    *runner_p = r;
    size_t n = (size_t)ctx->job.size;
    r->stream_clock = &ctx->stream_clock;
    r->exec = exec_new();
    r->blocks = calloc(n, sizeof *r->blocks);
    r->send_bytes = calloc(n, sizeof *r->send_bytes);
    r->recv_bytes = calloc(n, sizeof *r->recv_bytes);
    r->shard_bytes = calloc(n, sizeof *r->shard_bytes);
    r->shard_at = calloc(n + 1, sizeof *r->shard_at);
    r->host_of = calloc(n, sizeof *r->host_of);
    r->local_ranks = calloc(n, sizeof *r->local_ranks);
    r->cross_ranks = calloc(n, sizeof *r->cross_ranks);
    if (!r->exec || !r->blocks || !r->send_bytes || !r->recv_bytes || !r->shard_bytes ||
        !r->shard_at || !r->host_of || !r->local_ranks || !r->cross_ranks) {
        return fail(err, HVD_NO_MEMORY, "no memory to run batches");
    }
    domain_t *shm = net_domain(ctx->net, &transport_shm);
    return shm_slot_bytes(shm) > 0 ? stream_new(shm, ctx->job.rank, ctx->job.size, &r->stream, err)
                                   : HVD_OK;
}

void batch_runner_free(batch_runner_t *r)
{
    if (r == NULL) {
        return;
    }
    stream_free(r->stream);
    exec_free(r->exec);
    plan_free(&r->plan);
    vec_free(&r->in);
    vec_free(&r->out);
    vec_free(&r->shard);
    vec_free(&r->piece_in);
    vec_free(&r->piece_out);
    free(r->blocks);
    free(r->send_bytes);
    free(r->recv_bytes);
    free(r->shard_bytes);
    free(r->shard_at);
    free(r->host_of);
    free(r->local_ranks);
    free(r->cross_ranks);
    buf_free(&r->packed);
    buf_free(&r->unpacked);
    buf_free(&r->tmp);
    buf_free(&r->acc);
    buf_free(&r->zeros);
    buf_free(&r->pieces);
    free(r);
}

void *runner_scratch(buf_t *buf, size_t bytes)
{
    buf_clear(buf);
    return buf_append(buf, NULL, MAX(bytes, 1));
}

// --- Riding along --------------------------------------------------------------------------------

static size_t elements_in(const int64_t *dims, int *at)
{
    int n_dims = (int)dims[(*at)++];
    size_t n = 1;
    for (int d = 0; d < n_dims; d++) {
        n *= (size_t)dims[(*at)++];
    }
    return n;
}

static double average_factor(hvd_reduce_t reduce, int n_members)
{
    return reduce == HVD_AVERAGE ? 1.0 / n_members : 1.0;
}

bool riding_store(request_t *request, const void *result, int n_members)
{
    hvd_dtype_t dtype = request->asked.dtype;
    size_t acc_bytes = hvd_dtype_bytes(acc_dtype(dtype));
    double post =
        request->signature.postscale * average_factor(request->signature.reduce, n_members);
    const uint8_t *from = result;
    int at = 0;
    for (int t = 0; t < request->asked.n_tensors; t++) {
        size_t n = elements_in(request->signature.dims, &at);
        void *output = allocate_output(request, t);
        if (output == NULL && n > 0) {
            return false;
        }
        acc_store(dtype, output, from, n, post);
        from += n * acc_bytes;
    }
    return true;
}

static void finish_riding(hvd_ctx_t *ctx, const decision_entry_t *entry, int n_members, int n_fused,
                          uint64_t ticks)
{
    if (entry->tag == 0) {
        return;
    }
    request_t *request = request_of_tag(entry->tag);
    trace_agreed(&request->trace, ticks);
    trace_started(&request->trace, ROUTE_RIDING, n_fused, ticks);
    bool stored = riding_store(request, entry->result, n_members);
    request_complete(ctx, request, stored ? HVD_OK : HVD_NO_MEMORY, NULL);
}

// --- The queue of batches ------------------------------------------------------------------------

static batch_t *batch_take(hvd_ctx_t *ctx, int n_entries)
{
    batch_t *b = ctx->free_batches;
    if (b != NULL) {
        ctx->free_batches = b->next;
    } else if ((b = calloc(1, sizeof *b)) == NULL) {
        return NULL;
    }
    if (b->cap_entries < n_entries) {
        decision_entry_t *entries = realloc(b->entries, (size_t)n_entries * sizeof *entries);
        b->entries = entries != NULL ? entries : b->entries;
        request_t **requests = realloc(b->requests, (size_t)n_entries * sizeof *requests);
        b->requests = requests != NULL ? requests : b->requests;
        if (entries == NULL || requests == NULL) {
            b->next = ctx->free_batches;
            ctx->free_batches = b;
            return NULL;
        }
        b->cap_entries = n_entries;
    }
    b->n_entries = 0;
    b->next = NULL;
    return b;
}

static void batch_put_back(hvd_ctx_t *ctx, batch_t *b)
{
    b->next = ctx->free_batches;
    ctx->free_batches = b;
}

void batch_add(hvd_ctx_t *ctx, const decision_t *decision)
{
    const process_set_t *set = set_find(ctx, decision->set);
    batch_t *b = batch_take(ctx, decision->n_entries);
    if (b == NULL) {
        err_t err;
        fail(&err, HVD_NO_MEMORY, "rank %d has no memory to run a batch", ctx->job.rank);
        engine_fail(ctx, &err);
        return;
    }
    uint64_t ticks = ticks_now();
    if (decision->n_entries > 0 && decision->entries[0].result != NULL) {
        observe_cycle(ctx->observe, ticks); // over as soon as it has begun
    }
    for (int i = 0; i < decision->n_entries; i++) {
        const decision_entry_t *entry = &decision->entries[i];
        if (entry->result != NULL) {
            finish_riding(ctx, entry, set->n, decision->n_entries, ticks);
            continue;
        }
        request_t *request = entry->tag != 0 ? request_of_tag(entry->tag) : NULL;
        if (request != NULL) {
            trace_agreed(&request->trace, ticks);
        }
        b->entries[b->n_entries] = *entry;
        b->requests[b->n_entries++] = request;
    }
    if (b->n_entries == 0) {
        batch_put_back(ctx, b);
        return;
    }
    b->number = decision->batch;
    b->is_meeting = false;
    b->collective = b->number * (STREAMS_OF_BATCH + 1);
    b->set = set;
    ctx->moved_ns = ctx->running == NULL ? ctx->now_ns : ctx->moved_ns;
    *ctx->running_last = b;
    ctx->running_last = &b->next;
}

void batch_add_meeting(hvd_ctx_t *ctx, request_t *request)
{
    batch_t *b = batch_take(ctx, 1);
    if (b == NULL) {
        err_t err;
        fail(&err, HVD_NO_MEMORY, "rank %d has no memory to run a batch", ctx->job.rank);
        engine_fail(ctx, &err);
        return;
    }
    b->entries[0] = (decision_entry_t){
        .tag = tag_of(request), .name = request->asked.name, .signature = &request->signature};
    b->requests[0] = request;
    trace_agreed(&request->trace, ticks_now());
    b->n_entries = 1;
    b->number = 0;
    b->is_meeting = true;
    b->collective = request->meeting;
    b->set = set_find(ctx, request->asked.process_set);
    b->next = ctx->running; // nothing of this rank is running: those behind wait for this one
    ctx->running = b;
    if (b->next == NULL) {
        ctx->running_last = &b->next;
    }
    atomic_store(&ctx->board_busy, false);
}

void batches_drop(hvd_ctx_t *ctx)
{
    while (ctx->running != NULL) {
        batch_t *b = ctx->running;
        ctx->running = b->next;
        batch_put_back(ctx, b);
    }
    ctx->running_last = &ctx->running;
    ctx->runner->batch = NULL;
}

// --- Running -------------------------------------------------------------------------------------

static void describe(hvd_ctx_t *ctx, batch_runner_t *r, const batch_t *b)
{
    const signature_t *sig = b->entries[0].signature;
    bool average = sig->reduce == HVD_AVERAGE;
    r->moves_only = sig->op != HVD_ALLREDUCE && sig->op != HVD_REDUCESCATTER;
    r->pre = r->moves_only ? 1.0 : sig->prescale;
    r->post = r->moves_only ? 1.0 : sig->postscale * average_factor(sig->reduce, b->set->n);
    int root = 0;
    for (int m = 0; m < b->set->n; m++) {
        root = b->set->ranks[m] == sig->root ? m : root;
    }
    r->args = (coll_args_t){
        .op = sig->op,
        .dtype = sig->dtype,
        .reduce = average ? HVD_SUM : sig->reduce,
        .scale_after = r->post != 1.0,
        .member = b->set->member,
        .size = b->set->n,
        .root = root,
        .host_of = r->host_of,
        .segment_bytes = ctx->config.segment_bytes,
    };
}

static hvd_status_t start_batch(hvd_ctx_t *ctx, batch_runner_t *r, batch_t *b, err_t *err)
{
    r->batch = b;
    describe(ctx, r, b);
    if (r->args.op != HVD_BARRIER && !string_tensors(r)) {
        return fail(err, HVD_NO_MEMORY, "rank %d has no memory for the output of '%s'",
                    ctx->job.rank, b->entries[0].name);
    }
    return route_start(ctx, r, err);
}

static hvd_status_t progress_batch(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err)
{
    return routes[r->route].progress != NULL ? routes[r->route].progress(ctx, r, moved_p, err)
                                             : HVD_OK;
}

bool batch_describe(const hvd_ctx_t *ctx, char *text, size_t bytes)
{
    const batch_runner_t *r = ctx->runner;
    bool by_plan = r->route == ROUTE_PLAN || r->route == ROUTE_PIECES ||
                   (r->route == ROUTE_TWO_LEVEL && r->phase == PHASE_BETWEEN_HOSTS);
    if (r->batch == NULL || !by_plan) {
        return false;
    }
    exec_describe(r->exec, text, bytes);
    return text[0] != '\0';
}

static void finish_batch(hvd_ctx_t *ctx, batch_t *b)
{
    ctx->running = b->next;
    if (ctx->running == NULL) {
        ctx->running_last = &ctx->running;
    }
    ctx->runner->batch = NULL;
    observe_batch(ctx->observe, b->n_entries);
    for (int i = 0; i < b->n_entries; i++) {
        if (b->requests[i] != NULL) {
            request_complete(ctx, b->requests[i], HVD_OK, NULL);
        }
    }
    if (!b->is_meeting) {
        coord_batch_done(ctx->coord, b->number, clock_ns());
    }
    batch_put_back(ctx, b);
}

static hvd_status_t start_recorded(hvd_ctx_t *ctx, batch_runner_t *r, batch_t *b, err_t *err)
{
    uint64_t ticks = ticks_now();
    observe_cycle(ctx->observe, ticks);
    hvd_status_t status = start_batch(ctx, r, b, err);
    for (int i = 0; i < b->n_entries; i++) {
        if (b->requests[i] != NULL) {
            trace_started(&b->requests[i]->trace, r->route, b->n_entries, ticks);
        }
    }
    return status;
}

bool batches_progress(hvd_ctx_t *ctx)
{
    bool moved = false;
    while (ctx->running != NULL && ctx->suspicion.status == HVD_OK) {
        batch_runner_t *r = ctx->runner;
        batch_t *b = ctx->running;
        err_t err;
        hvd_status_t status = HVD_OK;
        if (r->batch != b) {
            if (!b->is_meeting && atomic_load_explicit(&ctx->board_busy, memory_order_acquire)) {
                return moved; // see board_busy
            }
            status = start_recorded(ctx, r, b, &err);
            moved = true;
        }
        if (status == HVD_OK) {
            status = progress_batch(ctx, r, &moved, &err);
        }
        if (status == HVD_IN_PROGRESS) {
            return moved;
        }
        if (status == HVD_PEER_LOST) {
            engine_suspect(ctx, &err);
            return true;
        }
        if (status != HVD_OK) {
            batches_drop(ctx);
            engine_fail(ctx, &err);
            return true;
        }
        finish_batch(ctx, b);
        moved = true;
    }
    return moved;
}
