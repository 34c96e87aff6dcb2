# SPDX-License-Identifier: Apache-2.0
"""Batch normalization over the batches of all ranks."""
import tensorflow as tf

from horovod.common import basics
from horovod.tensorflow.collectives import allreduce
from horovod.tensorflow.mpi_ops import Average, is_elastic

_KERAS_3 = not hasattr(tf.keras.layers.BatchNormalization, "_calculate_mean_and_var")


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """tf.keras.layers.BatchNormalization whose statistics are those of all ranks together.

    Ranks must have batches of one size: every rank counts the same.
    """

    def __init__(self, fused=False, **kwargs):
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if not _KERAS_3:
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs, *args, **kwargs):
        """Mean and variance over ranks, from the means of values and of their squares."""
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if basics.size() == 1 and not is_elastic():
            return mean, variance
        both = tf.stack([mean, variance + tf.square(mean)])
        mean, mean_of_squares = tf.unstack(allreduce(both, op=Average, name="sync_batch_norm"))
        return mean, mean_of_squares - tf.square(mean)
