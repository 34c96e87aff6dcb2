# SPDX-License-Identifier: Apache-2.0
"""Elastic training with Keras."""
import functools

import keras

from horovod._keras import elastic as _impl
from horovod._keras.backends import backend_of
from horovod._keras.callbacks import bind

_bind = functools.partial(bind, keras, __name__)


def run(func=None, *, checkpoint=None):
    """Decorator: func(state, ...) is run again after failures and changes of hosts.

    checkpoint: the path of state.commit(path=...); a job that begins goes on from the newest
    checkpoint there.
    """
    if func is None:
        return functools.partial(run, checkpoint=checkpoint)
    return backend_of(keras).elastic_run(func, checkpoint)


class KerasState(_impl.KerasState):
    """A model with its optimizer, and plain values given by keyword."""

    def __init__(self, model, optimizer=None, **kwargs):
        super().__init__(keras, model, optimizer, **kwargs)


CommitStateCallback = _bind(_impl.CommitStateCallback)
UpdateBatchStateCallback = _bind(_impl.UpdateBatchStateCallback)
UpdateEpochStateCallback = _bind(_impl.UpdateEpochStateCallback)
