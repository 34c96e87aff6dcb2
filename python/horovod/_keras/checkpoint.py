# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of TensorFlow and of Keras, written once: hvd.checkpoint, and the callback."""
import logging

import numpy as np

from horovod._keras.callbacks import optimizer_variables
from horovod.checkpoint import face
from horovod.checkpoint.frameworks import NumpyFramework

_log = logging.getLogger("horovod")


def _is_variable(value):
    return hasattr(value, "assign") and hasattr(value, "numpy")


class KerasFramework(NumpyFramework):
    """Variables and tensors; models with their optimizer, if it has any variables, and optimizers.
    """

    def is_tensor(self, value):
        return super().is_tensor(value) or (
            hasattr(value, "numpy") and hasattr(value, "shape") and hasattr(value, "dtype"))

    def _array(self, tensor):
        return tensor if isinstance(tensor, np.ndarray) else np.asarray(tensor.numpy())

    def state_of(self, value):
        if _is_variable(value):
            return self._array(value)
        if hasattr(value, "get_weights") and hasattr(value, "weights"):
            variables = optimizer_variables(getattr(value, "optimizer", None))
            return {"weights": list(value.weights), "optimizer": variables}
        if hasattr(value, "apply_gradients"):
            return optimizer_variables(value)
        return super().state_of(value)

    def restore(self, value, state):
        if _is_variable(value):
            value.assign(state)
        elif hasattr(value, "get_weights") and hasattr(value, "weights"):
            self._assign(f"model {value.name}", value.weights, state["weights"])
            optimizer = getattr(value, "optimizer", None)
            if optimizer is not None and state["optimizer"]:
                if not getattr(optimizer, "built", True):
                    optimizer.build(value.trainable_variables)
                self._assign("its optimizer", optimizer_variables(optimizer), state["optimizer"])
        elif hasattr(value, "apply_gradients"):
            self._assign("the optimizer", optimizer_variables(value), state)
        else:
            super().restore(value, state)

    def _assign(self, what, variables, values):
        shapes = [tuple(variable.shape) for variable in variables]
        if shapes != [value.shape for value in values]:
            raise ValueError(f"the checkpoint does not fit {what}: it has {len(values)} variables, "
                             f"here are {len(shapes)}, or they have other shapes. Is it built?")
        for variable, value in zip(variables, values):
            variable.assign(value)


save, load = face(KerasFramework())


class CheckpointCallback:
    """Saves model and optimizer every so many epochs; fit() goes on from the newest checkpoint.

    All ranks need it. path: a directory or URL that all ranks reach; keep: how many checkpoints
    stay there. initial_epoch has the epoch that training goes on with.
    """

    def __init__(self, path, epochs_per_save=1, keep=3):
        super().__init__()
        self.path = path
        self.epochs_per_save = epochs_per_save
        self.keep = keep
        self.initial_epoch = 0

    def on_train_begin(self, logs=None):
        if not self.model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        found = load(self.path, {"model": self.model})
        if found is None:
            return
        self.initial_epoch = found.state["epoch"]
        if hasattr(self.model, "_initial_epoch"):
            self.model._initial_epoch = self.initial_epoch
        else:
            _log.warning("this Keras cannot be told while it trains that %d epochs are done: call "
                         "fit() with initial_epoch=%d", self.initial_epoch, self.initial_epoch)

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.epochs_per_save == 0:
            save(self.path, {"model": self.model, "epoch": epoch + 1}, epoch + 1, self.keep)
