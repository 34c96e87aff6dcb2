# SPDX-License-Identifier: Apache-2.0
"""KerasEstimator trains a Keras model on a DataFrame; KerasModel predicts with it.

Models travel and are saved as the bytes of a .keras file, optimizers and losses as what Keras makes
of them, so the processes need the same Keras and, for objects it does not know, custom_objects.
"""
from typing import Any, Callable, Dict, List, Optional

import cloudpickle
import numpy as np

from horovod.spark.common.estimator import HorovodEstimator, HorovodModel, as_list, size_of
from horovod.spark.common.params import ESTIMATOR, MODEL, Row, parameters
from horovod.spark.keras import remote
from horovod.spark.keras.datamodule import ParquetDataModule

CUSTOM = Row("custom_objects", {}, "what Keras needs to know by name to load the model")
KERAS = [
    CUSTOM,
    Row("checkpoint_callback", None, "a ModelCheckpoint; with the best only, that is the result"),
    Row("data_module", ParquetDataModule, "class of the DataModule the batches come from"),
    Row("backend_env", {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"}, "environment for the processes"),
]


def with_model_as_bytes(values: Dict[str, Any]) -> Dict[str, Any]:
    values = dict(values)
    if values.get("model") is not None:
        values["model"] = remote.model_to_bytes(values["model"])
    if values.get("optimizer") is not None:
        values["optimizer"] = remote.optimizer_to_config(values["optimizer"])
    return values


def with_model(values: Dict[str, Any]) -> Dict[str, Any]:
    values = dict(values)
    custom = values.get("custom_objects") or {}
    if values.get("model") is not None:
        values["model"] = remote.model_from_bytes(values["model"], custom)
    if values.get("optimizer") is not None:
        values["optimizer"] = remote.optimizer_from_config(values["optimizer"], custom)
    return values


@parameters(ESTIMATOR + KERAS)
class KerasEstimator(HorovodEstimator):
    """The model's inputs are the feature columns, its outputs tell the label columns, in order."""

    RUN_PREFIX = "keras"

    def pack(self, values: Any) -> Any:
        return with_model_as_bytes(values)

    @classmethod
    def unpack(cls, values: Any) -> Any:
        return with_model(values)

    def check_model(self) -> None:
        if self.getOptimizer() is None:
            raise ValueError("Optimizer parameter is required")
        if self.getLoss() is None:
            raise ValueError("Loss parameter is required")
        model = self.getModel()
        for what, tensors, columns in (("inputs", model.inputs, self.getFeatureCols()),
                                       ("outputs", model.outputs, self.getLabelCols())):
            if len(tensors) != len(columns):
                raise ValueError(f"the model has {len(tensors)} {what} for {len(columns)} columns: "
                                 f"{', '.join(columns)}")

    def input_sizes(self) -> List[Optional[int]]:
        return [size_of(tensor.shape) for tensor in self.getModel().inputs]

    def train(self, backend: Any, task: Dict[str, Any]) -> "KerasModel":
        task["model"] = remote.model_to_bytes(self.getModel())
        task["optimizer"] = remote.optimizer_to_config(self.getOptimizer())
        results = backend.run(remote.train, args=(cloudpickle.dumps(task),),
                              env=self.getBackendEnv())
        history, model = results[0]
        return self.get_model_class()(**self._get_model_kwargs(
            remote.model_from_bytes(model, self.getCustomObjects()), history, task["run_id"],
            task["metadata"], remote.float_type()))

    def get_model_class(self) -> type:
        return KerasModel

    def _get_model_kwargs(self, model: Any, history: Any, run_id: str, metadata: Any,
                          floatx: str) -> Dict[str, Any]:
        return dict(history=history, model=model, run_id=run_id, _metadata=metadata, _floatx=floatx,
                    feature_columns=self.getFeatureCols(), label_columns=self.getLabelCols(),
                    custom_objects=self.getCustomObjects())


@parameters(MODEL + [CUSTOM, Row("_floatx", None, "Keras' type of numbers in training")])
class KerasModel(HorovodModel):
    """transform(df) adds the model's outputs."""

    def pack(self, values: Any) -> Any:
        return with_model_as_bytes(values)

    @classmethod
    def unpack(cls, values: Any) -> Any:
        return with_model(values)

    def predictor(self) -> Callable[[List[np.ndarray]], List[np.ndarray]]:
        data = remote.model_to_bytes(self.getModel())
        custom = self.getCustomObjects()
        loaded: List[Any] = []

        def predict(columns: List[np.ndarray]) -> List[np.ndarray]:
            if not loaded:  # once in each Python worker
                loaded.append(remote.model_from_bytes(data, custom))
            model = loaded[0]
            inputs = [remote.shaped(column, tensor) for column, tensor in zip(columns,
                                                                              model.inputs)]
            outputs = as_list(model.predict_on_batch(inputs if len(inputs) > 1 else inputs[0]))
            return [np.asarray(output).reshape(len(columns[0]), -1) for output in outputs]

        return predict
