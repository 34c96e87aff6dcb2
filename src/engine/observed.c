// SPDX-License-Identifier: Apache-2.0
//
// observed.c - the engine as observe/ sees it: what only the engine knows, handed in once, and the
// public functions that ask observe/.
// Threads: any, like the public functions; the callbacks under the lock, on the monitor thread.
#include "engine/run.h"

// --- What observe/ asks --------------------------------------------------------------------------

static const char *way_name(int way)
{
    return ways[way].name;
}

static int list_in_flight(void *owner, const trace_t **oldest, int n_oldest)
{
    hvd_ctx_t *ctx = owner;
    LOCKED(ctx);
    return requests_in_flight(ctx, oldest, n_oldest);
}

static void free_context(void *owner)
{
    context_free(owner);
}

hvd_status_t observed_start(hvd_ctx_t *ctx, err_t *err)
{
    int n_parents = ctx->job.rank > 0 ? 1 : 0;
    const observe_job_t job = {
        .rank = ctx->job.rank,
        .size = ctx->job.size,
        .n_branches = ctx->n_control - n_parents + 1,
        .config = &ctx->config,
        .keys = ctx->keys,
        .log = &ctx->log,
        .lock = &ctx->lock,
        .ended = &ctx->ended,
        .way_name = way_name,
        .board_way = WAY_BOARD,
        .riding_way = WAY_RIDING,
        .in_flight = list_in_flight,
        .free_owner = free_context,
        .owner = ctx,
    };
    return observe_open(&job, &ctx->observe, err);
}

// --- What users ask ------------------------------------------------------------------------------

static hvd_status_t check(const hvd_ctx_t *ctx)
{
    return ctx == NULL ? HVD_NOT_INITIALIZED : atomic_load(ctx->alive) == 0 ? HVD_FORKED : HVD_OK;
}

hvd_status_t hvd_counters(hvd_ctx_t *ctx, hvd_counters_t *counters_p, size_t bytes)
{
    hvd_status_t status = check(ctx);
    if (status == HVD_OK) {
        hvd_counters_t counters = observe_counters(ctx->observe);
        memset(counters_p, 0, bytes); // what a newer caller asks for counts as zero
        memcpy(counters_p, &counters, MIN(bytes, sizeof counters));
    }
    return status;
}

int hvd_stragglers(hvd_ctx_t *ctx, hvd_late_t *late, int n_late)
{
    return check(ctx) == HVD_OK ? observe_stragglers(ctx->observe, late, n_late) : 0;
}

hvd_status_t hvd_report(hvd_ctx_t *ctx, const int64_t *step, const double *loss,
                        const double *samples)
{
    hvd_status_t status = check(ctx);
    if (status == HVD_OK) {
        observe_report(ctx->observe, step, loss, samples);
    }
    return status;
}

size_t hvd_metrics(hvd_ctx_t *ctx, char *text, size_t bytes)
{
    buf_t page = {0};
    if (check(ctx) != HVD_OK) {
        return 0;
    }
    observe_metrics(ctx->observe, &page);
    size_t n = page.failed ? 0 : page.len;
    if (bytes > 0) {
        size_t fits = MIN(n, bytes - 1);
        memcpy(text, n > 0 ? page.data : (const uint8_t *)"", fits);
        text[fits] = '\0';
    }
    buf_free(&page);
    return n;
}

void hvd_set_stack_source(hvd_ctx_t *ctx, hvd_stack_fn fn, void *arg)
{
    if (check(ctx) == HVD_OK) {
        observe_set_stack_source(ctx->observe, fn, arg);
    }
}

const char *hvd_monitor_path(const hvd_ctx_t *ctx)
{
    return check(ctx) == HVD_OK ? observe_socket(ctx->observe) : "";
}

static hvd_status_t start_timeline(hvd_ctx_t *ctx, const char *path, bool mark_cycles, err_t *err)
{
    hvd_status_t status = check(ctx);
    if (status != HVD_OK) {
        return status;
    }
    if (ctx->config.timeline == NULL || ctx->config.timeline[0] == '\0') {
        return fail(err, HVD_UNSUPPORTED,
                    "HOROVOD_TIMELINE was not set at init: set it to DYNAMIC to start timelines "
                    "later");
    }
    return ctx->job.rank == 0 ? observe_start_timeline(ctx->observe, path, mark_cycles, err)
                              : HVD_OK;
}

hvd_status_t hvd_timeline_start(hvd_ctx_t *ctx, const char *path, bool mark_cycles, char *text,
                                size_t text_bytes)
{
    err_t err = {0};
    return err_export(&err, start_timeline(ctx, path, mark_cycles, &err), text, text_bytes);
}

static hvd_status_t start_profile(hvd_ctx_t *ctx, const char *path, err_t *err)
{
    hvd_status_t status = check(ctx);
    if (status != HVD_OK) {
        return status;
    }
    if (observe_has_timeline(ctx->observe)) {
        return fail(err, HVD_UNSUPPORTED,
                    "a timeline is being written already: stop it first, or leave HOROVOD_TIMELINE "
                    "without a file");
    }
    return observe_start_timeline(ctx->observe, path, false, err);
}

hvd_status_t hvd_profile_start(hvd_ctx_t *ctx, const char *path, char *text, size_t text_bytes)
{
    err_t err = {0};
    return err_export(&err, start_profile(ctx, path, &err), text, text_bytes);
}

hvd_status_t hvd_timeline_stop(hvd_ctx_t *ctx)
{
    hvd_status_t status = check(ctx);
    return status == HVD_OK ? observe_stop_timeline(ctx->observe, NULL) : status;
}
