// SPDX-License-Identifier: Apache-2.0
//
// engine.h - the inside of a context: what the files of engine/ share.
//
//   api.c       the public functions: checks, handles out, waits
//   request.c   the table of submissions: handles, names in flight, completion
//   engine.c    who drives: the engine thread, lent threads, spinning and sleeping; one step
//   board.c   the shortest way for small allreduces inside a host
//   failure_text.c  what this rank tells of itself, words for the silence of another
//   batch.c     from a decision of coord to memory moved: picks, runs, completes
//   tensors.c   which memory a batch reads and writes
//   routes.c    the ways a batch can take, and the choice; route_plan.c, route_two_level.c
//   start.c     bringing a context up and down
//   observed.c  what observe/ is told of the context, and the public functions that ask it
//
// Threads: `lock` guards the request table, the queue and the sets; everything else below "owned by
// the holder" is touched only by the thread that holds the engine (engine_held).
#ifndef HVD_ENGINE_H
#define HVD_ENGINE_H

#include "boot/boot.h"
#include "coll/coll.h"
#include "coll/mpi.h"
#include "coll/stream.h"
#include "coll/vec.h"
#include "coord/coord.h"
#include "net/net.h"
#include "observe/observe.h"

#include <poll.h>
#include <pthread.h>

#define PHASES_PER_BATCH 4               // streams in one batch of the log
#define STREAMS_OF_BATCH ((uint64_t)255) // and those agreed by the board before the next one
#define BOARD_MEMBERS 8                  // larger sets gain nothing from the board

// --- One submission -----------------------------------------------------------------------------

typedef enum request_state {
    REQUEST_FREE,
    REQUEST_IN_FLIGHT,
    REQUEST_DONE,
} request_state_t;

typedef struct seen seen_t; // board.c
typedef struct request request_t;
struct request {
    _Atomic hvd_handle_t handle; // generation << 32 | index + 1
    atomic_int state;            // request_state_t; DONE is the release of everything below
    atomic_bool released;        // the user let go of it
    request_t *next;             // in the queue, then in the free list

    // Names in flight: chained by hash.
    uint64_t hash;
    request_t *next_same_hash;

    // A copy of the user's request; pointers lead into `storage`.
    hvd_request_t asked;
    hvd_tensor_t *tensors;
    void **owned; // outputs the library allocated, by tensor; NULL entries otherwise
    int64_t *sizes;
    int n_sizes;
    void *payload; // accumulators that ride along; NULL if it does not
    size_t payload_bytes;
    buf_t storage;
    signature_t signature; // everything that must be equal on all members; dims lead into storage

    // The short way (board.c).
    board_place_t *board;  // where it was tried; NULL: nowhere
    seen_t *board_seen;    // what is known of that place
    uint64_t board_closed; // the word of a round that was closed; 0: none
    uint32_t board_round;
    int board_members;
    atomic_bool on_board;               // counted in a round, and not yet given to the engine
    uint8_t board_local[BOARD_MEMBERS]; // where each member sits on this host

    uint64_t meeting; // number of the stream its members agreed on by the board; 0: none

    // What is asked of coord, beyond the operations of the public API.
    enum { ASK_OPERATION, ASK_ADD_SET, ASK_REMOVE_SET } ask;
    int *set_ranks; // ASK_ADD_SET, in storage; n_sizes of them
    int set;        // ASK_REMOVE_SET: which; ASK_ADD_SET: the new id

    // Result.
    hvd_status_t status;
    char *text; // malloc'ed on failure
    int last_joined;
    int32_t *received_splits; // malloc'ed

    trace_t trace; // how far it has got, for observe/
};

#define N_REQUEST_CHUNKS 20
#define FIRST_CHUNK 64

typedef struct process_set {
    int id;
    int n;
    int *ranks;
    int member;        // this rank's position; -1: not a member
    uint64_t hash;     // of the ranks
    bool on_this_host; // all members share memory with this rank
    // Under lock; by set: ranks outside do not count what it does. Since all ranks last joined.
    uint64_t n_nameless[HVD_N_OPS];
} process_set_t;

// --- One batch being run ------------------------------------------------------------------------

typedef enum route {
    ROUTE_NOTHING,
    ROUTE_ALONE,
    ROUTE_STREAM,
    ROUTE_PLAN,
    ROUTE_TWO_LEVEL,
    ROUTE_PIECES,
    ROUTE_RIDING,
    ROUTE_BOARD,
    ROUTE_MPI,
    N_ROUTES
} route_t;

typedef struct batch {
    uint64_t number;     // of the record in the log
    bool is_meeting;     // agreed by the board instead
    uint64_t collective; // of its first stream; see stream_clock
    int n_entries, cap_entries;
    decision_entry_t *entries;
    request_t **requests; // by entry; NULL: this rank has joined
    const process_set_t *set;
    struct batch *next;
} batch_t;

typedef struct batch_runner batch_runner_t; // runner.h

// A route as those who run it see it, and observe/.
typedef struct route_ops {
    const char *name; // in timelines and lists
    // NULL: nothing to do. Progress ends with HVD_OK; *moved_p is set when it did something.
    hvd_status_t (*start)(hvd_ctx_t *ctx, batch_runner_t *runner, err_t *err);
    hvd_status_t (*progress)(hvd_ctx_t *ctx, batch_runner_t *runner, bool *moved_p, err_t *err);
} route_ops_t;

extern const route_ops_t routes[N_ROUTES]; // routes.c

// All that decides about the route of a batch: the same on every member.
typedef struct route_case {
    const coll_args_t *args;
    const char *algorithm; // HOROVOD_ALGORITHM
    bool one_host;         // of all members
    bool has_stream;       // through the memory of this host
    bool two_levels;       // some host has several members, and all such hosts share memory
    bool mpi_takes_it;
} route_case_t;

route_t route_choose(const route_case_t *given);

// --- The context --------------------------------------------------------------------------------

typedef struct control_link {
    net_link_t *link;
    int peer;
    buf_t partial;        // bytes of a frame that has not come whole
    size_t farewell_sent; // bytes of this rank's farewell that are on their way
    bool farewell_seen;   // the peer's has come
} control_link_t;

typedef struct board board_t;

struct hvd_ctx {
    config_t config;
    log_t log;
    boot_job_t job;
    boot_t *boot;
    mpi_plane_t *mpi; // NULL: collectives are our own
    uint32_t epoch;
    int *host_of;
    int n_hosts;
    peers_t peers; // who the ranks are
    bool homogeneous;
    bool shm_on_all_hosts; // every host with several ranks shares memory
    atomic_int *alive;     // a page that a forked child sees as zero

    // Any thread, under lock.
    pthread_mutex_t lock;
    pthread_mutex_t board_lock; // taken before lock; see leave_board
    request_t *free_requests;
    request_t **by_name;
    int n_by_name;        // power of two
    process_set_t **sets; // changed by the holder only, who may read them without the lock
    int n_sets;
    unsigned n_joins;     // under lock: so often have all ranks joined
    uint64_t n_submitted; // operations, and the last of them: see failure_text.c
    const request_t *newest;
    err_t ended;     // status != HVD_OK: nothing more will run
    bool ended_well; // all ranks agreed to stop; set by hvd_shutdown

    // Any thread, without lock: objects in chunks that never move, each twice as large as the last.
    request_t *_Atomic chunks[N_REQUEST_CHUNKS];
    atomic_uint n_requests;
    request_t *_Atomic queue;   // submitted and not yet seen by coord, newest first
    atomic_int in_flight;       // requests of this rank not yet done
    atomic_bool stop_requested; // hvd_shutdown was called
    atomic_bool hears_all;      // every neighbour in the tree has been heard
    observe_t *observe;

    board_t *board; // NULL without shared memory; used under lock
    // A larger operation is on the board: no other batch may start before it has been decided.
    atomic_bool board_busy;
    // The last stream this rank took part in: batch << 8 | phase, or the next few numbers for those
    // agreed by the board. Batches to come have higher numbers on every rank.
    atomic_uint_fast64_t stream_clock;

    // Who drives (engine.c).
    pthread_t thread;
    bool has_thread;
    _Alignas(CACHE_LINE) atomic_int held; // 1: some thread holds the engine
    atomic_int n_waiting;                 // threads in hvd_wait that do not hold it
    atomic_bool has_completed;            // requests whose waiters have not been woken
    atomic_uint progress_word;            // futex of those threads
    atomic_uint duty_word;                // futex of the engine thread while others drive
    atomic_bool thread_sleeps;            // the engine thread sleeps in net_sleep, engine not held
    atomic_bool thread_dozes;             // it sleeps on duty_word
    atomic_bool wants_duty;               // it wants to be told when the engine is let go
    atomic_uint n_lent;                   // how often a waiter has held the engine
    atomic_bool thread_stop;

    // Owned by the holder.
    net_t *net;
    secure_keys_t *keys;
    coord_t *coord;
    control_link_t *control;
    int n_control;
    batch_t *running, **running_last; // oldest first
    batch_t *free_batches;
    batch_runner_t *runner;
    uint64_t now_ns; // as last read
    uint64_t next_housekeeping_ns;
    uint64_t next_progress_ns; // of watch_progress, and what it saw last
    uint64_t n_submitted_seen, quiet_since_ns;
    uint64_t moved_ns; // when something of the oldest batch last moved, or it was agreed
    unsigned n_steps;
    bool shutting_down; // told coord
    err_t suspicion;    // a data link broke; the tree has until suspect_until_ns to say why
    uint64_t suspect_until_ns;
    err_t cause;  // why the job is over, as this rank tells it; HVD_OK: it is not
    err_t ending; // status != HVD_OK: over as soon as what runs has finished
    uint64_t ending_by_ns;
    bool has_left; // farewells exchanged: links may be cut
};

// --- request.c ----------------------------------------------------------------------------------

// All under ctx->lock.
request_t *request_new(hvd_ctx_t *ctx);
void request_recycle(hvd_ctx_t *ctx, request_t *request);
request_t *request_by_name(hvd_ctx_t *ctx, uint64_t hash, int set, const char *name);
void request_register(hvd_ctx_t *ctx, request_t *request); // its name is in flight from here on
void request_enqueue(hvd_ctx_t *ctx, request_t *request);  // for the engine
process_set_t *set_find(const hvd_ctx_t *ctx, int id);
// All ranks have joined: whatever each had submitted by then, they count alike again.
void sets_count_anew(hvd_ctx_t *ctx);
int requests_in_flight(hvd_ctx_t *ctx, const trace_t **oldest, int n_oldest); // how many in all

// Any thread.
request_t *request_find(hvd_ctx_t *ctx, hvd_handle_t handle); // NULL: unknown or released

// By the holder.
static inline uint64_t tag_of(request_t *request)
{
    return (uint64_t)(uintptr_t)request;
}
static inline request_t *request_of_tag(uint64_t tag)
{
    return (request_t *)(uintptr_t)tag;
}
void request_complete(hvd_ctx_t *ctx, request_t *request, hvd_status_t status, const char *text);
void requests_wake(hvd_ctx_t *ctx); // threads that wait for what has been completed
void requests_end(hvd_ctx_t *ctx, hvd_status_t status, const char *text); // everything in flight
bool set_register(hvd_ctx_t *ctx, int id);
void set_forget(hvd_ctx_t *ctx, int id);
void requests_free(hvd_ctx_t *ctx);

// --- engine.c -----------------------------------------------------------------------------------

hvd_status_t engine_start(hvd_ctx_t *ctx, err_t *err); // the thread
void engine_stop(hvd_ctx_t *ctx);
void engine_nudge(hvd_ctx_t *ctx);  // there is something in the queue, and the caller will wait
void engine_notify(hvd_ctx_t *ctx); // there is something in the queue, and nobody will wait for it
// Drives the engine, or sleeps while another thread does, until *state == REQUEST_DONE.
bool engine_wait(hvd_ctx_t *ctx, atomic_int *state, uint64_t deadline_ns);
void engine_fail(hvd_ctx_t *ctx, const err_t *err); // a peer is lost: tells everyone
// A data link broke: its peer may only have left because of a failure elsewhere. Nothing runs until
// that is known.
void engine_suspect(hvd_ctx_t *ctx, const err_t *err);
// Leaves the tree without cutting what neighbours still have to read.
void engine_drain(hvd_ctx_t *ctx, uint64_t deadline_ns);

// --- failure_text.c ------------------------------------------------------------------------------

void watch_progress(hvd_ctx_t *ctx, uint64_t now_ns); // now and then, from housekeeping
void watch_silence(hvd_ctx_t *ctx, const decision_t *decision);
void watch_stuck(hvd_ctx_t *ctx, const decision_t *decision);
// Adds to the cause of an end what only this rank knows: that it was absent, what it waited for.
void watch_explain_end(hvd_ctx_t *ctx, err_t *end);

// --- board.c ----------------------------------------------------------------------------------

hvd_status_t board_new(hvd_ctx_t *ctx, board_t **board_p, err_t *err);
void board_free(board_t *board);
// Under lock. True: the request is on the board and the caller of hvd_wait will look after it.
bool board_arrive(hvd_ctx_t *ctx, request_t *request, const process_set_t *set);
// True: everyone came; the payload holds the result, or `meeting` the number of the stream to run.
// False: it must go the long way.
bool board_wait(hvd_ctx_t *ctx, request_t *request);
void board_note(request_t *request, bool full); // under lock: learns from it
void board_reopen(request_t *request);          // the long way is through

// --- batch.c ------------------------------------------------------------------------------------

hvd_status_t batch_runner_new(hvd_ctx_t *ctx, batch_runner_t **runner_p, err_t *err);
void batch_runner_free(batch_runner_t *runner);
void batch_add(hvd_ctx_t *ctx, const decision_t *decision);
void batch_add_meeting(hvd_ctx_t *ctx, request_t *request); // agreed by the board; runs next
// Writes accumulators to the outputs of a small allreduce. False: no memory for them.
bool riding_store(request_t *request, const void *result, int n_members);
// Moves the oldest batch on. True if anything moved.
bool batches_progress(hvd_ctx_t *ctx);
void batches_drop(hvd_ctx_t *ctx); // the job has ended
// What the oldest waits for, of which other rank. False: that cannot be told.
bool batch_describe(const hvd_ctx_t *ctx, char *text, size_t bytes);

// --- observed.c ---------------------------------------------------------------------------------

hvd_status_t observed_start(hvd_ctx_t *ctx, err_t *err); // opens ctx->observe
void context_free(hvd_ctx_t *ctx); // start.c: what the monitor thread reads, and all the rest

#endif
