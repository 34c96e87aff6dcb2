// SPDX-License-Identifier: Apache-2.0
//
// failure_text.c - what this rank tells of itself, and how a silent rank is described.
//
// coord/ counts heartbeats; here they get their content (which operation was submitted last, and
// how long ago; what runs, and how long ago something of it moved) and their meaning: a neighbour
// that stays silent is looked up in the process table if it runs on this host, and named with rank,
// host and pid.
//
// Submitting only counts and remembers which request was the newest; names and times are read from
// there a few times a second, so the way of an operation pays nothing for it. A request object
// keeps its name until it is used again, and is then the newest itself.
// Thread: the holder of the engine.
#include "engine/engine.h"

#include <stdio.h>

#define PROGRESS_NS (250 * NS_PER_MS)

// What runs here, and since when nothing of it has moved. Links that are being made count as
// moving: how long that may take has limits of its own. What the board agreed to is not told of:
// it needs nothing but shared memory.
static coord_progress_t look_at_batch(hvd_ctx_t *ctx, uint64_t now_ns) REQUIRES(ctx->baton)
{
    const batch_t *batch = ctx->running;
    coord_progress_t progress = {0};
    char who[PEER_TEXT_BYTES], what[160];
    if (batch == NULL || batch->by_board) {
        return progress;
    }
    progress.is_running = true;
    progress.batch = batch->number;
    progress.least_ns = net_is_opening(ctx->net) ? 0 : now_ns - MIN(ctx->moved_ns, now_ns);
    progress.longest_ns = progress.least_ns;
    if (progress.longest_ns >= PROGRESS_NS && run_describe(ctx, what, sizeof what)) {
        snprintf(progress.text, sizeof progress.text, "%s waits in '%.64s': %s",
                 peer_name(&ctx->peers, ctx->job.rank, who), batch->entries[0].name, what);
    }
    return progress;
}

void tell_activity(hvd_ctx_t *ctx, uint64_t now_ns)
{
    HELD(ctx);
    if (now_ns < ctx->next_activity_ns) {
        return;
    }
    coord_activity_t activity = {0};
    lock_take(&ctx->lock);
    activity.n_submitted = ctx->requests.n_submitted;
    if (ctx->requests.newest != NULL) {
        snprintf(activity.last, sizeof activity.last, "%s", ctx->requests.newest->name);
    }
    lock_release(&ctx->lock);
    activity.n_in_flight = (uint32_t)MAX(atomic_load(&ctx->requests.n_in_flight), 0);
    if (activity.n_submitted != ctx->n_submitted_seen || ctx->quiet_since_ns == 0) {
        ctx->n_submitted_seen = activity.n_submitted;
        ctx->quiet_since_ns = now_ns;
    }
    activity.quiet_ns = now_ns - ctx->quiet_since_ns;
    coord_progress_t progress = look_at_batch(ctx, now_ns);
    coord_set_activity(ctx->coord, &activity);
    coord_set_progress(ctx->coord, &progress);
    ctx->next_activity_ns = now_ns + PROGRESS_NS;
}

static void describe_silence(const hvd_ctx_t *ctx, const decision_t *d, char *text, size_t bytes)
{
    static const char *const guesses[] = {
        "its process is stopped, or gets no time to run",
        "its process is stopped or gets no time to run, or the network to it is cut",
    };
    char who[PEER_TEXT_BYTES], state[PEER_TEXT_BYTES], doing[192];
    bool here = ctx->host_of[d->rank] == ctx->host_of[ctx->job.rank];
    peer_name(&ctx->peers, d->rank, who);
    peer_state(&ctx->peers, d->rank, state);
    coord_activity_text(d->activity, doing, sizeof doing);
    if (state[0] == '\0') {
        // A cut network would have been noticed before a rank is given up; see net/tcp_probe.c.
        snprintf(state, sizeof state, "%s", guesses[!here && d->status != HVD_PEER_LOST]);
    }
    snprintf(text, bytes, "%s has been silent for %.1f s: %s. When last heard, %s", who,
             (double)d->silent_ns / (double)NS_PER_S, state, doing);
}

static void warn_of_absence(hvd_ctx_t *ctx, uint64_t away_ns)
{
    log_warn(&ctx->log, "heartbeat",
             "this process did not run for %.1f s: it was stopped, or had no core to run on",
             (double)away_ns / (double)NS_PER_S);
}

// For the launcher, which names the rank that is to blame.
static void note_blame(const hvd_ctx_t *ctx, int rank)
{
    const char *path = ctx->config.blame_file;
    FILE *file = path[0] != '\0' ? fopen(path, "we") : NULL;
    if (file != NULL) {
        fprintf(file, "%d", rank);
        fclose(file);
    }
}

void report_silence(hvd_ctx_t *ctx, const decision_t *d)
{
    HELD(ctx);
    char who[PEER_TEXT_BYTES], text[HVD_TEXT_BYTES - 256];
    double seconds = (double)d->silent_ns / (double)NS_PER_S;
    err_t err;
    if (d->rank == ctx->job.rank) {
        warn_of_absence(ctx, d->silent_ns);
        ctx->moved_ns = ctx->now_ns; // nothing could move meanwhile: that is no sign of lost data
        return;
    }
    if (d->status == HVD_OK) {
        log_warn(&ctx->log, "heartbeat", "%s is heard again after %.1f s",
                 peer_name(&ctx->peers, d->rank, who), seconds);
        return;
    }
    describe_silence(ctx, d, text, sizeof text);
    if (d->status == HVD_PEER_LOST) {
        fail(&err, HVD_PEER_LOST,
             "%s. The job ends, because a rank may be silent for %g s at most "
             "(HOROVOD_HEARTBEAT_TIMEOUT_SECONDS)",
             text, ctx->config.heartbeat_timeout);
        note_blame(ctx, d->rank);
        engine_fail(ctx, &err);
    } else if (ctx->config.heartbeat_timeout > 0) {
        log_warn(&ctx->log, "heartbeat", "%s. The job ends after %g s of silence", text,
                 ctx->config.heartbeat_timeout);
    } else {
        log_warn(&ctx->log, "heartbeat", "%s", text);
    }
}

void report_stuck(hvd_ctx_t *ctx, const decision_t *d)
{
    HELD(ctx);
    err_t err;
    fail(&err, HVD_PEER_LOST,
         "%s. Nothing has moved on any rank for %.1f s, although all of them are alive: data was "
         "lost on the way. The job ends, because at most %g s are allowed "
         "(HOROVOD_HEARTBEAT_TIMEOUT_SECONDS); look for a faulty network card or switch, or run "
         "with HOROVOD_LOG_LEVEL=debug and report it",
         d->text[0] != '\0' ? d->text
                            : "an operation that all ranks have agreed to makes no progress",
         (double)d->silent_ns / (double)NS_PER_S, ctx->config.heartbeat_timeout);
    engine_fail(ctx, &err);
}

// --- The end ------------------------------------------------------------------------------------

static void explain_absence(hvd_ctx_t *ctx, uint64_t away_ns, err_t *end) REQUIRES(ctx->baton)
{
    char told[HVD_TEXT_BYTES];
    memcpy(told, end->text, sizeof told);
    warn_of_absence(ctx, away_ns);
    fail(end, end->status,
         "rank %d did not run for %.1f s (it was stopped, or had no core to run on) and the other "
         "ranks have gone on without it. They said: %.700s",
         ctx->job.rank, (double)away_ns / (double)NS_PER_S, told);
}

// The name of something this rank still waits for, agreed already or not.
static bool find_waiting(hvd_ctx_t *ctx, bool or_agreed, char *name, size_t bytes)
{
    const request_t *newest;
    bool waits;
    name[0] = '\0';
    lock_take(&ctx->lock);
    newest = ctx->requests.newest;
    waits = newest != NULL && atomic_load(&newest->state) == REQUEST_IN_FLIGHT &&
            (or_agreed || atomic_load(&newest->trace.agreed) == 0);
    if (waits) {
        snprintf(name, bytes, "%s", newest->name);
    }
    lock_release(&ctx->lock);
    return waits;
}

// What was agreed before a shutdown is finished, so nobody waits for that in vain.
static void explain_shutdown(hvd_ctx_t *ctx, int rank, err_t *end) REQUIRES(ctx->baton)
{
    char who[PEER_TEXT_BYTES], name[128];
    bool waits = find_waiting(ctx, false, name, sizeof name);
    peer_name(&ctx->peers, rank, who);
    who[0] = 'R';
    fail(end, HVD_SHUTDOWN,
         "Horovod has been shut down. %s ended normally%s%s%s: every rank must submit the same "
         "operations, or call join before it ends. If it was not meant to end, look for an "
         "exception in its output; call init again to start over.",
         who, waits ? ", but others wait in '" : "", name, waits ? "'" : "");
}

void explain_end(hvd_ctx_t *ctx, err_t *end)
{
    HELD(ctx);
    char name[128];
    int rank = coord_end_rank(ctx->coord);
    uint64_t away_ns = coord_absence_ns(ctx->coord, clock_ns());
    if (end->status != HVD_SHUTDOWN && away_ns > 0) {
        explain_absence(ctx, away_ns, end);
    } else if (end->status == HVD_PEER_LOST && find_waiting(ctx, true, name, sizeof name)) {
        size_t len = strlen(end->text);
        snprintf(end->text + len, sizeof end->text - len, ". Rank %d waited in '%s'", ctx->job.rank,
                 name);
    } else if (end->status == HVD_SHUTDOWN && rank >= 0 && rank != ctx->job.rank) {
        explain_shutdown(ctx, rank, end);
    }
}
