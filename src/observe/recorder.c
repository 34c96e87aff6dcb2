// SPDX-License-Identifier: Apache-2.0
//
// recorder.c - the flight recorder: the last operations of this rank, always on.
//
// A submission carries stamps of where it has got to; when it ends, one record of two cache lines
// goes into a ring, and from there into the counters and the timeline. On the shortest way
// (engine/board.c) most of the record is written while the rank would wait anyway; the price is one
// read of the processor's own clock and some plain stores. What is in flight the engine lists when
// somebody wants to know. Memory is fixed.
// Threads: under lock, except the stamps, which the holder writes.
#define _GNU_SOURCE
#include "observe/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

// A build without recorder and counters, to measure what they cost: bench/cost.py makes one.
#ifndef HVD_UNRECORDED
#define HVD_UNRECORDED 0
#endif

#define RECENT_STEPS 100

// Written to at once: the first operations must not wait for the kernel to find the pages.
recorder_t *recorder_new(void)
{
    recorder_t *recorder = calloc(1, sizeof *recorder);
    for (int i = 0; recorder != NULL && i < RECORDER_SLOTS; i++) {
        recorder->ring[i].n_fused = 1;
    }
    return recorder;
}

static record_t *next_record(recorder_t *recorder)
{
    return &recorder->ring[recorder->n % RECORDER_SLOTS];
}

// What is known as soon as it is submitted.
static void draft(record_t *record, const trace_t *trace)
{
    const signature_t *signature = trace->signature;
    record->bytes = trace->bytes;
    record->thread = trace->thread;
    record->set = trace->set;
    record->n_tensors = signature->n_tensors;
    record->op = (uint8_t)signature->op;
    record->dtype = (uint8_t)signature->dtype;
    size_t bytes = strnlen(trace->name, RECORDED_NAME_BYTES);
    memcpy(record->name, trace->name, bytes);
    record->name[bytes] = '\0';
}

static void complete(record_t *record, const trace_t *trace, hvd_status_t status)
{
    record->submitted = trace->submitted;
    record->agreed = atomic_load_explicit(&trace->agreed, memory_order_relaxed);
    record->started = atomic_load_explicit(&trace->started, memory_order_relaxed);
    record->finished = ticks_now();
    record->n_fused = trace->n_fused;
    record->status = (int16_t)status;
    record->route = (uint8_t)atomic_load_explicit(&trace->way, memory_order_relaxed);
}

void observe_submitted(observe_t *o, trace_t *trace, bool is_next)
{
    JOB_LOCKED(o);
    if (HVD_UNRECORDED) {
        return;
    }
    if (observe_has_timeline(o)) {
        trace->submitted = ticks_now(); // else only if it does not end on the board
    }
    trace->thread = (uint64_t)(uintptr_t)pthread_self();
    counters_submitted(o);
    if (is_next) { // now is the time to write most of it
        draft(next_record(o->recorder), trace);
        o->recorder->drafted = trace;
    }
}

void observe_completed(observe_t *o, const trace_t *trace, hvd_status_t status)
{
    JOB_LOCKED(o);
    recorder_t *recorder = o->recorder;
    if (UNLIKELY(op_is_about_sets(trace->signature->op)) || HVD_UNRECORDED) {
        return;
    }
    record_t *record = next_record(recorder);
    bool is_drafted = recorder->drafted == trace;
    if (!is_drafted) {
        draft(record, trace);
    }
    complete(record, trace, status);
    recorder->drafted = NULL;
    recorder->n++;
    if (!is_drafted) { // else while the next one waits
        counters_catch_up(o);
    }
    if (observe_has_timeline(o) && o->timeline != NULL) {
        timeline_add(o, o->timeline, trace, record);
        if (timeline_is_filling(o, o->timeline)) {
            monitor_wake(o);
        }
    }
}

void observe_device(observe_t *o, const device_work_t *work)
{
    lock_take(o->job.lock);
    if (o->timeline != NULL) {
        timeline_add_device(o, o->timeline, work);
    }
    lock_release(o->job.lock);
}

void observe_mark_cycle(observe_t *o, uint64_t ticks)
{
    lock_take(o->job.lock);
    if (o->timeline != NULL) {
        timeline_add_cycle(o, o->timeline, ticks);
    }
    lock_release(o->job.lock);
}

static void note_step(coord_activity_t *activity, uint64_t ns)
{
    uint64_t lesser_ns = MIN(ns, activity->longest_step_ns);
    activity->longest_step_ns = MAX(activity->longest_step_ns, ns);
    activity->second_step_ns = MAX(activity->second_step_ns, lesser_ns);
    activity->n_steps++;
}

void observe_steps(observe_t *o, coord_activity_t *activity)
{
    recorder_t *recorder = o->recorder;
    double pace = ticks_pace(&o->origin);
    lock_take(o->job.lock);
    uint64_t n_kept = MIN(recorder->n, RECORDED_OPERATIONS);
    const record_t *later = n_kept > 0 ? &recorder->ring[(recorder->n - 1) % RECORDER_SLOTS] : NULL;
    for (uint64_t back = 2; back <= n_kept && activity->n_steps < RECENT_STEPS; back++) {
        const record_t *record = &recorder->ring[(recorder->n - back) % RECORDER_SLOTS];
        if (record->op == later->op && strcmp(record->name, later->name) == 0) {
            uint64_t ticks = later->finished - MIN(record->finished, later->finished);
            note_step(activity, (uint64_t)((double)ticks * pace));
            later = record;
        }
    }
    lock_release(o->job.lock);
}

// --- A rank at one moment ------------------------------------------------------------------------

static void cut_copy(char *to, size_t bytes, const char *from)
{
    size_t n = from != NULL ? strnlen(from, bytes - 1) : 0;
    memcpy(to, from != NULL ? from : "", n);
    to[n] = '\0';
    for (size_t i = 0; i < n; i++) { // a name must not break a line, nor a table
        to[i] = (unsigned char)to[i] < ' ' || to[i] == 0x7f ? ' ' : to[i];
    }
}

static void describe(const observe_t *o, const trace_t *t, flight_t *f)
{
    bool started = atomic_load_explicit(&t->started, memory_order_relaxed) != 0;
    bool agreed = atomic_load_explicit(&t->agreed, memory_order_relaxed) != 0;
    int route = atomic_load_explicit(&t->way, memory_order_relaxed);
    bool about_sets = op_is_about_sets(t->signature->op);
    cut_copy(f->name, sizeof f->name, about_sets ? "change of process sets" : t->name);
    cut_copy(f->where, sizeof f->where, t->where);
    f->op = (int)(about_sets ? HVD_BARRIER : t->signature->op);
    f->set = t->set;
    f->state = started && agreed ? "running" : agreed ? "queued" : "waiting";
    f->route = started ? o->job.way_name(route) : "-";
    f->bytes = about_sets ? 0 : t->bytes;
    f->thread = about_sets ? 0 : t->thread;
    f->submitted = t->submitted;
    f->started = atomic_load_explicit(&t->started, memory_order_relaxed);
}

void recorder_snapshot(observe_t *o, snapshot_t *s)
{
    const trace_t *oldest[MAX_FLIGHTS];
    lock_take(o->job.lock);
    s->recorder = *o->recorder;
    s->n_in_flight = o->job.in_flight(o->job.owner, oldest, MAX_FLIGHTS);
    s->n_flights = MIN(s->n_in_flight, MAX_FLIGHTS);
    for (int i = 0; i < s->n_flights; i++) {
        describe(o, oldest[i], &s->flights[i]);
    }
    s->ended = *o->job.ended;
    s->now = ticks_now();
    lock_release(o->job.lock);
    s->pace = ticks_pace(&o->origin);
}

static double seconds(const snapshot_t *s, uint64_t from, uint64_t to)
{
    return from != 0 && to > from ? (double)(to - from) * s->pace / 1e9 : 0.0;
}

static double age_s(const snapshot_t *s, uint64_t ticks)
{
    return seconds(s, ticks, s->now);
}

const record_t *snapshot_last(const snapshot_t *s)
{
    const recorder_t *r = &s->recorder;
    return r->n > 0 ? &r->ring[(r->n - 1) % RECORDER_SLOTS] : NULL;
}

const char *snapshot_state(const snapshot_t *s)
{
    return s->ended.status != HVD_OK ? "ended" : s->n_flights == 0 ? "idle" : s->flights[0].state;
}

#define SUMMARY_FLIGHTS 5

// What was in flight when the job ended: the last records, all with one status.
static void put_lost(const snapshot_t *s, buf_t *out)
{
    uint64_t n = s->recorder.n;
    uint64_t first = n > RECORDED_OPERATIONS ? n - RECORDED_OPERATIONS : 0;
    uint64_t n_lost = 0;
    while (n - n_lost > first &&
           s->recorder.ring[(n - n_lost - 1) % RECORDER_SLOTS].status == s->ended.status) {
        n_lost++;
    }
    buf_printf(out, "%llu lost", (unsigned long long)n_lost);
    for (uint64_t i = 0; i < MIN(n_lost, SUMMARY_FLIGHTS); i++) {
        const record_t *r = &s->recorder.ring[(n - n_lost + i) % RECORDER_SLOTS];
        buf_printf(out, "%s %s '%s' %s", i == 0 ? ":" : ",", hvd_op_name((hvd_op_t)r->op), r->name,
                   r->agreed == 0    ? "before all ranks had it"
                   : r->started == 0 ? "while it queued"
                                     : "while it ran");
    }
}

void snapshot_summary(const snapshot_t *s, buf_t *out)
{
    const record_t *last = snapshot_last(s);
    if (s->ended.status != HVD_OK) {
        put_lost(s, out);
    } else {
        buf_printf(out, "%d in flight", s->n_in_flight);
    }
    for (int i = 0; i < MIN(s->n_flights, SUMMARY_FLIGHTS); i++) {
        const flight_t *f = &s->flights[i];
        buf_printf(out, "%s %s '%s' %s for %.1f s%s%s", i == 0 ? ":" : ",",
                   hvd_op_name((hvd_op_t)f->op), f->name, f->state, age_s(s, f->submitted),
                   f->where[0] != '\0' ? " from " : "", f->where);
    }
    if (last == NULL) {
        buf_printf(out, "; nothing finished yet");
    } else {
        buf_printf(out, "; last of %llu finished: %s '%s' %.1f s ago",
                   (unsigned long long)s->recorder.n, hvd_op_name((hvd_op_t)last->op), last->name,
                   age_s(s, last->finished));
        if (last->status != HVD_OK) {
            buf_printf(out, " (%s)", hvd_status_name((hvd_status_t)last->status));
        }
    }
}

void observe_read_stack(observe_t *o, uint64_t thread, char text[STACK_BYTES])
{
    lock_take(o->job.lock);
    hvd_stack_fn stack_of = o->stack_of;
    void *arg = o->stack_arg;
    lock_release(o->job.lock);
    bool is_known = stack_of != NULL && thread != 0;
    size_t bytes = is_known ? stack_of(arg, thread, text, STACK_BYTES - 1) : 0;
    text[MIN(bytes, STACK_BYTES - 1)] = '\0';
}

// Each line behind a bar.
static void put_stack(observe_t *o, const char *heading, uint64_t thread, buf_t *out, buf_t *stacks)
{
    char text[STACK_BYTES];
    observe_read_stack(o, thread, text);
    char *save = NULL, *first = strtok_r(text, "\n", &save);
    const char *line = first != NULL && heading != NULL ? heading : first;
    while (line != NULL) {
        buf_printf(out, "      | %s\n", line);
        if (stacks != NULL) {
            buf_printf(stacks, "%s\n", line);
        }
        line = line == heading ? first : strtok_r(NULL, "\n", &save);
    }
}

static void put_flights(observe_t *o, const snapshot_t *s, buf_t *out, buf_t *stacks)
{
    buf_printf(out, "in flight: %d\n", s->n_in_flight);
    for (int i = 0; i < s->n_flights; i++) {
        const flight_t *f = &s->flights[i];
        buf_printf(out, "  %s %s '%s', set %d, %llu bytes, %s for %.6f s%s%s\n",
                   hvd_op_name((hvd_op_t)f->op), f->route, f->name, f->set,
                   (unsigned long long)f->bytes, f->state, age_s(s, f->submitted),
                   f->where[0] != '\0' ? ", from " : "", f->where);
        bool same_thread = i > 0 && f->thread == s->flights[i - 1].thread;
        if (!same_thread) {
            put_stack(o, NULL, f->thread, out, stacks);
        }
    }
    // A rank that others wait for is in its program: where, only its thread can tell. After a
    // failure nothing is in flight any more, and the last to submit is whom it hit.
    const record_t *last = snapshot_last(s);
    if (s->n_flights == 0 && last != NULL) {
        put_stack(o, "the thread that submitted the last operation is now here:", last->thread, out,
                  stacks);
    }
}

static void put_record(const observe_t *o, const snapshot_t *s, uint64_t number, const record_t *r,
                       buf_t *out)
{
    uint64_t agreed = r->agreed != 0 ? r->agreed : r->finished;
    uint64_t started = r->started != 0 ? r->started : agreed;
    buf_printf(
        out, "%8llu %12.6f %-13s %-9s %-8s %4d %6d %6d %12llu %12.1f %11.1f %11.1f  %-12s %s\n",
        (unsigned long long)number, age_s(s, r->finished), hvd_op_name((hvd_op_t)r->op),
        o->job.way_name(r->route), hvd_dtype_name((hvd_dtype_t)r->dtype), r->set, r->n_tensors,
        r->n_fused, (unsigned long long)r->bytes, 1e6 * seconds(s, r->submitted, agreed),
        1e6 * seconds(s, agreed, started), 1e6 * seconds(s, started, r->finished),
        r->status == HVD_OK ? "ok" : hvd_status_name((hvd_status_t)r->status), r->name);
}

void snapshot_page(observe_t *o, const snapshot_t *s, buf_t *out, buf_t *stacks)
{
    uint64_t n = s->recorder.n;
    uint64_t first = n > RECORDED_OPERATIONS ? n - RECORDED_OPERATIONS : 0;
    buf_printf(out, "rank %d of %d, pid %d, %s\n", o->job.rank, o->job.size, (int)getpid(),
               snapshot_state(s));
    if (s->ended.status != HVD_OK) {
        buf_printf(out, "ended: %s\n", s->ended.text);
    }
    put_flights(o, s, out, stacks);
    buf_printf(out, "finished: %llu, newest first\n", (unsigned long long)n);
    buf_printf(out, "%8s %12s %-13s %-9s %-8s %4s %6s %6s %12s %12s %11s %11s  %-12s %s\n",
               "number", "seconds ago", "operation", "route", "dtype", "set", "group", "fused",
               "bytes", "negotiate us", "queue us", "run us", "status", "name");
    for (uint64_t i = n; i > first; i--) {
        put_record(o, s, i, &s->recorder.ring[(i - 1) % RECORDER_SLOTS], out);
    }
}

// Is the line `File "/x/train.py", line 7, in main` of the user's own program?
static bool is_users(const char *line, size_t bytes)
{
    static const char *const others[] = {"/site-packages/", "/lib/python", "<frozen "};
    for (size_t i = 0; i < N_ELEMENTS(others); i++) {
        if (memmem(line, bytes, others[i], strlen(others[i])) != NULL) {
            return false;
        }
    }
    return true;
}

// The innermost line of the user's in a stack, or the innermost of all: "at train.py:7, in main, ".
// A stack has the innermost last, unless it says otherwise. "": there is none.
static void put_innermost(const char *stack, buf_t *out)
{
    static const char mark[] = "File \"";
    bool is_upside_down = strstr(stack, "innermost first") != NULL, has_users = false;
    char path[256], function[64], found[400] = "";
    for (const char *at = strstr(stack, mark); at != NULL; at = strstr(at + 1, mark)) {
        int line;
        bool users = is_users(at, strcspn(at, "\n"));
        bool is_better = users == has_users ? !is_upside_down || found[0] == '\0' : users;
        if (is_better && sscanf(at, "File \"%255[^\"]\", line %d%*[, ]in %63[^\n]", path, &line,
                                function) == 3) {
            snprintf(found, sizeof found, "at %s:%d, in %s, ", path, line, function);
            has_users = users;
        }
    }
    buf_append(out, found, strlen(found));
}

void snapshot_where(observe_t *o, const snapshot_t *s, buf_t *out)
{
    const record_t *last = snapshot_last(s);
    const flight_t *f = s->n_flights > 0 ? &s->flights[0] : NULL;
    char stack[STACK_BYTES];
    if (f != NULL && f->where[0] != '\0') {
        buf_printf(out, "at %s, ", f->where);
    } else {
        observe_read_stack(o,
                           f != NULL      ? f->thread
                           : last != NULL ? last->thread
                                          : o->opened_by,
                           stack);
        put_innermost(stack, out);
    }
    if (f != NULL) {
        buf_printf(out, "in %s '%s' for %.1f s\n", hvd_op_name((hvd_op_t)f->op), f->name,
                   age_s(s, f->submitted));
    } else if (last != NULL) {
        buf_printf(out, "%.1f s after its last operation, '%s'\n", age_s(s, last->finished),
                   last->name);
    } else {
        buf_printf(out, "before its first operation\n");
    }
}

void snapshot_status(const observe_t *o, const snapshot_t *s, int max_flights, buf_t *out)
{
    const record_t *last = snapshot_last(s);
    buf_printf(out, "rank\t%d\nsize\t%d\npid\t%d\nstate\t%s\noperations\t%llu\n", o->job.rank,
               o->job.size, (int)getpid(), snapshot_state(s), (unsigned long long)s->recorder.n);
    if (last != NULL) {
        buf_printf(out, "finished\t%.6f\t%s\t%s\n", age_s(s, last->finished),
                   hvd_op_name((hvd_op_t)last->op), last->name);
    }
    buf_printf(out, "in_flight\t%d\n", s->n_in_flight);
    for (int i = 0; i < MIN(s->n_flights, max_flights); i++) {
        const flight_t *f = &s->flights[i];
        buf_printf(out, "flight\t%s\t%.6f\t%s\t%d\t%s\n", f->state, age_s(s, f->submitted),
                   hvd_op_name((hvd_op_t)f->op), f->set, f->name);
    }
    if (s->ended.status != HVD_OK) {
        buf_printf(out, "ended\t%.400s\n", s->ended.text);
    }
}
