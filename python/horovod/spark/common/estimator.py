# SPDX-License-Identifier: Apache-2.0
"""What estimators of all frameworks do alike: fit() prepares data, trains, and wraps the model.

fit(df):  the columns go to Parquet in the store, vectors as arrays; the backend runs the
framework's train function, which reads them with horovod.spark.data; rank 0 hands back the history
and the model. transform(df) adds a column for each label, computed by a pandas UDF.
"""
import datetime
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from pyspark.ml import Estimator, Model

from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.params import TableParams
from horovod.spark.common.saving import Saved
from horovod.spark.data import Batch, ParquetReader


def as_list(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_device(kind: str, allgather_object: Callable[[Any], List[Any]]) -> None:
    """On every rank: a job of GPUs and CPUs would be as slow as its slowest, and unnoticed."""
    kinds = allgather_object(kind)
    if len(set(kinds)) > 1:
        raise RuntimeError("All ranks don't have same device type! They train on "
                           f"{', '.join(kinds)}, by rank")


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


class HorovodEstimator(TableParams, Saved, Estimator):
    """Subclasses give RUN_PREFIX, check_model() and train()."""

    RUN_PREFIX = "run"

    # --- For subclasses ------------------------------------------------------------------------

    def check_model(self) -> None:
        """ValueError if parameters do not fit together."""
        raise NotImplementedError

    def train(self, backend: Any, task: Dict[str, Any]) -> "HorovodModel":
        """Trains on what `task` says, and gives the model."""
        raise NotImplementedError

    # --- fit -----------------------------------------------------------------------------------

    def _check(self) -> None:
        get = self.getOrDefault
        if get("num_proc") is not None and get("backend") is not None:
            raise ValueError("num_proc and backend are both set: a backend has its own number of "
                             "processes")
        for name, words in (("model", "Model parameter is required"),
                            ("store", "Store parameter is required: where to keep prepared data"),
                            ("feature_cols", "feature_cols: which columns does the model take?"),
                            ("label_cols", "label_cols: which columns is the model to tell?")):
            if not get(name):
                raise ValueError(words)
        validation = get("validation")
        if isinstance(validation, (int, float)) and not 0 <= validation < 1:
            raise ValueError(f"validation is {validation}: a fraction must be in [0, 1)")
        self.check_model()

    def _columns(self) -> List[str]:
        columns = self.getFeatureCols() + self.getLabelCols()
        weight = self.getSampleWeightCol()
        return columns + [weight] if weight else columns

    def _backend(self) -> Any:
        return self.getBackend() or SparkBackend(self.getNumProc(), verbose=self.getVerbose())

    def _fit(self, df: Any) -> "HorovodModel":
        self._check()
        backend = self._backend()
        has_val = self._prepare(df, backend.num_processes())
        return self._train(backend, has_val, None)

    def fit_on_parquet(self, params: Optional[Dict] = None,
                       dataset_idx: Optional[int] = None) -> "HorovodModel":
        """Trains on what is in the store already."""
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        self._check()
        store = self.getStore()
        has_val = (self.getValidation() is not None
                   and store.is_parquet_dataset(store.get_val_data_path(dataset_idx)))
        return self._train(self._backend(), has_val, dataset_idx)

    def _prepare(self, df: Any, n_processes: int) -> bool:
        """Writes the columns as Parquet; is there a validation set?"""
        validation = self.getValidation()
        wanted = self._columns()
        marked = isinstance(validation, str)
        missing = [name for name in wanted + ([validation] if marked else [])
                   if name not in df.columns]
        if missing:
            raise ValueError(f"the DataFrame has no column {', '.join(missing)}; it has "
                             f"{', '.join(df.columns)}")
        data = df.select(*[plain_column(df, name) for name in wanted],
                         *([df[validation].cast("boolean").alias("__validation")] if marked
                           else []))
        seed = self.getRandomSeed()
        if marked:
            parts = [data.filter("not __validation").drop("__validation"),
                     data.filter("__validation").drop("__validation")]
        elif validation:
            parts = data.randomSplit([1.0 - validation, float(validation)], seed or 0)
        else:
            parts = [data]
        store = self.getStore()
        n_files = max(n_processes * self.getPartitionsPerProcess(), n_processes)
        for part, path, what in zip(parts, (store.get_train_data_path(),
                                            store.get_val_data_path()),
                                    ("training", "validation")):
            part.coalesce(n_files).write.mode("overwrite").parquet(path)
            try:
                ParquetReader(path, storage_options=store.storage_options).close()
            except ValueError as error:
                raise ValueError(f"the {what} set has no rows") from error
        return len(parts) == 2

    def _train(self, backend: Any, has_val: bool, idx: Optional[int]) -> "HorovodModel":
        store = self.getStore()
        run_id = self.getRunId() or (
            f"{self.RUN_PREFIX}_{datetime.datetime.now():%Y%m%d%H%M%S%f}")
        task = {row.name: self.getOrDefault(row.name) for row in self._table
                if row.name not in ("model", "optimizer", "backend", "num_proc")}
        task.update(
            run_id=run_id, columns=self._columns(), train_path=store.get_train_data_path(idx),
            val_path=store.get_val_data_path(idx) if has_val else None,
            checkpoint_path=store.get_checkpoint_path(run_id) if store.saving_runs() else None)
        return self.train(backend, task)


def plain_column(df: Any, name: str) -> Any:
    """The column as numbers or arrays of numbers; vectors of pyspark.ml as arrays."""
    from pyspark.ml.functions import vector_to_array

    kind = df.schema[name].dataType.typeName()
    column = df[name]
    return (vector_to_array(column) if kind == "vectorudt" else column).alias(name)


class HorovodModel(TableParams, Saved, Model):
    """Subclasses give predictor(), which may be pickled."""

    def predictor(self) -> Callable[[List[np.ndarray]], List[np.ndarray]]:
        """A function of the feature columns that gives a matrix for each label."""
        raise NotImplementedError

    def getHistory(self) -> Any:
        return self.getOrDefault("history")

    def setOutputCols(self, names: Sequence[str]) -> "HorovodModel":
        return self._set(output_columns=list(names))

    def getOutputCols(self) -> List[str]:
        return (self.getOrDefault("output_columns")
                or [f"{label}__output" for label in self.getOrDefault("label_columns")])

    def _transform(self, df: Any) -> Any:
        import pandas as pd
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql import functions as F

        names = self.getOutputCols()
        labels = self.getOrDefault("label_columns")
        taken = [name for name in names if name in df.columns]
        if taken:
            raise ValueError(f"the DataFrame already has a column {', '.join(taken)}; choose other "
                             "names with setOutputCols")
        predict = self.predictor()

        def outputs(batches: Iterator[Tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
            for batch in batches:
                columns = batch if isinstance(batch, tuple) else (batch,)  # one comes as it is
                found = predict([series_to_array(series) for series in columns])
                yield pd.DataFrame({f"o{i}": list(matrix.astype(np.float64))
                                    for i, matrix in enumerate(found)})

        schema = ", ".join(f"o{i} array<double>" for i in range(len(names)))
        udf = F.pandas_udf(outputs, f"struct<{schema.replace(' array', ': array')}>")
        features = [plain_column(df, name) for name in self.getOrDefault("feature_columns")]
        df = df.withColumn("__outputs", udf(*features))
        widths = self._widths(df)
        for i, (name, label) in enumerate(zip(names, labels)):
            column = F.col(f"__outputs.o{i}")
            if widths[i] > 1:
                column = array_to_vector(column)
            else:
                column = column[0]
                if label in df.columns and df.schema[label].dataType.typeName() in (
                        "byte", "short", "integer", "long"):
                    column = F.round(column).cast(df.schema[label].dataType)
            df = df.withColumn(name, column)
        return df.drop("__outputs")

    def _widths(self, df: Any) -> List[int]:
        first = df.select("__outputs").head()
        if first is None:
            return [1] * len(self.getOutputCols())
        return [len(first[0][i]) for i in range(len(self.getOutputCols()))]


def series_to_array(series: Any) -> np.ndarray:
    return np.stack(series.to_list()) if series.dtype == object else series.to_numpy()
