# SPDX-License-Identifier: Apache-2.0
"""horovod.tensorflow.keras and horovod.keras: fit() on several ranks, callbacks, saved models."""
import contextlib
import copy
import importlib
import inspect
import json
import logging
import os
import pickle
import warnings
import zipfile
from unittest import mock

import numpy as np
from tf_jobs import run_tf


def _setup():
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    hvd.init()
    tf.keras.utils.set_random_seed(100 + hvd.rank())  # every rank starts from other weights
    return tf.keras, hvd


def _data(hvd, rows=96):
    random = np.random.RandomState(hvd.rank())
    return random.rand(rows, 8).astype("float32"), random.randint(0, 3, rows)


def _model(keras, optimizer, **options):
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"),
                              keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


def _fit(model, hvd, callbacks=(), **options):
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    return model.fit(*_data(hvd), batch_size=32, verbose=0, callbacks=[first, *callbacks],
                     **{"epochs": 1, **options})


def _assert_equal_weights(model, hvd):
    flat = np.concatenate([weight.ravel() for weight in model.get_weights()])
    everyone = hvd.allgather(flat[None]).numpy()
    assert np.allclose(everyone[0], everyone[-1]), np.abs(everyone[0] - everyone[-1]).max()


def fit():
    keras, hvd = _setup()
    _history(keras, hvd)
    _ways_to_train(keras, hvd)
    _without_xla(keras, hvd)
    _saved_models(keras, hvd)
    _saved_layer(keras, hvd)
    _registered(keras, hvd)
    _copies(keras, hvd)
    _checkpoint(keras, hvd)
    _resumed(keras, hvd)
    _embeddings(keras, hvd)
    _optimizers_of_keras_2(keras, hvd)
    _several_steps_at_once(keras, hvd)
    _overflow_on_one_rank(keras, hvd)
    _overflow_in_a_loop_of_ones_own(keras, hvd)
    _refused(keras, hvd)


def _history(keras, hvd):
    callbacks = [hvd.callbacks.MetricAverageCallback(),
                 hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
                 hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2),
                 hvd.callbacks.ReportCallback(batch_size=8)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    assert isinstance(optimizer, keras.optimizers.SGD)
    model = _model(keras, optimizer)
    history = _fit(model, hvd, callbacks, epochs=4).history
    _assert_equal_weights(model, hvd)
    everyone = hvd.allgather(np.array([history["loss"] + history["accuracy"]])).numpy()
    assert np.allclose(everyone[0], everyone[-1])
    start = 0.1 / hvd.size()
    middle = start * (1 + (hvd.size() - 1) / 2)
    assert np.allclose(history["lr"], [middle, 0.1, 0.1, 0.05], rtol=1e-4), history["lr"]
    assert int(optimizer.iterations.numpy()) == 12
    told = hvd.metrics()
    assert [told["hvd_report_step"], told["hvd_report_samples_total"]] == [12, 96]
    assert told["hvd_report_loss"] > 0


def _ways_to_train(keras, hvd):
    """Settings of the optimizer and ways to run a step; all ranks must end alike."""
    adam = keras.optimizers.Adam
    for optimizer, options in (
            (hvd.DistributedOptimizer(adam(0.01), backward_passes_per_step=3,
                                      average_aggregated_gradients=True), {}),
            (hvd.DistributedOptimizer(adam(0.01), groups=2,
                                      compression=hvd.Compression.fp16), {}),
            (hvd.DistributedOptimizer(adam(0.01)), {"run_eagerly": True})):
        model = _model(keras, optimizer, **options)
        _fit(model, hvd)
        _assert_equal_weights(model, hvd)
        assert int(optimizer.iterations.numpy()) == 3


def _without_xla(keras, hvd):
    """jit_compile=True is switched off, also where no callback of Horovod is near; said once."""
    with _log_of_horovod() as said:
        for _ in range(2):
            model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
                           jit_compile=True)
            model.fit(*_data(hvd), batch_size=32, verbose=0)
            assert not model.jit_compile
        alone = _model(keras, keras.optimizers.SGD(0.01), jit_compile=True)
        assert alone.jit_compile  # Horovod has no part in it
    assert len(said) == 1 and "jit_compile=False" in said[0], said


@contextlib.contextmanager
def _log_of_horovod():
    """The list that what is said meanwhile is put into."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("horovod").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("horovod").removeHandler(handler)


def _resumed(keras, hvd):
    """Two epochs, a checkpoint on rank 0, two more epochs: as if there had been four at once."""
    start = [weight.copy() for weight in _model(keras, "sgd").get_weights()]
    start = hvd_tf().broadcast_object(start, 0)

    def fit(model, epochs, begin=0):
        model.fit(*_data(hvd), batch_size=32, verbose=0, shuffle=False, epochs=epochs,
                  initial_epoch=begin,
                  callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    models = [_model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)))
              for _ in range(2)]
    for model in models:
        model.set_weights(start)
    fit(models[0], 4)
    fit(models[1], 2)
    if hvd.rank() == 0:
        models[1].save("resume.keras")
    hvd_tf().barrier()
    resumed = hvd.load_model("resume.keras")
    hvd_tf().barrier()
    if hvd.rank() == 0:
        os.unlink("resume.keras")
    fit(resumed, 4, begin=2)
    _assert_equal_weights(resumed, hvd)
    assert int(resumed.optimizer.iterations.numpy()) == 12
    for whole, again in zip(models[0].get_weights(), resumed.get_weights()):
        assert np.allclose(whole, again, atol=1e-5)


def hvd_tf():
    import horovod.tensorflow

    return horovod.tensorflow


def _embeddings(keras, hvd):
    """Gradients of an embedding are IndexedSlices: rows of all ranks reach all ranks."""
    for options in ({}, {"sparse_as_dense": True},
                    {"sparse_as_dense": True, "backward_passes_per_step": 2}):
        model = keras.Sequential([keras.layers.Input((2,), dtype="int32"),
                                  keras.layers.Embedding(7, 3), keras.layers.Flatten(),
                                  keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), "mse")
        words = np.full([8, 2], hvd.rank()) + np.array([0, 3])
        before = None

        def remember(batch, logs, model=model):
            nonlocal before
            before = model.get_weights()[0] if before is None else before

        model.fit(words, np.ones(8), batch_size=4, verbose=0, epochs=2, callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            keras.callbacks.LambdaCallback(on_train_batch_end=remember)])
        _assert_equal_weights(model, hvd)
        moved = np.abs(model.get_weights()[0] - before).sum(1) > 0
        used = {rank + i for rank in range(hvd.size()) for i in (0, 3)}
        assert {int(i) for i in np.flatnonzero(moved)} == used, moved


def _optimizers_of_keras_2(keras, hvd):
    """Both generations: fit(), and gradients that are asked for are those of all ranks."""
    if _is_keras_3(keras):
        return
    import tensorflow as tf

    variable = tf.Variable(1.0)
    for sgd, compute in zip(_generations_of_sgd(keras),
                            ("compute_gradients", "_compute_gradients")):
        for passes in (1, 3):
            model = _model(keras, hvd.DistributedOptimizer(sgd(0.1, momentum=0.9),
                                                           backward_passes_per_step=passes))
            _fit(model, hvd)
            _assert_equal_weights(model, hvd)
        optimizer = hvd.DistributedOptimizer(sgd(1.0), op=hvd.Sum)
        variable.assign(1.0)
        with tf.GradientTape() as tape:
            loss = variable * float(hvd.rank() + 1)
        pairs = getattr(optimizer, compute)(loss, [variable], tape=tape)
        total = hvd.size() * (hvd.size() + 1) / 2
        assert float(pairs[0][0]) == total
        optimizer.apply_gradients([(gradient / 2.0, used) for gradient, used in pairs])
        assert float(variable) == 1.0 - total / 2.0  # not reduced again
        optimizer.apply_gradients([(tf.constant(1.0), variable)])
        assert float(variable) == 1.0 - total / 2.0 - hvd.size()


def _several_steps_at_once(keras, hvd):
    model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
                   steps_per_execution=3)
    _fit(model, hvd, epochs=2)
    _assert_equal_weights(model, hvd)
    assert int(model.optimizer.iterations.numpy()) == 6


def _overflow_on_one_rank(keras, hvd):
    """Keras scales the loss of half precision by itself, and leaves out a step that overflows."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.set_weights(hvd_tf().broadcast_object(model.get_weights(), 0))
    before = model.get_weights()
    inputs, answers = _data(hvd)
    if hvd.rank() == hvd.size() - 1:
        inputs[:32] = np.inf  # the first of three batches
    model.fit(inputs[:32], answers[:32], verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
    model.fit(inputs[32:], answers[32:], batch_size=32, verbose=0, shuffle=False)
    _assert_equal_weights(model, hvd)
    assert any(not np.array_equal(a, b) for a, b in zip(before, model.get_weights()))


def _overflow_in_a_loop_of_ones_own(keras, hvd):
    """The step is left out by all ranks, whichever of the two optimizers wraps the other."""
    scaling = keras.mixed_precision.LossScaleOptimizer
    gradients = [np.inf if hvd.rank() == hvd.size() - 1 else 1.0, hvd.rank() + 1.0]
    for sgd in _generations_of_sgd(keras):
        for optimizer in (scaling(hvd.DistributedOptimizer(sgd(1.0))),
                          hvd.DistributedOptimizer(scaling(sgd(1.0)))):
            assert _scaled_steps(optimizer, gradients) == [0.0, -(hvd.size() + 1) / 2]


def _generations_of_sgd(keras):
    return [keras.optimizers.SGD] if _is_keras_3(keras) else [keras.optimizers.SGD,
                                                              keras.optimizers.legacy.SGD]


def _is_keras_3(keras):
    return hasattr(keras.optimizers.Optimizer, "stateless_apply")


def _scaled_steps(optimizer, gradients):
    """A weight, 0 at first, after each of these gradients."""
    import tensorflow as tf

    weight = tf.Variable(0.0)

    @tf.function
    def step(gradient):
        with tf.GradientTape() as tape:
            scale = getattr(optimizer, "scale_loss", None) or optimizer.get_scaled_loss
            loss = scale(weight * gradient)
        grads = tape.gradient(loss, [weight])
        if hasattr(optimizer, "get_unscaled_gradients"):  # Keras 3 does it by itself
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, [weight]))
        return weight.read_value()

    return [float(step(tf.constant(gradient, tf.float32))) for gradient in gradients]


def _saved_models(keras, hvd):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    assert optimizer.name == "DistributedAdam"
    model = _model(keras, optimizer)
    _fit(model, hvd)
    for suffix in ("keras", "h5"):
        path = f"model{hvd.rank()}.{suffix}"
        model.save(path)
        try:
            _assert_public_name(path)
            plain = keras.models.load_model(path)  # needs no Horovod
            assert type(plain.optimizer) is keras.optimizers.Adam
            loaded = hvd.load_model(path)
        finally:
            os.unlink(path)
        assert type(loaded.optimizer) is not keras.optimizers.Adam
        assert int(loaded.optimizer.iterations.numpy()) == 3
        assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
        loaded.fit(*_data(hvd), batch_size=32, verbose=0)
        _assert_equal_weights(loaded, hvd)


def _assert_public_name(path):
    """The file says of the optimizer what Keras says of its own."""
    if path.endswith(".keras"):
        with zipfile.ZipFile(path) as file:
            saved = json.loads(file.read("config.json"))["compile_config"]["optimizer"]
        assert (saved["module"], saved["class_name"]) == ("keras.optimizers", "Adam"), saved
        assert saved["registered_name"] is None


def _saved_layer(keras, hvd):
    """A layer of Horovod's in a saved model is known to load_model()."""
    model = keras.Sequential([keras.layers.Input((8,)), hvd_tf().SyncBatchNormalization()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
                  keras.losses.MeanSquaredError())
    for suffix in ("keras", "h5"):
        path = f"layer{hvd.rank()}.{suffix}"
        model.save(path)
        try:
            loaded = hvd.load_model(path)
        finally:
            os.unlink(path)
        assert type(loaded.layers[-1]) is hvd_tf().SyncBatchNormalization


def _registered(keras, hvd):
    """A class that was registered under a name of its own is saved under it."""

    @keras.utils.register_keras_serializable(package="tests")
    class Registered(keras.optimizers.SGD):
        pass

    saved = keras.optimizers.serialize(hvd.DistributedOptimizer(Registered(0.1)))
    assert saved["registered_name"] == "tests>Registered", saved


def _copies(keras, hvd):
    """Copies of a distributed optimizer are distributed, or it is said that they are not."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9),
                                         backward_passes_per_step=3)
    copies = [type(optimizer).from_config(optimizer.get_config())]
    if _is_keras_3(keras):  # optimizers of Keras 2 cannot be copied otherwise
        copies.append(copy.deepcopy(optimizer))
        with _log_of_horovod() as said:
            plain = pickle.loads(pickle.dumps(optimizer))
        assert type(plain) is keras.optimizers.SGD and "pickled" in said[0]
    for other in copies:
        model = _model(keras, other)
        _fit(model, hvd)
        _assert_equal_weights(model, hvd)
        assert float(other.momentum) == 0.9 and int(other.iterations.numpy()) == 3
    model = _model(keras, keras.optimizers.SGD.from_config(optimizer.get_config()))
    with _log_of_horovod() as said:
        _fit(model, hvd)
    assert len(said) == (hvd.size() > 1) and all("each rank trains alone" in text for text in said)


def _checkpoint(keras, hvd):
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    assert best.filepath is None
    best.filepath = f"best{hvd.rank()}.keras"
    model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    try:
        _fit(model, hvd, [best])
        assert keras.models.load_model(best.filepath) is not None
    finally:
        os.unlink(best.filepath)


def _refused(keras, hvd):
    for text, function in (
            ("Average and Sum", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=4)),
            ("backward_passes_per_step", lambda: hvd.DistributedOptimizer(
                keras.optimizers.SGD(), backward_passes_per_step=0)),
            ("not 'adam'", lambda: hvd.DistributedOptimizer("adam")),
            ("not None", lambda: hvd_tf().DistributedOptimizer(None)),
            ("optimizers.Adam(0.001)", lambda: hvd.DistributedOptimizer(keras.optimizers.Adam)),
            ("set its filepath", lambda: hvd.callbacks.BestModelCheckpoint().on_train_begin()),
            ("distributed already", lambda: hvd.DistributedOptimizer(
                hvd.DistributedOptimizer(keras.optimizers.SGD()))),
            ("initial_lr", lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0)),
            ("local variables", lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(
                0, local_variables=[1]))):
        try:
            function()
        except ValueError as error:
            assert text in str(error), str(error)
        else:
            raise AssertionError(f"nothing was raised: {text}")
    _old_words(keras, hvd)


def _old_words(keras, hvd):
    """What Keras 3 dropped works, or the message says what to write."""
    _model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
           experimental_run_tf_function=False)
    if not _is_keras_3(keras):
        return  # Keras 2 takes all of it
    hvd_tf().broadcast_variables(keras.optimizers.SGD(0.1).variables(), root_rank=0)
    for name in ("SGD", "Adam", "Adadelta"):
        try:
            getattr(keras.optimizers, name)(lr=0.1)
        except ValueError as error:
            assert f"{name}(learning_rate=...)" in str(error), str(error)
        else:
            raise AssertionError("lr= was taken")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for use, rate in ((lambda: float(optimizer.lr), 0.1),
                      (lambda: setattr(optimizer, "lr", 0.2), 0.2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use()
        assert any("write optimizer.learning_rate" in str(told.message) for told in caught)
        assert np.isclose(float(optimizer.learning_rate), rate)
    _lr_of_undistributed_ones(keras)


def _lr_of_undistributed_ones(keras):
    """They are as Keras made them, but for the messages."""
    optimizer = keras.optimizers.SGD(0.1)
    assert not hasattr(optimizer, "lr")
    try:
        optimizer.lr.assign(0.2)
    except AttributeError as error:
        assert "write optimizer.learning_rate" in str(error), str(error)
    with _log_of_horovod() as said:
        optimizer.lr = 0.2
        optimizer.lr = 0.3
    assert len(said) == 1 and "write optimizer.learning_rate" in said[0], said
    assert np.isclose(float(optimizer.learning_rate), 0.1) and optimizer.lr == 0.3

    class WithLr(keras.optimizers.SGD):
        def __init__(self, rate):
            super().__init__(rate)
            self.lr = rate

    with _log_of_horovod() as said:
        assert WithLr(0.1).lr == 0.1
    assert not said, said


def test_fit_on_two_ranks():
    run_tf(2, "test_tf_keras", "fit")


def test_fit_on_three_ranks():
    run_tf(3, "test_tf_keras", "fit")


def test_fit_alone():
    run_tf(1, "test_tf_keras", "fit")


# --- horovod.keras, and what needs no fit() -------------------------------------------------------


def keras_door():
    import keras

    import horovod.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(100 + hvd.rank())
    assert np.allclose(hvd.allreduce(np.ones(2) * hvd.rank()), (hvd.size() - 1) / 2)
    assert np.allclose(hvd.allreduce(np.ones(2), op=hvd.Sum), hvd.size())
    assert np.allclose(hvd.allgather(np.array([hvd.rank()])), np.arange(hvd.size()))
    assert np.allclose(hvd.broadcast(np.array([hvd.rank()]), 1), 1)
    _no_global_variables(hvd)
    if _is_keras_3(keras):
        _variables_of_keras_3(keras, hvd)
    model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    _fit(model, hvd, [hvd.callbacks.MetricAverageCallback()])
    everyone = hvd.allgather(np.concatenate(
        [weight.ravel() for weight in model.get_weights()])[None])
    assert np.allclose(np.asarray(everyone)[0], np.asarray(everyone)[-1])
    _local_layers(keras, hvd)
    _checkpoint_of_this_door(hvd)
    _elastic(keras, hvd)


def _local_layers(keras, hvd):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="shared"),
                              keras.layers.Dense(1, name="own")])
    own = model.get_layer("own")
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=own)
    model.compile(optimizer, "mse")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=own.trainable_weights)
    inputs = np.random.RandomState(hvd.rank()).rand(32, 4)
    model.fit(inputs, inputs.sum(1), verbose=0, epochs=2, callbacks=[start])
    shared = np.asarray(hvd.allgather(model.get_layer("shared").get_weights()[0][None]))
    own = np.asarray(hvd.allgather(own.get_weights()[0][None]))
    assert np.allclose(shared[0], shared[-1]) and not np.allclose(own[0], own[-1])


def _no_global_variables(hvd):
    try:
        hvd.broadcast_global_variables(0)
    except RuntimeError as error:
        assert "hvd.callbacks.BroadcastGlobalVariablesCallback" in str(error), str(error)
    else:
        raise AssertionError("there are no global variables outside of graphs")


def _variables_of_keras_3(keras, hvd):
    reduced = hvd.allreduce(keras.Variable(np.full(2, hvd.rank(), "f")))
    assert np.allclose(keras.ops.convert_to_numpy(reduced), (hvd.size() - 1) / 2)
    _groups(keras, hvd)


def _groups(keras, hvd):
    """Gradients travel together; the result is the same."""
    sgd = keras.optimizers.SGD
    variables = [keras.Variable(np.zeros(i + 1, "f")) for i in range(4)]
    gradients = [keras.ops.convert_to_tensor(np.full(i + 1, hvd.rank() + i, "f"))
                 for i in range(4)]
    for groups, n_grouped in ((2, 2), ([variables[::3], [variables[1]]], 1), (0, 0), (None, 0)):
        optimizer = hvd.DistributedOptimizer(sgd(1.0), groups=groups)
        for variable in variables:
            variable.assign(np.zeros(variable.shape))
        with _counted_groups(keras) as count:
            optimizer.apply(gradients, variables)
        assert count() == n_grouped, (groups, count())
        for i, variable in enumerate(variables):
            assert np.allclose(keras.ops.convert_to_numpy(variable),
                               -i - (hvd.size() - 1) / 2), (groups, i)
    for groups in ("x", -1, [variables[0]]):
        try:
            hvd.DistributedOptimizer(sgd(1.0), groups=groups)
        except ValueError as error:
            assert "groups should be" in str(error), str(error)
        else:
            raise AssertionError(f"taken as groups: {groups}")


@contextlib.contextmanager
def _counted_groups(keras):
    """Gives a function that says how many groups have been reduced."""
    if keras.backend.backend() == "torch":
        target, name = "horovod.torch", "grouped_allreduce_async"
    else:
        target, name = "horovod.tensorflow.gradients", "grouped_allreduce"
    module = importlib.import_module(target)
    with mock.patch.object(module, name, wraps=getattr(module, name)) as grouped:
        yield lambda: grouped.call_count


def _checkpoint_of_this_door(hvd):
    """Has no save_weights_only where the other door has it."""
    names = list(inspect.signature(hvd.callbacks.BestModelCheckpoint).parameters)
    assert names[:4] == ["monitor", "verbose", "mode", "save_freq"], names
    assert not hvd.callbacks.BestModelCheckpoint("loss", 0, "max").save_weights_only


def _elastic(keras, hvd):
    model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.sync()
    callbacks = [hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
                 hvd.elastic.UpdateBatchStateCallback(state),
                 hvd.elastic.UpdateEpochStateCallback(state)]
    model.fit(*_data(hvd), batch_size=32, epochs=2, verbose=0, callbacks=callbacks)
    assert state.epoch == 2 and state.batch == 0
    state.save()
    saved = model.get_weights()
    model.fit(*_data(hvd), batch_size=32, verbose=0)
    state.restore()
    assert all(np.allclose(a, b) for a, b in zip(saved, model.get_weights()))
    assert int(model.optimizer.iterations.numpy()) == 6


def test_keras_door_on_two_ranks():
    run_tf(2, "test_tf_keras", "keras_door")


def test_keras_door_on_pytorch():
    run_tf(2, "test_tf_keras", "keras_door", env={"KERAS_BACKEND": "torch"})
