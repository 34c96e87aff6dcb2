// SPDX-License-Identifier: Apache-2.0
//
// halving_doubling.c - allreduce and reducescatter by halves.
//
// Method: in each round two nodes split the range they both still hold: each sends the half it
// gives up and adds what it receives to the half it keeps. After log2(n) rounds every node has one
// part complete. An allreduce then walks back, the halves growing together again. Any number of
// members by folding (plan.h). An allreduce pairs near nodes first, where the halves are largest; a
// reducescatter pairs far ones first, so that the parts come out in the order of members.
// Cost for n members and B bytes, per member: reducescatter log2(n) rounds and about B bytes each
// way; allreduce twice that; folding adds two messages of up to B bytes for the pairs.
// In place: a peer returns a half only after it has received all of it.
#include "coll/plan.h"

enum { MAX_ROUNDS = 31 };

// One round as this node sees it.
typedef struct round {
    int peer;
    range_t kept, given;
} round_t;

// Splits [0, bytes) along the bits of the node's number, lowest first; returns the rounds.
static int split(const coll_args_t *args, const folding_t *folding, round_t rounds[MAX_ROUNDS])
{
    const size_t elem_bytes = hvd_dtype_bytes(args->dtype);
    range_t range = {0, args->bytes};
    int n = 0;
    for (int bit = 1; bit < folding->core; bit *= 2) {
        const bool upper = (folding->node & bit) != 0;
        rounds[n] = (round_t){
            .peer = fold_member_of(folding, folding->node ^ bit),
            .kept = range_half(range, elem_bytes, upper),
            .given = range_half(range, elem_bytes, !upper),
        };
        range = rounds[n++].kept;
    }
    return n;
}

// Walks back: `ready` completes the range kept in the last round. Returns what completes the whole.
static after_t grow_together(plan_t *plan, const round_t *rounds, int n_rounds, int ready)
{
    after_t after = BEHIND(ready);
    for (int i = n_rounds - 1; i >= 0; i--) {
        const round_t *round = &rounds[i];
        const int sent = plan_send(plan, round->peer, PLACE(BUF_OUTPUT, round->kept.at),
                                   round->kept.bytes, after);
        const int received = plan_recv(plan, round->peer, PLACE(BUF_OUTPUT, round->given.at),
                                       round->given.bytes, AT_ONCE);
        // What was sent now was complete; with what came in, the next larger range is.
        after = AFTER_BOTH(received, sent);
    }
    return after;
}

hvd_status_t plan_allreduce_halving_doubling(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    if (args->size == 1) {
        plan_alone(plan, args, args->bytes);
        return HVD_OK;
    }
    const folding_t folding = fold_members(args->member, args->size);
    const place_t output = PLACE(BUF_OUTPUT, 0);
    if (folding.node < 0) {
        plan_send(plan, folding.partner, PLACE(BUF_INPUT, 0), args->bytes, AT_ONCE);
        plan_recv(plan, folding.partner, output, args->bytes, AT_ONCE);
        return HVD_OK;
    }
    plan_buf_t from = BUF_INPUT;
    int ready = NO_STEP;
    if (folding.partner >= 0) {
        ready = plan_recv_reduce(plan, folding.partner, output, PLACE(from, 0), args->bytes, false,
                                 AT_ONCE);
        from = BUF_OUTPUT;
    }
    round_t rounds[MAX_ROUNDS];
    const int n_rounds = split(args, &folding, rounds);
    for (int i = 0; i < n_rounds; i++) {
        const round_t *round = &rounds[i];
        const range_t kept = round->kept;
        plan_send(plan, round->peer, PLACE(from, round->given.at), round->given.bytes,
                  AFTER(ready));
        ready = plan_recv_reduce(plan, round->peer, PLACE(BUF_OUTPUT, kept.at),
                                 PLACE(from, kept.at), kept.bytes, false, AFTER(ready));
        from = BUF_OUTPUT;
    }
    const range_t own = rounds[n_rounds - 1].kept;
    ready = plan_scale(plan, args, PLACE(BUF_OUTPUT, own.at), own.bytes, ready);
    const after_t complete = grow_together(plan, rounds, n_rounds, ready);
    if (folding.partner >= 0) {
        plan_send(plan, folding.partner, output, args->bytes, complete);
    }
    return HVD_OK;
}

// The blocks of the members that nodes first .. first + n - 1 stand for: they lie side by side.
static range_t blocks_of_nodes(const coll_args_t *args, const folding_t *folding, int first, int n)
{
    const int end_member =
        first + n == folding->core ? args->size : fold_member_of(folding, first + n);
    const size_t begin = sum_of(args->blocks, fold_member_of(folding, first));
    return (range_t){begin, sum_of(args->blocks, end_member) - begin};
}

// Halves the nodes down to this one. The result, for this node's members, lies at the place
// returned; *ready_p completes it.
static place_t halve(const coll_args_t *args, plan_t *plan, const folding_t *folding,
                     plan_buf_t from, int *ready_p)
{
    place_t kept_at = {0};
    for (int bit = folding->core / 2; bit > 0; bit /= 2) {
        const int peer = fold_member_of(folding, folding->node ^ bit);
        const int mine = folding->node & -bit, theirs = mine ^ bit;
        const range_t kept = blocks_of_nodes(args, folding, mine, bit);
        const range_t given = blocks_of_nodes(args, folding, theirs, bit);
        const bool is_final = bit == 1 && folding->partner < 0;
        kept_at = is_final ? PLACE(BUF_OUTPUT, 0) : PLACE(BUF_TMP, kept.at);
        plan_send(plan, peer, PLACE(from, given.at), given.bytes, AFTER(*ready_p));
        *ready_p = plan_recv_reduce(plan, peer, kept_at, PLACE(from, kept.at), kept.bytes, false,
                                    AFTER(*ready_p));
        from = BUF_TMP;
    }
    return kept_at;
}

hvd_status_t plan_reducescatter_halving(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    const size_t own_bytes = args->blocks[args->member],
                 all_bytes = sum_of(args->blocks, args->size);
    if (args->size == 1) {
        plan_alone(plan, args, own_bytes);
        return HVD_OK;
    }
    const folding_t folding = fold_members(args->member, args->size);
    const int partner = folding.partner;
    const place_t output = PLACE(BUF_OUTPUT, 0), input = PLACE(BUF_INPUT, 0);
    int ready = NO_STEP;
    if (folding.node < 0) {
        plan_send(plan, partner, input, all_bytes, AT_ONCE);
        plan_recv(plan, partner, output, own_bytes, AT_ONCE);
        return HVD_OK;
    }
    plan->tmp_bytes = all_bytes;
    if (partner < 0) {
        halve(args, plan, &folding, BUF_INPUT, &ready);
        plan_scale(plan, args, output, own_bytes, ready);
        return HVD_OK;
    }
    ready = plan_recv_reduce(plan, partner, PLACE(BUF_TMP, 0), input, all_bytes, false, AT_ONCE);
    const place_t both = halve(args, plan, &folding, BUF_TMP, &ready);
    const size_t partner_bytes = args->blocks[partner];
    ready = plan_scale(plan, args, both, own_bytes + partner_bytes, ready);
    plan_local(plan, STEP_COPY, output, both, own_bytes, AFTER(ready));
    plan_send(plan, partner, PLACE(BUF_TMP, both.at + own_bytes), partner_bytes, AFTER(ready));
    return HVD_OK;
}
