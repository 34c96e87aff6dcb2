# SPDX-License-Identifier: Apache-2.0
"""horovod.tensorflow on tensors of a GPU: results are right, and stay on the device, whatever the
order in which it does its work.

Runs on every rank, on a simulated GPU or a real one. The simulated one has no arithmetic for
TensorFlow: here tensors are only copied there, and back.
"""
import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

DTYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.int16]


def values(shape, dtype, start):
    return ((np.arange(np.prod(shape, dtype=np.int64)) + start) % 5 + 1).astype(dtype).reshape(
        shape)


def there(array):
    """A tensor on the device; one of floats is still under way, since it is a copy of another."""
    with tf.device("/GPU:0"):
        first = tf.identity(tf.constant(array))
        return tf.raw_ops.Snapshot(input=first) if array.dtype == np.float32 else first


def everybody(function):
    return [function(rank) for rank in range(hvd.size())]


def expect(tensor, array):
    if array.dtype != np.int32:  # those TensorFlow keeps on the host
        assert tensor.device.endswith("GPU:0"), (array.dtype, tensor.device)
    assert tensor.dtype.as_numpy_dtype == array.dtype
    np.testing.assert_array_equal(tensor.numpy(), array)


def check_allreduce():
    for dtype in DTYPES:
        shares = everybody(lambda rank: values((3, 5), dtype, rank))
        mine = there(shares[hvd.rank()])
        expect(hvd.allreduce(mine, op=hvd.Sum), sum(shares).astype(dtype))
        expect(hvd.allreduce(mine, op=hvd.Max), np.maximum.reduce(shares))
        expect(mine, shares[hvd.rank()])  # nobody has written over it


def check_in_graphs():
    @tf.function
    def function(tensor):
        with tf.device("/GPU:0"):
            summed = hvd.allreduce(tensor, op=hvd.Sum, name="graph")
            return summed, hvd.allgather(summed, name="graph")

    for i in range(10):
        shares = everybody(lambda rank: values((64,), np.float32, rank + i))
        summed, gathered = function(there(shares[hvd.rank()]))
        expect(summed, sum(shares))
        expect(gathered, np.concatenate([sum(shares)] * hvd.size()))


def check_large_and_groups():
    shares = everybody(lambda rank: values((300, 1001), np.float32, rank))
    expect(hvd.allreduce(there(shares[hvd.rank()]), op=hvd.Sum), sum(shares))
    groups = everybody(lambda rank: [values((i + 1, 7), np.float32, rank + i) for i in range(5)])
    results = hvd.grouped_allreduce([there(array) for array in groups[hvd.rank()]], op=hvd.Sum)
    for i, result in enumerate(results):
        expect(result, sum(group[i] for group in groups))


def check_many_in_flight():
    """Tensors are dropped at once; TensorFlow gives their memory to others."""
    @tf.function
    def function(tensors):
        with tf.device("/GPU:0"):
            return [hvd.allreduce(tensor, op=hvd.Sum, name=f"many.{i}")
                    for i, tensor in enumerate(tensors)]

    shares = everybody(lambda rank: [values((64,), np.float32, rank + i) for i in range(30)])
    results = function([there(array) for array in shares[hvd.rank()]])
    for i, result in enumerate(results):
        expect(result, sum(share[i] for share in shares))


def check_gathers():
    shares = everybody(lambda rank: values((rank + 2, 3), np.float32, rank))
    expect(hvd.allgather(there(shares[hvd.rank()])), np.concatenate(shares))
    shares = everybody(lambda rank: values((2 * rank, 3), np.int64, rank))
    expect(hvd.allgather(there(shares[hvd.rank()])), np.concatenate(shares))


def check_alltoall():
    splits = everybody(lambda rank: [(rank + m) % 3 for m in range(hvd.size())])
    shares = everybody(lambda rank: values((sum(splits[rank]), 2), np.float32, rank))
    me = hvd.rank()
    result, received = hvd.alltoall(there(shares[me]), splits=splits[me])
    starts = everybody(lambda rank: sum(splits[rank][:me]))
    expect(result, np.concatenate([shares[rank][starts[rank]:starts[rank] + splits[rank][me]]
                                   for rank in range(hvd.size())]))
    assert received.numpy().tolist() == [splits[rank][me] for rank in range(hvd.size())]


def check_reducescatter():
    shares = everybody(lambda rank: values((2 * hvd.size() + 1, 3), np.float32, rank))
    result = hvd.reducescatter(there(shares[hvd.rank()]), op=hvd.Sum)
    expect(result, np.array_split(sum(shares), hvd.size())[hvd.rank()])


def check_broadcast():
    for dtype in DTYPES:
        root = hvd.size() - 1
        expect(hvd.broadcast(there(values((4, 3), dtype, hvd.rank())), root),
               values((4, 3), dtype, root))


def check_variables():
    with tf.device("/GPU:0"):
        variables = [tf.Variable(values((3, 2), np.float32, hvd.rank() + i)) for i in range(3)]
    hvd.broadcast_variables(variables, root_rank=1)
    for i, variable in enumerate(variables):
        expect(variable, values((3, 2), np.float32, 1 + i))


def check_host_and_device_meet():
    shares = everybody(lambda rank: values((9,), np.float32, rank))
    if hvd.rank() == 0:
        mine = there(shares[0])
        result = hvd.allreduce(mine, op=hvd.Sum, name="mixed")
    else:
        with tf.device("/CPU:0"):
            result = hvd.allreduce(tf.constant(shares[hvd.rank()]), op=hvd.Sum, name="mixed")
    np.testing.assert_array_equal(result.numpy(), sum(shares))


def check_mismatch():
    """An error, on every rank, and then all goes on."""
    try:
        hvd.allreduce(there(np.ones(3 + hvd.rank(), np.float32)), name="mismatch")
    except tf.errors.FailedPreconditionError as error:
        assert "Mismatched" in str(error)
    else:
        raise AssertionError("a mismatch went unnoticed")


def run():
    hvd.init()
    devices = tf.config.list_physical_devices("GPU")
    device = devices[hvd.local_rank() % len(devices)]
    tf.config.set_visible_devices(device, "GPU")
    tf.config.experimental.set_memory_growth(device, True)
    checks = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
    for check in checks:
        print(check.__name__, flush=True)
        check()
    hvd.shutdown()
    return len(checks)
