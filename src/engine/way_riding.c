// SPDX-License-Identifier: Apache-2.0
//
// way_riding.c - small operations travel inside the agreement's own messages.
//
// hvd_submit() loads the tensors into accumulators, the tree adds them up on their way to rank 0,
// and the decision brings the result: all that is left is to store it, or the own block of it. The
// tensor of a broadcast is the sum of its bytes and of everybody else's zeros.
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
    size_t acc_bytes = a->bytes / hvd_dtype_bytes(a->dtype) * riding_element_bytes(a->op, a->dtype);
    return op_has(a->op, OP_RIDES) && a->reduce != HVD_ADASUM && given->inline_bytes > 0 &&
           acc_bytes <= given->inline_bytes;
}

// A result is stored part by part: what is left of it.
typedef struct rest {
    const process_set_t *set;
    const uint8_t *at;
} rest_t;

// False: no memory for the output.
static bool store_tensor(request_t *request, int t, const int64_t **dims, rest_t *rest)
{
    const signature_t *s = &request->signature;
    size_t element = riding_element_bytes(s->op, s->dtype);
    int64_t rows = (*dims)[0] > 0 ? (*dims)[1] : 1;
    size_t n = shape_elements(dims), first = 0;
    const uint8_t *from = rest->at;
    rest->at += n * element;
    if (op_infos[s->op].layout == LAYOUT_SCATTERED) {
        size_t n_in_row = rows > 0 ? n / (size_t)rows : 0;
        int64_t own = scattered_rows(rows, rest->set->n, rest->set->member);
        first = (size_t)scattered_before(rows, rest->set->n, rest->set->member) * n_in_row;
        n = (size_t)own * n_in_row;
        tensor_set_rows(request, t, own);
    }
    void *output = request_output(request, t);
    if (output == NULL || n == 0) {
        return n == 0;
    }
    if (op_has(s->op, OP_REDUCES)) {
        acc_store(s->dtype, output, from + first * element, n, signature_finish(s, rest->set->n));
    } else if (output != request->tensors[t].input ||
               s->root != rest->set->ranks[rest->set->member]) {
        memcpy(output, from, n * element);
    }
    return true;
}

static bool store_tensors(request_t *request, const process_set_t *set, const uint8_t *result)
{
    rest_t rest = {.set = set, .at = result};
    const int64_t *dims = request->signature.dims;
    bool ok = true;
    for (int t = 0; ok && t < request->signature.n_tensors; t++) {
        ok = store_tensor(request, t, &dims, &rest);
    }
    return ok;
}

static bool store(request_t *request, const process_set_t *set, const uint8_t *result)
{
    hvd_op_t op = request->signature.op;
    return op_is_allreduce(op) ? request_store(request, result, set->n)
                               : store_tensors(request, set, result);
}

hvd_status_t way_riding_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    const batch_t *b = r->batch;
    (void)task;
    for (int i = 0; i < b->n_entries; i++) {
        request_t *request = b->requests[i];
        if (request != NULL && !store(request, b->set, b->entries[i].result)) {
            return fail(err, HVD_NO_MEMORY, "rank %d has no memory for the output of '%s'",
                        ctx->job.rank, b->entries[i].name);
        }
    }
    return HVD_OK;
}
