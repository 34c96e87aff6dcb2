# SPDX-License-Identifier: Apache-2.0
"""Arithmetic for a GPU that has none: PyTorch's CUDA kernels are replaced by ones that compute on
the CPU and bring the result back in the order of the current stream.

Importing it is enough. Allocator, streams, events, autograd and optimizers stay PyTorch's own.
"""
import torch

# What PyTorch does there itself: it takes memory, or looks at it.
MEMORY = """
empty.memory_format empty_strided resize_ record_stream _local_scalar_dense is_set_to set_
set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor
""".split()
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
ELSEWHERE = ["convolution_overrideable"]  # not a kernel of CUDA, but one that it needs


def each(function, value):
    if isinstance(value, (list, tuple)):
        return type(value)(each(function, item) for item in value)
    return function(value)


def to_host(value):
    is_there = isinstance(value, torch.Tensor) and value.is_cuda
    return value.detach().cpu() if is_there else value


def device_of(values):
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.device
        if isinstance(value, (list, tuple)) and device_of(value) is not None:
            return device_of(value)
    return None


def to_device(value, device):
    if not isinstance(value, torch.Tensor) or value.is_cuda:
        return value
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if value.numel():
        result.copy_(value, non_blocking=True)
    return result


def write_back(host, there, written):
    """What the operator has written in place; notes which tensor of the host is which."""
    pairs = zip(host, there) if isinstance(host, (list, tuple)) else [(host, there)]
    for source, target in pairs:
        if isinstance(target, torch.Tensor) and target.is_cuda:
            if target.shape != source.shape:
                target.resize_(source.shape)
            if source.numel():
                target.copy_(source)
            written[id(source)] = target


def on_the_cpu(operator):
    arguments = operator._schema.arguments

    def compute(*values, **named):
        device = (device_of(values) or device_of(named.values())
                  or torch.device("cuda", torch.cuda.current_device()))
        if named.get("device") is not None:
            named["device"] = torch.device("cpu")
        host_values = each(to_host, list(values))
        host_named = {name: each(to_host, value) for name, value in named.items()}
        result = operator(*host_values, **host_named)
        written = {}
        for i, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                by_position = i < len(values)
                write_back(host_values[i] if by_position else host_named.get(argument.name),
                           values[i] if by_position else named.get(argument.name), written)
        return each(lambda value: written.get(id(value), to_device(value, device)), result)

    return compute


def is_view(operator):
    return any(argument.alias_info is not None and not argument.alias_info.is_write
               for argument in operator._schema.arguments)


def copy_apart(output, source):
    """A copy on the device that a kernel makes: it converts, or one of the two has gaps."""
    if source.is_cuda:
        memory = source.untyped_storage().cpu()
        source = torch.empty(0, dtype=source.dtype, device="cpu").set_(
            memory, source.storage_offset(), source.size(), source.stride())
    if output.dim() and not output.is_contiguous():
        for part, values in zip(output, source.expand_as(output)):
            copy_apart(part, values)
    elif output.numel():
        output.copy_(source.to(output.dtype).expand_as(output).contiguous())


def copy(keys, output, source, non_blocking=False):
    if not isinstance(source, torch.Tensor):  # a number comes as such
        source = torch.tensor(source, device="cpu", dtype=NUMBERS[type(source)])
    if output.is_cuda and source.is_cuda and (
            output.dtype != source.dtype or not output.is_contiguous()
            or not source.is_contiguous() or output.shape != source.shape):
        copy_apart(output, source)
        return output
    below = keys.remove(torch._C.DispatchKey.BackendSelect)
    return torch.ops.aten.copy_.default.redispatch(below, output, source, non_blocking)


def coalesce(sparse):
    here = sparse.cpu().coalesce()
    indices, values = (part.to(sparse.device) for part in (here.indices(), here.values()))
    return torch.sparse_coo_tensor(indices, values, here.shape, is_coalesced=True,
                                   check_invariants=False)


LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("_coalesce", coalesce, "SparseCUDA")
LIBRARY.impl("copy_", copy, "BackendSelect", with_keyset=True)
KERNELS = [name.partition("::")[2]
           for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
           if name.startswith("aten::")]
for name in KERNELS + ELSEWHERE:
    packet, _, overload = name.partition(".")
    if hasattr(torch.ops.aten, packet) and name not in MEMORY:
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not is_view(operator):
            LIBRARY.impl(name, on_the_cpu(operator), "CUDA")
