// SPDX-License-Identifier: Apache-2.0
//
// way_mpi.c - the user's MPI library does it, where asked to (HOROVOD_CPU_OPERATIONS).
//
// MPI knows no half types and no factors: those are applied here, before and after.
#define _GNU_SOURCE
#include "engine/run.h"

#include <sched.h>

bool way_mpi_takes(const way_case_t *given)
{
    return given->mpi_can_run && !way_is_forced_to_plan(given);
}

hvd_status_t way_mpi_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    coll_args_t *a = &r->mpi.args;
    uint8_t *input;
    *a = task->args;
    r->plan.dtype = a->dtype;
    r->plan.widened = op_has(a->op, OP_REDUCES) && dtype_is_half(a->dtype);
    if (r->plan.widened) {
        a->dtype = HVD_FLOAT32;
        a->bytes *= 2;
        for (int m = 0; a->blocks != NULL && m < a->size; m++) {
            r->mpi.blocks[m] = 2 * task->args.blocks[m];
        }
        a->blocks = a->blocks != NULL ? r->mpi.blocks : NULL;
    }
    hvd_status_t status = plan_arrange(&r->plan, task, task->prescale, &input, &r->mpi.output, err);
    return status == HVD_OK ? mpi_start(ctx->mpi, a, largest_buffer(r), input, r->mpi.output, err)
                            : status;
}

hvd_status_t way_mpi_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
{
    hvd_status_t status = mpi_progress(ctx->mpi, err);
    if (status == HVD_IN_PROGRESS) {
        *moved_p = true; // MPI works only while it is asked
        sched_yield();
    }
    if (status != HVD_OK) {
        return status;
    }
    if (!r->plan.widened && !finish_is_nothing(r->task.finish)) {
        size_t n = r->out.bytes / hvd_dtype_bytes(r->task.args.dtype);
        reduce_finish(r->mpi.args.dtype, r->mpi.output, r->mpi.output, n, r->task.finish);
    }
    plan_unpack(&r->plan);
    return HVD_OK;
}
