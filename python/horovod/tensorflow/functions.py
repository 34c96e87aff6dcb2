# SPDX-License-Identifier: Apache-2.0
"""Giving state to all ranks: variables, and any Python object."""
import tensorflow as tf

from horovod.common import objects
from horovod.common.process_sets import global_process_set
from horovod.tensorflow.collectives import as_tf_variable, broadcast_, in_one_graph, on_device
from horovod.tensorflow.mpi_ops import broadcast


def _broadcast_all(variables, root_rank, process_set, inplace):
    if inplace:
        return broadcast_(variables, root_rank, "broadcast_variables", process_set)
    values = [broadcast(variable, root_rank, name=f"broadcast_variables_{i}",
                        process_set=process_set)
              for i, variable in enumerate(variables)]
    return [variable.assign(value) for variable, value in zip(variables, values)]


def broadcast_variables(variables, root_rank, process_set=global_process_set, inplace=False):
    """Gives variables the values they have on root_rank (a global rank).

    Eagerly it is done on return; in a graph of TensorFlow 1 style the returned operation does it.
    Variables must come in the same order on all ranks.
    """
    variables = [as_tf_variable(variable) for variable in variables]
    done = in_one_graph(_broadcast_all, variables, root_rank, process_set, inplace)
    return None if tf.executing_eagerly() else tf.group(*[tf.group(value) for value in done])


def broadcast_global_variables(root_rank):
    """Gives all global variables of the graph the values of root_rank (graph mode only)."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`horovod.tensorflow.broadcast_variables(<model/optimizer variables>)` instead, or "
            "`hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)` in model.fit() of Keras.")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Session hook: once the session exists, all ranks get the variables of root_rank."""

    def __init__(self, root_rank, device=""):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._operation = None
        self._graph = None

    def begin(self):
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._graph is not graph:
            with on_device(self.device):
                self._operation = broadcast_global_variables(self.root_rank)
            self._graph = graph

    def after_create_session(self, session, coord):
        session.run(self._operation)


def broadcast_object(obj, root_rank=0, session=None, name=None, process_set=global_process_set):
    """The object of root_rank on all ranks. session is not needed and ignored."""
    del session
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(root_rank=0, session=None, name=None, process_set=global_process_set):
    """A function that does broadcast_object() to what it is given."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(obj, session=None, name=None, process_set=global_process_set):
    """The objects of all ranks as a list. session is not needed and ignored."""
    del session
    return objects.allgather_object(obj, name, process_set)
