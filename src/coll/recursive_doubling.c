// SPDX-License-Identifier: Apache-2.0
//
// recursive_doubling.c - allreduce in as few steps as possible.
//
// Method: in round k every node exchanges its whole partial result with the node whose number
// differs in bit k, and adds. Any number of members by folding (plan.h): pairs that are left over
// add up first and share the result at the end.
// Cost for n members and B bytes: log2(n) rounds of B bytes each way, two more with folding.
// Bits: the lower node's operand comes first on both sides, so all members get the same bits.
// In place: what comes in follows what goes out byte by byte, so nothing is overwritten before it
// has been sent, and no scratch is needed.
#include "coll/plan.h"

hvd_status_t plan_allreduce_recursive_doubling(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    if (args->size == 1) {
        plan_alone(plan, args, args->bytes);
        return HVD_OK;
    }
    const folding_t folding = fold_members(args->member, args->size);
    const place_t output = PLACE(BUF_OUTPUT, 0);
    const size_t bytes = args->bytes;
    place_t from = PLACE(BUF_INPUT, 0);
    int ready = NO_STEP;
    if (folding.node < 0) {
        plan_send(plan, folding.partner, from, bytes, AT_ONCE);
        plan_recv(plan, folding.partner, output, bytes, AT_ONCE);
        return HVD_OK;
    }
    if (folding.partner >= 0) {
        ready = plan_recv_reduce(plan, folding.partner, output, from, bytes, false, AT_ONCE);
        from = output;
    }
    for (int bit = 1; bit < folding.core; bit *= 2) {
        const int peer = fold_member_of(&folding, folding.node ^ bit);
        const int sent = plan_send(plan, peer, from, bytes, BEHIND(ready));
        ready =
            plan_recv_reduce(plan, peer, output, from, bytes, peer < args->member, BEHIND(sent));
        from = output;
    }
    ready = plan_scale(plan, args, output, bytes, ready);
    if (folding.partner >= 0) {
        plan_send(plan, folding.partner, output, bytes, BEHIND(ready));
    }
    return HVD_OK;
}
