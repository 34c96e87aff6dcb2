# SPDX-License-Identifier: Apache-2.0
"""The blocking collectives, with gradients.

What the gradient of each is, users' scripts rely on; those of allgather and broadcast are averages,
although sums would be the derivative.
"""
import torch

from horovod import _core
from horovod.common.basics import Average, Sum, rank
from horovod.common.process_sets import global_process_set
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression

# --- allreduce ------------------------------------------------------------------------------------


class HorovodAllreduce(torch.autograd.Function):
    """The gradient is reduced the same way."""

    @staticmethod
    def forward(ctx, tensor, average, name, op, prescale_factor, postscale_factor, process_set):
        op = mpi_ops._reduction(op, average, process_set)
        ctx.arguments = (op, prescale_factor, postscale_factor, process_set)
        return mpi_ops._same_shape(
            _core.ALLREDUCE, mpi_ops._named("allreduce", name), tensor, mpi_ops._like(tensor), op,
            0, process_set, prescale_factor, postscale_factor, True).wait()

    @staticmethod
    def backward(ctx, grad_output):
        op, pre, post, process_set = ctx.arguments
        grad = allreduce(grad_output, op=op, prescale_factor=pre, postscale_factor=post,
                         process_set=process_set)
        return grad, None, None, None, None, None, None


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=None,
              prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set):
    """The tensor reduced over all members, as a new tensor."""
    if tensor.is_sparse:
        op = mpi_ops._reduction(op, average, process_set)
        return mpi_ops.sparse_allreduce_async(tensor, name or "sparse", op, process_set)()
    wire, ctx = compression.compress(tensor)
    if mpi_ops._is_compiling():
        op = mpi_ops._reduction(op, average, process_set)
        reduced = torch.ops.horovod.allreduce(wire, name, op, prescale_factor, postscale_factor,
                                              process_set.process_set_id)
    else:
        reduced = HorovodAllreduce.apply(wire, average, name, op, prescale_factor,
                                         postscale_factor, process_set)
    return compression.decompress(reduced, ctx)


class HorovodGroupedAllreduce(torch.autograd.Function):
    """The gradients are reduced the same way, as a group."""

    @staticmethod
    def forward(ctx, average, name, op, prescale_factor, postscale_factor, process_set, *tensors):
        op = mpi_ops._reduction(op, average, process_set)
        ctx.arguments = (op, prescale_factor, postscale_factor, process_set)
        return mpi_ops.grouped_allreduce_async(tensors, None, name, op, prescale_factor,
                                               postscale_factor, process_set).wait()

    @staticmethod
    def backward(ctx, *grad_outputs):
        op, pre, post, process_set = ctx.arguments
        grads = grouped_allreduce(grad_outputs, op=op, prescale_factor=pre, postscale_factor=post,
                                  process_set=process_set)
        return (None, None, None, None, None, None, *grads)


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None,
                      prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set):
    """All tensors reduced over all members, as a list of new tensors."""
    wires, contexts = zip(*(compression.compress(tensor) for tensor in tensors))
    reduced = HorovodGroupedAllreduce.apply(average, name, op, prescale_factor, postscale_factor,
                                            process_set, *wires)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts)]


# --- allgather ------------------------------------------------------------------------------------


def _own_rows(grad, n_rows, process_set):
    """This member's part of the averaged gradient of an allgather."""
    averaged = allreduce(grad, op=Average, process_set=process_set)
    counts = allgather(torch.tensor([n_rows]), process_set=process_set).tolist()
    start = sum(counts[:process_set.rank()])
    return averaged[start:start + n_rows]


class HorovodAllgather(torch.autograd.Function):
    """The gradient is averaged; each member takes the rows it gave."""

    @staticmethod
    def forward(ctx, tensor, name, process_set):
        ctx.arguments = (tensor.shape[0] if tensor.dim() > 0 else 1, process_set)
        return mpi_ops.allgather_async(tensor, name, process_set).wait()

    @staticmethod
    def backward(ctx, grad_output):
        return _own_rows(grad_output, *ctx.arguments), None, None


def allgather(tensor, name=None, process_set=global_process_set):
    """The tensors of all members, one after the other along the first dimension."""
    if mpi_ops._is_compiling():
        return torch.ops.horovod.allgather(tensor, name, process_set.process_set_id)
    return HorovodAllgather.apply(tensor, name, process_set)


class HorovodGroupedAllgather(torch.autograd.Function):
    """As allgather, for each tensor."""

    @staticmethod
    def forward(ctx, name, process_set, *tensors):
        ctx.arguments = ([tensor.shape[0] for tensor in tensors], process_set)
        return mpi_ops.grouped_allgather_async(tensors, name, process_set).wait()

    @staticmethod
    def backward(ctx, *grad_outputs):
        rows, process_set = ctx.arguments
        grads = [_own_rows(grad, n, process_set) for grad, n in zip(grad_outputs, rows)]
        return (None, None, *grads)


def grouped_allgather(tensors, name=None, process_set=global_process_set):
    """A tuple of gathered tensors."""
    return HorovodGroupedAllgather.apply(name, process_set, *tensors)


# --- broadcast ------------------------------------------------------------------------------------


class HorovodBroadcast(torch.autograd.Function):
    """The gradient is averaged on the root, zero elsewhere."""

    @staticmethod
    def forward(ctx, tensor, root_rank, name, process_set):
        ctx.arguments = (root_rank, process_set)
        return mpi_ops._same_shape(
            _core.BROADCAST, mpi_ops._named("broadcast", name), tensor, mpi_ops._like(tensor), None,
            root_rank, process_set, 1.0, 1.0, True).wait()

    @staticmethod
    def backward(ctx, grad_output):
        root_rank, process_set = ctx.arguments
        averaged = allreduce(grad_output, op=Average, process_set=process_set)
        grad = averaged if rank() == root_rank else torch.zeros_like(averaged)
        return grad, None, None, None


def broadcast(tensor, root_rank, name=None, process_set=global_process_set):
    """The tensor of the root rank (a global rank), as a new tensor."""
    if mpi_ops._is_compiling():
        return torch.ops.horovod.broadcast(tensor, root_rank, name, process_set.process_set_id)
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)


# --- alltoall -------------------------------------------------------------------------------------


class HorovodAlltoall(torch.autograd.Function):
    """The gradient goes back the way the rows came."""

    @staticmethod
    def forward(ctx, tensor, splits, name, process_set):
        output, received = mpi_ops.alltoall_async(tensor, splits, name, process_set).wait()
        ctx.process_set = process_set
        ctx.received = received.to(torch.int32).cpu()
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx, grad_output, _):
        grad, _ = HorovodAlltoall.apply(grad_output, ctx.received, None, ctx.process_set)
        return grad, None, None, None


def alltoall(tensor, splits=None, name=None, process_set=global_process_set):
    """Rows for each member out, rows from each in; with splits also how many came from each."""
    output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


# --- reducescatter --------------------------------------------------------------------------------


def _gathered(grad, op, process_set, factor):
    if op == Sum:
        factor = factor * process_set.size()
    return allgather(grad * factor if factor != 1 else grad, process_set=process_set)


class HorovodReducescatter(torch.autograd.Function):
    """The gradient is gathered, scaled as the tensor was."""

    @staticmethod
    def forward(ctx, tensor, name, op, process_set, prescale_factor, postscale_factor):
        ctx.arguments = (op, process_set, prescale_factor * postscale_factor)
        return mpi_ops.reducescatter_async(tensor, name, op, process_set, prescale_factor,
                                           postscale_factor).wait()

    @staticmethod
    def backward(ctx, grad_output):
        return _gathered(grad_output, *ctx.arguments), None, None, None, None, None


def reducescatter(tensor, name=None, compression=Compression.none, op=Average,
                  process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0):
    """This member's rows of the tensor reduced over all members."""
    wire, ctx = compression.compress(tensor)
    if mpi_ops._is_compiling():
        reduced = torch.ops.horovod.reducescatter(wire, name, op, prescale_factor, postscale_factor,
                                                  process_set.process_set_id)
    else:
        reduced = HorovodReducescatter.apply(wire, name, op, process_set, prescale_factor,
                                             postscale_factor)
    return compression.decompress(reduced, ctx)


class HorovodGroupedReducescatter(torch.autograd.Function):
    """As reducescatter, for each tensor."""

    @staticmethod
    def forward(ctx, name, op, process_set, prescale_factor, postscale_factor, *tensors):
        ctx.arguments = (op, process_set, prescale_factor * postscale_factor)
        return tuple(mpi_ops.grouped_reducescatter_async(tensors, name, op, process_set,
                                                         prescale_factor, postscale_factor).wait())

    @staticmethod
    def backward(ctx, *grad_outputs):
        grads = [_gathered(grad, *ctx.arguments) for grad in grad_outputs]
        return (None, None, None, None, None, *grads)


def grouped_reducescatter(tensors, name=None, compression=Compression.none, op=Average,
                          process_set=global_process_set, prescale_factor=1.0,
                          postscale_factor=1.0):
    """A list with this member's rows of each tensor reduced over all members."""
    wires, contexts = zip(*(compression.compress(tensor) for tensor in tensors))
    reduced = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor,
                                                postscale_factor, *wires)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts)]
