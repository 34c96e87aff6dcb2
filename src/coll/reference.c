// SPDX-License-Identifier: Apache-2.0
//
// reference.c - what every collective must give, computed slowly and obviously. For tests only.
//
// One element at a time, members in order, no vectors, no blocks and nothing shared with the code
// under test: float32 and float64 in double, integers modulo 2^64, half types in float32 with
// conversions by plain arithmetic. A factor multiplies what the tensor's type can hold, and what it
// gives is rounded to that type. Pure functions, any thread.
#include "coll/testing.h"

#include <math.h>
#include <stdlib.h>

// --- Half types by arithmetic --------------------------------------------------------------------

typedef struct half_format {
    int mantissa_bits, exponent_bits;
} half_format_t;

static const half_format_t float16_format = {10, 5}, bfloat16_format = {7, 8};

static int bias_of(half_format_t f)
{
    return (1 << (f.exponent_bits - 1)) - 1;
}

static float half_to_float(uint16_t bits, half_format_t f)
{
    const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
    const int exponent = bits >> f.mantissa_bits & ((1 << f.exponent_bits) - 1);
    double magnitude;
    if (exponent == (1 << f.exponent_bits) - 1) {
        magnitude = mantissa == 0 ? INFINITY : NAN;
    } else if (exponent == 0) {
        magnitude = ldexp(mantissa, 1 - bias_of(f) - f.mantissa_bits);
    } else {
        const int whole = mantissa + (1 << f.mantissa_bits);
        magnitude = ldexp(whole, exponent - bias_of(f) - f.mantissa_bits);
    }
    return (float)(bits >> 15 ? -magnitude : magnitude);
}

static uint16_t half_of_float(float value, half_format_t f)
{
    const int sign = signbit(value) ? 1 << 15 : 0, all_ones = (1 << f.exponent_bits) - 1;
    const double magnitude = fabs((double)value);
    if (isnan(value)) {
        return (uint16_t)(sign | all_ones << f.mantissa_bits | 1 << (f.mantissa_bits - 1));
    }
    int exponent = magnitude > 0 && !isinf(magnitude) ? ilogb(magnitude) : 0;
    exponent = MAX(exponent, 1 - bias_of(f)); // below that, denormals share one exponent
    const double units = isinf(magnitude) ? 0 : rint(ldexp(magnitude, f.mantissa_bits - exponent));
    if (isinf(magnitude) || ldexp(units, exponent - f.mantissa_bits) >= ldexp(1, bias_of(f) + 1)) {
        return (uint16_t)(sign | all_ones << f.mantissa_bits);
    }
    // A unit too many in the mantissa carries into the exponent, which is what it should do.
    const int implied = 1 << f.mantissa_bits, whole = (int)units;
    const int biased = whole < implied ? 0 : (exponent + bias_of(f)) << f.mantissa_bits;
    return (uint16_t)(sign | (whole < implied ? whole : biased + whole - implied));
}

// --- One element ---------------------------------------------------------------------------------
// Integers and bool travel in `whole` (as the bits of int64_t), the others in `real`.

typedef struct element {
    double real;
    int64_t whole;
} element_t;

// One row per type: its C type, how to make an element of a value, how to make a value of one.
#define TYPES(X)                                                                                   \
    X(HVD_UINT8, uint8_t, {.whole = value}, e.whole)                                               \
    X(HVD_INT8, int8_t, {.whole = value}, e.whole)                                                 \
    X(HVD_UINT16, uint16_t, {.whole = value}, e.whole)                                             \
    X(HVD_INT16, int16_t, {.whole = value}, e.whole)                                               \
    X(HVD_INT32, int32_t, {.whole = value}, e.whole)                                               \
    X(HVD_INT64, int64_t, {.whole = value}, e.whole)                                               \
    X(HVD_BOOL, uint8_t, {.whole = value != 0}, e.whole != 0)                                      \
    X(HVD_FLOAT32, float, {.real = (double)value}, e.real)                                         \
    X(HVD_FLOAT64, double, {.real = value}, e.real)                                                \
    X(HVD_FLOAT16, uint16_t, {.real = (double)half_to_float(value, float16_format)},               \
      half_of_float((float)e.real, float16_format))                                                \
    X(HVD_BFLOAT16, uint16_t, {.real = (double)half_to_float(value, bfloat16_format)},             \
      half_of_float((float)e.real, bfloat16_format))

static element_t get(hvd_dtype_t dtype, const void *data, size_t i)
{
#define GET(name, type, make, back)                                                                \
    if (dtype == (name)) {                                                                         \
        type value;                                                                                \
        memcpy(&value, (const char *)data + i * sizeof value, sizeof value);                       \
        return (element_t)make;                                                                    \
    }
    TYPES(GET)
#undef GET
    return (element_t){0};
}

static void put(hvd_dtype_t dtype, void *data, size_t i, element_t e)
{
#define PUT(name, type, make, back)                                                                \
    if (dtype == (name)) {                                                                         \
        const type value = (type)(back);                                                           \
        memcpy((char *)data + i * sizeof value, &value, sizeof value);                             \
    }
    TYPES(PUT)
#undef PUT
}

// A whole number in the type in which integers are converted: int64 for its own, else int32. What
// does not fit becomes the least one.
static int64_t convert(hvd_dtype_t dtype, double whole)
{
    const double beyond = dtype == HVD_INT64 ? 0x1p63 : 0x1p31;
    return whole >= -beyond && whole < beyond ? (int64_t)whole : (int64_t)-beyond;
}

// What is left of a value in its type.
static element_t as_held(hvd_dtype_t dtype, element_t e)
{
    uint64_t memory = 0;
    put(dtype, &memory, 0, e);
    return get(dtype, &memory, 0);
}

static element_t scale(hvd_dtype_t dtype, element_t e, double factor)
{
    if (factor == 1.0) {
        return e;
    }
    if (dtype_is_floating(dtype)) {
        const double held = as_held(dtype, e).real;
        e.real = dtype == HVD_FLOAT64 ? held * factor : (double)((float)held * (float)factor);
        return as_held(dtype, e);
    }
    const double scaled = trunc((double)e.whole * factor);
    e.whole = dtype == HVD_BOOL ? scaled != 0 && !isnan(scaled) : convert(dtype, scaled);
    return as_held(dtype, e);
}

// Sums and products in the accumulator's own width: half types round to float32 at each step.
static double add_real(hvd_dtype_t dtype, double a, double b)
{
    return dtype_is_half(dtype) ? (double)((float)a + (float)b) : a + b;
}

static double multiply_real(hvd_dtype_t dtype, double a, double b)
{
    return dtype_is_half(dtype) ? (double)((float)a * (float)b) : a * b;
}

static int64_t wrap(hvd_dtype_t dtype, uint64_t bits)
{
    return as_held(dtype, (element_t){.whole = (int64_t)bits}).whole;
}

static element_t fold_real(hvd_dtype_t dtype, hvd_reduce_t reduce, element_t a, element_t b)
{
    switch (reduce) {
    case HVD_MIN:
        return isnan(a.real) || a.real < b.real ? a : b;
    case HVD_MAX:
        return isnan(a.real) || a.real > b.real ? a : b;
    case HVD_PRODUCT:
        return (element_t){.real = multiply_real(dtype, a.real, b.real)};
    default:
        return (element_t){.real = add_real(dtype, a.real, b.real)};
    }
}

static element_t fold_whole(hvd_dtype_t dtype, hvd_reduce_t reduce, element_t a, element_t b)
{
    const uint64_t a_bits = (uint64_t)a.whole, b_bits = (uint64_t)b.whole;
    switch (reduce) {
    case HVD_MIN:
        return a.whole < b.whole ? a : b;
    case HVD_MAX:
        return a.whole > b.whole ? a : b;
    case HVD_PRODUCT:
        return (element_t){.whole = wrap(dtype, a_bits * b_bits)};
    default:
        return (element_t){.whole = wrap(dtype, a_bits + b_bits)};
    }
}

// --- Operations ----------------------------------------------------------------------------------

// Elements first .. first + n - 1 of all inputs, added up.
static void reduce_elements(const coll_args_t *args, const void *const *inputs, size_t first,
                            size_t n, double pre, double post, void *out)
{
    for (size_t i = 0; i < n; i++) {
        element_t sum = scale(args->dtype, get(args->dtype, inputs[0], first + i), pre);
        for (int m = 1; m < args->size; m++) {
            const element_t e = scale(args->dtype, get(args->dtype, inputs[m], first + i), pre);
            sum = dtype_is_floating(args->dtype) ? fold_real(args->dtype, args->reduce, sum, e)
                                                 : fold_whole(args->dtype, args->reduce, sum, e);
        }
        put(args->dtype, out, i, scale(args->dtype, sum, post));
    }
}

static void adasum_pair(double *a, const double *b, size_t n)
{
    double ab = 0, aa = 0, bb = 0;
    for (size_t i = 0; i < n; i++) {
        ab += a[i] * b[i];
        aa += a[i] * a[i];
        bb += b[i] * b[i];
    }
    const double of_a = aa > 0 ? 1 - ab / (2 * aa) : 1, of_b = bb > 0 ? 1 - ab / (2 * bb) : 1;
    for (size_t i = 0; i < n; i++) {
        a[i] = of_a * a[i] + of_b * b[i];
    }
}

// Vectors in double, combined along the same tree as adasum.c: the first pairs of members until a
// power of two is left, then neighbours, again and again.
static void adasum(const coll_args_t *args, const void *const *inputs, double pre, double post,
                   void *out)
{
    const size_t n = args->bytes / hvd_dtype_bytes(args->dtype);
    double *vectors = malloc(((size_t)args->size * n + 1) * sizeof *vectors);
    if (vectors == NULL) {
        return;
    }
    for (int m = 0; m < args->size; m++) {
        for (size_t i = 0; i < n; i++) {
            vectors[(size_t)m * n + i] = get(args->dtype, inputs[m], i).real * pre;
        }
    }
    int n_vectors = 1;
    while (2 * n_vectors <= args->size) {
        n_vectors *= 2;
    }
    for (int pair = 0, extra = args->size - n_vectors; pair < n_vectors; pair++) {
        double *to = vectors + (size_t)pair * n;
        const int from = pair < extra ? 2 * pair : pair + extra;
        memmove(to, vectors + (size_t)from * n, n * sizeof *to);
        if (pair < extra) {
            adasum_pair(to, vectors + (size_t)(from + 1) * n, n);
        }
    }
    for (int apart = 1; apart < n_vectors; apart *= 2) {
        for (int v = 0; v < n_vectors; v += 2 * apart) {
            adasum_pair(vectors + (size_t)v * n, vectors + (size_t)(v + apart) * n, n);
        }
    }
    for (size_t i = 0; i < n; i++) {
        put(args->dtype, out, i, (element_t){.real = vectors[i] * post});
    }
    free(vectors);
}

static size_t before(const size_t *sizes, int member)
{
    size_t sum = 0;
    for (int m = 0; m < member; m++) {
        sum += sizes[m];
    }
    return sum;
}

// Each member's input (from what it sends here) one after the other.
static void concatenate(const size_t *sizes, int n, const void *const *inputs, void *out)
{
    for (int m = 0; m < n; m++) {
        if (sizes[m] > 0) {
            memcpy((char *)out + before(sizes, m), inputs[m], sizes[m]);
        }
    }
}

void reference_run(const coll_args_t *args, const void *const *inputs, double pre, double post,
                   void *out)
{
    const size_t elem_bytes = hvd_dtype_bytes(args->dtype);
    switch (args->op) {
    case HVD_ALLREDUCE:
        if (args->reduce == HVD_ADASUM) {
            adasum(args, inputs, pre, post, out);
        } else {
            reduce_elements(args, inputs, 0, args->bytes / elem_bytes, pre, post, out);
        }
        break;
    case HVD_REDUCESCATTER:
        reduce_elements(args, inputs, before(args->blocks, args->member) / elem_bytes,
                        args->blocks[args->member] / elem_bytes, pre, post, out);
        break;
    case HVD_BROADCAST:
        concatenate(&args->bytes, 1, inputs + args->root, out);
        break;
    case HVD_ALLGATHER:
        concatenate(args->blocks, args->size, inputs, out);
        break;
    case HVD_ALLTOALL:
        concatenate(args->recv_bytes, args->size, inputs, out);
        break;
    default: // barrier and join move nothing
        break;
    }
}
