// SPDX-License-Identifier: Apache-2.0
//
// timeline.c - what happened to each tensor, as a trace that browsers show (chrome://tracing,
// Perfetto). Written by rank 0.
//
// A JSON array of events. Each tensor is a "process" of the trace with two spans per operation:
// NEGOTIATE_<OP> until all ranks had submitted it, with a mark for each rank whose share came; then
// <OP>, with how long it queued and how it ran inside. Operations are noted as small structs under
// the context's lock, which costs about as much as a lookup of the name; the monitor thread turns
// them into text and writes.
//
// The file parses at every moment: each write ends with the closing bracket, and the next one
// begins by overwriting it. A kill can tear a write only where it crosses from one page of the file
// into the next, so writes end at pages as far as events allow. The size is bounded. A full disk,
// like a full file, ends the timeline with one warning, not the training; events that come faster
// than they can be written are counted and left out.
#include "engine/engine.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define CLOSING "\n]\n"
#define PAGE_BYTES ((off_t)4096)
#define LINE_BYTES 1024
#define LAST_WORDS_BYTES 256 // kept free below the largest size
#define MAX_EVENTS 16384     // waiting to be written
#define MAX_PIDS 65536       // names; further ones share a line
#define SHOWN_DIMS 6
#define NAME_SHOWN 500

typedef enum event_kind { EVENT_OPERATION, EVENT_CYCLE, EVENT_ARRIVAL } event_kind_t;

typedef struct event {
    uint8_t kind, op, dtype, route;
    bool is_adasum; // users know it by a name of its own
    int16_t n_dims;
    int16_t status;
    int32_t pid;
    int32_t rank; // of an arrival
    int32_t n_fused, n_tensors;
    uint64_t bytes;
    uint64_t submitted, agreed, started, finished; // ticks; those of marks are in `submitted`
    int64_t dims[SHOWN_DIMS];
} event_t;

typedef struct backlog {
    event_t *events;
    int n_events;
    uint64_t n_dropped;
    buf_t names; // of new pids, in their order, each with its '\0'
} backlog_t;

struct timeline {
    bool mark_cycles;
    // Under the context's lock.
    backlog_t filling;
    map_t pids; // tensor name -> pid
    intptr_t n_pids;

    // The monitor thread's.
    backlog_t writing;
    int32_t n_named; // pids whose names are in the file
    int fd;
    off_t end; // where the closing bracket stands
    off_t max_bytes;
    bool is_over; // a write failed, or the file is full
    char piece[PAGE_BYTES + LINE_BYTES + sizeof CLOSING];
    size_t piece_bytes;
    uint64_t start_ticks;
    double us_per_tick;
    char *path;
};

// --- Noting, under the context's lock ------------------------------------------------------------

static int32_t pid_of(timeline_t *t, const char *tensor)
{
    size_t bytes = strlen(tensor);
    uint64_t hash = hash_bytes(tensor, bytes, 0);
    intptr_t pid = (intptr_t)map_get(&t->pids, hash, tensor, bytes);
    if (LIKELY(pid != 0)) {
        return (int32_t)pid;
    }
    if (t->n_pids == MAX_PIDS) {
        return MAX_PIDS;
    }
    const char *shown = t->n_pids + 1 == MAX_PIDS ? "(further tensors)" : tensor;
    if (!buf_append(&t->filling.names, shown, strlen(shown) + 1) ||
        !map_put(&t->pids, hash, tensor, bytes, (void *)(t->n_pids + 1))) {
        return 0;
    }
    return (int32_t)++t->n_pids;
}

static event_t *new_event(timeline_t *t, event_kind_t kind)
{
    backlog_t *backlog = &t->filling;
    if (backlog->n_events == MAX_EVENTS) {
        backlog->n_dropped++;
        return NULL;
    }
    event_t *event = &backlog->events[backlog->n_events++];
    event->kind = (uint8_t)kind;
    return event;
}

bool timeline_is_filling(const timeline_t *t)
{
    return t->filling.n_events == MAX_EVENTS / 2;
}

void timeline_add(timeline_t *t, const request_t *request, const record_t *record)
{
    event_t *e = new_event(t, EVENT_OPERATION);
    if (e == NULL) {
        return;
    }
    e->pid = pid_of(t, request->asked.name);
    e->op = record->op;
    e->is_adasum = request->asked.op == HVD_ALLREDUCE && request->asked.reduce == HVD_ADASUM;
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
    if (request->asked.n_tensors > 0) {
        const hvd_tensor_t *first = &request->tensors[0];
        e->n_dims = (int16_t)first->n_dims;
        for (int d = 0; d < MIN(first->n_dims, SHOWN_DIMS); d++) {
            e->dims[d] = first->shape[d];
        }
    }
}

void timeline_add_cycle(timeline_t *t, uint64_t ticks)
{
    event_t *e = t->mark_cycles ? new_event(t, EVENT_CYCLE) : NULL;
    if (e != NULL) {
        e->submitted = ticks;
    }
}

void timeline_add_arrival(timeline_t *t, const char *tensor, int rank, uint64_t ticks)
{
    event_t *e = new_event(t, EVENT_ARRIVAL);
    if (e != NULL) {
        e->pid = pid_of(t, tensor);
        e->rank = rank;
        e->submitted = ticks;
    }
}

// --- Writing -------------------------------------------------------------------------------------

// What could not be written whole must not spoil what was. The bracket's place is already the
// file's, so that even a full disk has room for it.
static void mend(timeline_t *t)
{
    if (pwrite(t->fd, CLOSING, strlen(CLOSING), t->end) == (ssize_t)strlen(CLOSING) &&
        ftruncate(t->fd, t->end + (off_t)strlen(CLOSING)) != 0) {
        t->is_over = true; // and nothing more can be done about it
    }
}

static void write_piece(hvd_ctx_t *ctx, timeline_t *t)
{
    if (t->piece_bytes == 0 || t->is_over) {
        t->piece_bytes = 0;
        return;
    }
    memcpy(t->piece + t->piece_bytes, CLOSING, strlen(CLOSING));
    size_t bytes = t->piece_bytes + strlen(CLOSING);
    ssize_t n;
    do {
        n = pwrite(t->fd, t->piece, bytes, t->end);
    } while (n < 0 && errno == EINTR);
    if (n == (ssize_t)bytes) {
        t->end += (off_t)t->piece_bytes;
    } else {
        log_warn(&ctx->log, "timeline", "cannot write more to '%s': %s. The timeline ends here",
                 t->path, n < 0 ? strerror(errno) : "no room left");
        t->is_over = true;
        mend(t);
    }
    t->piece_bytes = 0;
}

// One event, with the comma that parts it from the last one.
static void put(hvd_ctx_t *ctx, timeline_t *t, const char *format, ...) PRINTF_LIKE(3, 4);

static void put(hvd_ctx_t *ctx, timeline_t *t, const char *format, ...)
{
    char line[LINE_BYTES];
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    size_t bytes = MIN((size_t)MAX(wanted, 0), sizeof line - 1);
    size_t room = (size_t)(PAGE_BYTES - t->end % PAGE_BYTES);
    if (t->piece_bytes + bytes + strlen(CLOSING) > room) {
        write_piece(ctx, t);
    }
    memcpy(t->piece + t->piece_bytes, line, bytes);
    t->piece_bytes += bytes;
}

static bool is_full(hvd_ctx_t *ctx, timeline_t *t)
{
    if (!t->is_over &&
        t->end + (off_t)t->piece_bytes + LAST_WORDS_BYTES + 6 * LINE_BYTES > t->max_bytes) {
        put(ctx, t,
            ",\n{\"name\": \"TIMELINE_FULL\", \"ph\": \"i\", \"s\": \"g\", \"ts\": %.3f, \"pid\": "
            "0}",
            (double)(ticks_now() - t->start_ticks) * t->us_per_tick);
        write_piece(ctx, t);
        t->is_over = true;
        log_warn(&ctx->log, "timeline",
                 "'%s' is full at %lld bytes and ends here; HOROVOD_TIMELINE_MAX_BYTES allows more",
                 t->path, (long long)t->max_bytes);
    }
    return t->is_over;
}

// Bytes of the UTF-8 character at text, if it is one beyond ASCII; else 0.
static size_t utf8_bytes(const unsigned char *text)
{
    size_t n = text[0] >= 0xc2 && text[0] < 0xe0   ? 2
               : text[0] >= 0xe0 && text[0] < 0xf0 ? 3
               : text[0] >= 0xf0 && text[0] < 0xf5 ? 4
                                                   : 0;
    for (size_t i = 1; i < n; i++) {
        if ((text[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    bool overlong = (text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xf0 && text[1] < 0x90);
    bool unused = (text[0] == 0xed && text[1] >= 0xa0) || (text[0] == 0xf4 && text[1] >= 0x90);
    return n == 0 || overlong || unused ? 0 : n;
}

// A name as a JSON string without its quotes. Bytes that are no UTF-8 are shown as numbers.
static void escape(const char *name, char *out, size_t bytes)
{
    size_t n = 0;
    for (; *name != '\0' && n + 7 < bytes; name++) {
        unsigned char c = (unsigned char)*name;
        size_t character = utf8_bytes((const unsigned char *)name);
        if (character > 0) {
            memcpy(out + n, name, character);
            n += character;
            name += character - 1;
        } else if (c == '"' || c == '\\') {
            out[n++] = '\\';
            out[n++] = (char)c;
        } else if (c < 0x20 || c >= 0x7f) {
            n += (size_t)snprintf(out + n, bytes - n, "\\u%04x", c);
        } else {
            out[n++] = (char)c;
        }
    }
    out[n] = '\0';
}

static void put_names(hvd_ctx_t *ctx, timeline_t *t)
{
    const char *names = (const char *)t->writing.names.data;
    for (size_t at = 0; at < t->writing.names.len && !is_full(ctx, t);) {
        char name[NAME_SHOWN];
        int pid = ++t->n_named;
        escape(names + at, name, sizeof name);
        put(ctx, t,
            ",\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"name\": "
            "\"%s\"}}",
            pid, name);
        put(ctx, t,
            ",\n{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": %d, \"args\": "
            "{\"sort_index\": %d}}",
            pid, pid);
        at += strlen(names + at) + 1;
    }
}

static double micros(const timeline_t *t, uint64_t ticks)
{
    return ticks > t->start_ticks ? (double)(ticks - t->start_ticks) * t->us_per_tick : 0.0;
}

static void upper(const char *text, char *out, size_t bytes)
{
    size_t n = 0;
    for (; text[n] != '\0' && n + 1 < bytes; n++) {
        out[n] = (char)toupper((unsigned char)text[n]);
    }
    out[n] = '\0';
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

static void put_operation(hvd_ctx_t *ctx, timeline_t *t, const event_t *e)
{
    char op[32];
    char shape[SHOWN_DIMS * 24 + 32];
    upper(e->is_adasum ? "adasum" : hvd_op_name((hvd_op_t)e->op), op, sizeof op);
    shape_text(e, shape, sizeof shape);
    uint64_t agreed = e->agreed != 0 ? MAX(e->agreed, e->submitted) : e->finished;
    uint64_t started = MAX(e->started, agreed);
    uint64_t finished = MAX(e->finished, started);
    put(ctx, t, ",\n{\"name\": \"NEGOTIATE_%s\", \"ph\": \"B\", \"ts\": %.3f, \"pid\": %d}", op,
        micros(t, e->submitted), e->pid);
    put(ctx, t, ",\n{\"ph\": \"E\", \"ts\": %.3f, \"pid\": %d}", micros(t, agreed), e->pid);
    if (e->agreed == 0) { // it never came to run
        return;
    }
    put(ctx, t, ",\n{\"name\": \"%s\", \"ph\": \"B\", \"ts\": %.3f, \"pid\": %d}", op,
        micros(t, agreed), e->pid);
    if (started > agreed) {
        put(ctx, t,
            ",\n{\"name\": \"QUEUE\", \"ph\": \"X\", \"ts\": %.3f, \"dur\": %.3f, \"pid\": %d}",
            micros(t, agreed), micros(t, started) - micros(t, agreed), e->pid);
    }
    put(ctx, t,
        ",\n{\"name\": \"%s_%s\", \"ph\": \"X\", \"ts\": %.3f, \"dur\": %.3f, \"pid\": %d}",
        route_names[e->route], op, micros(t, started), micros(t, finished) - micros(t, started),
        e->pid);
    put(ctx, t,
        ",\n{\"ph\": \"E\", \"ts\": %.3f, \"pid\": %d, \"args\": {\"dtype\": \"%s\", \"shape\": "
        "\"%s\", \"tensors\": %d, \"bytes\": %llu, \"fused\": %d, \"status\": \"%s\"}}",
        micros(t, finished), e->pid, hvd_dtype_name((hvd_dtype_t)e->dtype), shape, e->n_tensors,
        (unsigned long long)e->bytes, e->n_fused, hvd_status_name((hvd_status_t)e->status));
}

static void put_event(hvd_ctx_t *ctx, timeline_t *t, const event_t *e)
{
    switch ((event_kind_t)e->kind) {
    case EVENT_OPERATION:
        put_operation(ctx, t, e);
        break;
    case EVENT_CYCLE:
        put(ctx, t,
            ",\n{\"name\": \"CYCLE_START\", \"ph\": \"i\", \"s\": \"g\", \"ts\": %.3f, \"pid\": 0}",
            micros(t, e->submitted));
        break;
    case EVENT_ARRIVAL:
        put(ctx, t,
            ",\n{\"name\": \"%d\", \"ph\": \"X\", \"ts\": %.3f, \"dur\": 0, \"pid\": %d}", e->rank,
            micros(t, e->submitted), e->pid);
        break;
    }
}

void timeline_write(hvd_ctx_t *ctx, timeline_t *t)
{
    pthread_mutex_lock(&ctx->lock);
    backlog_t backlog = t->filling;
    t->filling = t->writing;
    t->writing = backlog;
    pthread_mutex_unlock(&ctx->lock);
    t->us_per_tick = ticks_pace(&ctx->origin) / 1000.0;
    put_names(ctx, t);
    for (int i = 0; i < t->writing.n_events && !is_full(ctx, t); i++) {
        put_event(ctx, t, &t->writing.events[i]);
    }
    if (t->writing.n_dropped > 0) {
        put(ctx, t,
            ",\n{\"name\": \"DROPPED_EVENTS\", \"ph\": \"i\", \"s\": \"g\", \"ts\": %.3f, \"pid\": "
            "0, \"args\": {\"events\": %llu}}",
            micros(t, ticks_now()), (unsigned long long)t->writing.n_dropped);
    }
    write_piece(ctx, t);
    buf_clear(&t->writing.names);
    t->writing.n_events = 0;
    t->writing.n_dropped = 0;
    if (t->is_over) {
        atomic_store(&ctx->timeline_on, false);
    }
}

// --- Life ----------------------------------------------------------------------------------------

static void timeline_free(timeline_t *t)
{
    close(t->fd);
    map_free(&t->pids);
    buf_free(&t->filling.names);
    buf_free(&t->writing.names);
    free(t->filling.events);
    free(t->writing.events);
    free(t->path);
    free(t);
}

static void put_head(hvd_ctx_t *ctx, timeline_t *t)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    put(ctx, t,
        "[\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": 0, \"args\": "
        "{\"start_time_since_epoch_in_micros\": %lld}}",
        (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000);
    put(ctx, t,
        ",\n{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": 0, \"args\": "
        "{\"sort_index\": 0}}");
    write_piece(ctx, t);
}

hvd_status_t timeline_open(hvd_ctx_t *ctx, const char *path, bool mark_cycles,
                           timeline_t **timeline_p, err_t *err)
{
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
    if (fd < 0) {
        return fail_errno(err, errno, "cannot write the timeline to '%s'", path);
    }
    timeline_t *t = calloc(1, sizeof *t);
    if (t == NULL) {
        close(fd);
        return fail(err, HVD_NO_MEMORY, "no memory for a timeline");
    }
    t->fd = fd;
    t->filling.events = malloc(MAX_EVENTS * sizeof *t->filling.events);
    t->writing.events = malloc(MAX_EVENTS * sizeof *t->writing.events);
    t->path = strdup(path);
    if (t->filling.events == NULL || t->writing.events == NULL || t->path == NULL) {
        timeline_free(t);
        return fail(err, HVD_NO_MEMORY, "no memory for a timeline");
    }
    t->start_ticks = ticks_now();
    t->mark_cycles = mark_cycles;
    t->max_bytes = (off_t)ctx->config.timeline_max_bytes;
    put_head(ctx, t);
    *timeline_p = t;
    return HVD_OK;
}

void timeline_close(hvd_ctx_t *ctx, timeline_t *t)
{
    if (t != NULL) {
        timeline_write(ctx, t);
        timeline_free(t);
    }
}
