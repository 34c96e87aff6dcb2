// SPDX-License-Identifier: Apache-2.0
//
// bruck.c - allgather and alltoall of short blocks in as few steps as possible, for any number of
// members.
//
// Method: in round k a member talks to the members 2^k before and after it. An allgather passes on
// everything it holds, so the number of blocks doubles each round; they lie at their final places
// and travel in one message, two where they wrap around. An alltoall passes on, of the blocks in
// its hands, those whose remaining distance has bit k set: after the last round every block has
// gone exactly as far as it had to.
// Cost for n members: log2(n) rounds. allgather: as few bytes as possible. alltoall: about
// log2(n) / 2 times as many bytes as the direct exchange, and copies: for short blocks only.
#include "coll/plan.h"

// --- Allgather -----------------------------------------------------------------------------------

// A step after both, for those that would have to wait for more than two.
static int join(plan_t *plan, int one, int other)
{
    if (one == NO_STEP || other == NO_STEP) {
        return one == NO_STEP ? other : one;
    }
    return plan_add(
        plan,
        (step_t){
            .kind = STEP_COPY, .src = BUF_TMP, .dst = BUF_TMP, .peer = -1, .after = {one, other}});
}

// The blocks first .. first + n - 1, taken around, as one or two ranges of the output.
static void find_pieces(const coll_args_t *args, int first, int n, range_t pieces[2])
{
    const int before_wrap = MIN(n, args->size - first);
    pieces[0] = (range_t){sum_of(args->blocks, first), sum_of(args->blocks + first, before_wrap)};
    pieces[1] = (range_t){0, sum_of(args->blocks, n - before_wrap)};
}

hvd_status_t plan_allgather_bruck(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    const int m = args->member;
    const range_t own = range_of_member(args, m);
    int held = plan_local(plan, STEP_COPY, PLACE(BUF_OUTPUT, own.at), PLACE(BUF_INPUT, 0),
                          own.bytes, AT_ONCE);
    for (int d = 1; d < args->size; d *= 2) {
        const int to = member_around(args, m - d), from = member_around(args, m + d);
        const int n_blocks = MIN(d, args->size - d);
        range_t out[2], in[2];
        int received[2];
        find_pieces(args, m, n_blocks, out);
        find_pieces(args, from, n_blocks, in);
        for (int i = 0; i < 2; i++) {
            plan_send(plan, to, PLACE(BUF_OUTPUT, out[i].at), out[i].bytes, AFTER(held));
            received[i] = plan_recv(plan, from, PLACE(BUF_OUTPUT, in[i].at), in[i].bytes, AT_ONCE);
        }
        held = join(plan, held, join(plan, received[0], received[1]));
    }
    return HVD_OK;
}

// --- Alltoall ------------------------------------------------------------------------------------
// Scratch: slots 0 .. n-1, slot i holding the block that has i members left to go, counted from
// where it started; then what goes out in a round; then what comes in.

typedef struct bruck {
    plan_t *plan;
    size_t block;
    int n;
    place_t slots, outgoing, incoming;
} bruck_t;

// Copies the slots with `bit` set to or from a row of blocks, one copy after the other; returns the
// last one, and in *n_blocks_p how many blocks there are.
static int copy_slots(const bruck_t *b, int bit, place_t row, bool to_row, after_t after,
                      int *n_blocks_p)
{
    int last = NO_STEP, n_blocks = 0;
    for (int first = bit; first < b->n; first += 2 * bit) {
        const int run = MIN(bit, b->n - first);
        const place_t slots = PLACE(BUF_TMP, b->slots.at + (size_t)first * b->block);
        const place_t blocks = PLACE(BUF_TMP, row.at + (size_t)n_blocks * b->block);
        last = plan_local(b->plan, STEP_COPY, to_row ? blocks : slots, to_row ? slots : blocks,
                          (size_t)run * b->block, last == NO_STEP ? after : AFTER(last));
        n_blocks += run;
    }
    *n_blocks_p = n_blocks;
    return last;
}

// Turns the input so that slot 0 holds this member's own block; the last copy.
static int turn_input(const coll_args_t *args, const bruck_t *b)
{
    const size_t own_at = (size_t)args->member * b->block, all_bytes = (size_t)b->n * b->block;
    const int first = plan_local(b->plan, STEP_COPY, b->slots, PLACE(BUF_INPUT, own_at),
                                 all_bytes - own_at, AT_ONCE);
    const int second =
        plan_local(b->plan, STEP_COPY, PLACE(BUF_TMP, b->slots.at + all_bytes - own_at),
                   PLACE(BUF_INPUT, 0), own_at, AFTER(first));
    return second == NO_STEP ? first : second;
}

hvd_status_t plan_alltoall_bruck(const coll_args_t *args, plan_t *plan, err_t *err)
{
    const int m = args->member, n = args->size;
    const size_t block = args->send_bytes[0];
    for (int i = 0; i < n; i++) {
        if (args->send_bytes[i] != block || args->recv_bytes[i] != block) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "alltoall by bruck needs blocks of equal size; those of member %d differ",
                        i);
        }
    }
    const size_t all_bytes = (size_t)n * block, row_bytes = (size_t)(n / 2) * block;
    const bruck_t b = {plan,
                       block,
                       n,
                       PLACE(BUF_TMP, 0),
                       PLACE(BUF_TMP, all_bytes),
                       PLACE(BUF_TMP, all_bytes + row_bytes)};
    plan->tmp_bytes = all_bytes + 2 * row_bytes;
    int unpacked = turn_input(args, &b), sent = NO_STEP;
    for (int bit = 1; bit < n; bit *= 2) {
        int n_blocks;
        const int packed =
            copy_slots(&b, bit, b.outgoing, true, AFTER_BOTH(unpacked, sent), &n_blocks);
        const size_t bytes = (size_t)n_blocks * block;
        sent = plan_send(plan, member_around(args, m + bit), b.outgoing, bytes, AFTER(packed));
        const int received =
            plan_recv(plan, member_around(args, m - bit), b.incoming, bytes, AFTER(unpacked));
        unpacked = copy_slots(&b, bit, b.incoming, false, AFTER_BOTH(received, packed), &n_blocks);
    }
    for (int i = 0; i < n; i++) { // slot i now holds the block of the member i before this one
        plan_local(plan, STEP_COPY, PLACE(BUF_OUTPUT, (size_t)member_around(args, m - i) * block),
                   PLACE(BUF_TMP, (size_t)i * block), block, AFTER(unpacked));
    }
    return HVD_OK;
}
