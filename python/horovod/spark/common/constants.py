# SPDX-License-Identifier: Apache-2.0
"""Constants that programs around the estimators import."""

# Kinds of columns: how a value of a DataFrame is written for training.
NOCHANGE = "nochange"
ARRAY = "array"  # vectors
CUSTOM_SPARSE = "custom_sparse_format"  # never chosen here: Parquet packs zeros well
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"

METRIC_PRINT_FREQUENCY = 4  # accepted: metrics are printed once an epoch
BYTES_PER_GIB = 1 << 30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
PETASTORM_HDFS_DRIVER = "libhdfs"
