# SPDX-License-Identifier: Apache-2.0
"""The Parquet reader: every rank the same number of batches, every row seen, the same again."""
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from horovod.spark.data import ParquetReader, stretch


@pytest.fixture
def folder(tmp_path):
    """103 rows in three files, row groups of 10; and what Spark leaves beside them."""
    for number, (first, n) in enumerate([(0, 40), (40, 33), (73, 30)]):
        rows = np.arange(first, first + n)
        pa.parquet.write_table(pa.table({
            "id": rows, "x": (rows * 0.5).astype(np.float32), "name": [f"row {i}" for i in rows],
            "vector": pa.array([[float(i), float(-i)] for i in rows], pa.list_(pa.float32()))}),
            tmp_path / f"part-{number}.parquet", row_group_size=10)
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".part-0.parquet.crc").write_text("x")
    return str(tmp_path)


def ids(reader, epoch=0):
    return [batch["id"].tolist() for batch in reader.epoch(epoch)]


@pytest.mark.parametrize("n_shards", [1, 2, 3, 5, 16, 103])
@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_shards_are_equal_and_miss_nothing(folder, n_shards, batch_size):
    seen = []
    shapes = set()
    for shard in range(n_shards):
        reader = ParquetReader(folder, batch_size=batch_size, shard=shard, n_shards=n_shards)
        batches = ids(reader)
        assert len(batches) == reader.steps_per_epoch
        shapes.add(tuple(len(batch) for batch in batches))
        seen += [row for batch in batches for row in batch]
    assert len(shapes) == 1
    assert set(seen) == set(range(103))
    assert len(seen) - 103 < n_shards


def test_seeds_and_epochs(folder):
    reader = ParquetReader(folder, batch_size=8, seed=5)
    assert ids(reader, 1) == ids(ParquetReader(folder, batch_size=8, seed=5), 1)
    assert ids(reader, 0) != ids(reader, 1)
    assert ids(reader, 0) != ids(ParquetReader(folder, batch_size=8, seed=6), 0)
    plain = ParquetReader(folder, batch_size=8, shuffle=False)
    assert sum(ids(plain), []) == list(range(103))


def test_what_is_kept_in_memory_is_the_same(folder):
    kept = ParquetReader(folder, ["id"], batch_size=8, n_shards=2, cache=True)
    read = ParquetReader(folder, ["id"], batch_size=8, n_shards=2)
    assert [ids(kept, epoch) for epoch in range(3)] == [ids(read, epoch) for epoch in range(3)]
    assert len(kept._cached) > 0


def test_drop_last(folder):
    reader = ParquetReader(folder, batch_size=10, n_shards=2, drop_last=True)
    assert reader.rows_per_shard == 52 and reader.steps_per_epoch == 5
    assert [len(batch) for batch in ids(reader)] == [10] * 5


def test_columns_stay_together(folder):
    reader = ParquetReader(folder, ["vector", "id", "x", "name"], batch_size=9, shuffle_rows=25)
    for batch in reader.epoch(3):
        assert list(batch) == ["vector", "id", "x", "name"]
        assert batch["vector"].shape == (len(batch["id"]), 2) and batch["x"].dtype == np.float32
        assert (batch["x"] == batch["id"] * 0.5).all()
        assert (batch["vector"][:, 1] == -batch["id"]).all()
        assert batch["name"].tolist() == [f"row {i}" for i in batch["id"]]


def test_a_single_file_a_url_and_a_transform(folder):
    def double(batch):
        return {"id": batch["id"] * 2}

    reader = ParquetReader(f"file://{folder}/part-1.parquet", ["id"], batch_size=40, shuffle=False,
                           transform=double)
    assert ids(reader) == [list(range(80, 146, 2))]


def test_through_fsspec(folder):
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(folder + "/part-2.parquet", "/data/part-2.parquet")
    assert ParquetReader("memory:///data", ["id"]).n_rows == 30


def test_what_cannot_be_is_told(folder, tmp_path):
    with pytest.raises(ValueError, match="no column y; it has id, x, name, vector"):
        ParquetReader(folder, ["y"])
    with pytest.raises(ValueError, match="shard 2 of 2"):
        ParquetReader(folder, shard=2, n_shards=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no Parquet files"):
        ParquetReader(str(tmp_path / "empty"))
    odd = str(tmp_path / "odd.parquet")
    pa.parquet.write_table(pa.table({"a": pa.array([1, None, 3]), "b": [[1], [2, 3], [4]]}), odd)
    with pytest.raises(ValueError, match="'a' of type int64 has empty values in 1 rows"):
        next(ParquetReader(odd, ["a"]).epoch())
    with pytest.raises(ValueError, match="'b' has lists of different lengths"):
        next(ParquetReader(odd, ["b"]).epoch())


def test_stretches_go_round():
    pieces = stretch([2, 0, 1], [5, 3, 4], 10, 6)
    assert pieces == [(1, 1, 2), (2, 0, 4)]


def test_as_torch_tensors(folder):
    torch = pytest.importorskip("torch")
    batch = next(ParquetReader(folder, ["id", "vector"], batch_size=4).torch())
    assert isinstance(batch["vector"], torch.Tensor) and batch["vector"].shape == (4, 2)
