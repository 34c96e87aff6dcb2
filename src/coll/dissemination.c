// SPDX-License-Identifier: Apache-2.0
//
// dissemination.c - barrier.
//
// Method: in round k a member tells the one 2^k after it that it has heard, directly or not, from
// 2^k members, and waits for the same news from the one 2^k before it. Messages are empty: a
// header is enough.
// Cost for n members: log2(n) rounds, rounded up; one message each way per round.
#include "coll/plan.h"

hvd_status_t plan_barrier_dissemination(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    int heard = NO_STEP;
    for (int d = 1; d < args->size; d *= 2) {
        step_t step = {.kind = STEP_SEND,
                       .peer = member_around(args, args->member + d),
                       .after = {heard, NO_STEP}};
        plan_add(plan, step);
        step = (step_t){.kind = STEP_RECV,
                        .peer = member_around(args, args->member - d),
                        .after = {NO_STEP, NO_STEP}};
        heard = plan_add(plan, step);
    }
    return HVD_OK;
}
