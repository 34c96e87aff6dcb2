// SPDX-License-Identifier: Apache-2.0
//
// watch.c - all that a launcher shows of a rank, on one page: asked for once a second while
// somebody watches the job, and not at all otherwise.
//
// Lines of "key<tab>value", as those of /status, which come first. How the last second was spent is
// found in the recorder: while an operation ran, bytes moved; while one was in flight and none ran,
// the rank waited (for others, or for earlier operations); the rest is the program's own. What
// needed no agreement takes no time here, since nobody has read the clock for it.
// Thread: the monitor thread. Cost: a copy of the recorder, and sorting at most 1,000 intervals.
#define _GNU_SOURCE
#include "observe/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define WINDOW_NS (1 * NS_PER_S)
#define STUCK_NS (2 * NS_PER_S) // from then on, where the program is matters
#define MAX_LATE 8
#define STACK_LINES 40
#define MAX_INTERVALS (RECORDED_OPERATIONS + MAX_FLIGHTS)

typedef struct interval {
    uint64_t from, to; // ticks
} interval_t;

typedef struct intervals {
    int n;
    interval_t list[MAX_INTERVALS];
} intervals_t;

// --- Shares of the time --------------------------------------------------------------------------

static int by_begin(const void *a, const void *b)
{
    uint64_t left = ((const interval_t *)a)->from, right = ((const interval_t *)b)->from;
    return (left > right) - (left < right);
}

static void put_interval(intervals_t *in, uint64_t from, uint64_t to, uint64_t begin)
{
    if (from != 0 && to > begin && to > from && in->n < MAX_INTERVALS) {
        in->list[in->n++] = (interval_t){MAX(from, begin), to};
    }
}

// How much time they cover together.
static uint64_t covered(intervals_t *in)
{
    uint64_t sum = 0, end = 0;
    qsort(in->list, (size_t)in->n, sizeof *in->list, by_begin);
    for (int i = 0; i < in->n; i++) {
        uint64_t from = MAX(in->list[i].from, end);
        sum += in->list[i].to > from ? in->list[i].to - from : 0;
        end = MAX(end, in->list[i].to);
    }
    return sum;
}

static const record_t *record_back(const snapshot_t *s, uint64_t back)
{
    return &s->recorder.ring[(s->recorder.n - back) % RECORDER_SLOTS];
}

// Of the last second, or since the oldest operation that is remembered.
static uint64_t window_begin(const snapshot_t *s)
{
    uint64_t n = s->recorder.n, window = (uint64_t)((double)WINDOW_NS / s->pace);
    uint64_t begin = s->now - MIN(s->now, window);
    return n >= RECORDED_OPERATIONS ? MAX(begin, record_back(s, RECORDED_OPERATIONS)->finished)
                                    : begin;
}

static void put_shares(const snapshot_t *s, intervals_t *busy, intervals_t *moving, buf_t *out)
{
    uint64_t begin = window_begin(s), window = s->now > begin ? s->now - begin : 1;
    uint64_t n = MIN(s->recorder.n, RECORDED_OPERATIONS);
    busy->n = moving->n = 0;
    for (uint64_t back = 1; back <= n && record_back(s, back)->finished > begin; back++) {
        const record_t *r = record_back(s, back);
        put_interval(busy, r->submitted, r->finished, begin);
        put_interval(moving, r->started, r->finished, begin);
    }
    for (int i = 0; i < s->n_flights; i++) {
        put_interval(busy, s->flights[i].submitted, s->now, begin);
        put_interval(moving, s->flights[i].started, s->now, begin);
    }
    uint64_t moved = covered(moving), in_flight = MAX(covered(busy), moved);
    double whole = (double)window;
    buf_printf(out, "share\t%.4f\t%.4f\t%.4f\n", MAX(1 - (double)in_flight / whole, 0.0),
               (double)(in_flight - moved) / whole, (double)moved / whole);
}

// --- The rest ------------------------------------------------------------------------------------

static long long us_ago(const snapshot_t *s, uint64_t ticks)
{
    return ticks == 0 || ticks > s->now ? -1
                                        : (long long)((double)(s->now - ticks) * s->pace / 1e3);
}

// The last operations that took time, the newest first.
static void put_operations(const snapshot_t *s, buf_t *out)
{
    uint64_t n = MIN(s->recorder.n, WATCH_OPERATIONS);
    for (uint64_t back = 1; back <= n; back++) {
        const record_t *r = record_back(s, back);
        if (r->submitted != 0) {
            buf_printf(out, "op\t%lld\t%lld\t%lld\t%lld\t%llu\t%s\t%s\n", us_ago(s, r->submitted),
                       us_ago(s, r->agreed), us_ago(s, r->started), us_ago(s, r->finished),
                       (unsigned long long)r->bytes, hvd_op_name((hvd_op_t)r->op), r->name);
        }
    }
}

static void put_progress(observe_t *o, buf_t *out)
{
    progress_t p = observe_progress(o);
    if (p.has_step) {
        buf_printf(out, "step\t%lld\t%.6f\n", (long long)p.step, p.step_s);
    }
    if (p.has_loss) {
        buf_printf(out, "loss\t%.9g\n", p.loss);
    }
    if (p.has_samples) {
        buf_printf(out, "samples\t%.9g\n", p.samples);
    }
}

static void put_late(observe_t *o, buf_t *out)
{
    hvd_late_t late[MAX_LATE];
    int n = MIN(observe_stragglers(o, late, MAX_LATE), MAX_LATE);
    for (int i = 0; i < n; i++) {
        buf_printf(out, "late\t%d\t%d\t%llu\t%.6f\n", late[i].rank, late[i].n_ranks,
                   (unsigned long long)late[i].n_last, (double)late[i].late_ns / (double)NS_PER_S);
    }
}

// Where the program is, if it has not got on for a while.
static void put_stack(observe_t *o, const snapshot_t *s, buf_t *out)
{
    const record_t *last = snapshot_last(s);
    const flight_t *f = s->n_flights > 0 ? &s->flights[0] : NULL;
    uint64_t since = f != NULL ? f->submitted : last != NULL ? last->finished : 0;
    uint64_t thread = f != NULL ? f->thread : last != NULL ? last->thread : o->opened_by;
    char text[STACK_BYTES], *save = NULL;
    bool is_stuck =
        since == 0 || (double)(s->now - MIN(since, s->now)) * s->pace > (double)STUCK_NS;
    if (!is_stuck || s->ended.status != HVD_OK) {
        return;
    }
    observe_read_stack(o, thread, text);
    int n = 0;
    for (char *line = strtok_r(text, "\n", &save); line != NULL && n < STACK_LINES;
         line = strtok_r(NULL, "\n", &save), n++) {
        buf_printf(out, "stack\t%.200s\n", line);
    }
}

void watch_page(observe_t *o, const snapshot_t *s, buf_t *out)
{
    struct timespec now;
    hvd_counters_t counters = observe_counters(o);
    intervals_t *intervals = malloc(2 * sizeof *intervals);
    clock_gettime(CLOCK_REALTIME, &now);
    snapshot_status(o, s, WATCH_FLIGHTS, out);
    buf_printf(out, "now\t%lld\n", (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000);
    if (intervals != NULL) {
        put_shares(s, &intervals[0], &intervals[1], out);
    }
    free(intervals);
    put_progress(o, out);
    put_late(o, out);
    buf_printf(out, "counters\t");
    metrics_pack(out, &counters);
    buf_printf(out, "\n");
    put_operations(s, out);
    put_stack(o, s, out);
}
