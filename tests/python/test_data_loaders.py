# SPDX-License-Identifier: Apache-2.0
"""Loaders of tensors from Parquet: which rows, how many batches, alike with a thread."""
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

torch = pytest.importorskip("torch")

from horovod.spark import data_loaders  # noqa: E402
from horovod.spark.data import ParquetReader  # noqa: E402
from horovod.spark.data_loaders import (  # noqa: E402
    PetastormBatchedDataLoader, PytorchAsyncDataLoader, PytorchDataLoader,
    PytorchInfiniteAsyncDataLoader, PytorchInfiniteDataLoader, PytorchInmemAsyncDataLoader,
    PytorchInmemDataLoader)


@pytest.fixture
def path(tmp_path):
    """30 rows in row groups of 4."""
    rows = np.arange(30)
    pa.parquet.write_table(pa.table({"id": rows, "x": rows * 0.5}), tmp_path / "rows.parquet",
                           row_group_size=4)
    return str(tmp_path)


def read(path, **more):
    return ParquetReader(path, batch_size=8, seed=5, **more)


def ids(batches):
    return [batch["id"].tolist() for batch in batches]


PAIRS = [(PytorchDataLoader, PytorchAsyncDataLoader),
         (PytorchInfiniteDataLoader, PytorchInfiniteAsyncDataLoader),
         (PytorchInmemDataLoader, PytorchInmemAsyncDataLoader)]


@pytest.mark.parametrize("plain, ahead", PAIRS)
@pytest.mark.parametrize("size", [0, 3])
def test_a_thread_changes_nothing(path, plain, ahead, size):
    one, other = plain(read(path), 3), ahead(size, False, read(path), 3)
    seen = [ids(one) for _ in range(4)]
    assert seen == [ids(other) for _ in range(4)]
    assert all(len(batches) == 3 == len(one) == len(other) for batches in seen)
    assert seen[0] != seen[1]


@pytest.mark.parametrize("loader", [PytorchDataLoader, PytorchInmemDataLoader,
                                    PetastormBatchedDataLoader])
def test_every_epoch_has_every_row(path, loader):
    made = loader(read(path))
    for _ in range(3):
        batches = list(made)
        assert [len(batch["id"]) for batch in batches] == [8, 8, 8, 6] and len(made) == 4
        assert sorted(sum(ids(batches), [])) == list(range(30))
        assert all(torch.equal(batch["x"], batch["id"] * 0.5) for batch in batches)
    assert len(loader(read(path), 2)) == 2 and len(list(loader(read(path), 2))) == 2


def test_without_end(path):
    with_length = PytorchInfiniteDataLoader(read(path), 6)
    parts = [ids(with_length) for _ in range(2)]  # 12 batches of the epochs, which have 4
    endless = PytorchInfiniteDataLoader(read(path))
    assert parts[0] + parts[1] == ids(itertools.islice(endless, 12))
    epochs = PytorchDataLoader(read(path))
    assert parts[0] + parts[1] == ids(epochs) + ids(epochs) + ids(epochs)
    with pytest.raises(TypeError, match="no length"):
        len(endless)
    with pytest.raises(ValueError, match="30 rows do not fill one of 64"):
        PytorchInfiniteDataLoader(ParquetReader(path, batch_size=64, drop_last=True))


@pytest.mark.parametrize("loader", [PytorchDataLoader, PytorchInmemDataLoader])
def test_more_steps_than_an_epoch_has(path, loader):
    """The rows come again, in the next order."""
    epochs = loader(read(path))
    wanted = (ids(epochs) + ids(epochs))[:len(epochs) + 2]
    more = loader(read(path), len(epochs) + 2)
    assert len(more) == len(epochs) + 2 and ids(more) == wanted
    with pytest.raises(ValueError, match="an epoch has no batches"):
        loader(ParquetReader(path, batch_size=64, drop_last=True), 3)


def test_an_epoch_to_begin_with(path):
    late = PytorchDataLoader(read(path), first_epoch=1)
    early = PytorchDataLoader(read(path))
    assert ids(early) != ids(late) == ids(early)


def test_memory_is_read_once_and_may_be_written(path):
    reader = read(path, shard=1, n_shards=2)
    loader = PytorchInmemDataLoader(reader, shuffle=False)
    first = list(loader)
    reader.close()
    reader.epoch = None  # whoever reads again fails
    for batch in first:
        batch["x"] += 1
    again = list(loader)
    assert ids(again) == ids(first) and len(sum(ids(again), [])) == 15
    assert all(torch.equal(batch["x"], batch["id"] * 0.5) for batch in again)


def test_all_loaders_are_tested():
    known = {loader for pair in PAIRS for loader in pair}
    made = {value for name, value in vars(data_loaders).items() if name.startswith("Pytorch")}
    assert made == known
