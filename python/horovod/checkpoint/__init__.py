# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: hvd.checkpoint.save() and load(), here for NumPy; docs/checkpoints.md.

horovod.torch, horovod.tensorflow and horovod.keras have the same for their tensors.
"""
from horovod.checkpoint import loading as _loading
from horovod.checkpoint import saving as _saving
from horovod.checkpoint.frameworks import NumpyFramework as _NumpyFramework
from horovod.common import basics as _basics

__all__ = ["load", "save"]

_basics.on_init(_saving.count_inits)


def face(framework):
    """save() and load() for the tensors of a framework."""

    def save(path, state, step, keep=3, wait=False):
        """Saves a state that is the same on all ranks, all of which call this.

        Returns when the state has been copied; writing goes on meanwhile. path: a directory or a
        URL that all ranks reach. state: a dictionary of models, optimizers, tensors, numbers. keep:
        how many checkpoints stay. wait: return when it is on the disk. The result has done() and
        wait().
        """
        return _saving.save(path, state, step, framework, keep, wait)

    def load(path, state=None, step=None):
        """The newest complete checkpoint, or that of a step: (step, state); None if there is none.

        All ranks call this; their number may be another one than when it was saved. state: as given
        to save(): models and optimizers in it are set to what was saved.
        """
        return _loading.load(path, framework, state, step)

    return save, load


save, load = face(_NumpyFramework())
