// SPDX-License-Identifier: Apache-2.0
//
// exec_link.c - the executor's messages.
//
// On the wire a message is a header of 16 bytes (batch, bytes) and its payload. Headers are
// read as soon as their receive is at the head of its queue, even while it waits for other steps:
// what is not due is noticed at once, and no header blocks a link. Short messages are sent from a
// small copy together with their header: one call to the link, and the tensor is free at once.
// Reductions read straight from the link's memory; only an element torn across two pieces of it is
// put together first. Thread: the holder of the engine.
#include "coll/exec.h"
#include "wire/codec.h"

#include <inttypes.h>

// The sentence of a broken link; negative is what a mover returned.
static hvd_status_t broken(exec_t *exec, const peer_t *peer, ssize_t negative, const char *doing)
{
    const char *why = peer->link->err.text;
    return fail(&exec->err, (hvd_status_t)negative, "%s rank %d over %s failed%s%s", doing,
                peer->link->peer, peer->link->transport, why[0] != '\0' ? ": " : "", why);
}

// --- Sending -------------------------------------------------------------------------------------

static void stage_message(exec_t *exec, peer_t *peer, int32_t s)
{
    const step_t *step = step_at(exec, s);
    buf_t header = {.data = peer->stage, .cap = sizeof peer->stage};
    put_u64(&header, exec->run.batch);
    put_u64(&header, step->bytes);
    peer->staged = HEADER_BYTES;
    peer->staged_sent = 0;
    if (step->bytes <= SHORT_BYTES) {
        if (step->bytes > 0) {
            memcpy(peer->stage + HEADER_BYTES, place_of(exec, step->src, step->src_at),
                   step->bytes);
        }
        peer->staged += step->bytes;
        exec_pass(exec, s, step->bytes); // the tensor is free: the copy goes out
    }
}

// A short message leaves in one piece, once all of it is there; a long one begins with a segment.
static bool may_begin(const step_t *step, size_t limit)
{
    return limit == step->bytes || (limit > 0 && step->bytes > SHORT_BYTES);
}

hvd_status_t exec_send_to(exec_t *exec, peer_t *peer)
{
    net_link_t *link = peer->link;
    size_t budget = exec->segment_bytes;
    ssize_t n = 1;
    while (n > 0 && budget > 0 && peer->sends.head != NO_STEP) {
        const int32_t s = peer->sends.head;
        const step_t *step = step_at(exec, s);
        const state_t *state = &exec->states[s];
        const size_t limit = segment_limit_of(exec, s);
        if (state->waits_for > 0 || (peer->staged == 0 && !may_begin(step, limit))) {
            break;
        }
        if (peer->staged == 0) {
            stage_message(exec, peer, s);
        }
        if (peer->staged_sent < peer->staged) {
            link->more = state->done < limit; // the payload follows
            n = link->ops->send(link, peer->stage + peer->staged_sent,
                                peer->staged - peer->staged_sent);
            link->more = false;
            peer->staged_sent += n > 0 ? (size_t)n : 0;
        } else if (state->done < limit) {
            n = link->ops->send(link, place_of(exec, step->src, step->src_at + state->done),
                                MIN(limit - state->done, budget));
            if (n > 0) {
                exec_pass(exec, s, (size_t)n);
                budget -= MIN(budget, (size_t)n); // headers cost none: segments stay whole
            }
        } else {
            break;
        }
        if (state->done == step->bytes && peer->staged_sent == peer->staged) {
            peer->staged = 0;
            exec_dequeue(exec, &peer->sends);
        }
        exec->moved |= n > 0;
    }
    return n < 0 ? broken(exec, peer, n, "sending to") : HVD_OK;
}

// --- Receiving -----------------------------------------------------------------------------------

static hvd_status_t check_header(exec_t *exec, const peer_t *peer, const step_t *step)
{
    reader_t reader = reader_of(peer->header, HEADER_BYTES);
    const uint64_t batch = get_u64(&reader), bytes = get_u64(&reader);
    const exec_run_t *run = &exec->run;
    if (LIKELY(batch == run->batch && bytes == step->bytes)) {
        return HVD_OK;
    }
    return fail(
        &exec->err, HVD_PROTOCOL,
        "rank %d sent %" PRIu64 " bytes of batch %" PRIu64 " where %zu bytes of batch %" PRIu64
        " were due: its plan differs from this one; check that all ranks run the same version with "
        "the same HOROVOD_ settings",
        peer->link->peer, bytes, batch, step->bytes, run->batch);
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
        n = peer->link->ops->recv(peer->link, to, wanted);
    } else {
        const void *data;
        n = peer->link->ops->peek(peer->link, &data);
        if (n > 0) {
            n = (ssize_t)MIN((size_t)n, wanted);
            memcpy(to, data, (size_t)n);
            peer->link->ops->consume(peer->link, (size_t)n);
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
        n = peer->link->ops->peek(peer->link, &data);
        if (n <= 0) {
            return n;
        }
        n = (ssize_t)MIN((size_t)n, elem_bytes - peer->torn_got);
        memcpy(peer->torn + peer->torn_got, data, (size_t)n);
        peer->link->ops->consume(peer->link, (size_t)n);
        peer->torn_got += (size_t)n;
        exec->moved = true;
    }
    if (peer->torn_got == elem_bytes && room >= elem_bytes) {
        combine(exec, step_at(exec, s), exec->states[s].done, peer->torn, elem_bytes);
        peer->torn_got = 0;
        exec_pass(exec, s, elem_bytes);
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
    ssize_t n = peer->link->ops->peek(peer->link, &data);
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
        peer->link->ops->consume(peer->link, bytes);
        exec_pass(exec, s, bytes);
    }
    return (ssize_t)bytes;
}

hvd_status_t exec_receive_from(exec_t *exec, peer_t *peer)
{
    net_link_t *link = peer->link;
    size_t budget = exec->segment_bytes;
    ssize_t n = 1;
    while (n > 0 && budget > 0 && peer->receives.head != NO_STEP) {
        const int32_t s = peer->receives.head;
        const step_t *step = step_at(exec, s);
        const state_t *state = &exec->states[s];
        if (peer->header_got < HEADER_BYTES) {
            n = read_header(exec, peer, step); // it costs no budget: segments stay whole
            continue;
        }
        if (state->waits_for > 0) {
            break;
        }
        const size_t room = MIN(limit_of(exec, s) - state->done, budget);
        if (step->bytes == 0) {
            exec_pass(exec, s, 0);
            n = HEADER_BYTES;
        } else if (step->kind != STEP_RECV) {
            n = take_elements(exec, peer, s, room);
        } else if (room == 0) {
            break;
        } else if ((n = link->ops->recv(link, place_of(exec, step->dst, step->dst_at + state->done),
                                        room)) > 0) {
            exec_pass(exec, s, (size_t)n);
        }
        if (n >= 0 && state->done == step->bytes) {
            peer->header_got = 0;
            exec_dequeue(exec, &peer->receives);
        }
        budget -= MIN(budget, (size_t)MAX(n, 0));
    }
    if (n >= 0) {
        return HVD_OK;
    }
    return exec->err.status != HVD_OK ? exec->err.status : broken(exec, peer, n, "receiving from");
}
