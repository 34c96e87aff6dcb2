// SPDX-License-Identifier: Apache-2.0
//
// store.h - memory of the agreement: blocks kept for reuse, signatures and sizes with counted
// holders.
//
// Owned by the coordinator, for all of its files; nothing here knows what the blocks hold.
#ifndef HVD_COORD_STORE_H
#define HVD_COORD_STORE_H

#include "coord/coord.h"

#define N_BLOCK_SIZES 48

typedef struct store {
    void *free_blocks[N_BLOCK_SIZES]; // by power of two; the first word leads to the next
    size_t held_bytes;                // taken from the system
} store_t;

void *store_take(store_t *store, size_t bytes); // NULL: no memory. Not zeroed
void store_give(store_t *store, void *block, size_t bytes);
void store_free(store_t *store); // every block must have been given back

typedef struct kept_sig {
    int n_holders;
    size_t block_bytes;
    size_t tensor_bytes;  // of all tensors; dimensions left out count as 1
    size_t payload_bytes; // of the accumulators, if it rides; else 0
    bool rides;           // the record brings the result: nothing is left to run
    bool fuses;
    signature_t view; // dims lead to the words below
    int64_t words[];
} kept_sig_t;

typedef struct sizes {
    int n_holders;
    int n;
    size_t block_bytes;
    int64_t at[];
} sizes_t;

kept_sig_t *sig_new(coord_t *coord, const signature_t *signature); // NULL: no memory
static inline kept_sig_t *sig_hold(kept_sig_t *sig)
{
    sig->n_holders++;
    return sig;
}
void sig_drop(coord_t *coord, kept_sig_t *sig); // NULL is allowed
sizes_t *sizes_new(coord_t *coord, int n);
void sizes_drop(coord_t *coord, sizes_t *sizes); // NULL is allowed

#endif
