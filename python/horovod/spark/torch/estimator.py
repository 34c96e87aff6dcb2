# SPDX-License-Identifier: Apache-2.0
"""TorchEstimator trains a torch.nn.Module on a DataFrame; TorchModel predicts with it.

Model and optimizer travel in one pickle, so that the optimizer still holds the model's own
parameters when they arrive.
"""
from typing import Any, Callable, Dict, List, Optional, Tuple

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
MODEL_TORCH = [
    TORCH[0],
    Row("optimizer", None, "the optimizer, of the trained model's parameters"),
    Row("loss", None, "loss function, or one for each label column"),
    TORCH[1],
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
        return self.trained(results[0], task)

    def trained(self, result: Tuple[Any, bytes], task: Dict[str, Any]) -> "TorchModel":
        """A copy of the model with the state of rank 0, and of the optimizer that has it."""
        history, state = result
        model, optimizer = cloudpickle.loads(cloudpickle.dumps((self.getModel(),
                                                                self.getOptimizer())))
        model.load_state_dict(remote.load_state(state))
        return self.get_model_class()(**self._get_model_kwargs(
            model, history, optimizer, task["run_id"], task["metadata"]))

    def get_model_class(self) -> type:
        return TorchModel

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str,
                          metadata: Any) -> Dict[str, Any]:
        return dict(history=history, model=model, optimizer=optimizer, run_id=run_id,
                    feature_columns=self.getFeatureCols(), label_columns=self.getLabelCols(),
                    input_shapes=self.getInputShapes(), loss=self.getLoss(),
                    loss_constructors=self.getLossConstructors(), _metadata=metadata)


@parameters(MODEL + MODEL_TORCH)
class TorchModel(HorovodModel):
    """transform(df) adds the model's outputs."""

    def get_prediction_fn(self) -> Callable[[Any, Any], Any]:
        """A function of the model and one row; where a subclass has its own, that is called."""
        names, shapes = self.getFeatureColumns(), self.getInputShapes()

        def predict(model: Any, row: Any) -> Any:
            return model(*remote.features([np.asarray([row[name]]) for name in names], shapes))

        return predict

    def _predict_batch(self) -> Callable[[Any, List[np.ndarray]], List[Any]]:
        """A function of the model and columns that gives tensors."""
        shapes = self.getInputShapes()
        if type(self).get_prediction_fn is TorchModel.get_prediction_fn:
            return lambda model, columns: as_list(model(*remote.features(columns, shapes)))
        names, predict = self.getFeatureColumns(), self.get_prediction_fn()

        def by_row(model: Any, columns: List[np.ndarray]) -> List[Any]:
            import torch
            from pyspark.sql import Row as SparkRow

            rows = [as_list(predict(model, SparkRow(**dict(zip(names, values)))))
                    for values in zip(*columns)]
            return [torch.stack([torch.as_tensor(value).reshape(-1) for value in outputs])
                    for outputs in zip(*rows)]

        return by_row

    def predictor(self) -> Callable[[List[np.ndarray]], List[np.ndarray]]:
        packed = cloudpickle.dumps((self.getModel(), self._predict_batch()))
        loaded: List[Any] = []

        def predict(columns: List[np.ndarray]) -> List[np.ndarray]:
            import torch

            if not loaded:  # once in each Python worker
                loaded.extend(cloudpickle.loads(packed))
            model, predict_batch = loaded
            model.eval()
            with torch.no_grad():
                outputs = predict_batch(model, columns)
            return [output.detach().cpu().numpy().reshape(len(columns[0]), -1)
                    for output in outputs]

        return predict
