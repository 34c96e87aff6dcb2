# SPDX-License-Identifier: Apache-2.0
"""TorchEstimator for modules of Lightning: it learns, alike on all ranks, resumes and predicts."""
import sys
import threading

import cloudpickle
import numpy as np
import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("pytorch_lightning")
hvd = pytest.importorskip("horovod.torch")

from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.lightning import TorchEstimator, TorchModel  # noqa: E402
from horovod.spark.lightning.datamodule import ParquetDataModule  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests


@pytest.fixture
def frame(spark):
    """y = 2a - b + 1, and a row in five is for validation."""
    rng = np.random.default_rng(1)
    rows = [(float(a), float(b), float(2 * a - b + 1), i % 5 == 0)
            for i, (a, b) in enumerate(rng.normal(size=(400, 2)))]
    return spark.createDataFrame(rows, ["a", "b", "y", "held_out"]).repartition(3)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, a, b):
        return self.layer(torch.cat([a, b], dim=1))

    def _loss(self, batch):
        return torch.nn.functional.mse_loss(self(batch["a"], batch["b"]).squeeze(1), batch["y"])

    def training_step(self, batch, number):
        import horovod.torch as hvd

        if number == 0:  # the ranks have other rows and the same weights
            weights = hvd.allgather(self.layer.weight.detach(), name="weights")
            assert torch.equal(weights[:1], weights[1:])
            first = hvd.allgather(batch["a"][:1], name="rows")
            assert not torch.equal(first[:1], first[1:])
        loss = self._loss(batch)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def estimator(store, **more):
    torch.manual_seed(7)
    given = dict(num_proc=2, model=Line(), store=store, feature_cols=["a", "b"], label_cols=["y"],
                 validation="held_out", batch_size=16, epochs=6, random_seed=3, verbose=0,
                 run_id="run")
    given.update(more)
    return TorchEstimator(**given)


def test_it_learns_and_predicts(frame, tmp_path):
    store = Store.create(str(tmp_path / "store"))
    fitted = estimator(store).fit(frame)
    history = fitted.getHistory()
    assert [seen["epoch"] for seen in history] == list(range(6))
    assert history[-1]["val_loss"] < 0.01 * history[0]["train_loss"]
    assert store.exists(store.get_checkpoint_path("run"))

    seen = fitted.transform(frame).select("y", "y__output").toPandas()
    assert np.abs(seen["y"] - seen["y__output"]).max() < 0.2
    path = str(tmp_path / "model")
    fitted.save(path)
    again = TorchModel.load(path).transform(frame).select("y__output").toPandas()["y__output"]
    assert np.allclose(sorted(again), sorted(seen["y__output"]))

    # The same run goes on where it was.
    more = estimator(store, epochs=8).fit_on_parquet()
    assert [seen["epoch"] for seen in more.getHistory()] == [6, 7]
    assert more.getHistory()[0]["train_loss"] < 0.1 * history[0]["train_loss"]


class Watched(ParquetDataModule):
    """Fails unless its loaders are as the estimator below wants them."""

    def train_data(self):
        loader = super().train_data()
        assert (loader.async_loader_queue_size, loader.debug_data_loader) == (3, True)
        return loader

    def val_data(self):
        loader = super().val_data()
        assert loader.async_loader_queue_size == 2
        return loader

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        assert not [thread for thread in threading.enumerate() if thread.name == "horovod.data"]


def test_a_data_module_of_the_user_with_queues(frame, tmp_path, capfd):
    made = estimator(Store.create(str(tmp_path)), data_module=Watched, debug_data_loader=True,
                     train_async_data_loader_queue_size=3, val_async_data_loader_queue_size=2)
    history = made.fit(frame).getHistory()
    assert len(history) == 6 and history[-1]["val_loss"] < 0.01 * history[0]["train_loss"]
    assert "PytorchAsyncDataLoader: 10 batches" in capfd.readouterr().out


def test_gradients_travel_compressed(frame, tmp_path):
    made = estimator(Store.create(str(tmp_path)), model=Halved(), epochs=1, validation=None,
                     gradient_compression=hvd.Compression.fp16, train_steps_per_epoch=25)
    assert made.fit(frame).getHistory()[0]["steps"] == 25  # of 13 that the rows would fill


class Halved(Line):
    def on_after_backward(self):
        """What has been through half precision is not changed by it."""
        for parameter in self.parameters():
            assert torch.equal(parameter.grad, parameter.grad.half().float())

    def training_step(self, batch, number):
        self.log("steps", float(number + 1), on_epoch=True, on_step=False, reduce_fx="max")
        return super().training_step(batch, number)


class Sums(lightning.LightningDataModule):
    """y = a + b + 3: a module of Lightning's own, which takes what the estimator knows."""

    def __init__(self, train_batch_size, **kwargs):
        super().__init__()
        self.batch_size = train_batch_size
        self.rank = kwargs["cur_shard"]

    def train_dataloader(self):
        rows = torch.randn(160, 2, generator=torch.Generator().manual_seed(self.rank))
        return torch.utils.data.DataLoader(
            [{"a": row[:1], "b": row[1:], "y": row.sum() + 3} for row in rows], self.batch_size)

    val_dataloader = train_dataloader


def test_a_module_of_lightning(frame, tmp_path):
    fitted = estimator(Store.create(str(tmp_path)), data_module=Sums).fit(frame)
    layer = fitted.getModel().layer
    assert np.allclose(layer.weight.detach(), [[1, 1]], atol=0.05)
    assert np.allclose(layer.bias.detach(), 3, atol=0.05)


@pytest.mark.parametrize("change, words", [
    ({"model": torch.nn.Linear(1, 1)}, "not a LightningModule"),
    ({"loss": torch.nn.functional.mse_loss}, "loss is set"),
    ({"loss_weights": [1.0]}, "loss_weights is set"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "optimizer is set"),
    ({"gradient_compression": "fp16"}, "gradient_compression is 'fp16'.*must be none, fp16 or"),
    ({"data_module": object()}, "data_module is .*must be a class")])
def test_what_does_not_fit_is_told(tmp_path, change, words):
    made = estimator(Store.create(str(tmp_path)), **change)
    with pytest.raises(ValueError, match=words):
        made._check()
