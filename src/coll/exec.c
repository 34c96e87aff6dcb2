// SPDX-License-Identifier: Apache-2.0
//
// exec.c - runs any plan over any links, without blocking.
//
// Method: each peer has a queue of sends and a queue of receives, in the plan's order; only their
// heads are tried. Steps without a peer are listed once they may run. A step learns that it may run
// by counting down what it waits for: the end of a step, or the first bytes of one it follows.
// exec_progress() receives from every peer that has something left, runs local steps, sends to
// every peer, at most a segment each, and repeats that a few times while something moves.
//
// Cost: O(steps) to start, O(peers with work) per pass; nothing is allocated once the arrays have
// grown to a plan's size.
// Thread: the holder of the engine. The exec_t owns its arrays; plan, buffers and links are
// borrowed.
#include "coll/exec.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    MAX_PASSES = 4,
    DEFAULT_SEGMENT_BYTES = 256 * 1024,
};

#define NO_PEER (-1)
#define EMPTY_QUEUE ((queue_t){NO_STEP, NO_STEP})

// --- Memory --------------------------------------------------------------------------------------

exec_t *exec_new(void)
{
    return calloc(1, sizeof(exec_t));
}

void exec_free(exec_t *exec)
{
    if (exec == NULL) {
        return;
    }
    free(exec->states);
    free(exec->peers);
    free(exec->busy);
    free(exec->peer_of);
    free(exec);
}

static bool has_room_for_steps(exec_t *exec, int n_steps)
{
    if (n_steps > exec->cap_states) {
        state_t *states = realloc(exec->states, (size_t)n_steps * sizeof *states);
        if (states == NULL) {
            return false;
        }
        exec->states = states;
        exec->cap_states = n_steps;
    }
    return true;
}

static bool has_room_for_members(exec_t *exec, int n_members)
{
    if (n_members > exec->cap_members) {
        int32_t *peer_of = realloc(exec->peer_of, (size_t)n_members * sizeof *peer_of);
        if (peer_of == NULL) {
            return false;
        }
        exec->peer_of = peer_of;
        for (int i = exec->cap_members; i < n_members; i++) {
            peer_of[i] = NO_PEER;
        }
        exec->cap_members = n_members;
    }
    return true;
}

static bool has_room_for_a_peer(exec_t *exec)
{
    if (exec->n_peers == exec->cap_peers) {
        const size_t wanted = exec->cap_peers > 0 ? 2 * (size_t)exec->cap_peers : 4;
        peer_t *peers = realloc(exec->peers, wanted * sizeof *peers);
        if (peers == NULL) {
            return false;
        }
        exec->peers = peers;
        int32_t *busy = realloc(exec->busy, wanted * sizeof *busy);
        if (busy == NULL) {
            return false;
        }
        exec->busy = busy;
        exec->cap_peers = (int)wanted;
    }
    return true;
}

// --- The order of steps --------------------------------------------------------------------------

void exec_enqueue(exec_t *exec, queue_t *queue, int32_t s)
{
    exec->states[s].next_in_queue = NO_STEP;
    if (queue->head == NO_STEP) {
        queue->head = s;
    } else {
        exec->states[queue->tail].next_in_queue = s;
    }
    queue->tail = s;
}

void exec_dequeue(exec_t *exec, queue_t *queue)
{
    INVARIANT(exec->n_left > 0 &&
              exec->states[queue->head].done == step_at(exec, queue->head)->bytes);
    queue->head = exec->states[queue->head].next_in_queue;
    exec->n_left--;
}

// Tells the steps that come after s: those that follow its bytes when `begun`, the others when it
// has ended.
static void release(exec_t *exec, int32_t s, bool begun)
{
    for (int32_t edge = exec->states[s].first_edge; edge != NO_STEP;) {
        const int32_t next = edge / 2, which = edge % 2;
        state_t *state = &exec->states[next];
        const bool follows = step_at(exec, next)->stream && which == 0;
        INVARIANT(follows != begun || state->waits_for > 0);
        if (follows == begun && --state->waits_for == 0 && is_local(step_at(exec, next))) {
            exec_enqueue(exec, &exec->locals, next);
        }
        edge = state->next_edge[which];
    }
}

void exec_pass(exec_t *exec, int32_t s, size_t bytes)
{
    state_t *state = &exec->states[s];
    const bool begins = state->done == 0;
    INVARIANT(state->waits_for == 0 && bytes <= limit_of(exec, s) - state->done);
    state->done += bytes;
    exec->moved = true;
    if (begins) {
        release(exec, s, true);
    }
    if (state->done == step_at(exec, s)->bytes) {
        release(exec, s, false);
    }
}

// --- Runs ----------------------------------------------------------------------------------------

static peer_t *peer_for(exec_t *exec, int member)
{
    if (exec->peer_of[member] != NO_PEER) {
        return &exec->peers[exec->peer_of[member]];
    }
    if (!has_room_for_a_peer(exec)) {
        fail(&exec->err, HVD_NO_MEMORY, "no memory for one more peer of a plan");
        return NULL;
    }
    const int index = exec->n_peers;
    peer_t *peer = &exec->peers[index];
    peer->member = member;
    peer->sends = peer->receives = EMPTY_QUEUE;
    peer->staged = peer->staged_sent = peer->header_got = peer->torn_got = 0;
    peer->link = exec->run.link_of(exec->run.arg, member, &exec->err);
    if (peer->link == NULL) {
        return NULL;
    }
    exec->peer_of[member] = index;
    exec->busy[exec->n_busy++] = index;
    exec->n_peers++;
    return peer;
}

// Counts what step s waits for and adds it to the lists of those it comes after.
static void link_edges(exec_t *exec, int32_t s)
{
    state_t *state = &exec->states[s];
    for (int i = 0; i < 2; i++) {
        const int32_t before = step_at(exec, s)->after[i];
        if (before != NO_STEP) {
            state->next_edge[i] = exec->states[before].first_edge;
            exec->states[before].first_edge = 2 * s + i;
            state->waits_for++;
        }
    }
}

static hvd_status_t line_up(exec_t *exec, int32_t s)
{
    const step_t *step = step_at(exec, s);
    if (is_local(step)) {
        if (exec->states[s].waits_for == 0) {
            exec_enqueue(exec, &exec->locals, s);
        }
        return HVD_OK;
    }
    peer_t *peer = peer_for(exec, step->peer);
    if (peer == NULL) {
        return exec->err.status;
    }
    exec_enqueue(exec, step->kind == STEP_SEND ? &peer->sends : &peer->receives, s);
    return HVD_OK;
}

static hvd_status_t reset(exec_t *exec, const exec_run_t *run)
{
    for (int i = 0; i < exec->n_peers; i++) {
        exec->peer_of[exec->peers[i].member] = NO_PEER;
    }
    exec->run = *run;
    exec->n_peers = exec->n_busy = 0;
    exec->locals = EMPTY_QUEUE;
    exec->moved = false;
    exec->err.status = HVD_OK;
    exec->elem_bytes = hvd_dtype_bytes(run->dtype);
    exec->acc_elem_bytes = hvd_dtype_bytes(acc_dtype(run->dtype));
    const size_t segment = run->segment_bytes > 0 ? run->segment_bytes : DEFAULT_SEGMENT_BYTES;
    exec->segment_bytes = MAX(segment - segment % exec->elem_bytes, exec->elem_bytes);
    exec->n_left = run->plan->n_steps;
    int n_members = 0;
    for (int s = 0; s < exec->n_left; s++) {
        n_members = MAX(n_members, step_at(exec, s)->peer + 1);
    }
    if (!has_room_for_steps(exec, exec->n_left) || !has_room_for_members(exec, n_members)) {
        return fail(&exec->err, HVD_NO_MEMORY, "no memory to run a plan of %d steps", exec->n_left);
    }
    for (int s = 0; s < exec->n_left; s++) {
        exec->states[s] = (state_t){.first_edge = NO_STEP, .next_in_queue = NO_STEP};
    }
    return HVD_OK;
}

hvd_status_t exec_start(exec_t *exec, const exec_run_t *run, err_t *err)
{
    hvd_status_t status = reset(exec, run);
    for (int32_t s = 0; status == HVD_OK && s < run->plan->n_steps; s++) {
        link_edges(exec, s);
    }
    for (int32_t s = 0; status == HVD_OK && s < run->plan->n_steps; s++) {
        status = line_up(exec, s);
    }
    if (status != HVD_OK && err != NULL) {
        *err = exec->err;
    }
    return status;
}

hvd_status_t exec_progress(exec_t *exec, err_t *err)
{
    hvd_status_t status = exec->err.status;
    bool moved = false;
    for (int pass = 0; status == HVD_OK && exec->n_left > 0 && pass < MAX_PASSES; pass++) {
        exec->moved = false;
        for (int i = 0; status == HVD_OK && i < exec->n_busy; i++) {
            status = exec_receive_from(exec, &exec->peers[exec->busy[i]]);
        }
        if (exec->locals.head != NO_STEP) {
            exec_run_locals(exec);
        }
        for (int i = 0; status == HVD_OK && i < exec->n_busy; i++) {
            peer_t *peer = &exec->peers[exec->busy[i]];
            status = exec_send_to(exec, peer);
            if (peer->sends.head == NO_STEP && peer->receives.head == NO_STEP) {
                exec->busy[i--] = exec->busy[--exec->n_busy];
            }
        }
        if (!exec->moved) {
            break;
        }
        moved = true;
    }
    exec->moved = moved;
    if (status != HVD_OK) {
        if (err != NULL) {
            *err = exec->err;
        }
        return status;
    }
    return exec->n_left == 0 ? HVD_OK : HVD_IN_PROGRESS;
}

bool exec_moved(const exec_t *exec)
{
    return exec->moved;
}

// --- What it waits for ---------------------------------------------------------------------------

static size_t describe_head(const exec_t *exec, int32_t s, const char *doing, int rank,
                            bool is_first, char *text, size_t bytes)
{
    const step_t *step = step_at(exec, s);
    const state_t *state = &exec->states[s];
    const int n = snprintf(text, bytes, "%s%s rank %d: step %d, %zu of %zu bytes%s",
                           is_first ? "" : "; ", doing, rank, s, state->done, step->bytes,
                           state->waits_for > 0 ? ", waits for other steps" : "");
    return n < 0 ? 0 : MIN((size_t)n, bytes > 0 ? bytes - 1 : 0);
}

void exec_describe(const exec_t *exec, char *text, size_t bytes)
{
    size_t at = 0;
    if (bytes > 0) {
        text[0] = '\0';
    }
    for (int i = 0; i < exec->n_busy; i++) {
        const peer_t *peer = &exec->peers[exec->busy[i]];
        if (peer->sends.head != NO_STEP) {
            at += describe_head(exec, peer->sends.head, "sending to", peer->link->peer, at == 0,
                                text + at, bytes - at);
        }
        if (peer->receives.head != NO_STEP) {
            at += describe_head(exec, peer->receives.head, "receiving from", peer->link->peer,
                                at == 0, text + at, bytes - at);
        }
    }
}
