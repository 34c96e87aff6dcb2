# SPDX-License-Identifier: Apache-2.0
"""TorchEstimator trains a torch.nn.Module on a DataFrame; TorchModel predicts with it.

Model and optimizer travel in one pickle, so that the optimizer still holds the model's own
parameters when they arrive.
"""
from typing import Any, Callable, Dict, List, Optional

import cloudpickle
import numpy as np

from horovod.spark.common.estimator import HorovodEstimator, HorovodModel, as_list, size_of
from horovod.spark.common.params import ESTIMATOR, MODEL, Row, parameters
from horovod.spark.torch import remote
from horovod.spark.torch.datamodule import ParquetDataModule

TORCH = [
    Row("input_shapes", None, "shape of each feature as the model takes it, -1 for the batch"),
    Row("loss_constructors", None, "functions that make the losses, where these do not pickle"),
    Row("train_minibatch_fn", None, "what to do with a batch, instead of one step of descent"),
]
SOURCE = Row("data_module", ParquetDataModule, "class of the DataModule the batches come from")


@parameters(ESTIMATOR + TORCH + [SOURCE])
class TorchEstimator(HorovodEstimator):
    """model(*features) gives a tensor for each label; loss(output, label) is to fall."""

    RUN_PREFIX = "pytorch"

    def check_model(self) -> None:
        losses, constructors = self.getLoss(), self.getLossConstructors()
        if losses is not None and constructors is not None:
            raise ValueError("loss and loss_constructors are both set: give only one of them")
        if losses is None and constructors is None:
            raise ValueError("Loss parameter is required")
        if self.getOptimizer() is None:
            raise ValueError("Optimizer parameter is required")
        if self.getCallbacks():
            raise ValueError("callbacks are not supported with PyTorch; use metrics")
        n_labels = len(self.getLabelCols())
        for name, value in (("loss", losses), ("loss_constructors", constructors),
                            ("loss_weights", self.getLossWeights()),
                            ("label_shapes", self.getLabelShapes())):
            if isinstance(value, (list, tuple)) and len(value) != n_labels:
                raise ValueError(f"{name} has {len(value)} entries for {n_labels} label columns")
        shapes = self.getInputShapes()
        if shapes is not None and len(shapes) != len(self.getFeatureCols()):
            raise ValueError(f"input_shapes has {len(shapes)} entries for "
                             f"{len(self.getFeatureCols())} feature columns")

    def input_sizes(self) -> List[Optional[int]]:
        return [size_of(shape) for shape in self.getInputShapes() or []]

    def train(self, backend: Any, task: Dict[str, Any]) -> "TorchModel":
        task["losses"] = as_list(task.pop("loss")) if task["loss"] is not None else None
        packed = cloudpickle.dumps((self.getModel(), self.getOptimizer(), task))
        results = backend.run(remote.train, args=(packed,))
        history, state = results[0]
        model = cloudpickle.loads(cloudpickle.dumps(self.getModel()))
        model.load_state_dict(remote.load_state(state))
        return TorchModel(history=history, model=model, feature_columns=self.getFeatureCols(),
                          label_columns=self.getLabelCols(), run_id=task["run_id"],
                          input_shapes=self.getInputShapes())


@parameters(MODEL + TORCH[:1])
class TorchModel(HorovodModel):
    """transform(df) adds the model's outputs."""

    def predictor(self) -> Callable[[List[np.ndarray]], List[np.ndarray]]:
        packed = cloudpickle.dumps(self.getModel())
        shapes = self.getInputShapes()
        loaded: List[Any] = []

        def predict(columns: List[np.ndarray]) -> List[np.ndarray]:
            import torch

            if not loaded:  # once in each Python worker
                loaded.append(cloudpickle.loads(packed).eval())
            with torch.no_grad():
                outputs = loaded[0](*remote.features(columns, shapes))
            return [output.detach().cpu().numpy().reshape(len(columns[0]), -1)
                    for output in as_list(outputs)]

        return predict
