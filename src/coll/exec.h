// SPDX-License-Identifier: Apache-2.0
//
// exec.h - the state of a run, shared by the files of the executor: exec.c (runs and the order of
// steps), exec_link.c (messages), exec_local.c (steps without a peer). Private to them.
//
// Thread: the holder of the engine.
#ifndef HVD_COLL_EXEC_H
#define HVD_COLL_EXEC_H

#include "coll/coll.h"

enum {
    HEADER_BYTES = 16,
    SHORT_BYTES = 4096, // messages up to this size are sent in one piece with their header
    MAX_ELEM_BYTES = 8,
};

// What a step has come to. Edge 2 * s + i says that step s comes after steps[s].after[i].
typedef struct state {
    size_t done;          // bytes that have passed: a follower may go this far
    int32_t waits_for;    // dependencies that have not happened yet
    int32_t first_edge;   // of the steps that come after this one
    int32_t next_edge[2]; // of this step's two edges, in the lists of those it comes after
    int32_t next_in_queue;
} state_t;

typedef struct queue {
    int32_t head, tail;
} queue_t;

typedef struct peer {
    net_link_t *link;
    int member;
    queue_t sends, receives;
    size_t staged, staged_sent; // header of the outgoing message, and its payload if that is short
    size_t header_got;          // of the incoming message
    size_t torn_got;            // bytes of an element whose end has not arrived yet
    uint8_t torn[MAX_ELEM_BYTES];
    uint8_t header[HEADER_BYTES];
    uint8_t stage[HEADER_BYTES + SHORT_BYTES];
} peer_t;

struct exec {
    exec_run_t run;
    size_t elem_bytes, acc_elem_bytes;
    size_t segment_bytes; // whole elements
    state_t *states;
    int cap_states;
    peer_t *peers;
    int32_t *busy; // indices of peers with something left
    int n_peers, n_busy, cap_peers;
    int32_t *peer_of; // member to index in peers, NO_PEER if it has none
    int cap_members;
    queue_t locals; // steps without a peer that may run
    int n_left;     // steps not finished
    bool moved;
    err_t err; // why the run is broken
};

// --- Order (exec.c) ------------------------------------------------------------------------------

void exec_enqueue(exec_t *exec, queue_t *queue, int32_t s);
void exec_dequeue(exec_t *exec, queue_t *queue); // the head, which has ended
// `bytes` more of step s have passed. Called once with 0 for an empty step.
void exec_pass(exec_t *exec, int32_t s, size_t bytes);

// --- Moving, each at most a segment or so (exec_link.c, exec_local.c) ----------------------------

hvd_status_t exec_send_to(exec_t *exec, peer_t *peer);
hvd_status_t exec_receive_from(exec_t *exec, peer_t *peer);
void exec_run_locals(exec_t *exec);

// --- Steps ---------------------------------------------------------------------------------------

static inline const step_t *step_at(const exec_t *exec, int32_t s)
{
    return &exec->run.plan->steps[s];
}

static inline char *place_of(const exec_t *exec, plan_buf_t buf, size_t at)
{
    return (char *)exec->run.buffers[buf] + at;
}

// Where the accumulators of the element at `at` (in tensor bytes) of a step lie.
static inline char *acc_of(const exec_t *exec, plan_buf_t buf, size_t base, size_t at)
{
    return place_of(exec, buf, base + at / exec->elem_bytes * exec->acc_elem_bytes);
}

static inline bool is_local(const step_t *step)
{
    return step->kind > STEP_RECV_ACC;
}

// How far step s may go: to its end, or as far as the step it follows has come.
static inline size_t limit_of(const exec_t *exec, int32_t s)
{
    const step_t *step = step_at(exec, s);
    return step->stream ? MIN(step->bytes, exec->states[step->after[0]].done) : step->bytes;
}

// The same in whole segments, so that a step does not run after every crumb of the one before.
static inline size_t segment_limit_of(const exec_t *exec, int32_t s)
{
    const size_t limit = limit_of(exec, s);
    return limit == step_at(exec, s)->bytes ? limit : limit - limit % exec->segment_bytes;
}

#endif
