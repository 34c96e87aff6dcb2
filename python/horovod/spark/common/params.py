# SPDX-License-Identifier: Apache-2.0
"""The parameters of estimators and their models, as tables: a row is a parameter.

A class decorated with @parameters(TABLE) gets a pyspark.ml Param for each row, its default, and
get<Name>() and set<Name>(value). A subclass may add Params of its own as pyspark.ml has them.
"""
import copy
from typing import Any, Callable, List, NamedTuple, Tuple

from pyspark.ml.param import Param, Params


class Row(NamedTuple):
    name: str
    default: Any
    help: str


ESTIMATOR = [
    Row("num_proc", None, "number of processes; default: all task slots"),
    Row("model", None, "the model to train"),
    Row("backend", None, "where to train, instead of num_proc processes in Spark"),
    Row("store", None, "where prepared data, checkpoints and logs are kept"),
    Row("optimizer", None, "the optimizer, with the learning rate of one process"),
    Row("loss", None, "loss function, or one for each label column"),
    Row("loss_weights", None, "weight of each loss"),
    Row("sample_weight_col", None, "column with the weight of each row"),
    Row("metrics", [], "functions that are reported besides the loss"),
    Row("feature_cols", None, "columns the model takes, in its order"),
    Row("label_cols", None, "columns the model predicts"),
    Row("continuous_cols", None, "accepted: columns that hold quantities"),
    Row("categorical_cols", None, "accepted: columns that hold categories"),
    Row("validation", None, "fraction of the rows, or the name of a column that marks them"),
    Row("callbacks", [], "callbacks of the framework"),
    Row("batch_size", 32, "rows in a batch, on each process"),
    Row("val_batch_size", None, "the same in validation; default: batch_size"),
    Row("epochs", 1, "number of epochs"),
    Row("train_steps_per_epoch", None, "batches of an epoch on each process; default: all rows"),
    Row("validation_steps_per_epoch", None, "the same in validation"),
    Row("random_seed", None, "seed of the split and the order of rows"),
    Row("shuffle_buffer_size", None, "rows that are shuffled together; default: 65536"),
    Row("shuffle", True, "put the rows into a new order in each epoch"),
    Row("verbose", 1, "0: quiet"),
    Row("partitions_per_process", 10, "Parquet files written for each process"),
    Row("run_id", None, "name of the run in the store; the same name goes on from its checkpoint"),
    Row("gradient_compression", None, "a Compression of the framework's horovod package"),
    Row("compress_sparse_cols", False, "accepted: Parquet compresses by itself"),
    Row("transformation_fn", None, "function of a row, a dict, that gives the row to train on"),
    Row("batch_transformation_fn", None, "the same of a batch, a pandas DataFrame: faster"),
    Row("transformation_edit_fields", None, "accepted: follows from transformation_fn"),
    Row("transformation_removed_fields", None, "columns that are left out after transformation_fn"),
    Row("train_reader_num_workers", 2, "accepted: the reader has no workers"),
    Row("val_reader_num_workers", 2, "accepted likewise"),
    Row("reader_pool_type", "thread", "accepted likewise"),
    Row("label_shapes", None, "shape of each label, -1 for the batch"),
    Row("inmemory_cache_all", False, "each process keeps what it has read in memory"),
    Row("use_gpu", True, "train on the GPU if there is one"),
    Row("backward_passes_per_step", 1, "batches whose gradients are summed before an update"),
    Row("mp_start_method", None, "accepted: the reader starts no processes"),
    Row("tensorflow_dataset_prefetch_buffer_size", 0, "batches to prepare ahead, with TensorFlow"),
]

MODEL = [
    Row("history", None, "what training reported, epoch by epoch"),
    Row("model", None, "the trained model"),
    Row("feature_columns", None, "columns the model takes"),
    Row("label_columns", None, "columns the model predicts"),
    Row("output_columns", None, "names of the columns transform() adds; default: label__output"),
    Row("run_id", None, "name of the run in the store"),
    Row("label_types", None, "Spark's type of each integer label, else None"),
    Row("output_widths", None, "numbers in each output; default: as in the first row"),
    Row("_metadata", None, "shape and type of each column it was trained on"),
]

# Other spellings of get<Name> and set<Name>, which programs use.
OTHER_NAMES = {"TrainReaderNumWorker": "train_reader_num_workers",
               "ValReaderNumWorker": "val_reader_num_workers",
               "ShufflingBufferSize": "shuffle_buffer_size",
               "InMemoryCacheAll": "inmemory_cache_all",
               "NumGPUs": "num_gpus",
               "UseGPU": "use_gpu",
               "LabelColoumns": "label_columns"}

# Parameters that belong to a session: they are not saved.
NOT_SAVED = ("backend", "store")


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _getter(name: str) -> Callable[[Params], Any]:
    def get(self: Params) -> Any:
        return self.getOrDefault(self.getParam(name))

    get.__doc__ = f"The value of {name}."
    return get


def _setter(name: str) -> Callable[[Params, Any], Params]:
    def set_value(self: Params, value: Any) -> Params:
        return self._set(**{name: value})

    set_value.__doc__ = f"Sets {name}; returns self."
    return set_value


def parameters(table: List[Row]) -> Callable[[type], type]:
    def decorate(cls: type) -> type:
        spellings = {camel(row.name): row.name for row in table}
        spellings.update((other, name) for other, name in OTHER_NAMES.items()
                         if name in list(spellings.values()))
        for row in table:
            setattr(cls, row.name, Param(Params._dummy(), row.name, row.help))
        for spelling, name in spellings.items():
            setattr(cls, f"get{spelling}", _getter(name))
            setattr(cls, f"set{spelling}", _setter(name))
        cls._table = tuple(table)  # type: ignore[attr-defined]
        return cls

    return decorate


class TableParams(Params):
    """Takes its parameters by name; what is None is left at its default."""

    _table: Tuple[Row, ...] = ()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        # A default that is a list is not shared with others.
        self._setDefault(**{row.name: copy.copy(row.default) for row in self._table})
        self.setParams(**kwargs)

    def setParams(self, **kwargs: Any) -> "TableParams":
        """Sets parameters by name; what is None is left as it is. Returns self."""
        unknown = sorted(name for name in kwargs if not self.hasParam(name))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no parameter {', '.join(unknown)}")
        return self._set(**{name: value for name, value in kwargs.items() if value is not None})


@parameters(ESTIMATOR)
class EstimatorParams(TableParams):
    """What estimators of all frameworks have."""


@parameters(MODEL)
class ModelParams(TableParams):
    """What their models have."""
