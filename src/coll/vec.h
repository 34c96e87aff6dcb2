// SPDX-License-Identifier: Apache-2.0
//
// vec.h - many pieces of memory seen as one vector: the tensors of a batch.
//
// A batch of tensors is reduced as if it were one long tensor. Shared-memory streaming walks the
// pieces where they lie, so fusing costs no extra copy; plans for links need contiguous memory and
// use vec_gather and vec_scatter.
#ifndef HVD_COLL_VEC_H
#define HVD_COLL_VEC_H

#include "base/base.h"

typedef struct fragment {
    uint8_t *at;
    size_t start; // offset of its first byte in the vector
} fragment_t;

typedef struct vec {
    fragment_t *fragments;
    int n, cap;
    size_t bytes;
    uint8_t *end; // of the last piece: a neighbour in memory extends it
} vec_t;

static inline void vec_clear(vec_t *v)
{
    v->n = 0;
    v->bytes = 0;
}

bool vec_add(vec_t *v, void *at, size_t bytes); // false: no memory. Empty pieces are left out.
void vec_free(vec_t *v);

// The contiguous memory at `offset`: where it is, and how many bytes of it.
size_t vec_at(const vec_t *v, size_t offset, uint8_t **at_p);

void vec_gather(const vec_t *v, size_t offset, void *to, size_t bytes);
void vec_scatter(const vec_t *v, size_t offset, const void *from, size_t bytes);
// The same for pieces that will not be read soon (see copy.h).
void vec_scatter_past_cache(const vec_t *v, size_t offset, const void *from, size_t bytes);
// From one vector to another, except where both are the same memory.
void vec_copy(const vec_t *to, size_t to_at, const vec_t *from, size_t from_at, size_t bytes,
              bool past_cache);

#endif
