# SPDX-License-Identifier: Apache-2.0
"""Arithmetic for a GPU that has none: PyTorch's CUDA kernels are replaced by ones that compute on
the CPU and bring the result back in the order of the current stream.

Importing it is enough. Allocator, streams, events, autograd and optimizers stay PyTorch's own.
"""
import torch

OPERATORS = """
add.Tensor add_.Tensor add.out sub.Tensor sub_.Tensor sub.out mul.Tensor mul_.Tensor mul.out
div.Tensor div_.Tensor div.out neg fill_.Scalar fill_.Tensor relu relu_ threshold_backward
mm mm.out addmm addmm.out bmm sum sum.dim_IntList mean mean.dim mse_loss mse_loss_backward
_log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward cat
_foreach_add_.List _foreach_mul_.Scalar _foreach_add_.Scalar _foreach_mul_.List _foreach_sqrt
_foreach_div_.List _foreach_addcmul_.Scalar _foreach_lerp_.Scalar _foreach_addcdiv_.ScalarList
_foreach_div_.ScalarList uniform_ normal_ random_ bernoulli_.float eq.Tensor ne.Scalar abs
isfinite sqrt rsqrt arange.start_out pow.Tensor_Scalar addcmul_ addcdiv_ lerp_.Scalar clamp_min
clamp gt.Scalar lt.Scalar bitwise_and.Tensor logical_and logical_not any all equal zero_
_foreach_mul.Scalar index_select native_batch_norm native_batch_norm_backward sqrt.out
convolution_overrideable
""".split()


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


LIBRARY = torch.library.Library("aten", "IMPL")
for name in OPERATORS:
    packet, _, overload = name.partition(".")
    if hasattr(torch.ops.aten, packet):
        LIBRARY.impl(name, on_the_cpu(getattr(getattr(torch.ops.aten, packet),
                                              overload or "default")), "CUDA")
