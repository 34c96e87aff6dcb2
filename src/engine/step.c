// SPDX-License-Identifier: Apache-2.0
//
// step.c - one step of driving the engine: take what was submitted, agree, run, tell.
//
//   take   requests out of the queue, to coord (or, agreed by the board, straight to be run)
//   agree  frames from neighbours to coord; batches formed; decisions carried out; frames sent
//   run    the oldest batch moves on
//   tell   waiters of what has been completed
//
// Besides, every ten milliseconds, housekeeping: timers, slow links, lost peers, a request to stop.
// Threads: the holder of the engine.
#define _GNU_SOURCE
#include "engine/staging.h"

#include "wire/control.h"

#define HOUSEKEEPING_NS (10 * NS_PER_MS)
#define SUSPICION_NS (250 * NS_PER_MS)

// --- How a job ends ------------------------------------------------------------------------------

void end_job(hvd_ctx_t *ctx, hvd_status_t status, const char *text)
{
    HELD(ctx);
    batches_drop(ctx);
    if (status != HVD_SHUTDOWN) {
        staging_cut(ctx->staging);
    }
    requests_end(ctx, status, text);
}

void engine_fail(hvd_ctx_t *ctx, const err_t *err, int rank)
{
    HELD(ctx);
    if (ctx->ended.status != HVD_OK) {
        return; // links of a job that is over may well break
    }
    log_debug(&ctx->log, "engine", "the job ends: %s", err->text);
    if (ctx->ending.status != HVD_OK) { // what still runs will not finish
        end_job(ctx, ctx->ending.status, ctx->ending.text);
        return;
    }
    coord_abort(ctx->coord, err->status, rank, err->text);
}

// Every death cuts a control link, and whoever sees that tells the whole tree. Data links break as
// well when a rank that was told leaves before others have heard: taking that for the cause would
// name the wrong rank. So they count only if the tree stays silent. Neighbours of a rank that fell
// silent give it up at different times, up to a heartbeat apart, and the first to do so may leave.
void engine_suspect(hvd_ctx_t *ctx, const err_t *err)
{
    HELD(ctx);
    if (ctx->suspicion.status == HVD_OK) {
        ctx->suspicion = *err;
        uint64_t heartbeat_ns = (uint64_t)(ctx->config.heartbeat_interval * (double)NS_PER_S);
        ctx->suspect_until_ns = clock_ns() + MAX(SUSPICION_NS, heartbeat_ns + heartbeat_ns / 2);
    }
}

// --- Take ----------------------------------------------------------------------------------------

static coord_request_t asked_of_coord(request_t *r)
{
    return (coord_request_t){
        .set = r->process_set,
        .name = r->name,
        .name_bytes = strlen(r->name),
        .signature = &r->signature,
        .sizes = r->sizes,
        .n_sizes = r->n_sizes,
        .payload = r->payload,
        .payload_bytes = r->payload_bytes,
        .tag = tag_of(r),
    };
}

static hvd_status_t change_sets(hvd_ctx_t *ctx, request_t *r, uint64_t now_ns, err_t *err)
    REQUIRES(ctx->baton)
{
    return r->signature.op == OP_ADD_SET
               ? coord_add_set(ctx->coord, r->set_ranks, r->n_set_ranks, tag_of(r), now_ns, err)
               : coord_remove_set(ctx->coord, r->set, tag_of(r), now_ns, err);
}

static request_t *reversed(request_t *newest)
{
    request_t *oldest = NULL;
    while (newest != NULL) {
        request_t *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    return oldest;
}

bool queue_is_empty(hvd_ctx_t *ctx)
{
    return atomic_load_explicit(&ctx->requests.queue, memory_order_acquire) == NULL;
}

static bool take_queue(hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    if (LIKELY(queue_is_empty(ctx))) {
        return false;
    }
    request_t *r =
        reversed(atomic_exchange_explicit(&ctx->requests.queue, NULL, memory_order_acquire));
    uint64_t now_ns = ctx->now_ns = clock_ns(); // as last read it may lie before a long sleep
    while (r != NULL) {
        request_t *next = r->next;
        hvd_status_t status = HVD_OK;
        err_t err;
        if (r->board.stream != 0) {
            run_board_stream(ctx, r);
        } else if (UNLIKELY(op_is_about_sets(r->signature.op))) {
            status = change_sets(ctx, r, now_ns, &err);
        } else {
            coord_request_t asked = asked_of_coord(r);
            status = coord_submit(ctx->coord, &asked, now_ns, &err);
        }
        if (UNLIKELY(status != HVD_OK)) {
            request_complete(ctx, r, status, err.text);
        }
        r = next;
    }
    return true;
}

// --- Agree ---------------------------------------------------------------------------------------

// The beginning of a frame whose rest has not come.
static hvd_status_t keep_torn(control_link_t *c, const void *data, size_t bytes, err_t *err)
{
    if (buf_append(&c->partial, data, bytes) == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a control frame from rank %d", c->peer);
    }
    c->link->ops->consume(c->link, bytes);
    return HVD_OK;
}

// Gives coord every whole frame that has come. Frames mostly arrive whole and are read where they
// lie; a torn one is put together first. Returns as a link's mover does.
static ssize_t receive_control(hvd_ctx_t *ctx, control_link_t *c, uint64_t now_ns, err_t *err)
    REQUIRES(ctx->baton)
{
    net_link_t *link = c->link;
    const void *data;
    ssize_t available = link->ops->peek(link, &data);
    if (available <= 0) {
        return available;
    }
    hvd_status_t status;
    bool torn = c->partial.len > 0;
    if (torn) {
        TRY(keep_torn(c, data, (size_t)available, err), broken);
    }
    const uint8_t *frames = torn ? c->partial.data : data;
    size_t bytes = torn ? c->partial.len : (size_t)available;
    size_t used = 0, body;
    while ((status = frame_read(frames + used, bytes - used, &body, err)) == HVD_OK) {
        c->farewell_seen |= body == 0;
        if (body > 0) {
            TRY(coord_receive(ctx->coord, c->peer, frames + used + FRAME_HEADER_BYTES, body, now_ns,
                              err),
                broken);
        }
        used += FRAME_HEADER_BYTES + body;
    }
    if (status != HVD_IN_PROGRESS) {
        fail(err, status, "rank %d: %s", c->peer, err->text);
        goto broken;
    }
    if (torn && used > 0) {
        c->partial.len -= used;
        memmove(c->partial.data, c->partial.data + used, c->partial.len);
    } else if (!torn && used > 0) {
        link->ops->consume(link, used);
    } else if (!torn) {
        TRY(keep_torn(c, data, bytes, err), broken);
    }
    return available;
broken:
    return status;
}

// A broken link counts after all have been read: another neighbour may know more of what happened.
bool receive_frames(hvd_ctx_t *ctx, uint64_t now_ns)
{
    HELD(ctx);
    bool moved = false;
    err_t broken = {.status = HVD_OK};
    int culprit = -1;
    for (int i = 0; i < ctx->n_control; i++) {
        control_link_t *c = &ctx->control[i];
        err_t err;
        ssize_t n = receive_control(ctx, c, now_ns, &err);
        if (UNLIKELY(n < 0) && broken.status == HVD_OK) {
            broken = c->link->err.status != HVD_OK ? c->link->err : err;
            culprit = c->peer;
        }
        moved |= n > 0;
    }
    if (UNLIKELY(broken.status != HVD_OK)) {
        engine_fail(ctx, &broken, culprit);
    }
    return moved;
}

bool send_frames(hvd_ctx_t *ctx)
{
    HELD(ctx);
    bool moved = false;
    for (int i = 0; i < ctx->n_control; i++) {
        const void *bytes;
        size_t n = coord_outgoing(ctx->coord, i, &bytes);
        if (n == 0) {
            continue;
        }
        net_link_t *link = ctx->control[i].link;
        ssize_t sent = link->ops->send(link, bytes, n);
        if (sent > 0) {
            coord_sent(ctx->coord, i, (size_t)sent);
            moved = true;
        } else if (UNLIKELY(sent < 0)) {
            coord_sent(ctx->coord, i, n); // nobody will read it
            engine_fail(ctx, &link->err, ctx->control[i].peer);
        }
    }
    return moved;
}

static void complete_tag(hvd_ctx_t *ctx, const decision_t *d) REQUIRES(ctx->baton)
{
    if (d->tag == 0) {
        return;
    }
    request_t *request = request_of_tag(d->tag);
    request->last_joined = d->last_joined;
    request->set = d->set;
    if (UNLIKELY(d->kind == DECIDE_FAIL && d->status == HVD_UNSUPPORTED)) {
        staging_go_by_host(ctx, request);
        return;
    }
    bool with_job = d->kind == DECIDE_FAIL && d->status == ctx->cause.status;
    request_complete(ctx, request, d->kind == DECIDE_FAIL ? d->status : HVD_OK,
                     with_job ? ctx->cause.text : d->text);
}

// Line by line, once for the job; but each rank says where it is when it has been long.
static void log_report(const hvd_ctx_t *ctx, const char *text)
{
    while (*text != '\0') {
        size_t bytes = strcspn(text, "\n");
        log_at(&ctx->log, ctx->job.rank == 0 ? LOG_WARN : LOG_INFO, "stall", "%.*s", (int)bytes,
               text);
        text += bytes + (text[bytes] == '\n');
    }
}

// What is decided besides running a batch.
static void carry_out(hvd_ctx_t *ctx, const decision_t *d) REQUIRES(ctx->baton)
{
    switch (d->kind) {
    case DECIDE_RUN:
        break;
    case DECIDE_SET_ADDED:
        set_register(ctx, d->set);
        complete_tag(ctx, d);
        break;
    case DECIDE_SET_REMOVED:
        set_forget(ctx, d->set);
        complete_tag(ctx, d);
        break;
    case DECIDE_JOINED:
        sets_count_anew(ctx);
        complete_tag(ctx, d);
        break;
    case DECIDE_FAIL:
        complete_tag(ctx, d);
        break;
    case DECIDE_REPORT:
        log_report(ctx, d->text);
        if (d->status == HVD_STALLED) {
            observe_dump(ctx->observe, DUMP_STALL);
        }
        break;
    case DECIDE_SILENT:
        report_silence(ctx, d);
        break;
    case DECIDE_STUCK:
        report_stuck(ctx, d);
        break;
    case DECIDE_ENDED:
        if (d->status == HVD_SHUTDOWN && ctx->running != NULL) {
            // What was agreed before is finished: all members are there and will do their part.
            ctx->ending = ctx->cause;
            ctx->ending_by_ns =
                clock_ns() + (uint64_t)(ctx->config.peer_timeout * (double)NS_PER_S);
        } else {
            end_job(ctx, d->status, ctx->cause.text);
        }
        break;
    }
}

// Nobody shall find a request that failed with the job in a job that still looks healthy.
static void note_end(hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    err_t end;
    bool finishes_first = coord_has_ended(ctx->coord, &end) == HVD_SHUTDOWN && ctx->running != NULL;
    if (end.status != HVD_OK && ctx->cause.status == HVD_OK) {
        explain_end(ctx, &end);
        ctx->cause = end;
    }
    if (end.status != HVD_OK && !finishes_first && ctx->ended.status == HVD_OK) {
        lock_take(&ctx->lock);
        ctx->ended = ctx->cause;
        lock_release(&ctx->lock);
    }
}

// What coord has been told becomes batches, decisions, and bytes for the neighbours.
static bool agree(hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    bool moved = false;
    const decision_t *d;
    coord_form_batches(ctx->coord);
    while ((d = coord_next(ctx->coord)) != NULL) {
        note_end(ctx);
        if (LIKELY(d->kind == DECIDE_RUN)) {
            run_decided(ctx, d);
        } else {
            carry_out(ctx, d);
        }
        moved = true;
    }
    return send_frames(ctx) || moved;
}

// --- Now and then --------------------------------------------------------------------------------

// What need not happen in every step: slow links, lost peers, timers, a request to stop.
void keep_house(hvd_ctx_t *ctx, uint64_t now_ns)
{
    HELD(ctx);
    err_t err;
    int peer;
    char reason[sizeof ctx->blame.own];
    ctx->now_ns = MAX(ctx->now_ns, now_ns);
    if (ctx->ended.status == HVD_OK && net_health(ctx->net, LANE_CONTROL, &peer, &err) != HVD_OK) {
        receive_frames(ctx, now_ns); // whoever is gone may have said why
        agree(ctx);
        engine_fail(ctx, &err, peer);
    }
    if (ctx->ended.status == HVD_OK && net_health(ctx->net, LANE_DATA, &peer, &err) != HVD_OK) {
        engine_suspect(ctx, &err);
    }
    if (UNLIKELY(ctx->suspicion.status != HVD_OK) && now_ns >= ctx->suspect_until_ns) {
        engine_fail(ctx, &ctx->suspicion, -1);
    }
    if (atomic_load(&ctx->stop_requested) && !ctx->shutting_down) {
        lock_take(&ctx->lock);
        memcpy(reason, ctx->blame.own, sizeof reason);
        lock_release(&ctx->lock);
        coord_shutdown(ctx->coord, reason, now_ns);
        ctx->shutting_down = true;
    }
    tell_activity(ctx, now_ns);
    staging_watch(ctx);
    if (UNLIKELY(!atomic_load_explicit(&ctx->hears_all, memory_order_relaxed)) &&
        coord_hears_all(ctx->coord)) {
        atomic_store(&ctx->hears_all, true);
        engine_wake_waiters(ctx);
    }
    if (now_ns >= coord_next_tick(ctx->coord)) {
        receive_frames(ctx, now_ns); // nobody is silent whose words have come
        coord_tick(ctx->coord, now_ns);
    }
    observe_gather(ctx->observe, ctx->coord, net_n_foreign(ctx->net), now_ns);
    ctx->next_housekeeping_ns = now_ns + HOUSEKEEPING_NS;
}

// --- One step ------------------------------------------------------------------------------------

// Housekeeping, when it is due. The clock is read when sockets had news, and otherwise in every
// 64th step.
static void look_at_clock(hvd_ctx_t *ctx, bool has_news) REQUIRES(ctx->baton)
{
    if (!has_news && (++ctx->n_steps & 63) != 0) {
        return;
    }
    ctx->now_ns = clock_ns();
    if (has_news || ctx->now_ns >= ctx->next_housekeeping_ns ||
        ctx->now_ns >= coord_next_tick(ctx->coord) || atomic_load(&ctx->stop_requested)) {
        keep_house(ctx, ctx->now_ns);
    }
}

static void tell(hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    if (atomic_load_explicit(&ctx->baton.has_completed, memory_order_relaxed)) {
        atomic_store_explicit(&ctx->baton.has_completed, false, memory_order_relaxed);
        requests_wake(ctx); // once for all of this step
    }
}

bool engine_step(hvd_ctx_t *ctx)
{
    HELD(ctx);
    // What the program asks for goes on its way before others are looked at.
    bool taken = take_queue(ctx);
    if (taken) {
        agree(ctx);
    }
    bool moved = net_progress(ctx->net) > 0;
    look_at_clock(ctx, moved);
    moved |= receive_frames(ctx, ctx->now_ns);
    moved |= agree(ctx);
    if (ctx->running != NULL && run_progress(ctx)) {
        moved = true;
        ctx->moved_ns = ctx->now_ns;
        agree(ctx);
    }
    if (UNLIKELY(ctx->ending.status != HVD_OK || ctx->ended.status != HVD_OK)) {
        finish_job(ctx);
    }
    tell(ctx);
    return moved || taken;
}
