# SPDX-License-Identifier: Apache-2.0
"""Callbacks for tf.keras; horovod._keras.callbacks has them."""
import functools

import tensorflow as tf

from horovod._keras import callbacks as _impl
from horovod._keras import checkpoint as _checkpoint

_bind = functools.partial(_impl.bind, tf.keras, __name__)

BroadcastGlobalVariablesCallback = _bind(_impl.BroadcastGlobalVariablesCallback)
MetricAverageCallback = _bind(_impl.MetricAverageCallback)
ReportCallback = _bind(_impl.ReportCallback)
LearningRateScheduleCallback = _bind(_impl.LearningRateScheduleCallback)
LearningRateWarmupCallback = _bind(_impl.LearningRateWarmupCallback)
CheckpointCallback = _bind(_checkpoint.CheckpointCallback)
BestModelCheckpoint = _impl.best_model_checkpoint(tf.keras, __name__)
