# SPDX-License-Identifier: Apache-2.0
"""What every rank of a KerasEstimator does: model.fit() over its share of the Parquet rows.

All ranks make the same number of steps. The first one writes the model to the store after each
epoch, with logs (history.csv, and TensorBoard's where that is installed), and returns (history,
model); with a checkpoint_callback that keeps the best only, that model, else the last.
"""
import importlib.util
import json
import os
import tempfile
from typing import Any, Dict, List, Optional, Tuple

import numpy as np


def model_to_bytes(model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        with open(path, "rb") as file:
            return file.read()


def model_from_bytes(data: bytes, custom_objects: Optional[Dict[str, Any]] = None) -> Any:
    """Without what it was compiled with: that is set anew before training."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        with open(path, "wb") as file:
            file.write(data)
        return keras.models.load_model(path, custom_objects=custom_objects or {}, compile=False)


def optimizer_to_config(optimizer: Any) -> str:
    import keras

    return json.dumps(keras.optimizers.serialize(optimizer))


def optimizer_from_config(text: str, custom_objects: Dict[str, Any]) -> Any:
    import keras

    return keras.optimizers.deserialize(json.loads(text), custom_objects=custom_objects)


def shaped(column: np.ndarray, tensor: Any) -> np.ndarray:
    """A column as an input or an output of the model: its shape and its type."""
    shape = [-1 if size is None else size for size in tensor.shape[1:]]
    column = np.asarray(column, dtype=tensor.dtype)
    return column.reshape([len(column), *shape]) if shape.count(-1) <= 1 else column


class Files:
    """The run's place in the store: the model after each epoch, and how many there were."""

    def __init__(self, task: Dict[str, Any]) -> None:
        self.store = task["store"]
        self.path = task["checkpoint_path"]  # None: nothing is to be kept

    def load(self) -> Optional[Tuple[bytes, int]]:
        if self.path is None or not self.store.exists(f"{self.path}.epoch"):
            return None
        return self.store.read(self.path), int(self.store.read(f"{self.path}.epoch"))

    def save(self, model: bytes, n_epochs: int) -> None:
        if self.path is not None:
            self.store.write(self.path, model)
            self.store.write_text(f"{self.path}.epoch", str(n_epochs))


def batches(task: Dict[str, Any], model: Any, path: str, batch_size: int, shuffle: bool) -> Any:
    """A tf.data.Dataset of (features, labels[, weights]) without end, and its steps per epoch."""
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd
    from horovod.spark.common.estimator import pandas_transform
    from horovod.spark.data import ParquetReader

    change = pandas_transform(task["transformation_fn"])
    shapes = task["label_shapes"]

    def transform(batch: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        batch = change(batch) if change is not None else batch
        for name, tensor in zip(task["feature_cols"], model.inputs):
            batch[name] = shaped(batch[name], tensor)
        for i, (name, tensor) in enumerate(zip(task["label_cols"], model.outputs)):
            if batch[name].dtype.kind == "f":
                batch[name] = batch[name].astype(tensor.dtype)
            if shapes:
                batch[name] = np.reshape(batch[name], shapes[i])
            elif batch[name].size == len(batch[name]) * int(np.prod(tensor.shape[1:])):
                batch[name] = batch[name].reshape([len(batch[name]), *tensor.shape[1:]])
        return batch

    reader = ParquetReader(path, task["columns"], batch_size, hvd.rank(), hvd.size(),
                           task["random_seed"], shuffle, transform=transform,
                           shuffle_rows=task["shuffle_buffer_size"] or 1 << 16,
                           cache=task["inmemory_cache_all"],
                           storage_options=task["store"].storage_options)

    @tf.autograph.experimental.do_not_convert
    def parts(batch: Dict[str, Any]) -> Tuple[Any, ...]:
        def pick(names: List[str]) -> Any:
            return tuple(batch[name] for name in names) if len(names) > 1 else batch[names[0]]

        weight = task["sample_weight_col"]
        more = (batch[weight],) if weight else ()
        return (pick(task["feature_cols"]), pick(task["label_cols"]), *more)

    dataset = reader.tf_dataset().map(parts)
    ahead = task["tensorflow_dataset_prefetch_buffer_size"]
    return dataset.prefetch(ahead) if ahead else dataset, reader.steps_per_epoch


def choose_device(task: Dict[str, Any]) -> None:
    """One GPU for each rank of a host, or none; before TensorFlow uses any."""
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd
    from horovod.spark.common.estimator import check_device
    from horovod.tensorflow.functions import allgather_object

    gpus = tf.config.list_physical_devices("GPU")
    mine = [gpus[hvd.local_rank() % len(gpus)]] if gpus and task["use_gpu"] else []
    tf.config.set_visible_devices(mine, "GPU")
    check_device("GPU" if mine else "CPU", allgather_object)


def compile_model(model: Any, task: Dict[str, Any]) -> float:
    """With a distributed optimizer; the learning rate, as many times as there are ranks."""
    import horovod.tensorflow.keras as hvd

    optimizer = optimizer_from_config(task["optimizer"], task["custom_objects"])
    rate = float(optimizer.learning_rate)
    optimizer.learning_rate = rate * hvd.size()
    options = {"backward_passes_per_step": task["backward_passes_per_step"]}
    if task["gradient_compression"] is not None:
        options["compression"] = task["gradient_compression"]
    model.compile(hvd.DistributedOptimizer(optimizer, **options), loss=task["loss"],
                  loss_weights=task["loss_weights"], metrics=task["metrics"])
    return rate


def rank_zero_callbacks(model: Any, task: Dict[str, Any], files: Files, folder: str) -> List[Any]:
    import keras

    keeper = task["checkpoint_callback"]
    if keeper is not None and keeper.filepath is None:
        keeper.filepath = os.path.join(folder, "best.keras")

    def keep(epoch: int, logs: Any) -> None:
        files.save(model_to_bytes(model), epoch + 1)
        if files.path is not None:
            task["store"].sync_fn(task["run_id"])(os.path.join(folder, "run"))

    logs = os.path.join(folder, "run", task["store"].get_logs_subdir())
    os.makedirs(logs)
    made = [keras.callbacks.CSVLogger(os.path.join(logs, "history.csv"), append=True)]
    if importlib.util.find_spec("tensorboard") is not None:
        made.append(keras.callbacks.TensorBoard(logs))
    return made + ([keeper] if keeper is not None else []) + [
        keras.callbacks.LambdaCallback(on_epoch_end=keep)]


def train(packed: bytes) -> Optional[Tuple[Dict[str, Any], bytes]]:
    import cloudpickle
    import keras

    import horovod.tensorflow.keras as hvd
    from horovod.tensorflow.functions import broadcast_object

    hvd.init()
    task = cloudpickle.loads(packed)
    choose_device(task)
    if task["random_seed"] is not None:
        keras.utils.set_random_seed(task["random_seed"] + hvd.rank())
    files = Files(task)
    kept = broadcast_object(files.load() if hvd.rank() == 0 else None, 0)
    data, first_epoch = kept or (task["model"], 0)
    model = model_from_bytes(data, task["custom_objects"])
    rate = compile_model(model, task)
    training, steps = batches(task, model, task["train_path"], task["batch_size"], task["shuffle"])
    more: Dict[str, Any] = {}
    if task["val_path"]:
        more["validation_data"], n = batches(task, model, task["val_path"],
                                             task["val_batch_size"] or task["batch_size"], False)
        more["validation_steps"] = task["validation_steps_per_epoch"] or n
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                     hvd.callbacks.MetricAverageCallback(), *task["callbacks"]]
        if hvd.rank() == 0:
            callbacks += rank_zero_callbacks(model, task, files, folder)
        history = model.fit(training, shuffle=False, epochs=task["epochs"],
                            initial_epoch=first_epoch,
                            steps_per_epoch=task["train_steps_per_epoch"] or steps,
                            callbacks=callbacks, verbose=task["verbose"] and 2 * (hvd.rank() == 0),
                            **more).history
        model.optimizer.learning_rate = rate
        result = None
        if hvd.rank() == 0:
            best = os.path.join(folder, "best.keras")
            result = (history, open(best, "rb").read() if os.path.exists(best)
                      else model_to_bytes(model))
    hvd.shutdown()
    return result
