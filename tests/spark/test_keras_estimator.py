# SPDX-License-Identifier: Apache-2.0
"""KerasEstimator on a local session: it learns, resumes, saves, loads and predicts."""
import sys

import cloudpickle
import numpy as np
import pytest

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("horovod.tensorflow.keras")

from horovod.spark.common.datamodule import DataModule  # noqa: E402
from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.keras import KerasEstimator, KerasModel, remote  # noqa: E402
from horovod.spark.keras.datamodule import PetastormDataModule  # noqa: E402
from horovod.tensorflow.keras.callbacks import BestModelCheckpoint  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests


@pytest.fixture
def frame(spark):
    """y = 2a - b + 1, and a row in five is for validation."""
    rng = np.random.default_rng(1)
    rows = [(float(a), float(b), float(2 * a - b + 1), i % 5 == 0)
            for i, (a, b) in enumerate(rng.normal(size=(400, 2)))]
    return spark.createDataFrame(rows, ["a", "b", "y", "held_out"]).repartition(3)


def line():
    keras.utils.set_random_seed(7)
    inputs = [keras.Input((1,), name=name) for name in "ab"]
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))


def mean_error(label, output):
    return keras.ops.mean(keras.ops.abs(label - output))


def estimator(store, **more):
    given = dict(num_proc=2, model=line(), store=store, loss="mse", metrics=[mean_error],
                 optimizer=keras.optimizers.SGD(0.05), feature_cols=["a", "b"], label_cols=["y"],
                 validation="held_out", batch_size=16, epochs=6, random_seed=3, verbose=0,
                 run_id="run")
    given.update(more)
    return KerasEstimator(**given)


def test_it_learns_and_predicts(frame, tmp_path):
    store = Store.create(str(tmp_path / "store"))
    best = BestModelCheckpoint(monitor="val_loss")
    fitted = estimator(store, checkpoint_callback=best).fit(frame)
    history = fitted.getHistory()
    assert {"loss", "mean_error", "val_loss", "val_mean_error"} <= set(history)
    assert len(history["loss"]) == 6
    assert history["val_loss"][-1] < 0.01 * history["loss"][0]
    assert store.exists(store.get_checkpoint_path("run"))
    assert store.read(store.get_logs_path("run") + "/history.csv").count(b"\n") == 7

    seen = fitted.transform(frame).select("y", "y__output").toPandas()
    assert np.abs(seen["y"] - seen["y__output"]).max() < 0.2

    path = str(tmp_path / "model")
    fitted.setOutputCols(["told"]).save(path)
    loaded = KerasModel.load(path)
    assert loaded.getHistory() == history
    again = loaded.transform(frame).select("told").toPandas()["told"]
    assert np.allclose(sorted(again), sorted(seen["y__output"]), atol=1e-6)

    # The same run goes on where it was.
    more = estimator(store, epochs=8).fit_on_parquet()
    assert len(more.getHistory()["loss"]) == 2
    assert more.getHistory()["loss"][0] < 0.1 * history["loss"][0]


def test_the_best_model_of_a_schedule(frame, tmp_path):
    """The rate is good for two epochs of ten steps, then the model is spoilt. Rows of no weight
    have other labels."""
    rows = frame.selectExpr("a", "b", "if(a > 1, y + 50, y) as y", "held_out",
                            "if(a > 1, 0D, 1D) as weight")
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([20], [0.15, 2.0])
    kept = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"), save_best_only=True)
    fitted = estimator(Store.create(str(tmp_path / "store")), checkpoint_callback=kept, epochs=3,
                       optimizer=keras.optimizers.SGD(schedule), sample_weight_col="weight",
                       loss_weights=[0.5], val_batch_size=8, metrics=[],
                       gradient_compression=hvd.Compression.fp16).fit(rows)
    losses = fitted.getHistory()["val_loss"]
    assert losses[1] < 0.1 * losses[0] and losses[2] > 10 * losses[1]
    seen = fitted.transform(frame).select("y", "y__output").toPandas()
    assert np.abs(seen["y"] - seen["y__output"]).max() < 1
    assert not (tmp_path / "3.keras").exists()


def test_optimizers_by_name():
    made = remote.optimizer_from_config(remote.optimizer_to_config("sgd"), {})
    assert isinstance(made, keras.optimizers.SGD)


class OtherLine(DataModule):
    """Not the rows of the store but y = a + b + 3, in fewer batches than there are steps."""

    def _data(self):
        import tensorflow as tf

        assert self.schema_fields == ["a", "b", "y"] and self.shard_count == 2
        a, b = np.random.default_rng(2 + self.cur_shard).normal(size=(2, 64))
        data = tf.data.Dataset.from_tensor_slices({"a": a, "b": b, "y": a + b + 3})
        return data.batch(self.train_batch_size)

    train_data = val_data = _data


def test_a_data_module_of_the_user(sessions, tmp_path):
    spark = sessions.get("local[2]")
    rows = spark.createDataFrame([(1.0, 2.0, 0.0, i % 5 == 0) for i in range(400)],
                                 ["a", "b", "y", "held_out"])
    made = estimator(Store.create(str(tmp_path)), data_module=OtherLine, epochs=8)
    assert made.getDataModule() is OtherLine
    assert KerasEstimator().getDataModule() is PetastormDataModule
    fitted = made.fit(rows)
    weights, bias = fitted.getModel().get_weights()
    assert np.allclose(weights, 1, atol=0.05) and np.allclose(bias, 3, atol=0.05)
    assert len(fitted.getHistory()["val_loss"]) == 8
    assert fitted.getHistory()["val_loss"][-1] < 0.01


def test_an_estimator_is_saved(frame, tmp_path):
    path = str(tmp_path / "estimator")
    estimator(None, custom_objects={"mean_error": mean_error}, data_module=OtherLine).save(path)
    loaded = KerasEstimator.load(path)
    assert loaded.getBatchSize() == 16 and loaded.getStore() is None
    assert isinstance(loaded.getOptimizer(), keras.optimizers.SGD)
    assert loaded.getDataModule().__name__ == "OtherLine"
    assert [weights.tolist() for weights in loaded.getModel().get_weights()] == [
        weights.tolist() for weights in line().get_weights()]


@pytest.mark.parametrize("change, words", [
    ({"model": None}, "Model parameter is required"), ({"optimizer": None}, "Optimizer"),
    ({"loss": None}, "Loss parameter"), ({"feature_cols": ["a"]}, "2 inputs for 1 columns"),
    ({"feature_cols": ["a", "ab"]}, "column ab has 2 numbers in a row.* takes 1"),
    ({"label_cols": ["y", "a"]}, "1 outputs for 2 columns")])
def test_what_does_not_fit_is_told(frame, tmp_path, change, words):
    made = estimator(Store.create(str(tmp_path)))
    for name, value in change.items():
        made._set(**{name: value})
    with pytest.raises(ValueError, match=words):
        made.fit(frame.selectExpr("*", "array(a, b) as ab"))


def test_setters_of_other_names():
    made = KerasEstimator().setTrainReaderNumWorker(4).setShufflingBufferSize(10)
    assert made.getTrainReaderNumWorkers() == 4 and made.getShuffleBufferSize() == 10
