// SPDX-License-Identifier: Apache-2.0
//
// run.c - from a decision of coord to memory moved.
//
// A batch is one or more submissions of one kind, agreed to run together. Its tensors are strung
// into two vectors, what goes in and what comes out (tensors.c), and take one of the ways of
// ways.c. Batches run one after the other, in the order of the log; a batch whose results the
// agreement has brought is over at once.
// Threads: the holder of the engine.
#include "engine/run.h"
#include "engine/staging.h"

#include <stdlib.h>

// --- Life ----------------------------------------------------------------------------------------

static bool allocate(runner_t *r, size_t n)
{
    two_level_state_t *t = &r->two_level;
    return (r->plan.exec = exec_new()) != NULL &&
           (r->blocks = calloc(n, sizeof *r->blocks)) != NULL &&
           (r->send_bytes = calloc(n, sizeof *r->send_bytes)) != NULL &&
           (r->recv_bytes = calloc(n, sizeof *r->recv_bytes)) != NULL &&
           (r->mpi.blocks = calloc(n, sizeof *r->mpi.blocks)) != NULL &&
           (t->shard_at = calloc(n + 1, sizeof *t->shard_at)) != NULL &&
           (t->shard_bytes = calloc(n, sizeof *t->shard_bytes)) != NULL;
}

hvd_status_t rider_new(runner_t **rider_p, err_t *err)
{
    *rider_p = calloc(1, sizeof **rider_p);
    return *rider_p != NULL ? HVD_OK : fail(err, HVD_NO_MEMORY, "no memory to run batches");
}

hvd_status_t runner_new(hvd_ctx_t *ctx, runner_t **runner_p, err_t *err)
{
    runner_t *r = calloc(1, sizeof *r);
    *runner_p = r;
    if (r == NULL || !allocate(r, (size_t)ctx->job.size)) {
        return fail(err, HVD_NO_MEMORY, "no memory to run batches");
    }
    r->plan.net = ctx->net;
    domain_t *shm = net_domain(ctx->net, &transport_shm);
    if (shm_slot_bytes(shm) == 0) {
        return HVD_OK;
    }
    hvd_status_t status = stream_new(shm, ctx->job.rank, ctx->job.size, &r->stream, err);
    return status == HVD_OK ? direct_new(shm, ctx->job.size, &r->direct, err) : status;
}

void runner_free(runner_t *r)
{
    if (r == NULL) {
        return;
    }
    vec_t *const vectors[] = {
        &r->in,           &r->out,           &r->pieces.in,      &r->pieces.out,
        &r->nccl_init.in, &r->nccl_init.out, &r->two_level.shard};
    buf_t *const buffers[] = {&r->plan.packed,     &r->plan.unpacked, &r->plan.tmp,
                              &r->plan.acc,        &r->zeros,         &r->pieces.bytes,
                              &r->nccl.calls,      &r->nccl.pieces,   &r->nccl_init.memory,
                              &r->two_level.memory};
    void *const arrays[] = {r->blocks,     r->send_bytes,         r->recv_bytes,
                            r->mpi.blocks, r->two_level.shard_at, r->two_level.shard_bytes};
    stream_free(r->stream);
    direct_free(r->direct);
    exec_free(r->plan.exec);
    plan_free(&r->plan.plan);
    for (size_t i = 0; i < N_ELEMENTS(vectors); i++) {
        vec_free(vectors[i]);
    }
    for (size_t i = 0; i < N_ELEMENTS(buffers); i++) {
        buf_free(buffers[i]);
    }
    for (size_t i = 0; i < N_ELEMENTS(arrays); i++) {
        free(arrays[i]);
    }
    free(r);
}

void *scratch(buf_t *buf, size_t bytes)
{
    buf_clear(buf);
    return buf_append(buf, NULL, MAX(bytes, 1));
}

// --- The queue of batches ------------------------------------------------------------------------

static batch_t *batch_take(hvd_ctx_t *ctx, int n_entries) REQUIRES(ctx->baton)
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
    b->next = NULL;
    return b;
}

static void batch_put_back(hvd_ctx_t *ctx, batch_t *b) REQUIRES(ctx->baton)
{
    b->next = ctx->free_batches;
    ctx->free_batches = b;
}

void batches_free(hvd_ctx_t *ctx)
{
    while (ctx->free_batches != NULL) {
        batch_t *b = ctx->free_batches;
        ctx->free_batches = b->next;
        free(b->entries);
        free(b->requests);
        free(b);
    }
}

static void fail_no_memory(hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    err_t err;
    fail(&err, HVD_NO_MEMORY, "rank %d has no memory to run a batch", ctx->job.rank);
    engine_fail(ctx, &err, ctx->job.rank);
}

void batches_drop(hvd_ctx_t *ctx)
{
    HELD(ctx);
    runner_t *r = ctx->runner;
    if (r->batch != NULL && r->way != NULL && r->way->abandon != NULL) {
        r->way->abandon(r);
    }
    while (ctx->running != NULL) {
        batch_t *b = ctx->running;
        ctx->running = b->next;
        batch_put_back(ctx, b);
    }
    ctx->running_last = &ctx->running;
    r->batch = NULL;
}

// --- Running -------------------------------------------------------------------------------------

static int member_of(const process_set_t *set, int rank)
{
    int member = 0;
    for (int m = 0; m < set->n; m++) {
        member = set->ranks[m] == rank ? m : member;
    }
    return member;
}

coll_task_t run_task_of(const hvd_ctx_t *ctx, const runner_t *r, const batch_t *b)
{
    const signature_t *sig = b->entries[0].signature;
    bool reduces = op_has(sig->op, OP_REDUCES);
    finish_t finish = signature_finish(sig, b->set->n);
    return (coll_task_t){
        .args = {.op = sig->op,
                 .dtype = sig->dtype,
                 .reduce = sig->reduce == HVD_AVERAGE ? HVD_SUM : sig->reduce,
                 .scale_after = !finish_is_nothing(finish),
                 .member = b->set->member,
                 .size = b->set->n,
                 .root = op_has(sig->op, OP_ROOTED) ? member_of(b->set, sig->root) : 0,
                 .segment_bytes = ctx->config.segment_bytes},
        .ranks = b->set->ranks,
        .in = &r->in,
        .out = &r->out,
        .prescale = reduces ? sig->prescale : 1.0,
        .finish = finish,
        .number = b->stream,
    };
}

// Its members are all ranks of this host, so every task of one is a task of all.
static bool is_whole_host(hvd_ctx_t *ctx, const process_set_t *set)
{
    return set->n == shm_n_local(net_domain(ctx->net, &transport_shm));
}

static way_id_t choose_way(hvd_ctx_t *ctx, runner_t *r, const batch_t *b) REQUIRES(ctx->baton)
{
    bool one_host = b->set->on_this_host;
    way_case_t given = {
        .args = &r->task.args,
        .algorithm = ctx->config.algorithm,
        .on_device = b->entries[0].signature->on_device,
        .one_host = one_host,
        .has_stream = r->stream != NULL,
        .is_crowded = net_oversubscribed(ctx->net),
        .all_bytes = largest_buffer(r),
        .two_levels = !one_host && ctx->shm_on_all_hosts && b->set->split.most > 1,
        .mpi_can_run = ctx->mpi != NULL && b->set->n == ctx->job.size &&
                       mpi_can_run(&r->task.args, largest_buffer(r)),
    };
    trial_t *trial = NULL;
    if (way_direct_may_pay(&given) && is_whole_host(ctx, b->set)) {
        trial = trial_of(&r->trials, r->task.args.op, given.all_bytes);
        given.copying = trial_copying(trial);
    }
    way_id_t way = way_choose(&given);
    if (trial != NULL && (way == WAY_DIRECT || way == WAY_STREAM)) {
        r->trial = trial;
        r->start_ns = trial_counts(trial) ? clock_ns() : 0;
    }
    return way;
}

static void end_trial(runner_t *r)
{
    uint64_t ns = trial_counts(r->trial) ? clock_ns() - r->start_ns : 0;
    trial_ended(r->trial, ns, direct_n_for_windows(r->direct), r->task.args.size);
    r->trial = NULL;
}

// Its tensors are on GPUs, and the members have not agreed yet what to do with them.
static bool must_init_nccl(hvd_ctx_t *ctx, const batch_t *b) REQUIRES(ctx->baton)
{
    if (LIKELY(!b->entries[0].signature->on_device)) {
        return false;
    }
    const set_comm_t *set = comms_of_set(ctx->staging, b->set->id);
    return set == NULL || set->comm == NULL;
}

static hvd_status_t start_batch(hvd_ctx_t *ctx, runner_t *r, batch_t *b, err_t *err)
    REQUIRES(ctx->baton)
{
    uint64_t ticks = ticks_now();
    observe_cycle(ctx->observe, ticks);
    r->batch = b;
    r->trial = NULL;
    way_id_t way = WAY_RIDING;
    if (!b->brings_results) {
        r->task = run_task_of(ctx, r, b);
        if (UNLIKELY(must_init_nccl(ctx, b))) {
            r->way = &ways[WAY_INIT_NCCL];
            return r->way->start(ctx, r, &r->task, err);
        }
        if (!string_tensors(r)) {
            return fail(err, HVD_NO_MEMORY, "rank %d has no memory for the output of '%s'",
                        ctx->job.rank, b->entries[0].name);
        }
        way = choose_way(ctx, r, b);
    }
    r->way = &ways[way];
    for (int i = 0; i < b->n_entries; i++) {
        if (b->requests[i] != NULL) {
            trace_started(&b->requests[i]->trace, (int)way, b->n_entries, ticks);
        }
    }
    return r->way->start != NULL ? r->way->start(ctx, r, &r->task, err) : HVD_OK;
}

bool run_describe(const hvd_ctx_t *ctx, char *text, size_t bytes)
{
    HELD(ctx);
    const runner_t *r = ctx->runner;
    bool in_host = r->way == &ways[WAY_TWO_LEVEL] && r->two_level.phase != PHASE_BETWEEN_HOSTS;
    if (r->batch == NULL || !r->way->by_plan || in_host) {
        return false;
    }
    exec_describe(r->plan.exec, text, bytes);
    return text[0] != '\0';
}

// Its tensors are a GPU's.
static void finish_on_device(hvd_ctx_t *ctx, request_t *request, hvd_status_t status,
                             const char *text) REQUIRES(ctx->baton)
{
    err_t err;
    if (request->signature.on_device && ctx->runner->way == &ways[WAY_INIT_NCCL]) {
        staging_go_by_host(ctx, request); // they have agreed not to
        return;
    }
    if (request->staged != NULL && status == HVD_OK) {
        status = staging_end(request, &err);
        text = status != HVD_OK ? err.text : text;
    }
    request_complete(ctx, request, status, text);
}

// Completes what the batch ran, and forgets it.
static void finish_batch(hvd_ctx_t *ctx, batch_t *b, hvd_status_t status, const char *text)
    REQUIRES(ctx->baton)
{
    if (!b->brings_results) { // else it was never in the queue
        ctx->running = b->next;
        ctx->running_last = ctx->running == NULL ? &ctx->running : ctx->running_last;
        ctx->runner->batch = NULL;
        observe_batch(ctx->observe, b->n_entries);
    }
    for (int i = 0; i < b->n_entries; i++) {
        request_t *request = b->requests[i];
        if (request == NULL) {
            continue;
        }
        if (UNLIKELY(request->signature.on_device || request->staged != NULL)) {
            finish_on_device(ctx, request, status, text);
        } else {
            request_complete(ctx, request, status, text);
        }
    }
    if (!b->by_board && !b->brings_results) {
        coord_batch_done(ctx->coord, b->number, clock_ns());
    }
    batch_put_back(ctx, b);
}

bool run_progress(hvd_ctx_t *ctx)
{
    HELD(ctx);
    bool moved = false;
    while (ctx->running != NULL && ctx->suspicion.status == HVD_OK) {
        runner_t *r = ctx->runner;
        batch_t *b = ctx->running;
        err_t err;
        hvd_status_t status = HVD_OK;
        if (r->batch != b) {
            if (!b->by_board && board_is_busy(ctx)) {
                return moved;
            }
            status = start_batch(ctx, r, b, &err);
            moved = true;
        }
        if (status == HVD_OK && r->way->progress != NULL) {
            status = r->way->progress(ctx, r, &moved, &err);
        }
        if (status == HVD_OK && r->way->land != NULL) {
            status = r->way->land(ctx, r, &moved, &err);
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
            engine_fail(ctx, &err, -1);
            return true;
        }
        moved = true;
        if (UNLIKELY(r->way == &ways[WAY_INIT_NCCL]) && !must_init_nccl(ctx, b)) {
            r->batch = NULL; // now it can begin
            continue;
        }
        if (UNLIKELY(r->trial != NULL)) {
            end_trial(r);
        }
        finish_batch(ctx, b, HVD_OK, NULL);
    }
    return moved;
}

// --- What is to run ------------------------------------------------------------------------------

void run_decided(hvd_ctx_t *ctx, const decision_t *decision)
{
    HELD(ctx);
    batch_t *b = batch_take(ctx, decision->n_entries);
    if (b == NULL) {
        fail_no_memory(ctx);
        return;
    }
    uint64_t ticks = ticks_now();
    b->number = decision->batch;
    b->by_board = false;
    b->brings_results = decision->n_entries > 0 && decision->entries[0].result != NULL;
    b->stream = b->number * STREAMS_PER_BATCH;
    b->set = set_find(ctx, decision->set);
    b->n_entries = decision->n_entries;
    for (int i = 0; i < decision->n_entries; i++) {
        b->entries[i] = decision->entries[i];
        b->requests[i] = request_of_tag(decision->entries[i].tag);
        if (b->requests[i] != NULL) {
            trace_agreed(&b->requests[i]->trace, ticks);
        }
    }
    if (!b->brings_results) {
        ctx->moved_ns = ctx->running == NULL ? ctx->now_ns : ctx->moved_ns;
        *ctx->running_last = b;
        ctx->running_last = &b->next;
        return;
    }
    // Its results live only until the next decision, and it uses nothing that others use.
    err_t err;
    hvd_status_t status = start_batch(ctx, ctx->rider, b, &err);
    finish_batch(ctx, b, status, status != HVD_OK ? err.text : NULL);
}

void run_board_stream(hvd_ctx_t *ctx, request_t *request)
{
    HELD(ctx);
    batch_t *b = batch_take(ctx, 1);
    if (b == NULL) {
        fail_no_memory(ctx);
        return;
    }
    b->entries[0] = (decision_entry_t){.tag = tag_of(request),
                                       .name = request->name,
                                       .signature = &request->signature,
                                       .sizes = request->board.sizes};
    b->requests[0] = request;
    b->n_entries = 1;
    b->number = 0;
    b->by_board = true;
    b->brings_results = false;
    b->stream = request->board.stream;
    b->set = set_find(ctx, request->process_set);
    trace_agreed(&request->trace, ticks_now());
    b->next = ctx->running; // nothing of this rank is running: those behind wait for this one
    ctx->running = b;
    if (b->next == NULL) {
        ctx->running_last = &b->next;
    }
    atomic_store(&ctx->board_busy, false);
}
