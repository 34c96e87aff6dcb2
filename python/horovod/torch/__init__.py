# SPDX-License-Identifier: Apache-2.0
"""Horovod for PyTorch: `import horovod.torch as hvd`."""
from horovod.torch import custom_ops as _custom_ops  # noqa: F401 - registers them
from horovod.torch import checkpoint, elastic
from horovod.common.basics import *  # noqa: F401,F403 - exported
from horovod.common.process_sets import *  # noqa: F401,F403 - exported
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.compression import Compression
from horovod.torch.functions import (allgather_object, broadcast_object, broadcast_optimizer_state,
                                     broadcast_parameters)
from horovod.torch.mpi_ops import (
    _check_has_gpu, allgather, allgather_async, allreduce, allreduce_, allreduce_async,
    allreduce_async_, alltoall, alltoall_async, barrier, broadcast, broadcast_, broadcast_async,
    broadcast_async_, grouped_allgather, grouped_allgather_async, grouped_allreduce,
    grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_, grouped_reducescatter,
    grouped_reducescatter_async, join, poll, reducescatter, reducescatter_async,
    sparse_allreduce_async, synchronize)
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

_MPI_LIB_AVAILABLE = True

__all__ = [name for name in dir() if not name.startswith("_")] + ["_check_has_gpu"]
