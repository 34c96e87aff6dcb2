// SPDX-License-Identifier: Apache-2.0
//
// run.h - what the files share that run batches: run.c (the queue), tensors.c (which memory goes in
// and comes out), ways.c (the table and the choice) and a way_*.c for each way.
//
// A way gets its batch as a coll_task_t: what is to be done, among whom, from where to where. A way
// that does something smaller on the way (a shard, a piece, a phase) makes a task of its own and
// hands that down; nobody changes what it was handed. Everything belongs to the holder of the
// engine; memory is kept from batch to batch.
#ifndef HVD_ENGINE_RUN_H
#define HVD_ENGINE_RUN_H

#include "coll/direct.h"
#include "coll/stream.h"
#include "engine/engine.h"
#include "engine/ways.h"

// --- What a way keeps while it runs, by owner ----------------------------------------------------

// way_plan.c: a plan wants contiguous memory, so what is not is packed, and unpacked afterwards.
typedef struct plan_state {
    net_t *net;
    exec_t *exec;
    plan_t plan;
    const int *ranks; // of the members
    buf_t packed, unpacked, tmp, acc;
    const vec_t *out;     // where the result belongs
    hvd_dtype_t dtype;    // of the tensors
    bool widened;         // runs on float32, although they are of a half type
    finish_t finish;      // of a widened result, when it is narrowed
    uint8_t *unpack_from; // NULL: the result is where it belongs
} plan_state_t;

// way_pieces.c: one plan after the other, a tensor each.
typedef struct piece_state {
    buf_t bytes; // of each tensor, as size_t
    size_t n, next, at;
    vec_t in, out;
} piece_state_t;

typedef enum phase { PHASE_REDUCE_IN_HOST, PHASE_BETWEEN_HOSTS, PHASE_GATHER_IN_HOST } phase_t;

// way_two_level.c
typedef struct two_level_state {
    phase_t phase;
    int n_shards;
    size_t *shard_at, *shard_bytes;
    vec_t shard; // of this rank
    buf_t memory;
} two_level_state_t;

// way_mpi.c
typedef struct mpi_state {
    coll_args_t args; // MPI reads it until the end
    uint8_t *output;
    size_t *blocks; // of a widened reducescatter
} mpi_state_t;

// comms.c: what the members of a process set tell each other of their GPUs.
typedef struct gpu_facts {
    uint32_t version;    // of NCCL; 0: this rank cannot use it
    uint32_t is_passing; // the reason may be another one next time
    uint8_t uuid[16];    // of the GPU
    uint8_t id[128];     // of member 0: by it they find each other
    char why_not[360];
} gpu_facts_t;

typedef enum nccl_init_phase {
    PHASE_FACTS,
    PHASE_OUTCOMES, // of making a communicator
    PHASE_CONNECTING,
    PHASE_OVER
} nccl_init_phase_t;

typedef struct nccl_init {
    nccl_init_phase_t phase;
    staging_t *staging;
    struct set_comm *set;
    struct comm *comm; // being made
    gpu_facts_t mine;
    const gpu_facts_t *facts; // by member
    vec_t in, out;
    buf_t memory;
    uint64_t deadline_ns;
    err_t failure; // of making it
} nccl_init_t;

// way_nccl.c
typedef struct nccl_state {
    staging_t *staging;
    struct comm *comm;
    struct block *scratch; // what is packed, or the zeros of a rank that has joined
    size_t packed_bytes, zero_bytes;
    buf_t calls;  // nccl_call_t
    buf_t pieces; // of what is packed
    struct launch *launch;
} nccl_state_t;

struct runner {
    batch_t *batch; // NULL: nothing runs
    const way_t *way;
    coll_task_t task; // the whole batch
    vec_t in, out;
    size_t *blocks, *send_bytes, *recv_bytes; // by member
    buf_t zeros;                              // what a rank that has joined brings
    stream_t *stream;                         // NULL without shared memory, as is:
    direct_t *direct;
    trials_t trials;
    trial_t *trial; // the task is a part of; NULL: of none
    uint64_t start_ns;
    plan_state_t plan;
    piece_state_t pieces;
    two_level_state_t two_level;
    mpi_state_t mpi;
    nccl_init_t nccl_init;
    nccl_state_t nccl;
};

// What the batch asks for, but for what its tensors tell.
coll_task_t run_task_of(const hvd_ctx_t *ctx, const runner_t *r, const batch_t *b);
// Memory of at least `bytes`, kept between batches.
void *scratch(buf_t *buf, size_t bytes);

// --- tensors.c -----------------------------------------------------------------------------------

typedef struct tensor_view {
    uint8_t *input, *output; // output NULL: not yet allocated
    request_t *request;      // NULL: this rank has joined
    int index;
    int64_t rows;
    size_t row_bytes; // of everything but the first dimension
    size_t bytes;     // rows * row_bytes; scalars have one row
} tensor_view_t;

typedef bool (*visit_fn)(runner_t *, const decision_entry_t *, tensor_view_t *, int member);

// Calls visit for every tensor of the batch, in order; false as soon as one visit says so.
bool each_tensor(runner_t *r, visit_fn visit, int member);
// Strings the tensors of the batch into r->in and r->out, and completes the arguments of its task.
// False: no memory.
bool string_tensors(runner_t *r);
// The first dimension of an output, once it is known. Shapes lie in the request.
void tensor_set_rows(request_t *request, int t, int64_t rows);
// Rows that member m of n keeps of a scattered tensor, and those of all members before it.
int64_t scattered_rows(int64_t rows, int n, int m);
int64_t scattered_before(int64_t rows, int n, int m);
// Bytes of the largest buffer that any member has: what they all know.
size_t largest_buffer(const runner_t *r);

// --- board_move.c: what board.c does with operations other than sums -----------------------------

// Does it tell as few sizes as the board has room for, and need nobody to explain an error?
bool board_may_move(const request_t *request, int n_members);
size_t board_move_bytes(const request_t *request); // of its contribution, with the data
// Writes the contribution: where this rank stands, its sizes, and the data if that fits in `room`.
void board_bring(const request_t *request, uint64_t clock, size_t room, uint8_t *to);
// All have come. Takes the sizes; true: everyone brought its data.
bool board_all_brought(request_t *request, const uint8_t *const *contributions);
// Moves the data into the outputs of this rank. False: no memory for them.
bool board_move(hvd_ctx_t *ctx, runner_t *r, request_t *request,
                const uint8_t *const *contributions);

// --- What ways lend each other, besides themselves -----------------------------------------------

// way_plan.c: contiguous memory for what is strung in the task's vectors; the input multiplied by
// `factor`, and widened if p->widened.
hvd_status_t plan_arrange(plan_state_t *p, const coll_task_t *task, double factor,
                          uint8_t **input_p, uint8_t **output_p, err_t *err);
void plan_unpack(const plan_state_t *p);

// --- The rows of ways.c --------------------------------------------------------------------------

// Called by way of the table, where clang sees no rule: those that lean on more than their runner
// say HELD besides.
#define WAY_AT_ONCE(name)                                                                          \
    bool name##_takes(const way_case_t *given);                                                    \
    hvd_status_t name##_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)    \
        REQUIRES(ctx -> baton)
#define WAY_IN_STEPS(name)                                                                         \
    WAY_AT_ONCE(name);                                                                             \
    hvd_status_t name##_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)           \
        REQUIRES(ctx -> baton)

WAY_AT_ONCE(way_alone);
WAY_AT_ONCE(way_riding);
WAY_IN_STEPS(way_pieces);
WAY_IN_STEPS(way_mpi);
WAY_IN_STEPS(way_direct);
WAY_IN_STEPS(way_stream);
WAY_IN_STEPS(way_two_level);
WAY_IN_STEPS(way_plan);
WAY_IN_STEPS(way_nccl);
void way_direct_abandon(runner_t *r);
// It may be faster than windows, or not: trials.h.
bool way_direct_may_pay(const way_case_t *given);
void way_nccl_abandon(runner_t *r);
// comms.c: before the first batch of a set that may use NCCL.
hvd_status_t way_init_nccl_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
    REQUIRES(ctx->baton);
hvd_status_t way_init_nccl_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
    REQUIRES(ctx->baton);
void way_init_nccl_abandon(runner_t *r);
bool board_takes(const way_case_t *given); // board.c: its members run it themselves

#endif
