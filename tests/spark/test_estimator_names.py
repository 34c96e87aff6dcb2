# SPDX-License-Identifier: Apache-2.0
"""Estimators as programs use and derive from them: old getters, rows as dicts, own stores."""
import sys

import cloudpickle
import numpy as np
import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("pytorch_lightning")

from pyspark import keyword_only  # noqa: E402
from pyspark.ml.param import Param, Params  # noqa: E402

from horovod.spark.common import constants, util  # noqa: E402
from horovod.spark.common.backend import SparkBackend  # noqa: E402
from horovod.spark.common.params import EstimatorParams, ModelParams  # noqa: E402
from horovod.spark.common.serialization import (  # noqa: E402
    HorovodParamsReader, HorovodParamsWriter)
from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.lightning import TorchEstimator as LightningEstimator  # noqa: E402
from horovod.spark.lightning import TorchModel as LightningModel  # noqa: E402
from horovod.spark.lightning.estimator import MIN_PL_VERSION  # noqa: E402
from horovod.spark.torch import TorchEstimator, TorchModel  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests


class PlainStore(Store):
    """A store of one's own: it only says where things are."""

    def __init__(self, folder):
        self.folder = str(folder)

    def _data(self, kind, idx):
        return f"{self.folder}/{kind}" + ("" if idx is None else f"-{idx}")

    def get_train_data_path(self, idx=None):
        return self._data("train", idx)

    def get_val_data_path(self, idx=None):
        return self._data("val", idx)

    def get_runs_path(self):
        return f"{self.folder}/runs"


@pytest.fixture
def frame(spark):
    """A word and the number of its letters."""
    words = ["".join("abc"[(i + k) % 3] for k in range(1 + i % 7)) for i in range(200)]
    return spark.createDataFrame([(word, float(len(word))) for word in words], ["word", "n"])


def letters(row):
    """A row as a dict, in and out."""
    assert isinstance(row, dict) and isinstance(row["word"], str)
    counts = np.array([row["word"].count(letter) for letter in "abc"], dtype=np.float32)
    return {"word": counts, "n": row["n"], "dropped": "this"}


def torch_estimator(store, **more):
    torch.manual_seed(7)
    model = torch.nn.Linear(3, 1)
    given = dict(num_proc=2, model=model, store=store, loss=torch.nn.functional.mse_loss,
                 optimizer=torch.optim.SGD(model.parameters(), lr=0.02), feature_cols=["word"],
                 label_cols=["n"], input_shapes=[[-1, 3]], batch_size=8, epochs=12, random_seed=3,
                 verbose=0, run_id="run", transformation_fn=letters,
                 transformation_removed_fields=["dropped"])
    given.update(more)
    return TorchEstimator(**given)


class LettersModel(TorchModel):
    """Predicts row by row, from words."""

    def get_prediction_fn(self):
        return lambda model, row: model(torch.from_numpy(letters(
            {"word": row["word"], "n": 0})["word"]))


class LettersEstimator(TorchEstimator):
    def get_model_class(self):
        return LettersModel


def test_rows_are_transformed_as_dicts(frame, tmp_path):
    store = PlainStore(tmp_path)
    made = torch_estimator(store, validation=0.2)
    made.__class__ = LettersEstimator
    fitted = made.fit(frame)
    assert type(fitted) is LettersModel
    assert fitted.getHistory()[-1]["train"]["loss"] < 0.05 * fitted.getHistory()[0]["train"]["loss"]
    assert (tmp_path / "runs" / "run" / "checkpoint").exists()
    seen = fitted.transform(frame).select("n", "n__output").toPandas()
    assert np.abs(seen["n"] - seen["n__output"]).max() < 0.5
    assert fitted._get_metadata()["n"] == {"dtype": "float64", "shape": 1,
                                           "intermediate_format": constants.NOCHANGE}
    group, = fitted.getOptimizer().param_groups
    assert group["params"][0] is fitted.getModel().weight
    with pytest.raises(NotImplementedError, match="PlainStore has no get_test_data_path"):
        store.get_test_data_path()


def frame_to_frame(batch):
    batch["word"] = [letters({"word": word, "n": 0})["word"] for word in batch["word"]]
    return batch


def test_batches_are_transformed_under_another_name(frame, tmp_path):
    fitted = torch_estimator(Store.create(str(tmp_path)), transformation_fn=None, epochs=2,
                             batch_transformation_fn=frame_to_frame).fit(frame)
    assert len(fitted.getHistory()) == 2
    both = torch_estimator(Store.create(str(tmp_path)), batch_transformation_fn=frame_to_frame)
    with pytest.raises(ValueError, match="transformation_fn and batch_transformation_fn"):
        both.fit(frame)


# --- A subclass as SynapseML has them ------------------------------------------------------------


class WordModule(lightning.LightningModule):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, words):
        return self.layer(words.float())

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self(batch["word"]).squeeze(1), batch["n"].float())
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class WordClassifier(LightningEstimator):
    """Parameters of its own beside the estimator's; makes model, columns and backend itself."""

    rate = Param(Params._dummy(), "rate", "learning rate")
    text_col = Param(Params._dummy(), "text_col", "the column with words")

    @keyword_only
    def __init__(self, rate=None, text_col="word", label_cols=None, num_proc=None, backend=None,
                 store=None, batch_size=None, epochs=None, verbose=1, run_id=None,
                 transformation_fn=None, transformation_removed_fields=None, use_gpu=True,
                 model=None, feature_cols=None, random_seed=None):
        kwargs = self._input_kwargs
        super().__init__()
        self._setDefault(rate=0.05, text_col="word", label_cols=["n"])
        self._set(**kwargs)
        self.setTransformationFn(letters)
        self.setTransformationRemovedFields(["dropped"])
        self.setFeatureCols([self.getOrDefault(self.text_col)])
        self.setModel(WordModule(self.getOrDefault(self.rate)))

    def _fit(self, dataset):
        return super()._fit(dataset)

    def _get_or_create_backend(self):
        assert self.getBackend() is None
        return SparkBackend(2, verbose=0)

    def get_model_class(self):
        return WordModel

    def _get_model_kwargs(self, model, history, optimizer, run_id, metadata):
        return dict(history=history, model=model, optimizer=optimizer, run_id=run_id,
                    feature_columns=self.getFeatureCols(), label_columns=self.getLabelCols(),
                    input_shapes=self.getInputShapes(), loss=self.getLoss(),
                    loss_constructors=self.getLossConstructors(), _metadata=metadata,
                    rounded_col="rounded")


class WordModel(LightningModel):
    rounded_col = Param(Params._dummy(), "rounded_col", "the column with whole numbers")

    @keyword_only
    def __init__(self, history=None, model=None, feature_columns=None, label_columns=None,
                 optimizer=None, run_id=None, _metadata=None, loss=None, loss_constructors=None,
                 input_shapes=None, rounded_col="rounded"):
        kwargs = self._input_kwargs
        super().__init__()
        self._set(**kwargs)

    def get_prediction_fn(self):
        return lambda model, row: model(torch.from_numpy(letters(
            {"word": row["word"], "n": 0})["word"])[None])

    def _transform(self, df):
        from pyspark.sql import functions as F

        return super()._transform(df).withColumn(
            self.getOrDefault(self.rounded_col), F.round("n__output").cast("int"))


def test_a_subclass_with_parameters_of_its_own(frame, tmp_path):
    torch.manual_seed(7)
    made = WordClassifier(store=Store.create(str(tmp_path / "store")), batch_size=8, epochs=12,
                          verbose=0, rate=0.03, random_seed=3, run_id="words")
    assert made.getRunId() == "words" and made.getUseGpu() and made.getNumGPUs() is None
    fitted = made.fit(frame)
    assert type(fitted) is WordModel and fitted.getRunId() == "words"
    seen = fitted.transform(frame).select("n", "rounded").toPandas()
    assert (seen["n"] == seen["rounded"]).mean() > 0.9
    fitted.save(str(tmp_path / "model"))
    again = WordModel.load(str(tmp_path / "model"))
    assert again.getHistory() == fitted.getHistory()
    made.save(str(tmp_path / "estimator"))
    loaded = WordClassifier.load(str(tmp_path / "estimator"))
    assert loaded.getOrDefault("rate") == 0.03 and loaded.getEpochs() == 12


# --- Names without a cluster's help ---------------------------------------------------------------


def test_old_getters_and_setters(spark):
    made = TorchEstimator()
    assert made.setParams(epochs=3, inmemory_cache_all=True, batch_size=None) is made
    assert made.getEpochs() == 3 and made.getBatchSize() == 32
    assert made.getInMemoryCacheAll() is True and made.setInMemoryCacheAll(False) is made
    assert made.setShufflingBufferSize(7).getShufflingBufferSize() == 7
    assert made.setTrainReaderNumWorker(3).getTrainReaderNumWorker() == 3
    assert LightningEstimator(num_gpus=1).getNumGPUs() == 1
    with pytest.raises(TypeError, match="TorchEstimator has no parameter epoch"):
        made.setParams(epoch=3)
    with pytest.raises(TypeError, match="TorchEstimator has no parameter num_gpus"):
        TorchEstimator(num_gpus=1)
    assert isinstance(made, EstimatorParams) and EstimatorParams().getEpochs() == 1
    assert issubclass(TorchModel, ModelParams)
    assert isinstance(made.write(), HorovodParamsWriter)
    assert isinstance(TorchEstimator.read(), HorovodParamsReader)
    assert tuple(map(int, MIN_PL_VERSION.split("."))) <= tuple(
        int(part) for part in lightning.__version__.split(".")[:3])


def test_preparing_data_without_an_estimator(spark, tmp_path):
    from pyspark.ml.linalg import Vectors

    rows = [(float(i), Vectors.dense([1.0, i]), i % 4 == 0) for i in range(40)]
    frame = spark.createDataFrame(rows, ["y", "x", "late"])
    store = Store.create(str(tmp_path))
    with util.prepare_data(2, store, frame, label_columns=["y"], feature_columns=["x"],
                           validation="late", partitions_per_process=1) as idx:
        n_train, n_val, metadata, row_bytes = util.get_simple_meta_from_parquet(
            store, ["y"], ["x"], dataset_idx=idx)
    assert (n_train, n_val) == (30, 10) and row_bytes > 0
    assert metadata["x"] == {"dtype": "float64", "shape": 2,
                             "intermediate_format": constants.ARRAY}
    with pytest.raises(ValueError, match="has no column z"):
        with util.prepare_data(2, store, frame, ["z"], ["x"]):
            pass
    with pytest.raises(ValueError, match="validation is 1.5"):
        util.check_validation(1.5)
    with pytest.raises(ValueError, match="has no column early"):
        util.check_validation("early", frame)
    assert util.to_list("a", 2) == ["a", "a"] and util.to_list(["a"], 1) == ["a"]
    util.clear_training_cache()
    with pytest.raises(AttributeError, match="no pyarrow_to_spark_data_type"):
        util.pyarrow_to_spark_data_type
