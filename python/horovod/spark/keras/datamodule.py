# SPDX-License-Identifier: Apache-2.0
"""Batches for the estimator of Keras.

train_data() and val_data() give a tf.data.Dataset of {column: tensor}, which the estimator brings
into the model's shapes and goes through again when it ends; or whatever else model.fit() takes.
"""
from typing import Any

from horovod.spark.common import datamodule


class ParquetDataModule(datamodule.ParquetDataModule):
    """Datasets without end: fit() is told the number of steps."""

    def train_data(self) -> Any:
        return self.train_reader().tf_dataset()

    def val_data(self) -> Any:
        return self.val_reader().tf_dataset()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Readers stay open: threads of TensorFlow may be in them still."""


PetastormDataModule = ParquetDataModule  # its name where petastorm was the reader
