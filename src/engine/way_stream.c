// SPDX-License-Identifier: Apache-2.0
//
// way_stream.c - all members on this host: straight through shared memory.
//
// coll/stream.c walks the tensors where they lie: nothing is packed.
#include "engine/run.h"

bool way_stream_takes(const way_case_t *given)
{
    return given->one_host && given->has_stream && stream_serves(given->args->op) &&
           !way_is_forced_to_plan(given);
}

hvd_status_t way_stream_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    atomic_store(&ctx->stream_clock, task->number);
    return stream_start(r->stream, task, err);
}

hvd_status_t way_stream_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
{
    (void)ctx;
    (void)err;
    return stream_progress(r->stream, moved_p);
}
