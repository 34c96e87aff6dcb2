// SPDX-License-Identifier: Apache-2.0
//
// reduce_avx512.c - the kernels in vectors of 64 bytes, for x86-64 with AVX-512 (F, BW, DQ, VL).
// Pure functions, any thread; only to be called where kernels_supported() lists the table.
#include "coll/reduce_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define VEC_BYTES 64
#define KERNELS kernels_avx512
#define KERNELS_NAME "avx512"

#if defined(__clang__)
#pragma clang fp contract(off)
// From 18 to 21 its vectors of 64 bytes can be switched off by themselves, as Zig's clang does.
#if __clang_major__ >= 18 && __clang_major__ <= 21
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,evex512"
#else
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl"
#endif
#pragma clang attribute push(__attribute__((target(AVX512))), apply_to = function)
#else
#pragma GCC optimize("fp-contract=off")
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

static inline __m512 f16_load(const char *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline void f16_store(char *p, __m512 v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

static inline __m512i widen_u16(const char *p)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}

#define narrow_u32(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16((__m512i)(v)))

static inline __m512 f32_times(__m512 v, double factor)
{
    const __m512d factors = _mm512_set1_pd(factor);
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low * factors)),
                              _mm512_cvtpd_ps(high * factors), 1);
}

#define PARTS_BY_MASK
static inline void part_in(char *pad, const char *p, size_t bytes, size_t step, size_t element)
{
    (void)element;
    if (step == VEC_BYTES) {
        const __mmask64 mask = UINT64_MAX >> (64 - bytes);
        _mm512_storeu_si512(pad, _mm512_maskz_loadu_epi8(mask, p));
    } else {
        const __mmask32 mask = UINT32_MAX >> (32 - bytes);
        _mm256_storeu_si256((__m256i *)pad, _mm256_maskz_loadu_epi8(mask, p));
    }
}

static inline void part_out(char *p, const char *pad, size_t bytes, size_t step, size_t element)
{
    (void)element;
    if (step == VEC_BYTES) {
        const __mmask64 mask = UINT64_MAX >> (64 - bytes);
        _mm512_mask_storeu_epi8(p, mask, _mm512_loadu_si512(pad));
    } else {
        const __mmask32 mask = UINT32_MAX >> (32 - bytes);
        _mm256_mask_storeu_epi8(p, mask, _mm256_loadu_si256((const __m256i *)pad));
    }
}

#include "coll/reduce_kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
