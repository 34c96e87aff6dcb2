// SPDX-License-Identifier: Apache-2.0
//
// engine.h - the inside of a context: what the files of engine/ share.
//
//   submit.c        hvd_submit: checks, makes the signature and the request, sends it off
//   wait.c          hvd_wait, hvd_poll, and the baton: who drives the engine
//   step.c          one step of driving: take, agree, run, tell
//   run.c, run.h    the queue of batches, and the ways they can take (way_*.c, ways.c, tensors.c)
//   staging.c       tensors of a GPU, to the host and back
//   board.c         the shortest way for small operations inside a host (board_move.c: blocks)
//   leave.c         the end of a job: farewells, links cut only when nobody needs them
//   start.c         bringing a context up and down
//   request.c       the table of submissions: handles, names in flight, completion
//   process_sets.c  process sets, as the engine and the API see them
//   api.c           the public functions that only look something up
//   observed.c      what the engine tells observe/
//   failure_text.c  what this rank tells of itself; how a silent rank is described
//
// Threads: a field is written by whom its struct names. LOCKED(ctx) and HELD(ctx) say and, in
// builds with checks, prove which of the two rules a function lives under.
#ifndef HVD_ENGINE_H
#define HVD_ENGINE_H

#include "boot/boot.h"
#include "coll/mpi.h"
#include "coord/coord.h"
#include "engine/process_set.h"
#include "engine/request.h"
#include "engine/ways.h"
#include "net/net.h"
#include "wire/control.h"

// Numbers of streams that a batch of the log has: its own first, then those of the board until the
// next batch.
#define STREAMS_PER_BATCH ((uint64_t)256)
#define PHASES_PER_BATCH 4

// --- Batches -------------------------------------------------------------------------------------

typedef struct batch {
    uint64_t number;     // of the record in the log
    bool by_board;       // agreed by the board instead
    bool brings_results; // the agreement has brought them
    uint64_t stream;     // number of its first stream; see stream_clock
    int n_entries, cap_entries;
    decision_entry_t *entries;
    request_t **requests; // by entry; NULL: this rank has joined
    const process_set_t *set;
    struct batch *next;
} batch_t;

typedef struct board board_t;     // board.c
typedef struct staging staging_t; // staging.c

// --- Who drives ----------------------------------------------------------------------------------

// Invariant: at most one thread holds the engine. If requests are in flight, somebody holds it, or
// the engine thread is awake, or it has been told to wake up. Whoever lets go keeps that true.
typedef struct CAPABILITY("engine") baton {
    _Alignas(CACHE_LINE) atomic_int held; // 1: some thread holds the engine
    atomic_int n_waiting;                 // threads in hvd_wait that do not hold it
    atomic_uint progress_word;            // futex of those threads
    atomic_uint duty_word;                // futex of the engine thread while others drive
    atomic_bool thread_sleeps;            // the engine thread sleeps in net_sleep, engine not held
    atomic_bool thread_dozes;             // it sleeps on duty_word, and nobody has woken it
    atomic_bool wants_duty;               // it wants to be told when the engine is let go
    atomic_uint n_lent;                   // how often a waiter has held the engine
    atomic_bool thread_stop;
    atomic_bool has_completed; // requests whose waiters have not been woken
    pthread_t thread;
    bool has_thread;
    owner_t holder;
} baton_t;

// --- The context ---------------------------------------------------------------------------------

typedef struct control_link {
    net_link_t *link;
    int peer;
    buf_t partial;        // bytes of a frame that has not come whole
    size_t farewell_sent; // bytes of this rank's farewell that are on their way
    bool farewell_seen;   // the peer's has come
} control_link_t;

// Why a rank fails, for its launcher: failure_text.c.
typedef struct blame {
    int rank;                                  // that ended the job; -1: none has
    char what[CONTROL_MAX_REASON_BYTES + 200]; // it did; "": it is lost
    char own[CONTROL_MAX_REASON_BYTES + 1];    // the error that makes this rank leave; "": none
    bool is_noted;                             // the launcher has been told
} blame_t;

struct hvd_ctx {
    // Set while it starts.
    config_t config;
    log_t log;
    boot_job_t job;
    boot_t *boot;
    mpi_plane_t *mpi; // NULL: collectives are our own
    int *host_of;     // by rank
    int *host_sizes;  // by host: ranks on it
    int n_hosts;
    peers_t peers; // who the ranks are
    bool homogeneous;
    bool shm_on_all_hosts; // every host with several ranks shares memory
    atomic_int *alive;     // a page that a forked child sees as zero
    observe_t *observe;
    board_t *board; // NULL without shared memory; used under lock
    staging_t *staging;

    // Any thread, under lock.
    lock_t lock;
    lock_t board_lock;    // taken before lock; see board_finish
    process_set_t **sets; // changed by the holder only, who may read them without the lock
    int n_sets;
    unsigned n_joins; // so often have all ranks joined
    err_t ended;      // status != HVD_OK: nothing more will run
    blame_t blame;    // for that

    // Any thread.
    request_table_t requests;
    atomic_bool stop_requested; // hvd_shutdown was called
    atomic_bool hears_all;      // every neighbour in the tree has been heard
    // A larger operation is on the board: no other batch may start before it has been decided.
    atomic_bool board_busy;
    // The last stream this rank took part in: batch * STREAMS_PER_BATCH + phase, or the next few
    // numbers for those agreed by the board. Batches to come have higher numbers on every rank.
    atomic_uint_fast64_t stream_clock;

    baton_t baton; // wait.c

    // The holder of the engine.
    net_t *net;
    secure_keys_t *keys;
    coord_t *coord;
    control_link_t *control;
    int n_control;
    batch_t *running, **running_last; // oldest first
    batch_t *free_batches;
    runner_t *runner; // of the oldest in `running`
    runner_t *rider;  // of batches that bring their results
    uint64_t now_ns;  // as last read
    uint64_t next_housekeeping_ns;
    uint64_t next_activity_ns; // of tell_activity, and what it saw last
    uint64_t n_submitted_seen, quiet_since_ns;
    uint64_t next_starved_ns; // when to say again that a rank gets no core
    uint64_t cpu_seen_ns, cpu_seen_at_ns, idle_since_ns; // what the process has computed, likewise
    uint64_t moved_ns; // when something of the oldest batch last moved, or it was agreed
    uint64_t next_gathering_ns;
    unsigned n_steps;
    bool shutting_down; // told coord
    bool ended_well;    // all ranks agreed to stop; set by hvd_shutdown
    err_t suspicion;    // a data link broke; the tree has until suspect_until_ns to say why
    uint64_t suspect_until_ns;
    err_t cause;  // why the job is over, as this rank tells it; HVD_OK: it is not
    err_t ending; // status != HVD_OK: over as soon as what runs has finished
    uint64_t ending_by_ns;
    bool has_left; // farewells exchanged: links may be cut
};

// This thread has the lock; holds the engine. For functions that REQUIRES says the same of, and for
// those that are called through a pointer, which the analysis does not follow.
#define LOCKED(ctx) (RULE("LOCKED", owner_is_me(&(ctx)->lock.owner)), lock_is_mine(&(ctx)->lock))
#define HELD(ctx) (RULE("HELD", owner_is_me(&(ctx)->baton.holder)), baton_is_mine(&(ctx)->baton))

static inline void baton_is_mine(const baton_t *baton) ASSERTS(*baton);
static inline void baton_is_mine(const baton_t *baton) NOT_ANALYSED
{
    (void)baton;
}

// The context may be used by this thread of this process.
hvd_status_t check_context(const hvd_ctx_t *ctx, err_t *err);
// What users name by a handle, if both are good.
hvd_status_t request_of_handle(hvd_ctx_t *ctx, hvd_handle_t handle, request_t **request_p);
hvd_status_t check_running(const hvd_ctx_t *ctx, err_t *err) REQUIRES(ctx->lock);

// --- request.c -----------------------------------------------------------------------------------

request_t *request_new(hvd_ctx_t *ctx) REQUIRES(ctx->lock); // NULL: no memory
void request_again(hvd_ctx_t *ctx, request_t *request)
    REQUIRES(ctx->lock); // one at rest, as it was
void request_recycle(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->lock);
// In flight, or at rest and remembered; else NULL.
request_t *request_by_name(hvd_ctx_t *ctx, uint64_t hash, int set, const char *name)
    REQUIRES(ctx->lock);
void request_register(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->lock); // now in flight
void request_enqueue(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->lock);  // for the engine
// The oldest, and how many there are in all.
int requests_in_flight(hvd_ctx_t *ctx, const trace_t **oldest, int n_oldest) REQUIRES(ctx->lock);
// By the holder, or by the thread that looks after it on the board.
void request_complete(hvd_ctx_t *ctx, request_t *request, hvd_status_t status, const char *text)
    EXCLUDES(ctx->lock);
void requests_end(hvd_ctx_t *ctx, hvd_status_t status, const char *text) // everything in flight
    REQUIRES(ctx->baton) EXCLUDES(ctx->lock);
void requests_free(hvd_ctx_t *ctx) EXCLUDES(ctx->lock);

// --- process_sets.c ------------------------------------------------------------------------------

process_set_t *set_find(const hvd_ctx_t *ctx, int id); // under lock, or by the holder
bool set_register(hvd_ctx_t *ctx, int id) REQUIRES(ctx->baton) EXCLUDES(ctx->lock);
void set_forget(hvd_ctx_t *ctx, int id) REQUIRES(ctx->baton) EXCLUDES(ctx->lock);
// All ranks have joined: whatever each had submitted by then, they count alike again.
series_t *set_series(process_set_t *set, const char *name); // made if need be; under lock
void sets_count_anew(hvd_ctx_t *ctx) REQUIRES(ctx->baton) EXCLUDES(ctx->lock);
void process_sets_free(hvd_ctx_t *ctx);

// --- wait.c --------------------------------------------------------------------------------------

// The thread. The caller, who holds the engine, hands it over; not if it fails.
hvd_status_t engine_start(hvd_ctx_t *ctx, err_t *err);
void engine_stop(hvd_ctx_t *ctx) ACQUIRES(ctx->baton); // ends it, and takes the engine back
void baton_take(hvd_ctx_t *ctx) ACQUIRES(ctx->baton);  // of a context that starts, or ends
void engine_nudge(hvd_ctx_t *ctx);  // there is something in the queue, and the caller will wait
void engine_notify(hvd_ctx_t *ctx); // there is something in the queue, and nobody will wait for it
// Drives the engine, or sleeps while another thread does, until *state == REQUEST_DONE.
bool engine_wait(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns);
// Sleeps for a millisecond at most, or until something has happened.
void engine_wait_a_little(hvd_ctx_t *ctx);
void engine_wake_waiters(hvd_ctx_t *ctx); // something has happened

// --- step.c --------------------------------------------------------------------------------------

bool engine_step(hvd_ctx_t *ctx) REQUIRES(ctx->baton); // true: something advanced
void keep_house(hvd_ctx_t *ctx, uint64_t now_ns) REQUIRES(ctx->baton);
bool queue_is_empty(hvd_ctx_t *ctx);
bool receive_frames(hvd_ctx_t *ctx, uint64_t now_ns) REQUIRES(ctx->baton);
bool send_frames(hvd_ctx_t *ctx) REQUIRES(ctx->baton);
// A peer is lost: tells everyone. rank: whose fault it is; -1: nobody's that is known.
void engine_fail(hvd_ctx_t *ctx, const err_t *err, int rank) REQUIRES(ctx->baton);
// A data link broke: its peer may only have left because of a failure elsewhere. Nothing runs until
// that is known.
void engine_suspect(hvd_ctx_t *ctx, const err_t *err) REQUIRES(ctx->baton);
void end_job(hvd_ctx_t *ctx, hvd_status_t status, const char *text) REQUIRES(ctx->baton);

// --- leave.c -------------------------------------------------------------------------------------

void finish_job(hvd_ctx_t *ctx) REQUIRES(ctx->baton); // the last part of a job that was shut down
// Leaves the tree without cutting what neighbours still have to read.
void engine_drain(hvd_ctx_t *ctx, uint64_t deadline_ns) REQUIRES(ctx->baton);

// --- run.c ---------------------------------------------------------------------------------------

hvd_status_t runner_new(hvd_ctx_t *ctx, runner_t **runner_p, err_t *err);
hvd_status_t rider_new(runner_t **rider_p, err_t *err); // for what the agreement has brought
void runner_free(runner_t *runner);
void run_decided(hvd_ctx_t *ctx, const decision_t *decision) REQUIRES(ctx->baton);
// Agreed by the board; runs next.
void run_board_stream(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->baton);
// Moves the oldest batch on; true if anything moved.
bool run_progress(hvd_ctx_t *ctx) REQUIRES(ctx->baton);
void batches_drop(hvd_ctx_t *ctx) REQUIRES(ctx->baton); // the job has ended
void batches_free(hvd_ctx_t *ctx);
// What the oldest waits for, of which other rank. False: that cannot be told.
bool run_describe(const hvd_ctx_t *ctx, char *text, size_t bytes) REQUIRES(ctx->baton);

// --- board.c -------------------------------------------------------------------------------------

hvd_status_t board_new(hvd_ctx_t *ctx, board_t **board_p, err_t *err);
void board_free(board_t *board);
// True: the request is on the board and the caller of hvd_wait will look after it.
bool board_arrive(hvd_ctx_t *ctx, request_t *request, const process_set_t *set, unsigned flags)
    REQUIRES(ctx->lock);
// For one that waits on the board: completes it, or hands it to the engine.
void board_finish(hvd_ctx_t *ctx, request_t *request) EXCLUDES(ctx->lock, ctx->board_lock);
// Learns from it.
void board_note(hvd_ctx_t *ctx, request_t *request, bool full) REQUIRES(ctx->lock);
void board_reopen(request_t *request); // the long way is through
static inline bool board_is_busy(hvd_ctx_t *ctx)
{
    return atomic_load_explicit(&ctx->board_busy, memory_order_acquire);
}

// --- failure_text.c ------------------------------------------------------------------------------

// Now and then, from housekeeping.
void tell_activity(hvd_ctx_t *ctx, uint64_t now_ns) REQUIRES(ctx->baton) EXCLUDES(ctx->lock);
void report_silence(hvd_ctx_t *ctx, const decision_t *decision) REQUIRES(ctx->baton);
void report_stuck(hvd_ctx_t *ctx, const decision_t *decision) REQUIRES(ctx->baton);
// An operation of this rank has failed because of the end of the job: tells the launcher whose
// fault that is, once.
void note_blame(hvd_ctx_t *ctx) REQUIRES(ctx->lock);
void blame_missing(hvd_ctx_t *ctx, int rank); // with which the job could not start; -1: none
void forget_blame(hvd_ctx_t *ctx);            // of a generation before, while the context starts
// Adds to the cause of an end what only this rank knows: that it was absent, what it waited for.
void explain_end(hvd_ctx_t *ctx, err_t *end) REQUIRES(ctx->baton) EXCLUDES(ctx->lock);

// --- numerics.c ----------------------------------------------------------------------------------

// Names and counts what is NaN or infinite in what is about to be submitted. Nothing need be valid.
void numerics_check(hvd_ctx_t *ctx, const hvd_request_t *asked);

// --- observed.c, start.c -------------------------------------------------------------------------

hvd_status_t observed_start(hvd_ctx_t *ctx, err_t *err); // opens ctx->observe
void context_free(hvd_ctx_t *ctx); // what the monitor thread reads, and all the rest

#endif
