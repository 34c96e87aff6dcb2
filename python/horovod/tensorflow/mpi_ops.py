# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations in TensorFlow: loads libhvd_tf.so, names the calls, registers gradients.

Everything here takes and gives dense tensors; IndexedSlices and compression are handled one level
up, in collectives.py. Operations run eagerly and inside tf.function alike.

Names. Ranks know a tensor by its name. In a graph that is the name of the node, which TensorFlow
keeps unique. An eager call has the name the user gave it, or none: ranks then count the calls.
"""
import ctypes
import os
import re
import struct

import tensorflow as tf

from horovod import _core
from horovod.common import basics, threads
from horovod.common.basics import *  # noqa: F401,F403 - exported
from horovod.common.basics import Average, Sum
from horovod.common.process_sets import *  # noqa: F401,F403 - exported
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import (  # noqa: F401 - exported
    check_extension, check_installed_version, get_average_backwards_compatibility_fun,
    gpu_available, handle_average_backwards_compatibility, num_rank_is_power_2)

_PATH = os.path.join(os.path.dirname(os.path.abspath(_core.__file__)), "libhvd_tf.so")

# Stateful operations run one after the other inside a tf.function. These need not: what they do to
# each other is agreed between the ranks. But a function, and a turn of a loop in it, ends only when
# they have: a node in flight twice would be one name for two tensors. TensorFlow has a list of
# operations of its own that it treats so.
_UNORDERED = frozenset(
    "Horovod" + name
    for name in (
        "Allreduce", "GroupedAllreduce", "Allgather", "GroupedAllgather", "Broadcast",
        "BroadcastInplace", "Alltoall", "Reducescatter", "GroupedReducescatter", "Size",
        "ProcessSetIncluded", "LocalSize", "Rank", "LocalRank",
    )
)


def _load():
    if not os.path.exists(_PATH):
        raise ImportError(
            "Extension horovod.tensorflow has not been built: there is no "
            f"{_PATH}. Install horovod again."
        )
    operations = tf.load_op_library(_PATH)
    library = ctypes.CDLL(_PATH)
    library.hvd_tf_problem.restype = ctypes.c_char_p
    library.hvd_tf_attach.argtypes = [ctypes.c_void_p]
    library.hvd_tf_attach.restype = None
    problem = library.hvd_tf_problem()
    if problem:
        raise ImportError(f"horovod.tensorflow cannot be used: {problem.decode()}")
    return operations, library


def _let_run_unordered():
    try:
        from tensorflow.python.framework import auto_control_deps
    except ImportError:
        return  # then they run one after the other
    known = getattr(auto_control_deps, "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS", None)
    if isinstance(known, frozenset):
        auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS = known | _UNORDERED


_operations, _library = _load()
_basics = basics.HorovodBasics()
MPI_LIB = _operations  # its name where programs call an operation by itself
_let_run_unordered()


@basics.on_init
def _attach():
    _library.hvd_tf_attach(_core.context())


@basics.on_shutdown
def _detach():
    _library.hvd_tf_attach(None)


if basics.is_initialized():
    _attach()


# --- Names ----------------------------------------------------------------------------------------


def _executing_eagerly():
    return tf.executing_eagerly()


def _normalize_name(name):
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _default_name(operation, tensor):
    try:
        return f"Horovod{operation}_{_normalize_name(tensor.name)}"
    except (AttributeError, ValueError):  # an eager tensor has none
        return f"Horovod{operation}"


def id_of(process_set):
    """Of a ProcessSet, or an id; -1, which the core refuses with a reason, if it has none."""
    set_id = process_set.process_set_id if isinstance(process_set, ProcessSet) else process_set
    return -1 if set_id is None else set_id


def _attributes(operation, tensor, name, process_set, ignore_name_scope=False):
    """The attributes every operation has. process_set may also be an id."""
    attributes = {
        "ignore_name_scope": ignore_name_scope,
        "process_set_id": id_of(process_set),
    }
    if tf.executing_eagerly():
        attributes["tensor_name"] = name or threads.series() or ""
        attributes["by_order"] = not name
    elif name:
        attributes["name"] = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name).lstrip("_\\/>-")
    else:
        attributes["name"] = _default_name(operation, tensor)
    return attributes


def _rows_open(output, tensor):
    """What is known about a result whose first dimension is not."""
    if not tf.executing_eagerly() and tensor.shape.rank is not None and tensor.shape.rank > 0:
        output.set_shape([None] + tensor.shape.as_list()[1:])
    return output


# --- Factors --------------------------------------------------------------------------------------


def _bits(factor):
    """Of a factor that float32, the most an attribute can hold, does not hold; else 0."""
    number = struct.unpack("<q", struct.pack("<d", factor))[0]
    return 0 if factor == struct.unpack("<f", struct.pack("<f", factor))[0] else number


def _factors(prescale, postscale):
    """As attributes of an operation."""
    return {"prescale_factor": prescale, "prescale_bits": _bits(prescale),
            "postscale_factor": postscale, "postscale_bits": _bits(postscale)}


def _factors_of(op):
    """(prescale, postscale) of an operation."""
    def factor(which):
        bits = op.get_attr(which + "_bits")
        return struct.unpack("<d", struct.pack("<q", bits))[0] if bits else op.get_attr(
            which + "_factor")

    return factor("prescale"), factor("postscale")


# --- Operations -----------------------------------------------------------------------------------


def _allreduce(tensor, name=None, op=Sum, prescale_factor=1.0, postscale_factor=1.0,
               ignore_name_scope=False, process_set=global_process_set):
    tensor = tf.convert_to_tensor(tensor)
    return _operations.horovod_allreduce(
        tensor, reduce_op=op, **_factors(prescale_factor, postscale_factor),
        **_attributes("Allreduce", tensor, name, process_set, ignore_name_scope))


def _by_dtype(tensors, name, run):
    """run(tensors of one dtype, name) for each dtype; results in the order of the tensors."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    places = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(i)
    results = [None] * len(tensors)
    for dtype, indices in places.items():
        own_name = f"{name}_{dtype.name}" if name and len(places) > 1 else name
        outputs = run([tensors[i] for i in indices], own_name)
        for i, output in zip(indices, outputs):
            results[i] = output
    return results


def _grouped_allreduce(tensors, name=None, op=Sum, prescale_factor=1.0, postscale_factor=1.0,
                       ignore_name_scope=False, process_set=global_process_set):
    def run(group, group_name):
        return _operations.horovod_grouped_allreduce(
            group, reduce_op=op, **_factors(prescale_factor, postscale_factor),
            **_attributes("GroupedAllreduce", group[0], group_name, process_set,
                          ignore_name_scope))

    return _by_dtype(tensors, name, run)


def allgather(tensor, name=None, ignore_name_scope=False, process_set=global_process_set):
    """The tensors of all ranks, one after the other along the first dimension."""
    tensor = tf.convert_to_tensor(tensor)
    output = _operations.horovod_allgather(
        tensor, **_attributes("Allgather", tensor, name, process_set, ignore_name_scope))
    return _rows_open(output, tensor)


def grouped_allgather(tensors, name=None, ignore_name_scope=False,
                      process_set=global_process_set):
    """allgather() of several tensors, all or none."""
    if not tensors:
        return tensors

    def run(group, group_name):
        outputs = _operations.horovod_grouped_allgather(
            group, **_attributes("GroupedAllgather", group[0], group_name, process_set,
                                 ignore_name_scope))
        return [_rows_open(output, tensor) for output, tensor in zip(outputs, group)]

    return _by_dtype(tensors, name, run)


def broadcast(tensor, root_rank, name=None, ignore_name_scope=False,
              process_set=global_process_set):
    """The tensor of root_rank (a global rank), on all ranks."""
    tensor = tf.convert_to_tensor(tensor)
    return _operations.horovod_broadcast(
        tensor, root_rank=root_rank,
        **_attributes("Broadcast", tensor, name, process_set, ignore_name_scope))


def _broadcast_inplace(tensor, root_rank, name=None, process_set=global_process_set):
    """Writes into the tensor given and returns it: nobody else may hold its memory."""
    return _operations.horovod_broadcast_inplace(
        tensor, root_rank=root_rank,
        **_attributes("BroadcastInplace", tensor, name, process_set))


def _whole_numbers(splits):
    splits = tf.convert_to_tensor(splits)
    if not (splits.dtype.is_integer or splits.shape == (0,)):  # [] is of floats
        raise tf.errors.InvalidArgumentError(
            None, None, "alltoall expects splits to contain 32-bit integer elements.")
    return tf.cast(splits, tf.int32)


def alltoall(tensor, splits=None, name=None, ignore_name_scope=False,
             process_set=global_process_set):
    """Rows to all ranks, rows from all ranks: the output, and with splits also how many from each.

    splits: how many rows each rank gets; without, all get the same number.
    """
    tensor = tf.convert_to_tensor(tensor)
    given = tf.constant([], tf.int32) if splits is None else _whole_numbers(splits)
    output, received = _operations.horovod_alltoall(
        tensor, given, **_attributes("Alltoall", tensor, name, process_set, ignore_name_scope))
    _rows_open(output, tensor)
    _rows_open(received, given)
    return output if splits is None else (output, received)


def _reducescatter(tensor, name=None, op=Sum, prescale_factor=1.0, postscale_factor=1.0,
                   ignore_name_scope=False, process_set=global_process_set):
    tensor = tf.convert_to_tensor(tensor)
    output = _operations.horovod_reducescatter(
        tensor, reduce_op=op, **_factors(prescale_factor, postscale_factor),
        **_attributes("Reducescatter", tensor, name, process_set, ignore_name_scope))
    return _rows_open(output, tensor)


def _grouped_reducescatter(tensors, name=None, op=Sum, prescale_factor=1.0, postscale_factor=1.0,
                           ignore_name_scope=False, process_set=global_process_set):
    def run(group, group_name):
        outputs = _operations.horovod_grouped_reducescatter(
            group, reduce_op=op, **_factors(prescale_factor, postscale_factor),
            **_attributes("GroupedReducescatter", group[0], group_name, process_set,
                          ignore_name_scope))
        return [_rows_open(output, tensor) for output, tensor in zip(outputs, group)]

    return _by_dtype(tensors, name, run)


def join():
    """This rank has no more data: it takes part in allreduces with zeros until all have joined.

    Returns the rank that joined last, an int32 scalar.
    """
    return _operations.horovod_join(**_attributes("Join", None, None, 0))


def barrier(process_set=global_process_set):
    """Returns (in a graph: lets go on) when all ranks of the set have come here."""
    return _operations.horovod_barrier(**_attributes("Barrier", None, None, process_set))


def size_op(process_set_id=0, name=None):
    """Number of ranks of a process set when the graph runs; a negative code if there is none."""
    return _operations.horovod_size(process_set_id=process_set_id, name=name)


def process_set_included_op(process_set_id=0, name=None):
    """1 if this rank is in the set when the graph runs, 0 if not; a negative code on error."""
    return _operations.horovod_process_set_included(process_set_id=process_set_id, name=name)


def local_size_op(name=None):
    """Number of ranks on this host when the graph runs."""
    return _operations.horovod_local_size(name=name)


def rank_op(name=None):
    """The rank when the graph runs."""
    return _operations.horovod_rank(name=name)


def local_rank_op(name=None):
    """The rank on this host when the graph runs."""
    return _operations.horovod_local_rank(name=name)


# --- Questions whose answer may change while a graph is in use ------------------------------------


def is_elastic():
    """Can the number of ranks change while a graph is in use?"""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def size_now(set_id):
    """The number of ranks of a set, asked when the graph runs if it may change."""
    if is_elastic():
        return size_op(set_id)
    try:
        return len(_core.process_set_ranks(set_id))
    except ValueError as error:  # as the operations on it would
        raise tf.errors.InvalidArgumentError(
            None, None,
            "Process set provided does not exist, or has not been registered.") from error


def _rank_now():
    return rank_op() if is_elastic() else _core.rank()


def _member_now(set_id):
    """The place of this rank among the members of a set."""
    return _rank_now() if set_id == 0 else _core.process_set_ranks(set_id).index(_core.rank())


# --- Gradients ------------------------------------------------------------------------------------


def _set_of(op):
    return op.get_attr("process_set_id")


def _name_for(op, suffix="grad"):
    """After the operation in the graph, not after nodes around it, which may differ by rank."""
    if tf.executing_eagerly():
        return None
    node = op.outputs[0].name.partition(":")[0]
    return f"{node.rpartition('/')[2]}_{suffix}"


def _common(op, suffix="grad"):
    return {"name": _name_for(op, suffix), "process_set": _set_of(op),
            "ignore_name_scope": op.get_attr("ignore_name_scope")}


def _reduction_of(op):
    prescale, postscale = _factors_of(op)
    return {"op": op.get_attr("reduce_op"), "prescale_factor": prescale,
            "postscale_factor": postscale, **_common(op)}


@tf.RegisterGradient("HorovodAllreduce")
def _allreduce_grad(op, grad):
    return _allreduce(grad, **_reduction_of(op))


@tf.RegisterGradient("HorovodGroupedAllreduce")
def _grouped_allreduce_grad(op, *grads):
    return _grouped_allreduce(list(grads), **_reduction_of(op))


def _own_rows(op, grad, tensor, i=0):
    """The share of this rank in the gradient of what was gathered."""
    reduced = _allreduce(grad, op=Average, **_common(op, f"grad_{i}"))
    rows = allgather(tf.shape(tensor)[:1], **_common(op, f"rows_{i}"))
    member = _member_now(_set_of(op))
    begin = tf.reduce_sum(rows[:member])
    return reduced[begin:begin + rows[member]]


@tf.RegisterGradient("HorovodAllgather")
def _allgather_grad(op, grad):
    return _own_rows(op, grad, op.inputs[0])


@tf.RegisterGradient("HorovodGroupedAllgather")
def _grouped_allgather_grad(op, *grads):
    return [_own_rows(op, grad, tensor, i)
            for i, (grad, tensor) in enumerate(zip(grads, op.inputs))]


@tf.RegisterGradient("HorovodBroadcast")
def _broadcast_grad(op, grad):
    reduced = _allreduce(grad, op=Average, **_common(op))
    return reduced * tf.cast(tf.equal(_rank_now(), op.get_attr("root_rank")), reduced.dtype)


@tf.RegisterGradient("HorovodAlltoall")
def _alltoall_grad(op, grad, _grad_of_splits):
    returned, _ = alltoall(grad, splits=op.outputs[1], **_common(op))
    return [returned, None]


def _spread(op, grads):
    """Gradients of what was reduced and scattered: everybody's, scaled as the values were."""
    prescale, postscale = _factors_of(op)
    factor = tf.constant(prescale * postscale, tf.float64)
    if op.get_attr("reduce_op") == Sum:
        factor *= tf.cast(size_now(_set_of(op)), tf.float64)
    return [allgather(grad * tf.cast(factor, grad.dtype), **_common(op, f"grad_{i}"))
            for i, grad in enumerate(grads)]


@tf.RegisterGradient("HorovodReducescatter")
def _reducescatter_grad(op, grad):
    return _spread(op, [grad])[0]


@tf.RegisterGradient("HorovodGroupedReducescatter")
def _grouped_reducescatter_grad(op, *grads):
    return _spread(op, grads)


for _name in ("BroadcastInplace", "Join", "Barrier", "Size", "ProcessSetIncluded", "LocalSize",
              "Rank", "LocalRank"):
    tf.no_gradient("Horovod" + _name)
