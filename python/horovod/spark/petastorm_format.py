# SPDX-License-Identifier: Apache-2.0
"""Columns that petastorm has written: arrays and images as bytes, told of in a schema of its own.

Its materialize_dataset writes them. The schema stands beside the data, in _common_metadata, as a
pickle. Whoever can write the data could put any program there, so it is read without being run:
every class or function it names becomes an inert record here, and what is not the record of a
schema is refused. Arrays are read without pickle too.
"""
import collections
import io
import pickle
from typing import Any, Callable, Dict, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

SCHEMA_FILE = "_common_metadata"
SCHEMA_KEY = b"dataset-toolkit.unischema.v1"


class Field(NamedTuple):
    dtype: str  # a name of NumPy's, or another if it is not a number
    codec: str  # the name of its class; "" if there is none


# --- The schema --------------------------------------------------------------------------------


class Record:
    """In the place of anything a pickle names: has its name and arguments, and does nothing."""
    path = ""

    def __new__(cls, *args: Any) -> "Record":
        record = super().__new__(cls)
        record.args = args  # type: ignore
        return record


def reconstruct(cls: type, base: Any, state: Any) -> Any:
    """What copyreg._reconstructor does in old pickles, for records only."""
    return cls(*(state or ())) if issubclass(cls, Record) else None


class SchemaReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "OrderedDict":
            return collections.OrderedDict
        if name == "_reconstructor":
            return reconstruct
        return type(name, (Record,), {"path": f"{module}.{name}"})


def parse_schema(data: bytes) -> Dict[str, Field]:
    """By column."""
    schema = SchemaReader(io.BytesIO(data)).load()
    fields = vars(schema)["_fields"]
    found = {}
    for name, field in fields.items():
        _, dtype, _, codec = field.args[:4]
        found[str(name)] = Field(dtype.__name__, type(codec).__name__ if codec is not None else "")
    return found


def read_schema(fs: pa.fs.FileSystem, root: str) -> Dict[str, Field]:
    """What petastorm says of the data in a folder; nothing, if it has not written it."""
    path = f"{root.rstrip('/')}/{SCHEMA_FILE}"
    if fs.get_file_info(path).type != pa.fs.FileType.File:
        return {}
    with fs.open_input_file(path) as file:
        metadata = pa.parquet.read_schema(file).metadata or {}
    if SCHEMA_KEY not in metadata:
        return {}
    try:
        return parse_schema(metadata[SCHEMA_KEY])
    except Exception as error:  # whatever bytes may do
        raise ValueError(f"{path} has a schema of petastorm's that cannot be understood "
                         f"({type(error).__name__}: {error}); write the data anew with plain "
                         "columns and lists, or remove the file if no column needs it") from error


# --- Values ------------------------------------------------------------------------------------


def decode_array(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)


def decode_compressed_array(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)["arr"]


def decode_image(data: bytes) -> np.ndarray:
    """Height and width, and three colours, red first, unless it is grey."""
    try:
        from PIL import Image
    except ImportError:
        try:
            import cv2
        except ImportError:
            raise ImportError("images written by petastorm need Pillow to be read: pip install "
                              "pillow") from None
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        return image if image.ndim == 2 else image[:, :, ::-1]
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB") if picture.mode == "P" else picture)


CODECS: Dict[str, Callable[[bytes], np.ndarray]] = {
    "NdarrayCodec": decode_array, "CompressedNdarrayCodec": decode_compressed_array,
    "CompressedImageCodec": decode_image}
PLAIN = ("", "ScalarCodec")  # stored as what they are


def check(name: str, field: Field) -> None:
    if field.codec not in (*PLAIN, *CODECS):
        raise ValueError(f"column {name!r} was written by petastorm with its {field.codec}, which "
                         f"cannot be read here; {', '.join([*PLAIN[1:], *CODECS])} can. Leave it "
                         "out with columns=, or write it anew as plain values or lists")


def decode(name: str, field: Field, column: pa.ChunkedArray) -> np.ndarray:
    """The arrays of all rows, stacked."""
    if column.null_count:
        raise ValueError(f"column {name!r} has no array in {column.null_count} rows; fill them "
                         "before training")
    arrays = []
    for value in column:
        try:
            arrays.append(CODECS[field.codec](value.as_py()))
        except ImportError:
            raise
        except Exception as error:  # of any library, about bytes that are not what they should be
            raise ValueError(f"column {name!r}: a value is not what petastorm's {field.codec} "
                             f"writes ({type(error).__name__}: {error})") from error
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ValueError(f"column {name!r} has arrays of different shapes, {shapes[0]} and "
                         f"{shapes[1]} for example; only arrays of one shape make a batch")
    return np.stack(arrays).astype(field.dtype, copy=False)


def as_declared(field: Field, values: np.ndarray) -> np.ndarray:
    """Numbers as the schema has them: Spark has no unsigned ones, nor float16."""
    kind = getattr(np, field.dtype, None)
    is_number = isinstance(kind, type) and issubclass(kind, (np.number, np.bool_))
    return values.astype(kind, copy=False) if is_number and values.dtype.kind in "biuf" else values
