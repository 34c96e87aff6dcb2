# SPDX-License-Identifier: Apache-2.0
"""Elastic training with Keras, written once: the state, and callbacks (see callbacks.bind)."""
import numpy as np

from horovod._keras.backends import backend_of
from horovod._keras.callbacks import optimizer_variables
from horovod.common import basics
from horovod.common.elastic import ObjectState
from horovod.common.objects import broadcast_object


class KerasState(ObjectState):
    """A model with its optimizer, and plain values given by keyword."""

    def __init__(self, keras, model, optimizer=None, **kwargs):
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not getattr(self.optimizer, "built", True):
            self.optimizer.build(model.trainable_variables)  # to have variables to give to others
        self._backend = backend_of(keras)
        self._values = self._read()
        super().__init__(bcast_object=broadcast_object, get_rank=basics.rank, **kwargs)

    def _variables(self):
        return list(self.model.weights) + optimizer_variables(self.optimizer)

    def _read(self):
        return [np.array(variable.numpy()) for variable in self._variables()]

    def save(self):
        self._values = self._read()
        super().save()

    def restore(self):
        for variable, value in zip(self._variables(), self._values):
            variable.assign(value)
        super().restore()

    def contents(self):
        # The optimizer is that of the model, as a rule: then it is in there, once.
        own = {} if self.optimizer is getattr(self.model, "optimizer", None) \
            else {"optimizer": self.optimizer}
        return {**super().contents(), "model": self.model, **own}

    def checkpoints(self):
        from horovod._keras import checkpoint

        return checkpoint

    def sync(self):
        self._backend.broadcast_variables(self._variables(), 0)
        self._values = self._read()
        super().sync()


class CommitStateCallback:
    """Commits the state every so many batches, and at the end of an epoch."""

    def __init__(self, state, batches_per_commit=1):
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs=None):
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch, logs=None):
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self._commit()

    def on_epoch_end(self, epoch, logs=None):
        self._commit()

    def _commit(self):
        self.state.commit()
        self.batches_remaining = self.batches_per_commit


class UpdateBatchStateCallback:
    """Keeps state.batch, the batch of the epoch that was done last.

    After a restart other callbacks, such as the progress bar, are told how many are left; fit() is
    told by its caller: steps_per_epoch=n - state.batch.
    """

    def __init__(self, state):
        super().__init__()
        self.state = state
        self.steps_per_epoch = None

    def on_train_begin(self, logs=None):
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch, logs=None):
        steps = (self.params or {}).get("steps")
        if steps:
            if self.steps_per_epoch is None:
                self.steps_per_epoch = steps
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch, logs=None):
        self.state.batch = batch

    def on_epoch_end(self, epoch, logs=None):
        self.state.batch = 0


class UpdateEpochStateCallback:
    """Keeps state.epoch: how many epochs are done, over all restarts."""

    def __init__(self, state):
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs=None):
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch, logs=None):
        self.state.epoch = self.initial_epoch + epoch + 1
