# SPDX-License-Identifier: Apache-2.0
"""Compression.none, .fp16 and .bf16 for PyTorch tensors."""
import torch

from horovod.common.compression import Compressor, NoneCompressor, make_compression

Compression = make_compression(torch.float16, torch.bfloat16,
                               lambda tensor: tensor.dtype.is_floating_point,
                               lambda tensor, dtype: tensor.to(dtype))
FP16Compressor = Compression.fp16
BF16Compressor = Compression.bf16

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
