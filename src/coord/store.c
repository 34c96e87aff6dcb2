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

// --- Operations ---------------------------------------------------------------------------------

const op_traits_t *op_traits(int op)
{
    static const op_traits_t rows[CONTROL_N_OPS] = {
        [HVD_ALLREDUCE] = {"ALLREDUCE", "Allreduce", OP_FUSES | OP_JOINS},
        [HVD_ALLGATHER] = {"ALLGATHER", "Allgather", OP_FUSES | OP_SIZED | OP_NEEDS_DIMS},
        [HVD_BROADCAST] = {"BROADCAST", "Broadcast", OP_FUSES},
        [HVD_ALLTOALL] = {"ALLTOALL", "Alltoall", OP_SIZED | OP_NEEDS_DIMS},
        [HVD_REDUCESCATTER] = {"REDUCESCATTER", "Reducescatter", OP_FUSES | OP_NEEDS_DIMS},
        [HVD_BARRIER] = {"BARRIER", "Barrier", OP_JOINS | OP_INSTANT},
        [HVD_JOIN] = {"JOIN", "Join", 0},
        [CONTROL_SET_ADD] = {"ADD_PROCESS_SET", "Adding a process set", 0},
        [CONTROL_SET_REMOVE] = {"REMOVE_PROCESS_SET", "Removing a process set", 0},
    };
    return &rows[op];
}

// --- Signatures ---------------------------------------------------------------------------------

static size_t times(size_t a, size_t b)
{
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

static size_t plus(size_t a, size_t b)
{
    return a > SIZE_MAX - b ? SIZE_MAX : a + b;
}

// Elements of all tensors; a dimension that is left out counts as 1.
static size_t count_elements(const coord_signature_t *signature)
{
    const int64_t *at = signature->dims;
    size_t total = 0;
    for (int tensor = 0; tensor < signature->n_tensors; tensor++) {
        int64_t n_dims = *at++;
        size_t n = 1;
        for (int64_t d = 0; d < n_dims; d++, at++) {
            n = times(n, *at < 0 ? 1 : (size_t)*at);
        }
        total = plus(total, n);
    }
    return total;
}

hvd_dtype_t acc_type_of(hvd_dtype_t dtype)
{
    return dtype == HVD_FLOAT16 || dtype == HVD_BFLOAT16 ? HVD_FLOAT32 : dtype;
}

bool coord_rides(const coord_t *coord, const coord_signature_t *signature, size_t *bytes_p)
{
    const coord_params_t *params = &coord->params;
    if (signature->op != HVD_ALLREDUCE || signature->reduce == HVD_ADASUM ||
        params->inline_bytes == 0 || params->reduce == NULL) {
        return false;
    }
    size_t bytes = times(count_elements(signature), hvd_dtype_bytes(acc_type_of(signature->dtype)));
    if (bytes > params->inline_bytes) {
        return false;
    }
    *bytes_p = bytes;
    return true;
}

static uint64_t fusion_hash_of(const coord_signature_t *signature)
{
    struct {
        int64_t op, dtype, reduce, root;
        double prescale, postscale;
    } key = {signature->op,   signature->dtype,    signature->reduce,
             signature->root, signature->prescale, signature->postscale};
    return hash_bytes(&key, sizeof key, 0);
}

sig_t *sig_new(coord_t *coord, const coord_signature_t *signature)
{
    size_t words_bytes = (size_t)signature->n_dims_words * sizeof(int64_t);
    size_t block_bytes = sizeof(sig_t) + words_bytes;
    sig_t *sig = store_take(&coord->store, block_bytes);
    if (sig == NULL) {
        return NULL;
    }
    *sig = (sig_t){.n_holders = 1, .block_bytes = block_bytes, .view = *signature};
    sig->view.dims = sig->words;
    if (words_bytes > 0) {
        memcpy(sig->words, signature->dims, words_bytes);
    }
    sig->op = op_traits((int)signature->op);
    sig->tensor_bytes = times(count_elements(&sig->view), hvd_dtype_bytes(signature->dtype));
    sig->rides = op_has(sig->op, OP_INSTANT) || coord_rides(coord, &sig->view, &sig->payload_bytes);
    sig->fuses = op_has(sig->op, OP_FUSES) &&
                 !(signature->op == HVD_ALLREDUCE && signature->reduce == HVD_ADASUM) &&
                 !(coord->params.separate_groups && signature->n_tensors > 1);
    sig->fusion_hash = fusion_hash_of(&sig->view);
    return sig;
}

void sig_drop(coord_t *coord, sig_t *sig)
{
    if (sig != NULL && --sig->n_holders == 0) {
        store_give(&coord->store, sig, sig->block_bytes);
    }
}

// Factors are compared bit by bit: not-a-number equals itself, so ranks that all pass it agree.
static bool same_bits(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

bool sig_equal(const coord_signature_t *a, const coord_signature_t *b)
{
    return a->op == b->op && a->dtype == b->dtype && a->reduce == b->reduce && a->root == b->root &&
           a->n_tensors == b->n_tensors && a->n_dims_words == b->n_dims_words &&
           same_bits(a->prescale, b->prescale) && same_bits(a->postscale, b->postscale) &&
           (a->n_dims_words == 0 ||
            memcmp(a->dims, b->dims, (size_t)a->n_dims_words * sizeof *a->dims) == 0);
}

control_signature_t signature_to_wire(const coord_signature_t *signature)
{
    return (control_signature_t){.op = (int)signature->op,
                                 .dtype = (int)signature->dtype,
                                 .reduce = (int)signature->reduce,
                                 .root = signature->root,
                                 .prescale = signature->prescale,
                                 .postscale = signature->postscale,
                                 .n_tensors = signature->n_tensors,
                                 .words = signature->dims,
                                 .n_words = signature->n_dims_words};
}

coord_signature_t signature_from_wire(const control_signature_t *wire)
{
    return (coord_signature_t){.op = (hvd_op_t)wire->op,
                               .dtype = (hvd_dtype_t)wire->dtype,
                               .reduce = (hvd_reduce_t)wire->reduce,
                               .root = wire->root,
                               .prescale = wire->prescale,
                               .postscale = wire->postscale,
                               .n_tensors = wire->n_tensors,
                               .dims = wire->words,
                               .n_dims_words = wire->n_words};
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
