# SPDX-License-Identifier: Apache-2.0
"""Callbacks for keras; horovod._keras.callbacks has them."""
import functools

import keras

from horovod._keras import callbacks as _impl
from horovod._keras import checkpoint as _checkpoint

_bind = functools.partial(_impl.bind, keras, __name__)

BroadcastGlobalVariablesCallback = _bind(_impl.BroadcastGlobalVariablesCallback)
MetricAverageCallback = _bind(_impl.MetricAverageCallback)
ReportCallback = _bind(_impl.ReportCallback)
LearningRateScheduleCallback = _bind(_impl.LearningRateScheduleCallback)
LearningRateWarmupCallback = _bind(_impl.LearningRateWarmupCallback)
CheckpointCallback = _bind(_checkpoint.CheckpointCallback)


class BestModelCheckpoint(_impl.best_model_checkpoint(keras, __name__)):
    """Keeps the best model so far; whoever uses it sets filepath before training."""

    def __init__(self, monitor="val_loss", verbose=0, mode="auto", save_freq="epoch",
                 save_weights_only=False):
        super().__init__(monitor, verbose, save_weights_only, mode, save_freq)
