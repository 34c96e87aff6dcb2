# SPDX-License-Identifier: Apache-2.0
"""What estimators of all frameworks do alike: fit() prepares data, trains, and wraps the model.

fit(df):  the columns go to Parquet in the store, vectors as arrays; the backend runs the
framework's train function, which reads them with horovod.spark.data; rank 0 hands back the history
and the model. transform(df) adds a column for each label, computed by a pandas UDF.
"""
import datetime
import math
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from pyspark.ml import Estimator, Model

from horovod.spark.common import util
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.params import EstimatorParams, ModelParams
from horovod.spark.common.serialization import Saved
from horovod.spark.common.util import Look, plain_column
from horovod.spark.data import Batch


def as_list(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_device(kind: str, allgather_object: Callable[[Any], List[Any]]) -> None:
    """On every rank: a job of GPUs and CPUs would be as slow as its slowest, and unnoticed."""
    kinds = allgather_object(kind)
    if len(set(kinds)) > 1:
        raise RuntimeError("All ranks don't have same device type! They train on "
                           f"{', '.join(kinds)}, by rank")


class HorovodEstimator(EstimatorParams, Saved, Estimator):
    """Subclasses give RUN_PREFIX, check_model(), train(), input_sizes() and get_model_class().

    A class that derives from an estimator may replace get_model_class(), _get_model_kwargs() and
    _get_or_create_backend().
    """

    RUN_PREFIX = "run"

    # --- For subclasses ------------------------------------------------------------------------

    def check_model(self) -> None:
        """ValueError if parameters do not fit together."""
        raise NotImplementedError

    def train(self, backend: Any, task: Dict[str, Any]) -> "HorovodModel":
        """Trains on what `task` says, and gives the model."""
        raise NotImplementedError

    def input_sizes(self) -> List[Optional[int]]:
        """How many numbers of a row each input of the model takes, in order, as far as it says."""
        raise NotImplementedError

    def get_model_class(self) -> type:
        """Of what fit() returns: a HorovodModel."""
        raise NotImplementedError

    # --- fit -----------------------------------------------------------------------------------

    def _check(self) -> None:
        get = self.getOrDefault
        if get("num_proc") is not None and get("backend") is not None:
            raise ValueError("num_proc and backend are both set: a backend has its own number of "
                             "processes")
        for name, words in (("model", "Model parameter is required"),
                            ("store", "Store parameter is required: where to keep prepared data"),
                            ("feature_cols", "feature_cols is required: what the model takes"),
                            ("label_cols", "label_cols is required: what the model predicts")):
            if not get(name):
                raise ValueError(words)
        util.check_validation(get("validation"))
        if get("transformation_fn") is not None and get("batch_transformation_fn") is not None:
            raise ValueError("transformation_fn and batch_transformation_fn are both set: give "
                             "only one of them")
        source = get("data_module")
        if source is not None and not callable(source):
            raise ValueError(f"data_module is {source!r}: it must be a class, such as one of "
                             "horovod.spark.common.datamodule.DataModule")
        self.check_model()

    def _columns(self) -> List[str]:
        return util.columns_of(self.getFeatureCols(), self.getLabelCols(),
                               self.getSampleWeightCol())

    def _get_or_create_backend(self) -> Any:
        return self.getBackend() or SparkBackend(self.getNumProc(), verbose=self.getVerbose())

    def _fit(self, df: Any) -> "HorovodModel":
        self._check()
        backend = self._get_or_create_backend()
        with util.prepare_data(
                backend.num_processes(), self.getStore(), df, self.getLabelCols(),
                self.getFeatureCols(), self.getValidation(), self.getSampleWeightCol(),
                partitions_per_process=self.getPartitionsPerProcess(),
                random_seed=self.getRandomSeed()) as idx:
            return self._train(backend, bool(self.getValidation()), idx)

    def fit_on_parquet(self, params: Optional[Dict] = None,
                       dataset_idx: Optional[int] = None) -> "HorovodModel":
        """Trains on what is in the store already."""
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        self._check()
        store = self.getStore()
        has_val = (self.getValidation() is not None
                   and store.is_parquet_dataset(store.get_val_data_path(dataset_idx)))
        return self._train(self._get_or_create_backend(), has_val, dataset_idx)

    def _check_sizes(self, row: Batch) -> None:
        if self.getTransformationFn() or self.getBatchTransformationFn():
            return  # the model takes what that makes of the columns
        for name, wanted in zip(self.getFeatureCols(), self.input_sizes()):
            if wanted not in (None, row[name].size):
                raise ValueError(f"column {name} has {row[name].size} numbers in a row, but the "
                                 f"model takes {wanted}")

    def _train(self, backend: Any, has_val: bool, idx: Optional[int]) -> "HorovodModel":
        store = self.getStore()
        run_id = self.getRunId() or (
            f"{self.RUN_PREFIX}_{datetime.datetime.now():%Y%m%d%H%M%S%f}")
        task = {row.name: self.getOrDefault(row.name) for row in self._table
                if row.name not in ("model", "optimizer", "backend", "num_proc")}
        train_path = store.get_train_data_path(idx)
        val_path = store.get_val_data_path(idx) if has_val else None
        seen = util.look(store, train_path, self._columns(), "training")
        self._check_sizes(seen.row)
        task.update(
            run_id=run_id, columns=self._columns(), train_path=train_path, val_path=val_path,
            train_rows=seen.n_rows,
            val_rows=util.look(store, val_path, self._columns(), "validation").n_rows
            if val_path else 0, metadata=util.metadata_of(seen),
            checkpoint_path=store.get_checkpoint_path(run_id) if store.saving_runs() else None)
        model = self.train(backend, task)
        model.remember(seen)
        return model


# Labels that outputs are rounded for: Arrow's name of the type, and Spark's.
WHOLE_TYPES = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint"}


def size_of(shape: Sequence[Optional[int]]) -> Optional[int]:
    """The numbers of one row in a shape whose first is the batch; None if it leaves that open."""
    sizes = [-1 if size is None else size for size in shape[1:]]
    return math.prod(sizes) if min(sizes, default=0) >= 0 else None


class HorovodModel(ModelParams, Saved, Model):
    """Subclasses give predictor(), which may be pickled."""

    def predictor(self) -> Callable[[List[np.ndarray]], List[np.ndarray]]:
        """A function of the feature columns that gives a matrix for each label."""
        raise NotImplementedError

    def _get_metadata(self) -> Any:
        return self.getMetadata()

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
        widths = self.getOrDefault("output_widths") or self._widths(df)
        types = self.getOrDefault("label_types") or [None] * len(labels)
        for i, name in enumerate(names):
            column = F.col(f"__outputs.o{i}")
            if widths[i] > 1:
                column = array_to_vector(column)
            elif types[i] is not None:
                column = F.round(column[0]).cast(types[i])
            else:
                column = column[0]
            df = df.withColumn(name, column)
        return df.drop("__outputs")

    def remember(self, seen: Look) -> None:
        """What transform() has to know of the data it was trained on."""
        self._set(label_types=[WHOLE_TYPES.get(str(seen.schema.field(name).type))
                               for name in self.getOrDefault("label_columns")])
        try:
            outputs = self.predictor()(
                [seen.row[name] for name in self.getOrDefault("feature_columns")])
        except Exception:  # it may take only what transformation_fn makes, or want a GPU
            return  # transform() will look at its first row
        self._set(output_widths=[matrix.shape[1] for matrix in outputs])

    def _widths(self, df: Any) -> List[int]:
        first = df.select("__outputs").head()
        if first is None:
            return [1] * len(self.getOutputCols())
        return [len(first[0][i]) for i in range(len(self.getOutputCols()))]


def series_to_array(series: Any) -> np.ndarray:
    return np.stack(series.to_list()) if series.dtype == object else series.to_numpy()
