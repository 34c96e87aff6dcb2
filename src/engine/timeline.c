// SPDX-License-Identifier: Apache-2.0
//
// timeline.c - what happened to each tensor, as a trace that browsers show (chrome://tracing,
// Perfetto).
//
// A JSON array of events, written by rank 0 only. The file parses at every moment: each write ends
// with the closing bracket, and the next one starts by overwriting it. Each tensor is a "process"
// of the trace with two spans per operation: NEGOTIATE_<OP> while ranks were agreeing, <OP> while
// it ran. Events are collected and written in pieces; a full disk ends the timeline, not the
// training. Threads: the holder of the engine.
#include "engine/engine.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define FLUSH_BYTES (32 * KIB)
#define CLOSING "\n]\n"

struct timeline {
    int fd;
    off_t end; // where the closing bracket stands
    uint64_t start_ns;
    bool mark_cycles;
    bool broken; // a write failed; no more are tried
    buf_t pending;
    map_t pids; // tensor name -> pid
    intptr_t n_pids;
};

static void append(timeline_t *t, const char *format, ...) PRINTF_LIKE(2, 3);

static void append(timeline_t *t, const char *format, ...)
{
    char line[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    buf_append(&t->pending, line, MIN((size_t)n, sizeof line - 1));
}

static void flush(timeline_t *t)
{
    size_t events = t->pending.len;
    append(t, CLOSING);
    if (!t->broken && !t->pending.failed && events > 0) {
        ssize_t n = pwrite(t->fd, t->pending.data, t->pending.len, t->end);
        t->broken = n != (ssize_t)t->pending.len;
        t->end += t->broken ? 0 : (off_t)events;
    }
    // A torn event must not spoil the rest; if even the bracket finds no room, nothing more can be
    // done.
    if (t->broken && ftruncate(t->fd, t->end) == 0 &&
        pwrite(t->fd, CLOSING, strlen(CLOSING), t->end) < 0) {
        t->mark_cycles = false;
    }
    buf_clear(&t->pending);
}

// A name as a JSON string without its quotes.
static void escape(const char *name, char *out, size_t bytes)
{
    size_t n = 0;
    for (; *name != '\0' && n + 7 < bytes; name++) {
        unsigned char c = (unsigned char)*name;
        if (c == '"' || c == '\\') {
            out[n++] = '\\';
            out[n++] = (char)c;
        } else if (c < 0x20) {
            n += (size_t)snprintf(out + n, bytes - n, "\\u%04x", c);
        } else {
            out[n++] = (char)c;
        }
    }
    out[n] = '\0';
}

hvd_status_t timeline_open(const char *path, bool mark_cycles, timeline_t **timeline_p, err_t *err)
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
    t->start_ns = clock_ns();
    t->mark_cycles = mark_cycles;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    append(t,
           "[\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": 0, \"args\": "
           "{\"start_time_since_epoch_in_micros\": %lld}}",
           (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000);
    append(t, ",\n{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": 0, \"args\": "
              "{\"sort_index\": 0}}");
    flush(t);
    *timeline_p = t;
    return HVD_OK;
}

void timeline_close(timeline_t *t)
{
    if (t == NULL) {
        return;
    }
    flush(t);
    close(t->fd);
    map_free(&t->pids);
    buf_free(&t->pending);
    free(t);
}

static intptr_t pid_of(timeline_t *t, const char *tensor)
{
    size_t bytes = strlen(tensor);
    uint64_t hash = hash_bytes(tensor, bytes, 0);
    intptr_t pid = (intptr_t)map_get(&t->pids, hash, tensor, bytes);
    if (pid == 0) {
        pid = ++t->n_pids;
        map_put(&t->pids, hash, tensor, bytes, (void *)pid);
        char name[512];
        escape(tensor, name, sizeof name);
        append(t,
               ",\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %ld, \"args\": {\"name\": "
               "\"%s\"}}"
               ",\n{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": %ld, \"args\": "
               "{\"sort_index\": %ld}}",
               (long)pid, name, (long)pid, (long)pid);
    }
    return pid;
}

static double micros(const timeline_t *t, uint64_t ns)
{
    return ns > t->start_ns ? (double)(ns - t->start_ns) / 1000.0 : 0.0;
}

static void upper(const char *text, char *out, size_t bytes)
{
    size_t n = 0;
    for (; text[n] != '\0' && n + 1 < bytes; n++) {
        out[n] = (char)toupper((unsigned char)text[n]);
    }
    out[n] = '\0';
}

void timeline_operation(timeline_t *t, const timeline_event_t *e)
{
    char op[32];
    upper(hvd_op_name(e->op), op, sizeof op);
    intptr_t pid = pid_of(t, e->tensor);
    double submitted = micros(t, e->submitted_ns);
    double started = micros(t, MAX(e->started_ns, e->submitted_ns));
    double finished = micros(t, e->finished_ns);
    append(t, ",\n{\"name\": \"NEGOTIATE_%s\", \"ph\": \"B\", \"ts\": %.3f, \"pid\": %ld}", op,
           submitted, (long)pid);
    append(t, ",\n{\"ph\": \"E\", \"ts\": %.3f, \"pid\": %ld}", started, (long)pid);
    append(t, ",\n{\"name\": \"%s\", \"ph\": \"B\", \"ts\": %.3f, \"pid\": %ld}", op, started,
           (long)pid);
    append(t, ",\n{\"name\": \"%s_%s\", \"ph\": \"X\", \"ts\": %.3f, \"dur\": %.3f, \"pid\": %ld}",
           e->activity, op, started, finished - started, (long)pid);
    append(t,
           ",\n{\"ph\": \"E\", \"ts\": %.3f, \"pid\": %ld, \"args\": {\"dtype\": \"%s\", "
           "\"bytes\": %zu, "
           "\"fused\": %d}}",
           finished, (long)pid, hvd_dtype_name(e->dtype), e->bytes, e->n_fused);
    if (t->pending.len >= FLUSH_BYTES) {
        flush(t);
    }
}

void timeline_mark(timeline_t *t, uint64_t now_ns)
{
    if (t->mark_cycles) {
        append(
            t,
            ",\n{\"name\": \"CYCLE_START\", \"ph\": \"i\", \"s\": \"g\", \"ts\": %.3f, \"pid\": 0}",
            micros(t, now_ns));
    }
}

void timeline_flush(timeline_t *t)
{
    if (t->pending.len > 0) {
        flush(t);
    }
}
