// SPDX-License-Identifier: Apache-2.0
//
// way_direct.c - all members on this host, and bytes only move: straight from tensor to tensor.
//
// coll/direct.c copies. Where the kernel does not allow that, all members find out in the same way
// and stream through shared memory instead.
#include "engine/run.h"

// What a member gets from another, at least on average: less is faster through windows everywhere.
// Where ranks share cores windows are always faster: they stay in the cache of that core. Else it
// is up to the machine, so trials.c tries both.
#define LEAST_BLOCK_BYTES (32 * KIB)

// Blocks that go from one member to another.
static size_t n_blocks(const coll_args_t *a)
{
    size_t n = (size_t)a->size;
    return a->op == HVD_ALLTOALL ? n * n : a->op == HVD_ALLGATHER ? n : 1;
}

static bool is_served(const way_case_t *given)
{
    return given->one_host && given->has_stream && direct_serves(given->args->op) &&
           given->args->size > 1 && !way_is_forced_to_plan(given);
}

bool way_direct_may_pay(const way_case_t *given)
{
    return is_served(given) && !given->is_crowded &&
           given->all_bytes / n_blocks(given->args) >= LEAST_BLOCK_BYTES &&
           !way_is_forced(given, "stream") && !way_is_forced(given, "direct");
}

bool way_direct_takes(const way_case_t *given)
{
    return (given->copying != COPY_BY_WINDOWS && way_direct_may_pay(given)) ||
           (is_served(given) && way_is_forced(given, "direct"));
}

hvd_status_t way_direct_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    atomic_store(&ctx->stream_clock, task->number);
    bool is_for_windows = r->trial != NULL && trial_is_for_windows(r->trial);
    return direct_start(r->direct, task, is_for_windows, err);
}

hvd_status_t way_direct_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
{
    hvd_status_t status = direct_progress(r->direct, moved_p, err);
    if (status != HVD_UNSUPPORTED) {
        return status;
    }
    r->way = &ways[WAY_STREAM];
    status = way_stream_start(ctx, r, &r->task, err);
    return status == HVD_OK ? way_stream_progress(ctx, r, moved_p, err) : status;
}

void way_direct_abandon(runner_t *r)
{
    direct_abandon(r->direct);
}
