# SPDX-License-Identifier: Apache-2.0
"""Mistakes that let a job run and learn nothing, told once, by the first rank.

At the first step of a distributed optimizer ranks exchange a few bytes about each parameter anyway;
digests of parameters and gradients travel with them. Parameters that differ mean that they were not
broadcast; gradients that are all equal, that all ranks read the same data. A digest is of a sample
of the elements, so its cost does not grow with the model's.

An optimizer that is stepped without anything having been reduced trains each rank by itself.
PyTorch calls a hook before each step of any optimizer, from init() to shutdown().
"""
import os
import sys
import warnings
import zlib

import torch

try:
    from torch.optim.optimizer import register_optimizer_step_pre_hook as _register
except ImportError:  # a PyTorch that has no hooks for all optimizers
    _register = None

from horovod import _core
from horovod.common import basics
from horovod.common.exceptions import PACKAGE_FOLDER

DIGEST_BYTES = 4
SAMPLE = 32  # elements of a tensor
# Gradients of other data may well be equal if they consist of a few values such as 0 and 1.
LEAST_DISTINCT_VALUES = 4
_NOT_THE_USERS = (PACKAGE_FOLDER, os.path.dirname(torch.__file__) + os.sep)


def _warn(text):
    """About the line of the program, in which PyTorch or this package has called us."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{text} (HOROVOD_TRAINING_CHECKS=0 turns this check off)", stacklevel=level)


def _sample(tensor):
    flat = tensor.detach().reshape(-1)
    return flat[::max(1, flat.numel() // SAMPLE)][:SAMPLE].contiguous().cpu()


def _digest(sample):
    return zlib.crc32(sample.view(torch.uint8).numpy()).to_bytes(DIGEST_BYTES, "little")


class FirstStep:
    """What one optimizer tells and learns. Rows are bytes; the others' come as the largest of each.

    A digest is sent as it is and inverted: where the largest of both still are inverse, all ranks
    have sent the same. Ranks that have joined send zeros, which change nothing.
    """

    # of parameter and gradient, each as it is and inverted; number of the rank likewise
    ROW_BYTES = 4 * DIGEST_BYTES + 2

    def __init__(self, process_set):
        self._process_set = process_set
        self._gradients = {}  # parameter -> digest
        self._values = set()  # of gradients
        self._is_on = basics.training_checks_are_on()
        self._has_looked = False

    def note_gradient(self, p):
        """Before it is reduced."""
        if not self._is_on or p.grad.layout is not torch.strided or p.grad.numel() == 0:
            return
        sample = _sample(p.grad)
        self._gradients[p] = _digest(sample)
        if len(self._values) < LEAST_DISTINCT_VALUES:
            self._values.update(sample[sample.isfinite()].tolist())

    def row(self, p):
        """The bytes of a parameter."""
        number = (self._process_set.rank() + 1) % 256
        if not self._is_on or p.numel() == 0:
            sent = bytes(2 * DIGEST_BYTES)
        else:
            sent = _digest(_sample(p)) + self._gradients.get(p, bytes(DIGEST_BYTES))
        sent += bytes([number])
        return list(sent + bytes(255 - byte for byte in sent))

    def look_at(self, rows):
        """rows: (name of a parameter, the largest bytes of all ranks), in the model's order."""
        has_looked, self._has_looked = self._has_looked, True
        if not self._is_on or has_looked or self._process_set.rank() != 0:
            return
        half = self.ROW_BYTES // 2
        same = [[a == 255 - b for a, b in zip(row[:half], row[half:])] for _, row in rows]
        if all(one[-1] for one in same):  # nobody else has sent anything
            return
        differing = [name for (name, _), one in zip(rows, same) if not all(one[:DIGEST_BYTES])]
        if differing:
            n = len(differing) - 1
            more = f" and of {n} other{'s' if n > 1 else ''}" if n > 0 else ""
            _warn(f"The values of parameter '{differing[0]}'{more} differ between ranks at the "
                  "first step: each rank trains a model of its own. hvd.broadcast_parameters() is "
                  "missing: call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before "
                  "training.")
        elif len(self._values) >= LEAST_DISTINCT_VALUES \
                and all(all(one[DIGEST_BYTES:-1]) for one in same):
            _warn("The gradients of the first step are equal on all ranks: all ranks read the same "
                  "data, so the job learns no more than one rank would. Give each rank a part of "
                  "it, with torch.utils.data.DistributedSampler(dataset, num_replicas=hvd.size(), "
                  "rank=hvd.rank()) or a shard of the files.")


# --- Models that reduce by themselves -------------------------------------------------------------


def warn_of_ddp(names):
    """names: of the parameters, which DistributedDataParallel puts its own name in front of."""
    if _uses_torch_distributed() and all(name.startswith("module.") for name in names) \
            and basics.is_initialized() and basics.rank() == 0 and basics.training_checks_are_on():
        _warn("The parameters look like those of a DistributedDataParallel model, which reduces "
              "its gradients by itself: with hvd.DistributedOptimizer() they are reduced twice. "
              "Use one of them.")


def _uses_torch_distributed():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


# --- Ordinary optimizers --------------------------------------------------------------------------


class _Ordinary:
    """Watches for steps of optimizers that nobody reduces gradients for."""

    def __init__(self):
        self._handle = None
        self._n_reductions = 0

    def start(self):
        if _register is not None and self._handle is None and basics.size() > 1 \
                and basics.training_checks_are_on():
            self._n_reductions = _core.n_reductions()
            self._handle = _register(self._before_step)

    def stop(self):
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_step(self, optimizer, _args, _kwargs):
        from horovod.torch.optimizer import is_distributed

        before, self._n_reductions = self._n_reductions, _core.n_reductions()
        if is_distributed(optimizer) or before != self._n_reductions or _uses_torch_distributed():
            return
        self.stop()
        if basics.rank() == 0:
            _warn(f"{type(optimizer).__name__}.step() was called in a job of {basics.size()} "
                  "ranks, but nothing has reduced its gradients: each rank trains a model of its "
                  "own. Wrap the optimizer in hvd.DistributedOptimizer().")


_ordinary = _Ordinary()
basics.on_init(_ordinary.start)
basics.on_shutdown(_ordinary.stop)
