# SPDX-License-Identifier: Apache-2.0
"""Operations of horovod.tensorflow: values, types, process sets, gradients, errors, order, memory.

Functions without "test" in front run on the ranks.
"""
import os

import numpy as np
import pytest
from tf_jobs import run_tf

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]


def _setup(**options):
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init(**options)
    return tf, hvd


def _setup_sets():
    """The world and a set whose members have other numbers in it, where this rank is in it."""
    from horovod.common.process_sets import ProcessSet

    ranks = {1: [], 2: [[1]], 3: [[0, 2]]}[int(os.environ["HOROVOD_SIZE"])]
    some = [ProcessSet(members) for members in ranks]
    tf, hvd = _setup(process_sets=some)
    return tf, hvd, [members for members in (hvd.global_process_set, *some) if members.included()]


def _both_ways(tf, function):
    """The results of function() eagerly and inside a tf.function."""
    return [function(), tf.function(function)()]


def _values(tf, rank, dtype, rows=3):
    small = np.arange(rows * 2) % 4  # the product of three ranks fits in an int8
    return tf.cast(small.reshape(rows, 2) + rank + 1, dtype)


# --- Values: every operation x type x process set, eagerly and in a graph ------------------------


def _expected_reduction(tf, hvd, members, op, dtype):
    parts = [_values(tf, rank, dtype).numpy().astype("float64") for rank in members.ranks]
    stacked = np.stack(parts)
    by_op = {hvd.Sum: stacked.sum(0), hvd.Average: stacked.mean(0), hvd.Min: stacked.min(0),
             hvd.Max: stacked.max(0), hvd.Product: stacked.prod(0)}
    value = by_op[op]
    return np.trunc(value) if dtype in INTEGERS else value


def reductions():
    tf, hvd, sets = _setup_sets()
    for members in sets:
        for dtype in FLOATS + INTEGERS:
            tensor = _values(tf, hvd.rank(), dtype)
            for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
                expected = _expected_reduction(tf, hvd, members, op, dtype)
                for result in _both_ways(
                        tf, lambda: hvd.allreduce(tensor, op=op, process_set=members)):
                    assert result.dtype == tensor.dtype
                    got = result.numpy().astype("float64")
                    assert np.allclose(got, expected, rtol=1e-2), (dtype, op, got, expected)
        _reduction_forms(tf, hvd, members)
        _reducescatter(tf, hvd, members)
    hvd.barrier()  # a rank that ends asks the others to stop


def _reduction_forms(tf, hvd, members):
    n = members.size()
    scaled = hvd.allreduce(tf.ones(4), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0,
                           process_set=members)
    assert np.allclose(scaled.numpy(), 1.5 * n)
    half = hvd.allreduce(tf.ones(4) * 1.5, compression=hvd.Compression.fp16, process_set=members)
    assert half.dtype == tf.float32 and np.allclose(half.numpy(), 1.5)
    for grouped in _both_ways(tf, lambda: hvd.grouped_allreduce(
            [tf.ones(2), tf.ones(3, tf.float64), tf.zeros([0])], op=hvd.Sum,
            process_set=members)):
        assert [tensor.dtype for tensor in grouped] == [tf.float32, tf.float64, tf.float32]
        assert [tensor.shape[0] for tensor in grouped] == [2, 3, 0]
        assert np.allclose(grouped[0].numpy(), n) and np.allclose(grouped[1].numpy(), n)
    assert hvd.grouped_allreduce([], process_set=members) == []
    assert hvd.allreduce(tf.constant(2.0), op=hvd.Sum, process_set=members).numpy() == 2.0 * n


def _reducescatter(tf, hvd, members):
    me, n = members.rank(), members.size()
    rows = n + 1  # the first rank gets two
    begin, end = (0, 2) if me == 0 else (me + 1, me + 2)
    for dtype in FLOATS + INTEGERS:
        tensor = tf.cast(np.arange(rows * 2).reshape(rows, 2), dtype)
        whole = tensor.numpy().astype("float64")
        for result in _both_ways(
                tf, lambda: hvd.reducescatter(tensor, op=hvd.Sum, process_set=members)):
            assert np.allclose(result.numpy().astype("float64"), whole[begin:end] * n), dtype
    tensor = tf.constant(whole, tf.float32)
    average, other = hvd.grouped_reducescatter([tensor, tf.cast(tensor, tf.float64)],
                                               process_set=members)
    assert np.allclose(average.numpy(), whole[begin:end])
    assert other.dtype == tf.float64


def test_reductions_on_two_ranks():
    run_tf(2, "test_tf_ops", "reductions")


def test_reductions_on_three_ranks():
    run_tf(3, "test_tf_ops", "reductions")


def movements():
    tf, hvd, sets = _setup_sets()
    rank, size = hvd.rank(), hvd.size()
    for members in sets:
        last = members.ranks[-1]
        for dtype in FLOATS + INTEGERS + ["bool"]:
            mine = _values(tf, rank, dtype, rows=rank + 1)
            everyone = np.concatenate(
                [_values(tf, other, dtype, rows=other + 1).numpy() for other in members.ranks])
            for result in _both_ways(tf, lambda: hvd.allgather(mine, process_set=members)):
                assert np.array_equal(result.numpy(), everyone), dtype
            for result in _both_ways(tf, lambda: hvd.broadcast(
                    _values(tf, rank, dtype), last, process_set=members)):
                assert np.array_equal(result.numpy(), _values(tf, last, dtype).numpy()), dtype
            _alltoall(tf, hvd, members, dtype)
        for first, second in _both_ways(tf, lambda: hvd.grouped_allgather(
                [tf.fill([1, 2], rank), tf.ones(rank)], process_set=members)):
            assert first.shape == (members.size(), 2) and second.shape == (sum(members.ranks),)
        assert hvd.broadcast_object({"rank": rank}, last, process_set=members) == {"rank": last}
        assert hvd.allgather_object(rank, process_set=members) == list(members.ranks)
        hvd.barrier(process_set=members)
    _questions(tf, hvd)
    hvd.barrier()
    assert hvd.join().numpy() in range(size)


def _alltoall(tf, hvd, members, dtype):
    me, n = members.rank(), members.size()
    even = hvd.alltoall(tf.cast(tf.range(n * 2) + 10 * me, dtype), process_set=members)
    expected = tf.cast([10 * other + 2 * me + i for other in range(n) for i in (0, 1)], dtype)
    assert np.array_equal(even.numpy(), expected.numpy()), dtype
    splits = [other + 1 for other in range(n)]
    for output, received in _both_ways(tf, lambda: hvd.alltoall(
            tf.cast(tf.fill([sum(splits), 3], me), dtype), splits=splits, process_set=members)):
        assert np.array_equal(received.numpy(), [me + 1] * n)
        expected = tf.cast(np.repeat(np.arange(n), me + 1), dtype)
        assert np.array_equal(output.numpy()[:, 0], expected.numpy()), dtype


def _questions(tf, hvd):
    from horovod.tensorflow import mpi_ops  # has the names of the package, as scripts expect

    def ask():
        return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(),
                hvd.process_set_included_op(), hvd.size_op(process_set_id=77)]

    expected = [mpi_ops.rank(), mpi_ops.size(), hvd.local_rank(), hvd.local_size(), 1, -3]
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
    for elastic in ("0", "1"):  # then rank and size are asked when the graph runs
        os.environ["HOROVOD_ELASTIC"] = elastic
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
    refused(tf.errors.InvalidArgumentError, "alltoall expects splits to contain 32-bit integer",
            lambda: hvd.alltoall(tf.ones(3), splits=[1.5, 1.0, 0.5]))
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
    assert "HorovodAllreduce: rank 1" in message, message


def loss_where(place):
    """Rank 1 goes away; returns what elastic.run makes of the error that this place raises."""
    tf, hvd = _setup()
    from horovod.common.exceptions import HorovodInternalError
    from horovod.tensorflow.elastic import _translate_errors

    def two():
        return [hvd.allreduce(tf.ones(4), name=name) for name in ("first", "second")]

    def in_a_session():
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(two())

    hvd.barrier()
    if hvd.rank() == 1:
        os._exit(3)
    run = {"eager": two, "function": tf.function(two), "session": in_a_session}[place]
    try:
        _translate_errors(run)()
    except HorovodInternalError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("place", ["eager", "function", "session"])
def test_elastic_knows_a_loss(place):
    message = run_tf(2, "test_tf_ops", "loss_where", place, codes=[0, 3])[0]
    assert "HorovodAllreduce: rank 1" in message, message


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
    _loops(tf, hvd)


def _loops(tf, hvd):
    """Turns that do not need each other's results: each waits for the one before nevertheless."""
    unused = []

    @tf.function
    def loop(turns):
        total = tf.zeros(2)
        for i in tf.range(turns):
            part = hvd.allreduce(tf.fill([2], tf.cast(i, tf.float32)), op=hvd.Sum)
            unused.append(hvd.allgather(part))  # takes place all the same
            total += part
        return total

    assert np.allclose(loop(tf.constant(50)).numpy(), 1225.0 * hvd.size())


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
    run_tf(2, "test_tf_ops", "many_operations")
