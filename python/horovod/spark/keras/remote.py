# SPDX-License-Identifier: Apache-2.0
"""What every rank of a KerasEstimator does: model.fit() over the batches of its DataModule.

All ranks make the same number of steps. The first one writes the model to the store after each
epoch, with logs (history.csv, and TensorBoard's where that is installed), and returns (history,
model); with a checkpoint_callback that keeps the best only, that model, else the last.
"""
import glob
import importlib.util
import json
import os
import re
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

    return json.dumps(keras.optimizers.serialize(keras.optimizers.get(optimizer)))


def optimizer_from_config(text: str, custom_objects: Dict[str, Any]) -> Any:
    import keras

    return keras.optimizers.deserialize(json.loads(text), custom_objects=custom_objects)


def float_type() -> str:
    import keras

    return keras.backend.floatx()


def shaped(values: Any, tensor: Any) -> Any:
    """A column as an input of the model: its shape and its type."""
    import tensorflow as tf

    values = tf.convert_to_tensor(values)
    if values.dtype != tensor.dtype:
        values = tf.cast(values, tensor.dtype)
    shape = [-1 if size is None else size for size in tensor.shape[1:]]
    return tf.reshape(values, [tf.shape(values)[0], *shape]) if shape.count(-1) <= 1 else values


def shaped_label(values: Any, tensor: Any, shape: Optional[List[int]]) -> Any:
    """A column as what an output should have been: as asked, or as the output if that fits."""
    import tensorflow as tf

    if values.dtype.is_floating:
        values = tf.cast(values, tensor.dtype)
    if shape is not None:
        return tf.reshape(values, shape)
    sizes, wanted = list(values.shape[1:]), list(tensor.shape[1:])
    if None in sizes + wanted or np.prod(sizes) != np.prod(wanted):
        return values
    return tf.reshape(values, [tf.shape(values)[0], *wanted])


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


def fit_to(model: Any, data: Any, task: Dict[str, Any]) -> Any:
    """What a DataModule gives, for model.fit(): a dataset begins anew where it ends, one of columns
    becomes (features, labels[, weights]), and what is no dataset is left as it is."""
    import tensorflow as tf

    if not isinstance(data, tf.data.Dataset):
        return data
    shapes = task["label_shapes"] or [None] * len(task["label_cols"])

    @tf.autograph.experimental.do_not_convert
    def parts(batch: Dict[str, Any]) -> Tuple[Any, ...]:
        inputs = [shaped(batch[name], tensor)
                  for name, tensor in zip(task["feature_cols"], model.inputs)]
        labels = [shaped_label(batch[name], tensor, shape) for name, tensor, shape
                  in zip(task["label_cols"], model.outputs, shapes)]
        weight = task["sample_weight_col"]
        more = (batch[weight],) if weight else ()
        return (*(tuple(of) if len(of) > 1 else of[0] for of in (inputs, labels)), *more)

    if isinstance(data.element_spec, dict):
        data = data.map(parts)
    data = data.repeat()
    ahead = task["tensorflow_dataset_prefetch_buffer_size"]
    return data.prefetch(ahead) if ahead else data


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


def rate_of(optimizer: Any) -> Any:
    """A number or a schedule, of which the optimizer itself tells only what it is at the time."""
    import keras

    rate = optimizer.get_config()["learning_rate"]
    return keras.optimizers.schedules.deserialize(rate) if isinstance(rate, dict) else rate


def times(rate: Any, factor: int) -> Any:
    """A number, or a schedule, that is so many times as large."""
    import keras

    class Scaled(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return rate(step) * factor

        def get_config(self) -> Dict[str, Any]:
            return {"factor": factor, "rate": keras.optimizers.schedules.serialize(rate)}

    return Scaled() if callable(rate) else rate * factor


def compile_model(model: Any, task: Dict[str, Any]) -> Any:
    """With a distributed optimizer, whose learning rate is as many times that of one rank, which is
    returned, as there are ranks."""
    import keras

    import horovod.tensorflow.keras as hvd

    options = {"backward_passes_per_step": task["backward_passes_per_step"]}
    if task["gradient_compression"] is not None:
        options["compression"] = task["gradient_compression"]
    with keras.utils.custom_object_scope(task["custom_objects"]):
        optimizer = optimizer_from_config(task["optimizer"], task["custom_objects"])
        rate = rate_of(optimizer)
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
    optimizer.learning_rate = times(rate, hvd.size())
    model.compile(optimizer, loss=task["loss"], loss_weights=task["loss_weights"],
                  metrics=task["metrics"])
    return rate


def rank_zero_callbacks(model: Any, task: Dict[str, Any], files: Files, folder: str) -> List[Any]:
    import keras

    checkpoint = task["checkpoint_callback"]
    if checkpoint is not None and checkpoint.filepath is None:
        suffix = ".weights.h5" if checkpoint.save_weights_only else ".keras"
        checkpoint.filepath = os.path.join(folder, "best" + suffix)

    def keep(epoch: int, logs: Any) -> None:
        files.save(model_to_bytes(model), epoch + 1)
        if files.path is not None:
            task["store"].sync_fn(task["run_id"])(os.path.join(folder, "run"))

    logs = os.path.join(folder, "run", task["store"].get_logs_subdir())
    os.makedirs(logs)
    made = [keras.callbacks.CSVLogger(os.path.join(logs, "history.csv"), append=True)]
    if importlib.util.find_spec("tensorboard") is not None:
        made.append(keras.callbacks.TensorBoard(logs))
    return made + ([checkpoint] if checkpoint is not None else []) + [
        keras.callbacks.LambdaCallback(on_epoch_end=keep)]


def best_model(model: Any, task: Dict[str, Any]) -> Any:
    """What the checkpoint_callback has kept, if that is the best only; else the model as it is."""
    import keras

    checkpoint = task["checkpoint_callback"]
    if checkpoint is None or not checkpoint.save_best_only:
        return model
    # Names may have the epoch and metrics in them: {epoch:02d}-{val_loss:.2f}
    pattern = re.sub(r"{[^}]*}", "*", glob.escape(str(checkpoint.filepath)))
    kept = max(glob.glob(pattern), key=os.path.getmtime, default=None)
    if kept is None:
        return model
    if checkpoint.save_weights_only:
        model.load_weights(kept)
        return model
    return keras.models.load_model(kept, custom_objects=task["custom_objects"], compile=False)


def train(packed: bytes) -> Optional[Tuple[Dict[str, Any], bytes]]:
    import cloudpickle
    import keras

    import horovod.tensorflow.keras as hvd
    from horovod.spark.common.datamodule import make_data_module, steps_per_epoch
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
    train_steps, val_steps = steps = steps_per_epoch(task, hvd.size())
    with tempfile.TemporaryDirectory() as folder, make_data_module(
            task["data_module"], task, hvd.rank(), hvd.size(), steps) as source:
        training = fit_to(model, source.train_data(), task)
        more: Dict[str, Any] = {}
        if task["val_path"]:
            more = {"validation_data": fit_to(model, source.val_data(), task),
                    "validation_steps": val_steps}
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                     hvd.callbacks.MetricAverageCallback(), *task["callbacks"]]
        if hvd.rank() == 0:
            callbacks += rank_zero_callbacks(model, task, files, folder)
        history = model.fit(training, shuffle=False, epochs=task["epochs"],
                            initial_epoch=first_epoch, steps_per_epoch=train_steps,
                            callbacks=callbacks, verbose=task["verbose"] and 2 * (hvd.rank() == 0),
                            **more).history
        model.optimizer.learning_rate = rate
        result = None
        if hvd.rank() == 0:
            result = history, model_to_bytes(best_model(model, task))
    hvd.shutdown()
    return result
