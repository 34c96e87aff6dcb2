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
    more = {"shuffle": True} if plain is PytorchInmemDataLoader else {}
    one = plain(read(path), limit_step_per_epoch=3, **more)
    other = ahead(size, False, read(path), limit_step_per_epoch=3, **more)
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
    some = loader(read(path), limit_step_per_epoch=2)
    assert len(some) == 2 and len(list(some)) == 2


def test_without_end(path):
    with_length = PytorchInfiniteDataLoader(read(path), limit_step_per_epoch=6)
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
    more = loader(read(path), limit_step_per_epoch=len(epochs) + 2)
    assert len(more) == len(epochs) + 2 and ids(more) == wanted
    with pytest.raises(ValueError, match="an epoch has no batches"):
        loader(ParquetReader(path, batch_size=64, drop_last=True), limit_step_per_epoch=3)


def test_as_programs_make_them(path):
    """reader, batch_size, shuffling_queue_capacity, ...: by position."""
    from horovod.spark.data_loaders import pytorch_data_loaders as old

    assert old.PytorchDataLoader is PytorchDataLoader
    loader = old.PytorchDataLoader(read(path, shuffle=False), 10, 0, "train", 2, True)
    assert ids(loader) == [list(range(10)), list(range(10, 20))]
    assert (loader.name, loader.batch_size, loader.limit_step_per_epoch) == ("train", 10, 2)
    mixed = sum(ids(old.PytorchDataLoader(read(path, shuffle=False), 10, 16)), [])
    assert mixed != list(range(30)) == sorted(mixed)
    ahead = old.PytorchAsyncDataLoader(reader=read(path), batch_size=15, async_loader_queue_size=2,
                                       shuffling_queue_capacity=0)
    assert [len(batch["id"]) for batch in ahead] == [15, 15]
    memory = old.PytorchInmemDataLoader(read(path, shuffle=False), 15, 3)
    assert ids(memory) == ids(memory) == [list(range(15)), list(range(15, 30))]
    with pytest.raises(TypeError, match="ParquetReader is expected as reader, not list"):
        old.PytorchDataLoader([], 10, 0)


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
