// SPDX-License-Identifier: Apache-2.0
//
// op.h - operations as rows of ops.def, and the signature of a submission.
//
// A signature is everything about a submission that must be equal on all members. It is made once,
// in hvd_submit(), and handed on by pointer: to the agreement, the wire, the batch that runs it and
// those who report it. Pure functions; whoever makes a signature owns the words its dims lead to.
#ifndef HVD_BASE_OP_H
#define HVD_BASE_OP_H

#include "hvd.h"

// Rows of ops.def behind those of the public API.
#define OP_ADD_SET ((hvd_op_t)HVD_N_OPS)
#define OP_REMOVE_SET ((hvd_op_t)(HVD_N_OPS + 1))
#define N_OPS (HVD_N_OPS + 2)

typedef enum op_layout {
    LAYOUT_NOTHING,
    LAYOUT_WHOLE,
    LAYOUT_GATHERED,
    LAYOUT_SCATTERED,
    LAYOUT_EXCHANGED,
    N_OP_LAYOUTS
} op_layout_t;

typedef enum op_sizes { SIZES_NONE, SIZES_PER_TENSOR, SIZES_PER_MEMBER } op_sizes_t;

enum {
    OP_REDUCES = 1 << 0,
    OP_ROOTED = 1 << 1,
    OP_FUSES = 1 << 2,
    OP_JOINS = 1 << 3,
    OP_RIDES = 1 << 4,
    OP_INSTANT = 1 << 5,
    OP_NEEDS_ROWS = 1 << 6,
    OP_ONE_TENSOR = 1 << 7,
    OP_SUMS_ONLY = 1 << 8,
};

typedef struct op_info {
    const char *name;  // "allreduce"
    const char *upper; // as in "Mismatched ALLREDUCE tensor shapes:"
    const char *title; // as in "Allgather is not supported with Join at this time."
    op_layout_t layout;
    op_sizes_t sizes;
    unsigned traits;
} op_info_t;

extern const op_info_t op_infos[N_OPS];

static inline bool op_has(hvd_op_t op, unsigned trait)
{
    return (op_infos[op].traits & trait) != 0;
}

// Every member gets the sum, or whatever the reduction is, of whole tensors.
static inline bool op_is_allreduce(hvd_op_t op)
{
    return op_has(op, OP_REDUCES) && op_infos[op].layout == LAYOUT_WHOLE;
}

// Changes of process sets are agreed upon like operations, but have words instead of shapes.
static inline bool op_is_about_sets(hvd_op_t op)
{
    return (int)op >= HVD_N_OPS;
}

typedef struct signature {
    hvd_op_t op; // or OP_ADD_SET, OP_REMOVE_SET
    hvd_dtype_t dtype;
    hvd_reduce_t reduce; // HVD_SUM for what does not reduce
    int root;            // a global rank; 0 for what has none
    double prescale, postscale;
    bool on_device; // runs in the memory of GPUs, without the host
    int n_tensors;
    // Dimensions of all tensors, one after the other: n_dims, dim, dim, ..., n_dims, dim, ...
    // The first dimension is written as -1 where members tell sizes. Sets: ranks, or the id.
    const int64_t *dims;
    int n_dims_words;
} signature_t;

// Factors are compared bit by bit: not-a-number equals itself, so ranks that all pass it agree.
bool signature_equal(const signature_t *a, const signature_t *b);
// The same but for shapes and number of tensors: they may share a batch.
bool signature_fuses_with(const signature_t *a, const signature_t *b);
// Elements of all tensors; a dimension that is left out counts as 1. SIZE_MAX: too many to count.
size_t signature_elements(const signature_t *signature);
// Elements of the shape at *dims, which moves on to the next one.
size_t shape_elements(const int64_t **dims);
// Would it travel inside the agreement's messages? All ranks answer alike, if `most_bytes` is the
// same. *bytes_p: of what it brings.
bool signature_rides(const signature_t *signature, size_t most_bytes, size_t *bytes_p);
// The same for those who have counted its elements.
bool signature_rides_with(const signature_t *signature, size_t n_elements, size_t most_bytes,
                          size_t *bytes_p);
// How many sizes each of n_members tells.
int signature_n_sizes(const signature_t *signature, int n_members);
// What is done to a result: an average is a sum that is divided by the number of members.
typedef struct finish {
    double factor; // the caller's
    int divisor;
} finish_t;

#define FINISH_NOTHING ((finish_t){1.0, 1})

static inline bool finish_is_nothing(finish_t finish)
{
    return finish.factor == 1.0 && finish.divisor == 1;
}

static inline finish_t signature_finish(const signature_t *signature, int n_members)
{
    int divisor = signature->reduce == HVD_AVERAGE ? n_members : 1;
    return op_has(signature->op, OP_REDUCES) ? (finish_t){signature->postscale, divisor}
                                             : FINISH_NOTHING;
}

static inline bool dtype_is_half(hvd_dtype_t dtype)
{
    return dtype == HVD_FLOAT16 || dtype == HVD_BFLOAT16;
}

// The type in which values of `dtype` are added up.
static inline hvd_dtype_t acc_dtype(hvd_dtype_t dtype)
{
    return dtype_is_half(dtype) ? HVD_FLOAT32 : dtype;
}

// What rides is added up in this type: bytes that only move meet zeros.
static inline hvd_dtype_t riding_dtype(const signature_t *signature)
{
    return op_has(signature->op, OP_REDUCES) ? acc_dtype(signature->dtype) : HVD_UINT8;
}

// Of each element of a tensor that rides.
static inline size_t riding_element_bytes(hvd_op_t op, hvd_dtype_t dtype)
{
    return hvd_dtype_bytes(op_has(op, OP_REDUCES) ? acc_dtype(dtype) : dtype);
}

static inline bool dtype_is_floating(hvd_dtype_t dtype)
{
    return dtype_is_half(dtype) || dtype == HVD_FLOAT32 || dtype == HVD_FLOAT64;
}

#endif
