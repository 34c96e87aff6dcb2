// SPDX-License-Identifier: Apache-2.0
//
// reduce.h - element-wise arithmetic on tensors of every dtype.
//
// Pure functions, any thread. Vectorised with run-time dispatch; reference.c has the slow versions
// they are tested against. Sums of integers wrap. Half types (float16, bfloat16) are computed in
// float32 and rounded once, to nearest even, at the end of each call. bool: Sum and Max mean "or",
// Min and Product mean "and". Average never reaches this layer: it is Sum with a divisor.
//
// Factors give the bits that the framework's own multiplication would give: float32 and the half
// types are multiplied by the factor as float32 has it and rounded to their own type, before the
// first addition and after the last; integers are multiplied in double and truncated toward zero.
// Dividing a sum costs no rounding of its own.
#ifndef HVD_COLL_REDUCE_H
#define HVD_COLL_REDUCE_H

#include "base/base.h"

// dst[i] = a[i] op b[i]; dst may be a or b. n counts elements.
void reduce_pair(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, const void *a, const void *b,
                 size_t n);

// dst[i] = finish(fold(pre * inputs[0][i], ..., pre * inputs[k-1][i])), in the order given.
// dst may be any of the inputs; also_dst, if not NULL, gets the same result. 1 <= k.
void reduce_many(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, void *also_dst,
                 const void *const *inputs, int k, size_t n, double pre, finish_t finish);

// dst[i] = factor * src[i]; dst may be src. factor 1 is a copy.
void reduce_scale(hvd_dtype_t dtype, void *dst, const void *src, size_t n, double factor);
// The same with a divisor.
void reduce_finish(hvd_dtype_t dtype, void *dst, const void *src, size_t n, finish_t finish);

// Accumulators: float32 for half types, the dtype itself otherwise.
// acc = factor * src
void acc_load(hvd_dtype_t dtype, void *acc, const void *src, size_t n, double factor);
// acc = acc op factor * src
void acc_add_scaled(hvd_dtype_t dtype, hvd_reduce_t op, void *acc, const void *src, size_t n,
                    double factor);
// dst = finish(acc)
void acc_store(hvd_dtype_t dtype, void *dst, const void *acc, size_t n, finish_t finish);

// Adasum of two vectors (float32 or float64): dst = (1 - a.b/2|a|^2) a + (1 - a.b/2|b|^2) b, dot
// products in double; a coefficient stays 1 where its norm is tiny. dst may be a or b. Bit-equal
// wherever the same a and b are given in the same order.
void reduce_adasum(hvd_dtype_t dtype, void *dst, const void *a, const void *b, size_t n);

const char *reduce_kernels_name(void); // the instruction set in use on this processor: "avx512"

#endif
