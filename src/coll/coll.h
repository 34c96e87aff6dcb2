// SPDX-License-Identifier: Apache-2.0
//
// coll.h - collective algorithms as plans, and the executor that runs any plan over any links.
//
// An algorithm is a pure function from (member, members, sizes, ...) to a list of steps; coll.c
// holds the table of algorithms and the choice between them. exec.c runs a plan: it keeps every
// step moving that can move, segment by segment, so sends, receives and reductions overlap.
//
// Members are numbered 0..size-1 within the group that runs the plan; the executor asks its caller
// for the link to a member. All offsets and lengths are bytes.
// Threads: plans are pure; an exec_t belongs to the holder of the engine.
#ifndef HVD_COLL_H
#define HVD_COLL_H

#include "coll/reduce.h"
#include "coll/vec.h"
#include "net/net.h"

// --- Plans ---------------------------------------------------------------------------------------

typedef enum plan_buf {
    BUF_INPUT, // never written, unless the caller passes the same memory as output
    BUF_OUTPUT,
    BUF_TMP, // plan.tmp_bytes of scratch
    BUF_ACC, // plan.acc_bytes of accumulators (acc_dtype), addressed in bytes of accumulators
    N_BUFS
} plan_buf_t;

typedef enum step_kind {
    STEP_SEND,        // src -> peer
    STEP_RECV,        // peer -> dst
    STEP_RECV_REDUCE, // dst = src op incoming (src may be dst); with `swap` dst = incoming op src
    STEP_RECV_ACC,    // accumulators at dst: dst = dst op prescale * incoming
    STEP_COPY,        // dst = src
    STEP_REDUCE,      // dst = dst op src
    STEP_LOAD_ACC,    // accumulators at dst = prescale * src
    STEP_STORE_ACC,   // dst = the finished accumulators at src; `bytes` counts dst's bytes
    STEP_SCALE,       // dst = dst, finished
    STEP_ADASUM,      // dst = adasum(src, dst) or adasum(dst, src): the lower member's vector first
} step_kind_t;

#define NO_STEP (-1)

typedef struct step {
    uint8_t kind;
    uint8_t src, dst; // plan_buf_t
    uint8_t swap;     // order of the operands. STEP_ADASUM: src is the lower member's
    int32_t peer;     // member, for sends and receives
    // Steps that must come before. after[0] with `stream`: it produces exactly the bytes this one
    // reads (or reads those this one overwrites), in order, so this one may follow it byte by byte;
    // otherwise it must be finished.
    int32_t after[2];
    bool stream;
    size_t src_at, dst_at, bytes; // bytes: of the tensor's dtype, also where dst is accumulators
} step_t;

typedef struct plan {
    step_t *steps;
    int n_steps, cap_steps;
    size_t tmp_bytes, acc_bytes;
    bool failed; // out of memory while writing it
} plan_t;

// Sends to one peer run in plan order, and so do receives from one peer: that is all the matching
// there is. Steps of different peers and local steps run as their dependencies allow.
// Input and output may be the same memory in an allreduce and a broadcast; otherwise they must not
// overlap, except that an allgather's input may already lie at its place in the output.

// What is to be done. Arrays have `size` entries.
typedef struct coll_args {
    hvd_op_t op;
    hvd_dtype_t dtype;
    hvd_reduce_t reduce;
    bool scale_after; // the result is to be finished: by SCALE and STORE_ACC
    int member, size;
    int root;                 // broadcast: a member
    size_t bytes;             // allreduce, broadcast: of the tensor
    const size_t *blocks;     // allgather: bytes from each member; reducescatter: to each member
    const size_t *send_bytes; // alltoall: to each member (contiguous in input, member order)
    const size_t *recv_bytes; // alltoall: from each member (contiguous in output, member order)
    bool equal_blocks;        // alltoall: every member sends the same to every member (all know it)
    size_t segment_bytes;
} coll_args_t;

// One collective: what, among whom, from where to where. All it points to outlives the run.
typedef struct coll_task {
    coll_args_t args;
    const int *ranks;      // global rank of each member
    const vec_t *in, *out; // blocks lie member after member
    double prescale;       // 1 where nothing is reduced
    finish_t finish;
    // Equal on all members, and growing from task to task on each rank.
    uint64_t number;
} coll_task_t;

enum { // what an algorithm needs
    NEEDS_EQUAL_BLOCKS = 1 << 0,
    NEEDS_ADASUM = 1 << 1,      // serves HVD_ADASUM only
    NEEDS_NO_PRESCALE = 1 << 2, // has no LOAD_ACC and RECV_ACC: the caller scales the input
    ROUNDS_ONCE = 1 << 3,       // exact for half types: accumulates in float32
};

typedef struct algorithm {
    hvd_op_t op;
    const char *name;
    unsigned flags;
    hvd_status_t (*plan)(const coll_args_t *args, plan_t *plan, err_t *err);
    const char *good_at; // one line for hvd-info
} algorithm_t;

extern const algorithm_t coll_algorithms[];
extern const int coll_n_algorithms;

// What HOROVOD_ALGORITHM ("allreduce=ring,alltoall=bruck") says of an operation, the last if it
// says several things; both NULL: nothing.
typedef struct coll_forced {
    const algorithm_t *plan;
    const char *way; // of the engine, which needs no plan: "direct", "stream", "two_level"
} coll_forced_t;

hvd_status_t coll_forced(hvd_op_t op, const char *text, coll_forced_t *forced_p, err_t *err);

// The row to use: forced by `forced` ("allreduce=ring,alltoall=bruck") where it fits, else by the
// choice table (op, bytes, members). NULL only if nothing serves the request, with err set.
// Half types with Sum or Product take only rows that round once; otherwise the caller widens.
const algorithm_t *coll_choose(const coll_args_t *args, const char *forced, err_t *err);
const algorithm_t *coll_find(hvd_op_t op, const char *name);

hvd_status_t coll_plan(const algorithm_t *algorithm, const coll_args_t *args, plan_t *plan,
                       err_t *err);
void plan_clear(plan_t *plan); // keeps memory
void plan_free(plan_t *plan);
// Appends a step (for the algorithms); returns its index.
int plan_add(plan_t *plan, step_t step);

// --- The executor --------------------------------------------------------------------------------

typedef struct exec exec_t;

typedef struct exec_run {
    const plan_t *plan;
    void *buffers[N_BUFS];
    hvd_dtype_t dtype;
    hvd_reduce_t reduce;
    double prescale;
    finish_t finish;
    uint64_t batch; // stamped on every message and checked on arrival
    size_t segment_bytes;
    // Link to a member on LANE_DATA; NULL with err set when it cannot be had.
    net_link_t *(*link_of)(void *arg, int member, err_t *err);
    void *arg;
} exec_run_t;

exec_t *exec_new(void);
void exec_free(exec_t *exec);
// The run is copied; the plan, the buffers and the links must live until it ends.
hvd_status_t exec_start(exec_t *exec, const exec_run_t *run, err_t *err);
// HVD_OK: finished. HVD_IN_PROGRESS: call again. Anything else: broken, err says why.
hvd_status_t exec_progress(exec_t *exec, err_t *err);
// Whether the last exec_progress moved anything (a caller that waits may otherwise sleep).
bool exec_moved(const exec_t *exec);
// What the run waits for, in words, for reports of stalls.
void exec_describe(const exec_t *exec, char *text, size_t bytes);

#endif
