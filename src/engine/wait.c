// SPDX-License-Identifier: Apache-2.0
//
// wait.c - hvd_wait, hvd_poll, and the baton: who drives the engine.
//
// The engine is a set of state machines (coord, batches, links) that advance when somebody calls
// engine_step. Exactly one thread at a time may: the one that holds the baton. That is
//   - a thread inside hvd_wait, if there is one: it runs the operation it waits for itself, so a
//     small synchronous operation pays no hand-over between threads;
//   - otherwise the engine thread.
// The engine thread steps aside as soon as somebody waits, and while waiters come and go it only
// dozes, looking once a millisecond whether they have stopped coming. It never sleeps on an engine
// that has work: whoever lets go of the baton with requests in flight wakes it.
//
// Waiting is spin, then yield, then sleep: spinning only while the host has a core for every rank.
#define _GNU_SOURCE
#include "engine/staging.h"

#include <sched.h>
#include <stdlib.h>

#define DOZE_NS (1 * NS_PER_MS)
#define LONG_DOZE_NS (5 * NS_PER_S) // whoever drives rings when it stops
#define WAITER_SPIN_NS (200 * NS_PER_US)
#define THREAD_SPIN_NS (20 * NS_PER_US)
#define THREAD_SPIN_BUSY_NS (100 * NS_PER_US) // while a batch is running: peers answer soon
#define LONG_SLEEP_NS (10 * NS_PER_MS)
#define YIELD_AFTER_NS (10 * NS_PER_US)
#define CROWDED_SPINS 3
#define CROWDED_YIELDS 40
#define BATON_SPINS 2000
#define BATON_NS (10 * NS_PER_S)

// --- Driving -------------------------------------------------------------------------------------

static bool try_hold(hvd_ctx_t *ctx) TRY_ACQUIRES(true, ctx->baton);
static bool try_hold(hvd_ctx_t *ctx) NOT_ANALYSED
{
    int free_engine = 0;
    bool held = atomic_load_explicit(&ctx->baton.held, memory_order_relaxed) == 0 &&
                atomic_compare_exchange_strong(&ctx->baton.held, &free_engine, 1);
    if (held) {
        INVARIANT(atomic_load(&ctx->baton.holder.thread) == 0);
        owner_set(&ctx->baton.holder);
    }
    return held;
}

// The other half. Whoever calls it sees to it that somebody drives on if there is work.
static void release_hold(hvd_ctx_t *ctx) RELEASES(ctx->baton);
static void release_hold(hvd_ctx_t *ctx) NOT_ANALYSED
{
    HELD(ctx);
    owner_clear(&ctx->baton.holder);
    atomic_store(&ctx->baton.held, 0);
}

void baton_take(hvd_ctx_t *ctx) NOT_ANALYSED
{
    uint64_t deadline_ns = clock_ns() + BATON_NS;
    while (!try_hold(ctx) && clock_ns() < deadline_ns) { // whoever drives is about to let go
        sched_yield();
    }
}

void engine_wake_waiters(hvd_ctx_t *ctx)
{
    atomic_fetch_add(&ctx->baton.progress_word, 1);
    futex_wake(&ctx->baton.progress_word, INT32_MAX);
}

static void wake_thread(hvd_ctx_t *ctx)
{
    net_wake(ctx->net);
    // Once: it may need long to get a core, and whoever submits many must not ring for each.
    if (atomic_load(&ctx->baton.thread_dozes) && atomic_exchange(&ctx->baton.thread_dozes, false)) {
        atomic_fetch_add(&ctx->baton.duty_word, 1);
        futex_wake(&ctx->baton.duty_word, 1);
    }
}

void engine_nudge(hvd_ctx_t *ctx)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&ctx->baton.held) != 0) {
        net_wake(ctx->net);
    }
}

void engine_notify(hvd_ctx_t *ctx)
{
    atomic_thread_fence(memory_order_seq_cst); // the queue before the flags of the sleeper
    if (atomic_load(&ctx->baton.held) != 0) {
        net_wake(ctx->net); // whoever drives sees the queue, or wakes the thread when it lets go
    } else {
        wake_thread(ctx);
    }
}

typedef struct pause {
    uint64_t idle_since_ns;
    unsigned n_idle;
    bool slept_long; // the answer is not near: what wakes it now is mostly a heartbeat
} pause_t;

static uint64_t spin_ns(const hvd_ctx_t *ctx, const pause_t *p, bool is_waiter)
{
    if (ctx->config.spin_us >= 0) {
        return (uint64_t)(ctx->config.spin_us * NS_PER_US);
    }
    if (p->slept_long) {
        return ctx->running != NULL ? THREAD_SPIN_BUSY_NS : 0;
    }
    if (is_waiter) {
        return WAITER_SPIN_NS;
    }
    return ctx->running != NULL ? THREAD_SPIN_BUSY_NS : THREAD_SPIN_NS;
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
        bool is_quiet = p->slept_long && ctx->running == NULL;
        return p->n_idle > CROWDED_SPINS + (is_quiet ? 0 : CROWDED_YIELDS);
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
    return idle_ns > spin_ns(ctx, p, is_waiter);
}

static uint64_t wake_by_ns(const hvd_ctx_t *ctx, uint64_t deadline_ns)
{
    uint64_t tick_ns = MIN(coord_next_tick(ctx->coord), staging_next_look(ctx->staging));
    bool suspects = ctx->suspicion.status != HVD_OK && ctx->ended.status == HVD_OK;
    tick_ns = suspects ? MIN(tick_ns, ctx->suspect_until_ns) : tick_ns;
    return MIN(deadline_ns, tick_ns);
}

static void sleep_until(hvd_ctx_t *ctx, pause_t *p, unsigned ticket, uint64_t wake_by)
{
    uint64_t since_ns = clock_ns();
    net_sleep(ctx->net, ticket, wake_by);
    p->slept_long = clock_ns() - since_ns > LONG_SLEEP_NS;
}

// A waiter drives until its request is done or its time is up.
static bool drive_until(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns)
    REQUIRES(ctx->baton)
{
    pause_t p = {0};
    for (;;) {
        bool moved = engine_step(ctx);
        if (atomic_load_explicit(state, memory_order_acquire) == REQUEST_DONE) {
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
                sleep_until(ctx, &p, ticket, wake_by_ns(ctx, deadline_ns));
            }
        }
        net_after_sleep(ctx->net);
        keep_house(ctx, clock_ns());
        if (atomic_load_explicit(state, memory_order_acquire) == REQUEST_DONE) {
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
static void let_go(hvd_ctx_t *ctx) RELEASES(ctx->baton)
{
    unsigned lent = atomic_load_explicit(&ctx->baton.n_lent, memory_order_relaxed);
    atomic_store_explicit(&ctx->baton.n_lent, lent + 1,
                          memory_order_relaxed); // only the holder writes it
    release_hold(ctx);
    if (UNLIKELY(atomic_load(&ctx->baton.n_waiting) > 0)) {
        engine_wake_waiters(ctx);
    }
    if (UNLIKELY(atomic_load(&ctx->requests.n_in_flight) > 0 ||
                 atomic_load(&ctx->baton.wants_duty))) {
        wake_thread(ctx);
    }
}

static bool is_done(hvd_ctx_t *ctx, atomic_int *state)
{
    lock_take(&ctx->lock); // see request_complete
    bool done = atomic_load_explicit(state, memory_order_acquire) == REQUEST_DONE;
    lock_release(&ctx->lock);
    return done;
}

// Somebody else drives: waits for the request, or for the engine to become free.
static bool wait_in_line(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns,
                         bool *held_p) NOT_ANALYSED // it returns with the baton if *held_p
{
    int n_spins = 0;
    for (;;) {
        unsigned seen = atomic_load(&ctx->baton.progress_word);
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
        futex_wait(&ctx->baton.progress_word, seen, deadline_ns);
    }
}

bool engine_wait(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns) NOT_ANALYSED
{
    bool done = false, held = try_hold(ctx);
    if (UNLIKELY(!held)) {
        atomic_fetch_add(&ctx->baton.n_waiting, 1);
        engine_nudge(ctx); // whoever drives may sleep, and not have seen what we submitted
        done = wait_in_line(ctx, state, deadline_ns, &held);
        INVARIANT(atomic_load(&ctx->baton.n_waiting) > 0);
        atomic_fetch_sub(&ctx->baton.n_waiting, 1);
    }
    if (held) {
        if (UNLIKELY(atomic_load_explicit(&ctx->baton.thread_sleeps, memory_order_relaxed))) {
            wake_thread(ctx); // it shall doze instead: peers must not ring for it while we drive
        }
        done = drive_until(ctx, state, deadline_ns);
        let_go(ctx);
    }
    return done;
}

void engine_wait_a_little(hvd_ctx_t *ctx)
{
    unsigned seen = atomic_load(&ctx->baton.progress_word);
    futex_wait(&ctx->baton.progress_word, seen, clock_ns() + NS_PER_MS);
}

// --- The engine thread ---------------------------------------------------------------------------

// Drives until somebody waits, or there is nothing to do; then sleeps where peers can ring.
static void serve(hvd_ctx_t *ctx, pause_t *p) RELEASES(ctx->baton)
{
    p->n_idle = 0;
    INVARIANT(!atomic_load(&ctx->baton.thread_sleeps) && !atomic_load(&ctx->baton.thread_dozes));
    net_after_sleep(ctx->net);
    for (;;) {
        if (atomic_load_explicit(&ctx->baton.n_waiting, memory_order_relaxed) > 0 ||
            atomic_load(&ctx->baton.thread_stop)) {
            let_go(ctx);
            return;
        }
        if (engine_step(ctx)) {
            p->n_idle = 0;
            continue;
        }
        if (!pause_or_give_up(ctx, p, false)) {
            continue;
        }
        unsigned ticket = net_before_sleep(ctx->net);
        keep_house(ctx, clock_ns());
        if (engine_step(ctx) || !queue_is_empty(ctx)) {
            net_after_sleep(ctx->net);
            p->n_idle = 0;
            continue;
        }
        uint64_t wake_by = wake_by_ns(ctx, NEVER_NS);
        atomic_store(&ctx->baton.thread_sleeps, true);
        release_hold(ctx);
        if (atomic_load(&ctx->baton.n_waiting) == 0 && !atomic_load(&ctx->baton.thread_stop)) {
            sleep_until(ctx, p, ticket, wake_by);
        } else if (atomic_load(&ctx->baton.n_waiting) > 0) {
            engine_wake_waiters(ctx);
        }
        atomic_store(&ctx->baton.thread_sleeps, false);
        return;
    }
}

// Others drive: looks now and then whether they still do.
static void doze(hvd_ctx_t *ctx)
{
    unsigned lent = atomic_load(&ctx->baton.n_lent);
    unsigned ticket = atomic_load(&ctx->baton.duty_word);
    INVARIANT(!owner_is_me(&ctx->baton.holder) && !atomic_load(&ctx->baton.thread_sleeps));
    atomic_store(&ctx->baton.thread_dozes, true);
    bool held = atomic_load(&ctx->baton.held) != 0;
    bool work = !held && atomic_load(&ctx->requests.n_in_flight) > 0;
    if (!work && !atomic_load(&ctx->baton.thread_stop)) {
        futex_wait(&ctx->baton.duty_word, ticket, clock_ns() + DOZE_NS);
    }
    // One thread has driven all the while: it will say when it stops.
    if (atomic_load(&ctx->baton.n_lent) == lent && atomic_load(&ctx->baton.held) != 0 &&
        !atomic_load(&ctx->baton.thread_stop)) {
        ticket = atomic_load(&ctx->baton.duty_word);
        atomic_store(&ctx->baton.thread_dozes, true); // it may have been woken, and it still does
        atomic_store(&ctx->baton.wants_duty, true);
        if (atomic_load(&ctx->baton.held) != 0 && !atomic_load(&ctx->baton.thread_stop)) {
            futex_wait(&ctx->baton.duty_word, ticket, clock_ns() + LONG_DOZE_NS);
        }
        atomic_store(&ctx->baton.wants_duty, false);
    }
    atomic_store(&ctx->baton.thread_dozes, false);
}

static bool others_are_active(hvd_ctx_t *ctx, unsigned *lent)
{
    unsigned now = atomic_load(&ctx->baton.n_lent);
    bool active = now != *lent && atomic_load(&ctx->requests.n_in_flight) == 0;
    *lent = now;
    return active;
}

static void *engine_main(void *arg)
{
    hvd_ctx_t *ctx = arg;
    unsigned lent = 0;
    pause_t p = {0};
    while (!atomic_load(&ctx->baton.thread_stop)) {
        if (others_are_active(ctx, &lent) || !try_hold(ctx)) {
            doze(ctx);
        } else {
            serve(ctx, &p);
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

hvd_status_t engine_start(hvd_ctx_t *ctx, err_t *err) NOT_ANALYSED
{
    release_hold(ctx);
    int code = thread_start(&ctx->baton.thread, "hvd-engine", engine_main, ctx);
    if (code != 0) {
        baton_take(ctx);
        return thread_failed(err, code, "the engine thread");
    }
    ctx->baton.has_thread = true;
    bind_thread(ctx, ctx->baton.thread);
    return HVD_OK;
}

void engine_stop(hvd_ctx_t *ctx)
{
    INVARIANT(ctx->baton.has_thread);
    atomic_store(&ctx->baton.thread_stop, true);
    atomic_fetch_add(&ctx->baton.duty_word, 1);
    futex_wake(&ctx->baton.duty_word, 1);
    net_wake(ctx->net);
    pthread_join(ctx->baton.thread, NULL);
    ctx->baton.has_thread = false;
    baton_take(ctx);
}

// --- The public functions ------------------------------------------------------------------------

hvd_status_t hvd_wait(hvd_ctx_t *ctx, hvd_handle_t handle, int64_t timeout_ms)
{
    request_t *request;
    hvd_status_t status = request_of_handle(ctx, handle, &request);
    if (status != HVD_OK) {
        return status;
    }
    if (atomic_load_explicit(&request->board.waits, memory_order_relaxed)) {
        board_finish(ctx, request);
    }
    if (atomic_load_explicit(&request->state, memory_order_acquire) != REQUEST_DONE &&
        !engine_wait(ctx, &request->state, deadline_in_ms(timeout_ms))) {
        return HVD_TIMEOUT;
    }
    if (UNLIKELY(request->staged != NULL) && request->status == HVD_OK) {
        return staging_settle(request, deadline_in_ms(timeout_ms));
    }
    return request->status;
}

hvd_status_t hvd_poll(hvd_ctx_t *ctx, hvd_handle_t handle)
{
    request_t *request;
    hvd_status_t status = request_of_handle(ctx, handle, &request);
    if (status != HVD_OK) {
        return status;
    }
    if (atomic_load_explicit(&request->board.waits, memory_order_relaxed)) {
        board_finish(ctx, request);
        engine_notify(ctx); // nobody waits: the engine thread must see to it
    }
    bool done = atomic_load_explicit(&request->state, memory_order_acquire) == REQUEST_DONE;
    return done ? request->status : HVD_IN_PROGRESS;
}
