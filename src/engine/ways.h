// SPDX-License-Identifier: Apache-2.0
//
// ways.h - the table of ways a batch can take, for those who run batches and those who list them.
//
// A way is a row of ways.c and a file way_<name>.c. Choosing one is a pure function of what all
// members know; running one belongs to the holder of the engine.
#ifndef HVD_ENGINE_WAYS_H
#define HVD_ENGINE_WAYS_H

#include "coll/coll.h"
#include "engine/trials.h"

typedef struct runner runner_t; // run.h

// All that decides about the way of a batch: the same on every member.
typedef struct way_case {
    const coll_args_t *args;
    const char *algorithm; // HOROVOD_ALGORITHM
    size_t inline_bytes;   // HOROVOD_INLINE_BYTES; 0: the agreement did not bring the result
    bool on_device;        // tensors of all members are in the memory of GPUs, and stay there
    bool is_waited_for;    // submitted with HVD_WAITS, not agreed yet, and not for the first time
    bool one_host;         // of all members
    bool has_stream;       // through the memory of this host
    bool is_crowded;       // the host of one_host has more ranks than cores
    size_t all_bytes;      // of the blocks of all members, or of the tensor
    copying_t copying;     // what trials say, where there have been any
    bool two_levels;       // some host has several members, and all such hosts share memory
    bool mpi_can_run;      // the job has an MPI library that serves this
} way_case_t;

typedef struct way {
    const char *name;  // in timelines
    const char *tells; // in hvd-info --algorithms
    bool by_plan;      // it runs the plan of an algorithm (of coll.c), at least for a part
    bool (*takes)(const way_case_t *given);
    // The rest may be NULL: nothing to do. HVD_OK: this part is over; HVD_IN_PROGRESS: call again.
    // *moved_p is set when something was done.
    hvd_status_t (*start)(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err);
    hvd_status_t (*progress)(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err);
    // For ways whose results are under way when progress ends: over when they have landed.
    hvd_status_t (*land)(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err);
    // For ways in which others write into this rank's tensors: when it returns, none does any more.
    void (*abandon)(runner_t *r);
} way_t;

// In the order of preference: the first that takes a batch runs it.
typedef enum way_id {
    WAY_BOARD,
    WAY_RIDING,
    WAY_AGREED,
    WAY_INIT_NCCL,
    WAY_NCCL,
    WAY_ALONE,
    WAY_PIECES,
    WAY_MPI,
    WAY_DIRECT,
    WAY_STREAM,
    WAY_TWO_LEVEL,
    WAY_PLAN,
    N_WAYS
} way_id_t;

extern const way_t ways[N_WAYS]; // ways.c
way_id_t way_choose(const way_case_t *given);
// Up to this many bytes ride in a job of this shape.
size_t way_inline_bytes(const config_t *config, int n_ranks, int n_hosts);
// HOROVOD_ALGORITHM names a plan for this operation: no other way may take it.
bool way_is_forced_to_plan(const way_case_t *given);
bool way_is_forced(const way_case_t *given, const char *name);

#endif
