# SPDX-License-Identifier: Apache-2.0
"""Whether what a TorchState holds is where the last whole step left it.

A failure ends a step before its gradients are applied, so weights and optimizer are still those of
the step before, at no cost; only buffers, such as the statistics of BatchNorm, have seen a forward
pass more, and are kept aside. Where that cannot be told, the last commit counts:

- there is not exactly one optimizer, or the failure came while it was applying (Adasum does both);
- the script does not note in the state how far it is, step by step: it would begin its epoch anew
  with weights from the middle of it.
"""
import torch

_PLAIN = (bool, int, float, str, bytes, type(None))


def is_plain(value):
    """Numbers, texts and what is made of them: what a failed step cannot leave half changed."""
    if isinstance(value, dict):
        return all(map(is_plain, value.keys())) and all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


class StepWatch:
    """Follows the steps of an optimizer; position() tells how far the script says it is."""

    def __init__(self, optimizer, modules, position):
        self._modules, self._position = modules, position
        self._is_applying = False
        self._buffers = []
        self._last_position = None
        self.n_done = 0  # steps since all ranks had the same state
        self._n_steps = 0  # since the last commit
        self._n_unnoted = 0  # of them those after which the script was where it had been
        self._optimizer, self._handles = optimizer, []
        if hasattr(optimizer, "step_watch"):  # a DistributedOptimizer; PyTorch's hooks would count
            optimizer.step_watch = self  # the wait for gradients as a part of applying them
        else:
            self._handles = [optimizer.register_step_pre_hook(lambda *_: self.begin()),
                             optimizer.register_step_post_hook(lambda *_: self.end())]

    def remove(self):
        if hasattr(self._optimizer, "step_watch"):
            self._optimizer.step_watch = None
        for handle in self._handles:
            handle.remove()

    def note_commit(self):
        self._n_steps = self._n_unnoted = 0

    def begin(self):
        """Weights are about to change."""
        self._is_applying = True

    def end(self):
        """They have; a whole step is done."""
        self._is_applying = False
        self.n_done += 1
        self._n_steps += 1
        position = self._position()
        self._n_unnoted += position == self._last_position
        self._last_position = position
        self._buffers = [(buffer, buffer.detach().clone()) for module in self._modules
                         for buffer in module.buffers()]

    def go_to_last_step(self):
        """True: everything is as the last whole step left it."""
        if self._is_applying or self._n_steps == 0 or self._n_unnoted > 0:
            self._is_applying = False
            return False
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        return True
