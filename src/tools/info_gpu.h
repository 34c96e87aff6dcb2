// SPDX-License-Identifier: Apache-2.0
//
// info_gpu.h - the self test on GPUs: what its ranks do, and tell.
//
// info_gpu.c starts the ranks and prints; info_gpu_rank.c is one of them, and works through the
// cases below. Memory that both see has a part for each rank, which only that one writes.
#ifndef HVD_TOOLS_INFO_GPU_H
#define HVD_TOOLS_INFO_GPU_H

#include "base/base.h"

#define SELFTEST_RANKS 8  // with more of them sums would not be exact in the half types
#define SELFTEST_ROWS 10  // operations
#define SELFTEST_SIZES 3  // elements; an odd number: not the same on all ranks, where that can be
#define SELFTEST_SPEEDS 4 // sizes that are timed

typedef struct selftest_row {
    const char *name;
    hvd_op_t op;
    hvd_reduce_t reduce;
} selftest_row_t;

extern const selftest_row_t selftest_rows[SELFTEST_ROWS];
extern const size_t selftest_sizes[SELFTEST_SIZES];
extern const size_t selftest_speeds[SELFTEST_SPEEDS];

typedef enum selftest_cell { CELL_SKIPPED, CELL_RIGHT, CELL_WRONG } selftest_cell_t;

// What a rank tells.
typedef struct selftest_part {
    char gpu[96];       // its name
    char doing[128];    // what it has begun last
    char failure[640];  // the first; "": none
    char why_host[512]; // tensors do not travel by NCCL, although they should; rank 0
    bool by_nccl;
    bool is_over; // it came to the end
    int n_results, n_wrong;
    uint8_t cells[SELFTEST_ROWS][HVD_N_DTYPES];
    double speeds_us[SELFTEST_SPEEDS]; // of an allreduce; 0: not measured
    double to_device_gbs, to_host_gbs;
} selftest_part_t;

typedef struct selftest {
    bool wants_nccl; // only what NCCL takes, and nothing if it cannot be used
    int ranks, n_gpus;
    selftest_part_t *parts; // by rank
} selftest_t;

// A rank; its exit code.
int selftest_rank(void *selftest, int rank, const char *const *env);

#endif
