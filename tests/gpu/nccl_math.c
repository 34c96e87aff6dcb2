// SPDX-License-Identifier: Apache-2.0
//
// nccl_math.c - the arithmetic of the simulated NCCL: all its types, in double or in 64-bit
// integers, rounded once at the end. With two ranks that is what float32 addition gives, bit for
// bit.
#include "nccl.h"

#include <math.h>
#include <string.h>

enum { T_INT8, T_UINT8, T_INT32, T_UINT32, T_INT64, T_UINT64, T_HALF, T_FLOAT, T_DOUBLE, T_BF16 };
enum { OP_SUM, OP_PROD, OP_MAX, OP_MIN, OP_AVG, OP_PREMUL };

size_t nccl_bytes(int dtype)
{
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return dtype >= 0 && dtype < 12 ? bytes[dtype] : 0;
}

static bool is_integer(int dtype)
{
    return dtype <= T_UINT64;
}

static double of_half(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 31  ? (fraction != 0 ? (double)NAN : (double)INFINITY)
                   : exponent == 0 ? ldexp(fraction, -24)
                                   : ldexp(fraction + 1024, exponent - 25);
    return bits >> 15 != 0 ? -value : value;
}

// Rounds to nearest, ties to even.
static uint16_t to_half(double value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    if (isnan(value)) {
        return 0x7e00;
    }
    if (size >= 65520.0) {
        return sign | 0x7c00;
    }
    int exponent = size < ldexp(1, -14) ? -14 : ilogb(size);
    unsigned fraction = (unsigned)nearbyint(ldexp(size, 10 - exponent)); // 1024: the implicit bit
    return (uint16_t)(sign | (((unsigned)(exponent + 14) << 10) + fraction));
}

static double of_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bf16(double value)
{
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    return isnan(narrow) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static int64_t get_integer(int dtype, const void *from, size_t i)
{
    switch (dtype) {
    case T_INT8:
        return ((const int8_t *)from)[i];
    case T_UINT8:
        return ((const uint8_t *)from)[i];
    case T_INT32:
        return ((const int32_t *)from)[i];
    case T_UINT32:
        return ((const uint32_t *)from)[i];
    default:
        return ((const int64_t *)from)[i];
    }
}

static void put_integer(int dtype, void *to, size_t i, int64_t value)
{
    size_t bytes = nccl_bytes(dtype); // little-endian: the low bytes come first
    memcpy((char *)to + i * bytes, &value, bytes);
}

static double get_real(int dtype, const void *from, size_t i)
{
    return dtype == T_HALF    ? of_half(((const uint16_t *)from)[i])
           : dtype == T_BF16  ? of_bf16(((const uint16_t *)from)[i])
           : dtype == T_FLOAT ? (double)((const float *)from)[i]
                              : ((const double *)from)[i];
}

double nccl_factor(int dtype, const void *from)
{
    return get_real(dtype, from, 0);
}

static void put_real(int dtype, void *to, size_t i, double value)
{
    switch (dtype) {
    case T_HALF:
        ((uint16_t *)to)[i] = to_half(value);
        break;
    case T_BF16:
        ((uint16_t *)to)[i] = to_bf16(value);
        break;
    case T_FLOAT:
        ((float *)to)[i] = (float)value;
        break;
    default:
        ((double *)to)[i] = value;
    }
}

static double add_real(int op, double a, double b)
{
    return op == OP_PROD ? a * b : op == OP_MAX ? fmax(a, b) : op == OP_MIN ? fmin(a, b) : a + b;
}

static int64_t add_integer(int op, int64_t a, int64_t b)
{
    int64_t result;
    switch (op) {
    case OP_PROD:
        return __builtin_mul_overflow(a, b, &result) ? result : result;
    case OP_MAX:
        return a > b ? a : b;
    case OP_MIN:
        return a < b ? a : b;
    default:
        return __builtin_add_overflow(a, b, &result) ? result : result;
    }
}

void nccl_reduce(const comm_t *comm, const call_t *call, void *out, size_t from, size_t n)
{
    int dtype = call->dtype, op = call->op;
    for (size_t i = from; i < from + n; i++) {
        if (is_integer(dtype)) {
            int64_t sum = get_integer(dtype, comm->slots, i);
            for (int r = 1; r < comm->n; r++) {
                const unsigned char *slot = comm->slots + (size_t)r * SLOT_BYTES;
                sum = add_integer(op, sum, get_integer(dtype, slot, i));
            }
            put_integer(dtype, out, i - from, op == OP_AVG ? sum / comm->n : sum);
            continue;
        }
        double factor = op >= OP_PREMUL ? call->factor : 1.0;
        double sum = get_real(dtype, comm->slots, i) * factor;
        for (int r = 1; r < comm->n; r++) {
            const unsigned char *slot = comm->slots + (size_t)r * SLOT_BYTES;
            sum = add_real(op, sum, get_real(dtype, slot, i) * factor);
        }
        put_real(dtype, out, i - from, op == OP_AVG ? sum / comm->n : sum);
    }
}
