// SPDX-License-Identifier: Apache-2.0
//
// hvd.h - the public face of libhvd.
//
// N processes (ranks) form a job. Each submits named tensors; the library agrees with the other
// ranks what runs next, runs it, and completes a handle. One function, hvd_submit(), serves every
// operation; hvd_wait() lends the calling thread to the engine until the handle is done.
//
// Threads: every function may be called from any thread. Completion and allocation callbacks run
// on the thread that drives the engine (the library's own, or one that sits in hvd_wait), with no
// library lock held except the engine's: they must be short and must not wait for another handle.
//
// Memory: the caller owns tensors, names and shapes. Names, shapes and splits are copied by
// hvd_submit(); tensors must stay valid until the handle is done. Output the library allocated
// belongs to the handle and goes with hvd_release().
//
// Errors: every function that can fail returns hvd_status_t. The sentence that explains it, with
// rank, tensor and what to try, is in the result of the handle or in the text buffer passed in.
#ifndef HVD_H
#define HVD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default) // the library hides everything else
#endif

#define HVD_VERSION_MAJOR 1
#define HVD_VERSION_MINOR 0
#define HVD_VERSION_PATCH 0
#define HVD_MAX_DIMS 16
#define HVD_TEXT_BYTES 1024 // longest error sentence, terminator included
#define HVD_FOREVER (-1)    // a timeout: until done; a lost peer or shutdown still ends the wait

typedef struct hvd_ctx hvd_ctx_t;

// One submission. 0 is never a valid handle; a released handle is recognised, not reused.
typedef uint64_t hvd_handle_t;

// Sentences, scopes and hints: src/base/status.def has one row for each of these.
typedef enum hvd_status {
    HVD_OK = 0,
    HVD_IN_PROGRESS = 1,       // not an error: not done yet
    HVD_INVALID_ARGUMENT = -1, // the request itself is wrong
    HVD_DUPLICATE_NAME = -2,   // a request of this name is still in flight on this rank
    HVD_UNKNOWN_SET = -3,      // no process set has this id
    HVD_NOT_MEMBER = -4,       // this rank is not a member of the process set
    HVD_EXISTING_SET = -5,     // these ranks already form a process set
    HVD_STATIC_SETS = -6,      // process sets may not change after init
    HVD_UNKNOWN_HANDLE = -7,   // never issued, or released
    HVD_UNSUPPORTED = -8,      // no algorithm for this combination
    HVD_MISMATCH = -20,        // ranks disagree about a tensor
    HVD_JOINED = -21,          // an operation that cannot run while ranks have joined
    HVD_TIMEOUT = -22,         // the wait's deadline passed; the operation goes on
    HVD_STALLED = -23,         // some ranks never submitted the tensor
    HVD_PEER_LOST = -30,       // a peer died or cannot be reached
    HVD_UNAUTHENTICATED = -31, // a peer did not prove the job's secret
    HVD_PROTOCOL = -32,        // a peer sent a malformed message
    HVD_SHUTDOWN = -40,        // the job has been shut down
    HVD_NOT_INITIALIZED = -41, // no context, or one that has been shut down
    HVD_FORKED = -42,          // a child process used its parent's context
    HVD_NO_MEMORY = -43,
    HVD_SYSTEM = -44, // the operating system refused; the sentence has its reason
} hvd_status_t;

// How far an error reaches: what a caller can still do after it.
typedef enum hvd_scope {
    HVD_SCOPE_NONE,      // not an error
    HVD_SCOPE_ARGUMENT,  // this call was wrong; nothing was sent
    HVD_SCOPE_OPERATION, // this submission failed on every member; the job goes on
    HVD_SCOPE_PEER,      // a peer is gone; the membership must change
    HVD_SCOPE_JOB,       // nothing more will run in this context
} hvd_scope_t;

typedef enum hvd_op {
    HVD_ALLREDUCE = 0,
    HVD_ALLGATHER = 1,
    HVD_BROADCAST = 2,
    HVD_ALLTOALL = 3,
    HVD_REDUCESCATTER = 4,
    HVD_BARRIER = 5,
    HVD_JOIN = 6,
    HVD_N_OPS
} hvd_op_t;

// Values as Horovod's users know them.
typedef enum hvd_reduce {
    HVD_AVERAGE = 0,
    HVD_SUM = 1,
    HVD_ADASUM = 2,
    HVD_MIN = 3,
    HVD_MAX = 4,
    HVD_PRODUCT = 5,
    HVD_N_REDUCES
} hvd_reduce_t;

typedef enum hvd_dtype {
    HVD_UINT8 = 0,
    HVD_INT8 = 1,
    HVD_UINT16 = 2,
    HVD_INT16 = 3,
    HVD_INT32 = 4,
    HVD_INT64 = 5,
    HVD_FLOAT16 = 6,
    HVD_FLOAT32 = 7,
    HVD_FLOAT64 = 8,
    HVD_BOOL = 9,
    HVD_BFLOAT16 = 10,
    HVD_N_DTYPES
} hvd_dtype_t;

// One tensor of a request: dense, row-major. n_dims 0 is a scalar; a dimension of 0 is empty.
typedef struct hvd_tensor {
    const void *input;
    // May equal input, except in allgather and alltoall. NULL: hvd_request.alloc is asked, or the
    // handle owns it.
    void *output;
    int n_dims;
    const int64_t *shape;
} hvd_tensor_t;

// Gives memory for an output whose shape is known only once all ranks have agreed (allgather,
// alltoall, reducescatter). NULL fails the operation with HVD_NO_MEMORY.
typedef void *(*hvd_alloc_fn)(void *arg, int tensor, int n_dims, const int64_t *shape);
typedef void (*hvd_done_fn)(void *arg, hvd_handle_t handle, hvd_status_t status);

enum {
    // The caller waits for this handle next. The engine thread is then left asleep: the waiter
    // runs the engine itself, which saves a hand-over on small operations.
    HVD_WAITS = 1u << 0,
    // prescale and postscale are set; without it both count as 1.
    HVD_SCALED = 1u << 1,
    // Inputs and outputs are in the memory of a GPU: device and stream are set. hvd_submit() queues
    // what is to be done behind the work of that stream, and does not wait for it.
    HVD_ON_DEVICE = 1u << 2,
};

// One submission: one tensor, or a group that runs all or nothing under one name and one handle.
typedef struct hvd_request {
    hvd_op_t op;
    const char *name; // equal on all members; NULL: "<op>.noname.<n>" by order in the process set
    hvd_dtype_t dtype;
    hvd_reduce_t reduce; // allreduce, reducescatter
    int root;            // broadcast: a global rank
    int process_set;     // 0: all ranks
    double prescale;     // inputs are multiplied by it, with HVD_SCALED in flags
    double postscale;    // results are multiplied by it, with HVD_SCALED in flags
    const hvd_tensor_t *tensors;
    int n_tensors;
    const int32_t *splits; // alltoall: rows for each member; NULL: even
    int n_splits;
    unsigned flags;
    hvd_alloc_fn alloc; // may be NULL
    hvd_done_fn done;   // may be NULL
    void *arg;          // passed to both
    const char *where;  // the user's source line, for reports; may be NULL
    // Without a name: which order it is counted in, as "<op>.noname.<series>.<n>", for threads that
    // keep an order each and none among them; equal on all members. NULL: the one that has no name.
    const char *series;
    // With HVD_ON_DEVICE in flags; alloc is not asked then, hvd_fetch() brings such outputs.
    int device;   // number of the GPU; one rank uses one
    void *stream; // that has written the tensors: a CUstream or hipStream_t; NULL: the default one
} hvd_request_t;

// What became of a handle. Pointers live until hvd_release().
typedef struct hvd_result {
    hvd_status_t status;
    const char *text; // "" when HVD_OK
    int n_tensors;
    int last_joined;                // join: the rank that joined last
    const int32_t *received_splits; // alltoall: rows from each member
    int n_splits;
} hvd_result_t;

// --- Life of a context --------------------------------------------------------------------------

// Where knobs come from. NULL in hvd_init() means the process environment.
typedef struct hvd_options {
    const char *const *env;         // "NAME=value" strings, NULL at the end; NULL: environ
    const int *const *process_sets; // static process sets: ranks of each
    const int *process_set_sizes;
    int n_process_sets;
    void (*log)(void *arg, int level, const char *line); // NULL: stderr
    void *log_arg;
    // With HOROVOD_CPU_OPERATIONS=MPI: handle of the MPI communicator (MPI_Comm) that has just the
    // ranks of the job, in their order; 0: MPI_COMM_WORLD.
    uintptr_t mpi_comm;
} hvd_options_t;

// Joins the job described by the environment (HOROVOD_RANK, HOROVOD_SIZE, ...; without them a
// world of one) and blocks until all ranks have. On failure text, if not NULL, has the sentence.
hvd_status_t hvd_init(const hvd_options_t *options, hvd_ctx_t **ctx_p, char *text,
                      size_t text_bytes);

// Asks all ranks to stop, fails what is in flight with HVD_SHUTDOWN, frees the context. The
// context must not be used afterwards. A new hvd_init() may follow.
hvd_status_t hvd_shutdown(hvd_ctx_t *ctx);
// The same without the end: the context stays, and every later call fails. For programs with other
// threads inside the library: they come back now, and when all have, hvd_shutdown() may follow.
hvd_status_t hvd_stop(hvd_ctx_t *ctx);
// This process is about to end because of an error, as in "RuntimeError: no data (train.py:17)":
// the other ranks and the launcher hear of it when it leaves. HVD_SHUTDOWN: the error is a
// consequence of another rank's end, which they know already.
hvd_status_t hvd_leave_because(hvd_ctx_t *ctx, const char *error);

// --- Who am I -----------------------------------------------------------------------------------

int hvd_rank(const hvd_ctx_t *ctx);
int hvd_size(const hvd_ctx_t *ctx);
int hvd_local_rank(const hvd_ctx_t *ctx);
int hvd_local_size(const hvd_ctx_t *ctx);
int hvd_cross_rank(const hvd_ctx_t *ctx);
int hvd_cross_size(const hvd_ctx_t *ctx);
bool hvd_is_homogeneous(const hvd_ctx_t *ctx); // every host has the same number of ranks
// -1: no MPI library moves tensors here; 1: one does and has MPI_THREAD_MULTIPLE; 0: has it not.
int hvd_mpi_threads(const hvd_ctx_t *ctx);
hvd_status_t hvd_health(hvd_ctx_t *ctx, char *text, size_t text_bytes); // HVD_OK, or why it ended

// --- Operations ---------------------------------------------------------------------------------

hvd_status_t hvd_submit(hvd_ctx_t *ctx, const hvd_request_t *request, hvd_handle_t *handle_p,
                        char *text, size_t text_bytes);
// The handle's status once done; HVD_TIMEOUT leaves the operation running and the handle valid.
hvd_status_t hvd_wait(hvd_ctx_t *ctx, hvd_handle_t handle, int64_t timeout_ms);
hvd_status_t hvd_poll(hvd_ctx_t *ctx, hvd_handle_t handle); // HVD_IN_PROGRESS while not done
// For one with HVD_ON_DEVICE, which has two ends. hvd_wait() waits until its results have landed on
// the device; this until they are launched, and makes the stream wait for the rest: what is queued
// there from now on sees them. Its status as of hvd_wait().
hvd_status_t hvd_wait_on(hvd_ctx_t *ctx, hvd_handle_t handle, void *stream, int64_t timeout_ms);
// Waits until everything that was launched on the device has landed there. HVD_OK: well; else what
// is there now must not be kept, as after a rank was lost. For checkpoints.
hvd_status_t hvd_settle(hvd_ctx_t *ctx, int64_t timeout_ms);
// What this process finds of a maker's software, without using a device.
typedef struct hvd_gpu {
    char driver[16];    // "CUDA", "HIP"; "": none
    int driver_version; // 13020: CUDA 13.2
    int nccl_version;   // 22703: 2.27.3; 0: none that can be used
    char why_not[256];  // the sentence, if there is no NCCL
} hvd_gpu_t;

void hvd_gpu(const hvd_ctx_t *ctx, hvd_gpu_t *gpu_p); // ctx may be NULL; else with its knobs
// Copies output i, of one that is done and had no memory for it, to the device, in the order of the
// stream. Does not wait.
hvd_status_t hvd_fetch(hvd_ctx_t *ctx, hvd_handle_t handle, int tensor, void *to, void *stream);
hvd_status_t hvd_result(hvd_ctx_t *ctx, hvd_handle_t handle, hvd_result_t *result_p);
// Output of tensor i with its shape (as many dimensions as were submitted).
hvd_status_t hvd_output(hvd_ctx_t *ctx, hvd_handle_t handle, int tensor, void **data_p,
                        int64_t shape[HVD_MAX_DIMS]);
// Forgets the handle once it is done; one still in flight is forgotten when it completes.
void hvd_release(hvd_ctx_t *ctx, hvd_handle_t handle);

// --- Process sets (collective over all ranks of the job, in the same order everywhere) ----------

hvd_status_t hvd_process_set_add(hvd_ctx_t *ctx, const int *ranks, int n_ranks, int *id_p,
                                 char *text, size_t text_bytes);
hvd_status_t hvd_process_set_remove(hvd_ctx_t *ctx, int id, char *text, size_t text_bytes);
int hvd_process_set_count(hvd_ctx_t *ctx);
hvd_status_t hvd_process_set_ids(hvd_ctx_t *ctx, int *ids, int n_ids);
int hvd_process_set_size(hvd_ctx_t *ctx, int id); // or a negative status
int hvd_process_set_rank(hvd_ctx_t *ctx, int id); // position of this rank, or a negative status
hvd_status_t hvd_process_set_ranks(hvd_ctx_t *ctx, int id, int *ranks, int n_ranks);

// --- Seeing inside ------------------------------------------------------------------------------

// docs/observability.md tells what these show.
hvd_status_t hvd_timeline_start(hvd_ctx_t *ctx, const char *path, bool mark_cycles, char *text,
                                size_t text_bytes);
// The same for this rank alone, whichever it is, and whether HOROVOD_TIMELINE was set or not; ends
// with hvd_timeline_stop(). HVD_UNSUPPORTED: a timeline is being written already.
hvd_status_t hvd_profile_start(hvd_ctx_t *ctx, const char *path, char *text, size_t text_bytes);
hvd_status_t hvd_timeline_stop(hvd_ctx_t *ctx);

// Sums since init, of this rank's submissions; times are sums over operations.
typedef struct hvd_counters {
    uint64_t operations[HVD_N_OPS]; // finished, well or not
    uint64_t bytes[HVD_N_OPS];      // of their tensors, as submitted
    uint64_t failed;                // of the operations
    uint64_t on_board;              // small allreduces inside a host that needed no agreement
    uint64_t riding;                // operations that travelled in the agreement's own messages
    uint64_t batches;               // run
    uint64_t batched;    // operations that ran in them; batched / batches is the fusion ratio
    uint64_t cache_hits; // agreements on names known by a small id
    uint64_t cache_misses;
    uint64_t steps;     // as far as names that come again in the agreement tell
    uint64_t in_flight; // now: submitted and not finished
    uint64_t in_flight_max;
    uint64_t negotiate_ns; // from submission until all members had submitted
    uint64_t queue_ns;     // from then until its batch began
    uint64_t run_ns;       // until it was finished; all three without those on the board
    uint64_t strangers;    // clients turned away at this rank's ports: not of this job
    uint64_t nonfinite;    // elements that were NaN or infinite (HOROVOD_CHECK_NUMERICS)
} hvd_counters_t;

// bytes: sizeof(hvd_counters_t) as the caller knows it.
hvd_status_t hvd_counters(hvd_ctx_t *ctx, hvd_counters_t *counters_p, size_t bytes);

// Who keeps the others waiting, as far as this rank sees it: each rank waits for itself and for the
// ranks below it in the tree, so rank 0 sees the whole job, with other hosts as one each.
typedef struct hvd_late {
    int rank;         // the rank, or the first of them
    int n_ranks;      // more than 1: one of so many ranks of another host, or behind it
    uint64_t n_last;  // steps it came last in
    uint64_t late_ns; // how much later than the first, all those steps together
} hvd_late_t;

// Fills at most n_late; returns how many there are: 0 on a rank that waits for nobody.
int hvd_stragglers(hvd_ctx_t *ctx, hvd_late_t *late, int n_late);

// What the program says of its own progress, for whoever watches the job; NULL: not said this time.
// step: its number; samples: those since the last report, of this rank.
hvd_status_t hvd_report(hvd_ctx_t *ctx, const int64_t *step, const double *loss,
                        const double *samples);
// The metrics of this rank as text, in Prometheus' format, as at its socket; terminated. Returns
// the length of the whole text, which may be more than fits; 0: there is no job, or no memory.
size_t hvd_metrics(hvd_ctx_t *ctx, char *text, size_t bytes);

// Writes where the thread (a pthread_t as a number) now is, line by line, and returns the length;
// 0 if it cannot tell. Called from a thread of the library, without locks, when the flight recorder
// is dumped; it must return soon, and hvd_shutdown() waits for it: do not hold then what it needs.
typedef size_t (*hvd_stack_fn)(void *arg, uint64_t thread, char *text, size_t bytes);
void hvd_set_stack_source(hvd_ctx_t *ctx, hvd_stack_fn fn, void *arg); // NULL: none
// Abstract name of the socket with live state, for curl --abstract-unix-socket and hvd-info --live;
// "": there is none.
const char *hvd_monitor_path(const hvd_ctx_t *ctx);

const char *hvd_version(void);
const char *hvd_status_name(hvd_status_t status); // "HVD_MISMATCH"
const char *hvd_status_text(hvd_status_t status); // one sentence
const char *hvd_status_hint(hvd_status_t status); // what to try; "" if nothing
hvd_scope_t hvd_status_scope(hvd_status_t status);
const char *hvd_op_name(hvd_op_t op);             // "allreduce"
const char *hvd_reduce_name(hvd_reduce_t reduce); // "sum"
const char *hvd_dtype_name(hvd_dtype_t dtype);    // "float32"
size_t hvd_dtype_bytes(hvd_dtype_t dtype);

// Knobs: value as text and where it came from ("default", "environment").
// HVD_INVALID_ARGUMENT for a name no knob has.
hvd_status_t hvd_config(const hvd_ctx_t *ctx, const char *env_name, char *value, size_t bytes,
                        const char **origin_p);

// --- Rendezvous server --------------------------------------------------------------------------
// The small key-value server ranks meet at. A launcher, Spark or a test starts one per job; a
// rank's knobs HOROVOD_RENDEZVOUS_ADDR, _PORT and HOROVOD_SECRET_FILE lead to it. Runs in a thread.

typedef struct hvd_rendezvous hvd_rendezvous_t;

// bind_address NULL: loopback; "*": every interface. port 0: any free one.
hvd_status_t hvd_rendezvous_start(const char *bind_address, int port, const uint8_t secret[32],
                                  hvd_rendezvous_t **server_p, char *text, size_t text_bytes);
int hvd_rendezvous_port(const hvd_rendezvous_t *server);
void hvd_rendezvous_stop(hvd_rendezvous_t *server);

// --- Channel ------------------------------------------------------------------------------------
// A connected socket whose two ends have proved the job's secret to each other; every byte after
// that is encrypted. Launchers talk through it to their agents on other hosts. It never blocks:
// whoever sleeps on the socket waits for reading, and for writing if hvd_channel_wants_write.
// One thread at a time for each channel. The descriptor stays the caller's.

typedef struct hvd_channel hvd_channel_t;

// fd: a connected, non-blocking stream socket nothing has been sent on. The side that connected is
// the client.
hvd_status_t hvd_channel_open(int fd, bool is_server, const uint8_t secret[32],
                              hvd_channel_t **channel_p, char *text, size_t text_bytes);
// HVD_OK once the peer has proved the secret; HVD_IN_PROGRESS: call again when the socket is ready.
hvd_status_t hvd_channel_shake(hvd_channel_t *channel, char *text, size_t text_bytes);
// Bytes taken or received; 0: would block; HVD_PEER_LOST at the end, or another negative status.
// Only after hvd_channel_shake gave HVD_OK. A send of 0 bytes moves what was taken before.
int64_t hvd_channel_send(hvd_channel_t *channel, const void *data, size_t bytes, char *text,
                         size_t text_bytes);
int64_t hvd_channel_recv(hvd_channel_t *channel, void *data, size_t bytes, char *text,
                         size_t text_bytes);
bool hvd_channel_wants_write(const hvd_channel_t *channel);
void hvd_channel_close(hvd_channel_t *channel); // safe on NULL

// Where such sockets come in: a free port of every interface. Whoever connects is let through when
// it has proved the secret; until then it costs little, and there are limits to how many may try,
// and for how long. One thread at a time; nothing blocks.
typedef struct hvd_listener hvd_listener_t;

hvd_status_t hvd_listener_open(const uint8_t secret[32], hvd_listener_t **listener_p, char *text,
                               size_t text_bytes);
int hvd_listener_port(const hvd_listener_t *listener);
int hvd_listener_fd(const hvd_listener_t *listener); // readable: hvd_listener_accept has work
// HVD_OK: a channel that is open, and its descriptor, which the caller closes after the channel.
// HVD_IN_PROGRESS: nobody has come in; several may have at once, so ask until it says so.
hvd_status_t hvd_listener_accept(hvd_listener_t *listener, int *fd_p, hvd_channel_t **channel_p);
void hvd_listener_close(hvd_listener_t *listener); // safe on NULL

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
