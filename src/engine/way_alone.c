// SPDX-License-Identifier: Apache-2.0
//
// way_alone.c - one member: copy and scale.
//
// The result has the bits that several members with the same values would have got.
#include "engine/run.h"

bool way_alone_takes(const way_case_t *given)
{
    return given->args->size == 1;
}

hvd_status_t way_alone_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    (void)ctx;
    (void)r;
    (void)err;
    hvd_dtype_t dtype = task->args.dtype;
    bool scales = task->prescale != 1.0 || !finish_is_nothing(task->finish);
    for (size_t done = 0; done < task->in->bytes;) {
        uint8_t *from;
        uint8_t *to;
        size_t n = vec_at(task->in, done, &from);
        n = MIN(vec_at(task->out, done, &to), n);
        if (scales) {
            const void *inputs[] = {from};
            reduce_many(dtype, HVD_SUM, to, NULL, inputs, 1, n / hvd_dtype_bytes(dtype),
                        task->prescale, task->finish);
        } else if (to != from) {
            memmove(to, from, n);
        }
        done += n;
    }
    return HVD_OK;
}
