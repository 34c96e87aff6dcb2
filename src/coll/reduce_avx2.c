// SPDX-License-Identifier: Apache-2.0
//
// reduce_avx2.c - the kernels in vectors of 32 bytes, for x86-64 with AVX2 and F16C.
// Pure functions, any thread; only to be called where kernels_supported() lists the table.
#include "coll/reduce_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define VEC_BYTES 32
#define KERNELS kernels_avx2
#define KERNELS_NAME "avx2"

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC optimize("fp-contract=off")
#pragma GCC target("avx2,f16c")
#endif

static inline __m256 f16_load(const char *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline void f16_store(char *p, __m256 v)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

static inline __m256i widen_u16(const char *p)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}

// Values are below 65536, so the saturation of the packing instruction does not show; it packs
// within halves of the vector, which the permutation puts right.
#define narrow_u32(p, v)                                                                           \
    _mm_storeu_si128((__m128i *)(p), _mm256_castsi256_si128(_mm256_permute4x64_epi64(              \
                                         _mm256_packus_epi32((__m256i)(v), (__m256i)(v)), 0x08)))

static inline __m256 f32_times(__m256 v, double factor)
{
    const __m256d factors = _mm256_set1_pd(factor);
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low * factors)),
                                _mm256_cvtpd_ps(high * factors), 1);
}

// There are masks for words of 4 bytes in whole vectors.
#define PARTS_BY_MASK
static inline __m256i mask_of(size_t bytes)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(bytes / 4)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline void part_in(char *pad, const char *p, size_t bytes, size_t step, size_t element)
{
    if (step == VEC_BYTES && element % 4 == 0) {
        _mm256_storeu_si256((__m256i *)pad, _mm256_maskload_epi32((const int *)p, mask_of(bytes)));
    } else {
        memcpy(pad, p, bytes);
    }
}

static inline void part_out(char *p, const char *pad, size_t bytes, size_t step, size_t element)
{
    if (step == VEC_BYTES && element % 4 == 0) {
        _mm256_maskstore_epi32((int *)p, mask_of(bytes), _mm256_loadu_si256((const __m256i *)pad));
    } else {
        memcpy(p, pad, bytes);
    }
}

#include "coll/reduce_kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
