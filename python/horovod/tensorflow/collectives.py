# SPDX-License-Identifier: Apache-2.0
"""The collectives as users call them: dense tensors and IndexedSlices, with compression."""
import contextlib
import functools

import tensorflow as tf

from horovod.common.process_sets import global_process_set
from horovod.common.util import (
    check_adasum,
    handle_average_backwards_compatibility,
    num_rank_is_power_2,
)
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Adasum, Average, Sum, allgather, broadcast


check_num_rank_power_of_2 = num_rank_is_power_2


def size_for(process_set, dtype):
    """The number of ranks as a factor: asked when the graph runs if it may change."""
    return tf.cast(mpi_ops.size_now(mpi_ops.id_of(process_set)), dtype)


def on_device(device):
    """tf.device(), but "" is where the tensors are; to an eager call that would mean the CPU."""
    return tf.device(device) if device else contextlib.nullcontext()


def _named(name, suffix):
    return f"{name}_{suffix}" if name else None


def _allreduce_slices(slices, op, prescale_factor, postscale_factor, name, process_set,
                      ignore_name_scope):
    """IndexedSlices are gathered, not added: whoever applies them adds up equal indices."""
    if op not in (Average, Sum):
        raise NotImplementedError(
            "IndexedSlices can be summed and averaged only; use sparse_as_dense=True or "
            "tf.convert_to_tensor for other reductions.")
    if prescale_factor != 1.0 or postscale_factor != 1.0:
        raise NotImplementedError(
            "prescale_factor and postscale_factor do not work with IndexedSlices yet; use "
            "sparse_as_dense=True.")
    values = allgather(slices.values, _named(name, "values"), ignore_name_scope, process_set)
    indices = allgather(slices.indices, _named(name, "indices"), ignore_name_scope, process_set)
    if op == Average:
        values = values / size_for(process_set, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def allreduce(tensor, average=None, device_dense="", device_sparse="",
              compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0,
              name=None, process_set=global_process_set, ignore_name_scope=False):
    """The reduction of the tensors of all ranks, on all ranks."""
    op = handle_average_backwards_compatibility(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        with on_device(device_sparse):
            return _allreduce_slices(tensor, op, prescale_factor, postscale_factor, name,
                                     process_set, ignore_name_scope)
    if op == Adasum:
        check_adasum(op, process_set, process_set.size())
    with on_device(device_dense):
        wire, context = compression.compress(tf.convert_to_tensor(tensor))
        reduced = mpi_ops._allreduce(wire, name, op, prescale_factor, postscale_factor,
                                     ignore_name_scope, process_set)
        return compression.decompress(reduced, context)


def grouped_allreduce(tensors, average=None, device_dense="", device_sparse="",
                      compression=Compression.none, op=None, prescale_factor=1.0,
                      postscale_factor=1.0, process_set=global_process_set,
                      ignore_name_scope=False, name=None):
    """allreduce() of several tensors at once; dense ones and IndexedSlices may be mixed."""
    if not tensors:
        return tensors
    op = handle_average_backwards_compatibility(op, average)
    if op == Adasum:
        check_adasum(op, process_set, process_set.size())
    results = list(tensors)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    with on_device(device_sparse):
        for i in sorted(set(range(len(tensors))) - set(dense)):
            results[i] = _allreduce_slices(tensors[i], op, prescale_factor, postscale_factor,
                                           _named(name, str(i)), process_set, ignore_name_scope)
    if dense:
        with on_device(device_dense):
            wires = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
            reduced = mpi_ops._grouped_allreduce(
                [wire for wire, _ in wires], name, op, prescale_factor, postscale_factor,
                ignore_name_scope, process_set)
            for i, output, (_, context) in zip(dense, reduced, wires):
                results[i] = compression.decompress(output, context)
    return results


def reducescatter(tensor, device_dense="", compression=Compression.none, op=Average, name=None,
                  process_set=global_process_set, ignore_name_scope=False, prescale_factor=1.0,
                  postscale_factor=1.0):
    """This rank's rows of the reduction of the tensors of all ranks."""
    with on_device(device_dense):
        wire, context = compression.compress(tf.convert_to_tensor(tensor))
        reduced = mpi_ops._reducescatter(wire, name, op, prescale_factor, postscale_factor,
                                         ignore_name_scope, process_set)
        return compression.decompress(reduced, context)


def grouped_reducescatter(tensors, device_dense="", compression=Compression.none, op=Average,
                          process_set=global_process_set, prescale_factor=1.0,
                          postscale_factor=1.0):
    """reducescatter() of several tensors, all or none."""
    if not tensors:
        return tensors
    with on_device(device_dense):
        wires = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
        reduced = mpi_ops._grouped_reducescatter(
            [wire for wire, _ in wires], None, op, prescale_factor, postscale_factor, False,
            process_set)
        return [compression.decompress(output, context)
                for output, (_, context) in zip(reduced, wires)]


def as_tf_variable(variable):
    """The tf.Variable behind a variable of Keras 3, or the one given."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def _broadcast_ref(variable, root_rank, name, process_set):
    return variable.assign(broadcast(variable, root_rank, name, process_set=process_set))


def _own_memory(variable):
    """Makes sure that nobody else has the memory of a variable, such as a tensor assigned to it.

    Snapshot takes the memory over if it is the only one who has it, and copies it otherwise. The
    variable itself must let go for that moment.
    """
    ops = tf.raw_ops
    nothing = tf.zeros([0], variable.dtype)
    unchecked = ops.PlaceholderWithDefault(input=nothing, shape=None)  # of no known shape
    value = ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    with tf.control_dependencies([value]):
        let_go = ops.AssignVariableOp(resource=variable.handle, value=unchecked)
    with tf.control_dependencies([let_go]):
        value = ops.Snapshot(input=value)
    return ops.AssignVariableOp(resource=variable.handle, value=value)


def _broadcast_resource(variable, root_rank, name, process_set):
    """Into the variable's own memory, which what is read from it shares.

    The result is assigned nevertheless: a variable that was updated row by row is read by copy.
    """
    if not variable.shape.rank:  # nothing to save
        return _broadcast_ref(variable, root_rank, name, process_set)
    with tf.control_dependencies([_own_memory(variable)]):
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return variable.assign(mpi_ops._broadcast_inplace(value, root_rank, name, process_set))


def _broadcast_each(variables, root_rank, process_set, name):
    kinds = {type(variable).__name__ == "RefVariable" for variable in variables}
    if len(kinds) > 1:
        raise ValueError("broadcast_ takes either resource variables or reference variables.")
    one = _broadcast_resource if False in kinds else _broadcast_ref
    return [one(variable, root_rank, _named(name, str(i)), process_set)
            for i, variable in enumerate(variables)]


@functools.lru_cache(maxsize=64)
def _compiled(function, root_rank, process_set, set_id, size, option, shapes):
    """For eager callers; the id and the size of the set are part of its graph.

    It has one: those for variables of other shapes can go some day.
    """
    del set_id, size, shapes
    compiled = tf.function(lambda variables: function(variables, root_rank, process_set, option),
                           autograph=False)
    compiled._omit_frequent_tracing_warning = True  # users cannot do anything about it
    return compiled


def in_one_graph(function, variables, root_rank, process_set, option):
    """function(variables, root_rank, process_set, option) where all are on their way together.

    Nothing but the variables holds their memory in a graph. One is kept for all variables of the
    same shapes.
    """
    if tf.executing_eagerly():
        shapes = tuple((variable.dtype, str(variable.shape)) for variable in variables)
        function = _compiled(function, root_rank, process_set, process_set.process_set_id,
                             process_set.size(), option, shapes)
        return function(variables)
    return function(variables, root_rank, process_set, option)


def broadcast_(variables, root_rank, name=None, process_set=global_process_set):
    """Gives tf.Variables the values of root_rank, in place; returns the values.

    Resource variables, which is all there are in TensorFlow 2, take no second copy of their memory.
    """
    variables = [as_tf_variable(variable) for variable in variables]
    return in_one_graph(_broadcast_each, variables, root_rank, process_set, name)
