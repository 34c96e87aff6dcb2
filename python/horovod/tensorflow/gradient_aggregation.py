# SPDX-License-Identifier: Apache-2.0
"""Adding up the gradients of several backward passes before ranks talk to each other."""
import tensorflow as tf

from horovod.common.process_sets import global_process_set
from horovod.tensorflow.collectives import as_tf_variable, size_for


class LocalGradientAggregationHelper:
    """Sums of gradients on this rank, and a counter that says when to communicate.

    allreduce_func(grads, variables) gives the gradients of all ranks. Variables for the sums are
    made on first use, outside of any graph being built, so it works eagerly and in tf.function.
    step() does it all; compute_gradients() and apply_gradients() are the halves of it, for an
    optimizer of one's own that has these two.
    """

    def __init__(self, backward_passes_per_step, allreduce_func, sparse_as_dense=False,
                 average_aggregated_gradients=False, rank=0, optimizer_type="",
                 process_set=global_process_set, scale_local_gradients=True):
        if backward_passes_per_step < 1:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = backward_passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self._allreduce = allreduce_func
        self._local = set()
        self._scope = f"aggregation_variables_{optimizer_type}{rank}"
        self._sums = {}
        self._counter = None

    def _dense(self, grad):
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        if not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and "
                "`sparse_as_dense` is False.")
        return tf.convert_to_tensor(grad)

    def _variable(self, name, initial_value):
        return tf.Variable(initial_value, trainable=False, name=f"{self._scope}/{name}",
                           use_resource=True)

    def _prepare(self, grads, variables):
        """Makes the counter, and a sum for each variable that has a gradient."""
        with tf.init_scope():
            if self._counter is None:
                self._counter = self._variable("counter", tf.zeros([], tf.int64))
            for i, (grad, variable) in enumerate(zip(grads, variables)):
                key = id(as_tf_variable(variable))
                if grad is not None and key not in self._sums:
                    self._sums[key] = self._variable(
                        f"sum_{i}", tf.zeros(variable.shape, grad.dtype))

    def _sum_of(self, variable):
        return self._sums.get(id(as_tf_variable(variable)))

    def _take(self, variables):
        """What has come together, averaged if wanted, and what sets the sums to zero again."""
        totals = []
        resets = []
        for variable in variables:
            total = self._sum_of(variable)
            if total is None:
                totals.append(None)
                continue
            value = tf.identity(total)
            with tf.control_dependencies([value]):
                resets.append(total.assign(tf.zeros_like(value)))
            if self.average_aggregated_gradients:
                value = value / self.backward_passes_per_step
            totals.append(value)
        return totals, resets

    def register_local_var(self, variable):
        """Leaves the gradients of this variable on their rank."""
        self._local.add(id(as_tf_variable(variable)))

    def _add(self, grads, variables):
        """The operations that do so, and how often it has been done."""
        grads = [self._dense(grad) for grad in grads]
        self._prepare(grads, variables)
        added = [self._sum_of(variable).assign_add(grad)
                 for grad, variable in zip(grads, variables) if grad is not None]
        with tf.control_dependencies(added):
            return added, self._counter.assign_add(1)

    def _reduce(self, totals, variables):
        """As allreduce_func does it, except those of local variables."""
        kept = [i for i, variable in enumerate(variables)
                if id(as_tf_variable(variable)) in self._local]
        shared = [None if i in kept else total for i, total in enumerate(totals)]
        reduced = list(self._allreduce(shared, variables))
        for i in kept:
            reduced[i] = totals[i]
            if self.scale_local_gradients and totals[i] is not None:
                reduced[i] = totals[i] / size_for(self.process_set, totals[i].dtype)
        return reduced

    def compute_gradients(self, grads, vars):
        """Adds the gradients. Every so many times the sums, reduced; else the sums so far."""
        variables = list(vars)
        added, count = self._add(grads, variables)
        present = [i for i, variable in enumerate(variables) if self._sum_of(variable) is not None]

        def communicate():
            totals, resets = self._take(variables)
            reduced = list(self._reduce(totals, variables))
            with tf.control_dependencies([*resets]):
                return [tf.identity(reduced[i]) for i in present]

        def wait():
            return [tf.identity(self._sum_of(variables[i])) for i in present]

        with tf.control_dependencies(added):
            found = tf.cond(tf.equal(count % self.backward_passes_per_step, 0), communicate, wait)
        result = [None] * len(variables)
        for i, grad in zip(present, found if isinstance(found, (list, tuple)) else [found]):
            result[i] = grad
        return result

    def apply_gradients(self, apply_grads_closure, optimizer, *args, **kwargs):
        """Calls the closure if compute_gradients() has just reduced; else only counts the step."""
        step = kwargs.get("global_step", args[0] if args else None)
        step = step if isinstance(step, tf.Variable) else getattr(optimizer, "iterations", None)
        due = (tf.constant(True) if self._counter is None
               else tf.equal(self._counter % self.backward_passes_per_step, 0))
        if tf.executing_eagerly():
            return apply_grads_closure() if due else step is not None and step.assign_add(1)
        return tf.group(tf.cond(
            due, lambda: after([apply_grads_closure()], True),
            lambda: after([] if step is None else [step.assign_add(1)], False)))

    def step(self, grads, variables, apply, skip):
        """Adds the gradients; calls apply(reduced gradients) every so many times, else skip().

        Both are called inside tf.cond and must not create variables.
        """
        variables = list(variables)
        added, count = self._add(grads, variables)

        def communicate():
            totals, resets = self._take(variables)
            return after([apply(self._reduce(totals, variables)), *resets], True)

        def wait():
            return after([skip()], False)

        with tf.control_dependencies(added):
            return tf.cond(tf.equal(count % self.backward_passes_per_step, 0), communicate, wait)


def after(effects, answer):
    """The answer once the effects are done: a graph of TensorFlow 1 style runs nothing else."""
    with tf.control_dependencies([effect for effect in effects if _is_in_graph(effect)]):
        return tf.identity(tf.constant(answer))


def _is_in_graph(effect):
    return isinstance(effect, (tf.Tensor, tf.Operation, tf.Variable))


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """The same, with its arguments in the order that programs know for eager execution."""

    def __init__(self, backward_passes_per_step, allreduce_func, sparse_as_dense=False,
                 average_aggregated_gradients=False, process_set=global_process_set,
                 scale_local_gradients=True):
        super().__init__(backward_passes_per_step, allreduce_func, sparse_as_dense,
                         average_aggregated_gradients, process_set=process_set,
                         scale_local_gradients=scale_local_gradients)
