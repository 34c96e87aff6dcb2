# SPDX-License-Identifier: Apache-2.0
"""Elastic training with TensorFlow: states, and run(), the loop around the training function."""
import functools

import tensorflow as tf

from horovod._keras.elastic import KerasState
from horovod.common import basics, elastic
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.collectives import as_tf_variable
from horovod.tensorflow.functions import broadcast_object, broadcast_variables


def _is_of_horovod(error):
    """Whether a collective failed: its kernel leaves the library's status in TensorFlow's payload.

    Sessions and Keras make new errors of those they catch; the payload is in the old one.
    """
    while error is not None:
        if b"horovod.status" in getattr(error, "experimental_payloads", ()):
            return True
        error = error.__context__
    return False


def _translate_errors(func):
    """A failed collective is an UnknownError in TensorFlow; the elastic loop has its own word."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        try:
            return func(*args, **kwargs)
        except tf.errors.UnknownError as error:
            if _is_of_horovod(error):
                raise HorovodInternalError(error.message) from error
            raise

    return wrapper


def run(func=None, *, checkpoint=None):
    """Decorator: func(state, ...) is run again after failures and changes of hosts.

    checkpoint: the path of state.commit(path=...); a job that begins goes on from the newest
    checkpoint there.
    """
    if func is None:
        return functools.partial(run, checkpoint=checkpoint)
    return elastic.run_fn(_translate_errors(func), basics.rejoin, checkpoint)


class TensorFlowState(ObjectState):
    """tf.Variables, and plain values given by keyword."""

    def __init__(self, variables=None, session=None, **kwargs):
        if variables is None:
            variables = [] if tf.executing_eagerly() else tf.compat.v1.global_variables()
        self.variables = [as_tf_variable(variable) for variable in variables]
        self.session = session
        self._values = self._read()
        super().__init__(bcast_object=broadcast_object, get_rank=basics.rank, **kwargs)

    def _read(self):
        if self.session is not None:
            return self.session.run(self.variables)
        return [variable.numpy() for variable in self.variables]

    def save(self):
        self._values = self._read()
        super().save()

    def restore(self):
        for variable, value in zip(self.variables, self._values):
            if self.session is not None:
                variable.load(value, self.session)
            else:
                variable.assign(value)
        super().restore()

    def contents(self):
        if self.session is not None:
            raise NotImplementedError("checkpoints of variables of a session: use tf.train.Saver")
        return {**super().contents(), "variables": self.variables}

    def checkpoints(self):
        from horovod.tensorflow import checkpoint

        return checkpoint

    def sync(self):
        if self.variables:
            if self.session is None:
                broadcast_variables(self.variables, root_rank=0)
            else:
                self.session.run(broadcast_variables(self.variables, root_rank=0))
        self._values = self._read()
        super().sync()


class TensorFlowKerasState(KerasState):
    """A Keras model with its optimizer, and plain values given by keyword."""

    def __init__(self, model, optimizer=None, backend=None, **kwargs):
        del backend  # sessions of Keras are a thing of TensorFlow 1
        super().__init__(tf.keras, model, optimizer, **kwargs)
