# SPDX-License-Identifier: Apache-2.0
"""horovod.tensorflow.keras and horovod.keras: fit() on several ranks, callbacks, saved models."""
import os

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
    _saved_models(keras, hvd)
    _checkpoint(keras, hvd)
    _refused(keras, hvd)


def _history(keras, hvd):
    callbacks = [hvd.callbacks.MetricAverageCallback(),
                 hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
                 hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2)]
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


def _ways_to_train(keras, hvd):
    """Settings of the optimizer and ways to run a step; all ranks must end alike."""
    adam = keras.optimizers.Adam
    for optimizer, options in (
            (hvd.DistributedOptimizer(adam(0.01), backward_passes_per_step=3,
                                      average_aggregated_gradients=True), {}),
            (hvd.DistributedOptimizer(adam(0.01), groups=2,
                                      compression=hvd.Compression.fp16), {}),
            (hvd.DistributedOptimizer(adam(0.01)), {"run_eagerly": True}),
            (hvd.DistributedOptimizer(adam(0.01)), {"jit_compile": True})):
        model = _model(keras, optimizer, **options)
        _fit(model, hvd)
        _assert_equal_weights(model, hvd)
        assert int(optimizer.iterations.numpy()) == 3


def _saved_models(keras, hvd):
    model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    _fit(model, hvd)
    for suffix in ("keras", "h5"):
        path = f"model{hvd.rank()}.{suffix}"
        model.save(path)
        try:
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


def test_fit_on_two_ranks():
    run_tf(2, "test_tf_keras", "fit")


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
    model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    _fit(model, hvd, [hvd.callbacks.MetricAverageCallback()])
    everyone = hvd.allgather(np.concatenate(
        [weight.ravel() for weight in model.get_weights()])[None])
    assert np.allclose(np.asarray(everyone)[0], np.asarray(everyone)[-1])
    _local_layers(keras, hvd)
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
