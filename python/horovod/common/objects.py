# SPDX-License-Identifier: Apache-2.0
"""Any Python object as bytes through the core: broadcast_object() and allgather_object().

Objects are pickled and unpickled here, inside the users' own processes, whose peers have all proved
the job's secret; no other service ever reads a pickle. No framework is involved.
"""
import io
import pickle

from horovod import _core
from horovod.common.process_sets import global_process_set


def _dumps(obj):
    try:
        import cloudpickle
    except ImportError:  # functions of __main__ then cannot travel; everything else can
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return buffer.getvalue()


def broadcast_object(obj, root_rank=0, name=None, process_set=global_process_set):
    """The object of the root rank (a global rank), on every member."""
    name = name if name is not None else "object"  # equal on all ranks, whatever they hold
    is_root = _core.rank() == root_rank
    data = bytearray(_dumps(obj)) if is_root else bytearray()
    length = bytearray(len(data).to_bytes(8, "little"))
    _broadcast(f"broadcast.{name}.sz", length, root_rank, process_set)
    if not is_root:
        data = bytearray(int.from_bytes(length, "little"))
    _broadcast(f"broadcast.{name}.t", data, root_rank, process_set)
    return obj if is_root else pickle.loads(data)


def allgather_object(obj, name=None, process_set=global_process_set):
    """The objects of all members, as a list in the order of their ranks."""
    name = name if name is not None else "object"  # equal on all ranks, whatever they hold
    data = bytearray(_dumps(obj))
    lengths = allgather_size(len(data), process_set, f"allgather.{name}.sz")
    everything = _gather(f"allgather.{name}.t", data, process_set)
    objects = []
    start = 0
    for length in lengths:
        objects.append(pickle.loads(everything[start:start + length]))
        start += length
    return objects


def allgather_size(size, process_set, name=None):
    """A number of each member, as a list in the order of their ranks."""
    sizes = _gather(name, bytearray(size.to_bytes(8, "little")), process_set)
    return [int.from_bytes(sizes[i:i + 8], "little") for i in range(0, len(sizes), 8)]


def _broadcast(name, data, root, process_set):
    _core.submit(op=_core.BROADCAST, name=name, dtype=_core.UINT8, root=root,
                 process_set=process_set, inputs=data, outputs=data, waits=True).wait()


def _gather(name, data, process_set):
    return _core.submit(op=_core.ALLGATHER, name=name, dtype=_core.UINT8, process_set=process_set,
                        inputs=data, waits=True,
                        finish=lambda done: memoryview(done.memory(0)[0])).wait()
