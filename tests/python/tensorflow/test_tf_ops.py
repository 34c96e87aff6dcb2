# SPDX-License-Identifier: Apache-2.0
"""Operations of horovod.tensorflow: values, types, process sets, gradients, errors, order, memory.

Functions without "test" in front run on the ranks.
"""
import os

import numpy as np
from tf_jobs import run_tf

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]


def _setup(**options):
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init(**options)
    return tf, hvd


def _both_ways(tf, function):
    """The results of function() eagerly and inside a tf.function."""
    return [function(), tf.function(function)()]


def _values(tf, rank, dtype, rows=3):
    return tf.cast(np.arange(rows * 2).reshape(rows, 2) + rank + 1, dtype)


# --- Values ---------------------------------------------------------------------------------------


def _expected_reduction(tf, hvd, op, dtype):
    parts = [_values(tf, rank, dtype).numpy().astype("float64") for rank in range(hvd.size())]
    stacked = np.stack(parts)
    by_op = {hvd.Sum: stacked.sum(0), hvd.Average: stacked.mean(0), hvd.Min: stacked.min(0),
             hvd.Max: stacked.max(0), hvd.Product: stacked.prod(0)}
    value = by_op[op]
    return np.trunc(value) if dtype in INTEGERS else value


def reductions():
    tf, hvd = _setup()
    for dtype in FLOATS + INTEGERS:
        tensor = _values(tf, hvd.rank(), dtype)
        for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
            expected = _expected_reduction(tf, hvd, op, dtype)
            for result in _both_ways(tf, lambda: hvd.allreduce(tensor, op=op)):
                assert result.dtype == tensor.dtype
                got = result.numpy().astype("float64")
                assert np.allclose(got, expected, rtol=1e-2), (dtype, op, got, expected)
    scaled = hvd.allreduce(tf.ones(4), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert np.allclose(scaled.numpy(), 1.5 * hvd.size())
    half = hvd.allreduce(tf.ones(4) * 1.5, compression=hvd.Compression.fp16)
    assert half.dtype == tf.float32 and np.allclose(half.numpy(), 1.5)
    grouped = hvd.grouped_allreduce([tf.ones(2), tf.ones(3, tf.float64), tf.zeros([0])])
    assert [tensor.dtype for tensor in grouped] == [tf.float32, tf.float64, tf.float32]
    assert [tensor.shape[0] for tensor in grouped] == [2, 3, 0]
    assert hvd.grouped_allreduce([]) == []
    assert hvd.allreduce(tf.constant(2.0), op=hvd.Sum).numpy() == 2.0 * hvd.size()


def test_reductions_on_two_ranks():
    run_tf(2, "test_tf_ops", "reductions")


def movements():
    tf, hvd = _setup()
    rank, size = hvd.rank(), hvd.size()
    for dtype in FLOATS + INTEGERS + ["bool"]:
        mine = _values(tf, rank, dtype, rows=rank + 1)
        everyone = np.concatenate(
            [_values(tf, other, dtype, rows=other + 1).numpy() for other in range(size)])
        for result in _both_ways(tf, lambda: hvd.allgather(mine)):
            assert np.array_equal(result.numpy(), everyone), dtype
        for result in _both_ways(tf, lambda: hvd.broadcast(_values(tf, rank, dtype), size - 1)):
            assert np.array_equal(result.numpy(), _values(tf, size - 1, dtype).numpy()), dtype
    first, second = hvd.grouped_allgather([tf.fill([1, 2], rank), tf.ones(rank)])
    assert first.shape == (size, 2) and second.shape == (sum(range(size)),)
    _alltoall(tf, hvd)
    _reducescatter(tf, hvd)
    assert hvd.broadcast_object({"rank": rank}, root_rank=size - 1) == {"rank": size - 1}
    assert hvd.allgather_object(rank) == list(range(size))
    _questions(tf, hvd)
    hvd.barrier()
    assert hvd.join().numpy() in range(size)


def _alltoall(tf, hvd):
    rank, size = hvd.rank(), hvd.size()
    even = hvd.alltoall(tf.range(size * 2) + 100 * rank)
    assert np.array_equal(even.numpy(),
                          [100 * other + 2 * rank + i for other in range(size) for i in (0, 1)])
    splits = [other + 1 for other in range(size)]
    for output, received in _both_ways(
            tf, lambda: hvd.alltoall(tf.fill([sum(splits), 3], rank), splits=splits)):
        assert np.array_equal(received.numpy(), [rank + 1] * size)
        assert np.array_equal(output.numpy()[:, 0], np.repeat(np.arange(size), rank + 1))


def _reducescatter(tf, hvd):
    rank, size = hvd.rank(), hvd.size()
    rows = size + 1  # the first rank gets two
    tensor = tf.reshape(tf.range(rows * 2, dtype=tf.float32), [rows, 2])
    begin, end = (0, 2) if rank == 0 else (rank + 1, rank + 2)
    for result in _both_ways(tf, lambda: hvd.reducescatter(tensor, op=hvd.Sum)):
        assert np.allclose(result.numpy(), tensor.numpy()[begin:end] * size)
    average, other = hvd.grouped_reducescatter([tensor, tf.cast(tensor, tf.float64)])
    assert np.allclose(average.numpy(), tensor.numpy()[begin:end])
    assert other.dtype == tf.float64


def _questions(tf, hvd):
    def ask():
        return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(),
                hvd.process_set_included_op(), hvd.size_op(process_set_id=77)]

    expected = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1, -3]
    for answers in _both_ways(tf, ask):
        assert [int(answer) for answer in answers] == expected


def test_movements_on_three_ranks():
    run_tf(3, "test_tf_ops", "movements")


def test_movements_alone():
    run_tf(1, "test_tf_ops", "movements")


# --- Process sets, gradients, errors --------------------------------------------------------------


def sets_gradients_errors():
    from horovod.common.process_sets import ProcessSet

    last = ProcessSet([1, 2])
    tf, hvd = _setup(process_sets=[last])
    rank = hvd.rank()
    if last.included():
        total = hvd.allreduce(tf.constant([float(rank)]), op=hvd.Sum, process_set=last)
        assert total.numpy() == [3.0]
        assert hvd.broadcast(tf.constant(rank), 2, process_set=last).numpy() == 2
        assert hvd.size_op(last.process_set_id).numpy() == 2
    else:
        try:
            hvd.allreduce(tf.ones(1), process_set=last)
            raise AssertionError("a rank outside was let in")
        except tf.errors.InvalidArgumentError as error:
            assert "Rank 0 is not a member of the provided process set." in error.message
    assert int(hvd.process_set_included_op(last.process_set_id)) == (rank > 0)
    for gradients in (_gradients, tf.function(_gradients, autograph=False)):
        _check_gradients(hvd, gradients(tf, hvd))
    _errors(tf, hvd)
    hvd.shutdown()
    try:
        hvd.allreduce(tf.ones(1))
        raise AssertionError("a collective ran after shutdown")
    except tf.errors.FailedPreconditionError as error:
        assert "Horovod has not been initialized; use hvd.init()." in error.message


def _gradients(tf, hvd):
    rank, size = hvd.rank(), hvd.size()
    tensor = tf.ones([size, 2])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(tensor)
        total = hvd.allreduce(tensor, op=hvd.Sum)
        average = hvd.allreduce(tensor)
        gathered = hvd.allgather(tensor) * tf.reshape(
            tf.range(size * size, dtype=tf.float32), [-1, 1])
        sent = hvd.broadcast(tensor, 1)
        exchanged = hvd.alltoall(tensor) * float(rank + 1)
        scattered = hvd.reducescatter(tensor, op=hvd.Sum)
        group = hvd.grouped_allreduce([tensor, tensor * 2.0], op=hvd.Sum)[1]
    values = [total, average, gathered, sent, exchanged, scattered, group]
    return [tape.gradient(value, tensor) for value in values]


def _check_gradients(hvd, gradients):
    rank, size = hvd.rank(), hvd.size()
    total, average, gathered, sent, exchanged, scattered, group = (
        gradient.numpy() for gradient in gradients)
    assert np.allclose(total, size) and np.allclose(average, 1.0)
    assert np.allclose(gathered[:, 0], np.arange(size) + rank * size)
    assert np.allclose(sent, 1.0 if rank == 1 else 0.0)
    assert np.allclose(exchanged[:, 0], np.arange(size) + 1)
    assert np.allclose(scattered, size) and np.allclose(group, 2.0 * size)


def _errors(tf, hvd):
    rank = hvd.rank()

    def refused(kind, text, function):
        try:
            function()
        except kind as error:
            assert text in error.message, error.message
        else:
            raise AssertionError(f"nothing was raised: {text}")

    mismatch = tf.errors.FailedPreconditionError
    refused(mismatch, "Mismatched ALLREDUCE tensor shapes:",
            lambda: hvd.allreduce(tf.ones(2 + rank), name="shapes"))
    refused(mismatch, "Mismatched data types:",
            lambda: hvd.allreduce(tf.ones(2, tf.float32 if rank else tf.float64), name="types"))
    refused(tf.errors.InvalidArgumentError, "broadcast received invalid root rank 9",
            lambda: hvd.broadcast(tf.ones(1), 9))
    refused(tf.errors.InvalidArgumentError, "alltoall expects a 1D splits tensor",
            lambda: hvd.alltoall(tf.ones(3), splits=[[1, 1, 1]]))
    refused(tf.errors.InvalidArgumentError, "Sum of splits entries is greater",
            lambda: hvd.alltoall(tf.ones(3), splits=[2, 2, 2]))
    refused(tf.errors.AbortedError, "only supports AVERAGE and SUM",
            lambda: hvd.reducescatter(tf.ones(3), op=hvd.Max))
    assert np.allclose(hvd.allreduce(tf.ones(2)).numpy(), 1.0)  # the job goes on


def test_sets_gradients_and_errors_on_three_ranks():
    run_tf(3, "test_tf_ops", "sets_gradients_errors")


def lost_peer():
    """Rank 1 goes away while rank 0 waits for it inside a graph."""
    tf, hvd = _setup()
    hvd.barrier()
    if hvd.rank() == 1:
        os._exit(3)
    try:
        tf.function(lambda: hvd.allreduce(tf.ones(4), name="alone"))()
    except tf.errors.UnknownError as error:
        return error.message
    raise AssertionError("nothing was raised")


def test_a_lost_peer_is_named():
    message = run_tf(2, "test_tf_ops", "lost_peer", codes=[0, 3])[0]
    assert "rank 1" in message, message


# --- Order and memory -----------------------------------------------------------------------------


def scrambled():
    """Ranks start the collectives of one graph in opposite orders, with one thread each."""
    tf, hvd = _setup()

    @tf.function(autograph=False)
    def step(tensor):
        order = range(40) if hvd.rank() == 0 else reversed(range(40))
        parts = {}
        before = []
        for i in order:
            with tf.control_dependencies(before):  # each is started only after the one before
                start = tf.identity(tensor) * float(i)
            parts[i] = hvd.allreduce(start, op=hvd.Sum, name=f"part{i}")
            before = [start]
        return tf.add_n([parts[i] for i in range(40)])

    for _ in range(20):
        assert np.allclose(step(tf.ones(100)).numpy(), 780.0 * hvd.size())


def test_opposite_orders_with_one_thread():
    run_tf(2, "test_tf_ops", "scrambled")


def _resident_kib():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def many_operations():
    tf, hvd = _setup()

    @tf.function(autograph=False)
    def hundred(tensor):
        return tf.add_n([hvd.allreduce(tensor + float(i), op=hvd.Sum) for i in range(100)])

    for _ in range(60):
        hundred(tf.ones(64))
    before = _resident_kib()
    for _ in range(300):
        hundred(tf.ones(64))
    grown = _resident_kib() - before
    assert grown < 16 * 1024, f"{grown} KiB after 30000 operations"


def test_memory_stays_flat_over_30000_operations():
    run_tf(1, "test_tf_ops", "many_operations")
