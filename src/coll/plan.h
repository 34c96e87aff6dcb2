// SPDX-License-Identifier: Apache-2.0
//
// plan.h - what the algorithms are written with: steps with dependencies, ranges of bytes, and the
// folding of any number of members onto a power of two. Private to the files of this folder.
//
// Empty messages are left out of plans: both sides know the sizes, so both leave out the same ones.
// A step that is left out is NO_STEP, and coming after NO_STEP means coming at once.
// Pure functions, any thread. A plan is owned by whoever has it written.
#ifndef HVD_COLL_PLAN_H
#define HVD_COLL_PLAN_H

#include "coll/coll.h"

// What a step waits for. `stream`: may follow `first` byte by byte instead of waiting for its end.
typedef struct after {
    int first, second;
    bool stream;
} after_t;

#define AT_ONCE ((after_t){NO_STEP, NO_STEP, false})
#define AFTER(step) ((after_t){(step), NO_STEP, false})
#define AFTER_BOTH(one, other) ((after_t){(one), (other), false})
#define BEHIND(step) ((after_t){(step), NO_STEP, true})

// A part of a buffer.
typedef struct place {
    plan_buf_t buf;
    size_t at;
} place_t;

#define PLACE(buf, at) ((place_t){(buf), (at)})

int plan_send(plan_t *plan, int peer, place_t src, size_t bytes, after_t after);
int plan_recv(plan_t *plan, int peer, place_t dst, size_t bytes, after_t after);
// dst = src op incoming; `swap`: dst = incoming op src, for members that must agree on every bit.
int plan_recv_reduce(plan_t *plan, int peer, place_t dst, place_t src, size_t bytes, bool swap,
                     after_t after);
int plan_recv_acc(plan_t *plan, int peer, place_t dst, size_t bytes, after_t after);
// A step without a peer: copy, scale, load and store of accumulators, adasum.
int plan_local(plan_t *plan, step_kind_t kind, place_t dst, place_t src, size_t bytes,
               after_t after);
// Scales `bytes` at dst if the request asks for it, following `behind`; the step to go on from.
int plan_scale(plan_t *plan, const coll_args_t *args, place_t dst, size_t bytes, int behind);
// What is left to do for a group of one: input to output, scaled.
void plan_alone(plan_t *plan, const coll_args_t *args, size_t bytes);

// --- Ranges --------------------------------------------------------------------------------------

typedef struct range {
    size_t at, bytes;
} range_t;

// The i-th of n parts of nearly equal size; bounds fall on elements, on cache lines where parts are
// long enough not to notice.
range_t range_part(size_t bytes, size_t elem_bytes, int i, int n);
// The halves of a range, cut likewise.
range_t range_half(range_t range, size_t elem_bytes, bool upper);
// The part of the whole that belongs to a member (any integer: members go around): an even share of
// an allreduce, else its block.
range_t range_of_member(const coll_args_t *args, int member);
// member, taken around: -1 is the last one, size the first.
int member_around(const coll_args_t *args, int member);
size_t sum_of(const size_t *values, int n);

// --- Any number of members on a power of two -----------------------------------------------------
// With n = core + extra and core the largest power of two: of the first 2 * extra members, each odd
// one hands its data to the even one before it and gets the result back at the end. The others, and
// the even ones on behalf of their pairs, are nodes 0 .. core-1, in the order of members.

typedef struct folding {
    int core, extra;
    int node;    // of this member, or -1: it is an odd one of a pair
    int partner; // the other of this member's pair, or -1
} folding_t;

folding_t fold_members(int member, int size);
int fold_member_of(const folding_t *folding, int node);

// --- The algorithms, each in the file of its family ----------------------------------------------

typedef hvd_status_t plan_fn_t(const coll_args_t *args, plan_t *plan, err_t *err);

plan_fn_t plan_allreduce_recursive_doubling, plan_allreduce_halving_doubling, plan_allreduce_ring,
    plan_allreduce_pairwise, plan_allreduce_adasum;
plan_fn_t plan_allgather_ring, plan_allgather_bruck;
plan_fn_t plan_broadcast_binomial, plan_broadcast_chain;
plan_fn_t plan_alltoall_pairwise, plan_alltoall_bruck;
plan_fn_t plan_reducescatter_ring, plan_reducescatter_halving, plan_reducescatter_pairwise;

#endif
