# SPDX-License-Identifier: Apache-2.0
"""Batches for the estimators of PyTorch and of Lightning.

train_data() and val_data() are gone through once for each epoch and give {column: tensor}; NumPy
arrays do as well.
"""
from typing import Any, Iterable, List, Optional

from horovod.spark.common import datamodule
from horovod.spark.data_loaders import PytorchAsyncDataLoader


class ParquetDataModule(datamodule.ParquetDataModule):
    """first_epoch: that of the first order of rows. Queues: batches read ahead by a thread."""

    def __init__(self, *args: Any, first_epoch: int = 0,
                 train_async_data_loader_queue_size: Optional[int] = None,
                 val_async_data_loader_queue_size: Optional[int] = None,
                 debug_data_loader: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_epoch = first_epoch
        self._train_queue = train_async_data_loader_queue_size or 0
        self._val_queue = val_async_data_loader_queue_size or 0
        self._debug = debug_data_loader
        self._loaders: List[PytorchAsyncDataLoader] = []

    def train_data(self) -> Iterable[Any]:
        return self._keep(PytorchAsyncDataLoader(
            self._train_queue, self._debug, self.train_reader(), name="train",
            limit_step_per_epoch=self.steps_per_epoch_train, first_epoch=self._first_epoch))

    def val_data(self) -> Iterable[Any]:
        return self._keep(PytorchAsyncDataLoader(
            self._val_queue, self._debug, self.val_reader(), name="val",
            limit_step_per_epoch=self.steps_per_epoch_val))

    def _keep(self, loader: PytorchAsyncDataLoader) -> PytorchAsyncDataLoader:
        self._loaders.append(loader)
        return loader

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for loader in self._loaders:
            loader.close_async_loader()
        super().__exit__(kind, error, trace)


PetastormDataModule = ParquetDataModule  # its name where petastorm was the reader
