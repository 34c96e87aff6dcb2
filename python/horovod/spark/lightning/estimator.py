# SPDX-License-Identifier: Apache-2.0
"""TorchEstimator trains a LightningModule on a DataFrame; TorchModel predicts with it.

The module brings its own optimizer and losses. Its steps get a batch as {column: tensor}.
"""
from typing import Any, Dict, List, Optional

import cloudpickle

from horovod.spark import torch as plain
from horovod.spark.common.estimator import HorovodEstimator, size_of
from horovod.spark.common.params import ESTIMATOR, MODEL, Row, parameters
from horovod.spark.lightning import remote
from horovod.spark.torch.estimator import MODEL_TORCH, TORCH

MIN_PL_VERSION = "2.0.0"  # of pytorch_lightning

LIGHTNING = [
    Row("num_gpus", None, "accepted: a process has one"),
    Row("logger", None, "a Lightning logger, for rank 0"),
    Row("log_every_n_steps", 50, "steps between two entries in the log"),
    Row("data_module", None, "class of a DataModule, or of a LightningDataModule, for the batches"),
    Row("loader_num_epochs", None, "accepted: the reader makes as many as are trained"),
    Row("terminate_on_nan", False, "end the job at an operation whose gradient is NaN"),
    Row("profiler", None, "a Lightning profiler, or its name"),
    Row("trainer_args", None, "further arguments for pytorch_lightning.Trainer"),
    Row("debug_data_loader", False, "loaders with a queue print how long training waited for them"),
    Row("train_async_data_loader_queue_size", None, "batches a thread reads ahead; default: none"),
    Row("val_async_data_loader_queue_size", None, "the same in validation"),
]
# What a LightningModule decides itself.
OWN = ("optimizer", "loss", "loss_weights", "loss_constructors", "metrics", "train_minibatch_fn")


@parameters(ESTIMATOR + TORCH + LIGHTNING)
class TorchEstimator(HorovodEstimator):
    RUN_PREFIX = "pytorch"

    def check_model(self) -> None:
        lightning = remote.import_lightning()
        if not isinstance(self.getModel(), lightning.LightningModule):
            raise ValueError("Model parameter is not a LightningModule; horovod.spark.torch has an "
                             "estimator for plain modules")
        for name in OWN:
            if self.getOrDefault(name):
                raise ValueError(f"{name} is set: with a LightningModule it must not be, since the "
                                 "module brings its own optimizer, loss and metrics")
        remote.compression_hook(self.getGradientCompression())

    def input_sizes(self) -> List[Optional[int]]:
        return [size_of(shape) for shape in self.getInputShapes() or []]

    def train(self, backend: Any, task: Dict[str, Any]) -> "TorchModel":
        # Chosen here: a Compression is another class where it has been unpickled.
        task["compression_hook"] = remote.compression_hook(task.pop("gradient_compression"))
        packed = cloudpickle.dumps((self.getModel(), task))
        return self.trained(backend.run(remote.train, args=(packed,))[0], task)

    trained = plain.TorchEstimator.trained
    _get_model_kwargs = plain.TorchEstimator._get_model_kwargs

    def get_model_class(self) -> type:
        return TorchModel


@parameters(MODEL + MODEL_TORCH)
class TorchModel(plain.TorchModel):
    """transform(df) adds the outputs of the module's forward()."""
