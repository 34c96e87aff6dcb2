# SPDX-License-Identifier: Apache-2.0
"""Finishing the step in which a rank was lost, with the ranks that are left.

Gradients are reduced in place, and a failure leaves some of them reduced, some not, and some half.
So each is kept as the backward pass has left it. After a failure the ranks that are left join the
next generation, see that all of them are in the same step, put their gradients back and reduce them
next generation, see that all are in the same step, put their gradients back and reduce them
had finished the step already, or was elsewhere, the step is done again as after any failure.
"""
import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import global_process_set


def can_finish(optimizer):
    """A DistributedOptimizer whose gradients all ranks reduce; Adasum is one step of its own."""
    return getattr(optimizer, "process_set", None) is global_process_set


def finish_steps_of(optimizer, watch, rejoin):
    """From now on; rejoin() returns if all ranks that are left are in the same step."""
    optimizer.keep_gradients(KeptGradients(rejoin))


class KeptGradients:
    """The gradients of a step as this rank has computed them."""

    def __init__(self, rejoin):
        self._rejoin = rejoin
        self._kept = {}  # memory of earlier steps is used again
        self._now = set()  # those of this step

    def keep(self, p):
        """Before it is submitted."""
        kept = self._kept.get(p)
        if kept is not None and not p.grad.is_sparse and kept.shape == p.grad.shape:
            kept.copy_(p.grad.detach())
        else:
            self._kept[p] = p.grad.detach().clone()
        self._now.add(p)

    def put_back(self, parameters):
        """After a failure, in the next generation; raises if the step cannot be finished."""
        self._rejoin()
        with torch.no_grad():
            for p in parameters:
                if p.requires_grad:
                    p.grad = self._kept[p].clone() if p in self._now else None

    def forget(self):
        """The step is done."""
        self._now.clear()
