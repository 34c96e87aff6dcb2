// SPDX-License-Identifier: Apache-2.0
//
// vec.c - many pieces of memory seen as one vector.
//
// Pieces are kept in order with their offsets; finding the one at an offset is a binary search, and
// a piece that continues where the last one ended is merged with it. Method and use: vec.h.
// Threads: whoever owns the vector.
#include "coll/vec.h"

#include "coll/copy.h"

#include <stdlib.h>

bool vec_add(vec_t *v, void *at, size_t bytes)
{
    if (bytes == 0) {
        return true;
    }
    if (v->n > 0 && v->end == (uint8_t *)at) { // goes on where the last piece ended
        v->bytes += bytes;
        v->end += bytes;
        return true;
    }
    if (v->n == v->cap) {
        int cap = v->cap > 0 ? 2 * v->cap : 16;
        fragment_t *grown = realloc(v->fragments, (size_t)cap * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        v->fragments = grown;
        v->cap = cap;
    }
    v->fragments[v->n++] = (fragment_t){.at = at, .start = v->bytes};
    v->bytes += bytes;
    v->end = (uint8_t *)at + bytes;
    return true;
}

void vec_free(vec_t *v)
{
    free(v->fragments);
    *v = (vec_t){0};
}

static size_t end_of(const vec_t *v, int i)
{
    return i + 1 < v->n ? v->fragments[i + 1].start : v->bytes;
}

size_t vec_at(const vec_t *v, size_t offset, uint8_t **at_p)
{
    int low = 0;
    int high = v->n;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (v->fragments[middle].start <= offset) {
            low = middle;
        } else {
            high = middle;
        }
    }
    *at_p = v->fragments[low].at + (offset - v->fragments[low].start);
    return end_of(v, low) - offset;
}

void vec_gather(const vec_t *v, size_t offset, void *to, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        uint8_t *at;
        size_t n = MIN(vec_at(v, offset + done, &at), bytes - done);
        memcpy((uint8_t *)to + done, at, n);
        done += n;
    }
}

void vec_scatter(const vec_t *v, size_t offset, const void *from, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        uint8_t *at;
        size_t n = MIN(vec_at(v, offset + done, &at), bytes - done);
        memcpy(at, (const uint8_t *)from + done, n);
        done += n;
    }
}

void vec_scatter_past_cache(const vec_t *v, size_t offset, const void *from, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        uint8_t *at;
        size_t n = MIN(vec_at(v, offset + done, &at), bytes - done);
        copy_past_cache(at, (const uint8_t *)from + done, n);
        done += n;
    }
}

void vec_copy(const vec_t *to, size_t to_at, const vec_t *from, size_t from_at, size_t bytes,
              bool past_cache)
{
    for (size_t done = 0; done < bytes;) {
        uint8_t *source, *target;
        size_t n = MIN(vec_at(from, from_at + done, &source), bytes - done);
        n = MIN(vec_at(to, to_at + done, &target), n);
        if (source != target && past_cache) {
            copy_past_cache(target, source, n);
        } else if (source != target) {
            memcpy(target, source, n);
        }
        done += n;
    }
}
