# SPDX-License-Identifier: Apache-2.0
"""Training with horovod.tensorflow: tape, optimizers, variables, graph mode, elastic state."""
from unittest import mock

import numpy as np
from tf_jobs import run_tf


def _setup():
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    return tf, hvd


def _raises(kind, text, function):
    try:
        function()
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"nothing was raised: {text}")


def tape_and_variables():
    tf, hvd = _setup()
    _tape(tf, hvd)
    _sparse_gradients(tf, hvd)
    _local_sources(tf, hvd)
    _groups(tf, hvd)
    _variables(tf, hvd)
    _sync_batch_norm(tf, hvd)
    _state(tf, hvd)


def _tape(tf, hvd):
    weight = tf.Variable([1.0, 2.0])
    unused = tf.Variable(3.0)
    factor = float(hvd.rank() + 1)
    mean_factor = (hvd.size() + 1) / 2

    def gradient(**options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight) * factor
        tape = hvd.DistributedGradientTape(tape, **options)
        assert isinstance(tape, tf.GradientTape)
        return tape.gradient(loss, [weight, unused])

    for run in (gradient, tf.function(gradient)):
        first, second = run()
        assert np.allclose(first.numpy(), [2 * mean_factor, 4 * mean_factor]) and second is None
        total, _ = run(op=hvd.Sum)
        assert np.allclose(total.numpy(), np.array([2, 4]) * mean_factor * hvd.size())
        divided, _ = run(gradient_predivide_factor=2.0)
        assert np.allclose(divided.numpy(), [2 * mean_factor, 4 * mean_factor])
        half, _ = run(compression=hvd.Compression.fp16)
        assert np.allclose(half.numpy(), [2 * mean_factor, 4 * mean_factor])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight)
    alone = hvd.DistributedGradientTape(tape).gradient(loss, weight, use_generic_names=True)
    assert isinstance(alone, list) and np.allclose(alone[0].numpy(), 1.0)
    _raises(ValueError, "gradient_predivide_factor",
            lambda: gradient(gradient_predivide_factor=2.0, op=hvd.Sum))


def _sparse_gradients(tf, hvd):
    table = tf.Variable(tf.ones([4, 2]))

    def gradient(sparse_as_dense):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 3]))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense)
        return tape.gradient(loss, [table])[0]

    expected = np.zeros([4, 2])
    for rank in range(hvd.size()):
        expected[rank] += 1.0 / hvd.size()
        expected[3] += 1.0 / hvd.size()
    sparse = gradient(False)
    assert isinstance(sparse, tf.IndexedSlices) and sparse.indices.shape == (2 * hvd.size(),)
    assert np.allclose(tf.convert_to_tensor(sparse).numpy(), expected)
    assert np.allclose(tf.convert_to_tensor(gradient(True)).numpy(), expected)
    mixed = hvd.grouped_allreduce([tf.ones(2), sparse, tf.ones(3)], op=hvd.Sum)
    assert isinstance(mixed[1], tf.IndexedSlices) and mixed[2].shape == (3,)
    _raises(NotImplementedError, "IndexedSlices", lambda: hvd.allreduce(sparse, op=hvd.Max))


def _local_sources(tf, hvd):
    shared, local = tf.Variable(1.0), tf.Variable(1.0)
    layer = tf.keras.layers.Dense(1)
    layer.build((None, 2))
    for scale in (True, False):
        with tf.GradientTape() as tape:
            loss = (shared + local) * float(hvd.rank() + 1)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(local)
        mine, others = tape.get_local_and_global_gradients(loss, [shared, local])
        assert mine[0][0] is local and others[0][0] is shared
        expected = (hvd.rank() + 1) / (hvd.size() if scale else 1)
        assert np.allclose(mine[0][1].numpy(), expected)
        assert np.allclose(others[0][1].numpy(), (hvd.size() + 1) / 2)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 2]))) * float(hvd.rank() + 1)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    kernel = tape.gradient(loss, layer.trainable_weights)[0]
    assert np.allclose(kernel.numpy(), (hvd.rank() + 1) / hvd.size())
    _raises(ValueError, "All local layers must be of tf.keras.layers.Layer type.",
            lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1]))
    _raises(ValueError, "distributed already", lambda: hvd.DistributedGradientTape(tape))


def _groups(tf, hvd):
    variables = [tf.Variable(float(i)) for i in range(5)]
    for groups in (2, [[variables[0], variables[3]], [variables[4]]], [[tf.Variable(1.0)]]):
        with tf.GradientTape() as tape:
            loss = tf.add_n([variable * float(i + hvd.rank())
                             for i, variable in enumerate(variables)])
        tape = hvd.DistributedGradientTape(tape, groups=groups)
        gradients = [gradient.numpy() for gradient in tape.gradient(loss, variables)]
        assert np.allclose(gradients, np.arange(5) + (hvd.size() - 1) / 2)
    _raises(ValueError, "groups should be",
            lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups=-1))


def _variables(tf, hvd):
    root = hvd.size() - 1
    for inplace in (False, True):
        variables = [tf.Variable(tf.fill([3], float(hvd.rank()))), tf.Variable(hvd.rank()),
                     tf.Variable(hvd.rank() == root)]
        hvd.broadcast_variables(variables, root_rank=root, inplace=inplace)
        assert [variable.numpy().tolist() for variable in variables] == [[float(root)] * 3, root,
                                                                         True]
    values = hvd.broadcast_([tf.Variable(float(hvd.rank()))], root)
    assert float(values[0]) == root
    _raises(RuntimeError, "eager", lambda: hvd.broadcast_global_variables(0))
    _in_place(tf, hvd)
    _again_and_again(tf, hvd)


def _again_and_again(tf, hvd):
    """Other variables of the same shapes take the same graph."""
    from horovod.tensorflow import functions, mpi_ops

    with mock.patch.object(functions, "broadcast", wraps=functions.broadcast) as copied, \
            mock.patch.object(mpi_ops, "_broadcast_inplace",
                              wraps=mpi_ops._broadcast_inplace) as in_place:
        for number in range(3):
            variables = [tf.Variable(tf.zeros([3])) for _ in range(4)]
            for options in ({}, {"inplace": True}):
                for variable in variables:
                    variable.assign(tf.fill([3], float(hvd.rank() + number)))
                hvd.broadcast_variables(variables, root_rank=0, **options)
                assert all(np.all(variable.numpy() == number) for variable in variables)
    assert copied.call_count == 4 and in_place.call_count == 4  # once for each, into the graph
    with mock.patch.object(tf.get_logger(), "warning") as warned:
        for rows in range(1, 12):
            hvd.broadcast_variables([tf.Variable(tf.zeros([rows, 2]))], root_rank=0)
    assert not warned.called, warned.call_args


def _address(variable):
    """Where the values of a variable lie; nothing keeps hold of them afterwards."""
    return variable.read_value()._numpy().__array_interface__["data"][0]


def _in_place(tf, hvd):
    """The memory stays the same, unless somebody else has it too: then it is left alone."""
    rank, root = float(hvd.rank()), hvd.size() - 1
    alone, embedding = tf.Variable(tf.zeros([500, 3])), tf.Variable(tf.zeros([500, 3]))
    alone.assign(tf.fill([500, 3], rank))
    tensor = tf.fill([500, 3], rank)
    shared, twin = tf.Variable(tensor), tf.Variable(tensor)
    embedding.assign(tensor)
    embedding.scatter_update(tf.IndexedSlices(tf.fill([1, 3], rank), [0]))  # now read by copy
    variables = [alone, shared, embedding, tf.Variable(tf.zeros([0, 2])), tf.Variable(rank)]
    before = _address(alone)
    earlier = shared.read_value()
    for round_of_ways in range(2):  # in one graph, and eagerly
        if round_of_ways == 0:
            hvd.broadcast_variables(variables, root_rank=root, inplace=True)
        else:
            alone.assign_add(tf.fill([500, 3], rank - root))
            hvd.broadcast_(variables, root)
        for variable in variables:
            assert np.all(variable.numpy() == root)
    assert _address(alone) == before
    for other in (tensor, twin, earlier):
        assert np.all(other.numpy() == rank)


def _sync_batch_norm(tf, hvd):
    layer = hvd.SyncBatchNormalization(momentum=0.0, epsilon=1e-6)
    whole = np.random.RandomState(1).rand(8 * hvd.size(), 3).astype("float32")
    mine = tf.constant(whole[hvd.rank() * 8:(hvd.rank() + 1) * 8])
    with tf.GradientTape() as tape:
        tape.watch(mine)
        output = layer(mine, training=True)
        loss = tf.reduce_sum(tf.square(output) * tf.constant([1.0, 2.0, 3.0]))
    expected = (whole - whole.mean(0)) / np.sqrt(whole.var(0) + 1e-6)
    begin = hvd.rank() * 8
    assert np.allclose(output.numpy(), expected[begin:begin + 8], atol=1e-3)
    assert np.allclose(layer.moving_mean.numpy(), whole.mean(0), atol=1e-4)
    assert np.all(np.isfinite(tape.gradient(loss, mine).numpy()))
    _raises(ValueError, "fused", lambda: hvd.SyncBatchNormalization(fused=True))
    two = tf.keras.Sequential([tf.keras.layers.Input((3,)), hvd.SyncBatchNormalization(),
                               hvd.SyncBatchNormalization()])
    assert all(layer.name.startswith("sync_batch_normalization") for layer in two.layers)


def _state(tf, hvd):
    variable = tf.Variable(float(hvd.rank()))
    state = hvd.elastic.TensorFlowState([variable], epoch=hvd.rank())
    state.sync()
    assert variable.numpy() == 0.0 and state.epoch == 0
    variable.assign(5.0)
    state.epoch = 7
    state.commit()
    variable.assign(6.0)
    state.epoch = 8
    state.restore()
    assert variable.numpy() == 5.0 and state.epoch == 7

    @hvd.elastic.run
    def fail_elsewhere(elastic_state):
        raise tf.errors.UnknownError(None, None, "not of Horovod, for all it says")

    _raises(tf.errors.UnknownError, "not of Horovod", lambda: fail_elsewhere(state))
    calls = []

    @hvd.elastic.run
    def train(elastic_state):
        calls.append(elastic_state.epoch)
        if len(calls) == 1:
            elastic_state.epoch = 9
            hvd.shutdown()  # the next collective fails as after a lost peer
            raise tf.errors.UnknownError(None, None, "lost", {b"horovod.status": b"HVD_PEER_LOST"})
        return elastic_state.epoch

    assert train(state) == 7 and calls == [7, 7]
    assert np.allclose(hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy(), hvd.size())


def test_tape_and_variables_on_two_ranks():
    run_tf(2, "test_tf_training", "tape_and_variables")


def test_tape_and_variables_alone():
    run_tf(1, "test_tf_training", "tape_and_variables")


# --- Graphs of TensorFlow 1 style -----------------------------------------------------------------


def sessions(switch):
    """switch: how the script leaves TensorFlow 2, a function of tf.compat.v1."""
    tf, hvd = _setup()
    v1 = tf.compat.v1
    getattr(v1, switch)()
    for optimizer, passes, steps in (
            (v1.train.GradientDescentOptimizer(0.1), 1, 1),
            (v1.train.AdamOptimizer(0.1), 1, 2),
            (v1.train.MomentumOptimizer(0.1, 0.9), 2, 4)):
        with tf.Graph().as_default():
            weight = v1.get_variable("weight", initializer=[float(hvd.rank()), 1.0])
            loss = tf.reduce_sum(weight * weight) * float(hvd.rank() + 1)
            step = v1.train.get_or_create_global_step()
            distributed = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
            train = distributed.minimize(loss, global_step=step)
            hooks = [hvd.BroadcastGlobalVariablesHook(0)]
            with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                for _ in range(steps):
                    session.run(train)
                everyone = hvd.allgather_object(session.run(weight).tolist())
                assert session.run(step) == steps
            assert everyone[0] == everyone[-1] and everyone[0] != [0.0, 1.0]
    with tf.Graph().as_default(), v1.Session() as session:
        value = session.run(hvd.allreduce(tf.ones(2) * hvd.rank(), op=hvd.Sum, name="graph"))
        assert np.allclose(value, sum(range(hvd.size())))
    _adasum(tf, hvd)
    _adasum_of_several_steps(tf, hvd)
    _state_of_a_session(tf, hvd)


def _adasum_of_several_steps(tf, hvd):
    """What ranks combine is the way of two steps; parallel ways of 2 and 4 make one of 3."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("several", initializer=[8.0])
        loss = tf.reduce_sum(weight) * float(hvd.rank() + 1)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum,
                                             backward_passes_per_step=2)
        train = optimizer.minimize(loss)
        session.run(v1.global_variables_initializer())
        session.run(train)
        assert np.allclose(session.run(weight), 8.0 - (hvd.rank() + 1))  # its own step only
        session.run(train)
        assert np.allclose(session.run(weight), 8.0 - 3.0)
        session.run(train)
        assert np.allclose(session.run(weight), 5.0 - (hvd.rank() + 1))


def _state_of_a_session(tf, hvd):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("kept", initializer=[float(hvd.rank())])
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, batch=hvd.rank())
        state.sync()
        assert session.run(weight) == [0.0] and state.batch == 0
        weight.load([7.0], session)
        state.restore()
        assert session.run(weight) == [0.0]


def _adasum(tf, hvd):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("adasum", initializer=[1.0, 1.0])
        loss = tf.reduce_sum(weight * np.array([1.0, 0.0] if hvd.rank() else [0.0, 1.0], "f"))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)
        train = optimizer.minimize(loss)
        session.run(v1.global_variables_initializer())
        session.run(train)
        assert np.allclose(session.run(weight), [0.5, 0.5])  # orthogonal steps add up


def test_sessions_on_two_ranks():
    run_tf(2, "test_tf_training", "sessions", "disable_eager_execution")


def test_sessions_with_reference_variables():
    run_tf(2, "test_tf_training", "sessions", "disable_v2_behavior")
