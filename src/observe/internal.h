// SPDX-License-Identifier: Apache-2.0
//
// internal.h - what the files of observe/ share.
//
// Owned by the observe_t: the recorder and the counters are guarded by the engine's lock, the
// snapshot, the timeline's file and the live socket belong to the monitor thread alone.
#ifndef HVD_OBSERVE_INTERNAL_H
#define HVD_OBSERVE_INTERNAL_H

#include "observe/observe.h"

#include <poll.h>

// This thread has the lock of the engine, which it may know by that name only.
#define JOB_LOCKED(o)                                                                              \
    (RULE("LOCKED", owner_is_me(&(o)->job.lock->owner)), lock_is_mine((o)->job.lock))

// --- recorder.c ---------------------------------------------------------------------------------

#define RECORDED_OPERATIONS 1000
#define RECORDER_SLOTS 1024    // a power of two; one is always being written
#define RECORDED_NAME_BYTES 52 // longer names are cut

// An operation that is over. Two cache lines, written once.
typedef struct record {
    uint64_t submitted, agreed, started, finished; // ticks; agreed, started 0: it never was
    uint64_t bytes;
    uint64_t thread;
    int32_t set;
    int32_t n_tensors;
    int32_t n_fused;
    int16_t status; // hvd_status_t
    uint8_t op, dtype, route;
    char name[RECORDED_NAME_BYTES + 1];
} record_t;

struct recorder {
    uint64_t n;             // operations ever
    const trace_t *drafted; // the next record is prepared for this one; NULL: for nobody
    record_t ring[RECORDER_SLOTS];
};

// An operation that is not over.
typedef struct flight {
    char name[128], where[128]; // "" where nobody said where
    int op, set;
    const char *state; // "waiting" for other ranks, "queued", "running"
    const char *route; // once it runs
    uint64_t bytes, thread;
    uint64_t submitted; // ticks; 0: only just
    uint64_t started;   // 0: not yet
} flight_t;

// This rank at one moment. Large: the monitor thread keeps one.
typedef struct snapshot {
    recorder_t recorder;
    int n_in_flight, n_flights; // flights: the oldest of them
    flight_t flights[MAX_FLIGHTS];
    err_t ended;
    uint64_t now; // ticks
    double pace;  // nanoseconds a tick
} snapshot_t;

#define STACK_BYTES (8 * KIB)

recorder_t *recorder_new(void); // NULL: no memory; free() ends it
void recorder_snapshot(observe_t *observe, snapshot_t *snapshot) EXCLUDES(*observe->job.lock);
const record_t *snapshot_last(const snapshot_t *snapshot); // NULL: none yet
const char *snapshot_state(const snapshot_t *snapshot); // "idle", "ended", or of the oldest flight
// One line for the log; a page for people; lines of "key<tab>value" for hvd-info.
void snapshot_summary(const snapshot_t *snapshot, buf_t *out);
// stacks: NULL, or where the lines of stacks that are in the page go as well.
void snapshot_page(observe_t *observe, const snapshot_t *snapshot, buf_t *out, buf_t *stacks);
// In a line: where the program is.
void snapshot_where(observe_t *observe, const snapshot_t *snapshot, buf_t *out);
void snapshot_status(const observe_t *observe, const snapshot_t *snapshot, int max_flights,
                     buf_t *out);
// Where the thread is now, as the binding tells it; "" if nobody knows.
void observe_read_stack(observe_t *observe, uint64_t thread, char text[STACK_BYTES]);

// --- watch.c ------------------------------------------------------------------------------------

// All that a launcher shows of a rank; at most WATCH_BYTES.
void watch_page(observe_t *observe, const snapshot_t *snapshot, buf_t *out);

// --- counters.c ---------------------------------------------------------------------------------

counters_t *counters_new(int n_branches);                                 // NULL: no memory
void counters_free(counters_t *counters);                                 // safe on NULL
void counters_submitted(observe_t *observe) REQUIRES(*observe->job.lock); // one more is in flight
// Adds the records that are not in the sums yet.
void counters_catch_up(observe_t *observe) REQUIRES(*observe->job.lock);
void counters_page(observe_t *observe, metrics_form_t form, buf_t *out)
    EXCLUDES(*observe->job.lock); // metrics.c: of this rank
progress_t observe_progress(observe_t *observe) EXCLUDES(*observe->job.lock);

// --- timeline.c ---------------------------------------------------------------------------------

hvd_status_t timeline_open(observe_t *observe, const char *path, bool mark_cycles,
                           timeline_t **timeline_p, err_t *err);
// Cheap: events are written out later.
void timeline_add(observe_t *observe, timeline_t *timeline, const trace_t *trace,
                  const record_t *record) REQUIRES(*observe->job.lock);
// A batch starts.
void timeline_add_cycle(observe_t *observe, timeline_t *timeline, uint64_t ticks)
    REQUIRES(*observe->job.lock);
void timeline_add_device(observe_t *observe, timeline_t *timeline, const device_work_t *work)
    REQUIRES(*observe->job.lock);
// A rank's share of a tensor has come to rank 0.
void timeline_add_arrival(observe_t *observe, timeline_t *timeline, const char *tensor, int rank,
                          uint64_t ticks) REQUIRES(*observe->job.lock);
// It is time to write.
bool timeline_is_filling(const observe_t *observe, const timeline_t *timeline)
    REQUIRES(*observe->job.lock);
// By the monitor thread.
void timeline_write(observe_t *observe, timeline_t *timeline);
void timeline_close(observe_t *observe, timeline_t *timeline); // writes the rest; safe on NULL

// --- escape.c ------------------------------------------------------------------------------------

// A name as a JSON string without its quotes, cut if it does not fit. Bytes that are no UTF-8 are
// shown as numbers.
void escape_name(const char *name, char *out, size_t bytes);
void upper_case(const char *text, char *out, size_t bytes);

// --- monitor.c ----------------------------------------------------------------------------------

hvd_status_t monitor_start(observe_t *observe, err_t *err);
void monitor_wake(observe_t *observe); // any thread

// --- live.c -------------------------------------------------------------------------------------
// By the monitor thread.

#define LIVE_CLIENTS 4

typedef struct live live_t;

live_t *live_open(observe_t *observe); // NULL: there is none, and the log says why
void live_close(live_t *live);         // safe on NULL
int live_wants(const live_t *live, struct pollfd fds[1 + LIVE_CLIENTS]); // how many
void live_serve(live_t *live, snapshot_t *scratch);
uint64_t live_deadline_ns(const live_t *live); // of the client that has waited longest
const char *live_name(const live_t *live);     // safe on NULL: ""

#endif
