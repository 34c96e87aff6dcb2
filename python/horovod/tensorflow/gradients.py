# SPDX-License-Identifier: Apache-2.0
"""Reducing gradients over ranks: what the tape, the optimizers and Keras have in common.

A GradientReducer takes a list of gradients and gives it back reduced. Inside a graph the reductions
become part of it. Eagerly they are put into a small tf.function of their own, made once for each
set of settings: all of them are then in flight together, and ranks may be late one by one.
"""
import functools
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod.common import basics
from horovod.common.groups import check_groups, grouped_positions
from horovod.common.process_sets import global_process_set
from horovod.common.util import check_adasum
from horovod.tensorflow.collectives import (
    allreduce,
    as_tf_variable,
    grouped_allreduce,
    size_for,
)
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Average, is_elastic


@dataclass(frozen=True)
class _Settings:
    """How gradients are reduced; equal settings share a compiled function."""

    prefix: str
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    op: int
    prescale: float
    postscale: float
    process_set: Any

    def reduce(self, grads, groups, generic_names):
        """Reduces a list without None; groups: tuples of indices that travel together."""
        if self.sparse_as_dense:
            grads = [tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad
                     for grad in grads]
        reduced = list(grads)
        common = dict(
            device_dense=self.device_dense, device_sparse=self.device_sparse,
            compression=self.compression, op=self.op, prescale_factor=self.prescale,
            postscale_factor=self.postscale, process_set=self.process_set,
            ignore_name_scope=generic_names)
        scope = "" if generic_names else self.prefix + "_Allreduce/"
        for number, group in enumerate(groups):
            if len(group) == 1:
                i = group[0]
                reduced[i] = allreduce(grads[i], name=f"{scope}grad_{i}", **common)
            else:
                outputs = grouped_allreduce([grads[i] for i in group],
                                            name=f"{scope}grads_{number}", **common)
                for i, output in zip(group, outputs):
                    reduced[i] = output
        return reduced


@functools.lru_cache(maxsize=64)
def _compiled(settings, set_id, size):
    """A tf.function for eager callers; the id and the size of the set are part of its graphs."""
    del set_id, size
    return tf.function(settings.reduce, reduce_retracing=True, autograph=False)


def _refuse_xla():
    """A function the user compiles with XLA cannot hold collectives; say what to write instead."""
    if tf.executing_eagerly():
        return
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        return  # TensorFlow will refuse by itself
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError("Horovod's collectives cannot be compiled by XLA: use jit_compile=False "
                         "in model.compile() and in tf.function.")


def _identity(variable):
    """Names of variables need not be unique."""
    return id(as_tf_variable(variable))


class GradientReducer:
    """Reduces gradients over the ranks of a process set, except those of local variables."""

    def __init__(self, prefix, device_dense="", device_sparse="", compression=Compression.none,
                 sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0,
                 groups=None, process_set=global_process_set, scale_local_gradients=True):
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if basics.is_initialized() and process_set.size() is not None:
            check_adasum(op, process_set, process_set.size())
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self._settings = _Settings(
            prefix, device_dense, device_sparse, compression, sparse_as_dense, op,
            1.0 / gradient_predivide_factor, gradient_predivide_factor, process_set)
        self._groups = check_groups(groups, num_groups)
        self._local = {}  # by identity

    def register_local_var(self, variable):
        """Leaves the gradients of this variable on their rank."""
        self._local[_identity(variable)] = as_tf_variable(variable)

    def is_local(self, variable):
        """Has this variable been registered as local?"""
        return _identity(variable) in self._local

    def communicates(self):
        """Is there anybody to talk to? False in a job of one, unless it may grow."""
        basics.check_not_left_out()
        if is_elastic():
            return bool(self.process_set.included())
        return bool(self.process_set.included()) and self.process_set.size() > 1

    def _scale_local(self, grad):
        if grad is None or not self.scale_local_gradients:
            return grad
        if isinstance(grad, tf.IndexedSlices):
            values = grad.values / size_for(self.process_set, grad.values.dtype)
            return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
        return grad / size_for(self.process_set, grad.dtype)

    def reduce(self, grads, variables, use_generic_names=False):
        """The gradients reduced, in order; None stays None."""
        grads, variables = list(grads), list(variables)
        result = list(grads)
        if not self.communicates():
            return result
        shared = []
        for i, (grad, variable) in enumerate(zip(grads, variables)):
            if self.is_local(variable):
                result[i] = self._scale_local(grad)
            elif grad is not None:
                shared.append(i)
        if not shared:
            return result
        _refuse_xla()
        run = self._settings.reduce
        if tf.executing_eagerly():
            run = _compiled(self._settings, self.process_set.process_set_id,
                            self.process_set.size())
        groups = grouped_positions(self._groups, [variables[i] for i in shared], _identity)
        reduced = run([grads[i] for i in shared], groups, bool(use_generic_names))
        for i, grad in zip(shared, reduced):
            result[i] = grad
        return result


# --- The tape -------------------------------------------------------------------------------------


class _DistributedTape:
    """What a tf.GradientTape becomes: its gradients are those of all ranks."""

    def register_local_source(self, source):
        """Leaves the gradients with respect to this variable on their rank."""
        self._reducer.register_local_var(source)

    def gradient(self, target, sources, output_gradients=None, use_generic_names=False):
        """Like tf.GradientTape.gradient(), reduced over ranks; always a list."""
        sources = tf.nest.flatten(sources)
        grads = super().gradient(target, sources, output_gradients)
        return self._reducer.reduce(grads, sources, use_generic_names)

    def get_local_and_global_gradients(self, target, sources, output_gradients=None,
                                       use_generic_names=False):
        """Pairs of (variable, gradient): those of local sources, and the others."""
        sources = tf.nest.flatten(sources)
        grads = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, grads))
        local = [pair for pair in pairs if self._reducer.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[0])]


def DistributedGradientTape(gradtape, device_dense="", device_sparse="",
                            compression=Compression.none, sparse_as_dense=False, op=Average,
                            gradient_predivide_factor=1.0, num_groups=0, groups=None,
                            process_set=global_process_set, scale_local_gradients=True):
    """A tape like the given one, whose gradient() reduces over the ranks of process_set.

    register_local_source(variable) leaves a variable out; scale_local_gradients divides its
    gradient by the number of ranks, as if it had been averaged.
    """
    if isinstance(gradtape, _DistributedTape):
        raise ValueError("this tape is distributed already")
    base = type(gradtape)
    distributed = type(base.__name__, (_DistributedTape, base), {"__doc__": base.__doc__})
    tape = distributed.__new__(distributed)
    tape.__dict__.update(gradtape.__dict__)
    tape._reducer = GradientReducer(
        "DistributedGradientTape", device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)
    return tape


def local_variables_of(local_layers):
    """Variables of a layer or of a list of layers."""
    if local_layers is None:
        return []
    if not isinstance(local_layers, (list, tuple)):
        local_layers = [local_layers]
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in local_layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in local_layers for variable in layer.trainable_weights]


def PartialDistributedGradientTape(gradtape, device_dense="", device_sparse="",
                                   compression=Compression.none, sparse_as_dense=False,
                                   op=Average, gradient_predivide_factor=1.0, num_groups=0,
                                   groups=None, process_set=global_process_set, local_layers=None,
                                   scale_local_gradients=True):
    """DistributedGradientTape() with layers whose gradients stay on their rank."""
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)
    for variable in local_variables_of(local_layers):
        tape.register_local_source(variable)
    return tape
