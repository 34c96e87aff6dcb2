// SPDX-License-Identifier: Apache-2.0
//
// adasum.c - allreduce that adds gradients by how much they agree: equal ones are averaged,
// orthogonal ones are summed (reduce.h has the formula).
//
// Method: as recursive doubling, with whole vectors: in round k two nodes exchange theirs and both
// combine them, the lower node's first, so all members get the same bits. The tree is fixed by the
// number of members: left-over pairs combine first (folding, plan.h), then near nodes, then far.
// Cost for n members and B bytes: log2(n) rounds of B bytes each way, two more with folding, and
// B bytes of scratch.
#include "coll/plan.h"

// Receives a vector and combines it into the output, after the steps that still use either.
static int combine_with(plan_t *plan, const coll_args_t *args, int peer, int output_free,
                        int scratch_free)
{
    const place_t scratch = PLACE(BUF_TMP, 0), output = PLACE(BUF_OUTPUT, 0);
    const int received = plan_recv(plan, peer, scratch, args->bytes, AFTER(scratch_free));
    if (args->bytes == 0) {
        return NO_STEP;
    }
    return plan_add(plan, (step_t){
                              .kind = STEP_ADASUM,
                              .src = scratch.buf,
                              .dst = output.buf,
                              .swap = peer < args->member,
                              .peer = -1,
                              .after = {received, output_free},
                              .bytes = args->bytes,
                          });
}

hvd_status_t plan_allreduce_adasum(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    if (args->size == 1) {
        plan_alone(plan, args, args->bytes);
        return HVD_OK;
    }
    const folding_t folding = fold_members(args->member, args->size);
    const place_t output = PLACE(BUF_OUTPUT, 0), input = PLACE(BUF_INPUT, 0);
    if (folding.node < 0) {
        plan_send(plan, folding.partner, input, args->bytes, AT_ONCE);
        plan_recv(plan, folding.partner, output, args->bytes, AT_ONCE);
        return HVD_OK;
    }
    plan->tmp_bytes = args->bytes;
    int ready = plan_local(plan, STEP_COPY, output, input, args->bytes, AT_ONCE);
    if (folding.partner >= 0) {
        ready = combine_with(plan, args, folding.partner, ready, NO_STEP);
    }
    for (int bit = 1; bit < folding.core; bit *= 2) {
        const int peer = fold_member_of(&folding, folding.node ^ bit);
        const int sent = plan_send(plan, peer, output, args->bytes, AFTER(ready));
        ready = combine_with(plan, args, peer, sent, ready);
    }
    ready = plan_scale(plan, args, output, args->bytes, ready);
    if (folding.partner >= 0) {
        plan_send(plan, folding.partner, output, args->bytes, AFTER(ready));
    }
    return HVD_OK;
}
