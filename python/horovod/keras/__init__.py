# SPDX-License-Identifier: Apache-2.0
"""Horovod for Keras, on TensorFlow or PyTorch: `import horovod.keras as hvd`."""
import keras

from horovod._keras.backends import backend_of as _backend_of
from horovod._keras.face import functions_for as _functions_for
from horovod.common.basics import *  # noqa: F401,F403 - exported
from horovod.common.basics import Average as _Average
from horovod.common.process_sets import *  # noqa: F401,F403 - exported
from horovod.common.process_sets import global_process_set as _global_process_set
from horovod.keras import callbacks, checkpoint, elastic

Compression = _backend_of(keras).Compression
_functions = _functions_for(keras, Compression, __name__)


def DistributedOptimizer(optimizer, name=None, device_dense="", device_sparse="",
                         compression=Compression.none, sparse_as_dense=False,
                         gradient_predivide_factor=1.0, op=_Average, num_groups=0, groups=None,
                         backward_passes_per_step=1, average_aggregated_gradients=False,
                         process_set=_global_process_set, scale_local_gradients=True):
    """That of horovod.tensorflow.keras, with its arguments in the order programs know here."""
    return _functions.DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
        num_groups, groups, process_set, scale_local_gradients)


PartialDistributedOptimizer = _functions.PartialDistributedOptimizer
broadcast_global_variables = _functions.broadcast_global_variables
allreduce = _functions.allreduce
allgather = _functions.allgather
broadcast = _functions.broadcast
reducescatter = _functions.reducescatter
load_model = _functions.load_model

__all__ = [name for name in dir() if not name.startswith("_")]
