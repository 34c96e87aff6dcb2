// SPDX-License-Identifier: Apache-2.0
//
// numerics.c - HOROVOD_CHECK_NUMERICS: numbers that are none, found where they come from.
//
// A gradient that has become NaN or infinite on one rank is so on all after the allreduce, and
// nobody can tell any more where it began. So what a rank submits to be reduced is looked at
// before. The first is named with tensor, element and the user's line, once per rank; all are
// counted (hvd_nonfinite_total). It costs a reading of every tensor, and nothing while it is off.
// Thread: the submitter's, without the lock, as tensors may not change before they are submitted.
#include "engine/engine.h"

#include <math.h>

// What all bits of the exponent are set in is infinite or not a number.
#define DEFINE_COUNT(bits, mask)                                                                   \
    static uint64_t count_##bits##_##mask(const void *data, uint64_t n, uint64_t *first_p)         \
    {                                                                                              \
        const uint##bits##_t *values = data, exponent = (uint##bits##_t)(mask);                    \
        uint64_t n_found = 0;                                                                      \
        for (uint64_t i = 0; i < n; i++) {                                                         \
            n_found += (values[i] & exponent) == exponent;                                         \
        }                                                                                          \
        for (*first_p = 0; n_found > 0 && (values[*first_p] & exponent) != exponent;) {            \
            ++*first_p;                                                                            \
        }                                                                                          \
        return n_found;                                                                            \
    }

#define HALF_EXPONENT 0x7c00
#define BFLOAT_EXPONENT 0x7f80
#define FLOAT_EXPONENT 0x7f800000
#define DOUBLE_EXPONENT 0x7ff0000000000000

DEFINE_COUNT(16, HALF_EXPONENT)
DEFINE_COUNT(16, BFLOAT_EXPONENT)
DEFINE_COUNT(32, FLOAT_EXPONENT)
DEFINE_COUNT(64, DOUBLE_EXPONENT)

typedef uint64_t (*count_fn)(const void *data, uint64_t n, uint64_t *first_p);

static count_fn counter_of(hvd_dtype_t dtype)
{
    switch (dtype) {
    case HVD_FLOAT16:
        return count_16_HALF_EXPONENT;
    case HVD_BFLOAT16:
        return count_16_BFLOAT_EXPONENT;
    case HVD_FLOAT32:
        return count_32_FLOAT_EXPONENT;
    case HVD_FLOAT64:
        return count_64_DOUBLE_EXPONENT;
    default:
        return NULL; // integers are all numbers
    }
}

// 0: nothing to look at, or not for us to refuse.
static uint64_t n_elements_of(const hvd_tensor_t *tensor)
{
    uint64_t n = tensor->input != NULL && tensor->n_dims >= 0 ? 1 : 0;
    for (int i = 0; i < tensor->n_dims && n > 0; i++) {
        bool is_sound = tensor->shape[i] >= 0 &&
                        !__builtin_mul_overflow(n, (uint64_t)tensor->shape[i], &n) &&
                        n <= SIZE_MAX / sizeof(double);
        n = is_sound ? n : 0;
    }
    return n;
}

static void name_first(hvd_ctx_t *ctx, const hvd_request_t *asked, uint64_t at, uint64_t n_found,
                       uint64_t n)
{
    log_warn(
        &ctx->log, "numerics",
        "rank %d submits '%s' with %llu of %llu elements NaN or infinite, the first at %llu%s%s. "
        "It is the first such tensor of this rank; later ones are only counted "
        "(hvd_nonfinite_total)",
        ctx->job.rank, asked->name != NULL ? asked->name : hvd_op_name(asked->op),
        (unsigned long long)n_found, (unsigned long long)n, (unsigned long long)at,
        asked->where != NULL ? ", submitted at " : "", asked->where != NULL ? asked->where : "");
}

void numerics_check(hvd_ctx_t *ctx, const hvd_request_t *asked)
{
    bool is_known = (unsigned)asked->op < HVD_N_OPS && asked->tensors != NULL;
    bool is_here = (asked->flags & HVD_ON_DEVICE) == 0;
    count_fn count = counter_of(asked->dtype);
    if (count == NULL || !is_known || !is_here || !op_has(asked->op, OP_REDUCES)) {
        return;
    }
    for (int i = 0; i < asked->n_tensors; i++) {
        uint64_t first, n = n_elements_of(&asked->tensors[i]);
        uint64_t n_found = n > 0 ? count(asked->tensors[i].input, n, &first) : 0;
        if (n_found > 0 && observe_nonfinite(ctx->observe, n_found) == 0) {
            name_first(ctx, asked, first, n_found, n);
        }
    }
}
