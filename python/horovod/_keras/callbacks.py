# SPDX-License-Identifier: Apache-2.0
"""The callbacks, written once: bind() makes them callbacks of one Keras.

Every hook below is one of keras.callbacks.Callback.
"""
import numpy as np

from horovod._keras.backends import backend_of
from horovod.common import basics


def bind(keras, module, mixin):
    """The mixin as a callback of this Keras, in the module where users find it."""
    return type(mixin.__name__, (mixin, keras.callbacks.Callback),
                {"keras": keras, "__module__": module, "__doc__": mixin.__doc__})


def optimizer_variables(optimizer):
    """Variables of an optimizer of any generation."""
    variables = getattr(optimizer, "variables", [])
    if callable(variables) and not isinstance(variables, list):
        variables = variables()
    return list(variables)


class BroadcastGlobalVariablesCallback:
    """Gives all ranks the model and the optimizer of root_rank, after the first batch.

    Only then do all variables exist. Variables in local_variables keep their own values.
    """

    def __init__(self, root_rank, device="", local_variables=None):
        super().__init__()
        del device
        for variable in local_variables or []:
            if not hasattr(variable, "assign"):
                raise ValueError("All local variables must be of type tf.Variable.")
        self.root_rank = root_rank
        self.local_variables = list(local_variables or [])
        self.broadcast_done = False

    def on_train_batch_end(self, batch, logs=None):
        if self.broadcast_done:
            return
        self.broadcast_done = True
        local = {id(variable) for variable in self.local_variables}
        variables = list(self.model.weights) + optimizer_variables(self.model.optimizer)
        backend_of(self.keras).broadcast_variables(
            [variable for variable in variables if id(variable) not in local], self.root_rank)


class MetricAverageCallback:
    """Averages the metrics of an epoch over ranks, for the callbacks that come after it."""

    def __init__(self, device=""):
        super().__init__()
        del device

    def on_epoch_end(self, epoch, logs=None):
        if not logs or basics.size() == 1:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([float(logs[name]) for name in names], dtype=np.float64)
        backend = backend_of(self.keras)
        averages = backend.allreduce(values, "keras.metric_average", basics.Average, 1.0, 1.0,
                                     backend.Compression.none)
        for name, average in zip(names, np.asarray(averages)):
            logs[name] = float(average)


class ReportCallback:
    """Tells whoever watches the job how far this rank has got: hvd.report() after every batch.

    batch_size: samples of a batch on this rank, for samples per second.
    """

    def __init__(self, batch_size=None):
        super().__init__()
        self.batch_size = batch_size
        self.step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        basics.report(self.step, (logs or {}).get("loss"), self.batch_size)


class LearningRateScheduleCallback:
    """Sets the learning rate to initial_lr times multiplier, from start_epoch until end_epoch.

    multiplier: a function of the epoch, or a number that is applied once more each epoch.
    staircase: at the start of an epoch only; otherwise after every batch, the epoch a fraction.
    momentum_correction: when the rate changes, past gradients in the momentum change with it.
    """

    def __init__(self, initial_lr, multiplier, start_epoch=0, end_epoch=None,
                 staircase=True, momentum_correction=True, steps_per_epoch=None):
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = None
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.staircase = True
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def _find_steps_per_epoch(self):
        steps = (self.params or {}).get("steps")
        if steps:
            return steps
        raise ValueError("Could not autodetect the number of steps per epoch. Please specify the "
                         f"steps_per_epoch parameter to the {type(self).__name__}() or upgrade "
                         "to the latest version of Keras.")

    def _read(self):
        return float(np.asarray(self.model.optimizer.learning_rate))

    def _adjust(self, epoch):
        old = self._read()
        new = float(self.initial_lr * self.multiplier(epoch))
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and old > 0:
            self._correct_momentum(new / old)

    def _correct_momentum(self, ratio):
        """Scaling what momentum has gathered is the same as scaling momentum for one step."""
        optimizer = self.model.optimizer
        if ratio == 1.0 or not getattr(optimizer, "momentum", None):
            return
        gathered = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", [])
        for variable in gathered:
            if variable is not None:
                variable.assign(variable * ratio)

    def _covers(self, epoch):
        return epoch >= self.start_epoch and (self.end_epoch is None or epoch < self.end_epoch)

    def on_train_begin(self, logs=None):
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._find_steps_per_epoch()

    def on_epoch_begin(self, epoch, logs=None):
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if not self._covers(self.current_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(self.current_epoch)
        elif not self.staircase:
            self._adjust(self.current_epoch + float(batch) / self.steps_per_epoch)

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["lr"] = self._read()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Lets the learning rate grow from initial_lr / size to initial_lr over warmup_epochs."""

    def __init__(self, initial_lr, warmup_epochs=5, momentum_correction=True,
                 steps_per_epoch=None, verbose=0):
        def multiplier(epoch):
            # One step further, so that the last step of the warm-up has the full rate.
            epoch += 1.0 / self.steps_per_epoch
            return 1.0 / basics.size() * (epoch * (basics.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, start_epoch=0, end_epoch=warmup_epochs,
                         staircase=False, momentum_correction=momentum_correction,
                         steps_per_epoch=steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0 and basics.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._read()}.")


def best_model_checkpoint(keras, module):
    """BestModelCheckpoint for this Keras: a ModelCheckpoint that needs no path yet."""

    class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
        """Keeps the best model so far; whoever uses it sets filepath before training."""

        def __init__(self, monitor="val_loss", verbose=0, save_weights_only=False, mode="auto",
                     save_freq="epoch"):
            suffix = ".weights.h5" if save_weights_only else ".keras"
            super().__init__(filepath="unset" + suffix, monitor=monitor, verbose=verbose,
                             save_best_only=True, save_weights_only=save_weights_only, mode=mode,
                             save_freq=save_freq)
            self.filepath = None

        def on_train_begin(self, logs=None):
            if self.filepath is None:
                raise ValueError("BestModelCheckpoint does not know where to write: set its "
                                 "filepath, such as \"best.keras\", before training.")
            super().on_train_begin(logs)

    BestModelCheckpoint.__module__ = module
    return BestModelCheckpoint
