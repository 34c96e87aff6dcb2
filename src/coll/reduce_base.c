// SPDX-License-Identifier: Apache-2.0
//
// reduce_base.c - the kernels in vectors of 16 bytes: what every processor of this family can run
// (SSE2, NEON; elsewhere the compiler takes the vectors apart).
//
// float16 goes lane by lane: through the processor's own conversion on aarch64, through integers
// elsewhere. Pure functions, any thread.
#include "coll/reduce_kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VEC_BYTES 16
#define KERNELS kernels_base
#define KERNELS_NAME "base"

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#if defined(__aarch64__)

static inline float f16_to_f32(uint16_t half)
{
    __fp16 value;
    memcpy(&value, &half, sizeof value);
    return (float)value;
}

static inline uint16_t f32_to_f16(float value)
{
    __fp16 half = (__fp16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

#else

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float f16_to_f32(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
    if (exponent == 0) { // zero or denormal: a whole number of 2^-24
        return float_of_bits(bits_of_float((float)mantissa * 0x1p-24f) | sign);
    }
    if (exponent == 31) { // infinity or NaN, made quiet
        return float_of_bits(sign | 0x7f800000 | mantissa << 13 | (mantissa != 0 ? 0x400000 : 0));
    }
    return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t f32_to_f16(float value)
{
    const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffff;
    const uint32_t sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7f800000) { // NaN
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    }
    if (magnitude >= 0x47800000) { // 65536 and more
        return (uint16_t)(sign | 0x7c00);
    }
    if (magnitude < 0x38800000) {
        // Below 2^-14 results are multiples of 2^-24, which is what the last bit of a float
        // between a half and one is worth: the addition rounds in the right place.
        return (uint16_t)(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000));
    }
    const uint32_t rebased = magnitude - (112u << 23);
    return (uint16_t)(sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13);
}

#endif

typedef float lanes_f32 __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t lanes_u32 __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t lanes_u16 __attribute__((vector_size(VEC_BYTES / 2)));

static inline lanes_f32 f16_load(const char *p)
{
    lanes_f32 v;
    for (int lane = 0; lane < VEC_BYTES / 4; lane++) {
        uint16_t half;
        memcpy(&half, p + 2 * lane, sizeof half);
        v[lane] = f16_to_f32(half);
    }
    return v;
}

static inline void f16_store(char *p, lanes_f32 v)
{
    for (int lane = 0; lane < VEC_BYTES / 4; lane++) {
        uint16_t half = f32_to_f16(v[lane]);
        memcpy(p + 2 * lane, &half, sizeof half);
    }
}

static inline lanes_u32 widen_u16(const char *p)
{
    lanes_u16 narrow;
    memcpy(&narrow, p, sizeof narrow);
    return __builtin_convertvector(narrow, lanes_u32);
}

static inline void narrow_u32(char *p, lanes_u32 v)
{
    lanes_u16 narrow = __builtin_convertvector(v, lanes_u16);
    memcpy(p, &narrow, sizeof narrow);
}

static inline lanes_f32 f32_times(lanes_f32 v, double factor)
{
#if defined(__SSE2__)
    const __m128d factors = _mm_set1_pd(factor);
    const __m128d low = _mm_cvtps_pd(v), high = _mm_cvtps_pd(_mm_movehl_ps(v, v));
    return _mm_movelh_ps(_mm_cvtpd_ps(low * factors), _mm_cvtpd_ps(high * factors));
#elif defined(__aarch64__)
    const float64x2_t low = vcvt_f64_f32(vget_low_f32(v)), high = vcvt_high_f64_f32(v);
    return vcvt_high_f32_f64(vcvt_f32_f64(vmulq_n_f64(low, factor)), vmulq_n_f64(high, factor));
#else
    for (int lane = 0; lane < VEC_BYTES / 4; lane++) {
        v[lane] = (float)((double)v[lane] * factor);
    }
    return v;
#endif
}

#include "coll/reduce_kernels.inc"
