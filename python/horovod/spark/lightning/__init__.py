# SPDX-License-Identifier: Apache-2.0
"""Modules of PyTorch Lightning as estimators of pyspark.ml."""
from horovod.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
