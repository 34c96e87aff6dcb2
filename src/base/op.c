// SPDX-License-Identifier: Apache-2.0
//
// op.c - see op.h: the table that ops.def fills, and what follows from a signature.
//
// An operation of hvd.h without a row, or a row without one, does not compile.
#include "base/base.h"

const op_info_t op_infos[N_OPS] = {
#define OP(op_, name_, upper_, title_, layout_, sizes_, traits_)                                   \
    [op_] = {name_, upper_, title_, LAYOUT_##layout_, SIZES_##sizes_, traits_},
#include "base/ops.def"
#undef OP
};

#define OP(...) +1
_Static_assert(0
#include "base/ops.def"
                   == N_OPS,
               "ops.def has one row for each operation of hvd.h");
#undef OP

const char *hvd_op_name(hvd_op_t op)
{
    return (unsigned)op < HVD_N_OPS ? op_infos[op].name : "unknown";
}

// --- Signatures ----------------------------------------------------------------------------------

static bool same_bits(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

bool signature_fuses_with(const signature_t *a, const signature_t *b)
{
    return a->op == b->op && a->dtype == b->dtype && a->reduce == b->reduce && a->root == b->root &&
           a->on_device == b->on_device && same_bits(a->prescale, b->prescale) &&
           same_bits(a->postscale, b->postscale);
}

bool signature_equal(const signature_t *a, const signature_t *b)
{
    return a->n_tensors == b->n_tensors && a->n_dims_words == b->n_dims_words &&
           signature_fuses_with(a, b) &&
           (a->n_dims_words == 0 ||
            memcmp(a->dims, b->dims, (size_t)a->n_dims_words * sizeof *a->dims) == 0);
}

size_t signature_elements(const signature_t *signature)
{
    const int64_t *at = signature->dims;
    size_t total = 0;
    bool overflows = false;
    for (int tensor = 0; tensor < signature->n_tensors; tensor++) {
        size_t n = 1;
        for (int64_t n_dims = *at++; n_dims > 0; n_dims--, at++) {
            overflows |= __builtin_mul_overflow(n, *at < 0 ? 1 : (size_t)*at, &n);
        }
        overflows |= __builtin_add_overflow(total, n, &total);
    }
    return overflows ? SIZE_MAX : total;
}

size_t shape_elements(const int64_t **dims)
{
    size_t n = 1;
    for (int64_t n_dims = *(*dims)++; n_dims > 0; n_dims--) {
        n *= (size_t)*(*dims)++;
    }
    return n;
}

bool signature_rides_with(const signature_t *signature, size_t n_elements, size_t most_bytes,
                          size_t *bytes_p)
{
    if (!op_has(signature->op, OP_RIDES) || signature->reduce == HVD_ADASUM || most_bytes == 0 ||
        signature->on_device) {
        return false;
    }
    size_t element = riding_element_bytes(signature->op, signature->dtype);
    if (n_elements > most_bytes / element) {
        return false;
    }
    *bytes_p = n_elements * element;
    return true;
}

bool signature_rides(const signature_t *signature, size_t most_bytes, size_t *bytes_p)
{
    return op_has(signature->op, OP_RIDES) &&
           signature_rides_with(signature, signature_elements(signature), most_bytes, bytes_p);
}

int signature_n_sizes(const signature_t *signature, int n_members)
{
    switch (op_infos[signature->op].sizes) {
    case SIZES_PER_TENSOR:
        return signature->n_tensors;
    case SIZES_PER_MEMBER:
        return n_members;
    default:
        return 0;
    }
}
