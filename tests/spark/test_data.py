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
    with pytest.raises(ValueError, match="'a' of type int64 has empty values in 1 places"):
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


def write(path, columns, row_group_size):
    pa.parquet.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return str(path)


def whole(reader, epoch=0):
    """The columns of an epoch, sorted by id."""
    batches = list(reader.epoch(epoch))
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    order = np.argsort(columns["id"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


@pytest.fixture
def kinds(tmp_path_factory):
    """A column of each kind, 50 rows in row groups of 7, and what is to come out."""
    n = 50
    numbers = np.arange(n)
    made = {
        "id": pa.array(numbers),
        "flag": pa.array((numbers % 3 == 0).tolist()),
        "small": pa.array(numbers, pa.int8()),
        "unsigned": pa.array(numbers, pa.uint16()),
        "half": pa.array(numbers.astype(np.float16), pa.float16()),
        "gaps": pa.array([None if i % 5 == 0 else i / 2 for i in numbers], pa.float32()),
        "text": pa.array([None if i % 7 == 0 else f"text {i}" for i in numbers]),
        "bits": pa.array([[i % 2 == 0, i % 3 == 0] for i in numbers], pa.list_(pa.bool_())),
        "fixed": pa.array([[i, -i, 2 * i] for i in numbers], pa.list_(pa.int32(), 3)),
        "large": pa.array([[i / 4] for i in numbers], pa.large_list(pa.float64())),
        "words": pa.array([[f"a{i}", f"b{i}"] for i in numbers], pa.list_(pa.string())),
        "nothing": pa.array([[] for _ in numbers], pa.list_(pa.int32())),
    }
    return write(tmp_path_factory.mktemp("kinds") / "kinds.parquet", made, 7), made


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size, shuffle_rows", [(1, 1), (4, 1), (7, 14), (9, 20), (64, 1)])
def test_kinds_of_columns(kinds, shuffle, batch_size, shuffle_rows):
    """Batches that do not divide row groups are put together from several chunks."""
    path, made = kinds
    reader = ParquetReader(path, batch_size=batch_size, shuffle=shuffle, shuffle_rows=shuffle_rows)
    seen = whole(reader)
    types = {"flag": np.bool_, "small": np.int8, "unsigned": np.uint16, "half": np.float16,
             "gaps": np.float32, "text": object, "bits": np.bool_, "fixed": np.int32,
             "large": np.float64, "words": object, "nothing": np.int32}
    for name, kind in types.items():
        assert seen[name].dtype == kind, name
        for found, wanted in zip(seen[name].tolist(), made[name].to_pylist()):
            if name == "gaps" and wanted is None:
                assert np.isnan(found)
            else:
                assert found == wanted, name
    assert seen["fixed"].shape == (50, 3) and seen["nothing"].shape == (50, 0)


def test_a_column_of_many_chunks(tmp_path):
    """A row group of long strings or lists comes in several chunks: here by hand."""
    from horovod.spark import data

    parts = [pa.array([[1, 2], [3, 4]], pa.list_(pa.int16())), pa.array([[5, 6]],
                                                                        pa.list_(pa.int16()))]
    joined = data.to_numpy("v", pa.chunked_array(parts))
    assert joined.dtype == np.int16 and joined.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.to_numpy("v", pa.chunked_array([[1, 2], [3]])).tolist() == [1, 2, 3]
    assert data.to_numpy("v", pa.chunked_array([[True], [False]])).tolist() == [True, False]
    assert data.to_numpy("v", pa.chunked_array([["a"], [None]])).tolist() == ["a", None]
    # A part of a chunk begins in the middle of its memory.
    assert data.to_numpy("v", pa.chunked_array(parts).slice(1, 2)).tolist() == [[3, 4], [5, 6]]
    assert data.to_numpy("v", pa.chunked_array([[1, 2, 3]]).slice(1)).tolist() == [2, 3]


@pytest.mark.parametrize("column, words", [
    (pa.array([True, None]), "'v' of type bool has empty values in 1 places"),
    (pa.array([1, None], pa.uint8()), "'v' of type uint8 has empty values"),
    (pa.array([[1, 2], [None, 4]]), "'v' of type int64 has empty values in 1 places"),
    (pa.array([[1, 2], None]), "'v' has lists of different lengths, or none"),
    (pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), "'v' has lists of different lengths, or"),
    (pa.array([[[1]], [[2]]]), "'v' has lists of list<")])
def test_columns_without_a_tensor_are_told(tmp_path, column, words):
    path = write(tmp_path / "odd.parquet", {"v": column}, 10)
    with pytest.raises(ValueError, match=words):
        next(ParquetReader(path).epoch())


@pytest.mark.parametrize("n_rows, row_group, n_shards, batch_size", [
    (5, 5, 8, 2), (1, 1, 4, 3), (100, 100, 16, 7), (29, 10, 4, 30), (64, 3, 5, 8)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_shapes_of_shards(tmp_path, n_rows, row_group, n_shards, batch_size, drop_last):
    """More shards than rows or row groups, a row group over several shards, huge batches."""
    path = write(tmp_path / "x.parquet", {"id": np.arange(n_rows)}, row_group)
    seen = set()
    for shard in range(n_shards):
        reader = ParquetReader(path, batch_size=batch_size, shard=shard, n_shards=n_shards,
                               drop_last=drop_last, shuffle_rows=1)
        per_shard = -(-n_rows // n_shards)
        wanted = [batch_size] * (per_shard // batch_size)
        if per_shard % batch_size and not drop_last:
            wanted.append(per_shard % batch_size)
        batches = ids(reader, 1)
        assert [len(batch) for batch in batches] == wanted
        assert reader.steps_per_epoch == len(wanted)
        seen |= {row for batch in batches for row in batch}
    if not drop_last:
        assert seen == set(range(n_rows))


def test_what_spark_hides_is_not_read(folder, tmp_path):
    """A writer at work, or one that was killed, leaves a folder of parts."""
    (tmp_path / "_temporary" / "0").mkdir(parents=True)
    write(tmp_path / "_temporary" / "0" / "part.parquet", {"id": np.arange(9)}, 10)
    (tmp_path / "day=1").mkdir()
    write(tmp_path / "day=1" / "part.parquet", {"id": np.arange(200, 205)}, 10)
    assert ParquetReader(folder, ["id"]).n_rows == 108


def test_row_groups_without_rows(tmp_path):
    """Arrow writes one where there is nothing, Spark none."""
    nothing = pa.table({"id": pa.array([], pa.int64())})
    pa.parquet.write_table(nothing, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no Parquet files with rows"):
        ParquetReader(str(tmp_path))
    with pa.parquet.ParquetWriter(tmp_path / "b.parquet", nothing.schema) as file:
        for table in (nothing, pa.table({"id": [5, 6]})):
            file.write_table(table)
    reader = ParquetReader(str(tmp_path), shuffle=False)
    assert reader.sample(["id"])["id"].tolist() == [5] and ids(reader) == [[5, 6]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_a_transform_may_write(folder, shuffle, cache):
    """Into what it is given; the next epoch is as the file is all the same."""
    def spoil(batch):
        for values in batch.values():
            values[...] = values * 0 + 7 if values.dtype != object else "x"
        return batch

    reader = ParquetReader(folder, batch_size=8, shuffle=shuffle, cache=cache, transform=spoil)
    for epoch in range(2):
        assert all((batch["x"] == 7).all() for batch in reader.epoch(epoch))
    reader._transform = None
    assert sorted(sum(ids(reader, 0), [])) == list(range(103))


def test_tensors_may_be_written_to(folder, recwarn):
    torch = pytest.importorskip("torch")
    reader = ParquetReader(folder, ["id", "x", "vector"], batch_size=5, shuffle=False, cache=True)
    for batch in reader.torch():
        for values in batch.values():
            values.zero_()
    assert sum((batch["id"].tolist() for batch in reader.torch()), []) == list(range(103))
    assert not [w for w in recwarn if "writable" in str(w.message)]
    assert next(reader.torch())["x"].dtype == torch.float32
    with pytest.raises(TypeError, match="column 'name' has values of NumPy's type object"):
        next(ParquetReader(folder).torch())


def test_as_a_dataset_of_tensorflow(kinds, folder):
    tf = pytest.importorskip("tensorflow")
    path, made = kinds
    columns = ["id", "flag", "words", "fixed"]
    batches = list(ParquetReader(path, columns, 8, shuffle=False).tf_dataset(epochs=2))
    assert len(batches) == 14 and batches[0]["words"].dtype == tf.string
    assert batches[6]["fixed"].shape == (2, 3) and batches[0]["flag"].dtype == tf.bool
    assert [i for batch in batches for i in batch["id"].numpy().tolist()] == list(range(50)) * 2
    assert batches[1]["words"].numpy()[0].tolist() == [b"a8", b"b8"]
    endless = ParquetReader(folder, ["id"], 50).tf_dataset().take(7)
    assert [len(batch["id"]) for batch in endless] == [50, 50, 3] * 2 + [50]
    with pytest.raises(ValueError, match="an epoch has no batches: 103 rows do not fill one"):
        ParquetReader(folder, ["id"], 200, drop_last=True).tf_dataset()
