// SPDX-License-Identifier: Apache-2.0
//
// counters.c - how much, how often, how long: sums that only grow. metrics.c has their names.
//
// Every finished operation adds its record, at the latest when somebody asks; times are kept in
// ticks and become nanoseconds then. What the program says of its own progress is kept beside them.
// Threads: under lock; the sums about batches are written by the holder alone.
#include "observe/internal.h"

#include <stdio.h>
#include <stdlib.h>

#define GATHER_NS (20 * NS_PER_MS)
#define LATE_WARNING_NS (60 * NS_PER_S)
#define LATE_LEAST_NS (5 * NS_PER_MS) // on average; less is nobody's fault

// Sums since init. Under lock, except what the holder writes.
struct counters {
    uint64_t operations[HVD_N_OPS], bytes[HVD_N_OPS], failed;
    uint64_t on_board, riding;
    uint64_t n_records;             // of the recorder's that are in these sums
    uint64_t negotiate, queue, run; // ticks
    uint64_t in_flight, in_flight_max;
    atomic_uint_fast64_t batches, batched; // batched: submissions in those batches
    atomic_uint_fast64_t nonfinite;
    // As last gathered by the holder.
    uint64_t next_gathering_ns, next_late_warning_ns;
    bool watches_arrivals; // for the timeline
    coord_counters_t agreement;
    uint64_t strangers;
    progress_t progress;      // as the program tells it
    uint64_t told_ns;         // when it last did
    coord_straggler_t late[]; // by branch
};

counters_t *counters_new(int n_branches)
{
    counters_t *c;
    return calloc(1, sizeof *c + (size_t)n_branches * sizeof *c->late);
}

void counters_free(counters_t *c)
{
    free(c);
}

// --- Adding up -----------------------------------------------------------------------------------

static uint64_t between(uint64_t from, uint64_t to)
{
    return to > from ? to - from : 0;
}

static void add(const observe_t *o, counters_t *c, const record_t *record) REQUIRES(*o->job.lock)
{
    INVARIANT(c->in_flight > 0);
    c->in_flight--;
    c->operations[record->op]++;
    c->bytes[record->op] += record->bytes;
    c->on_board += record->route == o->job.board_way;
    c->riding += record->route == o->job.riding_way;
    c->failed += record->status != HVD_OK;
    if (record->agreed != 0) {
        c->negotiate += between(record->submitted, record->agreed);
        c->queue += between(record->agreed, record->started);
        c->run += between(record->started, record->finished);
    }
}

void counters_catch_up(observe_t *o)
{
    JOB_LOCKED(o);
    const recorder_t *recorder = o->recorder;
    counters_t *c = o->counters;
    INVARIANT(c->n_records <= recorder->n && recorder->n - c->n_records < RECORDER_SLOTS);
    for (; c->n_records < recorder->n; c->n_records++) {
        add(o, c, &recorder->ring[c->n_records % RECORDER_SLOTS]);
    }
}

void counters_submitted(observe_t *o)
{
    counters_t *c = o->counters;
    counters_catch_up(o);
    c->in_flight++;
    c->in_flight_max = MAX(c->in_flight_max, c->in_flight);
}

// Only the holder writes: no need for the bus.
static void add_alone(atomic_uint_fast64_t *sum, uint64_t n)
{
    atomic_store_explicit(sum, atomic_load_explicit(sum, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

void observe_batch(observe_t *o, int n_entries)
{
    add_alone(&o->counters->batches, 1);
    add_alone(&o->counters->batched, (uint64_t)n_entries);
}

uint64_t observe_nonfinite(observe_t *o, uint64_t n)
{
    return atomic_fetch_add_explicit(&o->counters->nonfinite, n, memory_order_relaxed);
}

// --- What coord and net know ---------------------------------------------------------------------

static void warn_of(observe_t *o, const coord_straggler_t *late, uint64_t now_ns)
{
    double part = (double)late->late_ns * 100.0 / (double)MAX(late->elapsed_ns, 1);
    bool often = late->n_last * 2 > late->n_steps && late->late_ns >= late->n_last * LATE_LEAST_NS;
    if (o->job.config->straggler_percent <= 0 || !often ||
        part < o->job.config->straggler_percent || now_ns < o->counters->next_late_warning_ns) {
        return;
    }
    char whom[64] = "";
    if (late->n_ranks > 1) {
        snprintf(whom, sizeof whom, ", or one of the %d rank%s below it in the tree,",
                 late->n_ranks - 1, plural(late->n_ranks - 1));
    }
    log_warn(o->job.log, "late",
             "rank %d%s is last in %llu of %llu steps, +%.3g ms: the others wait for it %.0f %% of "
             "the time",
             late->rank, whom, (unsigned long long)late->n_last, (unsigned long long)late->n_steps,
             (double)late->late_ns / (double)late->n_last / (double)NS_PER_MS, MIN(part, 100.0));
    o->counters->next_late_warning_ns = now_ns + LATE_WARNING_NS;
}

static void on_arrival(void *arg, const char *name, int rank)
{
    observe_t *o = arg;
    lock_take(o->job.lock);
    if (o->timeline != NULL) {
        timeline_add_arrival(o, o->timeline, name, rank, ticks_now());
    }
    lock_release(o->job.lock);
}

void observe_gather(observe_t *o, coord_t *coord, uint64_t n_strangers, uint64_t now_ns)
{
    coord_straggler_t late;
    counters_t *c = o->counters;
    if (now_ns < c->next_gathering_ns) {
        return;
    }
    c->next_gathering_ns = now_ns + GATHER_NS;
    coord_counters_t agreement = coord_counters(coord);
    bool has_news = agreement.n_steps != c->agreement.n_steps || c->late[0].n_ranks == 0;
    lock_take(o->job.lock);
    for (int b = 0; has_news && b < o->job.n_branches; b++) {
        c->late[b] = coord_straggler(coord, b);
    }
    c->agreement = agreement;
    c->strangers = n_strangers;
    lock_release(o->job.lock);
    if (coord_worst_straggler(coord, &late)) {
        warn_of(o, &late, now_ns);
    }
    bool watches = observe_has_timeline(o);
    if (UNLIKELY(watches != c->watches_arrivals)) {
        c->watches_arrivals = watches;
        coord_on_arrival(coord, watches ? on_arrival : NULL, o);
    }
}

// --- Reading -------------------------------------------------------------------------------------

static uint64_t as_ns(uint64_t ticks, double pace)
{
    return (uint64_t)((double)ticks * pace);
}

hvd_counters_t observe_counters(observe_t *o)
{
    lock_take(o->job.lock);
    counters_catch_up(o);
    const counters_t *c = o->counters;
    double pace = ticks_pace(&o->origin);
    hvd_counters_t out = {
        .failed = c->failed,
        .on_board = c->on_board,
        .riding = c->riding,
        .batches = atomic_load_explicit(&c->batches, memory_order_relaxed),
        .batched = atomic_load_explicit(&c->batched, memory_order_relaxed),
        .cache_hits = c->agreement.n_known,
        .cache_misses = c->agreement.n_new,
        .steps = c->agreement.n_steps,
        .in_flight = c->in_flight,
        .in_flight_max = c->in_flight_max,
        .negotiate_ns = as_ns(c->negotiate, pace),
        .queue_ns = as_ns(c->queue, pace),
        .run_ns = as_ns(c->run, pace),
        .nonfinite = atomic_load_explicit(&c->nonfinite, memory_order_relaxed),
        .strangers = c->strangers,
    };
    memcpy(out.operations, c->operations, sizeof out.operations);
    memcpy(out.bytes, c->bytes, sizeof out.bytes);
    lock_release(o->job.lock);
    return out;
}

int observe_stragglers(observe_t *o, hvd_late_t *late, int n_late)
{
    int n = o->job.n_branches > 1 ? o->job.n_branches : 0;
    lock_take(o->job.lock);
    for (int b = 0; b < MIN(n, n_late); b++) {
        const coord_straggler_t *seen = &o->counters->late[b];
        late[b] = (hvd_late_t){.rank = seen->rank,
                               .n_ranks = seen->n_ranks,
                               .n_last = seen->n_last,
                               .late_ns = seen->late_ns};
    }
    lock_release(o->job.lock);
    return n;
}

// --- What the program tells ----------------------------------------------------------------------

void observe_report(observe_t *o, const int64_t *step, const double *loss, const double *samples)
{
    uint64_t now_ns = clock_ns();
    lock_take(o->job.lock);
    counters_t *c = o->counters;
    progress_t *p = &c->progress;
    if (step != NULL && p->has_step && *step > p->step) {
        double elapsed_s = (double)(now_ns - c->told_ns) / (double)NS_PER_S;
        p->step_s = elapsed_s / (double)(*step - p->step);
    }
    if (step != NULL) {
        p->step = *step;
        p->has_step = true;
        c->told_ns = now_ns;
    }
    if (loss != NULL) {
        p->loss = *loss;
        p->has_loss = true;
    }
    if (samples != NULL && *samples > 0) {
        p->samples += *samples;
        p->has_samples = true;
    }
    lock_release(o->job.lock);
}

progress_t observe_progress(observe_t *o)
{
    lock_take(o->job.lock);
    progress_t progress = o->counters->progress;
    lock_release(o->job.lock);
    return progress;
}

// --- Summary -------------------------------------------------------------------------------------

// ", waited for the last rank 12 % of the time, mostly for rank 3 (last in 300 of 480 agreed
// steps)"; ""
// where this rank has nobody below it.
static void describe_waiting(const observe_t *o, uint64_t elapsed_ns, char *text, size_t bytes)
    REQUIRES(*o->job.lock)
{
    const coord_straggler_t *late = o->counters->late, *slowest = &late[0];
    uint64_t waited_ns = 0;
    for (int b = 0; b < o->job.n_branches; b++) {
        waited_ns += late[b].late_ns;
        slowest = late[b].late_ns > slowest->late_ns ? &late[b] : slowest;
    }
    text[0] = '\0';
    if (o->job.n_branches > 1 && slowest->n_steps > 0) {
        snprintf(text, bytes,
                 "; waited for the last rank %.0f %% of the time, mostly for rank %d%s (last in "
                 "%llu of %llu agreed step%s)",
                 MIN((double)waited_ns * 100 / (double)elapsed_ns, 100.0), slowest->rank,
                 slowest->n_ranks > 1 ? " or one below it in the tree" : "",
                 (unsigned long long)slowest->n_last, (unsigned long long)slowest->n_steps,
                 plural(slowest->n_steps));
    }
}

// The program knows its steps; names that come again in the agreement tell of some. "": neither.
static void describe_steps(const observe_t *o, uint64_t n_agreed, char *text, size_t bytes)
    REQUIRES(*o->job.lock)
{
    const progress_t *progress = &o->counters->progress;
    text[0] = '\0';
    if (progress->has_step) {
        snprintf(text, bytes, ", the last reported step %lld", (long long)progress->step);
    } else if (n_agreed > 0) {
        snprintf(text, bytes, ", at least %llu step%s", (unsigned long long)n_agreed,
                 plural(n_agreed));
    }
}

void observe_summarize(observe_t *o, coord_t *coord)
{
    uint64_t now_ns = clock_ns(), elapsed_ns = MAX(now_ns - o->opened_ns, 1);
    double seconds = (double)elapsed_ns / (double)NS_PER_S;
    uint64_t n_operations = 0, n_bytes = 0;
    char waiting[256], steps[64];
    o->counters->next_gathering_ns = 0;
    observe_gather(o, coord, o->counters->strangers, now_ns);
    hvd_counters_t counters = observe_counters(o);
    for (int op = 0; op < HVD_N_OPS; op++) {
        n_operations += counters.operations[op];
        n_bytes += counters.bytes[op];
    }
    lock_take(o->job.lock);
    describe_waiting(o, elapsed_ns, waiting, sizeof waiting);
    describe_steps(o, counters.steps, steps, sizeof steps);
    lock_release(o->job.lock);
    log_write(o->job.log, LOG_INFO, "summary",
              "%.1f s on %d rank%s: %llu operation%s of rank 0 (%.4g per second)%s, %.4g MB%s",
              seconds, o->job.size, plural(o->job.size), (unsigned long long)n_operations,
              plural(n_operations), (double)n_operations / seconds, steps, (double)n_bytes / 1e6,
              waiting);
}
