# SPDX-License-Identifier: Apache-2.0
"""Data written by petastorm: its arrays and images are read, its schema is never run as a program.

tests/spark/petastorm/rows has 20 rows that petastorm 0.13.1 itself has written (make.py is how);
other schemas are made here from classes of the same names.
"""
import collections
import io
import os
import pathlib
import pickle
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from horovod.spark import petastorm_format
from horovod.spark.data import ParquetReader

WRITTEN = pathlib.Path(__file__).parent / "petastorm" / "rows"
UnischemaField = collections.namedtuple("UnischemaField", "name numpy_dtype shape codec nullable")


class Unischema:
    def __init__(self, fields):
        self._name = "Test"
        self._fields = collections.OrderedDict((field.name, field) for field in fields)


class Codec:
    pass


@pytest.fixture
def petastorm(monkeypatch):
    """Modules with petastorm's names, so that pickles have them: {name of a codec: its class}."""
    unischema = types.ModuleType("petastorm.unischema")
    codecs = types.ModuleType("petastorm.codecs")
    for cls in (Unischema, UnischemaField):
        monkeypatch.setattr(cls, "__module__", "petastorm.unischema")
        setattr(unischema, cls.__name__, cls)
    found = {}
    for name in ("ScalarCodec", "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec",
                 "SomeNewCodec"):
        found[name] = type(name, (Codec,), {"__module__": "petastorm.codecs"})
        setattr(codecs, name, found[name])
    monkeypatch.setitem(sys.modules, "petastorm", types.ModuleType("petastorm"))
    monkeypatch.setitem(sys.modules, "petastorm.unischema", unischema)
    monkeypatch.setitem(sys.modules, "petastorm.codecs", codecs)
    return found


def write(folder, columns, schema, protocol=None):
    """Parquet with the schema beside it; schema is an object, or bytes."""
    data = schema if isinstance(schema, bytes) else pickle.dumps(schema, protocol)
    table = pa.table(columns)
    pa.parquet.write_table(table, folder / "part-0.parquet")
    pa.parquet.write_metadata(
        table.schema.with_metadata({petastorm_format.SCHEMA_KEY: data}),
        folder / petastorm_format.SCHEMA_FILE)
    return str(folder)


def saved(array, save=np.save):
    file = io.BytesIO()
    save(file, **{"arr": array})
    return file.getvalue()


def compressed(array):
    return saved(array, np.savez_compressed)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_arrays_and_scalars(petastorm, tmp_path, protocol):
    rows = [np.full((2, 3), i, np.float32) for i in range(5)]
    path = write(tmp_path, {"id": pa.array(range(5), pa.int32()), "matrix": list(map(saved, rows)),
                            "packed": list(map(compressed, rows)), "name": list("abcde")},
                 Unischema([
                     UnischemaField("id", np.uint8, (), petastorm["ScalarCodec"](), False),
                     UnischemaField("matrix", np.float32, (2, 3), petastorm["NdarrayCodec"](),
                                    False),
                     UnischemaField("packed", np.float32, (2, None),
                                    petastorm["CompressedNdarrayCodec"](), False),
                     UnischemaField("name", np.str_, (), None, False)]), protocol)
    batch = next(ParquetReader(path, batch_size=5, shuffle=False).epoch())
    assert batch["id"].dtype == np.uint8 and batch["id"].tolist() == list(range(5))
    assert batch["matrix"].dtype == np.float32 and batch["name"].tolist() == list("abcde")
    np.testing.assert_array_equal(batch["matrix"], np.stack(rows))
    np.testing.assert_array_equal(batch["packed"], np.stack(rows))


def test_what_petastorm_itself_has_written():
    reader = ParquetReader(str(WRITTEN), batch_size=20, shuffle=False)
    batch = next(reader.epoch())
    order = np.argsort(batch["id"])
    assert batch["id"][order].tolist() == list(range(20)) and batch["id"].dtype == np.int32
    assert batch["small"].dtype == np.uint8
    assert batch["matrix"].shape == (20, 4, 3) and batch["matrix"].dtype == np.float64
    assert batch["packed"].shape == (20, 8) and batch["packed"].dtype == np.int16
    assert batch["picture"].shape == (20, 6, 5, 3) and batch["picture"].dtype == np.uint8
    assert batch["grey"].shape == (20, 6, 5)
    for at, i in enumerate(batch["id"]):
        assert (batch["matrix"][at] == i / 2).all() and (batch["packed"][at] == -i).all()
        assert (batch["picture"][at] == [i, 2 * i, 3 * i]).all()  # red, green, blue
        assert (batch["grey"][at] == 10 * i).all() and batch["small"][at] == i
    assert abs(next(reader.torch())["picture"].float().mean() - 19.0) < 1e-3


def test_columns_that_are_not_asked_for_do_not_matter(petastorm, tmp_path):
    schema = Unischema([UnischemaField("id", np.int64, (), None, False),
                        UnischemaField("odd", np.int64, (), petastorm["SomeNewCodec"](), False)])
    path = write(tmp_path, {"id": [1, 2], "odd": [b"1", b"2"]}, schema)
    assert next(ParquetReader(path, ["id"], batch_size=2, shuffle=False).epoch())["id"].tolist() \
        == [1, 2]
    with pytest.raises(ValueError, match="'odd' was written by petastorm with its SomeNewCodec, "
                                         "which cannot be read here; ScalarCodec, NdarrayCodec"):
        ParquetReader(path)


def test_values_that_do_not_fit(petastorm, tmp_path):
    schema = Unischema([UnischemaField("x", np.int64, (None,), petastorm["NdarrayCodec"](), True)])
    for number, (values, words) in enumerate([
            ([saved(np.zeros(2, np.int64)), saved(np.zeros(3, np.int64))], "different shapes"),
            ([saved(np.zeros(2, np.int64)), None], "has no array in 1 rows"),
            ([b"x", b"y"], "is not what petastorm's NdarrayCodec writes"),
            ([saved(np.array([{}], object))] * 2, "is not what petastorm's NdarrayCodec writes")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(folder, {"x": pa.array(values, pa.binary())}, schema)
        with pytest.raises(ValueError, match=f"column 'x'.*{words}"):
            next(ParquetReader(path, batch_size=2).epoch())


class Attack:
    def __init__(self, call, *args):
        self._call = call, args

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("wrap", [lambda attack: attack, lambda attack: {"_fields": attack},
                                  lambda attack: Unischema([UnischemaField("x", attack, (), None,
                                                                           False)])])
def test_a_schema_is_not_run(petastorm, tmp_path, wrap):
    marker = tmp_path / "marker"
    attacks = [Attack(os.system, f"touch {marker}"), Attack(os.mkdir, str(marker)),
               Attack(eval, f"open({str(marker)!r}, 'w')"), Attack(exec, "raise SystemExit")]
    for number, attack in enumerate(attacks):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(folder, {"x": [1]}, wrap(attack))
        with pytest.raises(ValueError, match="a schema of petastorm's that cannot be understood"):
            ParquetReader(path)
        assert not marker.exists()


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps(1), pickle.dumps({"_fields": {}})])
def test_a_schema_that_is_none(tmp_path, data):
    with pytest.raises(ValueError, match="_common_metadata has a schema of petastorm's"):
        ParquetReader(write(tmp_path, {"x": [1]}, data))
