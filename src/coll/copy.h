// SPDX-License-Identifier: Apache-2.0
//
// copy.h - copying to memory that will not be read soon.
//
// Pure and inline, any thread. It pays from a few MiB on, where a rank writes a whole result it has
// not read before, and costs elsewhere.
#ifndef HVD_COLL_COPY_H
#define HVD_COLL_COPY_H

#include "base/base.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Like memcpy, but writes past the cache: the target's lines are neither read first nor kept, which
// saves a third of the traffic when a large result goes to memory that is not in cache anyway.
// Costs more than memcpy where it is.
static inline void copy_past_cache(void *to, const void *from, size_t bytes)
{
#if defined(__SSE2__)
    uint8_t *dst = to;
    const uint8_t *src = from;
    size_t head = MIN(-(uintptr_t)dst & (CACHE_LINE - 1), bytes);
    memcpy(dst, src, head);
    size_t i = head;
    for (; i + CACHE_LINE <= bytes; i += CACHE_LINE) {
        const __m128i *line = (const __m128i *)(src + i);
        __m128i a = _mm_loadu_si128(line);
        __m128i b = _mm_loadu_si128(line + 1);
        __m128i c = _mm_loadu_si128(line + 2);
        __m128i d = _mm_loadu_si128(line + 3);
        __m128i *target = (__m128i *)(dst + i);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(dst + i, src + i, bytes - i);
    _mm_sfence(); // such stores are not ordered with others: what follows may publish them
#else
    memcpy(to, from, bytes);
#endif
}

#endif
