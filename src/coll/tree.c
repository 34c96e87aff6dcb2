// SPDX-License-Identifier: Apache-2.0
//
// tree.c - broadcast, along a binomial tree or a chain.
//
// Method: members are counted from the root. In the binomial tree a member receives from the one
// whose number lacks its lowest bit and serves those below it, the largest subtree first. In the
// chain everyone passes on to the next. A send follows its receive byte by byte.
// Cost for n members and B bytes: tree log2(n) steps, the root sends log2(n) * B bytes; chain n-1
// steps, but nobody sends more than B bytes and segments pipeline: about B + n segments of time.
// In place: the root's output is its input; the others have no input.
#include "coll/plan.h"

// Where this member's copy comes from, and the step that brings it.
typedef struct source {
    place_t place;
    int ready;
} source_t;

// parent: counted from the root; none for the root itself.
static source_t get_from(const coll_args_t *args, plan_t *plan, int parent)
{
    const place_t output = PLACE(BUF_OUTPUT, 0), input = PLACE(BUF_INPUT, 0);
    if (args->member == args->root) {
        plan_local(plan, STEP_COPY, output, input, args->bytes, AT_ONCE);
        return (source_t){input, NO_STEP};
    }
    const int peer = member_around(args, args->root + parent);
    return (source_t){output, plan_recv(plan, peer, output, args->bytes, AT_ONCE)};
}

static void pass_on(const coll_args_t *args, plan_t *plan, source_t source, int child)
{
    plan_send(plan, member_around(args, args->root + child), source.place, args->bytes,
              BEHIND(source.ready));
}

hvd_status_t plan_broadcast_binomial(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    const int number = member_around(args, args->member - args->root);
    int bit = 1; // the lowest of this member's number; for the root, one beyond all numbers
    while (bit < args->size && (number & bit) == 0) {
        bit *= 2;
    }
    const source_t source = get_from(args, plan, number - bit);
    for (bit /= 2; bit > 0; bit /= 2) {
        if (number + bit < args->size) {
            pass_on(args, plan, source, number + bit);
        }
    }
    return HVD_OK;
}

hvd_status_t plan_broadcast_chain(const coll_args_t *args, plan_t *plan, err_t *err)
{
    (void)err;
    const int number = member_around(args, args->member - args->root);
    const source_t source = get_from(args, plan, number - 1);
    if (number + 1 < args->size) {
        pass_on(args, plan, source, number + 1);
    }
    return HVD_OK;
}
