# SPDX-License-Identifier: Apache-2.0
"""The blocking collectives, with gradients.

What the gradient of each is, users' scripts rely on; those of allgather and broadcast are averages,
although sums would be the derivative.

Each is a class with three static methods: run() is the collective, keep() notes what backward()
needs. PyTorch has two ways to call such a class. The usual one is fast, the other is understood by
torch.func; a compiled graph takes the operators of custom_ops.py instead.
"""
import torch

from horovod import _core
from horovod.common.basics import Average, Sum, rank
from horovod.common.objects import allgather_size
from horovod.common.process_sets import global_process_set
from horovod.torch import mpi_ops
from horovod.torch.adapter import check_tensor
from horovod.torch.compression import Compression

_in_functional_transform = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


class _Collective(torch.autograd.Function):
    """run(*inputs) -> output; keep(ctx, inputs, output); backward(ctx, *grads)."""

    def __init_subclass__(cls):
        def forward(ctx, *inputs):
            output = cls.run(*inputs)
            cls.keep(ctx, inputs, output)
            return output

        cls.forward = staticmethod(forward)
        rules = {"forward": cls.run, "setup_context": cls.keep, "backward": cls.backward}
        if hasattr(cls, "batched"):
            rules["vmap"] = cls.batched
        cls.functional = type(cls.__name__, (torch.autograd.Function,),
                              {name: staticmethod(rule) for name, rule in rules.items()})

    @classmethod
    def call(cls, *inputs):
        return (cls.functional if _in_functional_transform() else cls).apply(*inputs)


def _compress_all(compression, tensors):
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [wire for wire, _ in pairs], [ctx for _, ctx in pairs]


# --- allreduce ------------------------------------------------------------------------------------


class HorovodAllreduce(_Collective):
    """The gradient is reduced the same way."""

    @staticmethod
    def run(tensor, average, name, op, prescale_factor, postscale_factor, process_set):
        op = mpi_ops._reduction(op, average, process_set)
        return mpi_ops._same_shape(
            _core.ALLREDUCE, mpi_ops._named("allreduce", name), tensor, None, op, 0, process_set,
            prescale_factor, postscale_factor, True).wait()

    @staticmethod
    def keep(ctx, inputs, output):
        ctx.arguments = (inputs[1], None, *inputs[3:])

    @staticmethod
    def backward(ctx, grad_output):
        return (HorovodAllreduce.call(grad_output, *ctx.arguments), *[None] * 6)

    @staticmethod
    def batched(info, dims, tensor, *arguments):
        return HorovodAllreduce.call(tensor, *arguments), dims[0]


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=None,
              prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set):
    """The tensor reduced over all members, as a new tensor."""
    op = mpi_ops._reduction(op, average, process_set)
    check_tensor(tensor)
    if tensor.is_sparse:
        return mpi_ops.sparse_allreduce_async(tensor, name or "sparse", op, process_set)()
    wire, ctx = compression.compress(tensor)
    if mpi_ops._is_compiling():
        reduced = torch.ops.horovod.allreduce(wire, name, op, prescale_factor, postscale_factor,
                                              process_set.process_set_id)
    else:
        reduced = HorovodAllreduce.call(wire, None, name, op, prescale_factor, postscale_factor,
                                        process_set)
    return compression.decompress(reduced, ctx)


class HorovodGroupedAllreduce(_Collective):
    """The gradients are reduced the same way, as a group."""

    @staticmethod
    def run(average, name, op, prescale_factor, postscale_factor, process_set, *tensors):
        return mpi_ops.grouped_allreduce_async(tensors, average, name, op, prescale_factor,
                                               postscale_factor, process_set).wait()

    @staticmethod
    def keep(ctx, inputs, output):
        ctx.arguments = (inputs[0], None, *inputs[2:6])

    @staticmethod
    def backward(ctx, *grad_outputs):
        return (*[None] * 6, *HorovodGroupedAllreduce.call(*ctx.arguments, *grad_outputs))


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None,
                      prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set):
    """All tensors reduced over all members, as a list of new tensors."""
    op = mpi_ops._reduction(op, average, process_set)
    wires, contexts = _compress_all(compression, tensors)
    if mpi_ops._is_compiling():
        reduced = torch.ops.horovod.grouped_allreduce(wires, name, op, prescale_factor,
                                                      postscale_factor, process_set.process_set_id)
    else:
        reduced = HorovodGroupedAllreduce.call(None, name, op, prescale_factor, postscale_factor,
                                               process_set, *wires)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts)]


# --- allgather ------------------------------------------------------------------------------------


def _own_rows(grad, n_rows, process_set):
    """This member's part of the averaged gradient of an allgather."""
    averaged = allreduce(grad, op=Average, process_set=process_set)
    start = sum(allgather_size(n_rows, process_set)[:process_set.rank()])
    return averaged[start:start + n_rows]


class HorovodAllgather(_Collective):
    """The gradient is averaged; each member takes the rows it gave."""

    @staticmethod
    def run(tensor, name, process_set):
        return mpi_ops.allgather_async(tensor, name, process_set).wait()

    @staticmethod
    def keep(ctx, inputs, output):
        ctx.arguments = (inputs[0].shape[0], inputs[2])

    @staticmethod
    def backward(ctx, grad_output):
        return _own_rows(grad_output, *ctx.arguments), None, None


def allgather(tensor, name=None, process_set=global_process_set):
    """The tensors of all members, one after the other along the first dimension."""
    if mpi_ops._is_compiling():
        return torch.ops.horovod.allgather(tensor, name, process_set.process_set_id)
    return HorovodAllgather.call(tensor, name, process_set)


class HorovodGroupedAllgather(_Collective):
    """As allgather, for each tensor."""

    @staticmethod
    def run(name, process_set, *tensors):
        return mpi_ops.grouped_allgather_async(tensors, name, process_set).wait()

    @staticmethod
    def keep(ctx, inputs, output):
        ctx.arguments = ([tensor.shape[0] for tensor in inputs[2:]], inputs[1])

    @staticmethod
    def backward(ctx, *grad_outputs):
        rows, process_set = ctx.arguments
        grads = [_own_rows(grad, n, process_set) for grad, n in zip(grad_outputs, rows)]
        return (None, None, *grads)


def grouped_allgather(tensors, name=None, process_set=global_process_set):
    """A tuple of gathered tensors."""
    if mpi_ops._is_compiling():
        return tuple(torch.ops.horovod.grouped_allgather(list(tensors), name,
                                                         process_set.process_set_id))
    return HorovodGroupedAllgather.call(name, process_set, *tensors)


# --- broadcast ------------------------------------------------------------------------------------


class HorovodBroadcast(_Collective):
    """The gradient is averaged on the root, zero elsewhere."""

    @staticmethod
    def run(tensor, root_rank, name, process_set):
        return mpi_ops._same_shape(
            _core.BROADCAST, mpi_ops._named("broadcast", name), tensor, None, None, root_rank,
            process_set, 1.0, 1.0, True).wait()

    @staticmethod
    def keep(ctx, inputs, output):
        ctx.arguments = (inputs[1], inputs[3])

    @staticmethod
    def backward(ctx, grad_output):
        root_rank, process_set = ctx.arguments
        averaged = allreduce(grad_output, op=Average, process_set=process_set)
        grad = averaged if rank() == root_rank else torch.zeros_like(averaged)
        return grad, None, None, None

    @staticmethod
    def batched(info, dims, tensor, *arguments):
        return HorovodBroadcast.call(tensor, *arguments), dims[0]


def broadcast(tensor, root_rank, name=None, process_set=global_process_set):
    """The tensor of the root rank (a global rank), as a new tensor."""
    if mpi_ops._is_compiling():
        return torch.ops.horovod.broadcast(tensor, root_rank, name, process_set.process_set_id)
    return HorovodBroadcast.call(tensor, root_rank, name, process_set)


# --- alltoall -------------------------------------------------------------------------------------


class HorovodAlltoall(_Collective):
    """The gradient goes back the way the rows came."""

    @staticmethod
    def run(tensor, splits, name, process_set):
        return mpi_ops.alltoall_async(tensor, splits, name, process_set).wait()

    @staticmethod
    def keep(ctx, inputs, output):
        received = output[1]
        ctx.arguments = (received.to(torch.int32).cpu(), None, inputs[3])
        ctx.mark_non_differentiable(received)

    @staticmethod
    def backward(ctx, grad_output, _):
        grad, _ = HorovodAlltoall.call(grad_output, *ctx.arguments)
        return grad, None, None, None


def alltoall(tensor, splits=None, name=None, process_set=global_process_set):
    """Rows for each member out, rows from each in; with splits also how many came from each."""
    if mpi_ops._is_compiling():
        output, received = torch.ops.horovod.alltoall(tensor, mpi_ops._as_splits(splits), name,
                                                      process_set.process_set_id)
    else:
        output, received = HorovodAlltoall.call(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


# --- reducescatter --------------------------------------------------------------------------------


def _gathered(grad, op, process_set, factor):
    if op == Sum:
        factor = factor * process_set.size()
    return allgather(grad * factor if factor != 1 else grad, process_set=process_set)


class HorovodReducescatter(_Collective):
    """The gradient is gathered, scaled as the tensor was."""

    @staticmethod
    def run(tensor, name, op, process_set, prescale_factor, postscale_factor):
        return mpi_ops.reducescatter_async(tensor, name, op, process_set, prescale_factor,
                                           postscale_factor).wait()

    @staticmethod
    def keep(ctx, inputs, output):
        op, process_set, prescale_factor, postscale_factor = inputs[2:]
        ctx.arguments = (op, process_set, prescale_factor * postscale_factor)

    @staticmethod
    def backward(ctx, grad_output):
        return (_gathered(grad_output, *ctx.arguments), *[None] * 5)


def reducescatter(tensor, name=None, compression=Compression.none, op=Average,
                  process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0):
    """This member's rows of the tensor reduced over all members."""
    wire, ctx = compression.compress(tensor)
    if mpi_ops._is_compiling():
        reduced = torch.ops.horovod.reducescatter(wire, name, op, prescale_factor, postscale_factor,
                                                  process_set.process_set_id)
    else:
        reduced = HorovodReducescatter.call(wire, name, op, process_set, prescale_factor,
                                            postscale_factor)
    return compression.decompress(reduced, ctx)


class HorovodGroupedReducescatter(_Collective):
    """As reducescatter, for each tensor."""

    @staticmethod
    def run(name, op, process_set, prescale_factor, postscale_factor, *tensors):
        return tuple(mpi_ops.grouped_reducescatter_async(tensors, name, op, process_set,
                                                         prescale_factor, postscale_factor).wait())

    @staticmethod
    def keep(ctx, inputs, output):
        op, process_set, prescale_factor, postscale_factor = inputs[1:5]
        ctx.arguments = (op, process_set, prescale_factor * postscale_factor)

    @staticmethod
    def backward(ctx, *grad_outputs):
        grads = [_gathered(grad, *ctx.arguments) for grad in grad_outputs]
        return (*[None] * 5, *grads)


def grouped_reducescatter(tensors, name=None, compression=Compression.none, op=Average,
                          process_set=global_process_set, prescale_factor=1.0,
                          postscale_factor=1.0):
    """A list with this member's rows of each tensor reduced over all members."""
    wires, contexts = _compress_all(compression, tensors)
    if mpi_ops._is_compiling():
        reduced = torch.ops.horovod.grouped_reducescatter(
            wires, name, op, prescale_factor, postscale_factor, process_set.process_set_id)
    else:
        reduced = HorovodGroupedReducescatter.call(name, op, process_set, prescale_factor,
                                                   postscale_factor, *wires)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts)]
