// SPDX-License-Identifier: Apache-2.0
//
// reduce.c - reduce.h by way of the vector kernels, and the parts that need no vectors.
//
// Method: one table of kernels per instruction set; each call takes the best the processor has
// (a few loads and tests). A factor before the fold goes block by block through the first-level
// cache; one after it is part of the kernels of floating types, but for half types, whose sum is
// rounded first. Integer factors are plain loops. Pure functions, any thread.
#include "coll/reduce_kernels.h"

#include <float.h>

// A product and a sum fused into one rounding would give other bits on other processors.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

// --- Choice --------------------------------------------------------------------------------------

int kernels_supported(const kernels_t *tables[MAX_KERNEL_TABLES])
{
    int n = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        tables[n++] = &kernels_avx512;
    }
    if (__builtin_cpu_supports("avx2")) { // F16C is older: whatever has AVX2 has it
        tables[n++] = &kernels_avx2;
    }
#endif
    tables[n++] = &kernels_base;
    return n;
}

static const kernels_t *best_kernels(void)
{
    const kernels_t *tables[MAX_KERNEL_TABLES];
    kernels_supported(tables);
    return tables[0];
}

const char *reduce_kernels_name(void)
{
    return best_kernels()->name;
}

static const fold_t fold_of[HVD_N_REDUCES] = {
    [HVD_AVERAGE] = FOLD_SUM, [HVD_SUM] = FOLD_SUM, [HVD_ADASUM] = FOLD_SUM,
    [HVD_MIN] = FOLD_MIN,     [HVD_MAX] = FOLD_MAX, [HVD_PRODUCT] = FOLD_PRODUCT,
};

static void copy_elements(hvd_dtype_t dtype, void *dst, const void *src, size_t n)
{
    if (dst != src && n > 0) {
        memcpy(dst, src, n * hvd_dtype_bytes(dtype));
    }
}

// --- Factors on integers -------------------------------------------------------------------------
// Multiplied and divided in double and truncated toward zero. What does not fit becomes what
// PyTorch and NumPy make of it: types of at most 32 bits keep the low bits of an int32, and what is
// no int32 (or int64, for that type) becomes the least one. A division, since a 49th of 49 is 1 and
// 49 times a 49th is not.

// Loads and stores by memcpy: what lies in a link's memory need not be aligned.

#define SCALE_INTEGERS(name, type, wide, least, beyond)                                            \
    static void name(void *dst_, const void *src_, size_t n, double factor, double divisor)        \
    {                                                                                              \
        char *dst = dst_;                                                                          \
        const char *src = src_;                                                                    \
        for (size_t i = 0; i < n; i++) {                                                           \
            type value;                                                                            \
            memcpy(&value, src + i * sizeof value, sizeof value);                                  \
            double x = factor * (double)value;                                                     \
            x = divisor == 1.0 ? x : x / divisor;                                                  \
            wide whole = x > (double)(least) - 1 && x < (beyond) ? (wide)x : (least);              \
            value = (type)whole;                                                                   \
            memcpy(dst + i * sizeof value, &value, sizeof value);                                  \
        }                                                                                          \
    }

SCALE_INTEGERS(scale_u8, uint8_t, int32_t, INT32_MIN, 0x1p31)
SCALE_INTEGERS(scale_i8, int8_t, int32_t, INT32_MIN, 0x1p31)
SCALE_INTEGERS(scale_u16, uint16_t, int32_t, INT32_MIN, 0x1p31)
SCALE_INTEGERS(scale_i16, int16_t, int32_t, INT32_MIN, 0x1p31)
SCALE_INTEGERS(scale_i32, int32_t, int32_t, INT32_MIN, 0x1p31)
SCALE_INTEGERS(scale_i64, int64_t, int64_t, INT64_MIN, 0x1p63)

static void scale_flag(void *dst_, const void *src_, size_t n, double factor, double divisor)
{
    uint8_t *dst = dst_;
    const uint8_t *src = src_;
    const bool keeps_true = factor >= divisor || factor <= -divisor; // after truncation
    for (size_t i = 0; i < n; i++) {
        dst[i] = src[i] != 0 && keeps_true;
    }
}

typedef void scale_integers_fn_t(void *dst, const void *src, size_t n, double factor,
                                 double divisor);

static scale_integers_fn_t *const scale_integers[HVD_N_DTYPES] = {
    [HVD_UINT8] = scale_u8,  [HVD_INT8] = scale_i8,   [HVD_UINT16] = scale_u16,
    [HVD_INT16] = scale_i16, [HVD_INT32] = scale_i32, [HVD_INT64] = scale_i64,
    [HVD_BOOL] = scale_flag,
};

// --- Factors -------------------------------------------------------------------------------------

// A factor as the framework would take it: float32 and half types are multiplied by a float32. In
// the kernels of float32, which multiply in double, the product of two of them is still exact.
static double own_factor(hvd_dtype_t dtype, double factor)
{
    return acc_dtype(dtype) == HVD_FLOAT32 ? (double)(float)factor : factor;
}

void reduce_finish(hvd_dtype_t dtype, void *dst, const void *src, size_t n, finish_t finish)
{
    const double factor = own_factor(dtype, finish.factor);
    if (finish_is_nothing(finish)) {
        copy_elements(dtype, dst, src, n);
    } else if (dtype_is_floating(dtype)) {
        best_kernels()->scale[dtype](dst, src, n, factor / finish.divisor);
    } else {
        scale_integers[dtype](dst, src, n, factor, finish.divisor);
    }
}

void reduce_scale(hvd_dtype_t dtype, void *dst, const void *src, size_t n, double factor)
{
    reduce_finish(dtype, dst, src, n, (finish_t){factor, 1});
}

// --- Accumulators --------------------------------------------------------------------------------

enum { BLOCK_BYTES = 4096 }; // of scaled elements or accumulators: two blocks stay in the cache

// Half types are rounded after a factor, as a tensor would be that the caller multiplies.
static void widen_scaled(hvd_dtype_t dtype, float *acc, const char *src, size_t n, double factor)
{
    const size_t elem_bytes = hvd_dtype_bytes(dtype), block = BLOCK_BYTES / elem_bytes;
    char scaled[BLOCK_BYTES] __attribute__((aligned(CACHE_LINE)));
    for (size_t at = 0; at < n; at += block) {
        const size_t count = MIN(block, n - at);
        reduce_scale(dtype, scaled, src + at * elem_bytes, count, factor);
        best_kernels()->widen[dtype](acc + at, scaled, count, 1.0);
    }
}

void acc_load(hvd_dtype_t dtype, void *acc, const void *src, size_t n, double factor)
{
    if (!dtype_is_half(dtype)) {
        reduce_scale(dtype, acc, src, n, factor);
    } else if (factor == 1.0) {
        best_kernels()->widen[dtype](acc, src, n, 1.0);
    } else {
        widen_scaled(dtype, acc, src, n, factor);
    }
}

// The sum of half types is divided, rounded, then multiplied.
void acc_store(hvd_dtype_t dtype, void *dst, const void *acc, size_t n, finish_t finish)
{
    if (!dtype_is_half(dtype)) {
        reduce_finish(dtype, dst, acc, n, finish);
        return;
    }
    best_kernels()->narrow[dtype](dst, acc, n, 1.0 / finish.divisor);
    reduce_scale(dtype, dst, dst, n, finish.factor);
}

static void add(hvd_dtype_t dtype, hvd_reduce_t op, void *acc, const void *src, size_t n)
{
    if (dtype_is_half(dtype)) {
        best_kernels()->acc[dtype][fold_of[op]](acc, src, n, 1.0);
    } else {
        reduce_pair(dtype, op, acc, acc, src, n);
    }
}

void acc_add_scaled(hvd_dtype_t dtype, hvd_reduce_t op, void *acc, const void *src, size_t n,
                    double factor)
{
    if (factor == 1.0) {
        add(dtype, op, acc, src, n);
        return;
    }
    const size_t elem_bytes = hvd_dtype_bytes(dtype), block = BLOCK_BYTES / elem_bytes;
    const size_t acc_bytes = hvd_dtype_bytes(acc_dtype(dtype));
    char scaled[BLOCK_BYTES] __attribute__((aligned(CACHE_LINE)));
    for (size_t at = 0; at < n; at += block) {
        const size_t count = MIN(block, n - at);
        reduce_scale(dtype, scaled, (const char *)src + at * elem_bytes, count, factor);
        add(dtype, op, (char *)acc + at * acc_bytes, scaled, count);
    }
}

// --- Folds ---------------------------------------------------------------------------------------

void reduce_pair(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, const void *a, const void *b,
                 size_t n)
{
    const void *const inputs[2] = {a, b};
    best_kernels()->fold[dtype][fold_of[op]](dst, NULL, inputs, 2, n, 1.0);
}

// With a factor on the inputs.
static void fold_scaled(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, void *also_dst,
                        const void *const *inputs, int k, size_t n, double pre, finish_t finish)
{
    const size_t elem_bytes = hvd_dtype_bytes(dtype);
    const size_t block = BLOCK_BYTES / hvd_dtype_bytes(acc_dtype(dtype));
    char acc[BLOCK_BYTES] __attribute__((aligned(CACHE_LINE)));
    for (size_t at = 0; at < n; at += block) {
        const size_t count = MIN(block, n - at), offset = at * elem_bytes;
        acc_load(dtype, acc, (const char *)inputs[0] + offset, count, pre);
        for (int j = 1; j < k; j++) {
            acc_add_scaled(dtype, op, acc, (const char *)inputs[j] + offset, count, pre);
        }
        acc_store(dtype, (char *)dst + offset, acc, count, finish);
        if (also_dst != NULL) {
            copy_elements(dtype, (char *)also_dst + offset, (char *)dst + offset, count);
        }
    }
}

// The part of `finish` that the kernels do on the way; *left_p: what is to be done after them.
static double factor_of_fold(hvd_dtype_t dtype, finish_t finish, finish_t *left_p)
{
    *left_p = FINISH_NOTHING;
    if (dtype_is_half(dtype)) {
        left_p->factor = finish.factor;
        return 1.0 / finish.divisor;
    }
    if (dtype_is_floating(dtype)) {
        return own_factor(dtype, finish.factor) / finish.divisor;
    }
    *left_p = finish;
    return 1.0;
}

void reduce_many(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, void *also_dst,
                 const void *const *inputs, int k, size_t n, double pre, finish_t finish)
{
    if (pre != 1.0) {
        fold_scaled(dtype, op, dst, also_dst, inputs, k, n, pre, finish);
        return;
    }
    fold_fn_t *fold = best_kernels()->fold[dtype][fold_of[op]];
    if (LIKELY(finish_is_nothing(finish))) {
        fold(dst, also_dst, inputs, k, n, 1.0);
        return;
    }
    finish_t left;
    const double post = factor_of_fold(dtype, finish, &left);
    if (finish_is_nothing(left)) {
        fold(dst, also_dst, inputs, k, n, post);
        return;
    }
    fold(dst, NULL, inputs, k, n, post);
    reduce_finish(dtype, dst, dst, n, left);
    if (also_dst != NULL) {
        copy_elements(dtype, also_dst, dst, n);
    }
}

// --- Adasum --------------------------------------------------------------------------------------
// Dot products run in ADASUM_LANES sums added up in a fixed order, so every processor and every
// vector width gives the same bits.

enum { ADASUM_LANES = 8 };

typedef struct dots {
    double ab, aa, bb;
} dots_t;

typedef struct dot_lanes {
    double ab[ADASUM_LANES], aa[ADASUM_LANES], bb[ADASUM_LANES];
} dot_lanes_t;

static dots_t add_lanes(const dot_lanes_t *lanes)
{
    dots_t sum = {0};
    for (int lane = 0; lane < ADASUM_LANES; lane++) {
        sum.ab += lanes->ab[lane];
        sum.aa += lanes->aa[lane];
        sum.bb += lanes->bb[lane];
    }
    return sum;
}

// A coefficient is 1 where its vector is too small for the division to mean anything.
static double adasum_coefficient(double ab, double squared_norm)
{
    return squared_norm < DBL_MIN ? 1.0 : 1.0 - ab / (2 * squared_norm);
}

#define ADASUM(name, type)                                                                         \
    static inline void name##_dots(dot_lanes_t *lanes, const type *a, const type *b, size_t n)     \
    {                                                                                              \
        for (size_t lane = 0; lane < n; lane++) {                                                  \
            lanes->ab[lane] += (double)a[lane] * (double)b[lane];                                  \
            lanes->aa[lane] += (double)a[lane] * (double)a[lane];                                  \
            lanes->bb[lane] += (double)b[lane] * (double)b[lane];                                  \
        }                                                                                          \
    }                                                                                              \
    static void name(type *dst, const type *a, const type *b, size_t n)                            \
    {                                                                                              \
        dot_lanes_t lanes = {0};                                                                   \
        size_t i = 0;                                                                              \
        for (; n - i >= ADASUM_LANES; i += ADASUM_LANES) {                                         \
            name##_dots(&lanes, a + i, b + i, ADASUM_LANES);                                       \
        }                                                                                          \
        name##_dots(&lanes, a + i, b + i, n - i);                                                  \
        const dots_t dots = add_lanes(&lanes);                                                     \
        const double of_a = adasum_coefficient(dots.ab, dots.aa);                                  \
        const double of_b = adasum_coefficient(dots.ab, dots.bb);                                  \
        for (i = 0; i < n; i++) {                                                                  \
            dst[i] = (type)(of_a * (double)a[i] + of_b * (double)b[i]);                            \
        }                                                                                          \
    }

ADASUM(adasum_f32, float)
ADASUM(adasum_f64, double)

void reduce_adasum(hvd_dtype_t dtype, void *dst, const void *a, const void *b, size_t n)
{
    if (dtype == HVD_FLOAT32) {
        adasum_f32(dst, a, b, n);
    } else {
        adasum_f64(dst, a, b, n);
    }
}
