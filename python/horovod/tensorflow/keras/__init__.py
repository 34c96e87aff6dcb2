# SPDX-License-Identifier: Apache-2.0
"""Horovod for tf.keras: `import horovod.tensorflow.keras as hvd`."""
import tensorflow as tf

from horovod._keras import models as _models
from horovod._keras.backends import backend_of as _backend_of
from horovod._keras.optimizer import make_distributed as _make_distributed
from horovod.common.basics import (
    Average,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.common.util import handle_average_backwards_compatibility as _reduction
from horovod.tensorflow import Compression
from horovod.tensorflow.functions import broadcast_global_variables as _broadcast_global_variables
from horovod.tensorflow.keras import callbacks, elastic


def DistributedOptimizer(optimizer, name=None, device_dense="", device_sparse="",
                         compression=Compression.none, sparse_as_dense=False,
                         gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1,
                         average_aggregated_gradients=False, num_groups=0, groups=None,
                         process_set=global_process_set, scale_local_gradients=True):
    """An optimizer like the given one that applies the gradients of all ranks.

    backward_passes_per_step: gradients are added up that many times before they are reduced.
    groups: a number, or lists of variables, whose gradients travel together.
    """
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    return _make_distributed(
        _backend_of(tf.keras), optimizer, backward_passes_per_step, average_aggregated_gradients,
        name=name, device_dense=device_dense, device_sparse=device_sparse,
        compression=compression, sparse_as_dense=sparse_as_dense, op=op,
        gradient_predivide_factor=gradient_predivide_factor, num_groups=num_groups, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients)


def broadcast_global_variables(root_rank):
    """Gives all global variables the values of root_rank (graph mode only)."""
    return _broadcast_global_variables(root_rank)


def allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None,
              compression=Compression.none):
    """The reduction of a value over all ranks."""
    return _backend_of(tf.keras).allreduce(value, name, _reduction(op, average), prescale_factor,
                                           postscale_factor, compression)


def allgather(value, name=None):
    """The values of all ranks, one after the other along the first dimension."""
    return _backend_of(tf.keras).allgather(value, name)


def broadcast(value, root_rank, name=None):
    """The value of root_rank."""
    return _backend_of(tf.keras).broadcast(value, root_rank, name)


def reducescatter(value, name=None, op=Average):
    """This rank's rows of the reduction of a value over all ranks."""
    return _backend_of(tf.keras).reducescatter(value, name, op)


def load_model(filepath, custom_optimizers=None, custom_objects=None,
               compression=Compression.none, legacy_opts=False):
    """Loads a saved model; its optimizer is distributed and goes on where it was."""
    return _models.load_model(tf.keras, _backend_of(tf.keras), filepath, custom_optimizers,
                              custom_objects, legacy_opts, compression=compression, op=Average,
                              gradient_predivide_factor=1.0, process_set=global_process_set,
                              scale_local_gradients=True)


__all__ = [name for name in dir() if not name.startswith("_")]
