# SPDX-License-Identifier: Apache-2.0
"""Compression.none, .fp16 and .bf16 for TensorFlow."""
import tensorflow as tf

from horovod.common.compression import Compressor, NoneCompressor, make_compression

Compression = make_compression(
    tf.float16, tf.bfloat16, is_floating=lambda tensor: tensor.dtype.is_floating, cast=tf.cast)
FP16Compressor = Compression.fp16

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
