// SPDX-License-Identifier: Apache-2.0
//
// store.c - memory of the agreement: blocks kept for reuse, signatures, sizes.
//
// Blocks come in powers of two; one given back waits in the list of its size, so that steady use
// takes nothing from the system and the memory held is what was in use at once at the worst
// moment. Signatures and sizes are shared between an entry, its round and the decisions that show
// them; each counts its holders and goes with the last one. The holder of the engine owns it all.
#include "coord/internal.h"

#include <stdlib.h>

#define SMALLEST_BLOCK_SHIFT 6

// --- Blocks -------------------------------------------------------------------------------------

static int shift_of(size_t bytes)
{
    if (bytes <= (size_t)1 << SMALLEST_BLOCK_SHIFT) {
        return SMALLEST_BLOCK_SHIFT;
    }
    return 64 - __builtin_clzll((unsigned long long)(bytes - 1));
}

void *store_take(store_t *store, size_t bytes)
{
    int shift = shift_of(bytes);
    if (shift >= N_BLOCK_SIZES) {
        return NULL;
    }
    void *block = store->free_blocks[shift];
    if (block != NULL) {
        memcpy(&store->free_blocks[shift], block, sizeof(void *));
        return block;
    }
    block = malloc((size_t)1 << shift);
    store->held_bytes += block != NULL ? (size_t)1 << shift : 0;
    return block;
}

void store_give(store_t *store, void *block, size_t bytes)
{
    int shift = shift_of(bytes);
    if (block != NULL) {
        memcpy(block, &store->free_blocks[shift], sizeof(void *));
        store->free_blocks[shift] = block;
    }
}

void store_free(store_t *store)
{
    for (int shift = 0; shift < N_BLOCK_SIZES; shift++) {
        void *block = store->free_blocks[shift];
        while (block != NULL) {
            void *next;
            memcpy(&next, block, sizeof next);
            free(block);
            block = next;
        }
    }
    *store = (store_t){0};
}

// --- Signatures ---------------------------------------------------------------------------------

kept_sig_t *sig_new(coord_t *coord, const signature_t *signature)
{
    size_t words_bytes = (size_t)signature->n_dims_words * sizeof(int64_t);
    size_t block_bytes = sizeof(kept_sig_t) + words_bytes;
    kept_sig_t *sig = store_take(&coord->store, block_bytes);
    if (sig == NULL) {
        return NULL;
    }
    *sig = (kept_sig_t){.n_holders = 1, .block_bytes = block_bytes, .view = *signature};
    sig->view.dims = sig->words;
    if (words_bytes > 0) {
        memcpy(sig->words, signature->dims, words_bytes);
    }
    size_t n = signature_elements(&sig->view), element = hvd_dtype_bytes(signature->dtype);
    sig->tensor_bytes = n < SIZE_MAX / element ? n * element : SIZE_MAX;
    sig->rides = op_has(signature->op, OP_INSTANT) ||
                 signature_rides(&sig->view, coord->params.inline_bytes, &sig->payload_bytes);
    sig->fuses = op_has(signature->op, OP_FUSES) && signature->reduce != HVD_ADASUM &&
                 !(coord->params.separate_groups && signature->n_tensors > 1);
    return sig;
}

void sig_drop(coord_t *coord, kept_sig_t *sig)
{
    if (sig != NULL && --sig->n_holders == 0) {
        store_give(&coord->store, sig, sig->block_bytes);
    }
}

// --- Sizes --------------------------------------------------------------------------------------

sizes_t *sizes_new(coord_t *coord, int n)
{
    size_t block_bytes = sizeof(sizes_t) + (size_t)n * sizeof(int64_t);
    sizes_t *sizes = store_take(&coord->store, block_bytes);
    if (sizes != NULL) {
        sizes->n_holders = 1;
        sizes->n = n;
        sizes->block_bytes = block_bytes;
    }
    return sizes;
}

void sizes_drop(coord_t *coord, sizes_t *sizes)
{
    if (sizes != NULL && --sizes->n_holders == 0) {
        store_give(&coord->store, sizes, sizes->block_bytes);
    }
}
