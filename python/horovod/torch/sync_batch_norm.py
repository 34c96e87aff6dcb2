# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm: batch normalisation over the batches of all ranks, on the CPU as well.

Each rank gives mean, variance and number of its rows in one allgather; they combine exactly. The
backward pass needs two sums over all ranks, which travel in one allreduce.
"""
import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.common.basics import Sum, size
from horovod.torch.mpi_ops import allgather_async, allreduce_


class SyncBatchNorm(_BatchNorm):
    """In the place of torch.nn.BatchNorm1d, 2d and 3d: statistics are those of all ranks."""

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True,
                 track_running_stats=True):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input):
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input):
        self._check_input_dim(input)
        momentum = self.momentum if self.momentum is not None else 0.0
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # a cumulative average
                momentum = 1.0 / float(self.num_batches_tracked)
        needs_batch = self.training or not self.track_running_stats
        if not needs_batch or size() == 1:
            return functional.batch_norm(
                input, self.running_mean if self.track_running_stats else None,
                self.running_var if self.track_running_stats else None, self.weight, self.bias,
                needs_batch, momentum, self.eps)
        return _SyncBatchNorm.apply(input, self.weight, self.bias, self.running_mean,
                                    self.running_var, self.eps, momentum)


def _combine(mean, var, count):
    """Mean and variance over all ranks, and how many rows they are of."""
    row = torch.cat([mean, var, mean.new_tensor([count])]).unsqueeze(0)
    rows = allgather_async(row, "sync_batch_norm.statistics").wait()
    means, variances, counts = rows.split([mean.numel(), mean.numel(), 1], dim=1)
    total = counts.sum()
    all_mean = (means * counts).sum(0) / total
    all_var = ((variances + (means - all_mean) ** 2) * counts).sum(0) / total
    return all_mean, all_var, total


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, running_mean, running_var, eps, momentum):
        channels = input.shape[1]
        dims = [d for d in range(input.dim()) if d != 1]
        shape = [1, channels] + [1] * (input.dim() - 2)
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = values.numel() // channels
        if count > 0:
            var, mean = torch.var_mean(values, dims, unbiased=False)
        else:
            var, mean = values.new_zeros(channels), values.new_zeros(channels)
        mean, var, total = _combine(mean, var, count)
        invstd = torch.rsqrt(var + eps)
        if running_mean is not None:
            unbiased = var * (total / (total - 1).clamp(min=1))
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
        normalised = (values - mean.view(shape)) * invstd.view(shape)
        ctx.save_for_backward(normalised, weight, invstd, total)
        ctx.dims, ctx.shape = dims, shape
        output = normalised
        if weight is not None:
            output = output * weight.view(shape) + bias.view(shape)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        normalised, weight, invstd, total = ctx.saved_tensors
        dims, shape = ctx.dims, ctx.shape
        grad = grad_output.to(normalised.dtype)
        sum_dy = grad.sum(dims)
        sum_dy_x = (grad * normalised).sum(dims)
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = allreduce_(torch.cat([sum_dy, sum_dy_x]), name="sync_batch_norm.sums", op=Sum)
            mean_dy, mean_dy_x = (sums / total).chunk(2)
            scale = invstd if weight is None else invstd * weight
            grad_input = (grad - mean_dy.view(shape) - normalised * mean_dy_x.view(shape)) \
                * scale.view(shape)
            grad_input = grad_input.to(grad_output.dtype)
        # Those of weight and bias stay local: the optimizer reduces them with all the others.
        grad_weight = sum_dy_x.to(weight.dtype) if weight is not None else None
        grad_bias = sum_dy.to(weight.dtype) if weight is not None else None
        return grad_input, grad_weight, grad_bias, None, None, None, None
