# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of PyTorch: hvd.checkpoint.save() and load(); docs/checkpoints.md."""
import torch

from horovod.checkpoint import face
from horovod.checkpoint.frameworks import NumpyFramework

__all__ = ["load", "save"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
           "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
           "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
           "C128": torch.complex128}
for _code, _name in (("U64", "uint64"), ("U32", "uint32"), ("U16", "uint16"),
                     ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")):
    if hasattr(torch, _name):  # since 2.1 and 2.3
        _DTYPES[_code] = getattr(torch, _name)
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def _bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _TorchFramework(NumpyFramework):
    def is_tensor(self, value):
        if not isinstance(value, torch.Tensor):
            return super().is_tensor(value)
        if value.layout is not torch.strided or value.dtype not in _CODES or value.is_meta:
            raise TypeError(f"a checkpoint cannot hold a tensor of {value.dtype}, {value.layout} "
                            f"on {value.device}; save it as plain tensors")
        return True

    def describe(self, tensor):
        if not isinstance(tensor, torch.Tensor):
            return super().describe(tensor)
        return _CODES[tensor.dtype], tuple(tensor.shape)

    def copy(self, tensor, begin, end, memory):
        if not isinstance(tensor, torch.Tensor):
            super().copy(tensor, begin, end, memory)
        elif begin < end:
            torch.frombuffer(memory, dtype=torch.uint8).copy_(_bytes_of(tensor)[begin:end])

    def make(self, dtype, shape):
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        return tensor, memoryview(_bytes_of(tensor).numpy())


save, load = face(_TorchFramework())
