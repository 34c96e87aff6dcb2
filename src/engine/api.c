// SPDX-License-Identifier: Apache-2.0
//
// api.c - the public functions that only look something up: results, who am I, health, knobs.
// Any thread.
#include "engine/staging.h"

// --- Is the context usable -----------------------------------------------------------------------

hvd_status_t check_context(const hvd_ctx_t *ctx, err_t *err)
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

hvd_status_t check_running(const hvd_ctx_t *ctx, err_t *err)
{
    LOCKED(ctx);
    if (ctx->ended.status != HVD_OK) {
        return fail(err, ctx->ended.status, "%s", ctx->ended.text);
    }
    return HVD_OK;
}

// --- Results -------------------------------------------------------------------------------------

hvd_status_t request_of_handle(hvd_ctx_t *ctx, hvd_handle_t handle, request_t **request_p)
{
    hvd_status_t status = check_context(ctx, NULL);
    if (status != HVD_OK) {
        return status;
    }
    *request_p = request_find(ctx, handle);
    return *request_p != NULL ? HVD_OK : HVD_UNKNOWN_HANDLE;
}

static hvd_status_t find_done(hvd_ctx_t *ctx, hvd_handle_t handle, request_t **request_p)
{
    hvd_status_t status = request_of_handle(ctx, handle, request_p);
    if (status != HVD_OK) {
        return status;
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
            .n_tensors = request->signature.n_tensors,
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
    if (tensor < 0 || tensor >= request->signature.n_tensors) {
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
    lock_take(&ctx->lock);
    request_t *request = request_find(ctx, handle);
    if (request != NULL) {
        if (atomic_load(&request->state) == REQUEST_DONE) {
            request_recycle(ctx, request);
        } else {
            atomic_store(&request->released, true);
        }
    }
    lock_release(&ctx->lock);
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
        lock_take(&ctx->lock);
        status = check_running(ctx, &err);
        lock_release(&ctx->lock);
    }
    return err_export(&err, status, text, text_bytes);
}

void hvd_gpu(const hvd_ctx_t *ctx, hvd_gpu_t *gpu_p)
{
    nccl_probe(ctx != NULL ? ctx->config.nccl_library : "", gpu_p);
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
