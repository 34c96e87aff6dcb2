// SPDX-License-Identifier: Apache-2.0
//
// way_two_level.c - an allreduce over hosts whose ranks share memory.
//
// Three phases: reduce-scatter inside each host, allreduce of each shard between hosts, allgather
// inside each host. Every rank carries its own shard, so that all cores and sockets share the wire;
// there are as many shards as the host with the fewest members can carry.
#include "engine/run.h"

#define LEAST_BYTES (32 * KIB)
#define SHARD_ALIGN ((size_t)64)

bool way_two_level_takes(const way_case_t *given)
{
    const coll_args_t *a = given->args;
    bool worth = a->bytes >= LEAST_BYTES || way_is_forced(given, "two_level");
    // Between the levels a half type would be rounded once too often.
    worth &= !dtype_is_half(a->dtype) || a->reduce == HVD_MIN || a->reduce == HVD_MAX;
    return a->op == HVD_ALLREDUCE && given->two_levels && worth && !given->one_host &&
           !way_is_forced_to_plan(given);
}

// --- Shards --------------------------------------------------------------------------------------

static void cut_shards(two_level_state_t *t, size_t bytes, int n_local)
{
    for (int s = 0; s <= t->n_shards; s++) {
        t->shard_at[s] = s == t->n_shards
                             ? bytes
                             : bytes * (size_t)s / (size_t)t->n_shards / SHARD_ALIGN * SHARD_ALIGN;
    }
    for (int i = 0; i < n_local; i++) {
        t->shard_bytes[i] = i < t->n_shards ? t->shard_at[i + 1] - t->shard_at[i] : 0;
    }
}

// The shard's place in the output is as good as any, if the output is one piece.
static hvd_status_t place_shard(two_level_state_t *t, const runner_t *r, err_t *err)
{
    int mine = r->batch->set->split.local_member;
    size_t bytes = t->shard_bytes[mine];
    uint8_t *at = NULL;
    if (r->out.n == 1) {
        at = mine < t->n_shards ? r->out.fragments[0].at + t->shard_at[mine] : NULL;
    } else {
        at = scratch(&t->memory, bytes);
    }
    vec_clear(&t->shard);
    return (at != NULL || bytes == 0) && vec_add(&t->shard, at, bytes)
               ? HVD_OK
               : fail(err, HVD_NO_MEMORY, "no memory for a shard of %zu bytes", bytes);
}

// --- Phases --------------------------------------------------------------------------------------

static hvd_status_t start_in_host(hvd_ctx_t *ctx, runner_t *r, err_t *err) REQUIRES(ctx->baton)
{
    const two_level_state_t *t = &r->two_level;
    const host_split_t *split = &r->batch->set->split;
    bool reduces = t->phase == PHASE_REDUCE_IN_HOST;
    coll_task_t task = r->task;
    task.args.op = reduces ? HVD_REDUCESCATTER : HVD_ALLGATHER;
    task.args.member = split->local_member;
    task.args.size = split->n_local;
    task.args.blocks = t->shard_bytes;
    task.args.scale_after = false;
    task.ranks = split->local_ranks;
    task.in = reduces ? &r->in : &t->shard;
    task.out = reduces ? &t->shard : &r->out;
    task.prescale = reduces ? r->task.prescale : 1.0;
    task.finish = FINISH_NOTHING;
    task.number += (uint64_t)t->phase;
    // A host with one member carries the whole tensor by itself.
    return split->n_local == 1 ? way_alone_start(ctx, r, &task, err)
                               : way_stream_start(ctx, r, &task, err);
}

static hvd_status_t start_between_hosts(hvd_ctx_t *ctx, runner_t *r, err_t *err)
    REQUIRES(ctx->baton)
{
    const two_level_state_t *t = &r->two_level;
    const host_split_t *split = &r->batch->set->split;
    coll_task_t task = r->task;
    task.args.member = split->cross_member;
    task.args.size = split->n_cross;
    task.args.bytes = t->shard.bytes;
    task.ranks = split->cross_ranks;
    task.in = task.out = &t->shard;
    task.prescale = 1.0; // the stream inside the host has applied it
    task.number += (uint64_t)t->phase;
    return way_plan_start(ctx, r, &task, err);
}

hvd_status_t way_two_level_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    two_level_state_t *t = &r->two_level;
    const host_split_t *split = &r->batch->set->split;
    t->n_shards = split->fewest;
    cut_shards(t, task->args.bytes, split->n_local);
    t->phase = PHASE_REDUCE_IN_HOST;
    hvd_status_t status = place_shard(t, r, err);
    return status == HVD_OK ? start_in_host(ctx, r, err) : status;
}

static hvd_status_t progress_phase(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
    REQUIRES(ctx->baton)
{
    const host_split_t *split = &r->batch->set->split;
    if (r->two_level.phase != PHASE_BETWEEN_HOSTS) {
        return split->n_local > 1 ? stream_progress(r->stream, moved_p) : HVD_OK;
    }
    return r->two_level.shard.bytes > 0 ? way_plan_progress(ctx, r, moved_p, err) : HVD_OK;
}

hvd_status_t way_two_level_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
{
    two_level_state_t *t = &r->two_level;
    hvd_status_t status = progress_phase(ctx, r, moved_p, err);
    if (status != HVD_OK || t->phase == PHASE_GATHER_IN_HOST) {
        return status;
    }
    t->phase++;
    if (t->phase == PHASE_GATHER_IN_HOST) {
        status = start_in_host(ctx, r, err);
    } else if (t->shard.bytes > 0) {
        status = start_between_hosts(ctx, r, err);
    }
    return status == HVD_OK ? HVD_IN_PROGRESS : status;
}
