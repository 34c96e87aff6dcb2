# SPDX-License-Identifier: Apache-2.0
"""Gradient compression: tensors travel in fewer bits.

A compressor has two static methods, compress(tensor) -> (tensor, context) and
decompress(tensor, context); any class with them will do. A framework gets its Compression from
make_compression(), telling only how it casts.
"""


class Compressor:
    """The interface."""

    @staticmethod
    def compress(tensor):
        """Returns the tensor to send and what decompress() will need."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor, ctx):
        """Returns the tensor as it was before compress()."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


def _cast_compressor(name, doc, wire_dtype, is_floating, cast):
    def compress(tensor):
        if not is_floating(tensor) or tensor.dtype == wire_dtype:
            return tensor, None
        return cast(tensor, wire_dtype), tensor.dtype

    def decompress(tensor, ctx):
        return tensor if ctx is None else cast(tensor, ctx)

    body = {"__doc__": doc, "compress": staticmethod(compress),
            "decompress": staticmethod(decompress)}
    return type(name, (Compressor,), body)


def make_compression(half, bfloat16, is_floating, cast):
    """The Compression class of a framework: none, fp16 and bf16.

    half, bfloat16: its dtypes; is_floating(tensor); cast(tensor, dtype).
    """
    fp16 = _cast_compressor("FP16Compressor", "Sends floating point as float16.", half,
                            is_floating, cast)
    bf16 = _cast_compressor("BF16Compressor", "Sends floating point as bfloat16.", bfloat16,
                            is_floating, cast)
    return type("Compression", (), {
        "__doc__": "What tensors are turned into on the wire: none, fp16 or bf16.",
        "none": NoneCompressor, "fp16": fp16, "bf16": bf16,
    })
