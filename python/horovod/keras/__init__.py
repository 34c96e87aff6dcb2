# SPDX-License-Identifier: Apache-2.0
"""Horovod for Keras, on TensorFlow or PyTorch: `import horovod.keras as hvd`."""
import keras

from horovod._keras.backends import backend_of as _backend_of
from horovod._keras.face import functions_for as _functions_for
from horovod.common.basics import *  # noqa: F401,F403 - exported
from horovod.common.process_sets import *  # noqa: F401,F403 - exported
from horovod.keras import callbacks, elastic

Compression = _backend_of(keras).Compression
_functions = _functions_for(keras, Compression, __name__)

DistributedOptimizer = _functions.DistributedOptimizer
PartialDistributedOptimizer = _functions.PartialDistributedOptimizer
broadcast_global_variables = _functions.broadcast_global_variables
allreduce = _functions.allreduce
allgather = _functions.allgather
broadcast = _functions.broadcast
reducescatter = _functions.reducescatter
load_model = _functions.load_model

__all__ = [name for name in dir() if not name.startswith("_")]
