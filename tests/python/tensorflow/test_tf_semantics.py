# SPDX-License-Identifier: Apache-2.0
"""What programs rely on without saying so, in TensorFlow and Keras: bits, and mistakes told.

Functions without "test" in front run on the ranks.
"""
import logging

import numpy as np
import pytest
from tf_jobs import run_tf

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "int32", "int64"]

# --- Bits of scaled sums --------------------------------------------------------------------------


def _times(tf, tensor, factor):
    """TensorFlow's own product; half types in float32, integers in float64."""
    wide = {"float16": tf.float32, "bfloat16": tf.float32, "float32": tf.float32}.get(
        tensor.dtype.name, tf.float64)
    return tf.cast(tf.cast(tensor, wide) * factor, tensor.dtype)


def scaled_reductions():
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    me, members = hvd.rank(), hvd.size()
    for trial, dtype in enumerate(FLOATS + INTEGERS):
        random = [np.random.RandomState(10 * trial + rank) for rank in range(members)]
        # Products that fit: what TensorFlow makes of others depends on the size of the tensor.
        every = [tf.cast(one.randn(600) if dtype in FLOATS else one.randint(-10, 10, 600), dtype)
                 for one in random]
        mine, total = every[me], tf.add_n(every)
        half = 600 // members
        for f in (0.1, 1 / 3, -3.7):
            after = _times(tf, total, f)
            before = tf.add_n([_times(tf, one, f) for one in every])
            if dtype in ("float32", "float64"):
                tf.debugging.assert_equal(after, total * f)  # nothing was assumed

            def all_ways():
                part = slice(me * half, (me + 1) * half)
                yield hvd.allreduce(mine, op=hvd.Sum, postscale_factor=f), after
                yield hvd.allreduce(mine, op=hvd.Sum, prescale_factor=f), before
                for one in hvd.grouped_allreduce([mine, mine + 0], op=hvd.Sum, postscale_factor=f):
                    yield one, after
                yield hvd.reducescatter(mine, op=hvd.Sum, postscale_factor=f), after[part]
                for one in hvd.grouped_reducescatter([mine, mine + 0], op=hvd.Sum,
                                                     postscale_factor=f):
                    yield one, after[part]
                if dtype in FLOATS:
                    yield (hvd.allreduce(mine, op=hvd.Average, postscale_factor=f),
                           _times(tf, total / members, f))

            for got, want in [*all_ways(), *tf.function(lambda: list(all_ways()))()]:
                np.testing.assert_array_equal(tf.cast(got, tf.float64), tf.cast(want, tf.float64),
                                              f"{dtype} {f}")


def test_scaled_reductions_on_two_ranks():
    run_tf(2, "test_tf_semantics", "scaled_reductions")


# --- Launched, but init() was not called ----------------------------------------------------------


def _data():
    return np.random.rand(16, 4).astype("float32"), np.random.rand(16, 1).astype("float32")


def _model(keras):
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])


def tape_without_init(door):
    import tensorflow as tf

    try:
        if door == "tape":
            import horovod.tensorflow as hvd

            variable = tf.Variable([1.0])
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = variable * 2
            tape.gradient(loss, [variable])
        else:
            if door == "tf.keras":
                import horovod.tensorflow.keras as hvd
            else:
                import horovod.keras as hvd
            model = _model(tf.keras)
            model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
            model.fit(*_data(), verbose=0)
    except Exception as error:  # from a graph of Keras 2 it comes as TensorFlow's own class
        return str(error)
    return "trained"


@pytest.mark.parametrize("door", ["tape", "tf.keras", "keras"])
def test_tape_without_init_on_two_ranks(door):
    for text in run_tf(2, "test_tf_semantics", "tape_without_init", door):
        assert "use hvd.init()" in text


# --- An ordinary optimizer ------------------------------------------------------------------------


def ordinary_optimizer(kind):
    import tensorflow as tf

    import horovod.tensorflow as tape_door
    import horovod.tensorflow.keras as hvd

    told = []

    class Note(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    class OwnStep(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tape_door.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
            return {"loss": loss}

    logging.getLogger("horovod").addHandler(Note())
    hvd.init()
    optimizer = tf.keras.optimizers.SGD(0.1)
    model = OwnStep() if kind == "own_step" else _model(tf.keras)
    if kind == "distributed":
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse")
    model.fit(*_data(), verbose=0, epochs=2)
    return [text for text in told if "ordinary optimizer" in text]


@pytest.mark.parametrize("kind, times", [("ordinary", 1), ("distributed", 0), ("own_step", 0)])
def test_an_ordinary_keras_door_on_two_ranks(kind, times):
    told = run_tf(2, "test_tf_semantics", "ordinary_optimizer", kind)
    assert [len(one) for one in told] == [times, 0], told


def test_the_keras_door_can_be_told_to_be_quiet_on_two_ranks():
    assert run_tf(2, "test_tf_semantics", "ordinary_optimizer", "ordinary",
                  env={"HOROVOD_TRAINING_CHECKS": "0"}) == [[], []]


# --- Threads, and ranks that wait for each other --------------------------------------------------


def eager_threads():
    """Sums without a name from three threads that race; the numbers of wrong ones."""
    import threading

    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    wrong = []

    def sums(which):
        for i in range(60):
            value = tf.fill([3], float(which * 1000 + i))
            if float(hvd.allreduce(value, op=hvd.Sum)[0]) != 2 * float(value[0]):
                wrong.append((which, i))

    def first():
        sums(1)

    def second():
        sums(2)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads if hvd.rank() == 0 else threads[::-1]:
        thread.start()
    sums(0)
    for thread in threads:
        thread.join()
    refused = []

    def twice():
        try:
            hvd.allreduce(tf.ones(3))
        except ValueError as error:
            refused.append(str(error))

    ready = threading.Barrier(2)
    threads = [threading.Thread(target=lambda: (ready.wait(), twice(), ready.wait()))
               for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong, refused


def test_eager_threads_on_two_ranks():
    for wrong, refused in run_tf(2, "test_tf_semantics", "eager_threads"):
        assert wrong == []
        assert len(refused) == 2 and "pass a name" in refused[0]


def graph_deadlock():
    import os
    import tempfile

    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    names = ["first", "second"] if hvd.rank() == 0 else ["second", "first"]

    @tf.function
    def step():
        one = hvd.allreduce(tf.ones(4), name=names[0])
        with tf.control_dependencies([one]):
            return hvd.allreduce(tf.ones(4), name=names[1])

    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            step()
        except tf.errors.OpError:
            pass
        log.seek(0)
        return log.read().decode()


def test_graphs_that_wait_for_each_other_on_two_ranks():
    log, _ = run_tf(2, "test_tf_semantics", "graph_deadlock",
                    env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "14",
                         "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "15"})
    lines = log.splitlines()
    verdict = next((i for i, line in enumerate(lines) if "Deadlock: every rank" in line), None)
    assert verdict is not None, log
    assert "rank 0: it waits in 'allreduce.first" in lines[verdict + 1], log
    assert "rank 1: it waits in 'allreduce.second" in lines[verdict + 2], log
