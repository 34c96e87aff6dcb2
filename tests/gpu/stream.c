// SPDX-License-Identifier: Apache-2.0
//
// stream.c - streams and events of the simulated GPU, and when queued work runs.
//
// A stream is a thread with a queue; an event is a stream and the number of the work that must have
// ended there. Nothing but waits orders streams, so a wait that a program has left out shows as a
// wrong result as soon as the schedule is against it: delays that seed, stream and number decide,
// or laziness, where work runs only once somebody waits for it (or its time is up).
//
// GPUSIM_LOG writes the order in which work ran, a line each; GPUSIM_REPLAY runs it in that order
// again. Work that may wait for other processes (collectives, host functions) is in it when it
// begins, the rest when it ends, one at a time when replayed.
//
// While a stream is captured its work is thrown away: graphs are not run here.
#define _GNU_SOURCE
#include "sim.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_MS 1000000u
#define REMEMBERED 4096 // works of a stream whose end is known, for the times of events
#define REPLAY_MS 5000  // so long a replay waits for the work whose turn it is

typedef struct work {
    struct work *next;
    uint64_t number;
    const char *what;
    sim_work_fn run; // NULL: waits for for_number of for_stream
    void *arg;
    sim_stream_t *for_stream;
    uint64_t for_number;
} work_t;

struct sim_stream {
    int index; // in the order they were made: what seeds and logs name it by
    int device;
    unsigned flags;
    int priority;
    bool is_default, has_thread, ends;
    uint64_t submitted, completed, wanted; // numbers of work; wanted: somebody waits for that much
    work_t *first, **last;
    int capture;
    uint64_t ended_ns[REMEMBERED]; // by number
    sim_stream_t *next;
};

typedef struct turn {
    int stream;
    uint64_t number;
} turn_t;

static struct {
    sim_stream_t *streams; // all there ever were: events may name them for ever
    sim_stream_t *defaults[SIM_DEVICES];
    int n_streams;
    FILE *log;
    turn_t *turns; // of a replay
    size_t n_turns, n_taken;
    bool has_diverged;
} all;

// --- Logs and replays ----------------------------------------------------------------------------

static void read_turns(const char *path)
{
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        perror(path);
        abort();
    }
    turn_t turn;
    char what[64];
    while (fscanf(file, "%d %lu %63s", &turn.stream, &turn.number, what) == 3) {
        all.turns = realloc(all.turns, (all.n_turns + 1) * sizeof *all.turns);
        all.turns[all.n_turns++] = turn;
    }
    fclose(file);
}

static void open_log(void)
{
    if (sim.log_path != NULL && (all.log = fopen(sim.log_path, "w")) == NULL) {
        perror(sim.log_path);
        abort();
    }
    if (sim.replay_path != NULL) {
        read_turns(sim.replay_path);
    }
}

static void write_log(const sim_stream_t *stream, const work_t *work)
{
    if (all.log != NULL) {
        fprintf(all.log, "%d %lu %s\n", stream->index, work->number, work->what);
        fflush(all.log);
    }
}

static bool wait_for_news(uint64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u),
                             .tv_nsec = (long)(until_ns % 1000000000u)};
    return pthread_cond_timedwait(&sim_news, &sim_lock, &until) == 0;
}

static void await_turn(const sim_stream_t *stream, const work_t *work)
{
    uint64_t until_ns = sim_now_ns() + (uint64_t)REPLAY_MS * NS_PER_MS;
    while (all.n_taken < all.n_turns && !all.has_diverged) {
        const turn_t *turn = &all.turns[all.n_taken];
        if (turn->stream == stream->index && turn->number == work->number) {
            return;
        }
        if (!wait_for_news(until_ns)) {
            all.has_diverged = true;
            fprintf(stderr, "gpusim: the program does not do again what the log says at line %zu\n",
                    all.n_taken + 1);
        }
    }
}

static void end_turn(void)
{
    all.n_taken++;
    pthread_cond_broadcast(&sim_news);
}

// --- Running -------------------------------------------------------------------------------------

// Under lock.
static void wait_until(sim_stream_t *stream, uint64_t number)
{
    if (stream->wanted < number) {
        stream->wanted = number;
        pthread_cond_broadcast(&sim_news);
    }
    while (stream->completed < number) {
        pthread_cond_wait(&sim_news, &sim_lock);
    }
}

static bool is_lazy(const sim_stream_t *stream)
{
    return sim.schedule == SCHEDULE_LAZY ||
           (sim.schedule == SCHEDULE_USER_LAZY && stream->is_default);
}

static void be_lazy(const sim_stream_t *stream, const work_t *work)
{
    uint64_t until_ns = sim_now_ns() + (uint64_t)sim.lazy_ms * NS_PER_MS;
    while (is_lazy(stream) && stream->wanted < work->number && wait_for_news(until_ns)) {
    }
}

static void obey_schedule(sim_stream_t *stream, const work_t *work)
{
    if (all.turns != NULL) {
        await_turn(stream, work);
    } else if (sim.schedule == SCHEDULE_RANDOM && sim.delay_us > 0) {
        uint64_t delay_us = sim_random((uint64_t)stream->index, work->number) % sim.delay_us;
        pthread_mutex_unlock(&sim_lock);
        usleep((unsigned)delay_us);
        pthread_mutex_lock(&sim_lock);
    } else {
        be_lazy(stream, work);
    }
}

static bool may_wait_for_others(const work_t *work)
{
    return strncmp(work->what, "nccl", 4) == 0 || strcmp(work->what, "host") == 0;
}

static void run_work(sim_stream_t *stream, work_t *work)
{
    if (work->run == NULL) {
        be_lazy(stream, work); // nobody wants the other side before somebody wants this one
        wait_until(work->for_stream, work->for_number);
        return;
    }
    obey_schedule(stream, work);
    bool early = may_wait_for_others(work);
    if (early) {
        write_log(stream, work);
        end_turn();
    }
    pthread_mutex_unlock(&sim_lock);
    if (sim_device_error(stream->device) == SIM_OK) {
        work->run(work->arg); // nothing runs on a device that is broken
    }
    pthread_mutex_lock(&sim_lock);
    if (!early) {
        write_log(stream, work);
        end_turn();
    }
}

static void *stream_main(void *arg)
{
    sim_stream_t *stream = arg;
    pthread_mutex_lock(&sim_lock);
    for (;;) {
        while (stream->first == NULL && !stream->ends) {
            pthread_cond_wait(&sim_news, &sim_lock);
        }
        work_t *work = stream->first;
        if (work == NULL) {
            break;
        }
        run_work(stream, work);
        stream->first = work->next;
        stream->last = stream->first == NULL ? &stream->first : stream->last;
        stream->completed = work->number;
        stream->ended_ns[work->number % REMEMBERED] = sim_now_ns();
        free(work->arg);
        free(work);
        pthread_cond_broadcast(&sim_news);
    }
    stream->has_thread = false;
    pthread_mutex_unlock(&sim_lock);
    return NULL;
}

// --- Streams -------------------------------------------------------------------------------------

static sim_stream_t *add_stream(int device, unsigned flags, int priority)
{
    sim_stream_t *stream = calloc(1, sizeof *stream);
    stream->index = all.n_streams++;
    stream->device = device;
    stream->flags = flags;
    stream->priority = priority;
    stream->last = &stream->first;
    stream->next = all.streams;
    all.streams = stream;
    return stream;
}

sim_stream_t *sim_stream_new(int device, unsigned flags, int priority)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    sim_setup();
    pthread_once(&once, open_log);
    pthread_mutex_lock(&sim_lock);
    sim_stream_t *stream = add_stream(device, flags, priority);
    pthread_mutex_unlock(&sim_lock);
    return stream;
}

void sim_stream_free(sim_stream_t *stream)
{
    pthread_mutex_lock(&sim_lock);
    stream->ends = true; // what is queued still runs
    pthread_cond_broadcast(&sim_news);
    pthread_mutex_unlock(&sim_lock);
}

sim_stream_t *sim_stream_of(void *handle, int device)
{
    if ((uintptr_t)handle > 2) {
        return handle;
    }
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&making);
    if (all.defaults[device] == NULL) {
        sim_stream_t *stream = sim_stream_new(device, 0, 0);
        stream->is_default = true;
        all.defaults[device] = stream;
    }
    pthread_mutex_unlock(&making);
    return all.defaults[device];
}

int sim_stream_device(const sim_stream_t *stream)
{
    return stream->device;
}

int sim_stream_priority(const sim_stream_t *stream)
{
    return stream->priority;
}

bool sim_stream_exists(const sim_stream_t *stream)
{
    pthread_mutex_lock(&sim_lock);
    const sim_stream_t *at = all.streams;
    while (at != NULL && at != stream) {
        at = at->next;
    }
    bool exists = at != NULL && !at->ends;
    pthread_mutex_unlock(&sim_lock);
    return exists;
}

// Under lock.
static void append(sim_stream_t *stream, work_t given)
{
    work_t *work = malloc(sizeof *work);
    *work = given;
    work->number = ++stream->submitted;
    *stream->last = work;
    stream->last = &work->next;
    if (!stream->has_thread) {
        pthread_t thread;
        stream->has_thread = pthread_create(&thread, NULL, stream_main, stream) == 0;
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&sim_news);
}

static void append_wait(sim_stream_t *stream, sim_stream_t *other)
{
    if (other != NULL && other != stream && other->completed < other->submitted) {
        append(stream, (work_t){.for_stream = other, .for_number = other->submitted});
    }
}

// The default stream waits for all that do not say otherwise, and they wait for it.
static void keep_legacy_order(sim_stream_t *stream)
{
    if (stream->is_default) {
        for (sim_stream_t *other = all.streams; other != NULL; other = other->next) {
            if (other->device == stream->device && (other->flags & STREAM_NON_BLOCKING) == 0) {
                append_wait(stream, other);
            }
        }
    } else if ((stream->flags & STREAM_NON_BLOCKING) == 0) {
        append_wait(stream, all.defaults[stream->device]);
    }
}

int sim_push(sim_stream_t *stream, const char *what, sim_work_fn run, void *arg)
{
    int code = sim_device_error(stream->device);
    pthread_mutex_lock(&sim_lock);
    bool taken = code == SIM_OK && stream->capture == CAPTURE_NONE && !stream->ends;
    if (taken) {
        keep_legacy_order(stream);
        append(stream, (work_t){.what = what, .run = run, .arg = arg});
    }
    bool is_gone = stream->ends;
    pthread_mutex_unlock(&sim_lock);
    if (!taken) {
        free(arg);
    }
    return is_gone ? sim_mistake(SIM_INVALID_HANDLE, "%s on a stream that was destroyed", what)
                   : code;
}

static int wait_for(sim_stream_t *stream, uint64_t number)
{
    pthread_mutex_lock(&sim_lock);
    wait_until(stream, number);
    pthread_mutex_unlock(&sim_lock);
    return sim_device_error(stream->device);
}

static bool spoils_capture(sim_stream_t *stream)
{
    if (stream->capture == CAPTURE_NONE) {
        return false;
    }
    stream->capture = CAPTURE_INVALIDATED;
    return true;
}

int sim_wait_stream(sim_stream_t *stream)
{
    return spoils_capture(stream) ? SIM_CAPTURE_UNSUPPORTED : wait_for(stream, stream->submitted);
}

int sim_wait_device(int device)
{
    pthread_mutex_lock(&sim_lock);
    for (sim_stream_t *stream = all.streams; stream != NULL; stream = stream->next) {
        if (stream->device == device) {
            wait_until(stream, stream->submitted);
        }
    }
    pthread_mutex_unlock(&sim_lock);
    return sim_device_error(device);
}

int sim_query_stream(sim_stream_t *stream)
{
    pthread_mutex_lock(&sim_lock);
    bool spoilt = spoils_capture(stream);
    bool done = stream->completed == stream->submitted;
    pthread_mutex_unlock(&sim_lock);
    int code = sim_device_error(stream->device);
    return spoilt ? SIM_CAPTURE_UNSUPPORTED : code != SIM_OK ? code : done ? SIM_OK : SIM_NOT_READY;
}

// --- Copies --------------------------------------------------------------------------------------

typedef struct copy {
    void *to;
    const void *from;
    size_t bytes;
    int device; // of the stream
    int value;  // that memory is set to, of so many bytes; with from NULL
    size_t width;
} copy_t;

static void run_copy(void *arg)
{
    const copy_t *c = arg;
    unsigned char *to = sim_touch(c->to, c->bytes, "a copy");
    const void *from = c->from != NULL ? sim_touch(c->from, c->bytes, "a copy") : NULL;
    if (to == NULL || (from == NULL && c->from != NULL)) {
        sim_break_device(c->device, SIM_ILLEGAL_ADDRESS);
        return;
    }
    if (from != NULL) {
        memmove(to, from, c->bytes);
        return;
    }
    for (size_t i = 0; i < c->bytes; i += c->width) {
        memcpy(to + i, &c->value, c->width);
    }
}

// Pageable memory is read at the call, and written before it returns; pinned memory is read and
// written when the copy runs.
int sim_copy(void *to, const void *from, size_t bytes, sim_stream_t *stream, bool blocks)
{
    bool from_pageable = !sim_is_device(from) && !sim_is_pinned(from);
    bool to_pageable = !sim_is_device(to) && !sim_is_pinned(to);
    copy_t *c = malloc(sizeof *c + (from_pageable ? bytes : 0));
    *c = (copy_t){.to = to, .from = from, .bytes = bytes, .device = stream->device};
    if (from_pageable) {
        memcpy(c + 1, from, bytes);
        c->from = c + 1;
    }
    if (to_pageable && stream->capture != CAPTURE_NONE) {
        free(c);
        return SIM_CAPTURE_UNSUPPORTED;
    }
    int code = sim_push(stream, "copy", run_copy, c);
    return code == SIM_OK && (blocks || to_pageable) ? wait_for(stream, stream->submitted) : code;
}

int sim_set(void *to, int value, size_t width, size_t bytes, sim_stream_t *stream)
{
    copy_t *c = malloc(sizeof *c);
    *c = (copy_t){
        .to = to, .bytes = bytes, .device = stream->device, .value = value, .width = width};
    return sim_push(stream, "set", run_copy, c);
}

// --- Events --------------------------------------------------------------------------------------

#define EVENT_ALIVE 0x40000000u // in flags
#define EVENT_NO_TIMING 2u

static atomic_int n_timed_events;

sim_event_t *sim_event_new(int device, unsigned flags)
{
    sim_setup();
    sim_event_t *event = calloc(1, sizeof *event);
    event->device = device;
    event->flags = flags | EVENT_ALIVE;
    if ((flags & EVENT_NO_TIMING) == 0) {
        atomic_fetch_add(&n_timed_events, 1);
    }
    return event;
}

int gpusim_timed_events(void)
{
    return atomic_load(&n_timed_events);
}

// Its memory stays, so that a later use is recognised. The list tells a leak detector so.
void sim_event_free(sim_event_t *event)
{
    static sim_event_t *destroyed;
    pthread_mutex_lock(&sim_lock);
    event->flags &= ~EVENT_ALIVE;
    event->next_destroyed = destroyed;
    destroyed = event;
    pthread_mutex_unlock(&sim_lock);
}

bool sim_event_exists(const sim_event_t *event)
{
    return event != NULL && (event->flags & EVENT_ALIVE) != 0;
}

int sim_record(sim_event_t *event, sim_stream_t *stream)
{
    if (event->device != stream->device) {
        return sim_mistake(SIM_INVALID_HANDLE,
                           "an event of device %d is recorded in a stream of device %d",
                           event->device, stream->device);
    }
    int code = sim_device_error(stream->device);
    pthread_mutex_lock(&sim_lock);
    keep_legacy_order(stream);
    event->on = stream;
    event->number = stream->submitted;
    event->recorded_ns = sim_now_ns();
    event->captured = stream->capture != CAPTURE_NONE;
    pthread_mutex_unlock(&sim_lock);
    return code;
}

int sim_order(sim_stream_t *stream, const sim_event_t *event)
{
    int code = sim_device_error(stream->device);
    pthread_mutex_lock(&sim_lock);
    if (event->captured) {
        stream->capture = CAPTURE_ACTIVE; // it becomes part of the graph
    } else if (event->on != NULL && event->on != stream && stream->capture == CAPTURE_NONE) {
        append(stream, (work_t){.for_stream = event->on, .for_number = event->number});
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

// A stream that the program knows nothing of waits for all others of the device.
int sim_record_context(sim_event_t *event)
{
    static sim_stream_t *joints[SIM_DEVICES];
    int code = sim_device_error(event->device);
    pthread_mutex_lock(&sim_lock);
    if (joints[event->device] == NULL) {
        joints[event->device] = add_stream(event->device, STREAM_NON_BLOCKING, 0);
    }
    sim_stream_t *joint = joints[event->device];
    for (sim_stream_t *other = all.streams; other != NULL; other = other->next) {
        if (other->device == event->device) {
            code = other->capture != CAPTURE_NONE ? SIM_CAPTURE_UNSUPPORTED : code;
            append_wait(joint, other);
        }
    }
    event->on = joint;
    event->number = joint->submitted;
    event->captured = false;
    pthread_mutex_unlock(&sim_lock);
    return code;
}

int sim_order_context(const sim_event_t *event)
{
    int code = sim_device_error(event->device);
    pthread_mutex_lock(&sim_lock);
    for (sim_stream_t *stream = all.streams; stream != NULL; stream = stream->next) {
        if (stream->device == event->device && stream != event->on && event->on != NULL &&
            !stream->ends) {
            code = stream->capture != CAPTURE_NONE ? SIM_CAPTURE_UNSUPPORTED : code;
            append(stream, (work_t){.for_stream = event->on, .for_number = event->number});
        }
    }
    pthread_mutex_unlock(&sim_lock);
    return code;
}

int sim_query_event(sim_event_t *event)
{
    if (event->captured) {
        spoils_capture(event->on);
        return SIM_CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_lock(&sim_lock);
    bool done = event->on == NULL || event->on->completed >= event->number;
    pthread_mutex_unlock(&sim_lock);
    int code = sim_device_error(event->device);
    return code != SIM_OK ? code : done ? SIM_OK : SIM_NOT_READY;
}

// Under lock. When it happened: when the work before it had ended, but not before it was recorded.
static int event_time(const sim_event_t *event, uint64_t *ns_p)
{
    if (event->on == NULL || event->captured || (event->flags & EVENT_NO_TIMING) != 0) {
        return sim_mistake(SIM_INVALID_HANDLE, "the time of an event is asked for that has none");
    }
    if (event->on->completed < event->number) {
        return SIM_NOT_READY;
    }
    if (event->number + REMEMBERED <= event->on->completed) {
        return sim_mistake(SIM_INVALID_HANDLE, "the time of an event is asked for too late");
    }
    uint64_t ended_ns = event->on->ended_ns[event->number % REMEMBERED];
    *ns_p = ended_ns > event->recorded_ns ? ended_ns : event->recorded_ns;
    return SIM_OK;
}

int sim_elapsed(float *ms_p, const sim_event_t *from, const sim_event_t *to)
{
    uint64_t from_ns = 0, to_ns = 0;
    pthread_mutex_lock(&sim_lock);
    int code = event_time(from, &from_ns);
    code = code == SIM_OK ? event_time(to, &to_ns) : code;
    pthread_mutex_unlock(&sim_lock);
    *ms_p = (float)(((double)to_ns - (double)from_ns) / 1e6);
    return code;
}

int sim_wait_event(sim_event_t *event)
{
    if (event->captured) {
        spoils_capture(event->on);
        return SIM_CAPTURE_UNSUPPORTED;
    }
    return event->on != NULL ? wait_for(event->on, event->number) : SIM_OK;
}

// --- Capture -------------------------------------------------------------------------------------

int sim_capture_begin(sim_stream_t *stream)
{
    if (stream->capture != CAPTURE_NONE || stream->is_default) {
        return SIM_CAPTURE_UNSUPPORTED;
    }
    stream->capture = CAPTURE_ACTIVE;
    return SIM_OK;
}

// All that it has drawn in end with it.
int sim_capture_end(sim_stream_t *stream)
{
    int state = stream->capture;
    pthread_mutex_lock(&sim_lock);
    for (sim_stream_t *other = all.streams; other != NULL; other = other->next) {
        other->capture = CAPTURE_NONE;
    }
    pthread_mutex_unlock(&sim_lock);
    return state == CAPTURE_ACTIVE        ? SIM_OK
           : state == CAPTURE_INVALIDATED ? SIM_CAPTURE_INVALIDATED
                                          : SIM_INVALID_VALUE;
}

int sim_capture_state(const sim_stream_t *stream)
{
    return stream->capture;
}
