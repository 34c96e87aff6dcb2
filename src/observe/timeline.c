// SPDX-License-Identifier: Apache-2.0
//
// timeline.c - what happened to each tensor, as a trace that Perfetto shows. Written by rank 0.
//
// A JSON array of events on groups of tracks ("processes" of the trace). "rank 0" has one, of
// the program itself: COMPUTE from the end of one operation to the submission of the next.
// "tensors" has one for each name, with two spans per operation: NEGOTIATE_<OP> until all ranks had
// submitted it, with a mark for each rank whose share came; then <OP>, with how long it queued and
// how it ran inside. "ranks" has one for each rank, with the same marks. "GPU", which is there if
// there is one, has when the device was at work, by its own clock. Operations are noted as small
// structs under the engine's lock, which costs about as much as a lookup of the name; the monitor
// thread turns them into text and writes.
//
// Spans are complete events in whole nanoseconds, their ends computed from rounded times: so what
// is inside another never ends after it, and nobody has to pair beginnings with ends.
//
// The file parses at every moment, also after a kill in the middle of a write. A kill can tear a
// write only where it goes from one page of the file to the next, and text of a growing array that
// ends at a page would lack its closing bracket. So the bracket stands far ahead, behind blanks: an
// event takes the place of blanks inside one page, and never moves it. When the blanks are used up,
// a copy of the file with as many again is made beside it and takes its name, which is also how it
// begins and, without blanks, how it ends. A kill while the copy is made leaves it behind, as
// NAME.new, until the next timeline of that name.
//
// The size is bounded. A full disk, like a full file, ends the timeline with one warning, not the
// training; events that come faster than they can be written are counted and left out.
#define _GNU_SOURCE
#include "observe/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define OPENING "["
#define CLOSING "\n]\n"
#define PAGE_BYTES ((off_t)4096)
#define LINE_BYTES 1024
#define LAST_WORDS_BYTES 256 // kept free below the largest size
#define OPERATION_LINES 6    // of one operation at most, and
#define SKIPPED_LINES 2      // what may stay blank at the ends of pages for it
#define FIRST_ROOM_BYTES ((off_t)64 * 1024)
#define COPY_BYTES (16 * 1024)
#define MAX_EVENTS 16384 // waiting to be written
#define MAX_TRACKS 65536 // names; further ones share a line
#define SHOWN_DIMS 6
#define NAME_SHOWN 500

// Groups of tracks.
enum { GROUP_PROGRAM, GROUP_TENSORS, GROUP_RANKS, GROUP_GPU };

typedef enum event_kind {
    EVENT_OPERATION,
    EVENT_CYCLE,
    EVENT_ARRIVAL,
    EVENT_COMPUTE,
    EVENT_DEVICE
} event_kind_t;

typedef struct event {
    uint8_t kind, op, dtype, route;
    bool is_adasum; // users know it by a name of its own
    int16_t n_dims;
    int16_t status;
    int32_t track;
    int32_t rank; // of an arrival
    int32_t n_fused, n_tensors;
    uint64_t bytes;
    uint64_t submitted, agreed, started, finished; // ticks; those of marks are in `submitted`
    union {
        int64_t dims[SHOWN_DIMS];
        device_work_t work; // of the device
    };
} event_t;

typedef struct backlog {
    event_t *events;
    int n_events;
    uint64_t n_dropped;
    buf_t names; // of new tracks, in their order, each with its '\0'
} backlog_t;

struct timeline {
    bool mark_cycles;
    // Under lock.
    backlog_t filling;
    map_t tracks; // tensor name -> track
    intptr_t n_tracks;
    uint64_t last_finished; // ticks; 0: nothing has

    // The monitor thread's.
    backlog_t writing;
    int32_t n_named; // tracks whose names are in the file
    int32_t n_ranks; // the same of ranks
    buf_t ends;      // uint64_t by track: where its last span ends, in nanoseconds
    uint64_t program_end;
    bool has_gpu; // its tracks have names
    uint64_t lane_ends[N_DEVICE_LANES];
    int fd;
    off_t end;      // of the last event; blanks from there
    off_t room_end; // to here, where the closing bracket stands
    off_t max_bytes;
    bool is_over;           // a write failed, or the file is full
    char piece[PAGE_BYTES]; // what comes next at `end`, inside one page
    size_t piece_bytes;
    uint64_t start_ticks;
    int64_t start_us; // the same moment, since 1970
    double us_per_tick;
    char *path, *new_path;
};

// --- Noting, under lock --------------------------------------------------------------------------

static int32_t track_of(timeline_t *t, const char *tensor)
{
    size_t bytes = strlen(tensor);
    uint64_t hash = hash_bytes(tensor, bytes, 0);
    intptr_t track = (intptr_t)map_get(&t->tracks, hash, tensor, bytes);
    if (LIKELY(track != 0)) {
        return (int32_t)track;
    }
    if (t->n_tracks == MAX_TRACKS) {
        return MAX_TRACKS;
    }
    const char *shown = t->n_tracks + 1 == MAX_TRACKS ? "(further tensors)" : tensor;
    if (!buf_append(&t->filling.names, shown, strlen(shown) + 1) ||
        !map_put(&t->tracks, hash, tensor, bytes, (void *)(t->n_tracks + 1))) {
        return 0;
    }
    return (int32_t)++t->n_tracks;
}

static event_t *new_event(observe_t *o, timeline_t *t, event_kind_t kind) REQUIRES(*o->job.lock)
{
    JOB_LOCKED(o);
    backlog_t *backlog = &t->filling;
    INVARIANT(backlog->n_events <= MAX_EVENTS);
    if (backlog->n_events == MAX_EVENTS) {
        backlog->n_dropped++;
        return NULL;
    }
    event_t *event = &backlog->events[backlog->n_events++];
    event->kind = (uint8_t)kind;
    return event;
}

bool timeline_is_filling(const observe_t *o, const timeline_t *t)
{
    JOB_LOCKED(o);
    return t->filling.n_events == MAX_EVENTS / 2;
}

// Between the last end and this submission nobody waited: the program was at its own work.
static void add_compute(observe_t *o, timeline_t *t, const record_t *record) REQUIRES(*o->job.lock)
{
    bool has_gap = t->last_finished != 0 && record->submitted > t->last_finished;
    event_t *e = has_gap ? new_event(o, t, EVENT_COMPUTE) : NULL;
    if (e != NULL) {
        e->submitted = t->last_finished;
        e->finished = record->submitted;
    }
    t->last_finished = MAX(t->last_finished, record->finished);
}

void timeline_add(observe_t *o, timeline_t *t, const trace_t *trace, const record_t *record)
{
    add_compute(o, t, record);
    event_t *e = new_event(o, t, EVENT_OPERATION);
    if (e == NULL) {
        return;
    }
    e->track = track_of(t, trace->name);
    e->op = record->op;
    e->is_adasum = trace->signature->reduce == HVD_ADASUM;
    e->dtype = record->dtype;
    e->route = record->route;
    e->status = record->status;
    e->n_fused = record->n_fused;
    e->n_tensors = record->n_tensors;
    e->bytes = record->bytes;
    e->submitted = record->submitted;
    e->agreed = record->agreed != 0 ? record->agreed : record->started;
    e->started = record->started;
    e->finished = record->finished;
    e->n_dims = 0;
    if (trace->signature->n_tensors > 0) {
        const hvd_tensor_t *first = &trace->tensors[0];
        e->n_dims = (int16_t)first->n_dims;
        for (int d = 0; d < MIN(first->n_dims, SHOWN_DIMS); d++) {
            e->dims[d] = first->shape[d];
        }
    }
}

void timeline_add_cycle(observe_t *o, timeline_t *t, uint64_t ticks)
{
    event_t *e = t->mark_cycles ? new_event(o, t, EVENT_CYCLE) : NULL;
    if (e != NULL) {
        e->submitted = ticks;
    }
}

void timeline_add_device(observe_t *o, timeline_t *t, const device_work_t *work)
{
    event_t *e = new_event(o, t, EVENT_DEVICE);
    if (e != NULL) {
        e->work = *work;
    }
}

void timeline_add_arrival(observe_t *o, timeline_t *t, const char *tensor, int rank, uint64_t ticks)
{
    event_t *e = new_event(o, t, EVENT_ARRIVAL);
    if (e != NULL) {
        e->track = track_of(t, tensor);
        e->rank = rank;
        e->submitted = ticks;
    }
}

// --- Writing -------------------------------------------------------------------------------------

static bool write_at(int fd, const char *text, size_t bytes, off_t at)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pwrite(fd, text + done, bytes - done, at + (off_t)done);
        if (n < 0 && errno != EINTR) {
            return false;
        }
        errno = n == 0 ? ENOSPC : errno;
        if (n == 0) {
            return false;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return true;
}

static bool fill_with_blanks(int fd, off_t from, off_t to)
{
    char blanks[COPY_BYTES];
    memset(blanks, ' ', sizeof blanks);
    for (off_t at = from; at < to; at += COPY_BYTES) {
        if (!write_at(fd, blanks, (size_t)MIN(to - at, (off_t)COPY_BYTES), at)) {
            return false;
        }
    }
    return true;
}

static bool copy_events(const timeline_t *t, int fd, off_t end)
{
    char text[COPY_BYTES];
    for (off_t at = 0; at < end;) {
        ssize_t n = pread(t->fd, text, (size_t)MIN(end - at, (off_t)COPY_BYTES), at);
        if (n <= 0 || !write_at(fd, text, (size_t)n, at)) {
            return false;
        }
        at += n;
    }
    return true;
}

// A file with what has been written and this much room takes the place of the one before.
static hvd_status_t remake(timeline_t *t, off_t room, err_t *err)
{
    bool is_first = t->fd < 0;
    off_t end = is_first ? (off_t)strlen(OPENING) : t->end;
    off_t kept = is_first ? end : MIN(end, t->room_end); // a page may have been skipped to its end
    unlink(t->new_path);
    int fd = open(t->new_path, O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0) {
        return fail_errno(err, errno, "cannot write the timeline to '%s'", t->path);
    }
    bool ok = (is_first ? write_at(fd, OPENING, strlen(OPENING), 0) : copy_events(t, fd, kept)) &&
              fill_with_blanks(fd, kept, end + room) &&
              write_at(fd, CLOSING, strlen(CLOSING), end + room) &&
              rename(t->new_path, t->path) == 0;
    if (!ok) {
        int code = errno;
        close(fd);
        unlink(t->new_path);
        fail_errno(err, code, "cannot write the timeline to '%s'", t->path);
        errno = code;
        return err->status;
    }
    if (!is_first) {
        close(t->fd);
    }
    t->fd = fd;
    t->end = end;
    t->room_end = end + room;
    return HVD_OK;
}

static void give_up(observe_t *o, timeline_t *t, const char *why)
{
    log_warn(o->job.log, "timeline", "cannot write more to '%s': %s. The timeline ends here",
             t->path, why);
    t->is_over = true;
}

static bool has_room(observe_t *o, timeline_t *t)
{
    err_t err;
    if (t->end + (off_t)t->piece_bytes <= t->room_end) {
        return true;
    }
    off_t most = t->max_bytes - (off_t)strlen(CLOSING) - t->end;
    if (remake(t, MIN(MAX(t->end, FIRST_ROOM_BYTES), most), &err) != HVD_OK) {
        give_up(o, t, strerror(errno));
        return false;
    }
    return true;
}

static void write_piece(observe_t *o, timeline_t *t)
{
    if (t->piece_bytes > 0 && !t->is_over && has_room(o, t)) {
        if (write_at(t->fd, t->piece, t->piece_bytes, t->end)) {
            t->end += (off_t)t->piece_bytes;
        } else {
            give_up(o, t, strerror(errno));
            fill_with_blanks(t->fd, t->end, t->end + (off_t)t->piece_bytes);
        }
    }
    t->piece_bytes = 0;
}

// One event, with the comma that parts it from the last one. If it does not fit into this page, the
// rest of the page stays blank.
static void put(observe_t *o, timeline_t *t, const char *format, ...) PRINTF_LIKE(3, 4);

static void put(observe_t *o, timeline_t *t, const char *format, ...)
{
    char line[LINE_BYTES];
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    size_t bytes = MIN((size_t)MAX(wanted, 0), sizeof line - 1);
    if (t->piece_bytes + bytes > (size_t)(PAGE_BYTES - t->end % PAGE_BYTES)) {
        write_piece(o, t);
        if (bytes > (size_t)(PAGE_BYTES - t->end % PAGE_BYTES)) {
            t->end += PAGE_BYTES - t->end % PAGE_BYTES;
        }
    }
    memcpy(t->piece + t->piece_bytes, line, bytes);
    t->piece_bytes += bytes;
}

static bool is_full(observe_t *o, timeline_t *t)
{
    off_t needed = LAST_WORDS_BYTES + (OPERATION_LINES + SKIPPED_LINES) * LINE_BYTES;
    if (!t->is_over && t->end + (off_t)t->piece_bytes + needed > t->max_bytes) {
        put(o, t,
            ",\n{\"name\": \"TIMELINE_FULL\", \"ph\": \"i\", \"s\": \"g\", \"ts\": %.3f, \"pid\": "
            "0, \"tid\": 0}",
            (double)(ticks_now() - t->start_ticks) * t->us_per_tick);
        write_piece(o, t);
        t->is_over = true;
        log_warn(
            o->job.log, "timeline",
            "'%s' has reached %lld bytes and ends here; raise HOROVOD_TIMELINE_MAX_BYTES for more",
            t->path, (long long)t->max_bytes);
    }
    return t->is_over;
}

static void put_name(observe_t *o, timeline_t *t, int group, int track, const char *name)
{
    put(o, t,
        ",\n{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": "
        "{\"name\": "
        "\"%s\"}}",
        group, track, name);
    put(o, t,
        ",\n{\"name\": \"thread_sort_index\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": "
        "{\"sort_index\": %d}}",
        group, track, track);
}

static void put_sort_index(observe_t *o, timeline_t *t, int group)
{
    put(o, t,
        ",\n{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": %d, \"args\": "
        "{\"sort_index\": %d}}",
        group, group);
}

static void put_group(observe_t *o, timeline_t *t, int group, const char *name)
{
    put(o, t,
        ",\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"name\": "
        "\"%s\"}}",
        group, name);
    put_sort_index(o, t, group);
}

static void put_names(observe_t *o, timeline_t *t)
{
    const char *names = (const char *)t->writing.names.data;
    for (size_t at = 0; at < t->writing.names.len && !is_full(o, t);) {
        char name[NAME_SHOWN];
        escape_name(names + at, name, sizeof name);
        put_name(o, t, GROUP_TENSORS, ++t->n_named, name);
        at += strlen(names + at) + 1;
    }
}

// Since the beginning, in nanoseconds. Everything is computed from these, so that sums fit.
static uint64_t nanos(const timeline_t *t, uint64_t ticks)
{
    return ticks > t->start_ticks
               ? (uint64_t)((double)(ticks - t->start_ticks) * t->us_per_tick * 1000.0 + 0.5)
               : 0;
}

// A number in microseconds with three digits behind the point, without rounding again.
#define US_FORMAT "%llu.%03llu"
#define US(ns) (unsigned long long)((ns) / 1000), (unsigned long long)((ns) % 1000)

static void put_span(observe_t *o, timeline_t *t, int group, int track, const char *name,
                     uint64_t begin_ns, uint64_t end_ns, const char *args)
{
    put(o, t,
        ",\n{\"name\": \"%s\", \"ph\": \"X\", \"ts\": " US_FORMAT ", \"dur\": " US_FORMAT
        ", \"pid\": %d, \"tid\": %d%s}",
        name, US(begin_ns), US(end_ns - begin_ns), group, track, args);
}

static void shape_text(const event_t *e, char *text, size_t bytes)
{
    size_t n = (size_t)snprintf(text, bytes, "[");
    for (int d = 0; d < MIN(e->n_dims, SHOWN_DIMS) && n + 32 < bytes; d++) {
        n += (size_t)snprintf(text + n, bytes - n, "%s%lld", d > 0 ? ", " : "",
                              (long long)e->dims[d]);
    }
    snprintf(text + n, bytes - n, "%s]", e->n_dims > SHOWN_DIMS ? ", ..." : "");
}

// The pace of the clock is known better and better, so times of two writes may overlap by a little.
// No span begins before the last one of its track has ended.
static uint64_t *end_of_track(timeline_t *t, int track)
{
    static const uint64_t none = 0;
    while (t->ends.len <= (size_t)track * sizeof none) {
        if (buf_append(&t->ends, &none, sizeof none) == NULL) {
            return &t->program_end; // without memory tracks push each other
        }
    }
    return (uint64_t *)(void *)t->ends.data + track;
}

static void put_operation(observe_t *o, timeline_t *t, const event_t *e)
{
    uint64_t *end = end_of_track(t, e->track);
    char op[32], name[64], args[512];
    char shape[SHOWN_DIMS * 24 + 32];
    upper_case(e->is_adasum ? "adasum" : hvd_op_name((hvd_op_t)e->op), op, sizeof op);
    shape_text(e, shape, sizeof shape);
    uint64_t submitted = MAX(nanos(t, e->submitted), *end);
    uint64_t agreed = MAX(nanos(t, e->agreed != 0 ? e->agreed : e->finished), submitted);
    uint64_t started = MAX(nanos(t, e->started), agreed);
    uint64_t finished = MAX(nanos(t, e->finished), started);
    *end = e->agreed != 0 ? finished : agreed;
    snprintf(name, sizeof name, "NEGOTIATE_%s", op);
    put_span(o, t, GROUP_TENSORS, e->track, name, submitted, agreed, "");
    if (e->agreed == 0) { // it never came to run
        return;
    }
    snprintf(args, sizeof args,
             ", \"args\": {\"dtype\": \"%s\", \"shape\": \"%s\", \"tensors\": %d, \"bytes\": %llu, "
             "\"fused\": %d, \"status\": \"%s\"}",
             hvd_dtype_name((hvd_dtype_t)e->dtype), shape, e->n_tensors,
             (unsigned long long)e->bytes, e->n_fused, hvd_status_name((hvd_status_t)e->status));
    put_span(o, t, GROUP_TENSORS, e->track, op, agreed, finished, args);
    if (started > agreed) {
        put_span(o, t, GROUP_TENSORS, e->track, "QUEUE", agreed, started, "");
    }
    snprintf(name, sizeof name, "%s_%s", o->job.way_name(e->route), op);
    put_span(o, t, GROUP_TENSORS, e->track, name, started, finished, "");
}

static void put_mark(observe_t *o, timeline_t *t, int group, int track, const char *name,
                     const char *scope, uint64_t at_ns)
{
    put(o, t,
        ",\n{\"name\": \"%s\", \"ph\": \"i\", \"s\": \"%s\", \"ts\": " US_FORMAT
        ", \"pid\": %d, \"tid\": %d}",
        name, scope, US(at_ns), group, track);
}

static void put_arrival(observe_t *o, timeline_t *t, const event_t *e)
{
    char name[32];
    for (; t->n_ranks <= e->rank && !is_full(o, t); t->n_ranks++) {
        snprintf(name, sizeof name, "rank %d", t->n_ranks);
        put_name(o, t, GROUP_RANKS, t->n_ranks, name);
    }
    snprintf(name, sizeof name, "rank %d ready", e->rank);
    put_mark(o, t, GROUP_TENSORS, e->track, name, "t", nanos(t, e->submitted));
    put_mark(o, t, GROUP_RANKS, e->rank, name, "t", nanos(t, e->submitted));
}

static void put_compute(observe_t *o, timeline_t *t, const event_t *e)
{
    uint64_t begin = MAX(nanos(t, e->submitted), t->program_end);
    uint64_t end = MAX(nanos(t, e->finished), begin);
    put_span(o, t, GROUP_PROGRAM, 0, "COMPUTE", begin, end, "");
    t->program_end = end;
}

static uint64_t nanos_of(const timeline_t *t, device_moment_t moment)
{
    double since = (double)(int64_t)(moment.ticks - t->start_ticks) * t->us_per_tick * 1000.0;
    double ns = since + (double)moment.after_ns;
    return ns > 0 ? (uint64_t)(ns + 0.5) : 0;
}

// One thing at a time on each lane, in the order in which it was queued there: until the device
// gets to it, it is QUEUE.
static void put_device(observe_t *o, timeline_t *t, const device_work_t *work)
{
    static const char *const rows[] = {[LANE_NCCL] = "NCCL",
                                       [LANE_TO_HOST] = "copies to the host",
                                       [LANE_TO_DEVICE] = "copies to the device"};
    static const char *const names[] = {[LANE_NCCL] = "NCCL_",
                                        [LANE_TO_HOST] = "COPY_TO_HOST",
                                        [LANE_TO_DEVICE] = "COPY_TO_DEVICE"};
    char op[32], name[64], tensor[6 * sizeof work->name], args[384];
    if (!t->has_gpu) {
        t->has_gpu = true;
        put_group(o, t, GROUP_GPU, "GPU");
        for (int lane = 0; lane < N_DEVICE_LANES; lane++) {
            put_name(o, t, GROUP_GPU, lane, rows[lane]);
        }
    }
    uint64_t *end = &t->lane_ends[work->lane];
    uint64_t queued = MAX(nanos(t, work->queued), *end);
    uint64_t begun = MAX(nanos_of(t, work->begun), queued);
    uint64_t done = MAX(nanos_of(t, work->done), begun);
    *end = done;
    if (begun > queued) {
        put_span(o, t, GROUP_GPU, (int)work->lane, "QUEUE", queued, begun, "");
    }
    upper_case(hvd_op_name(work->op), op, sizeof op);
    escape_name(work->name, tensor, sizeof tensor);
    snprintf(name, sizeof name, "%s%s", names[work->lane], work->lane == LANE_NCCL ? op : "");
    snprintf(args, sizeof args, ", \"args\": {\"tensor\": \"%s\", \"bytes\": %llu, \"fused\": %d}",
             tensor, (unsigned long long)work->bytes, work->n_fused);
    put_span(o, t, GROUP_GPU, (int)work->lane, name, begun, done, args);
}

static void put_event(observe_t *o, timeline_t *t, const event_t *e)
{
    switch ((event_kind_t)e->kind) {
    case EVENT_OPERATION:
        put_operation(o, t, e);
        break;
    case EVENT_CYCLE:
        put_mark(o, t, GROUP_PROGRAM, 0, "CYCLE_START", "g", nanos(t, e->submitted));
        break;
    case EVENT_ARRIVAL:
        put_arrival(o, t, e);
        break;
    case EVENT_COMPUTE:
        put_compute(o, t, e);
        break;
    case EVENT_DEVICE:
        put_device(o, t, &e->work);
        break;
    }
}

void timeline_write(observe_t *o, timeline_t *t)
{
    lock_take(o->job.lock);
    backlog_t backlog = t->filling;
    t->filling = t->writing;
    t->writing = backlog;
    lock_release(o->job.lock);
    t->us_per_tick = ticks_pace(&o->origin) / 1000.0;
    put_names(o, t);
    for (int i = 0; i < t->writing.n_events && !is_full(o, t); i++) {
        put_event(o, t, &t->writing.events[i]);
    }
    if (t->writing.n_dropped > 0) {
        put(o, t,
            ",\n{\"name\": \"DROPPED_EVENTS\", \"ph\": \"i\", \"s\": \"g\", \"ts\": " US_FORMAT
            ", \"pid\": 0, \"tid\": 0, \"args\": {\"events\": %llu}}",
            US(nanos(t, ticks_now())), (unsigned long long)t->writing.n_dropped);
    }
    write_piece(o, t);
    buf_clear(&t->writing.names);
    t->writing.n_events = 0;
    t->writing.n_dropped = 0;
    if (t->is_over) {
        atomic_store(&o->timeline_on, false);
    }
}

// --- Life ----------------------------------------------------------------------------------------

static void timeline_free(timeline_t *t)
{
    if (t->fd >= 0) {
        close(t->fd);
    }
    map_free(&t->tracks);
    buf_free(&t->ends);
    buf_free(&t->filling.names);
    buf_free(&t->writing.names);
    free(t->filling.events);
    free(t->writing.events);
    free(t->path);
    free(t->new_path);
    free(t);
}

static void put_head(observe_t *o, timeline_t *t)
{
    put(o, t,
        "\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": 0, \"args\": {\"name\": \"rank "
        "%d\", "
        "\"start_time_since_epoch_in_micros\": %lld}}",
        o->job.rank, (long long)t->start_us);
    put_sort_index(o, t, GROUP_PROGRAM);
    put_group(o, t, GROUP_TENSORS, "tensors");
    put_group(o, t, GROUP_RANKS, "ranks");
    put_name(o, t, GROUP_PROGRAM, 0, "program");
    write_piece(o, t);
}

// The file that is to be replaced: where links lead to. Nothing but a file must be.
static hvd_status_t find_file(timeline_t *t, const char *path, err_t *err)
{
    struct stat seen;
    if (stat(path, &seen) == 0 && !S_ISREG(seen.st_mode)) {
        return fail(err, HVD_SYSTEM, "cannot write the timeline to '%s': it is not a regular file",
                    path);
    }
    t->path = realpath(path, NULL);
    t->path = t->path != NULL ? t->path : strdup(path);
    if (t->path == NULL || asprintf(&t->new_path, "%s.new", t->path) < 0) {
        t->new_path = NULL;
        return fail(err, HVD_NO_MEMORY, "no memory for a timeline");
    }
    return HVD_OK;
}

hvd_status_t timeline_open(observe_t *o, const char *path, bool mark_cycles,
                           timeline_t **timeline_p, err_t *err)
{
    struct timespec now;
    hvd_status_t status;
    timeline_t *t = calloc(1, sizeof *t);
    if (t == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a timeline");
    }
    t->fd = -1;
    t->filling.events = malloc(MAX_EVENTS * sizeof *t->filling.events);
    t->writing.events = malloc(MAX_EVENTS * sizeof *t->writing.events);
    if (t->filling.events == NULL || t->writing.events == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory for a timeline");
        goto free_timeline;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    t->start_ticks = ticks_now();
    t->start_us = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
    t->mark_cycles = mark_cycles;
    t->max_bytes = (off_t)o->job.config->timeline_max_bytes;
    TRY(find_file(t, path, err), free_timeline);
    TRY(remake(t, MIN(FIRST_ROOM_BYTES, t->max_bytes / 2), err), free_timeline);
    put_head(o, t);
    *timeline_p = t;
    return HVD_OK;

free_timeline:
    timeline_free(t);
    return status;
}

void timeline_close(observe_t *o, timeline_t *t)
{
    err_t err;
    if (t != NULL) {
        timeline_write(o, t);
        if (remake(t, 0, &err) != HVD_OK) {
            log_debug(o->job.log, "timeline", "%s: spaces stay at its end", err.text);
        }
        timeline_free(t);
    }
}
