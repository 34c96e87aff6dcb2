// SPDX-License-Identifier: Apache-2.0
//
// route_two_level.c - an allreduce over hosts whose ranks share memory.
//
// Three phases: reduce-scatter inside each host, allreduce of each shard between hosts, allgather
// inside each host. Every rank carries its own shard, so that all cores and sockets share the wire;
// there are as many shards as the host with the fewest members can carry.
#include "engine/runner.h"

#define SHARD_ALIGN ((size_t)64)

static void cut_shards(batch_runner_t *r)
{
    for (int s = 0; s <= r->n_shards; s++) {
        r->shard_at[s] = s == r->n_shards ? r->args.bytes
                                          : r->args.bytes * (size_t)s / (size_t)r->n_shards /
                                                SHARD_ALIGN * SHARD_ALIGN;
    }
    for (int i = 0; i < r->n_local; i++) {
        r->shard_bytes[i] = i < r->n_shards ? r->shard_at[i + 1] - r->shard_at[i] : 0;
    }
}

// The ranks that carry the same shard, one on each host, in the order of the hosts' first members.
static void find_cross_ranks(const hvd_ctx_t *ctx, batch_runner_t *r, const process_set_t *set)
{
    r->n_cross = 0;
    for (int m = 0; m < set->n; m++) {
        int place = 0; // among the members of its host
        for (int before = 0; before < m; before++) {
            place += r->host_of[before] == r->host_of[m];
        }
        if (place == r->local_member) {
            r->cross_member = set->ranks[m] == ctx->job.rank ? r->n_cross : r->cross_member;
            r->cross_ranks[r->n_cross++] = set->ranks[m];
        }
    }
}

static hvd_status_t start_phase(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    coll_args_t *a = &r->sub_args;
    *a = r->args;
    r->sub_ranks = r->local_ranks;
    a->host_of = NULL;
    a->member = r->local_member;
    a->size = r->n_local;
    a->blocks = r->shard_bytes;
    if (r->phase != PHASE_BETWEEN_HOSTS) {
        bool reduces = r->phase == PHASE_REDUCE_IN_HOST;
        const vec_t *in = reduces ? &r->in : &r->shard;
        const vec_t *out = reduces ? &r->shard : &r->out;
        double pre = reduces ? r->pre : 1.0;
        if (r->n_local == 1) { // a host with one member carries the whole tensor by itself
            move_alone(r, in, out, pre, 1.0);
            return HVD_OK;
        }
        a->op = reduces ? HVD_REDUCESCATTER : HVD_ALLGATHER;
        a->scale_before = a->scale_after = false;
        return start_stream(r, in, out, pre, 1.0, err);
    }
    r->sub_ranks = r->cross_ranks;
    a->member = r->cross_member;
    a->size = r->n_cross;
    a->bytes = r->shard.bytes;
    a->scale_before = false;
    double pre = r->pre;
    r->pre = 1.0; // the stream inside the host has applied it
    hvd_status_t status = plan_start(ctx, r, &r->shard, &r->shard, err);
    r->pre = pre;
    return status;
}

hvd_status_t two_level_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    cut_shards(r);
    find_cross_ranks(ctx, r, r->batch->set);
    size_t bytes = r->shard_bytes[r->local_member];
    uint8_t *at = NULL;
    if (r->out.n == 1) { // the shard's place in the output is as good as any
        at = r->local_member < r->n_shards ? r->out.fragments[0].at + r->shard_at[r->local_member]
                                           : NULL;
    } else if ((at = runner_scratch(&r->packed, bytes)) == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a shard of %zu bytes", bytes);
    }
    vec_clear(&r->shard);
    if (!vec_add(&r->shard, at, bytes)) {
        return fail(err, HVD_NO_MEMORY, "no memory for a shard of %zu bytes", bytes);
    }
    r->phase = PHASE_REDUCE_IN_HOST;
    return start_phase(ctx, r, err);
}

hvd_status_t two_level_progress(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err)
{
    bool between = r->phase == PHASE_BETWEEN_HOSTS;
    bool carries = r->shard.bytes > 0;
    hvd_status_t status = HVD_OK;
    if (!between) {
        status = r->n_local > 1 ? stream_progress(r->stream, moved_p) : HVD_OK;
    } else if (carries) {
        status = plan_progress(r, r->args.dtype, &r->shard, moved_p, err);
    }
    if (status != HVD_OK || r->phase == PHASE_GATHER_IN_HOST) {
        return status;
    }
    r->phase++;
    if (r->phase == PHASE_BETWEEN_HOSTS && !carries) {
        return HVD_IN_PROGRESS;
    }
    status = start_phase(ctx, r, err);
    return status == HVD_OK ? HVD_IN_PROGRESS : status;
}
