// SPDX-License-Identifier: Apache-2.0
//
// nccl.h - what the files of the simulated NCCL share: a communicator, its memory between
// processes, and the arithmetic.
//
// The memory of a communicator is a file without a name, which the process that made the unique id
// holds open: others reach it through /proc, and nothing is left behind however they end.
#ifndef GPU_NCCL_H
#define GPU_NCCL_H

#include "sim.h"

#include <stdatomic.h>

#define NCCL_RANKS 16
#define SLOT_BYTES ((size_t)64 << 20)   // of a rank, for collectives
#define CHANNEL_BYTES ((size_t)8 << 20) // of a pair, for messages
#define SHARED_BYTES ((size_t)1 << 20)  // what comes before both

enum {
    NCCL_OK = 0,
    NCCL_CUDA_ERROR = 1,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
};

typedef enum kind {
    KIND_ALLREDUCE,
    KIND_BROADCAST,
    KIND_ALLGATHER,
    KIND_REDUCESCATTER,
    KIND_REDUCE,
    KIND_SEND,
    KIND_RECV,
} kind_t;

// What ranks must agree on.
typedef struct call {
    int kind, dtype, op, root; // root: or the other side of a message
    uint64_t count, number;
    double factor;
} call_t;

// Who a process is, for others that look for a cycle.
typedef struct process {
    int pid, board; // descriptor of its board
} process_t;

// What the collective of a process waits for.
typedef struct board {
    atomic_int busy;
    int kind;
    uint64_t number, communicator;
    process_t waits_for;
} board_t;

typedef struct shared {
    atomic_int n_here, n_arrived;
    atomic_uint generation;
    atomic_uint arrived_at[NCCL_RANKS]; // generation + 1 of the last barrier it has come to
    process_t processes[NCCL_RANKS];
    int devices[NCCL_RANKS];
    call_t calls[NCCL_RANKS];
    struct {
        atomic_int full;
        call_t call;
    } channels[NCCL_RANKS][NCCL_RANKS]; // from, to
} shared_t;
_Static_assert(sizeof(shared_t) <= SHARED_BYTES, "the slots come behind it");

typedef struct comm {
    unsigned magic;
    int rank, n, device;
    uint64_t id; // the same on all ranks
    shared_t *shared;
    unsigned char *slots, *channels;
    uint64_t n_calls;
    atomic_int async; // result
    atomic_bool aborted;
    atomic_int n_inside; // threads in a call on it
    struct comm *made_before;
} comm_t;

// nccl_math.c
size_t nccl_bytes(int dtype);                    // 0: no such type
double nccl_factor(int dtype, const void *from); // of a floating type
// out[i] = the reduction over all ranks of slot[from + i].
void nccl_reduce(const comm_t *comm, const call_t *call, void *out, size_t from, size_t n);

// nccl_wait.c: one breath of waiting for a rank; false: aborted.
typedef struct patience {
    uint64_t since_ns, looked_ns;
    bool told;
} patience_t;

extern const char *const nccl_kinds[];
bool nccl_breathe(comm_t *comm, const call_t *call, int missing, patience_t *patience);
bool nccl_barrier(comm_t *comm, const call_t *call); // false: aborted
process_t nccl_process(void);                        // this one
void nccl_board_begin(const comm_t *comm, const call_t *call);
void nccl_board_end(void);

#endif
