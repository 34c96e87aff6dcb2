// SPDX-License-Identifier: Apache-2.0
//
// coord.h - how ranks agree what runs next.
//
// A pure state machine: no sockets, no clock, no threads. Inputs are local submissions, frames from
// tree neighbours and the time; outputs are bytes for neighbours and decisions for this rank. The
// same object files run in the product and in the simulator, where thousands live in one process.
//
// Rank 0 is the sequencer: it appends records to one log for the whole job, and every rank carries
// out the records that concern it in log order. Readiness flows up a tree, each node reporting an
// entry once its whole subtree has it; the log flows down. docs/agreement.md tells the whole story.
//
// Owns: the names and ids of tensors, process sets, who has joined, what waits for whom.
// Threads: the holder of the engine. No allocation in steady state.
#ifndef HVD_COORD_H
#define HVD_COORD_H

#include "base/base.h"

typedef struct coord coord_t;

typedef struct coord_params {
    int rank, size;
    const int *parent;           // tree: parent of every rank; -1 for rank 0. Copied.
    size_t fusion_bytes;         // HOROVOD_FUSION_THRESHOLD; 0: no fusion
    size_t inline_bytes;         // allreduces whose accumulators fit ride in the lines; 0: none do
    int cache_capacity;          // ids kept; 0: names every time
    bool separate_groups;        // a request of several tensors is never fused with others
    bool dynamic_sets;           // sets may be added and removed
    uint64_t cycle_ns;           // longest wait for more tensors before a batch; 0: none
    uint64_t stall_warn_ns;      // 0: no stall check
    uint64_t stall_fail_ns;      // 0: never
    uint64_t heartbeat_ns;       // a sign of life for tree neighbours this often; 0: none
    uint64_t heartbeat_warn_ns;  // a neighbour that is silent for this long is reported
    uint64_t heartbeat_fail_ns;  // and given up after this long; 0: never
    uint64_t heartbeat_first_ns; // longer for one that has not been heard yet
    // dst = a op b, for payloads that ride along; dst is a. dtype is that of the accumulators
    // (float32 for half types), op is never Average (Sum instead) nor Adasum.
    void (*reduce)(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, const void *a, const void *b,
                   size_t n);
    const log_t *log;
} coord_params_t;

typedef struct coord_request {
    int set;
    const char *name;
    size_t name_bytes;
    const signature_t *signature;
    // What this rank tells of sizes: signature_n_sizes() of them.
    const int64_t *sizes;
    int n_sizes;
    // Contribution to an allreduce that rides along (signature_rides): accumulators, prescaled.
    const void *payload;
    size_t payload_bytes;
    uint64_t tag; // given back with the decision; not 0
} coord_request_t;

typedef enum decision_kind {
    DECIDE_RUN, // run these entries now, as one batch
    // The submission `tag` failed on every member; others go on. HVD_UNSUPPORTED: only because some
    // have it on_device and others not; all are to submit it again, without.
    DECIDE_FAIL,
    DECIDE_JOINED,    // all members have joined: `tag` (if any) ends with last_joined
    DECIDE_SET_ADDED, // the set exists now on every rank: `tag` (if any) ends with set
    DECIDE_SET_REMOVED,
    DECIDE_REPORT, // text for the log: a stall
    // A tree neighbour: nothing heard from `rank` for silent_ns. HVD_IN_PROGRESS: to be reported;
    // HVD_PEER_LOST: for too long, the caller is to coord_abort(); HVD_OK: heard again. With this
    // rank's own number: it did not run for silent_ns itself.
    DECIDE_SILENT,
    // Rank 0: nothing of `batch` has moved anywhere for silent_ns, which is too long, although all
    // ranks are heard; text says who waits for whom. The caller is to coord_abort().
    DECIDE_STUCK,
    DECIDE_ENDED, // the job is over: status HVD_SHUTDOWN, or the cause; nothing comes after
} decision_kind_t;

// One tensor (or group) of a batch.
typedef struct decision_entry {
    uint64_t tag; // 0: this rank has joined and takes part with zeros
    const char *name;
    const signature_t *signature;
    // Sizes of all members, member after member (n_sizes / members each), or NULL.
    const int64_t *sizes;
    int n_sizes;
    const void *result; // accumulators, when it rode along: nothing is left to run
    size_t result_bytes;
} decision_entry_t;

#define COORD_PROGRESS_BYTES 384

// What a rank was last seen doing.
typedef struct coord_activity {
    uint64_t n_submitted; // operations since the start
    uint32_t n_in_flight; // of those, not done
    uint64_t quiet_ns;    // since the last was submitted
    char last[64];        // its name, or the beginning of it
    // Its program can only wait for operations that are in flight and have not been agreed, as it
    // has for a while: the oldest of them, and the user's line that submitted it ("": not known).
    bool is_blocked;
    char blocked_in[64], where[120];
    // How often it lately did the same thing again, which not every way tells the agreement, and
    // the longest two times that took. Of the rank itself; not sent to others.
    int n_steps;
    uint64_t longest_step_ns, second_step_ns;
} coord_activity_t;

// The oldest batch that runs on this rank, or below it.
typedef struct coord_progress {
    bool is_running; // there is one
    uint64_t batch;
    uint64_t least_ns;               // since something of it moved on some rank that runs it,
    uint64_t longest_ns;             // and on that which knows what it waits for, for longest;
    char text[COORD_PROGRESS_BYTES]; // what that is; "": nobody knows
} coord_progress_t;

#define COORD_NO_BATCH ((uint64_t)0) // agreed without a record; brings its results

typedef struct decision {
    decision_kind_t kind;
    uint64_t batch; // number of the record in the log, equal on all ranks; or COORD_NO_BATCH
    int set;
    int n_entries;
    const decision_entry_t *entries; // DECIDE_RUN
    uint64_t tag;
    int last_joined;
    hvd_status_t status;
    const char *text;
    int rank; // DECIDE_SILENT, and the next two; else undefined
    uint64_t silent_ns;
    const coord_activity_t *activity; // as last heard
} decision_t;

hvd_status_t coord_new(const coord_params_t *params, coord_t **coord_p, err_t *err);
void coord_free(coord_t *coord);

// --- Inputs -------------------------------------------------------------------------------------

// "Ready here." Errors concern this call only: unknown set, not a member, duplicate name, joined
// already, shut down. op HVD_JOIN and HVD_BARRIER are submitted like everything else.
hvd_status_t coord_submit(coord_t *coord, const coord_request_t *request, uint64_t now_ns,
                          err_t *err);
hvd_status_t coord_add_set(coord_t *coord, const int *ranks, int n_ranks, uint64_t tag,
                           uint64_t now_ns, err_t *err);
hvd_status_t coord_remove_set(coord_t *coord, int set, uint64_t tag, uint64_t now_ns, err_t *err);
// A set known to all ranks before the first submission (static process sets), in the same order.
hvd_status_t coord_define_set(coord_t *coord, const int *ranks, int n_ranks, int *id_p, err_t *err);

// One whole frame body from a tree neighbour. An error means the neighbour is broken or hostile;
// only coord_abort() and coord_free() make sense after it.
hvd_status_t coord_receive(coord_t *coord, int from, const void *body, size_t bytes,
                           uint64_t now_ns, err_t *err);
// This rank finished running a batch: the clock of the sequencer. Names of the batch may be
// submitted again afterwards, so call it before telling the submitters. Not for batches whose
// entries bring their results.
void coord_batch_done(coord_t *coord, uint64_t batch, uint64_t now_ns);
void coord_tick(coord_t *coord, uint64_t now_ns);
// When coord_tick next has something to do; NEVER_NS: nothing is timed.
uint64_t coord_next_tick(const coord_t *coord);

// How long this rank did not run, if it does so again only since a moment ago; else 0.
uint64_t coord_absence_ns(const coord_t *coord, uint64_t now_ns);
// "it waited for 2 operations, the newest 'grad.7' (number 41, 3.0 s before)"
void coord_activity_text(const coord_activity_t *activity, char *text, size_t bytes);
// What the next heartbeats and answers tell of this rank.
void coord_set_activity(coord_t *coord, const coord_activity_t *activity);
void coord_set_progress(coord_t *coord, const coord_progress_t *progress);
// Every neighbour has been heard: should one end from here on, a link tells.
bool coord_hears_all(const coord_t *coord);

// Asks all ranks to stop. reason: the error that makes this rank leave; "": none that is known.
void coord_shutdown(coord_t *coord, const char *reason, uint64_t now_ns);
// A peer is lost, or something else ends the job: tells the others. rank: whose fault it is, -1:
// nobody's. text NULL: that of the status.
void coord_abort(coord_t *coord, hvd_status_t cause, int rank, const char *text);

// --- Outputs ------------------------------------------------------------------------------------

// Tree neighbours: parent first (except on rank 0), then children.
int coord_n_neighbours(const coord_t *coord);
int coord_neighbour(const coord_t *coord, int i);
// Closes open frames and gives the bytes waiting for neighbour i: whole frames (wire/control.h).
// The caller takes bytes from the front with coord_sent; what it leaves is offered again. Every
// input may add bytes for any neighbour: look at all of them before sleeping.
size_t coord_outgoing(coord_t *coord, int i, const void **bytes_p);
void coord_sent(coord_t *coord, int i, size_t bytes);

// Rank 0 makes batches of what is complete; elsewhere nothing is to be formed. Everywhere: ends the
// job if the agreement has run out of memory. Call it when the inputs at hand have been fed, since
// what is complete by then is fused, and before looking at outputs.
void coord_form_batches(coord_t *coord);
// The next decision, or NULL. Valid until the next call of coord_next; a RUN whose entries do not
// bring their results stays valid (names, signatures, sizes) until coord_batch_done. All entries of
// a RUN bring their results, or none does; a barrier always does, with no bytes.
const decision_t *coord_next(coord_t *coord);

// --- Queries ------------------------------------------------------------------------------------

// Members in ascending order; NULL for an unknown set.
const int *coord_set_ranks(const coord_t *coord, int set, int *n_p);
hvd_status_t coord_has_ended(const coord_t *coord, err_t *end); // HVD_OK: it has not
// Who asked for the shutdown, or is the cause of another end; -1: nobody that is known.
int coord_end_rank(const coord_t *coord);
const char *coord_end_reason(const coord_t *coord); // of that rank, see coord_shutdown

typedef struct coord_counters {
    uint64_t n_stale_lines;  // for process sets removed meanwhile
    uint64_t n_known, n_new; // submissions of this rank under a known id, and without one
    uint64_t n_steps;        // see coord_straggler
} coord_counters_t;

coord_counters_t coord_counters(const coord_t *coord);

// Whom this node waits for. Branch 0 is this rank itself, the others are what lies below each of
// its children; a node without children waits for nobody and knows nothing.
typedef struct coord_straggler {
    int rank;            // at the top of the branch
    int n_ranks;         // in the branch
    uint64_t n_last;     // steps it came last in
    uint64_t n_steps;    // of so many
    uint64_t late_ns;    // how much later than the first, all of those steps together
    uint64_t elapsed_ns; // coord_worst_straggler: how long those steps took
} coord_straggler_t;

coord_straggler_t coord_straggler(const coord_t *coord, int branch); // since the beginning
// Once after each hundred steps: the branch that was waited for longest in them. False: not now.
bool coord_worst_straggler(coord_t *coord, coord_straggler_t *late_p);

// Tells of every share that reaches this node, as it comes. NULL: nobody listens.
typedef void (*coord_arrival_fn)(void *arg, const char *name, int rank);
void coord_on_arrival(coord_t *coord, coord_arrival_fn fn, void *arg);

#endif
