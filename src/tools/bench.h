// SPDX-License-Identifier: Apache-2.0
//
// bench.h - what hvd-bench measures, on one rank.
//
// hvd-bench.c reads the options and starts ranks; bench.c runs and times the operations on each.
// bench_simulate.c has no ranks: it prices the operations.
#ifndef HVD_TOOLS_BENCH_H
#define HVD_TOOLS_BENCH_H

#include "simulate/simulate.h"

#define MAX_SIZES 64
#define MAX_TENSORS 1024

typedef struct bench_options {
    const char *op;
    hvd_dtype_t dtype;
    hvd_reduce_t reduce;
    size_t bytes[MAX_SIZES];
    int n_bytes;
    size_t tensors[MAX_TENSORS]; // bytes of those that "many" has in flight at once
    int n_tensors;
    int ranks, hosts;
    double budget_s;
    int max_samples;
    bool json, pin, no_fork, serve, demo, out_of_place;
    machine_t simulated; // n_ranks 0: nothing is simulated
    const char *env[32]; // ends in NULL
    int n_env;
} bench_options_t;

typedef struct bench_rank {
    hvd_ctx_t *ctx;
    const bench_options_t *options;
    int rank, size;
    char text[HVD_TEXT_BYTES];
} bench_rank_t;

// Measures every size of the options and prints a line for each on rank 0; 0 if all were right.
int bench_measure(bench_rank_t *r);
int bench_simulate(const bench_options_t *o);            // the exit code
void bench_die(const bench_rank_t *r, const char *what); // with what r->text says

#endif
