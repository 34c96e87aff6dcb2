// SPDX-License-Identifier: Apache-2.0
//
// engine.c - who drives, and what one step of driving is.
//
// The engine is a set of state machines (coord, batches, links) that advance when somebody calls
// engine_step. Exactly one thread at a time may: the one that holds the engine. That is
//   - a thread inside hvd_wait, if there is one: it runs the operation it waits for itself, so a
//     small synchronous operation pays no hand-over between threads;
//   - otherwise the engine thread.
// The engine thread steps aside as soon as somebody waits, and while waiters come and go it only
// dozes, looking once a millisecond whether they have stopped coming. It never sleeps on an engine
// that has work: whoever lets go of the engine with requests in flight wakes it.
//
// Waiting is spin, then yield, then sleep: spinning only while the host has a core for every rank.
#define _GNU_SOURCE
#include "engine/engine.h"

#include "wire/control.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#define DOZE_NS (1 * NS_PER_MS)
#define LONG_DOZE_NS (100 * NS_PER_MS)
#define HOUSEKEEPING_NS (10 * NS_PER_MS)
#define WAITER_SPIN_NS (200 * NS_PER_US)
#define THREAD_SPIN_NS (20 * NS_PER_US)
#define THREAD_SPIN_BUSY_NS (100 * NS_PER_US) // while a batch is running: peers answer soon
#define YIELD_AFTER_NS (10 * NS_PER_US)
#define CROWDED_SPINS 30
#define CROWDED_YIELDS 40
#define BATON_SPINS 2000
#define SUSPICION_NS (250 * NS_PER_MS)

// --- One step ------------------------------------------------------------------------------------

static void end_job(hvd_ctx_t *ctx, hvd_status_t status, const char *text)
{
    batches_drop(ctx);
    requests_end(ctx, status, text);
}

void engine_fail(hvd_ctx_t *ctx, const err_t *err)
{
    if (ctx->ended.status != HVD_OK) {
        return; // links of a job that is over may well break
    }
    log_debug(&ctx->log, "engine", "the job ends: %s", err->text);
    if (ctx->ending.status != HVD_OK) { // what still runs will not finish
        end_job(ctx, ctx->ending.status, ctx->ending.text);
        return;
    }
    coord_abort(ctx->coord, err->status, err->text);
}

// Every death cuts a control link, and whoever sees that tells the whole tree. Data links break as
// well when a rank that was told leaves before others have heard: taking that for the cause would
// name the wrong rank. So they count only if the tree stays silent. Neighbours of a rank that fell
// silent give it up at different times, up to a heartbeat apart, and the first to do so may leave.
void engine_suspect(hvd_ctx_t *ctx, const err_t *err)
{
    if (ctx->suspicion.status == HVD_OK) {
        ctx->suspicion = *err;
        uint64_t heartbeat_ns = (uint64_t)(ctx->config.heartbeat_interval * (double)NS_PER_S);
        ctx->suspect_until_ns = clock_ns() + MAX(SUSPICION_NS, heartbeat_ns + heartbeat_ns / 2);
    }
}

static coord_request_t as_coord_request(const request_t *r)
{
    const hvd_request_t *asked = &r->asked;
    return (coord_request_t){
        .set = asked->process_set,
        .name = asked->name,
        .name_bytes = strlen(asked->name),
        .signature = &r->signature,
        .sizes = r->sizes,
        .n_sizes = r->n_sizes,
        .payload = r->payload,
        .payload_bytes = r->payload_bytes,
        .tag = tag_of((request_t *)(uintptr_t)r),
    };
}

static void submit_one(hvd_ctx_t *ctx, request_t *r, uint64_t now_ns)
{
    err_t err;
    hvd_status_t status;
    if (r->meeting != 0) {
        batch_add_meeting(ctx, r);
        return;
    }
    if (r->ask == ASK_ADD_SET) {
        status = coord_add_set(ctx->coord, r->set_ranks, r->n_sizes, tag_of(r), now_ns, &err);
    } else if (r->ask == ASK_REMOVE_SET) {
        status = coord_remove_set(ctx->coord, r->set, tag_of(r), now_ns, &err);
    } else {
        coord_request_t request = as_coord_request(r);
        status = coord_submit(ctx->coord, &request, now_ns, &err);
    }
    if (UNLIKELY(status != HVD_OK)) {
        request_complete(ctx, r, status, err.text);
    }
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

static bool queue_is_empty(hvd_ctx_t *ctx)
{
    return atomic_load_explicit(&ctx->queue, memory_order_acquire) == NULL;
}

static bool take_queue(hvd_ctx_t *ctx)
{
    if (LIKELY(queue_is_empty(ctx))) {
        return false;
    }
    request_t *r = reversed(atomic_exchange_explicit(&ctx->queue, NULL, memory_order_acquire));
    uint64_t now_ns = ctx->now_ns = clock_ns(); // as last read it may lie before a long sleep
    while (r != NULL) {
        request_t *next = r->next;
        submit_one(ctx, r, now_ns);
        r = next;
    }
    return true;
}

// Gives coord every whole frame at `data`; returns the bytes used, or a negative status.
static ssize_t take_frames(hvd_ctx_t *ctx, control_link_t *c, const uint8_t *data, size_t bytes,
                           uint64_t now_ns, err_t *err)
{
    size_t used = 0, body;
    hvd_status_t status;
    while ((status = frame_read(data + used, bytes - used, &body, err)) == HVD_OK) {
        c->farewell_seen |= body == 0;
        if (body > 0) {
            TRY(coord_receive(ctx->coord, c->peer, data + used + FRAME_HEADER_BYTES, body, now_ns,
                              err),
                broken);
        }
        used += FRAME_HEADER_BYTES + body;
    }
    if (status == HVD_IN_PROGRESS) {
        return (ssize_t)used;
    }
    fail(err, status, "rank %d: %s", c->peer, err->text);
broken:
    return status;
}

// Frames mostly arrive whole and are read where they lie; torn ones are put together first.
static ssize_t receive_control(hvd_ctx_t *ctx, control_link_t *c, uint64_t now_ns, err_t *err)
{
    const void *data;
    ssize_t available = link_peek(c->link, &data);
    if (available <= 0) {
        return available;
    }
    if (c->partial.len == 0) {
        ssize_t used = take_frames(ctx, c, data, (size_t)available, now_ns, err);
        if (used < 0) {
            return used;
        }
        if (used > 0) {
            link_consume(c->link, (size_t)used);
            return used;
        }
    }
    if (buf_append(&c->partial, data, (size_t)available) == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a control frame from rank %d", c->peer);
    }
    link_consume(c->link, (size_t)available);
    ssize_t used = take_frames(ctx, c, c->partial.data, c->partial.len, now_ns, err);
    if (used > 0) {
        c->partial.len -= (size_t)used;
        memmove(c->partial.data, c->partial.data + used, c->partial.len);
    }
    return used < 0 ? used : available;
}

// A broken link counts after all have been read: another neighbour may know more of what happened.
static bool receive_frames(hvd_ctx_t *ctx, uint64_t now_ns)
{
    bool moved = false;
    err_t broken = {.status = HVD_OK};
    for (int i = 0; i < ctx->n_control; i++) {
        control_link_t *c = &ctx->control[i];
        err_t err;
        ssize_t n = receive_control(ctx, c, now_ns, &err);
        if (UNLIKELY(n < 0) && broken.status == HVD_OK) {
            broken = c->link->err.status != HVD_OK ? c->link->err : err;
        }
        moved |= n > 0;
    }
    if (UNLIKELY(broken.status != HVD_OK)) {
        engine_fail(ctx, &broken);
    }
    return moved;
}

static bool send_frames(hvd_ctx_t *ctx)
{
    bool moved = false;
    for (int i = 0; i < ctx->n_control; i++) {
        const void *bytes;
        size_t n = coord_outgoing(ctx->coord, i, &bytes);
        if (n == 0) {
            continue;
        }
        ssize_t sent = link_send(ctx->control[i].link, bytes, n);
        if (sent > 0) {
            coord_sent(ctx->coord, i, (size_t)sent);
            moved = true;
        } else if (UNLIKELY(sent < 0)) {
            coord_sent(ctx->coord, i, n); // nobody will read it
            engine_fail(ctx, &ctx->control[i].link->err);
        }
    }
    return moved;
}

static void complete_tag(hvd_ctx_t *ctx, const decision_t *d)
{
    if (d->tag == 0) {
        return;
    }
    request_t *request = request_of_tag(d->tag);
    request->last_joined = d->last_joined;
    request->set = d->set;
    bool with_job = d->kind == DECIDE_FAIL && d->status == ctx->cause.status;
    request_complete(ctx, request, d->kind == DECIDE_FAIL ? d->status : HVD_OK,
                     with_job ? ctx->cause.text : d->text);
}

static void carry_out(hvd_ctx_t *ctx, const decision_t *d)
{
    switch (d->kind) {
    case DECIDE_RUN:
        batch_add(ctx, d);
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
        log_warn(&ctx->log, "stall", "%s", d->text);
        observe_dump(ctx->observe, DUMP_STALL);
        break;
    case DECIDE_SILENT:
        watch_silence(ctx, d);
        break;
    case DECIDE_STUCK:
        watch_stuck(ctx, d);
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
static void note_end(hvd_ctx_t *ctx)
{
    err_t end;
    bool finishes_first = coord_has_ended(ctx->coord, &end) == HVD_SHUTDOWN && ctx->running != NULL;
    if (end.status != HVD_OK && ctx->cause.status == HVD_OK) {
        watch_explain_end(ctx, &end);
        ctx->cause = end;
    }
    if (end.status != HVD_OK && !finishes_first && ctx->ended.status == HVD_OK) {
        pthread_mutex_lock(&ctx->lock);
        ctx->ended = ctx->cause;
        pthread_mutex_unlock(&ctx->lock);
    }
}

static bool decide(hvd_ctx_t *ctx)
{
    bool moved = false;
    const decision_t *d;
    coord_form_batches(ctx->coord);
    while ((d = coord_next(ctx->coord)) != NULL) {
        note_end(ctx);
        carry_out(ctx, d);
        moved = true;
    }
    return moved;
}

// What need not happen in every step: slow links, lost peers, timers, a request to stop.
static void keep_house(hvd_ctx_t *ctx, uint64_t now_ns)
{
    err_t err;
    ctx->now_ns = MAX(ctx->now_ns, now_ns);
    if (ctx->ended.status == HVD_OK && net_health(ctx->net, LANE_CONTROL, &err) != HVD_OK) {
        receive_frames(ctx, now_ns); // whoever is gone may have said why
        decide(ctx);
        engine_fail(ctx, &err);
    }
    if (ctx->ended.status == HVD_OK && net_health(ctx->net, LANE_DATA, &err) != HVD_OK) {
        engine_suspect(ctx, &err);
    }
    if (UNLIKELY(ctx->suspicion.status != HVD_OK) && now_ns >= ctx->suspect_until_ns) {
        engine_fail(ctx, &ctx->suspicion);
    }
    if (atomic_load(&ctx->stop_requested) && !ctx->shutting_down) {
        coord_shutdown(ctx->coord, now_ns);
        ctx->shutting_down = true;
    }
    watch_progress(ctx, now_ns);
    if (UNLIKELY(!atomic_load_explicit(&ctx->hears_all, memory_order_relaxed)) &&
        coord_hears_all(ctx->coord)) {
        atomic_store(&ctx->hears_all, true);
        atomic_fetch_add(&ctx->progress_word, 1);
        futex_wake(&ctx->progress_word, INT32_MAX);
    }
    if (now_ns >= coord_next_tick(ctx->coord)) {
        coord_tick(ctx->coord, now_ns);
    }
    observe_gather(ctx->observe, ctx->coord, net_n_foreign(ctx->net), now_ns);
    ctx->next_housekeeping_ns = now_ns + HOUSEKEEPING_NS;
}

// --- Leaving -------------------------------------------------------------------------------------
// No rank may cut a link that another still needs to finish what was agreed before the shutdown. So
// a farewell, a frame without a body, goes up the tree when everyone below has finished, and comes
// down again from rank 0 when all have. Whoever has it may go.

static bool is_gone(const control_link_t *c)
{
    return c->farewell_seen || c->link->err.status != HVD_OK;
}

// True when it is on its way, or nobody is there to hear it.
static bool say_farewell(hvd_ctx_t *ctx, int i)
{
    control_link_t *c = &ctx->control[i];
    const void *unsent;
    uint8_t frame[FRAME_HEADER_BYTES];
    if (coord_outgoing(ctx->coord, i, &unsent) > 0 && c->link->err.status == HVD_OK) {
        return false;
    }
    frame_write_header(frame, 0);
    if (c->farewell_sent < sizeof frame) {
        ssize_t n = link_send(c->link, frame + c->farewell_sent, sizeof frame - c->farewell_sent);
        c->farewell_sent = n < 0 ? sizeof frame : c->farewell_sent + (size_t)n;
    }
    return c->farewell_sent == sizeof frame;
}

static void take_leave(hvd_ctx_t *ctx)
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
static void finish_job(hvd_ctx_t *ctx)
{
    if (ctx->ended.status == HVD_OK && (ctx->running == NULL || clock_ns() >= ctx->ending_by_ns)) {
        end_job(ctx, ctx->ending.status, ctx->ending.text);
    }
    if (ctx->ended.status == HVD_SHUTDOWN && !ctx->has_left) {
        take_leave(ctx);
    }
}

// --- Stepping ------------------------------------------------------------------------------------

// Advances everything that can advance. True if something did.
static bool engine_step(hvd_ctx_t *ctx)
{
    // What the program asks for goes on its way before others are looked at.
    bool taken = take_queue(ctx);
    if (taken) {
        decide(ctx);
        send_frames(ctx);
    }
    // The clock is read when sockets had news, and otherwise in every 64th step.
    bool moved = net_progress(ctx->net) > 0;
    if (moved || (++ctx->n_steps & 63) == 0) {
        ctx->now_ns = clock_ns();
        if (moved || ctx->now_ns >= ctx->next_housekeeping_ns ||
            ctx->now_ns >= coord_next_tick(ctx->coord) || atomic_load(&ctx->stop_requested)) {
            keep_house(ctx, ctx->now_ns);
        }
    }
    moved |= taken;
    moved |= receive_frames(ctx, ctx->now_ns);
    moved |= decide(ctx);
    moved |= send_frames(ctx);
    if (ctx->running != NULL && batches_progress(ctx)) {
        moved = true;
        ctx->moved_ns = ctx->now_ns;
        decide(ctx);
        send_frames(ctx);
    }
    if (UNLIKELY(ctx->ending.status != HVD_OK || ctx->ended.status != HVD_OK)) {
        finish_job(ctx);
    }
    if (atomic_load_explicit(&ctx->has_completed, memory_order_relaxed)) {
        atomic_store_explicit(&ctx->has_completed, false, memory_order_relaxed);
        requests_wake(ctx); // once for all of this step
    }
    return moved;
}

// --- Driving -------------------------------------------------------------------------------------

static bool try_hold(hvd_ctx_t *ctx)
{
    int free_engine = 0;
    return atomic_load_explicit(&ctx->held, memory_order_relaxed) == 0 &&
           atomic_compare_exchange_strong(&ctx->held, &free_engine, 1);
}

static void wake_thread(hvd_ctx_t *ctx)
{
    net_wake(ctx->net);
    if (atomic_load(&ctx->thread_dozes)) {
        atomic_fetch_add(&ctx->duty_word, 1);
        futex_wake(&ctx->duty_word, 1);
    }
}

void engine_nudge(hvd_ctx_t *ctx)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&ctx->held) != 0) {
        net_wake(ctx->net);
    }
}

void engine_notify(hvd_ctx_t *ctx)
{
    atomic_thread_fence(memory_order_seq_cst); // the queue before the flags of the sleeper
    if (atomic_load(&ctx->held) != 0) {
        net_wake(ctx->net); // whoever drives sees the queue, or wakes the thread when it lets go
    } else {
        wake_thread(ctx);
    }
}

typedef struct pause {
    uint64_t idle_since_ns;
    unsigned n_idle;
} pause_t;

static uint64_t spin_ns(const hvd_ctx_t *ctx, bool is_waiter)
{
    if (ctx->config.spin_us >= 0) {
        return (uint64_t)(ctx->config.spin_us * NS_PER_US);
    }
    if (is_waiter) {
        return WAITER_SPIN_NS;
    }
    if (ctx->running != NULL) {
        return THREAD_SPIN_BUSY_NS;
    }
    return THREAD_SPIN_NS;
}

// One breath of waiting. True when it is time to sleep.
static bool pause_or_give_up(hvd_ctx_t *ctx, pause_t *p, bool is_waiter)
{
    p->n_idle++;
    if (net_oversubscribed(ctx->net)) {
        if (p->n_idle > CROWDED_SPINS) {
            sched_yield();
        } else {
            cpu_relax();
        }
        return p->n_idle > CROWDED_SPINS + CROWDED_YIELDS;
    }
    cpu_relax();
    if ((p->n_idle & 31) != 0) {
        return false;
    }
    uint64_t now_ns = clock_ns();
    if (p->n_idle == 32) {
        p->idle_since_ns = now_ns;
    }
    uint64_t idle_ns = now_ns - p->idle_since_ns;
    core_use_t use = net_core_use(ctx->net);
    if (use == CORE_SHARED) {
        net_part_cores(ctx->net, now_ns);
    }
    // The one we wait for may sit on this very core; the engine thread's user surely does, unless
    // there is a core for both. Otherwise a yield would only hand the core to a stranger.
    if (use == CORE_SHARED || (use == CORE_UNKNOWN && idle_ns > YIELD_AFTER_NS) ||
        !(is_waiter || net_has_spare_cores(ctx->net))) {
        sched_yield();
    }
    return idle_ns > spin_ns(ctx, is_waiter);
}

static uint64_t wake_by_ns(const hvd_ctx_t *ctx, uint64_t deadline_ns)
{
    uint64_t tick_ns = coord_next_tick(ctx->coord);
    bool suspects = ctx->suspicion.status != HVD_OK && ctx->ended.status == HVD_OK;
    tick_ns = suspects ? MIN(tick_ns, ctx->suspect_until_ns) : tick_ns;
    return MIN(deadline_ns, tick_ns);
}

// A waiter drives until its request is done or its time is up.
static bool drive_until(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns)
{
    pause_t p = {0};
    for (;;) {
        bool moved = engine_step(ctx);
        if (atomic_load_explicit(state, memory_order_relaxed) == REQUEST_DONE) {
            return true;
        }
        if (moved) {
            p.n_idle = 0;
            continue;
        }
        if (!pause_or_give_up(ctx, &p, true)) {
            continue;
        }
        unsigned ticket = net_before_sleep(ctx->net);
        if (!engine_step(ctx) && queue_is_empty(ctx)) {
            keep_house(ctx, clock_ns());
            if (!engine_step(ctx)) {
                net_sleep(ctx->net, ticket, wake_by_ns(ctx, deadline_ns));
            }
        }
        net_after_sleep(ctx->net);
        keep_house(ctx, clock_ns());
        if (atomic_load_explicit(state, memory_order_relaxed) == REQUEST_DONE) {
            return true;
        }
        if (clock_ns() >= deadline_ns) {
            return false;
        }
        p.n_idle = 0;
    }
}

// Somebody must drive on if there is work. Threads in line may leave without driving (what they
// waited for may be done), so the engine thread is told as well.
static void let_go(hvd_ctx_t *ctx)
{
    unsigned lent = atomic_load_explicit(&ctx->n_lent, memory_order_relaxed);
    atomic_store_explicit(&ctx->n_lent, lent + 1,
                          memory_order_relaxed); // only the holder writes it
    atomic_store(&ctx->held, 0);
    if (UNLIKELY(atomic_load(&ctx->n_waiting) > 0)) {
        atomic_fetch_add(&ctx->progress_word, 1);
        futex_wake(&ctx->progress_word, INT32_MAX);
    }
    if (UNLIKELY(atomic_load(&ctx->in_flight) > 0 || atomic_load(&ctx->wants_duty))) {
        wake_thread(ctx);
    }
}

static bool drive_as_waiter(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns)
{
    if (UNLIKELY(atomic_load_explicit(&ctx->thread_sleeps, memory_order_relaxed))) {
        wake_thread(ctx); // it shall doze instead: peers must not ring for it while we drive
    }
    bool done = drive_until(ctx, state, deadline_ns);
    let_go(ctx);
    return done;
}

static bool is_done(hvd_ctx_t *ctx, atomic_int *state)
{
    pthread_mutex_lock(&ctx->lock); // see request_complete
    bool done = atomic_load_explicit(state, memory_order_acquire) == REQUEST_DONE;
    pthread_mutex_unlock(&ctx->lock);
    return done;
}

// Somebody else drives: waits for the request, or for the engine to become free.
static bool wait_in_line(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns, bool *held_p)
{
    int n_spins = 0;
    for (;;) {
        unsigned seen = atomic_load(&ctx->progress_word);
        bool spins = n_spins++ < BATON_SPINS && !net_oversubscribed(ctx->net);
        if ((!spins || atomic_load(state) == REQUEST_DONE) && is_done(ctx, state)) {
            return true;
        }
        if ((*held_p = try_hold(ctx))) {
            return false;
        }
        if (spins) {
            cpu_relax(); // the engine thread lets go as soon as it sees n_waiting
            continue;
        }
        if (clock_ns() >= deadline_ns) {
            return false;
        }
        futex_wait(&ctx->progress_word, seen, deadline_ns);
    }
}

bool engine_wait(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns)
{
    if (LIKELY(try_hold(ctx))) {
        return drive_as_waiter(ctx, state, deadline_ns);
    }
    bool held = false;
    atomic_fetch_add(&ctx->n_waiting, 1);
    engine_nudge(ctx); // whoever drives may sleep, and not have seen what we submitted
    bool done = wait_in_line(ctx, state, deadline_ns, &held);
    atomic_fetch_sub(&ctx->n_waiting, 1);
    return held ? drive_as_waiter(ctx, state, deadline_ns) : done;
}

// --- The engine thread ---------------------------------------------------------------------------

// Drives until somebody waits, or there is nothing to do; then sleeps where peers can ring.
static void serve(hvd_ctx_t *ctx)
{
    pause_t p = {0};
    net_after_sleep(ctx->net);
    for (;;) {
        if (atomic_load_explicit(&ctx->n_waiting, memory_order_relaxed) > 0 ||
            atomic_load(&ctx->thread_stop)) {
            let_go(ctx);
            return;
        }
        if (engine_step(ctx)) {
            p.n_idle = 0;
            continue;
        }
        if (!pause_or_give_up(ctx, &p, false)) {
            continue;
        }
        unsigned ticket = net_before_sleep(ctx->net);
        keep_house(ctx, clock_ns());
        if (engine_step(ctx) || !queue_is_empty(ctx)) {
            net_after_sleep(ctx->net);
            p.n_idle = 0;
            continue;
        }
        uint64_t wake_by = wake_by_ns(ctx, NEVER_NS);
        atomic_store(&ctx->thread_sleeps, true);
        atomic_store(&ctx->held, 0);
        if (atomic_load(&ctx->n_waiting) == 0 && !atomic_load(&ctx->thread_stop)) {
            net_sleep(ctx->net, ticket, wake_by);
        } else if (atomic_load(&ctx->n_waiting) > 0) {
            atomic_fetch_add(&ctx->progress_word, 1);
            futex_wake(&ctx->progress_word, INT32_MAX);
        }
        atomic_store(&ctx->thread_sleeps, false);
        return;
    }
}

// Others drive: looks now and then whether they still do.
static void doze(hvd_ctx_t *ctx)
{
    unsigned lent = atomic_load(&ctx->n_lent);
    unsigned ticket = atomic_load(&ctx->duty_word);
    atomic_store(&ctx->thread_dozes, true);
    bool held = atomic_load(&ctx->held) != 0;
    bool work = !held && atomic_load(&ctx->in_flight) > 0;
    if (!work && !atomic_load(&ctx->thread_stop)) {
        futex_wait(&ctx->duty_word, ticket, clock_ns() + DOZE_NS);
    }
    // One thread has driven all the while: it will say when it stops.
    if (atomic_load(&ctx->n_lent) == lent && atomic_load(&ctx->held) != 0 &&
        !atomic_load(&ctx->thread_stop)) {
        ticket = atomic_load(&ctx->duty_word);
        atomic_store(&ctx->wants_duty, true);
        if (atomic_load(&ctx->held) != 0 && !atomic_load(&ctx->thread_stop)) {
            futex_wait(&ctx->duty_word, ticket, clock_ns() + LONG_DOZE_NS);
        }
        atomic_store(&ctx->wants_duty, false);
    }
    atomic_store(&ctx->thread_dozes, false);
}

static bool others_are_active(hvd_ctx_t *ctx, unsigned *lent)
{
    unsigned now = atomic_load(&ctx->n_lent);
    bool active = now != *lent && atomic_load(&ctx->in_flight) == 0;
    *lent = now;
    return active;
}

static void *engine_main(void *arg)
{
    hvd_ctx_t *ctx = arg;
    unsigned lent = 0;
    while (!atomic_load(&ctx->thread_stop)) {
        if (others_are_active(ctx, &lent) || !try_hold(ctx)) {
            doze(ctx);
        } else {
            serve(ctx);
        }
    }
    return NULL;
}

static void bind_thread(hvd_ctx_t *ctx, pthread_t thread)
{
    const char *list = ctx->config.thread_affinity;
    if (list == NULL || list[0] == '\0') {
        return;
    }
    int core = -1;
    const char *at = list;
    for (int i = 0; at != NULL && i <= ctx->job.local_rank; i++) {
        core = (int)strtol(at, NULL, 10);
        at = strchr(at, ',');
        at = at != NULL ? at + 1 : NULL;
        core = i == ctx->job.local_rank ? core : -1;
    }
    cpu_set_t set;
    CPU_ZERO(&set);
    if (core >= 0) {
        CPU_SET((size_t)core, &set);
    }
    if (core < 0 || pthread_setaffinity_np(thread, sizeof set, &set) != 0) {
        log_error(&ctx->log, "engine",
                  "HOROVOD_THREAD_AFFINITY '%s' has no usable core for local rank %d", list,
                  ctx->job.local_rank);
    }
}

hvd_status_t engine_start(hvd_ctx_t *ctx, err_t *err)
{
    int code = thread_start(&ctx->thread, "hvd-engine", engine_main, ctx);
    if (code != 0) {
        return thread_failed(err, code, "the engine thread");
    }
    ctx->has_thread = true;
    bind_thread(ctx, ctx->thread);
    return HVD_OK;
}

void engine_stop(hvd_ctx_t *ctx)
{
    if (!ctx->has_thread) {
        return;
    }
    atomic_store(&ctx->thread_stop, true);
    atomic_fetch_add(&ctx->duty_word, 1);
    futex_wake(&ctx->duty_word, 1);
    net_wake(ctx->net);
    pthread_join(ctx->thread, NULL);
    ctx->has_thread = false;
}

// The caller is the only thread left. Sends what neighbours still have to know; a job that was shut
// down also waits for the others. Otherwise keeps reading from children until they have closed: a
// socket closed with unread bytes would cut theirs off.
void engine_drain(hvd_ctx_t *ctx, uint64_t deadline_ns)
{
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
            bool unsent = coord_outgoing(ctx->coord, i, &data) > 0;
            bool sockets = strcmp(c->link->transport, "shm") != 0;
            bool waits = ctx->ended.status == HVD_SHUTDOWN || (child && sockets);
            open |= c->link->err.status == HVD_OK && (unsent || waits);
        }
        if (open) {
            sched_yield();
        }
    }
}
