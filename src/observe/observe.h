// SPDX-License-Identifier: Apache-2.0
//
// observe.h - what a rank can tell about itself while it works, and after it has failed.
//
//   observe.c   bringing it up and down
//   recorder.c  the last operations of this rank, and what is in flight
//   counters.c  how much and how long, as numbers
//   metrics.c   the same as text, for Prometheus
//   timeline.c  the trace users load in a browser
//   monitor.c   the monitor thread: writes the trace, dumps the recorder
//   watch.c     all that a launcher shows of a rank, on one page
//   live.c      its socket, where counters and live state can be read
//   ask.c       the other side of that socket
//
// Owns: the ring of records, the sums, the timeline's file, the monitor thread and its socket. The
// requests, the lock that guards them and these records, and how the job ended are the engine's,
// which hands them in once (observe_job_t) and stamps a trace_t in each of its requests.
//
// Threads: "under lock" is under observe_job_t.lock; "the holder" is the thread that drives the
// engine. Nothing here makes an operation wait: what may take time happens on the monitor thread.
#ifndef HVD_OBSERVE_H
#define HVD_OBSERVE_H

#include "coord/coord.h"
#include "wire/secure.h"

#include <pthread.h>

// --- One submission -----------------------------------------------------------------------------

// How far it has got. In ticks; the atomic ones are written by the holder.
typedef struct trace {
    // What was submitted; lives as long as the submission.
    const signature_t *signature;
    const hvd_tensor_t *tensors; // as given, signature->n_tensors of them
    const char *name, *where;    // where: NULL if nobody said
    int set;
    uint64_t submitted;                   // under lock; 0 as long as it is on the board
    atomic_uint_fast64_t agreed, started; // 0: not yet
    atomic_int way;                       // a number that observe_job_t.way_name knows
    int n_fused;                          // submissions that ran together
    uint64_t thread;                      // that submitted it, as pthread_self() says
    uint64_t bytes;                       // of its tensors on this rank
} trace_t;

static inline void trace_begin(trace_t *trace)
{
    trace->submitted = 0;
    trace->n_fused = 1;
    atomic_store_explicit(&trace->agreed, 0, memory_order_relaxed);
    atomic_store_explicit(&trace->started, 0, memory_order_relaxed);
    atomic_store_explicit(&trace->way, 0, memory_order_relaxed);
}

static inline void trace_describe(trace_t *trace, const signature_t *signature,
                                  const hvd_tensor_t *tensors, const char *name, const char *where,
                                  int set)
{
    trace->signature = signature;
    trace->tensors = tensors;
    trace->name = name;
    trace->where = where;
    trace->set = set;
}

// By the holder.
static inline void trace_agreed(trace_t *trace, uint64_t ticks)
{
    atomic_store_explicit(&trace->agreed, ticks, memory_order_relaxed);
}

static inline void trace_started(trace_t *trace, int way, int n_fused, uint64_t ticks)
{
    trace->n_fused = n_fused;
    atomic_store_explicit(&trace->way, way, memory_order_relaxed);
    atomic_store_explicit(&trace->started, ticks, memory_order_relaxed);
}

// --- Up and down --------------------------------------------------------------------------------

typedef struct observe_job {
    int rank, size;
    int n_branches; // this rank and those below it in the tree of the agreement
    const config_t *config;
    const secure_keys_t *keys; // names a job that has no name; NULL: a job of one rank
    log_t *log;
    lock_t *lock;
    const err_t *ended;               // under lock; status != HVD_OK: the job is over
    const char *(*way_name)(int way); // in timelines and lists
    int board_way, riding_way;        // those that have counters of their own
    // Under lock: the oldest that are in flight, and how many there are in all.
    int (*in_flight)(void *owner, const trace_t **oldest, int n_oldest);
    void (*free_owner)(void *owner); // see observe_inherits
    void *owner;
} observe_job_t;

typedef struct recorder recorder_t;
typedef struct counters counters_t;
typedef struct timeline timeline_t;
typedef struct monitor monitor_t;

// Read it with the functions below only.
typedef struct observe {
    observe_job_t job;
    atomic_bool timeline_on; // there is one, and it takes events
    tick_origin_t origin;
    uint64_t opened_ns;
    uint64_t opened_by; // the thread that did, as pthread_self() says
    recorder_t *recorder;
    counters_t *counters;
    timeline_t *timeline;  // under lock; NULL: none is written
    hvd_stack_fn stack_of; // under lock; the binding's; NULL: none
    void *stack_arg;
    monitor_t *monitor;
} observe_t;

// Begins the timeline that HOROVOD_TIMELINE asks for, and starts the monitor thread.
hvd_status_t observe_open(const observe_job_t *job, observe_t **observe_p, err_t *err);
// Ends the monitor thread. False: it hangs in a write, and still uses what it was handed.
bool observe_stop(observe_t *observe); // safe on NULL
// After that: true if the thread will call free_owner when it is through; false: it has ended.
bool observe_inherits(observe_t *observe);
void observe_free(observe_t *observe); // the thread has ended; safe on NULL

// --- What happens -------------------------------------------------------------------------------

// How often the last operation has been done lately, and the longest times between.
void observe_steps(observe_t *observe, coord_activity_t *activity) EXCLUDES(*observe->job.lock);
// Under lock. is_next: most likely no other operation ends before this one.
void observe_submitted(observe_t *observe, trace_t *trace, bool is_next);
void observe_completed(observe_t *observe, const trace_t *trace, hvd_status_t status);

static inline bool observe_has_timeline(const observe_t *observe)
{
    return UNLIKELY(atomic_load_explicit(&observe->timeline_on, memory_order_relaxed));
}

// Work of this rank's GPU, told when it has landed. By where it ran: a row of timelines each.
typedef enum device_lane { LANE_NCCL, LANE_TO_HOST, LANE_TO_DEVICE, N_DEVICE_LANES } device_lane_t;

typedef struct device_moment { // so long after that, which is in ticks
    uint64_t ticks, after_ns;
} device_moment_t;

typedef struct device_work {
    device_lane_t lane;
    hvd_op_t op;
    int n_fused;
    uint64_t bytes;
    uint64_t queued; // ticks
    device_moment_t begun, done;
    char name[32]; // of the first operation; longer ones are cut
} device_work_t;

// Only if there is a timeline.
void observe_device(observe_t *observe, const device_work_t *work) EXCLUDES(*observe->job.lock);

void observe_mark_cycle(observe_t *observe, uint64_t ticks) EXCLUDES(*observe->job.lock);

// By the holder: a batch starts.
static inline void observe_cycle(observe_t *observe, uint64_t ticks)
{
    if (observe_has_timeline(observe)) {
        observe_mark_cycle(observe, ticks);
    }
}

// By the holder: a batch of so many submissions has run.
void observe_batch(observe_t *observe, int n_entries);
// So many elements more that are NaN or infinite: how many there were before. Any thread.
uint64_t observe_nonfinite(observe_t *observe, uint64_t n);
// By the holder, now and then: takes over what coord knows, and warns of a rank that keeps the
// others waiting.
void observe_gather(observe_t *observe, coord_t *coord, uint64_t n_strangers, uint64_t now_ns);

// By the holder, at the end: what the counters say of the whole job, in the log.
void observe_summarize(observe_t *observe, coord_t *coord);

// Any thread; done soon, on the monitor thread.
typedef enum dump_reason { DUMP_SIGNAL, DUMP_STALL, DUMP_FAILURE, N_DUMP_REASONS } dump_reason_t;
void observe_dump(observe_t *observe, dump_reason_t reason);

// --- What can be asked, by any thread -----------------------------------------------------------

hvd_counters_t observe_counters(observe_t *observe);
int observe_stragglers(observe_t *observe, hvd_late_t *late, int n_late); // as hvd_stragglers()
// What the program tells of its own progress; NULL: not said this time.
void observe_report(observe_t *observe, const int64_t *step, const double *loss,
                    const double *samples);
// The metrics of this rank (metrics.c), in the form that Prometheus' own format has.
void observe_metrics(observe_t *observe, buf_t *out);
// Replaces the timeline; the one before, if any, has been written and closed on return.
hvd_status_t observe_start_timeline(observe_t *observe, const char *path, bool mark_cycles,
                                    err_t *err);
hvd_status_t observe_stop_timeline(observe_t *observe, err_t *err);
void observe_set_stack_source(observe_t *observe, hvd_stack_fn fn, void *arg);
const char *observe_socket(const observe_t *observe); // its abstract name; "": there is none

// --- Numbers as text (metrics.c) -----------------------------------------------------------------
// Pure; the launcher writes those of all ranks.

// What the program of a rank has told.
typedef struct progress {
    bool has_step, has_loss, has_samples;
    int64_t step;
    double loss, samples; // samples: all together
    double step_s;        // of the last step; 0: not known yet
} progress_t;

typedef struct rank_numbers {
    const char *labels; // 'rank="0"', and more; "": none
    hvd_counters_t counters;
    progress_t progress;
    uint64_t resident_bytes; // 0: not known
    double cpu_seconds;
} rank_numbers_t;

typedef enum metrics_form {
    METRICS_PROMETHEUS, // text format 0.0.4
    METRICS_OPEN,       // OpenMetrics 1.0
} metrics_form_t;

extern const char *const metrics_types[]; // Content-Type, by form

// One family of samples for each metric that any of them has. The caller may add families with
// metrics_family; metrics_end comes last.
void metrics_write(buf_t *out, metrics_form_t form, const rank_numbers_t *ranks, int n_ranks);
// name: with "_total" if it is a counter, and with its unit.
void metrics_family(buf_t *out, metrics_form_t form, const char *name, const char *type,
                    const char *help);
void metrics_number(buf_t *out, double value); // with the line's end
void metrics_end(buf_t *out, metrics_form_t form);
// Counters as one line of numbers, for a launcher of the same version; false: it is not one.
void metrics_pack(buf_t *out, const hvd_counters_t *counters);
bool metrics_unpack(const char *text, hvd_counters_t *counters_p);

// --- Where ranks listen (live.c), and how to ask them (ask.c) ------------------------------------

#define LIVE_NAME "hvd-%u/%s/rank-%d" // user, job, rank; abstract: the address has a NUL in front
#define LIVE_NAME_BYTES 108           // what the address of a Unix socket holds
#define MAX_FLIGHTS 64                // that a rank tells of
#define WATCH_BYTES (24 * KIB)        // of the page /watch
#define WATCH_FLIGHTS 8
#define WATCH_OPERATIONS 48 // the last of them

typedef struct live_peer {
    int pid;
    unsigned uid;
} live_peer_t;

int live_connect(const char *name); // a socket, or -1 with errno
// Whose process is at the other end? True: that user's, or root's.
bool live_peer_is(int fd, unsigned uid, live_peer_t *peer_p);

#define LIVE_JOB_BYTES 128 // of "hvd-<user>/<job>"

// A rank of this host, of any job.
typedef struct live_rank {
    char name[LIVE_NAME_BYTES], job[LIVE_JOB_BYTES];
    unsigned uid;
    int rank;
    int pid;      // once asked
    char *answer; // the page; NULL: there was none in time
    int fd;       // the rest is live_ask's own
    buf_t text;
} live_rank_t;

// Those that answer this user. How many, or -1 with errno.
int live_find(live_rank_t *ranks, int n_ranks);
typedef struct live_question {
    const char *page;
    int wait_ms;                       // for the answers of all
    bool (*wants)(void *arg, int pid); // is this process to be asked? NULL: each is
    void *arg;
} live_question_t;

// One at a time, without waiting. live_begin: false: nobody is there, or somebody who is not what
// the name says, or who is not wanted. live_hear: when its descriptor is readable; when that is -1,
// it was all, and answer is it. live_end: forgets whatever there is of it.
bool live_begin(live_rank_t *rank, const live_question_t *question);
void live_hear(live_rank_t *rank);
void live_end(live_rank_t *rank);
// Asks all at once. Who is not what the name says, or not wanted, is dropped; how many are left. To
// be forgotten with live_forget().
int live_ask(live_rank_t *ranks, int n_ranks, const live_question_t *question);
void live_forget(live_rank_t *ranks, int n_ranks);

#endif
