# SPDX-License-Identifier: Apache-2.0
"""PyTorch models as estimators of pyspark.ml."""
from horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
