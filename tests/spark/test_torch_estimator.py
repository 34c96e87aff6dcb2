# SPDX-License-Identifier: Apache-2.0
"""TorchEstimator on a local session: it learns, resumes, saves, loads and predicts."""
import sys
import threading

import cloudpickle
import numpy as np
import pytest

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("horovod.torch")

from horovod.spark.common import util  # noqa: E402
from horovod.spark.common.estimator import check_device  # noqa: E402
from horovod.spark.common.datamodule import DataModule  # noqa: E402
from horovod.spark.common.store import Store  # noqa: E402
from horovod.spark.data import ParquetReader, open_filesystem  # noqa: E402
from horovod.spark.torch import TorchEstimator, TorchModel  # noqa: E402
from horovod.spark.torch.remote import save_state  # noqa: E402
from horovod.spark.torch.datamodule import PetastormDataModule  # noqa: E402

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


class OtherLine(DataModule):
    """Not the rows of the store but y = a + b + 3, all ranks the same, as a list of arrays and
    tensors. Leaves a note of what it was told, and of its end."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.note = f"{open_filesystem(self.train_dir)[1]}.{self.cur_shard}"

    def __enter__(self):
        with open(self.note, "w") as file:
            file.write(f"{self.shard_count} {self.train_batch_size} {self.steps_per_epoch_train} "
                       f"{self.has_val} {','.join(self.schema_fields)}")
        return self

    def __exit__(self, kind, error, trace):
        with open(self.note, "a") as file:
            file.write(" over")

    def train_data(self):
        a, b = np.random.default_rng(2).normal(size=(2, 20, 16))
        return [{"a": a[i], "b": torch.from_numpy(b[i]), "y": a[i] + b[i] + 3} for i in range(20)]

    def val_data(self):
        return self.train_data()[:2]


def test_a_data_module_of_the_user(sessions, tmp_path):
    spark = sessions.get("local[2]")
    rows = spark.createDataFrame([(1.0, 2.0, 0.0, i % 5 == 0) for i in range(400)],
                                 ["a", "b", "y", "held_out"])
    store = Store.create(str(tmp_path / "store"))
    made = estimator(store, data_module=OtherLine, epochs=8)
    assert made.getDataModule() is OtherLine
    assert TorchEstimator().getDataModule() is PetastormDataModule
    fitted = made.fit(rows)
    weights = fitted.getModel().layer
    assert np.allclose(weights.weight.detach(), [[1, 1]], atol=0.05)
    assert np.allclose(weights.bias.detach(), 3, atol=0.05)
    assert fitted.getHistory()[-1]["validation"]["loss"] < 0.01
    for rank in range(2):
        note = tmp_path / "store" / f"intermediate_train_data.{rank}"
        assert note.read_text() == "2 16 10 True a,b,y over"


class OneEpoch(OtherLine):
    def train_data(self):
        yield from super().train_data()[:self.steps_per_epoch_train]


def test_a_data_module_that_runs_dry(frame, tmp_path):
    made = estimator(Store.create(str(tmp_path)), data_module=OneEpoch).setValidation(None)
    with pytest.raises(RuntimeError, match="ValueError: the data module gave no batches"):
        made.fit(frame)


def test_vectors_and_the_estimator_is_saved(spark, frame, tmp_path):
    from pyspark.ml.feature import VectorAssembler

    vectors = VectorAssembler(inputCols=["a", "b"], outputCol="ab").transform(frame)
    vectors = vectors.selectExpr("ab", "y", "cast(y > 1 as int) as above")
    model = torch.nn.Linear(2, 1)
    path = str(tmp_path / "estimator")
    estimator(None, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
              feature_cols=["ab"], label_cols=["above"], validation=0.2, epochs=1,
              batch_transformation_fn=halve).save(path)
    loaded = TorchEstimator.load(path)
    assert loaded.getBatchSize() == 16 and loaded.getStore() is None
    fitted = loaded.setStore(Store.create(str(tmp_path / "store"))).fit(vectors)
    assert "validation" in fitted.getHistory()[0]
    out = fitted.transform(vectors)
    assert out.schema["above__output"].dataType.typeName() == "integer"


class Here:
    """A backend that trains nothing, in this process; it keeps the rows each run would get."""

    def __init__(self, together=None):
        self.rows = {}
        self._together = together  # all runs have their data before one of them reads

    def num_processes(self):
        return 1

    def run(self, fn, args=(), kwargs=None, env=None):
        model, _, task = cloudpickle.loads(args[0])
        if self._together is not None:
            self._together.wait(120)
        self.rows[task["run_id"]] = [
            sorted(np.concatenate([batch[task["feature_cols"][0]].ravel()
                                   for batch in ParquetReader(path, task["columns"]).epoch()]))
            for path in (task["train_path"], task["val_path"])]
        return [([], save_state(model.state_dict()))]


def test_two_dataframes_at_once(spark, tmp_path, monkeypatch):
    backend = Here(threading.Barrier(2))
    store = Store.create(str(tmp_path))
    frames = {f"run {n}": spark.range(n).selectExpr("cast(id as double) as a", "a as b", "a as y",
                                                    "id % 2 = 0 as held_out") for n in (10, 20)}
    threads = [threading.Thread(target=estimator(store, num_proc=None, backend=backend,
                                                 run_id=run_id).fit, args=(frame,))
               for run_id, frame in frames.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.rows == {f"run {n}": [list(range(1, n, 2)), list(range(0, n, 2))]
                            for n in (10, 20)}
    # What is there is used again, by its number as well.
    backend = Here()
    made = estimator(store, num_proc=None, backend=backend)
    with monkeypatch.context() as patch:
        patch.setattr(util, "split", None)  # who writes would call it
        made.fit(frames["run 10"])
    number = next(n for n in (None, 1) if store.exists(store.get_val_data_path(n))
                  and ParquetReader(store.get_val_data_path(n)).n_rows == 10)
    made.fit_on_parquet({made.run_id: "by number"}, dataset_idx=number)
    assert [len(rows) for rows in backend.rows["run"]] == [5, 5]
    assert [len(rows) for rows in backend.rows["by number"]] == [10, 10]


def test_columns_that_are_not_asked_for_may_be_anything(spark, tmp_path):
    """Files somebody else has written, with a column that makes no tensor, in its first row too."""
    store = Store.create(str(tmp_path))
    for path in (store.get_train_data_path(), store.get_val_data_path()):
        spark.range(8).selectExpr("cast(id as double) as a", "a as b", "a as y",
                                  "if(id = 0, null, id) as gaps", "map(id, 'x') as words"
                                  ).coalesce(1).write.parquet(path)
    backend = Here()
    estimator(store, num_proc=None, backend=backend).fit_on_parquet()
    assert backend.rows["run"] == [list(range(8))] * 2


def test_cross_validation_in_parallel(frame, tmp_path):
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    backend = Here()
    made = estimator(Store.create(str(tmp_path)), num_proc=None, backend=backend, run_id=None)
    grid = ParamGridBuilder().addGrid(made.batch_size, [8, 16]).build()
    CrossValidator(estimator=made, estimatorParamMaps=grid, numFolds=2, parallelism=2, seed=1,
                   evaluator=RegressionEvaluator(predictionCol="y__output", labelCol="y")
                   ).fit(frame)
    sizes = sorted(sum(len(rows) for rows in parts) for parts in backend.rows.values())
    assert len(sizes) == 5 and sizes[-1] == 400  # two in each fold, and the best with everything
    assert sizes[0] == sizes[1] and sizes[2] == sizes[3] and sizes[0] + sizes[2] == 400


def test_types_and_widths_are_those_of_the_fit(spark, frame, tmp_path):
    """Whatever columns and rows a frame has that is to be predicted."""
    rows = frame.selectExpr("a", "cast(a > 0 as short) as few", "cast(a > 0 as long) as many")
    model = Fork()
    fitted = estimator(Store.create(str(tmp_path)), num_proc=None, backend=Here(), model=model,
                       optimizer=torch.optim.SGD(model.parameters(), lr=0.1), feature_cols=["a"],
                       label_cols=["few", "many"], validation=0.1).fit(rows)
    path = str(tmp_path / "model")
    fitted.save(path)
    for model in (fitted, TorchModel.load(path)):
        for given in (rows, rows.select("a"), rows.select("a").filter("a > 1000")):
            kinds = {field.name: field.dataType.typeName()
                     for field in model.transform(given).schema if "__output" in field.name}
            assert kinds == {"few__output": "short", "many__output": "vectorudt"}
    assert {row[0] for row in fitted.transform(rows.select("a")).select("few__output").collect()}


def test_saved_inside_a_pipeline(frame, tmp_path):
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    store = Store.create(str(tmp_path / "store"))
    model = torch.nn.Linear(2, 1)
    made = estimator(store, num_proc=None, backend=Here(), model=model, feature_cols=["ab"],
                     optimizer=torch.optim.SGD(model.parameters(), lr=0.1), validation=0.5)
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="ab"), made])
    pipeline.save(str(tmp_path / "pipeline"))
    last = Pipeline.load(str(tmp_path / "pipeline")).getStages()[1]
    assert last.getBatchSize() == 16 and last.uid == made.uid and last.getStore() is None
    fitted = pipeline.fit(frame)
    fitted.save(str(tmp_path / "fitted"))
    told = [each.transform(frame).orderBy("a").select("y__output").toPandas()["y__output"]
            for each in (fitted, PipelineModel.load(str(tmp_path / "fitted")))]
    assert len(told[0]) == 400 and np.allclose(*told)


class Fork(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ends = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 3)])

    def forward(self, a):
        return [end(a) for end in self.ends]


def test_defaults_are_not_shared():
    TorchEstimator().getMetrics().append(mean_error)
    assert TorchEstimator().getMetrics() == []


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


class Count:
    """A metric that is an object: how many batches there were until now."""

    def __init__(self):
        self.n = 0

    def __call__(self, output, label):
        self.n += 1
        return self.n


def weighted(output, label, weights):
    return (weights.reshape(output.shape) * (output - label) ** 2).mean()


def test_steps_of_several_passes_that_do_not_divide_the_epoch(frame, tmp_path):
    """Nor the rows: they come again until there are as many batches as were asked for. Those of no
    weight have other labels."""
    rows = frame.selectExpr("a", "b", "if(a > 1, y + 50, y) as y", "held_out",
                            "if(a > 1, 0D, 1D) as weight")
    model = Line()
    fitted = estimator(Store.create(str(tmp_path)), backward_passes_per_step=3, epochs=2,
                       train_steps_per_epoch=31, metrics=[Count(), mean_error, Count()],
                       gradient_compression=hvd.Compression.fp16, model=model, val_batch_size=40,
                       optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss=weighted,
                       loss_weights=[2.0], sample_weight_col="weight").fit(rows)
    first, last = fitted.getHistory()
    assert first["validation"]["Count"] == 32  # one batch on each rank
    assert first["train"]["Count"] == first["train"]["Count_2"] == 16  # the mean of 1 to 31
    assert last["validation"]["loss"] < 0.1 * first["train"]["loss"]


@pytest.mark.parametrize("change, words", [
    ({"model": None}, "Model parameter is required"), ({"optimizer": None}, "Optimizer"),
    ({"loss": None}, "Loss parameter"), ({"validation": 1.5}, "fraction"),
    ({"feature_cols": ["a", "nothing"]}, "no column nothing"),
    ({"input_shapes": [[-1, 1], [-1, 2, 2]]}, "column b has 1 numbers in a row.* takes 4"),
    ({"input_shapes": [[-1, 1]]}, "1 entries for 2 feature columns"),
    ({"backend": object()}, "num_proc and backend"),
    ({"loss_constructors": [torch.nn.MSELoss]}, "loss and loss_constructors"),
    ({"data_module": "petastorm"}, "data_module is 'petastorm': it must be a class")])
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
