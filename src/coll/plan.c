// SPDX-License-Identifier: Apache-2.0
//
// plan.c - plans as growing lists of steps, and the arithmetic the algorithms share.
//
// A plan keeps its memory when cleared, so writing plans of a known size allocates nothing. Running
// out of memory sets `failed`, which coll_plan() looks at once.
#include "coll/plan.h"

#include <stdlib.h>

void plan_clear(plan_t *plan)
{
    plan->n_steps = 0;
    plan->tmp_bytes = plan->acc_bytes = 0;
    plan->failed = false;
}

void plan_free(plan_t *plan)
{
    free(plan->steps);
    *plan = (plan_t){0};
}

int plan_add(plan_t *plan, step_t step)
{
    if (plan->n_steps == plan->cap_steps) {
        int cap = plan->cap_steps > 0 ? 2 * plan->cap_steps : 64;
        step_t *steps = plan->failed ? NULL : realloc(plan->steps, (size_t)cap * sizeof *steps);
        if (steps == NULL) {
            plan->failed = true;
            return NO_STEP;
        }
        plan->steps = steps;
        plan->cap_steps = cap;
    }
    plan->steps[plan->n_steps] = step;
    return plan->n_steps++;
}

// --- Steps ---------------------------------------------------------------------------------------

static int add(plan_t *plan, step_kind_t kind, int peer, place_t dst, place_t src, size_t bytes,
               bool swap, after_t after)
{
    if (bytes == 0) {
        return NO_STEP;
    }
    return plan_add(plan, (step_t){
                              .kind = kind,
                              .src = src.buf,
                              .dst = dst.buf,
                              .swap = swap,
                              .peer = peer,
                              .after = {after.first, after.second},
                              .stream = after.stream && after.first != NO_STEP,
                              .src_at = src.at,
                              .dst_at = dst.at,
                              .bytes = bytes,
                          });
}

int plan_send(plan_t *plan, int peer, place_t src, size_t bytes, after_t after)
{
    return add(plan, STEP_SEND, peer, src, src, bytes, false, after);
}

int plan_recv(plan_t *plan, int peer, place_t dst, size_t bytes, after_t after)
{
    return add(plan, STEP_RECV, peer, dst, dst, bytes, false, after);
}

int plan_recv_reduce(plan_t *plan, int peer, place_t dst, place_t src, size_t bytes, bool swap,
                     after_t after)
{
    return add(plan, STEP_RECV_REDUCE, peer, dst, src, bytes, swap, after);
}

int plan_recv_acc(plan_t *plan, int peer, place_t dst, size_t bytes, after_t after)
{
    return add(plan, STEP_RECV_ACC, peer, dst, dst, bytes, false, after);
}

int plan_local(plan_t *plan, step_kind_t kind, place_t dst, place_t src, size_t bytes,
               after_t after)
{
    return add(plan, kind, -1, dst, src, bytes, false, after);
}

int plan_scale(plan_t *plan, const coll_args_t *args, place_t dst, size_t bytes, int behind)
{
    if (!args->scale_after) {
        return behind;
    }
    return plan_local(plan, STEP_SCALE, dst, dst, bytes, BEHIND(behind));
}

void plan_alone(plan_t *plan, const coll_args_t *args, size_t bytes)
{
    int copy =
        plan_local(plan, STEP_COPY, PLACE(BUF_OUTPUT, 0), PLACE(BUF_INPUT, 0), bytes, AT_ONCE);
    plan_scale(plan, args, PLACE(BUF_OUTPUT, 0), bytes, copy);
}

// --- Ranges --------------------------------------------------------------------------------------

// Below this many bytes a part is worth more when even than when aligned.
enum { ALIGN_FROM_BYTES = 16 * CACHE_LINE };

static size_t round_down(size_t value, size_t unit)
{
    return value - value % unit;
}

static size_t part_begin(size_t bytes, size_t elem_bytes, size_t i, size_t n)
{
    if (i == n) {
        return bytes;
    }
    size_t unit = bytes / n >= ALIGN_FROM_BYTES ? (size_t)CACHE_LINE : elem_bytes;
    return round_down(bytes / n * i + bytes % n * i / n, unit);
}

range_t range_part(size_t bytes, size_t elem_bytes, int i, int n)
{
    size_t begin = part_begin(bytes, elem_bytes, (size_t)i, (size_t)n);
    return (range_t){begin, part_begin(bytes, elem_bytes, (size_t)i + 1, (size_t)n) - begin};
}

range_t range_half(range_t range, size_t elem_bytes, bool upper)
{
    range_t half = range_part(range.bytes, elem_bytes, upper, 2);
    half.at += range.at;
    return half;
}

size_t sum_of(const size_t *values, int n)
{
    size_t sum = 0;
    for (int i = 0; i < n; i++) {
        sum += values[i];
    }
    return sum;
}

int member_around(const coll_args_t *args, int member)
{
    int wrapped = member % args->size;
    return wrapped < 0 ? wrapped + args->size : wrapped;
}

range_t range_of_member(const coll_args_t *args, int member)
{
    const int i = member_around(args, member);
    if (op_infos[args->op].layout == LAYOUT_WHOLE) {
        return range_part(args->bytes, hvd_dtype_bytes(args->dtype), i, args->size);
    }
    return (range_t){sum_of(args->blocks, i), args->blocks[i]};
}

// --- Folding -------------------------------------------------------------------------------------

folding_t fold_members(int member, int size)
{
    folding_t folding = {.core = 1, .node = -1, .partner = -1};
    while (folding.core <= size / 2) {
        folding.core *= 2;
    }
    folding.extra = size - folding.core;
    if (member >= 2 * folding.extra) {
        folding.node = member - folding.extra;
    } else {
        folding.node = member % 2 == 0 ? member / 2 : -1;
        folding.partner = member ^ 1;
    }
    return folding;
}

int fold_member_of(const folding_t *folding, int node)
{
    return node < folding->extra ? 2 * node : node + folding->extra;
}
