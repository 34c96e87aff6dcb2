# SPDX-License-Identifier: Apache-2.0
"""Horovod for tf.keras: `import horovod.tensorflow.keras as hvd`."""
import tensorflow as tf

from horovod._keras.face import functions_for as _functions_for
from horovod.common.basics import *  # noqa: F401,F403 - exported
from horovod.common.process_sets import *  # noqa: F401,F403 - exported
from horovod.tensorflow import Compression
from horovod.tensorflow.keras import callbacks, checkpoint, elastic

_functions = _functions_for(tf.keras, Compression, __name__)

DistributedOptimizer = _functions.DistributedOptimizer
broadcast_global_variables = _functions.broadcast_global_variables
allreduce = _functions.allreduce
allgather = _functions.allgather
broadcast = _functions.broadcast
reducescatter = _functions.reducescatter
load_model = _functions.load_model

__all__ = [name for name in dir() if not name.startswith("_")]
