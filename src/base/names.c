// SPDX-License-Identifier: Apache-2.0
//
// names.c - names and sizes of reductions and data types, and the version.
//
// Two tables indexed by the public enumerations. Values outside them, which a peer or a cast can
// produce, are "unknown" and have size 0. Any thread; nothing is owned.
#include "base/base.h"

#define QUOTE_VALUE(value) QUOTE(value)
#define QUOTE(value) #value

static const char *const reduce_names[HVD_N_REDUCES] = {
    [HVD_AVERAGE] = "average", [HVD_SUM] = "sum", [HVD_ADASUM] = "adasum",
    [HVD_MIN] = "min",         [HVD_MAX] = "max", [HVD_PRODUCT] = "product",
};

static const struct {
    const char *name;
    size_t bytes;
} dtypes[HVD_N_DTYPES] = {
    [HVD_UINT8] = {"uint8", 1},       [HVD_INT8] = {"int8", 1},
    [HVD_UINT16] = {"uint16", 2},     [HVD_INT16] = {"int16", 2},
    [HVD_INT32] = {"int32", 4},       [HVD_INT64] = {"int64", 8},
    [HVD_FLOAT16] = {"float16", 2},   [HVD_FLOAT32] = {"float32", 4},
    [HVD_FLOAT64] = {"float64", 8},   [HVD_BOOL] = {"bool", 1},
    [HVD_BFLOAT16] = {"bfloat16", 2},
};

const char *hvd_version(void)
{
    return QUOTE_VALUE(HVD_VERSION_MAJOR) "." QUOTE_VALUE(HVD_VERSION_MINOR) "." QUOTE_VALUE(
        HVD_VERSION_PATCH);
}

const char *hvd_reduce_name(hvd_reduce_t reduce)
{
    return (unsigned)reduce < HVD_N_REDUCES ? reduce_names[reduce] : "unknown";
}

const char *hvd_dtype_name(hvd_dtype_t dtype)
{
    return (unsigned)dtype < HVD_N_DTYPES ? dtypes[dtype].name : "unknown";
}

size_t hvd_dtype_bytes(hvd_dtype_t dtype)
{
    return (unsigned)dtype < HVD_N_DTYPES ? dtypes[dtype].bytes : 0;
}
