// SPDX-License-Identifier: Apache-2.0
//
// reduce_kernels.h - the vector kernels behind reduce.h, one table per instruction set.
//
// reduce_kernels.inc is compiled once per instruction set (reduce_base.c, reduce_avx2.c,
// reduce_avx512.c); each yields one constant table. Private to reduce.c and its test.
#ifndef HVD_COLL_REDUCE_KERNELS_H
#define HVD_COLL_REDUCE_KERNELS_H

#include "coll/reduce.h"

typedef enum fold { FOLD_SUM, FOLD_MIN, FOLD_MAX, FOLD_PRODUCT, N_FOLDS } fold_t;

// dst[i] = post * fold(inputs[0][i], ..., inputs[k-1][i]); post is used by floating types only.
// dst and also_dst (may be NULL) may be any of the inputs.
typedef void fold_fn_t(void *dst, void *also_dst, const void *const *inputs, int k, size_t n,
                       double post);
// dst[i] = factor * src[i], or dst[i] op factor * src[i]; each side of its own type.
typedef void map_fn_t(void *dst, const void *src, size_t n, double factor);

typedef struct kernels {
    const char *name;
    fold_fn_t *fold[HVD_N_DTYPES][N_FOLDS];
    map_fn_t *acc[HVD_N_DTYPES][N_FOLDS]; // half types, into float32
    map_fn_t *scale[HVD_N_DTYPES];        // floating types
    map_fn_t *widen[HVD_N_DTYPES];        // half types, to float32
    map_fn_t *narrow[HVD_N_DTYPES];       // half types, from float32
} kernels_t;

enum { MAX_KERNEL_TABLES = 3 };

// The tables this processor can run, fastest first; returns how many.
int kernels_supported(const kernels_t *tables[MAX_KERNEL_TABLES]);

extern const kernels_t kernels_base;
#if defined(__x86_64__)
extern const kernels_t kernels_avx2, kernels_avx512;
#endif

#endif
