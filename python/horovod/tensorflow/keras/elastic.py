# SPDX-License-Identifier: Apache-2.0
"""Elastic training with tf.keras."""
import functools

import tensorflow as tf

from horovod._keras import elastic as _impl
from horovod._keras.callbacks import bind
from horovod.tensorflow.elastic import TensorFlowKerasState, run  # noqa: F401

_bind = functools.partial(bind, tf.keras, __name__)


class KerasState(TensorFlowKerasState):
    """A model with its optimizer, and plain values given by keyword."""

    def __init__(self, model, optimizer=None, **kwargs):
        super().__init__(model, optimizer, **kwargs)


CommitStateCallback = _bind(_impl.CommitStateCallback)
UpdateBatchStateCallback = _bind(_impl.UpdateBatchStateCallback)
UpdateEpochStateCallback = _bind(_impl.UpdateEpochStateCallback)
