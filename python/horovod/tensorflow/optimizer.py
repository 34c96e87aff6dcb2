# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: for optimizers of TensorFlow 1; those of Keras are in horovod._keras."""
import tensorflow as tf

from horovod.common.process_sets import global_process_set
from horovod.tensorflow.collectives import allreduce
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper, after
from horovod.tensorflow.gradients import GradientReducer
from horovod.tensorflow.mpi_ops import Adasum, Average


class _Wrapper(tf.compat.v1.train.Optimizer):
    """Has the interface of the optimizer it wraps, and passes on what is not its own."""

    def __init__(self, optimizer, name, use_locking):
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}",
                         use_locking=use_locking)
        self._optimizer = optimizer

    def compute_gradients(self, *args, **kwargs):
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args, **kwargs):
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args, **kwargs):
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args, **kwargs):
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args, **kwargs):
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_Wrapper):
    """Reduces gradients in compute_gradients()."""

    def __init__(self, optimizer, name, use_locking, reducer, backward_passes_per_step,
                 sparse_as_dense, average_aggregated_gradients):
        super().__init__(optimizer, name, use_locking)
        self._reducer = reducer
        self._helper = None
        if backward_passes_per_step > 1:
            if tf.executing_eagerly():
                raise ValueError("backward_passes_per_step > 1 is not supported in eager mode "
                                 "with optimizers of tf.compat.v1; use one of tf.keras.")
            self._helper = LocalGradientAggregationHelper(
                backward_passes_per_step, reducer.reduce, sparse_as_dense,
                average_aggregated_gradients)

    def register_local_var(self, variable):
        """Leaves the gradients of this variable on their rank."""
        self._reducer.register_local_var(variable)

    def compute_gradients(self, *args, **kwargs):
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if self._helper is not None:
            return pairs
        grads, variables = zip(*pairs)
        return list(zip(self._reducer.reduce(grads, variables), variables))

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        if self._helper is None:
            return self._optimizer.apply_gradients(grads_and_vars, global_step, name)
        grads, variables = zip(*grads_and_vars)
        used = [variable for grad, variable in grads_and_vars if grad is not None]
        with tf.init_scope():
            self._optimizer._create_slots(used)

        def skip():
            return None if global_step is None else global_step.assign_add(1)

        step = self._helper.step(
            grads, variables,
            lambda reduced: self._optimizer.apply_gradients(zip(reduced, variables), global_step),
            skip)
        return tf.group(step, name=name)


class _DistributedAdasumOptimizer(_Wrapper):
    """Lets every rank take steps of its own and combines them: Adasum of the differences."""

    def __init__(self, optimizer, name, use_locking, device_dense, compression,
                 backward_passes_per_step):
        super().__init__(optimizer, name, use_locking)
        self._device_dense = device_dense
        self._compression = compression
        self._passes = backward_passes_per_step
        self._counter = None
        self._starts = {}  # by identity of the variable: its value before the first of the steps

    def _prepare(self, variables):
        with tf.init_scope():
            if self._counter is None:
                self._counter = _hidden_variable("counter", tf.zeros([], tf.int64))
            for variable in variables:
                if id(variable) not in self._starts:
                    self._starts[id(variable)] = _hidden_variable(
                        "start", tf.zeros(variable.shape, variable.dtype))

    def _remember(self, variables):
        """Copies: what is read from a reference variable is its memory, which steps write over."""
        return tf.group(*[
            self._starts[id(variable)].assign(tf.raw_ops.DeepCopy(x=variable.read_value()))
            for variable in variables])

    def _combine(self, variables):
        updates = []
        for i, variable in enumerate(variables):
            start = self._starts[id(variable)].read_value()
            delta = allreduce(variable.read_value() - start, op=Adasum, name=f"delta_{i}",
                              device_dense=self._device_dense, compression=self._compression)
            updates.append(variable.assign(start + delta))
        return tf.group(*updates)

    def _every(self, count, operation, variables):
        """Does it if the count is a multiple of the number of passes."""
        def run():
            return after([operation(variables)], True)

        return tf.cond(tf.equal(count % self._passes, 0), run, lambda: tf.constant(False))

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        variables = [variable for grad, variable in pairs if grad is not None]
        self._prepare(variables)
        with tf.control_dependencies([self._every(self._counter, self._remember, variables)]):
            applied = self._optimizer.apply_gradients(pairs, global_step)
        with tf.control_dependencies([applied] if applied is not None else []):
            count = self._counter.assign_add(1)
        with tf.control_dependencies([count]):
            return tf.group(self._every(count, self._combine, variables), name=name)


def _hidden_variable(name, initial_value):
    return tf.Variable(initial_value, trainable=False, name=f"adasum/{name}", use_resource=True)


def DistributedOptimizer(optimizer, name=None, use_locking=False, device_dense="",
                         device_sparse="", compression=Compression.none, sparse_as_dense=False,
                         backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0,
                         average_aggregated_gradients=False, num_groups=0, groups=None,
                         process_set=global_process_set, scale_local_gradients=True):
    """An optimizer like the given one that uses the gradients of all ranks.

    Takes optimizers of tf.compat.v1.train and of Keras.
    """
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if op == Adasum:
            raise ValueError("op == Adasum is not supported yet with Keras")
        from horovod.tensorflow import keras as hvd_keras

        return hvd_keras.DistributedOptimizer(
            optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
            gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
            num_groups, groups, process_set, scale_local_gradients)
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    reducer = GradientReducer(
        "DistributedOptimizer", device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)
    if op == Adasum:
        return _DistributedAdasumOptimizer(optimizer, name, use_locking, device_dense, compression,
                                           backward_passes_per_step)
    return _DistributedOptimizer(optimizer, name, use_locking, reducer, backward_passes_per_step,
                                 sparse_as_dense, average_aggregated_gradients)
