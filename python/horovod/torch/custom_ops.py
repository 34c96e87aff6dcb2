# SPDX-License-Identifier: Apache-2.0
"""The collectives as operators of PyTorch, for torch.compile.

A compiled graph cannot call the extension directly. The functions of mpi_ops.py notice that they
are being compiled and use these operators instead; each has a fake (what shape comes out) and a
gradient. Versions of PyTorch without torch.library.custom_op compile around the collectives.
"""
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from horovod.common import process_sets
from horovod.common.basics import Average, Sum


def _set_of(process_set_id):
    if process_set_id == 0:
        return process_sets.global_process_set
    return process_sets._registered[process_set_id]


def _define(name, function, fake, backward=None, keep=None, mutates=()):
    """One operator: fake() tells what comes out, backward(ctx, *grads) has the gradient."""
    op = torch.library.custom_op(f"horovod::{name}", function, mutates_args=mutates)
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=keep)
    return op


def _nothing(*_):
    return None


def _alike(tensor):
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _some_rows(tensor):
    """As many rows as only the other ranks know."""
    rows = torch.library.get_ctx().new_dynamic_size()
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _keep_all(ctx, inputs, output):
    ctx.arguments = inputs[1:]


def _register_same_shape():
    from horovod.torch import mpi_ops as ops

    def allreduce(tensor: Tensor, name: Optional[str], op: int, prescale: float, postscale: float,
                  process_set_id: int) -> Tensor:
        return ops.allreduce_async(tensor, None, name, op, prescale, postscale,
                                   _set_of(process_set_id)).wait()

    def allreduce_(tensor: Tensor, name: Optional[str], op: int, prescale: float, postscale: float,
                   process_set_id: int) -> None:
        ops.allreduce_async_(tensor, None, name, op, prescale, postscale,
                             _set_of(process_set_id)).wait()

    def grouped_allreduce(tensors: List[Tensor], name: Optional[str], op: int, prescale: float,
                          postscale: float, process_set_id: int) -> List[Tensor]:
        return list(ops.grouped_allreduce_async(tensors, None, name, op, prescale, postscale,
                                                _set_of(process_set_id)).wait())

    def grouped_allreduce_(tensors: List[Tensor], name: Optional[str], op: int, prescale: float,
                           postscale: float, process_set_id: int) -> None:
        ops.grouped_allreduce_async_(tensors, None, name, op, prescale, postscale,
                                     _set_of(process_set_id)).wait()

    def broadcast(tensor: Tensor, root_rank: int, name: Optional[str],
                  process_set_id: int) -> Tensor:
        return ops.broadcast_async(tensor, root_rank, name, _set_of(process_set_id)).wait()

    def broadcast_(tensor: Tensor, root_rank: int, name: Optional[str],
                   process_set_id: int) -> None:
        ops.broadcast_async_(tensor, root_rank, name, _set_of(process_set_id)).wait()

    def barrier(process_set_id: int) -> None:
        ops.barrier(_set_of(process_set_id))

    def allreduce_backward(ctx, grad):
        return (torch.ops.horovod.allreduce(grad, None, *ctx.arguments[1:]), *[None] * 5)

    def grouped_allreduce_backward(ctx, grads):
        return (torch.ops.horovod.grouped_allreduce(grads, None, *ctx.arguments[1:]), *[None] * 5)

    def broadcast_backward(ctx, grad):
        root_rank, _, process_set_id = ctx.arguments
        averaged = torch.ops.horovod.allreduce(grad, None, Average, 1.0, 1.0, process_set_id)
        return averaged * float(ops.rank() == root_rank), None, None, None

    _define("allreduce", allreduce, lambda tensor, *_: _alike(tensor), allreduce_backward,
            _keep_all)
    _define("allreduce_", allreduce_, _nothing, mutates={"tensor"})
    _define("grouped_allreduce", grouped_allreduce,
            lambda tensors, *_: [_alike(tensor) for tensor in tensors],
            grouped_allreduce_backward, _keep_all)
    _define("grouped_allreduce_", grouped_allreduce_, _nothing, mutates={"tensors"})
    _define("broadcast", broadcast, lambda tensor, *_: _alike(tensor), broadcast_backward,
            _keep_all)
    _define("broadcast_", broadcast_, _nothing, mutates={"tensor"})
    # Said to mutate what it does not have, so that it is neither dropped nor moved.
    torch.library.custom_op("horovod::barrier", barrier, mutates_args="unknown").register_fake(
        _nothing)


def _register_other_shape():
    from horovod.torch import autograd_ops, mpi_ops as ops

    def allgather(tensor: Tensor, name: Optional[str], process_set_id: int) -> Tensor:
        return ops.allgather_async(tensor, name, _set_of(process_set_id)).wait()

    def allgather_backward(grad: Tensor, rows: int, process_set_id: int) -> Tensor:
        return autograd_ops._own_rows(grad, rows, _set_of(process_set_id)).clone()

    def grouped_allgather(tensors: List[Tensor], name: Optional[str],
                          process_set_id: int) -> List[Tensor]:
        return list(ops.grouped_allgather_async(tensors, name, _set_of(process_set_id)).wait())

    def alltoall(tensor: Tensor, splits: Optional[Tensor], name: Optional[str],
                 process_set_id: int) -> Tuple[Tensor, Tensor]:
        return ops.alltoall_async(tensor, splits, name, _set_of(process_set_id)).wait()

    def reducescatter(tensor: Tensor, name: Optional[str], op: int, prescale: float,
                      postscale: float, process_set_id: int) -> Tensor:
        return ops.reducescatter_async(tensor, name, op, _set_of(process_set_id), prescale,
                                       postscale).wait()

    def grouped_reducescatter(tensors: List[Tensor], name: Optional[str], op: int, prescale: float,
                              postscale: float, process_set_id: int) -> List[Tensor]:
        return ops.grouped_reducescatter_async(tensors, name, op, _set_of(process_set_id), prescale,
                                               postscale).wait()

    def keep_rows(ctx, inputs, output):
        ctx.rows, ctx.process_set_id = inputs[0].shape[0], inputs[2]

    def own_rows(grad, rows, process_set_id):
        return torch.ops.horovod.allgather_backward(grad, rows, process_set_id)

    def keep_rows_of_each(ctx, inputs, output):
        ctx.rows, ctx.process_set_id = [tensor.shape[0] for tensor in inputs[0]], inputs[2]

    def keep_splits(ctx, inputs, output):
        ctx.process_set_id = inputs[3]
        ctx.save_for_backward(output[1])

    def alltoall_backward(ctx, grad, _):
        back, _ = torch.ops.horovod.alltoall(grad, ctx.saved_tensors[0], None, ctx.process_set_id)
        return back, None, None, None

    def own_share(tensor, name, op, prescale, postscale, process_set_id):
        process_set = _set_of(process_set_id)
        n = process_set.size()  # the first members get a row more where the rows are uneven
        rows = (tensor.shape[0] + n - 1 - process_set.rank()) // n
        return tensor.new_empty((rows, *tensor.shape[1:]))

    def gathered(ctx, grad):
        _, op, prescale, postscale, process_set_id = ctx.arguments
        factor = prescale * postscale * (_set_of(process_set_id).size() if op == Sum else 1)
        return torch.ops.horovod.allgather(grad * factor, None, process_set_id)

    _define("allgather_backward", allgather_backward,
            lambda grad, rows, _: grad.new_empty((rows, *grad.shape[1:])))
    _define("allgather", allgather, lambda tensor, *_: _some_rows(tensor),
            lambda ctx, grad: (own_rows(grad, ctx.rows, ctx.process_set_id), None, None),
            keep_rows)
    _define("grouped_allgather", grouped_allgather,
            lambda tensors, *_: [_some_rows(tensor) for tensor in tensors],
            lambda ctx, grads: ([own_rows(grad, rows, ctx.process_set_id)
                                 for grad, rows in zip(grads, ctx.rows)], None, None),
            keep_rows_of_each)
    _define("alltoall", alltoall,
            lambda tensor, splits, name, process_set_id: (
                _some_rows(tensor),
                torch.empty(_set_of(process_set_id).size(), dtype=torch.int32,
                            device=None if splits is None else splits.device)),
            alltoall_backward, keep_splits)
    _define("reducescatter", reducescatter, own_share,
            lambda ctx, grad: (gathered(ctx, grad), *[None] * 5), _keep_all)
    _define("grouped_reducescatter", grouped_reducescatter,
            lambda tensors, *rest: [own_share(tensor, *rest) for tensor in tensors],
            lambda ctx, grads: ([gathered(ctx, grad) for grad in grads], *[None] * 5), _keep_all)


if hasattr(torch.library, "custom_op"):
    _register_same_shape()
    _register_other_shape()
