// SPDX-License-Identifier: Apache-2.0
//
// pairwise.c - everybody talks to everybody: allreduce, reducescatter and alltoall by direct
// exchange.
//
// Method: each part of the tensor is added up by the member it belongs to, straight from the inputs
// of all others, in accumulators: float32 for half types, rounded once at the end. Members are
// added in a fixed order (the owner, then those after it), so every run gives the same. Parts go
// in windows of a segment and two windows of accumulators take turns, so they stay in the cache.
// An allreduce then sends every finished window to all others.
// Cost for n members and B bytes, per member: reducescatter and alltoall one step, n-1 messages a
// window, (n-1)/n * B bytes each way; allreduce two steps and twice the bytes.
// In place (allreduce): a member returns a window only after it has added all of it.
#include "coll/plan.h"

// --- Windows -------------------------------------------------------------------------------------

enum { MAX_WINDOWS = 64 }; // of one part: longer parts have larger windows

static size_t window_bytes(const coll_args_t *args, size_t part_bytes)
{
    const size_t least = MAX(args->segment_bytes, (size_t)CACHE_LINE);
    const size_t bytes = MAX(least, part_bytes / MAX_WINDOWS);
    return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

// The window of a part that begins at *at_p, moving *at_p to the next; false at the end.
static bool next_window(const coll_args_t *args, range_t part, size_t *at_p, range_t *window_p)
{
    if (*at_p == part.bytes) {
        return false;
    }
    const size_t bytes = MIN(window_bytes(args, part.bytes), part.bytes - *at_p);
    *window_p = (range_t){part.at + *at_p, bytes};
    *at_p += bytes;
    return true;
}

// --- Reductions ----------------------------------------------------------------------------------

// Each other member's part of this member's input, to it.
static void send_inputs(const coll_args_t *args, plan_t *plan)
{
    for (int d = 1; d < args->size; d++) {
        const int peer = member_around(args, args->member - d);
        const range_t part = range_of_member(args, peer);
        range_t window;
        for (size_t at = 0; next_window(args, part, &at, &window);) {
            plan_send(plan, peer, PLACE(BUF_INPUT, window.at), window.bytes, AT_ONCE);
        }
    }
}

static void send_result(const coll_args_t *args, plan_t *plan, range_t window, int stored)
{
    for (int d = 1; d < args->size; d++) {
        const int peer = member_around(args, args->member - d);
        plan_send(plan, peer, PLACE(BUF_OUTPUT, window.at), window.bytes, BEHIND(stored));
    }
}

// Adds up this member's part, window by window, into the output, where it begins at output_at.
static void add_up(const coll_args_t *args, plan_t *plan, size_t output_at)
{
    const range_t part = range_of_member(args, args->member);
    const size_t elem_bytes = hvd_dtype_bytes(args->dtype);
    const size_t slot_bytes = MIN(window_bytes(args, part.bytes), part.bytes) / elem_bytes *
                              hvd_dtype_bytes(acc_dtype(args->dtype));
    int stored[2] = {NO_STEP, NO_STEP}; // the last window that used each slot
    range_t window;
    int slot = 0;
    for (size_t at = 0; next_window(args, part, &at, &window); slot ^= 1) {
        const place_t acc = PLACE(BUF_ACC, (size_t)slot * slot_bytes);
        const range_t result = {output_at + window.at - part.at, window.bytes};
        int ready = plan_local(plan, STEP_LOAD_ACC, acc, PLACE(BUF_INPUT, window.at), window.bytes,
                               AFTER(stored[slot]));
        for (int d = 1; d < args->size; d++) {
            ready = plan_recv_acc(plan, member_around(args, args->member + d), acc, window.bytes,
                                  BEHIND(ready));
        }
        stored[slot] = plan_local(plan, STEP_STORE_ACC, PLACE(BUF_OUTPUT, result.at), acc,
                                  window.bytes, BEHIND(ready));
        if (op_infos[args->op].layout == LAYOUT_WHOLE) {
            send_result(args, plan, result, stored[slot]);
        }
    }
    plan->acc_bytes = 2 * slot_bytes;
}

static void receive_results(const coll_args_t *args, plan_t *plan)
{
    for (int d = 1; d < args->size; d++) {
        const int peer = member_around(args, args->member + d);
        const range_t part = range_of_member(args, peer);
        range_t window;
        for (size_t at = 0; next_window(args, part, &at, &window);) {
            plan_recv(plan, peer, PLACE(BUF_OUTPUT, window.at), window.bytes, AT_ONCE);
        }
    }
}

hvd_status_t plan_allreduce_pairwise(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    send_inputs(args, plan);
    add_up(args, plan, range_of_member(args, args->member).at);
    receive_results(args, plan);
    return HVD_OK;
}

hvd_status_t plan_reducescatter_pairwise(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    send_inputs(args, plan);
    add_up(args, plan, 0);
    return HVD_OK;
}

// --- Alltoall ------------------------------------------------------------------------------------

hvd_status_t plan_alltoall_pairwise(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    const int m = args->member, n = args->size;
    size_t send_at = sum_of(args->send_bytes, m), recv_at = sum_of(args->recv_bytes, m);
    const size_t recv_end = sum_of(args->recv_bytes, n);
    plan_local(plan, STEP_COPY, PLACE(BUF_OUTPUT, recv_at), PLACE(BUF_INPUT, send_at),
               args->send_bytes[m], AT_ONCE);
    for (int d = 1; d < n; d++) { // offsets wander up and down from this member's own
        const int to = member_around(args, m + d), from = member_around(args, m - d);
        send_at = to == 0 ? 0 : send_at + args->send_bytes[to - 1];
        recv_at = (from == n - 1 ? recv_end : recv_at) - args->recv_bytes[from];
        plan_send(plan, to, PLACE(BUF_INPUT, send_at), args->send_bytes[to], AT_ONCE);
        plan_recv(plan, from, PLACE(BUF_OUTPUT, recv_at), args->recv_bytes[from], AT_ONCE);
    }
    return HVD_OK;
}
