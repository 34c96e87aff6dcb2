# SPDX-License-Identifier: Apache-2.0
"""Loaders of {column: PyTorch tensor} over a ParquetReader, each also with a thread.

| loader | going through it once gives |
|---|---|
| PytorchDataLoader | an epoch, or n_steps batches, in the next order |
| PytorchInfiniteDataLoader | n_steps batches from where the last time ended, or without end |
| PytorchInmemDataLoader | an epoch, of rows that were read once and for all |

Pytorch...AsyncDataLoader are the same with async_loader_queue_size and debug_data_loader in front,
as horovod.data says. The reader has batch size, shard and transform. A loader owns its reader while
it is gone through: a reader is for one thread.
"""
import itertools
from typing import Any, Dict, Iterator, Optional

import numpy as np

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.spark.data import Batch, ParquetReader, as_torch, join, take

Tensors = Dict[str, Any]


class PytorchDataLoader(BaseDataLoader):
    """n_steps: so many batches, where all rows once are not wanted; further ones are of the next
    order. first_epoch: the number of the first order of rows."""

    def __init__(self, reader: ParquetReader, n_steps: Optional[int] = None,
                 first_epoch: int = 0) -> None:
        self._reader = reader
        self._n_steps = n_steps
        self._next_epoch = first_epoch
        if n_steps:
            self._check_has_batches()

    def _check_has_batches(self) -> None:
        """Else it would be searched for one for ever."""
        if self._reader.steps_per_epoch == 0:
            raise ValueError(f"an epoch has no batches: {self._reader.rows_per_shard} rows do not "
                             f"fill one of {self._reader.batch_size}")

    def __len__(self) -> int:
        return self._reader.steps_per_epoch if self._n_steps is None else self._n_steps

    def _epoch(self) -> Iterator[Tensors]:
        number = self._next_epoch
        self._next_epoch += 1
        return self._reader.torch(number)

    def _endless(self) -> Iterator[Tensors]:
        return itertools.chain.from_iterable(self._epoch() for _ in itertools.count())

    def _iterate(self) -> Iterator[Tensors]:
        return itertools.islice(self._endless(), len(self))


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """Epoch after epoch. What is made ahead and not taken, where a loop is left early, is lost."""

    def __init__(self, reader: ParquetReader, n_steps: Optional[int] = None,
                 first_epoch: int = 0) -> None:
        super().__init__(reader, n_steps, first_epoch)
        self._check_has_batches()
        self._stream = self._endless()

    def __len__(self) -> int:
        if self._n_steps is None:
            raise TypeError("a loader without n_steps has no end, and so no length")
        return self._n_steps

    def _iterate(self) -> Iterator[Tensors]:
        return itertools.islice(self._stream, self._n_steps)


class PytorchInmemDataLoader(PytorchDataLoader):
    """Reads its share once, at the first batch; later epochs are other orders of the same rows."""

    def __init__(self, reader: ParquetReader, n_steps: Optional[int] = None, first_epoch: int = 0,
                 shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(reader, n_steps, first_epoch)
        self._shuffle = shuffle
        self._seed = seed
        self._rows: Optional[Batch] = None

    def _epoch(self) -> Iterator[Tensors]:
        if self._rows is None:
            self._rows = join(list(self._reader.epoch(0)))
        n_rows = len(next(iter(self._rows.values())))
        mixer = np.random.default_rng([self._seed, self._next_epoch])
        # An order in any case: a batch is then a copy, and what its user writes stays there.
        order = mixer.permutation(n_rows) if self._shuffle else np.arange(n_rows)
        self._next_epoch += 1
        for first in range(0, n_rows, self._reader.batch_size):
            end = min(first + self._reader.batch_size, n_rows)
            yield as_torch(take(self._rows, order, first, end))


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """Read ahead."""


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """Read ahead."""


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """Mixed ahead."""


# Our reader takes batches from row groups by itself: what petastorm had a class of its own for.
PetastormBatchedDataLoader = PytorchDataLoader
