# SPDX-License-Identifier: Apache-2.0
"""Batches for the estimator of Lightning: those of PyTorch."""
from horovod.spark.torch.datamodule import ParquetDataModule, PetastormDataModule

__all__ = ["ParquetDataModule", "PetastormDataModule"]
