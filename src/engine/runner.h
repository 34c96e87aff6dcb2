// SPDX-License-Identifier: Apache-2.0
//
// runner.h - what the files share that run batches: batch.c (the queue), tensors.c (which memory
// goes in and comes out), routes.c (the table and the choice), route_plan.c, route_two_level.c.
//
// Everything here belongs to the holder of the engine. Memory is kept from batch to batch.
#ifndef HVD_RUNNER_H
#define HVD_RUNNER_H

#include "engine/engine.h"

typedef enum phase { PHASE_REDUCE_IN_HOST, PHASE_BETWEEN_HOSTS, PHASE_GATHER_IN_HOST } phase_t;

struct batch_runner {
    stream_t *stream; // NULL without shared memory
    atomic_uint_fast64_t *stream_clock;
    exec_t *exec;
    plan_t plan;

    // The batch being run.
    batch_t *batch;
    route_t route;
    phase_t phase;
    vec_t in, out, shard;
    coll_args_t args; // of the whole set
    double pre, post;
    bool moves_only;      // allgather, broadcast, alltoall: no arithmetic
    coll_args_t sub_args; // of the stream or plan under way
    const int *sub_ranks; // global ranks of its members
    bool widened;         // the plan runs on float32 although the tensors are half
    uint8_t *plan_out;    // contiguous output to unpack afterwards; NULL: none
    uint8_t *mpi_out;     // where MPI leaves its result
    vec_t piece_in, piece_out;
    size_t n_pieces, next_piece, piece_at;

    // By member, for the batch; by member of the group, for the phase.
    size_t *blocks, *send_bytes, *recv_bytes, *shard_bytes;
    int *host_of, *local_ranks, *cross_ranks;
    int n_local, local_member, n_shards, n_cross, cross_member;
    size_t *shard_at;

    buf_t packed, unpacked, tmp, acc, zeros;
    buf_t pieces; // bytes of each tensor, as size_t
};

// Memory of at least `bytes`, kept between batches.
void *runner_scratch(buf_t *buf, size_t bytes);

// --- tensors.c ----------------------------------------------------------------------------------

typedef struct tensor_view {
    uint8_t *input, *output; // output NULL: not yet allocated
    request_t *request;      // NULL: this rank has joined
    int index;
    int64_t rows;
    size_t row_bytes; // of everything but the first dimension
    size_t bytes;     // rows * row_bytes; scalars have one row
} tensor_view_t;

typedef bool (*visit_fn)(batch_runner_t *, const decision_entry_t *, tensor_view_t *, int member);

// Calls visit for every tensor of the batch, in order; false as soon as one visit says so.
bool each_tensor(batch_runner_t *r, visit_fn visit, int member);
// Strings the tensors of the batch into r->in and r->out, and completes r->args. False: no memory.
bool string_tensors(batch_runner_t *r);
// The user's output, or memory taken for it; NULL: there is none.
void *allocate_output(request_t *request, int t);

// --- routes.c -----------------------------------------------------------------------------------

hvd_status_t start_stream(batch_runner_t *r, const vec_t *in, const vec_t *out, double pre,
                          double post, err_t *err);
// One member: what goes in comes out, scaled as several would have scaled it.
void move_alone(const batch_runner_t *r, const vec_t *in, const vec_t *out, double pre,
                double post);
// Takes the batch's route: sets r->route and starts it.
hvd_status_t route_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err);

// --- route_plan.c -------------------------------------------------------------------------------

// Contiguous memory for what is strung in `in` and `out`: packs where that must be, and notes in
// plan_out what is to be unpacked afterwards.
hvd_status_t plan_arrange(batch_runner_t *r, const vec_t *in, const vec_t *out, hvd_dtype_t dtype,
                          uint8_t **input_p, uint8_t **output_p, err_t *err);
void plan_unpack(const batch_runner_t *r, const vec_t *to, hvd_dtype_t dtype, const uint8_t *from);
// Runs sub_args over links, from `in` to `out`; packs first where the plan needs it.
hvd_status_t plan_start(hvd_ctx_t *ctx, batch_runner_t *r, const vec_t *in, const vec_t *out,
                        err_t *err);
hvd_status_t plan_progress(batch_runner_t *r, hvd_dtype_t dtype, const vec_t *out, bool *moved_p,
                           err_t *err);
hvd_status_t pieces_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err);
hvd_status_t pieces_progress(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err);

// --- route_two_level.c --------------------------------------------------------------------------

hvd_status_t two_level_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err);
hvd_status_t two_level_progress(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err);

#endif
