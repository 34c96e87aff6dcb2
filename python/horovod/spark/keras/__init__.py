# SPDX-License-Identifier: Apache-2.0
"""Keras models as estimators of pyspark.ml."""
from horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
