# SPDX-License-Identifier: Apache-2.0
"""Horovod for TensorFlow 2: `import horovod.tensorflow as hvd`."""
import tensorflow as _tf

from horovod._keras import guide as _guide
from horovod.common.basics import *  # noqa: F401,F403 - exported
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import *  # noqa: F401,F403 - exported
from horovod.tensorflow.collectives import (
    allreduce,
    broadcast_,
    check_num_rank_power_of_2,
    grouped_allreduce,
    grouped_reducescatter,
    handle_average_backwards_compatibility,
    reducescatter,
)
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from horovod.tensorflow.mpi_ops import (
    _executing_eagerly,
    allgather,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from horovod.tensorflow.optimizer import DistributedOptimizer
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from horovod.tensorflow import checkpoint, elastic  # isort: skip

_guide.look_after(_tf.keras)
del _guide, _tf  # not for those who import *

__all__ = [name for name in dir() if not name.startswith("__")]
