# SPDX-License-Identifier: Apache-2.0
"""What estimators do with a DataFrame before training: check it, write it as Parquet, look at it.

Programs with an estimator of their own use these too.
"""
import contextlib
import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from horovod.spark.common import constants
from horovod.spark.common.prepared import forget_places, place_for
from horovod.spark.data import Batch, ParquetReader


class Look(NamedTuple):
    """What the driver sees of prepared data."""
    n_rows: int
    n_bytes: int  # in memory, about
    row: Batch  # one of them
    schema: Any  # Arrow's


def to_list(value: Any, length: int) -> Optional[List[Any]]:
    """The list given, or one that has a single value so often."""
    if value is None:
        return None
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(given) == 1:
        given = given * length
    if len(given) != length:
        raise ValueError(f"{len(given)} values where {length} are expected")
    return given


def is_databricks() -> bool:
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def check_validation(validation: Any, df: Any = None) -> None:
    """ValueError unless it is None, a fraction, or a column of the DataFrame."""
    if isinstance(validation, (int, float)):
        if not 0 <= validation < 1:
            raise ValueError(f"validation is {validation}: a fraction must be in [0, 1)")
    elif isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise ValueError(f"the DataFrame has no column {validation}; it has "
                             f"{', '.join(df.columns)}")
    elif validation is not None:
        raise ValueError(f"validation is {validation!r}: a fraction, or the name of a column")


def columns_of(feature_columns: Sequence[str], label_columns: Sequence[str],
               sample_weight_col: Optional[str]) -> List[str]:
    """What is read in training, in order."""
    return [*feature_columns, *label_columns, *filter(None, [sample_weight_col])]


def plain_column(df: Any, name: str) -> Any:
    """The column as numbers or arrays of numbers; vectors of pyspark.ml as arrays."""
    from pyspark.ml.functions import vector_to_array

    kind = df.schema[name].dataType.typeName()
    column = df[name]
    return (vector_to_array(column) if kind == "vectorudt" else column).alias(name)


def split(df: Any, names: Sequence[str], validation: Any, random_seed: Optional[int]) -> List[Any]:
    """The columns for training, and for validation where that is wanted."""
    columns = [plain_column(df, name) for name in names]
    if isinstance(validation, str):
        marked = df.select(*columns, df[validation].cast("boolean").alias("__validation"))
        return [marked.filter(which).drop("__validation")
                for which in ("not __validation", "__validation")]
    data = df.select(*columns)
    if not validation:
        return [data]
    return data.randomSplit([1.0 - validation, float(validation)], random_seed or 0)


@contextlib.contextmanager
def prepare_data(num_processes: int, store: Any, df: Any, label_columns: Sequence[str] = (),
                 feature_columns: Sequence[str] = (), validation: Any = None,
                 sample_weight_col: Optional[str] = None, compress_sparse: bool = False,
                 partitions_per_process: int = 10, verbose: int = 0,
                 random_seed: Optional[int] = None) -> Iterator[Optional[int]]:
    """Writes the columns as Parquet into the store, unless they are there.

    Gives the number they are under, for store.get_train_data_path(number). Keep df until they have
    been read: the number is free again when the DataFrame is.
    """
    del compress_sparse, verbose
    check_validation(validation, df)
    columns = columns_of(feature_columns, label_columns, sample_weight_col)
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise ValueError(f"the DataFrame has no column {', '.join(missing)}; it has "
                         f"{', '.join(df.columns)}")
    n_files = max(num_processes * partitions_per_process, num_processes)
    place, idx = place_for(df, store.get_train_data_path(),
                           (columns, validation, random_seed, n_files))
    paths = store.get_train_data_path(idx), store.get_val_data_path(idx)
    with place.writing:
        if not place.is_written or not store.is_parquet_dataset(paths[0]):
            for part, path in zip(split(df, columns, validation, random_seed), paths):
                part.coalesce(n_files).write.mode("overwrite").parquet(path)
            place.is_written = True
    yield idx


def clear_training_cache() -> None:
    """Forgets what has been written: the next fit writes it again."""
    forget_places()


def look(store: Any, path: str, columns: Sequence[str], what: str) -> Look:
    """At prepared data, of training or validation as `what` says."""
    try:
        reader = ParquetReader(path, storage_options=store.storage_options)
    except ValueError as error:
        raise ValueError(f"the {what} set has no rows") from error
    with contextlib.closing(reader):
        missing = [name for name in columns if name not in reader.columns]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it has "
                             f"{', '.join(reader.columns)}")
        # Others may hold what makes no tensor: nobody will read them.
        return Look(reader.n_rows, reader.n_bytes, reader.sample(list(columns)), reader.schema)


def metadata_of(seen: Look) -> Dict[str, Dict[str, Any]]:
    """Shape and type of a row's value in each column."""
    return {name: {"dtype": str(values.dtype), "shape": int(values[:1].size),
                   "intermediate_format": constants.ARRAY if values.ndim > 1
                   else constants.NOCHANGE}
            for name, values in seen.row.items()}


def get_simple_meta_from_parquet(store: Any, label_columns: Sequence[str],
                                 feature_columns: Sequence[str],
                                 sample_weight_col: Optional[str] = None,
                                 dataset_idx: Optional[int] = None
                                 ) -> Tuple[int, int, Dict[str, Any], float]:
    """(rows to train on, rows to validate on, metadata of the columns, bytes of a row)."""
    columns = columns_of(feature_columns, label_columns, sample_weight_col)
    seen = look(store, store.get_train_data_path(dataset_idx), columns, "training")
    val_path = store.get_val_data_path(dataset_idx)
    n_val = (look(store, val_path, columns, "validation").n_rows
             if store.is_parquet_dataset(val_path) else 0)
    return seen.n_rows, n_val, metadata_of(seen), seen.n_bytes / seen.n_rows


def __getattr__(name: str) -> Any:
    raise AttributeError(f"horovod.spark.common.util has no {name}: data is prepared by "
                         "prepare_data() and read by horovod.spark.data.ParquetReader here")
