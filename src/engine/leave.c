// SPDX-License-Identifier: Apache-2.0
//
// leave.c - the end of a job.
//
// No rank may cut a link that another still needs to finish what was agreed before the shutdown. So
// a farewell, a frame without a body, goes up the tree when everyone below has finished, and comes
// down again from rank 0 when all have. Whoever has it may go.
// Threads: the holder of the engine.
#define _GNU_SOURCE
#include "engine/engine.h"

#include "wire/control.h"

#include <sched.h>

static bool is_gone(const control_link_t *c)
{
    return c->farewell_seen || c->link->err.status != HVD_OK;
}

// True when it is on its way, or nobody is there to hear it.
static bool say_farewell(hvd_ctx_t *ctx, int i) REQUIRES(ctx->baton)
{
    control_link_t *c = &ctx->control[i];
    const void *unsent;
    uint8_t frame[FRAME_HEADER_BYTES];
    if (coord_outgoing(ctx->coord, i, &unsent) > 0 && c->link->err.status == HVD_OK) {
        return false;
    }
    frame_write_header(frame, 0);
    if (c->farewell_sent < sizeof frame) {
        ssize_t n =
            c->link->ops->send(c->link, frame + c->farewell_sent, sizeof frame - c->farewell_sent);
        c->farewell_sent = n < 0 ? sizeof frame : c->farewell_sent + (size_t)n;
    }
    return c->farewell_sent == sizeof frame;
}

static void take_leave(hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    int n_parents = ctx->job.rank > 0 ? 1 : 0; // it comes first
    for (int i = n_parents; i < ctx->n_control; i++) {
        if (!is_gone(&ctx->control[i])) {
            return;
        }
    }
    if (n_parents > 0 && (!say_farewell(ctx, 0) || !is_gone(&ctx->control[0]))) {
        return;
    }
    bool all = true;
    for (int i = n_parents; i < ctx->n_control; i++) {
        all &= say_farewell(ctx, i);
    }
    ctx->has_left = all;
}

// The last part of a job that was shut down.
void finish_job(hvd_ctx_t *ctx)
{
    HELD(ctx);
    if (ctx->ended.status == HVD_OK && (ctx->running == NULL || clock_ns() >= ctx->ending_by_ns)) {
        end_job(ctx, ctx->ending.status, ctx->ending.text);
    }
    if (ctx->ended.status == HVD_SHUTDOWN && !ctx->has_left) {
        take_leave(ctx);
    }
}

// The caller is the only thread left. Sends what neighbours still have to know; a job that was shut
// down also waits for the others. Otherwise keeps reading from children until they have closed: a
// socket closed with unread bytes would cut theirs off.
void engine_drain(hvd_ctx_t *ctx, uint64_t deadline_ns)
{
    HELD(ctx);
    int lost = coord_end_rank(ctx->coord); // if one is: it is neither heard nor reached
    bool open = true;
    while (open && clock_ns() < deadline_ns) {
        net_progress(ctx->net);
        receive_frames(ctx, clock_ns());
        send_frames(ctx);
        finish_job(ctx);
        open = false;
        for (int i = 0; !ctx->has_left && i < ctx->n_control; i++) {
            const control_link_t *c = &ctx->control[i];
            const void *data;
            bool child = c->peer > ctx->job.rank;
            bool is_lost = ctx->ended.status == HVD_PEER_LOST && c->peer == lost;
            bool unsent = coord_outgoing(ctx->coord, i, &data) > 0;
            bool sockets = strcmp(c->link->transport, "shm") != 0;
            bool waits = ctx->ended.status == HVD_SHUTDOWN || (child && sockets);
            open |= c->link->err.status == HVD_OK && !is_lost && (unsent || waits);
        }
        if (open) {
            sched_yield();
        }
    }
}
