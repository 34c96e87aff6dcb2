// SPDX-License-Identifier: Apache-2.0
//
// way_riding.c - small allreduces travel inside the agreement's own messages.
//
// hvd_submit() loads the tensors into accumulators, the tree adds them up on their way to rank 0,
// and the decision brings the result: all that is left is to store it.
#include "engine/run.h"

bool way_riding_takes(const way_case_t *given)
{
    const coll_args_t *a = given->args;
    size_t acc_bytes = a->bytes / hvd_dtype_bytes(a->dtype) * hvd_dtype_bytes(acc_dtype(a->dtype));
    return op_has(a->op, OP_RIDES) && a->reduce != HVD_ADASUM && given->inline_bytes > 0 &&
           acc_bytes <= given->inline_bytes;
}

bool riding_store(request_t *request, const void *result, int n_members)
{
    const signature_t *signature = &request->signature;
    size_t acc_bytes = hvd_dtype_bytes(acc_dtype(signature->dtype));
    double post = signature->postscale * average_factor(signature->reduce, n_members);
    const uint8_t *from = result;
    const int64_t *dims = signature->dims;
    for (int t = 0; t < signature->n_tensors; t++) {
        size_t n = shape_elements(&dims);
        void *output = allocate_output(request, t);
        if (output == NULL && n > 0) {
            return false;
        }
        acc_store(signature->dtype, output, from, n, post);
        from += n * acc_bytes;
    }
    return true;
}

hvd_status_t way_riding_start(hvd_ctx_t *ctx, runner_t *r, err_t *err)
{
    const batch_t *b = r->batch;
    for (int i = 0; i < b->n_entries; i++) {
        request_t *request = b->requests[i];
        if (request != NULL && !riding_store(request, b->entries[i].result, b->set->n)) {
            return fail(err, HVD_NO_MEMORY, "rank %d has no memory for the output of '%s'",
                        ctx->job.rank, b->entries[i].name);
        }
    }
    return HVD_OK;
}
