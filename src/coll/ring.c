// SPDX-License-Identifier: Apache-2.0
//
// ring.c - allreduce, reducescatter and allgather around a ring.
//
// Method: every member receives from the one before it and sends to the one after it. Parts go
// around once while partial results are added up, and once more to hand out the sums. Each send
// follows the receive it forwards byte by byte, so long parts pipeline through the whole ring.
// Cost for n members and B bytes, per member: reducescatter and allgather n-1 steps and
// (n-1)/n * B bytes each way; allreduce both. As few bytes as any algorithm can do; latency grows
// with n.
// In place: a part is received again only after the member's own contribution has gone all the way
// around, so nothing is overwritten that is still to be sent.
#include "coll/plan.h"

// Adds up: part p ends, complete, at member p. Partial sums go to the output of an allreduce; a
// reducescatter has no room there and takes turns between two slots of scratch. Returns the step
// that completes this member's part.
static int reduce_around(const coll_args_t *args, plan_t *plan, size_t slot_bytes)
{
    const int m = args->member, last = args->size - 2;
    const bool scatters = op_infos[args->op].layout == LAYOUT_SCATTERED;
    const int next = member_around(args, m + 1), before = member_around(args, m - 1);
    int slot_read[2] = {NO_STEP, NO_STEP}; // the last send out of each slot
    int received = NO_STEP;
    place_t partial = {0};
    for (int s = 0; s <= last; s++) {
        const range_t out = range_of_member(args, m - 1 - s), in = range_of_member(args, m - 2 - s);
        const place_t from = s == 0 ? PLACE(BUF_INPUT, out.at) : partial;
        const int sent = plan_send(plan, next, from, out.bytes, BEHIND(received));
        if (scatters && s > 0 && sent != NO_STEP) {
            slot_read[(s - 1) % 2] = sent;
        }
        partial = !scatters   ? PLACE(BUF_OUTPUT, in.at)
                  : s == last ? PLACE(BUF_OUTPUT, 0)
                              : PLACE(BUF_TMP, (size_t)(s % 2) * slot_bytes);
        received = plan_recv_reduce(plan, before, partial, PLACE(BUF_INPUT, in.at), in.bytes, false,
                                    AFTER(slot_read[s % 2]));
    }
    return received;
}

// Hands out: this member's part lies at `own` behind step `ready`; all others arrive in the output.
static void gather_around(const coll_args_t *args, plan_t *plan, place_t own, int ready)
{
    const int m = args->member;
    const int next = member_around(args, m + 1), before = member_around(args, m - 1);
    for (int s = 0; s < args->size - 1; s++) {
        const range_t out = range_of_member(args, m - s), in = range_of_member(args, m - 1 - s);
        plan_send(plan, next, own, out.bytes, BEHIND(ready));
        own = PLACE(BUF_OUTPUT, in.at);
        ready = plan_recv(plan, before, own, in.bytes, AT_ONCE);
    }
}

hvd_status_t plan_allreduce_ring(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    if (args->size == 1) {
        plan_alone(plan, args, args->bytes);
        return HVD_OK;
    }
    const range_t own = range_of_member(args, args->member);
    const place_t place = PLACE(BUF_OUTPUT, own.at);
    int ready = reduce_around(args, plan, 0);
    ready = plan_scale(plan, args, place, own.bytes, ready);
    gather_around(args, plan, place, ready);
    return HVD_OK;
}

hvd_status_t plan_reducescatter_ring(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    const size_t own_bytes = args->blocks[args->member];
    if (args->size == 1) {
        plan_alone(plan, args, own_bytes);
        return HVD_OK;
    }
    size_t slot_bytes = 0;
    for (int i = 0; i < args->size; i++) {
        slot_bytes = MAX(slot_bytes, args->blocks[i]);
    }
    slot_bytes = (slot_bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    plan->tmp_bytes = args->size > 2 ? 2 * slot_bytes : 0;
    const int ready = reduce_around(args, plan, slot_bytes);
    plan_scale(plan, args, PLACE(BUF_OUTPUT, 0), own_bytes, ready);
    return HVD_OK;
}

hvd_status_t plan_allgather_ring(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    const range_t own = range_of_member(args, args->member);
    plan_local(plan, STEP_COPY, PLACE(BUF_OUTPUT, own.at), PLACE(BUF_INPUT, 0), own.bytes, AT_ONCE);
    gather_around(args, plan, PLACE(BUF_INPUT, 0), NO_STEP);
    return HVD_OK;
}
