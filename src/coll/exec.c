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
// On the wire a message is a header of 16 bytes (epoch, batch, bytes) and its payload. Headers are
// read as soon as their receive is at the head of its queue, even while it waits for other steps.
// Short messages are sent from a small copy together with their header: one call to the link.
//
// Cost: O(steps) to start, O(peers with work) per pass; nothing is allocated once the arrays have
// grown to a plan's size. Reductions read straight from the link's memory.
// Thread: the holder of the engine. The exec_t owns its arrays; plan, buffers and links are
// borrowed.
#include "coll/coll.h"
#include "wire/codec.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    HEADER_BYTES = 16,
    SHORT_BYTES = 4096, // messages up to this size are sent in one piece with their header
    MAX_ELEM_BYTES = 8,
    MAX_PASSES = 4,
    DEFAULT_SEGMENT_BYTES = 256 * 1024,
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

// --- Steps and their order -----------------------------------------------------------------------

static const step_t *step_at(const exec_t *exec, int32_t s)
{
    return &exec->run.plan->steps[s];
}

static char *place_of(const exec_t *exec, plan_buf_t buf, size_t at)
{
    return (char *)exec->run.buffers[buf] + at;
}

// Where the accumulators of the element at `at` (in tensor bytes) of a step lie.
static char *acc_of(const exec_t *exec, plan_buf_t buf, size_t base, size_t at)
{
    return place_of(exec, buf, base + at / exec->elem_bytes * exec->acc_elem_bytes);
}

static bool is_local(const step_t *step)
{
    return step->kind > STEP_RECV_ACC;
}

static void enqueue(exec_t *exec, queue_t *queue, int32_t s)
{
    exec->states[s].next_in_queue = NO_STEP;
    if (queue->head == NO_STEP) {
        queue->head = s;
    } else {
        exec->states[queue->tail].next_in_queue = s;
    }
    queue->tail = s;
}

static void dequeue(exec_t *exec, queue_t *queue)
{
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
        if (follows == begun && --state->waits_for == 0 && is_local(step_at(exec, next))) {
            enqueue(exec, &exec->locals, next);
        }
        edge = state->next_edge[which];
    }
}

// `bytes` more of step s have passed. Called once with 0 for an empty step.
static void pass(exec_t *exec, int32_t s, size_t bytes)
{
    state_t *state = &exec->states[s];
    const bool begins = state->done == 0;
    state->done += bytes;
    exec->moved = true;
    if (begins) {
        release(exec, s, true);
    }
    if (state->done == step_at(exec, s)->bytes) {
        release(exec, s, false);
    }
}

// How far step s may go: to its end, or as far as the step it follows has come.
static size_t limit_of(const exec_t *exec, int32_t s)
{
    const step_t *step = step_at(exec, s);
    return step->stream ? MIN(step->bytes, exec->states[step->after[0]].done) : step->bytes;
}

// The same in whole segments, so that a step does not run after every crumb of the one before.
static size_t segment_limit_of(const exec_t *exec, int32_t s)
{
    const size_t limit = limit_of(exec, s);
    return limit == step_at(exec, s)->bytes ? limit : limit - limit % exec->segment_bytes;
}

// The sentence of a broken link; negative is what a mover returned.
static hvd_status_t broken(exec_t *exec, const peer_t *peer, ssize_t negative, const char *doing)
{
    const char *why = peer->link->err.text;
    return fail(&exec->err, (hvd_status_t)negative, "%s%s member %d over %s failed%s%s", doing,
                negative == HVD_PEER_LOST ? " lost" : "", peer->member, peer->link->transport,
                why[0] != '\0' ? ": " : "", why);
}

// --- Sending -------------------------------------------------------------------------------------

static void stage_message(exec_t *exec, peer_t *peer, int32_t s)
{
    const step_t *step = step_at(exec, s);
    buf_t header = {.data = peer->stage, .cap = sizeof peer->stage};
    put_u32(&header, exec->run.epoch);
    put_u32(&header, exec->run.batch);
    put_u64(&header, step->bytes);
    peer->staged = HEADER_BYTES;
    peer->staged_sent = 0;
    if (step->bytes <= SHORT_BYTES) {
        if (step->bytes > 0) {
            memcpy(peer->stage + HEADER_BYTES, place_of(exec, step->src, step->src_at),
                   step->bytes);
        }
        peer->staged += step->bytes;
        pass(exec, s, step->bytes); // the tensor is free: the copy goes out
    }
}

// Moves up to `budget` bytes of the message at the head; what moved, 0 or a negative status.
static ssize_t send_some(exec_t *exec, peer_t *peer, size_t budget)
{
    const int32_t s = peer->sends.head;
    const step_t *step = step_at(exec, s);
    state_t *state = &exec->states[s];
    const size_t limit = segment_limit_of(exec, s);
    if (peer->staged == 0) {
        if (limit < step->bytes && (limit == 0 || step->bytes <= SHORT_BYTES)) {
            return 0;
        }
        stage_message(exec, peer, s);
    }
    ssize_t n = 0;
    if (peer->staged_sent < peer->staged) {
        n = link_send(peer->link, peer->stage + peer->staged_sent,
                      peer->staged - peer->staged_sent);
        peer->staged_sent += n > 0 ? (size_t)n : 0;
    } else {
        const char *from = place_of(exec, step->src, step->src_at + state->done);
        n = state->done < limit ? link_send(peer->link, from, MIN(limit - state->done, budget)) : 0;
        if (n > 0) {
            pass(exec, s, (size_t)n);
        }
    }
    if (state->done == step->bytes && peer->staged_sent == peer->staged) {
        peer->staged = 0;
        dequeue(exec, &peer->sends);
    }
    return n;
}

static hvd_status_t send_to(exec_t *exec, peer_t *peer)
{
    size_t budget = exec->segment_bytes;
    while (budget > 0 && peer->sends.head != NO_STEP &&
           exec->states[peer->sends.head].waits_for == 0) {
        const ssize_t n = send_some(exec, peer, budget);
        if (n < 0) {
            return broken(exec, peer, n, "sending to");
        }
        if (n == 0) {
            break;
        }
        exec->moved = true;
        budget -= MIN(budget, (size_t)n);
    }
    return HVD_OK;
}

// --- Receiving -----------------------------------------------------------------------------------

static hvd_status_t check_header(exec_t *exec, const peer_t *peer, const step_t *step)
{
    reader_t reader = reader_of(peer->header, HEADER_BYTES);
    const uint32_t epoch = get_u32(&reader), batch = get_u32(&reader);
    const uint64_t bytes = get_u64(&reader);
    const exec_run_t *run = &exec->run;
    if (LIKELY(epoch == run->epoch && batch == run->batch && bytes == step->bytes)) {
        return HVD_OK;
    }
    return fail(
        &exec->err, HVD_PROTOCOL,
        "member %d sent a message of epoch %" PRIu32 ", batch %" PRIu32 ", %" PRIu64
        " bytes where epoch %" PRIu32 ", batch %" PRIu32
        ", %zu bytes was due: its plan differs from "
        "this one; check that all ranks run the same version with the same HOROVOD_ settings",
        peer->member, epoch, batch, bytes, run->epoch, run->batch, step->bytes);
}

// Long messages that go straight into place leave the link's own memory out.
static bool goes_around_peek(const step_t *step)
{
    return step->kind == STEP_RECV && step->bytes > SHORT_BYTES;
}

static ssize_t read_header(exec_t *exec, peer_t *peer, const step_t *step)
{
    uint8_t *to = peer->header + peer->header_got;
    const size_t wanted = HEADER_BYTES - peer->header_got;
    ssize_t n;
    if (goes_around_peek(step)) {
        n = link_recv(peer->link, to, wanted);
    } else {
        const void *data;
        n = link_peek(peer->link, &data);
        if (n > 0) {
            n = (ssize_t)MIN((size_t)n, wanted);
            memcpy(to, data, (size_t)n);
            link_consume(peer->link, (size_t)n);
        }
    }
    if (n > 0) {
        peer->header_got += (size_t)n;
        exec->moved = true;
        if (peer->header_got == HEADER_BYTES) {
            const hvd_status_t status = check_header(exec, peer, step);
            return status == HVD_OK ? n : (ssize_t)status;
        }
    }
    return n;
}

// Adds `bytes` (whole elements) of incoming data to what step s has at `at`.
static void combine(exec_t *exec, const step_t *step, size_t at, const void *data, size_t bytes)
{
    const exec_run_t *run = &exec->run;
    const size_t n = bytes / exec->elem_bytes;
    if (step->kind == STEP_RECV_ACC) {
        acc_add_scaled(run->dtype, run->reduce, acc_of(exec, step->dst, step->dst_at, at), data, n,
                       run->prescale);
        return;
    }
    char *dst = place_of(exec, step->dst, step->dst_at + at);
    const void *own = place_of(exec, step->src, step->src_at + at);
    reduce_pair(run->dtype, run->reduce, dst, step->swap ? data : own, step->swap ? own : data, n);
}

// An element that lies across two pieces of the link's memory is put together first.
static ssize_t take_torn(exec_t *exec, peer_t *peer, int32_t s, size_t room)
{
    const size_t elem_bytes = exec->elem_bytes;
    ssize_t n = 0;
    if (peer->torn_got < elem_bytes) {
        const void *data;
        n = link_peek(peer->link, &data);
        if (n <= 0) {
            return n;
        }
        n = (ssize_t)MIN((size_t)n, elem_bytes - peer->torn_got);
        memcpy(peer->torn + peer->torn_got, data, (size_t)n);
        link_consume(peer->link, (size_t)n);
        peer->torn_got += (size_t)n;
        exec->moved = true;
    }
    if (peer->torn_got == elem_bytes && room >= elem_bytes) {
        combine(exec, step_at(exec, s), exec->states[s].done, peer->torn, elem_bytes);
        peer->torn_got = 0;
        pass(exec, s, elem_bytes);
        n = (ssize_t)elem_bytes;
    }
    return n;
}

static ssize_t take_elements(exec_t *exec, peer_t *peer, int32_t s, size_t room)
{
    if (peer->torn_got > 0) {
        return take_torn(exec, peer, s, room);
    }
    const void *data;
    ssize_t n = link_peek(peer->link, &data);
    if (n <= 0) {
        return n;
    }
    if ((size_t)n < exec->elem_bytes) {
        return take_torn(exec, peer, s, room);
    }
    size_t bytes = MIN((size_t)n, room);
    bytes -= bytes % exec->elem_bytes;
    if (bytes > 0) {
        combine(exec, step_at(exec, s), exec->states[s].done, data, bytes);
        link_consume(peer->link, bytes);
        pass(exec, s, bytes);
    }
    return (ssize_t)bytes;
}

static ssize_t take_plain(exec_t *exec, peer_t *peer, int32_t s, size_t room)
{
    if (room == 0) {
        return 0;
    }
    const step_t *step = step_at(exec, s);
    char *to = place_of(exec, step->dst, step->dst_at + exec->states[s].done);
    const ssize_t n = link_recv(peer->link, to, room);
    if (n > 0) {
        pass(exec, s, (size_t)n);
    }
    return n;
}

// Moves up to `budget` bytes of the message at the head; what moved, 0 or a negative status.
static ssize_t receive_some(exec_t *exec, peer_t *peer, size_t budget)
{
    const int32_t s = peer->receives.head;
    const step_t *step = step_at(exec, s);
    state_t *state = &exec->states[s];
    if (peer->header_got < HEADER_BYTES) {
        const ssize_t n = read_header(exec, peer, step);
        if (n <= 0 || peer->header_got < HEADER_BYTES) {
            return n;
        }
    }
    if (state->waits_for > 0) {
        return 0;
    }
    ssize_t n = HEADER_BYTES;
    if (step->bytes == 0) {
        pass(exec, s, 0);
    } else {
        const size_t room = MIN(limit_of(exec, s) - state->done, budget);
        n = step->kind == STEP_RECV ? take_plain(exec, peer, s, room)
                                    : take_elements(exec, peer, s, room);
    }
    if (n >= 0 && state->done == step->bytes) {
        peer->header_got = 0;
        dequeue(exec, &peer->receives);
    }
    return n;
}

static hvd_status_t receive_from(exec_t *exec, peer_t *peer)
{
    size_t budget = exec->segment_bytes;
    while (budget > 0 && peer->receives.head != NO_STEP) {
        const ssize_t n = receive_some(exec, peer, budget);
        if (n < 0) {
            return exec->err.status != HVD_OK ? exec->err.status
                                              : broken(exec, peer, n, "receiving from");
        }
        if (n == 0) {
            break;
        }
        budget -= MIN(budget, (size_t)n);
    }
    return HVD_OK;
}

// --- Steps without a peer ------------------------------------------------------------------------

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
              exec->run.postscale);
}

static void run_scale(exec_t *exec, const step_t *step, size_t at, size_t bytes)
{
    char *dst = place_of(exec, step->dst, step->dst_at + at);
    reduce_scale(exec->run.dtype, dst, dst, bytes / exec->elem_bytes, exec->run.postscale);
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
        pass(exec, s, bytes);
    }
    return bytes;
}

// Goes once over the list; steps that become ready meanwhile are added at its end and run too. A
// step that follows another one and has nothing yet stays where it is.
static void run_locals(exec_t *exec)
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
            enqueue(exec, &exec->locals, s);
        }
        return HVD_OK;
    }
    peer_t *peer = peer_for(exec, step->peer);
    if (peer == NULL) {
        return exec->err.status;
    }
    enqueue(exec, step->kind == STEP_SEND ? &peer->sends : &peer->receives, s);
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

static hvd_status_t one_pass(exec_t *exec)
{
    hvd_status_t status = HVD_OK;
    for (int i = 0; status == HVD_OK && i < exec->n_busy; i++) {
        status = receive_from(exec, &exec->peers[exec->busy[i]]);
    }
    if (exec->locals.head != NO_STEP) {
        run_locals(exec);
    }
    for (int i = 0; status == HVD_OK && i < exec->n_busy; i++) {
        peer_t *peer = &exec->peers[exec->busy[i]];
        status = send_to(exec, peer);
        if (peer->sends.head == NO_STEP && peer->receives.head == NO_STEP) {
            exec->busy[i--] = exec->busy[--exec->n_busy];
        }
    }
    return status;
}

hvd_status_t exec_progress(exec_t *exec, err_t *err)
{
    hvd_status_t status = exec->err.status;
    bool moved = false;
    for (int i = 0; status == HVD_OK && exec->n_left > 0 && i < MAX_PASSES; i++) {
        exec->moved = false;
        status = one_pass(exec);
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

static size_t describe_head(const exec_t *exec, int32_t s, const char *doing, int member,
                            char *text, size_t bytes)
{
    const step_t *step = step_at(exec, s);
    const state_t *state = &exec->states[s];
    const int n =
        snprintf(text, bytes, "%s member %d: step %d, %zu of %zu bytes%s; ", doing, member, s,
                 state->done, step->bytes, state->waits_for > 0 ? ", waits for other steps" : "");
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
            at += describe_head(exec, peer->sends.head, "sending to", peer->member, text + at,
                                bytes - at);
        }
        if (peer->receives.head != NO_STEP) {
            at += describe_head(exec, peer->receives.head, "receiving from", peer->member,
                                text + at, bytes - at);
        }
    }
}
