# SPDX-License-Identifier: Apache-2.0
"""Programs of the original with TensorFlow and Keras: names, orders of arguments, old methods."""
import inspect

import numpy as np
import pytest
from tf_jobs import run_tf


def _setup():
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    return tf, hvd


def _mean_of_ranks(hvd):
    return (hvd.size() - 1) / 2


def names():
    tf, hvd = _setup()
    from horovod.tensorflow import mpi_ops, util
    from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

    assert mpi_ops._basics.rank() == hvd.rank() and mpi_ops._basics.Sum == hvd.Sum
    assert mpi_ops.MPI_LIB.horovod_rank().numpy() == hvd.rank()
    assert issubclass(LocalGradientAggregationHelperEager, hvd.LocalGradientAggregationHelper)
    one, other = tf.Variable(1.0), tf.keras.layers.Dense(1)
    other.build((None, 1))
    refs = util.vars_to_refs([one, [other.kernel]])
    assert refs == util.vars_to_refs((one, (other.kernel,))) and hash(refs)
    assert util.refs_to_vars(refs)[0] is one
    _same_error_in_a_graph(tf, hvd)


def _same_error_in_a_graph(tf, hvd):
    """Of a process set nobody knows."""
    from horovod.tensorflow import mpi_ops

    calls = {"allreduce": mpi_ops._allreduce, "allgather": mpi_ops.allgather,
             "reducescatter": mpi_ops._reducescatter, "alltoall": mpi_ops.alltoall,
             "grouped": lambda x, process_set: mpi_ops._grouped_allreduce(
                 [x], process_set=process_set),
             "slices": lambda x, process_set: hvd.allreduce(
                 tf.IndexedSlices(x[:, None], tf.range(2), tf.constant([2, 1])),
                 process_set=process_set),
             "set": lambda x, process_set: hvd.allreduce(x, process_set=hvd.ProcessSet([0]))}
    for name, call in calls.items():
        def run(call=call):
            return call(tf.ones([2]), process_set=77)

        kinds = []
        for form in (run, tf.function(run)):
            try:
                form()
            except Exception as error:
                assert "has not been registered" in str(error), (name, error)
                kinds.append(type(error))
        assert kinds == [tf.errors.InvalidArgumentError] * 2, (name, kinds)
    hvd.barrier()  # who leaves early is another error to the others


def test_names_on_two_ranks():
    run_tf(2, "test_tf_names", "names")


# --- Optimizers -----------------------------------------------------------------------------------


def old_methods():
    """compute_gradients() with and without underscore: reduced, and once only."""
    tf, hvd = _setup()
    import horovod.tensorflow.keras as hvd_keras

    for method in ("compute_gradients", "_compute_gradients"):
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
        variable = tf.Variable(0.0)
        pairs = getattr(optimizer, method)(lambda: variable * float(hvd.rank()), [variable])
        assert float(pairs[0][0]) == _mean_of_ranks(hvd) and pairs[0][1] is variable
        optimizer.apply_gradients(pairs)
        assert float(variable) == -_mean_of_ranks(hvd)

        @tf.function
        def step(method=method, optimizer=optimizer, variable=variable):
            with tf.GradientTape() as tape:
                loss = variable * tf.cast(hvd.rank_op(), tf.float32)
            optimizer.apply_gradients(getattr(optimizer, method)(loss, [variable], tape=tape))

        step()
        step()
        assert abs(float(variable) + 3 * _mean_of_ranks(hvd)) < 1e-6
        # A tensor without a tape says nothing about gradients.
        try:
            getattr(optimizer, method)(tf.constant(1.0), [variable])
            raise AssertionError("a loss without its tape")
        except ValueError as error:
            assert "tape" in str(error)
    _added_up_first(tf, hvd, hvd_keras)


def _added_up_first(tf, hvd, hvd_keras):
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0),
                                               backward_passes_per_step=2)
    variable = tf.Variable(0.0)
    for expected in (0.0, -2 * _mean_of_ranks(hvd)):
        optimizer.apply_gradients(optimizer.compute_gradients(
            lambda: variable * float(hvd.rank()), [variable]))
        assert float(variable) == expected


def test_old_methods_of_optimizers_on_two_ranks():
    run_tf(2, "test_tf_names", "old_methods")


def own_optimizers():
    """Classes whose constructor takes what get_config() does not tell."""
    tf, hvd = _setup()
    import horovod.tensorflow.keras as hvd_keras

    class Scaled(tf.keras.optimizers.SGD):
        def __init__(self, factor, **kwargs):
            super().__init__(**kwargs)
            self.factor = factor

        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            pairs = [(grad * self.factor, variable) for grad, variable in grads_and_vars]
            return super().apply_gradients(pairs, *args, **kwargs)

    class WithDefault(Scaled):
        def __init__(self, factor=1.0, learning_rate=0.1):
            super().__init__(factor, learning_rate=learning_rate)

    for made in (Scaled(3.0, learning_rate=1.0), WithDefault(3.0, learning_rate=1.0)):
        optimizer = hvd_keras.DistributedOptimizer(made)
        assert isinstance(optimizer, Scaled) and optimizer.factor == 3.0
        variable = tf.Variable(0.0)
        with tf.GradientTape() as tape:
            loss = variable * float(hvd.rank())
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        assert float(variable) == -3 * _mean_of_ranks(hvd)
    model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(Scaled(0.1, learning_rate=0.1)), "mse")
    x = np.full((8, 2), hvd.rank() + 1.0, dtype=np.float32)
    model.fit(x, x[:, :1], verbose=0,
              callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    weights = hvd.allgather_object(model.get_weights())
    assert all(np.array_equal(one, other) for one, other in zip(weights[0], weights[-1]))


def test_own_optimizers_on_two_ranks():
    run_tf(2, "test_tf_names", "own_optimizers")


def test_order_of_arguments():
    """By position, which differs between the two packages."""
    keras = pytest.importorskip("keras")
    import horovod.keras as hvd

    first = ["optimizer", "name", "device_dense", "device_sparse", "compression",
             "sparse_as_dense", "gradient_predivide_factor", "op"]
    names = list(inspect.signature(hvd.DistributedOptimizer).parameters)
    assert names[:10] == [*first, "num_groups", "groups"]
    import horovod.tensorflow.keras as tf_hvd

    names = list(inspect.signature(tf_hvd.DistributedOptimizer).parameters)
    assert names[:12] == [*first, "backward_passes_per_step", "average_aggregated_gradients",
                          "num_groups", "groups"]
    made = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), None, "", "", hvd.Compression.none,
                                    False, 1.0, hvd.Average, 2)
    assert made._hvd_aggregator is None and made._hvd_reducer._groups == 2


# --- Helpers --------------------------------------------------------------------------------------


def helpers():
    """compute_gradients() and apply_gradients() of the helper, eagerly and in a graph."""
    tf, hvd = _setup()
    from horovod.tensorflow.gradient_aggregation import (
        LocalGradientAggregationHelper, LocalGradientAggregationHelperEager)

    def reduce(grads, variables):
        assert len(grads) == len(variables)
        return [None if grad is None else hvd.allreduce(grad, name=f"h{i}", op=hvd.Sum)
                for i, grad in enumerate(grads)]

    for make in (lambda: LocalGradientAggregationHelper(2, reduce, False, False, hvd.rank(), "o"),
                 lambda: LocalGradientAggregationHelperEager(2, reduce, False, False)):
        for wrap in (lambda function: function, tf.function):
            _aggregates(tf, hvd, make(), wrap)


def _aggregates(tf, hvd, helper, wrap):
    a, b, unused = tf.Variable([0.0]), tf.Variable(0.0), tf.Variable(0.0)
    helper.register_local_var(b)
    optimizer = tf.keras.optimizers.SGD(1.0)
    with tf.init_scope():
        optimizer.build([a, b])
    grads_seen = []

    @wrap
    def step(grad):
        grads = helper.compute_gradients([grad[None], grad, None], [a, b, unused])
        assert grads[2] is None
        helper.apply_gradients(
            lambda: optimizer.apply_gradients([(grads[0], a), (grads[1], b)]), optimizer)
        return grads[0], grads[1]

    for number in range(4):
        grads_seen.append([float(np.squeeze(grad)) for grad in step(tf.constant(
            float(hvd.rank() + 1)))])
        assert int(optimizer.iterations) == number + 1
    own = float(hvd.rank() + 1)
    everybody = 2 * sum(rank + 1.0 for rank in range(hvd.size()))
    both = [everybody, 2 * own / hvd.size()]
    assert grads_seen == [[own, own], both, [own, own], both], grads_seen
    assert float(a[0]) == -2 * everybody and abs(float(b) + 2 * both[1]) < 1e-6


def test_helpers_on_two_ranks():
    run_tf(2, "test_tf_names", "helpers")


def local_sources():
    """Variables of Keras, as layers hold them."""
    tf, hvd = _setup()
    near, far = tf.keras.layers.Dense(1, use_bias=False), tf.keras.layers.Dense(1, use_bias=False)
    near.build((None, 1))
    far.build((None, 1))
    x = tf.constant([[float(hvd.rank() + 1)]])

    def gradients(tape, wrap):
        with tape:
            loss = tf.reduce_sum(near(x) + far(x))
        return wrap(tape.gradient(loss, [near.kernel, far.kernel]))

    expected = [(hvd.rank() + 1) / hvd.size(), _mean_of_ranks(hvd) + 1]
    tape = hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=near)
    assert [float(grad[0][0]) for grad in gradients(tape, list)] == expected
    tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True))
    tape.register_local_source(near.kernel)
    assert [float(grad[0][0]) for grad in gradients(tape, list)] == expected
    with tape:
        loss = tf.reduce_sum(near(x) + far(x))
    local, shared = tape.get_local_and_global_gradients(loss, [near.kernel, far.kernel])
    assert local[0][0] is near.kernel and shared[0][0] is far.kernel

    @tf.function
    def in_a_graph():
        inner = hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[near])
        with inner:
            loss = tf.reduce_sum(near(x) + far(x))
        return inner.gradient(loss, [near.kernel, far.kernel])

    assert [float(grad[0][0]) for grad in in_a_graph()] == expected


def test_local_sources_on_two_ranks():
    run_tf(2, "test_tf_names", "local_sources")
