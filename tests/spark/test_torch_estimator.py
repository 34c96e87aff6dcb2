# SPDX-License-Identifier: Apache-2.0
"""TorchEstimator on a local session: it learns, resumes, saves, loads and predicts."""
import sys

import cloudpickle
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

from horovod.spark.common.estimator import check_device  # noqa: E402
from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.torch import TorchEstimator, TorchModel  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests


@pytest.fixture
def frame(spark):
    """y = 2a - b + 1, and a row in five is for validation."""
    rng = np.random.default_rng(1)
    rows = [(float(a), float(b), float(2 * a - b + 1), i % 5 == 0)
            for i, (a, b) in enumerate(rng.normal(size=(400, 2)))]
    return spark.createDataFrame(rows, ["a", "b", "y", "held_out"]).repartition(3)


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, a, b):
        return self.layer(torch.cat([a, b], dim=1))


def mean_error(output, label):
    return (output - label).abs().mean()


def estimator(store, **more):
    torch.manual_seed(7)
    model = Line()
    given = dict(num_proc=2, model=model, store=store, loss=torch.nn.functional.mse_loss,
                 optimizer=torch.optim.SGD(model.parameters(), lr=0.05), metrics=[mean_error],
                 feature_cols=["a", "b"], label_cols=["y"], validation="held_out", batch_size=16,
                 epochs=6, random_seed=3, verbose=0, run_id="run")
    given.update(more)
    return TorchEstimator(**given)


def test_it_learns_and_predicts(frame, tmp_path):
    store = Store.create(str(tmp_path / "store"))
    fitted = estimator(store).fit(frame)
    history = fitted.getHistory()
    assert [seen["epoch"] for seen in history] == list(range(6))
    assert history[-1]["validation"]["loss"] < 0.01 * history[0]["train"]["loss"]
    assert set(history[0]["train"]) == {"loss", "mean_error"}
    assert store.exists(store.get_checkpoint_path("run"))

    seen = fitted.transform(frame).select("y", "y__output").toPandas()
    assert np.abs(seen["y"] - seen["y__output"]).max() < 0.2
    fitted.setOutputCols(["told"])
    assert "told" in fitted.transform(frame).columns
    with pytest.raises(ValueError, match="already has a column y"):
        fitted.setOutputCols(["y"]).transform(frame)

    path = str(tmp_path / "model")
    fitted.setOutputCols(["told"]).save(path)
    loaded = TorchModel.load(path)
    assert loaded.getHistory() == history
    again = loaded.transform(frame).select("told").toPandas()["told"]
    assert np.allclose(sorted(again), sorted(seen["y__output"]))

    # The same run goes on where it was.
    more = estimator(store, epochs=8).fit_on_parquet()
    assert [seen["epoch"] for seen in more.getHistory()] == [6, 7]
    assert more.getHistory()[0]["train"]["loss"] < 0.1 * history[0]["train"]["loss"]


def test_vectors_and_the_estimator_is_saved(spark, frame, tmp_path):
    from pyspark.ml.feature import VectorAssembler

    vectors = VectorAssembler(inputCols=["a", "b"], outputCol="ab").transform(frame)
    vectors = vectors.selectExpr("ab", "y", "cast(y > 1 as int) as above")
    model = torch.nn.Linear(2, 1)
    path = str(tmp_path / "estimator")
    estimator(None, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
              feature_cols=["ab"], label_cols=["above"], validation=0.2, epochs=1,
              transformation_fn=halve).save(path)
    loaded = TorchEstimator.load(path)
    assert loaded.getBatchSize() == 16 and loaded.getStore() is None
    fitted = loaded.setStore(Store.create(str(tmp_path / "store"))).fit(vectors)
    assert "validation" in fitted.getHistory()[0]
    out = fitted.transform(vectors)
    assert out.schema["above__output"].dataType.typeName() == "integer"


def halve(batch):
    batch["ab"] = batch["ab"] * 0.5
    return batch


def halved_steps(model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights):
    """A way of its own with a batch: two steps of half the rate."""
    for _ in range(2):
        optimizer.zero_grad()
        outputs, shaped = transform_outputs(model(*inputs), labels)
        loss = 0.5 * loss_fn(outputs, shaped, sample_weights)
        loss.backward()
        optimizer.step()
    return outputs, loss


def test_a_way_of_its_own_with_a_batch(frame, tmp_path):
    fitted = estimator(Store.create(str(tmp_path)), train_minibatch_fn=halved_steps).fit(frame)
    history = fitted.getHistory()
    assert history[-1]["validation"]["loss"] < 0.01 * history[0]["train"]["loss"]
    # Half of it is what the function says the loss is, and only in training.
    assert history[-1]["train"]["mean_error"] > 0 and len(history) == 6


@pytest.mark.parametrize("change, words", [
    ({"model": None}, "Model parameter is required"), ({"optimizer": None}, "Optimizer"),
    ({"loss": None}, "Loss parameter"), ({"validation": 1.5}, "fraction"),
    ({"feature_cols": ["a", "nothing"]}, "no column nothing"),
    ({"input_shapes": [[-1, 1]]}, "1 entries for 2 feature columns"),
    ({"backend": object()}, "num_proc and backend"),
    ({"loss_constructors": [torch.nn.MSELoss]}, "loss and loss_constructors")])
def test_what_does_not_fit_is_told(frame, tmp_path, change, words):
    made = estimator(Store.create(str(tmp_path)))
    for name, value in change.items():
        made._set(**{name: value})
    with pytest.raises(ValueError, match=words):
        made.fit(frame)


def test_an_empty_set_is_told(frame, tmp_path):
    with pytest.raises(ValueError, match="the validation set has no rows"):
        estimator(Store.create(str(tmp_path))).fit(frame.filter("not held_out"))


def test_names_that_do_not_exist():
    with pytest.raises(TypeError, match="no parameter learning_rate"):
        TorchEstimator(learning_rate=1)


def test_ranks_on_different_devices():
    check_device("cpu", lambda kind: [kind, "cpu"])
    with pytest.raises(RuntimeError, match="All ranks don't have same device type!.*cpu, cuda"):
        check_device("cpu", lambda kind: [kind, "cuda"])
