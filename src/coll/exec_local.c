// SPDX-License-Identifier: Apache-2.0
//
// exec_local.c - the executor's steps without a peer: copies and arithmetic, a segment at a time.
//
// Only steps that may run are in the list. Thread: the holder of the engine.
#include "coll/exec.h"

typedef void local_fn_t(exec_t *exec, const step_t *step, size_t at, size_t bytes);

static void run_copy(exec_t *exec, const step_t *step, size_t at, size_t bytes)
{
    char *dst = place_of(exec, step->dst, step->dst_at + at);
    const char *src = place_of(exec, step->src, step->src_at + at);
    if (dst != src) {
        memcpy(dst, src, bytes);
    }
}

static void run_reduce(exec_t *exec, const step_t *step, size_t at, size_t bytes)
{
    char *dst = place_of(exec, step->dst, step->dst_at + at);
    const char *src = place_of(exec, step->src, step->src_at + at);
    reduce_pair(exec->run.dtype, exec->run.reduce, dst, dst, src, bytes / exec->elem_bytes);
}

static void run_load_acc(exec_t *exec, const step_t *step, size_t at, size_t bytes)
{
    acc_load(exec->run.dtype, acc_of(exec, step->dst, step->dst_at, at),
             place_of(exec, step->src, step->src_at + at), bytes / exec->elem_bytes,
             exec->run.prescale);
}

static void run_store_acc(exec_t *exec, const step_t *step, size_t at, size_t bytes)
{
    acc_store(exec->run.dtype, place_of(exec, step->dst, step->dst_at + at),
              acc_of(exec, step->src, step->src_at, at), bytes / exec->elem_bytes,
              exec->run.finish);
}

static void run_scale(exec_t *exec, const step_t *step, size_t at, size_t bytes)
{
    char *dst = place_of(exec, step->dst, step->dst_at + at);
    reduce_finish(exec->run.dtype, dst, dst, bytes / exec->elem_bytes, exec->run.finish);
}

static void run_adasum(exec_t *exec, const step_t *step, size_t at, size_t bytes)
{
    char *dst = place_of(exec, step->dst, step->dst_at + at);
    const char *src = place_of(exec, step->src, step->src_at + at);
    const void *lower = step->swap ? src : dst, *upper = step->swap ? dst : src;
    reduce_adasum(exec->run.dtype, dst, lower, upper, bytes / exec->elem_bytes);
}

static const struct {
    local_fn_t *run;
    bool whole; // needs the whole vector at once
} local_kinds[] = {
    [STEP_COPY] = {run_copy, false},         [STEP_REDUCE] = {run_reduce, false},
    [STEP_LOAD_ACC] = {run_load_acc, false}, [STEP_STORE_ACC] = {run_store_acc, false},
    [STEP_SCALE] = {run_scale, false},       [STEP_ADASUM] = {run_adasum, true},
};

// Runs up to a segment of step s; returns how many bytes.
static size_t run_local(exec_t *exec, int32_t s)
{
    const step_t *step = step_at(exec, s);
    const size_t at = exec->states[s].done;
    const bool whole = local_kinds[step->kind].whole;
    size_t bytes = segment_limit_of(exec, s) - at;
    bytes = whole ? bytes : MIN(bytes, exec->segment_bytes);
    if (bytes > 0) {
        local_kinds[step->kind].run(exec, step, at, bytes);
    }
    if (bytes > 0 || step->bytes == 0) {
        exec_pass(exec, s, bytes);
    }
    return bytes;
}

// Goes once over the list; steps that become ready meanwhile are added at its end and run too. A
// step that follows another one and has nothing yet stays where it is.
void exec_run_locals(exec_t *exec)
{
    size_t budget = 2 * exec->segment_bytes;
    int32_t before = NO_STEP;
    for (int32_t s = exec->locals.head; s != NO_STEP && budget > 0;) {
        const size_t bytes = run_local(exec, s);
        budget -= MIN(budget, bytes);
        const int32_t next = exec->states[s].next_in_queue;
        if (exec->states[s].done < step_at(exec, s)->bytes) {
            before = s;
        } else {
            INVARIANT(exec->n_left > 0);
            exec->n_left--;
            if (before == NO_STEP) {
                exec->locals.head = next;
            } else {
                exec->states[before].next_in_queue = next;
            }
            if (next == NO_STEP) {
                exec->locals.tail = before;
            }
        }
        s = next;
    }
}
