// SPDX-License-Identifier: Apache-2.0
//
// way_riding.c - small allreduces travel inside the agreement's own messages.
//
// hvd_submit() loads the tensors into accumulators, the tree adds them up on their way to rank 0,
// and the decision brings the result: all that is left is to store it.
#include "engine/run.h"

// Two hosts with a rank each meet half way (coord/offer.c): there, riding takes one message and a
// plan three, which is worth encrypting more than a control message has otherwise. Measured: 4 KiB
// in 0.56 of a plan's time, 12 KiB in 0.75, 16 KiB in 0.82.
#define INLINE_BYTES_OF_A_PAIR (16 * KIB)

size_t way_inline_bytes(const config_t *config, int n_ranks, int n_hosts)
{
    bool is_pair = n_ranks == 2 && n_hosts == 2;
    return is_pair && config->origin[KNOB_inline_bytes] == FROM_DEFAULT ? INLINE_BYTES_OF_A_PAIR
                                                                        : config->inline_bytes;
}

bool way_riding_takes(const way_case_t *given)
{
    const coll_args_t *a = given->args;
    size_t acc_bytes = a->bytes / hvd_dtype_bytes(a->dtype) * hvd_dtype_bytes(acc_dtype(a->dtype));
    return op_has(a->op, OP_RIDES) && a->reduce != HVD_ADASUM && given->inline_bytes > 0 &&
           acc_bytes <= given->inline_bytes;
}

hvd_status_t way_riding_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    const batch_t *b = r->batch;
    (void)task;
    for (int i = 0; i < b->n_entries; i++) {
        request_t *request = b->requests[i];
        if (request != NULL && !request_store(request, b->entries[i].result, b->set->n)) {
            return fail(err, HVD_NO_MEMORY, "rank %d has no memory for the output of '%s'",
                        ctx->job.rank, b->entries[i].name);
        }
    }
    return HVD_OK;
}
