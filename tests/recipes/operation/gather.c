// SPDX-License-Identifier: Apache-2.0
//
// gather.c - gather to one member.
//
// Method: everybody sends its block straight to the root, which receives each where it belongs.
// Cost for n members and blocks of B bytes: one step; the root receives (n-1) * B bytes.
// In place: only the root writes, and only blocks of its output.
#include "coll/plan.h"

hvd_status_t plan_gather_direct(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    const int me = args->member;
    if (me != args->root) {
        plan_send(plan, args->root, PLACE(BUF_INPUT, 0), args->blocks[me], AT_ONCE);
        return HVD_OK;
    }
    for (int d = 0; d < args->size; d++) {
        const int from = member_around(args, me + d);
        const range_t block = range_of_member(args, from);
        const place_t at = PLACE(BUF_OUTPUT, block.at);
        if (from == me) {
            plan_local(plan, STEP_COPY, at, PLACE(BUF_INPUT, 0), block.bytes, AT_ONCE);
        } else {
            plan_recv(plan, from, at, block.bytes, AT_ONCE);
        }
    }
    return HVD_OK;
}
