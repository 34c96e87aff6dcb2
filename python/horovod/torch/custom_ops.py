# SPDX-License-Identifier: Apache-2.0
"""The collectives as operators of PyTorch, for torch.compile.

A compiled graph cannot call the extension directly. The functions of mpi_ops.py notice that they
are being compiled and use these operators instead; each has a fake (what shape comes out) and a
gradient. Versions of PyTorch without torch.library.custom_op compile around the collectives.
"""
from typing import Optional

import torch
from torch import Tensor

from horovod.common import process_sets
from horovod.common.basics import Average, Sum


def _set_of(process_set_id):
    if process_set_id == 0:
        return process_sets.global_process_set
    return process_sets._registered[process_set_id]


def _register():
    from horovod.torch import mpi_ops as ops

    define = torch.library.custom_op

    @define("horovod::allreduce", mutates_args=())
    def allreduce(tensor: Tensor, name: Optional[str], op: int, prescale: float, postscale: float,
                  process_set_id: int) -> Tensor:
        return ops.allreduce_async(tensor, None, name, op, prescale, postscale,
                                   _set_of(process_set_id)).wait()

    @allreduce.register_fake
    def _(tensor, name, op, prescale, postscale, process_set_id):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def keep_reduction(ctx, inputs, output):
        ctx.arguments = inputs[2:]

    def allreduce_backward(ctx, grad):
        return (torch.ops.horovod.allreduce(grad, None, *ctx.arguments), *[None] * 5)

    allreduce.register_autograd(allreduce_backward, setup_context=keep_reduction)

    @define("horovod::allreduce_", mutates_args={"tensor"})
    def allreduce_(tensor: Tensor, name: Optional[str], op: int, prescale: float, postscale: float,
                   process_set_id: int) -> None:
        ops.allreduce_async_(tensor, None, name, op, prescale, postscale,
                             _set_of(process_set_id)).wait()

    @allreduce_.register_fake
    def _(tensor, name, op, prescale, postscale, process_set_id):
        return None

    @define("horovod::broadcast", mutates_args=())
    def broadcast(tensor: Tensor, root_rank: int, name: Optional[str],
                  process_set_id: int) -> Tensor:
        return ops.broadcast_async(tensor, root_rank, name, _set_of(process_set_id)).wait()

    @broadcast.register_fake
    def _(tensor, root_rank, name, process_set_id):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def keep_root(ctx, inputs, output):
        ctx.root_rank, ctx.process_set_id = inputs[1], inputs[3]

    def broadcast_backward(ctx, grad):
        averaged = torch.ops.horovod.allreduce(grad, None, Average, 1.0, 1.0, ctx.process_set_id)
        return averaged * float(ops.rank() == ctx.root_rank), None, None, None

    broadcast.register_autograd(broadcast_backward, setup_context=keep_root)

    @define("horovod::allgather", mutates_args=())
    def allgather(tensor: Tensor, name: Optional[str], process_set_id: int) -> Tensor:
        return ops.allgather_async(tensor, name, _set_of(process_set_id)).wait()

    @allgather.register_fake
    def _(tensor, name, process_set_id):
        rows = torch.library.get_ctx().new_dynamic_size()
        return tensor.new_empty((rows, *tensor.shape[1:]))

    @define("horovod::allgather_backward", mutates_args=())
    def allgather_backward(grad: Tensor, rows: int, process_set_id: int) -> Tensor:
        from horovod.torch.autograd_ops import _own_rows
        return _own_rows(grad, rows, _set_of(process_set_id)).clone()

    @allgather_backward.register_fake
    def _(grad, rows, process_set_id):
        return grad.new_empty((rows, *grad.shape[1:]))

    def keep_rows(ctx, inputs, output):
        ctx.rows, ctx.process_set_id = inputs[0].shape[0], inputs[2]

    allgather.register_autograd(
        lambda ctx, grad: (torch.ops.horovod.allgather_backward(grad, ctx.rows, ctx.process_set_id),
                           None, None), setup_context=keep_rows)

    @define("horovod::reducescatter", mutates_args=())
    def reducescatter(tensor: Tensor, name: Optional[str], op: int, prescale: float,
                      postscale: float, process_set_id: int) -> Tensor:
        return ops.reducescatter_async(tensor, name, op, _set_of(process_set_id), prescale,
                                       postscale).wait()

    @reducescatter.register_fake
    def _(tensor, name, op, prescale, postscale, process_set_id):
        process_set = _set_of(process_set_id)
        size, rank = process_set.size(), process_set.rank()
        rows = tensor.shape[0] // size + (1 if rank < tensor.shape[0] % size else 0)
        return tensor.new_empty((rows, *tensor.shape[1:]))

    def reducescatter_backward(ctx, grad):
        op, prescale, postscale, process_set_id = ctx.arguments
        factor = prescale * postscale * (_set_of(process_set_id).size() if op == Sum else 1)
        return (torch.ops.horovod.allgather(grad * factor, None, process_set_id), *[None] * 5)

    reducescatter.register_autograd(reducescatter_backward, setup_context=keep_reduction)


if hasattr(torch.library, "custom_op"):
    _register()
