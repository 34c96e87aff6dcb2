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
#include "engine/staging.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define PROGRESS_NS (250 * NS_PER_MS)
#define BLOCKED_NS (2 * NS_PER_S) // since its last submission: before, it may be about to go on
#define STARVED_TIMES 6           // so much longer a rank may be silent that gets no core
#define IDLE_SHARE 20             // 1/20 of a core is not counted as computing

// What runs here, and since when nothing of it has moved. Links that are being made count as
// moving: how long that may take has limits of its own. What the board agreed to is not told of:
// it needs nothing but shared memory.
static coord_progress_t look_at_batch(hvd_ctx_t *ctx, uint64_t now_ns) REQUIRES(ctx->baton)
{
    const batch_t *batch = ctx->running;
    coord_progress_t progress = {0};
    char who[PEER_TEXT_BYTES], what[160];
    if (UNLIKELY(staging_progress(ctx, now_ns, &progress))) {
        return progress; // launched before the batch that runs
    }
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

// Does some thread of the program sit in hvd_wait()? Then it is driving, or waits for who does.
static bool program_waits(const hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    const baton_t *baton = &ctx->baton;
    bool drives = baton->has_thread && !pthread_equal(pthread_self(), baton->thread);
    return drives || atomic_load(&baton->n_waiting) > 0;
}

// How long this process has computed next to nothing.
static uint64_t idle_ns(hvd_ctx_t *ctx, uint64_t now_ns) REQUIRES(ctx->baton)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    uint64_t cpu_ns = (uint64_t)used.tv_sec * NS_PER_S + (uint64_t)used.tv_nsec;
    uint64_t busy_ns = (now_ns - ctx->cpu_seen_at_ns) / IDLE_SHARE;
    if (cpu_ns - ctx->cpu_seen_ns > busy_ns || ctx->cpu_seen_at_ns == 0) {
        ctx->idle_since_ns = now_ns;
    }
    ctx->cpu_seen_ns = cpu_ns;
    ctx->cpu_seen_at_ns = now_ns;
    return now_ns - ctx->idle_since_ns;
}

// An operation of a graph calls back, nobody waits for it in here. The program waits for the graph,
// and no other part of that is going to submit anything, once the process computes nothing.
static bool graph_waits(const trace_t *oldest, uint64_t idle_ns)
{
    const request_t *request = (const void *)((const char *)oldest - offsetof(request_t, trace));
    return request->done != NULL && idle_ns >= BLOCKED_NS;
}

// Nothing runs, nothing is submitted, and a thread waits for what has not been agreed.
static void look_whether_blocked(hvd_ctx_t *ctx, coord_activity_t *activity, uint64_t now_ns)
    REQUIRES(ctx->baton)
{
    const trace_t *oldest = NULL;
    uint64_t idle = idle_ns(ctx, now_ns);
    if (activity->quiet_ns < BLOCKED_NS || ctx->running != NULL) {
        return;
    }
    lock_take(&ctx->lock);
    if (requests_in_flight(ctx, &oldest, 1) > 0 && atomic_load(&oldest->agreed) == 0 &&
        (program_waits(ctx) || graph_waits(oldest, idle))) {
        activity->is_blocked = true;
        snprintf(activity->blocked_in, sizeof activity->blocked_in, "%s", oldest->name);
        snprintf(activity->where, sizeof activity->where, "%s",
                 oldest->where != NULL ? oldest->where : "");
    }
    lock_release(&ctx->lock);
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
    if (activity.quiet_ns >= BLOCKED_NS) {
        observe_steps(ctx->observe, &activity);
    }
    look_whether_blocked(ctx, &activity, now_ns);
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

// A rank of this host that the kernel would let run has no core: a busy machine is no dead one.
static bool waits_for_core(hvd_ctx_t *ctx, const decision_t *d, const char *text)
    REQUIRES(ctx->baton)
{
    double seconds = ctx->config.heartbeat_timeout * STARVED_TIMES;
    if ((double)d->silent_ns >= seconds * 1e9 || !peer_is_runnable(&ctx->peers, d->rank)) {
        return false;
    }
    if (ctx->now_ns >= ctx->next_starved_ns) {
        log_warn(
            &ctx->log, "heartbeat",
            "%s. It has threads that could run: this host has more work than cores, so the job "
            "ends only after %g s of silence",
            text, seconds);
        ctx->next_starved_ns = ctx->now_ns + (uint64_t)(seconds * 1e9);
    }
    return true;
}

void report_silence(hvd_ctx_t *ctx, const decision_t *d)
{
    HELD(ctx);
    char who[PEER_TEXT_BYTES], text[HVD_TEXT_BYTES - 256];
    double seconds = (double)d->silent_ns / (double)NS_PER_S;
    uint64_t heartbeat_ns = (uint64_t)(ctx->config.heartbeat_interval * (double)NS_PER_S);
    err_t err;
    if (d->rank == ctx->job.rank) {
        warn_of_absence(ctx, d->silent_ns);
        // Nothing could move meanwhile: that is no sign of lost data. A heartbeat's time counts.
        uint64_t late_ns = d->silent_ns - MIN(d->silent_ns, heartbeat_ns);
        ctx->moved_ns = MIN(ctx->moved_ns + late_ns, ctx->now_ns);
        return;
    }
    if (d->status == HVD_OK) {
        log_warn(&ctx->log, "heartbeat", "%s is heard again after %.1f s",
                 peer_name(&ctx->peers, d->rank, who), seconds);
        return;
    }
    describe_silence(ctx, d, text, sizeof text);
    if (d->status == HVD_PEER_LOST) {
        if (waits_for_core(ctx, d, text)) {
            return;
        }
        fail(&err, HVD_PEER_LOST,
             "%s. The job ends, because a rank may be silent for %g s at most "
             "(HOROVOD_HEARTBEAT_TIMEOUT_SECONDS)",
             text, ctx->config.heartbeat_timeout);
        engine_fail(ctx, &err, d->rank);
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
    engine_fail(ctx, &err, -1);
}

// --- The absent ----------------------------------------------------------------------------------

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

// --- Who is to blame -----------------------------------------------------------------------------

// The launcher reads the rank in the first line, and in the second what it did, if it has left by
// itself. What was noted first is the cause, and what comes after it a consequence.
static void write_blame(hvd_ctx_t *ctx, int rank, const char *what) REQUIRES(ctx->lock)
{
    const char *path = ctx->config.blame_file;
    FILE *file = ctx->blame.is_noted || path[0] == '\0' ? NULL : fopen(path, "we");
    ctx->blame.is_noted = true;
    if (file != NULL) {
        fprintf(file, "%d\n%s", rank, what);
        fclose(file);
    }
}

void note_blame(hvd_ctx_t *ctx)
{
    LOCKED(ctx);
    if (ctx->blame.rank >= 0 && ctx->blame.rank != ctx->job.rank &&
        !atomic_load(&ctx->stop_requested)) {
        write_blame(ctx, ctx->blame.rank, ctx->blame.what);
    }
}

void blame_missing(hvd_ctx_t *ctx, int rank)
{
    lock_take(&ctx->lock);
    if (rank >= 0) {
        write_blame(ctx, rank, "");
    }
    lock_release(&ctx->lock);
}

void forget_blame(hvd_ctx_t *ctx)
{
    ctx->blame.rank = -1;
    if (ctx->config.blame_file[0] != '\0') {
        unlink(ctx->config.blame_file);
    }
}

hvd_status_t hvd_leave_because(hvd_ctx_t *ctx, const char *error)
{
    size_t n = 0;
    err_t err;
    hvd_status_t status = check_context(ctx, &err);
    if (status != HVD_OK || error == NULL) {
        return status != HVD_OK ? status : HVD_INVALID_ARGUMENT;
    }
    lock_take(&ctx->lock);
    // What is raised in a job that has failed already follows from that, whoever was its cause.
    bool has_failed = ctx->ended.status != HVD_OK && ctx->ended.status != HVD_SHUTDOWN;
    bool is_cause = ctx->blame.own[0] == '\0' && !ctx->blame.is_noted && !has_failed;
    for (; is_cause && error[n] != '\0' && n < CONTROL_MAX_REASON_BYTES; n++) {
        ctx->blame.own[n] = (unsigned char)error[n] < ' ' ? ' ' : error[n];
    }
    if (is_cause && n > 0) {
        snprintf(ctx->blame.what, sizeof ctx->blame.what, "raised %s", ctx->blame.own);
        write_blame(ctx, ctx->job.rank, ctx->blame.what);
    }
    lock_release(&ctx->lock);
    return is_cause ? HVD_OK : HVD_SHUTDOWN;
}

// --- The end -------------------------------------------------------------------------------------

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
static void explain_shutdown(hvd_ctx_t *ctx, int rank, const char *name, err_t *end)
    REQUIRES(ctx->baton)
{
    const char *reason = coord_end_reason(ctx->coord);
    bool has_raised = reason[0] != '\0', waits = name[0] != '\0';
    char who[PEER_TEXT_BYTES];
    peer_name(&ctx->peers, rank, who);
    who[0] = 'R';
    fail(end, HVD_SHUTDOWN, "Horovod has been shut down. %s %s%s%s%s%s. %s", who,
         has_raised ? "raised " : "left the job", reason,
         waits ? (has_raised ? " while others waited in '" : ", but others wait in '") : "", name,
         waits ? "'" : "",
         has_raised ? "Its output has the traceback"
                    : "Every rank must submit the same operations, or call join before it ends; if "
                      "it was not meant to end, look for an error in its output");
}

// "did not submit 'loss' ...", of the first line of a stall that ends the job.
static void keep_omission(blame_t *blame, const char *text)
{
    char who[32];
    int len = snprintf(who, sizeof who, "Rank %d ", blame->rank);
    if (strncmp(text, who, (size_t)len) == 0) {
        int bytes = (int)strcspn(text + len, "\n");
        bytes -= bytes > 0 && text[len + bytes - 1] == '.';
        snprintf(blame->what, sizeof blame->what, "%.*s", bytes, text + len);
    }
}

// Keeps who ended the job, and how, for the launcher; tells it at once if an operation fails.
static void keep_blame(hvd_ctx_t *ctx, int rank, const err_t *end, const char *name)
    REQUIRES(ctx->baton) EXCLUDES(ctx->lock)
{
    const char *reason = coord_end_reason(ctx->coord);
    blame_t *blame = &ctx->blame;
    lock_take(&ctx->lock);
    blame->rank = rank;
    if (end->status == HVD_STALLED) {
        keep_omission(blame, end->text);
    }
    if (end->status == HVD_SHUTDOWN) {
        snprintf(blame->what, sizeof blame->what, "%s%s%s%s%s",
                 reason[0] != '\0' ? "raised " : "left the job", reason,
                 name[0] != '\0' ? " while others waited in '" : "", name,
                 name[0] != '\0' ? "'" : "");
    }
    if (end->status != HVD_SHUTDOWN || name[0] != '\0') {
        note_blame(ctx);
    }
    lock_release(&ctx->lock);
}

void explain_end(hvd_ctx_t *ctx, err_t *end)
{
    HELD(ctx);
    char name[128];
    int rank = coord_end_rank(ctx->coord);
    bool is_shutdown = end->status == HVD_SHUTDOWN;
    bool waits = find_waiting(ctx, !is_shutdown, name, sizeof name);
    uint64_t away_ns = coord_absence_ns(ctx->coord, clock_ns());
    bool is_others = end->status == HVD_STALLED && rank != ctx->job.rank; // the tensor is missing
    if (!is_shutdown && !is_others && away_ns > 0) {
        explain_absence(ctx, away_ns, end);
        return;
    }
    if (end->status == HVD_PEER_LOST && waits) {
        size_t len = strlen(end->text);
        snprintf(end->text + len, sizeof end->text - len, ". Rank %d waited in '%s'", ctx->job.rank,
                 name);
    } else if (is_shutdown && rank >= 0 && rank != ctx->job.rank) {
        explain_shutdown(ctx, rank, name, end);
    }
    keep_blame(ctx, rank, end, name);
}
