# SPDX-License-Identifier: Apache-2.0
"""Where the batches of an estimator come from: a DataModule, made and entered on every rank.

An estimator's data_module is a class. It gets what the estimator knows as arguments of these names,
more of them in later versions: a class of your own takes **kwargs. All ranks must be able to make
steps_per_epoch_train and steps_per_epoch_val batches.
"""
import abc
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from horovod.spark.data import Batch, ParquetReader

SHUFFLE_ROWS = 1 << 16  # where shuffle_buffer_size does not say


class DataModule(abc.ABC):
    """transform_fn is the estimator's transformation_fn, of a row as a dict; schema_fields are the
    columns it needs."""

    def __init__(self, train_dir: str, val_dir: Optional[str], num_train_epochs: int = 1,
                 has_val: bool = True, train_batch_size: int = 32, val_batch_size: int = 32,
                 shuffle: bool = True, transform_fn: Optional[Callable] = None,
                 inmemory_cache_all: bool = False, cur_shard: int = 0, shard_count: int = 1,
                 schema_fields: Optional[Sequence[str]] = None,
                 storage_options: Optional[Dict[str, Any]] = None, steps_per_epoch_train: int = 1,
                 steps_per_epoch_val: int = 1, verbose: bool = True, **kwargs: Any) -> None:
        self.train_dir = train_dir
        self.val_dir = val_dir
        self.num_train_epochs = num_train_epochs
        self.has_val = has_val
        self.train_batch_size = train_batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.transform_fn = transform_fn
        self.inmemory_cache_all = inmemory_cache_all
        self.cur_shard = cur_shard
        self.shard_count = shard_count
        self.schema_fields = schema_fields
        self.storage_options = storage_options
        self.steps_per_epoch_train = steps_per_epoch_train
        self.steps_per_epoch_val = steps_per_epoch_val
        self.verbose = verbose
        self.kwargs = kwargs  # what only some estimators know

    def __enter__(self) -> "DataModule":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Nothing to close, unless a subclass has something."""

    @abc.abstractmethod
    def train_data(self) -> Any:
        """What the framework goes through in training."""

    @abc.abstractmethod
    def val_data(self) -> Any:
        """The same in validation; called only if there is a validation set."""


class ParquetDataModule(DataModule):
    """Through horovod.spark.data; subclasses say in which form."""

    def __init__(self, *args: Any, seed: Optional[int] = None, shuffle_rows: int = SHUFFLE_ROWS,
                 batch_transform_fn: Optional[Callable] = None,
                 removed_fields: Optional[Sequence[str]] = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transform = (pandas_transform(batch_transform_fn)
                           or row_transform(self.transform_fn, removed_fields or []))
        self._seed = seed
        self._shuffle_rows = shuffle_rows
        self._readers: List[ParquetReader] = []

    def train_reader(self) -> ParquetReader:
        return self._open(self.train_dir, self.train_batch_size, self.shuffle)

    def val_reader(self) -> ParquetReader:
        return self._open(self.val_dir, self.val_batch_size, False)

    def _open(self, path: Any, batch_size: int, shuffle: bool) -> ParquetReader:
        reader = ParquetReader(path, self.schema_fields, batch_size, self.cur_shard,
                               self.shard_count, self._seed, shuffle, self._shuffle_rows,
                               transform=self._transform,
                               cache=self.inmemory_cache_all,
                               storage_options=self.storage_options)
        self._readers.append(reader)
        return reader

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for reader in self._readers:
            reader.close()


def row_transform(fn: Optional[Callable], removed: Sequence[str] = ()
                  ) -> Optional[Callable[[Batch], Batch]]:
    """A function of a row, {column: value}, as one of a batch."""
    if fn is None:
        return None

    def transform(batch: Batch) -> Batch:
        rows = [fn(dict(zip(batch, values))) for values in zip(*batch.values())]
        if not all(isinstance(row, dict) for row in rows):
            raise TypeError("transformation_fn must give a row back, a dict of columns, not "
                            f"{type(rows[0]).__name__}; a function of a DataFrame is for "
                            "batch_transformation_fn")
        return {name: np.stack([np.asarray(row[name]) for row in rows])
                for name in rows[0] if name not in removed}

    return transform


def pandas_transform(fn: Optional[Callable]) -> Optional[Callable[[Batch], Batch]]:
    """A function of a DataFrame as one of a batch."""
    if fn is None:
        return None

    def transform(batch: Batch) -> Batch:
        import pandas as pd

        frame = fn(pd.DataFrame({name: list(values) if values.ndim > 1 else values
                                 for name, values in batch.items()}))
        return {name: np.stack(frame[name].to_list()) if frame[name].dtype == object
                else frame[name].to_numpy() for name in frame.columns}

    return transform


def steps_per_epoch(task: Dict[str, Any], n_ranks: int, whole_only: bool = False
                    ) -> Tuple[int, int]:
    """Batches a rank makes in an epoch of training and of validation, if not told otherwise.

    whole_only: an incomplete last one is left out in training, unless it is the only one."""
    rows = -(-task["train_rows"] // n_ranks)
    size = task["batch_size"]
    train = max(rows // size, 1) if whole_only else -(-rows // size)
    val = -(-(-(-task["val_rows"] // n_ranks)) // val_batch_size(task))
    return task["train_steps_per_epoch"] or train, task["validation_steps_per_epoch"] or val


def val_batch_size(task: Dict[str, Any]) -> int:
    return task["val_batch_size"] or task["batch_size"]


def make_data_module(cls: Callable[..., Any], task: Dict[str, Any], rank: int, n_ranks: int,
                     steps: Tuple[int, int], **more: Any) -> Any:
    """The module of a rank, as the parameters of the estimator say."""
    return cls(train_dir=task["train_path"], val_dir=task["val_path"],
               num_train_epochs=task["epochs"], has_val=task["val_path"] is not None,
               train_batch_size=task["batch_size"], val_batch_size=val_batch_size(task),
               shuffle=task["shuffle"], transform_fn=task["transformation_fn"],
               inmemory_cache_all=task["inmemory_cache_all"], cur_shard=rank, shard_count=n_ranks,
               schema_fields=task["columns"], storage_options=task["store"].storage_options,
               steps_per_epoch_train=steps[0], steps_per_epoch_val=steps[1],
               verbose=bool(task["verbose"]), seed=task["random_seed"],
               shuffle_rows=task["shuffle_buffer_size"] or SHUFFLE_ROWS,
               batch_transform_fn=task["batch_transformation_fn"],
               removed_fields=task["transformation_removed_fields"], **more)
