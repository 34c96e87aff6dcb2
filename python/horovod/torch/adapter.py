# SPDX-License-Identifier: Apache-2.0
"""How PyTorch tensors meet the core: which dtypes it knows, and memory it can use.

Most tensors go as they are: dense, contiguous, on the host or on a GPU, of a dtype of the table.
The others are made so by to_wire(), and from_wire() makes the results like the tensor again:
complex numbers travel as pairs, dtypes the core has no arithmetic for as integers of their size,
tensors of devices that the core does not know through host memory.
"""
import torch

from horovod import _core

# dtype -> number of the core. One row adds a dtype.
DTYPES = {
    torch.uint8: _core.UINT8,
    torch.int8: _core.INT8,
    torch.int16: _core.INT16,
    torch.int32: _core.INT32,
    torch.int64: _core.INT64,
    torch.float16: _core.FLOAT16,
    torch.float32: _core.FLOAT32,
    torch.float64: _core.FLOAT64,
    torch.bool: _core.BOOL,
    torch.bfloat16: _core.BFLOAT16,
}

# dtype -> what its bytes are moved as. Only in newer versions of PyTorch, so by name.
MOVED_AS = {
    getattr(torch, name): like
    for name, like in {
        "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8, "float8_e4m3fnuz": torch.uint8,
        "float8_e5m2fnuz": torch.uint8, "float8_e8m0fnu": torch.uint8,
        "uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64,
    }.items()
    if hasattr(torch, name)
}

LINEAR = (_core.AVERAGE, _core.SUM)


def check_tensor(tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a torch.Tensor is expected, not {tensor!r:.60} of type "
                        f"{type(tensor).__name__}; torch.as_tensor() makes one of numbers")


def is_plain(tensor):
    """Can the core use the tensor's own memory?"""
    return (tensor.layout is torch.strided and tensor.is_cpu and tensor.dtype in DTYPES
            and tensor.is_contiguous())


def is_usable(tensor):
    """Can the core use the tensor's own memory, on the host or on a GPU?"""
    return (tensor.layout is torch.strided and (tensor.is_cpu or tensor.is_cuda)
            and tensor.dtype in DTYPES and tensor.is_contiguous())


_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
if _current_stream is not None:
    _core.set_current_stream(_current_stream)


def where(tensor):
    """The keywords that tell submit() where a tensor is: none for the host."""
    if not tensor.is_cuda:
        return {}
    device = tensor.get_device()
    return {"device": device, "stream": _current_stream(device)}


def _refuse(tensor, what):
    raise ValueError(f"Tensor type {tensor.dtype} ({tensor.layout}) is not supported{what}.")


def to_wire(tensor, reduce=None):
    """A plain tensor with the values of this one; its own memory if that will do.

    reduce: the reduction it is for, or None if its bytes are only moved.
    """
    if tensor.layout is not torch.strided:
        _refuse(tensor, "; make it dense, or use sparse_allreduce_async")
    tensor = tensor.detach()
    if tensor.is_complex():
        if reduce is not None and reduce not in LINEAR:
            _refuse(tensor, " by this reduction; complex numbers can be summed and averaged")
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif tensor.dtype in MOVED_AS:
        if reduce is not None:
            _refuse(tensor, " by reductions; convert it first")
        tensor = tensor.contiguous().view(MOVED_AS[tensor.dtype])
    elif tensor.dtype not in DTYPES:
        _refuse(tensor, "")
    if not (tensor.is_cpu or tensor.is_cuda):
        # Blocks until the device has written it. A copy even where a device's memory is the host's:
        # an output keeps its values until the operation has ended.
        tensor = tensor.to("cpu", copy=True)
    return tensor.contiguous()


def _as_dtype(wire, like):
    if like.is_complex():
        return torch.view_as_complex(wire)
    return wire.view(like.dtype) if like.dtype in MOVED_AS else wire


def from_wire(wire, like):
    """The values of a plain tensor, in the dtype and on the device of `like`."""
    value = _as_dtype(wire, like)
    return value if like.is_cpu else value.to(like.device)


def write_back(wire, output):
    """Gives the output, of any kind, the values of a plain tensor; returns the output."""
    with torch.no_grad():
        value = _as_dtype(wire, output)
        if value.data_ptr() != output.data_ptr():
            output.copy_(value)  # on a device: in the order of its current stream
            if value.is_cuda:  # which need not be the one that the value was made in
                value.record_stream(torch.cuda.current_stream(value.device))
    return output


def from_handle(handle, i, dtype, device):
    """Output i of an operation whose result only the agreement knew, as it travelled."""
    if device.type != "cuda":
        return from_memory(*handle.memory(i), dtype)
    output = torch.empty(handle.shape(i), dtype=dtype, device=device)
    handle.fetch(i, output.data_ptr())
    return output


def from_memory(memory, shape, dtype):
    """A tensor over memory the core has brought; no copy."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
