# SPDX-License-Identifier: Apache-2.0
"""Loaders of {column: PyTorch tensor} over a ParquetReader, each also with a thread.

| loader | going through it once gives |
|---|---|
| PytorchDataLoader | an epoch, or limit_step_per_epoch batches, in the next order |
| PytorchInfiniteDataLoader | so many batches from where the last time ended, or without end |
| PytorchInmemDataLoader | an epoch, of rows that were read once and for all |

Pytorch...AsyncDataLoader are the same with async_loader_queue_size and debug_data_loader in front,
as horovod.data says. The reader has shard and transform. A loader owns its reader while it is gone
through: a reader is for one thread, and for one loader.
"""
import itertools
from typing import Any, Dict, Iterator, Optional

import numpy as np

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.spark.data import Batch, ParquetReader, as_torch, join, take

Tensors = Dict[str, Any]


class PytorchDataLoader(BaseDataLoader):
    """batch_size: None, that of the reader. shuffling_queue_capacity: rows are mixed within windows
    of so many, 0: not at all, None: as the reader does. limit_step_per_epoch: so many batches where
    all rows once are not wanted, -1; further ones are of the next order. name and verbose are for
    one's own use. first_epoch: the number of the first order of rows."""

    def __init__(self, reader: ParquetReader, batch_size: Optional[int] = None,
                 shuffling_queue_capacity: Optional[int] = None, name: str = "",
                 limit_step_per_epoch: int = -1, verbose: bool = False, *,
                 first_epoch: int = 0) -> None:
        if not isinstance(reader, ParquetReader):
            raise TypeError(f"a horovod.spark.data.ParquetReader is expected as reader, not "
                            f"{type(reader).__name__}")
        reader.set_batches(batch_size, shuffling_queue_capacity)
        self.reader = reader
        self.batch_size = reader.batch_size
        self.shuffling_queue_capacity = shuffling_queue_capacity
        self.name = name
        self.limit_step_per_epoch = limit_step_per_epoch
        self.verbose = verbose
        self._n_steps = limit_step_per_epoch if limit_step_per_epoch > 0 else None
        self._next_epoch = first_epoch
        if self._n_steps:
            self._check_has_batches()

    def _check_has_batches(self) -> None:
        """Else it would be searched for one for ever."""
        if self.reader.steps_per_epoch == 0:
            raise ValueError(f"an epoch has no batches: {self.reader.rows_per_shard} rows do not "
                             f"fill one of {self.reader.batch_size}")

    def __len__(self) -> int:
        return self.reader.steps_per_epoch if self._n_steps is None else self._n_steps

    def _epoch(self) -> Iterator[Tensors]:
        number = self._next_epoch
        self._next_epoch += 1
        return self.reader.torch(number)

    def _endless(self) -> Iterator[Tensors]:
        return itertools.chain.from_iterable(self._epoch() for _ in itertools.count())

    def _iterate(self) -> Iterator[Tensors]:
        return itertools.islice(self._endless(), len(self))


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """Epoch after epoch. What is made ahead and not taken, where a loop is left early, is lost."""

    def __init__(self, reader: ParquetReader, batch_size: Optional[int] = None,
                 shuffling_queue_capacity: Optional[int] = None, name: str = "",
                 limit_step_per_epoch: int = -1, verbose: bool = False, *,
                 first_epoch: int = 0) -> None:
        super().__init__(reader, batch_size, shuffling_queue_capacity, name, limit_step_per_epoch,
                         verbose, first_epoch=first_epoch)
        self._check_has_batches()
        self._stream = self._endless()

    def __len__(self) -> int:
        if self._n_steps is None:
            raise TypeError("a loader without limit_step_per_epoch has no end, and so no length")
        return self._n_steps

    def _iterate(self) -> Iterator[Tensors]:
        return itertools.islice(self._stream, self._n_steps)


class PytorchInmemDataLoader(PytorchDataLoader):
    """Reads its share once, at the first batch; with shuffle every epoch is another order of it."""

    def __init__(self, reader: ParquetReader, batch_size: Optional[int] = None,
                 num_epochs: Optional[int] = None, name: str = "", shuffle: bool = False,
                 limit_step_per_epoch: int = -1, verbose: bool = False, *, first_epoch: int = 0,
                 seed: int = 0) -> None:
        super().__init__(reader, batch_size, None, name, limit_step_per_epoch, verbose,
                         first_epoch=first_epoch)
        self.num_epochs = num_epochs  # as many as are asked for
        self._shuffle = shuffle
        self._seed = seed
        self._rows: Optional[Batch] = None

    def _epoch(self) -> Iterator[Tensors]:
        if self._rows is None:
            self._rows = join(list(self.reader.epoch(0)))
        n_rows = len(next(iter(self._rows.values())))
        mixer = np.random.default_rng([self._seed, self._next_epoch])
        # An order in any case: a batch is then a copy, and what its user writes stays there.
        order = mixer.permutation(n_rows) if self._shuffle else np.arange(n_rows)
        self._next_epoch += 1
        for first in range(0, n_rows, self.reader.batch_size):
            end = min(first + self.reader.batch_size, n_rows)
            yield as_torch(take(self._rows, order, first, end))


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """Read ahead."""


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """Read ahead."""


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """Mixed ahead."""


# Our reader takes batches from row groups by itself: what petastorm had a class of its own for.
PetastormBatchedDataLoader = PytorchDataLoader
