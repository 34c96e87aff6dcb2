# SPDX-License-Identifier: Apache-2.0
# Types of horovod.torch, for editors and type checkers; the modules beside it have the code.
from contextlib import AbstractContextManager
from typing import (Any, Callable, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple,
                    Type, Union)

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from horovod._core import Handle
from horovod.common.basics import *
from horovod.common.compression import Compressor
from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from horovod.common.process_sets import *
from horovod.torch import checkpoint as checkpoint
from horovod.torch import elastic as elastic
from horovod.torch.mpi_ops import JointHandle
from horovod.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

AnyHandle = Union[Handle, JointHandle, Callable[[], Tensor]]

class Compression:
    none: Type[Compressor]
    fp16: Type[Compressor]
    bf16: Type[Compressor]

def _check_has_gpu() -> bool: ...

def allreduce(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None,
              compression: Type[Compressor] = ..., op: Optional[int] = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = ...) -> Tensor: ...
def allreduce_async(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None,
                    op: Optional[int] = None, prescale_factor: float = 1.0,
                    postscale_factor: float = 1.0, process_set: ProcessSet = ...) -> Handle: ...
def allreduce_(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None,
               op: Optional[int] = None, prescale_factor: float = 1.0,
               postscale_factor: float = 1.0, process_set: ProcessSet = ...) -> Tensor: ...
def allreduce_async_(tensor: Tensor, average: Optional[bool] = None, name: Optional[str] = None,
                     op: Optional[int] = None, prescale_factor: float = 1.0,
                     postscale_factor: float = 1.0, process_set: ProcessSet = ...) -> Handle: ...
def grouped_allreduce(tensors: Sequence[Tensor], average: Optional[bool] = None,
                      name: Optional[str] = None, compression: Type[Compressor] = ...,
                      op: Optional[int] = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0,
                      process_set: ProcessSet = ...) -> List[Tensor]: ...
def grouped_allreduce_async(tensors: Sequence[Tensor], average: Optional[bool] = None,
                            name: Optional[str] = None, op: Optional[int] = None,
                            prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = ...) -> JointHandle: ...
def grouped_allreduce_(tensors: Sequence[Tensor], average: Optional[bool] = None,
                       name: Optional[str] = None, op: Optional[int] = None,
                       prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = ...) -> Tuple[Tensor, ...]: ...
def grouped_allreduce_async_(tensors: Sequence[Tensor], average: Optional[bool] = None,
                             name: Optional[str] = None, op: Optional[int] = None,
                             prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = ...) -> JointHandle: ...
def sparse_allreduce_async(tensor: Tensor, name: str, op: int,
                           process_set: ProcessSet = ...) -> Callable[[], Tensor]: ...
def allgather(tensor: Tensor, name: Optional[str] = None,
              process_set: ProcessSet = ...) -> Tensor: ...
def allgather_async(tensor: Tensor, name: Optional[str] = None,
                    process_set: ProcessSet = ...) -> Handle: ...
def grouped_allgather(tensors: Sequence[Tensor], name: Optional[str] = None,
                      process_set: ProcessSet = ...) -> Tuple[Tensor, ...]: ...
def grouped_allgather_async(tensors: Sequence[Tensor], name: Optional[str] = None,
                            process_set: ProcessSet = ...) -> JointHandle: ...
def broadcast(tensor: Tensor, root_rank: int, name: Optional[str] = None,
              process_set: ProcessSet = ...) -> Tensor: ...
def broadcast_async(tensor: Tensor, root_rank: int, name: Optional[str] = None,
                    process_set: ProcessSet = ...) -> Handle: ...
def broadcast_(tensor: Tensor, root_rank: int, name: Optional[str] = None,
               process_set: ProcessSet = ...) -> Tensor: ...
def broadcast_async_(tensor: Tensor, root_rank: int, name: Optional[str] = None,
                     process_set: ProcessSet = ...) -> Handle: ...
def alltoall(tensor: Tensor, splits: Union[None, Tensor, Sequence[int]] = None,
             name: Optional[str] = None,
             process_set: ProcessSet = ...) -> Union[Tensor, Tuple[Tensor, Tensor]]: ...
def alltoall_async(tensor: Tensor, splits: Union[None, Tensor, Sequence[int]] = None,
                   name: Optional[str] = None, process_set: ProcessSet = ...) -> Handle: ...
def reducescatter(tensor: Tensor, name: Optional[str] = None, compression: Type[Compressor] = ...,
                  op: int = ..., process_set: ProcessSet = ..., prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> Tensor: ...
def reducescatter_async(tensor: Tensor, name: Optional[str] = None, op: int = ...,
                        process_set: ProcessSet = ..., prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> Handle: ...
def grouped_reducescatter(tensors: Sequence[Tensor], name: Optional[str] = None,
                          compression: Type[Compressor] = ..., op: int = ...,
                          process_set: ProcessSet = ..., prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> List[Tensor]: ...
def grouped_reducescatter_async(tensors: Sequence[Tensor], name: Optional[str] = None,
                                op: int = ..., process_set: ProcessSet = ...,
                                prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> JointHandle: ...
def join(device: int = -1) -> int: ...
def barrier(process_set: ProcessSet = ...) -> None: ...
def poll(handle: AnyHandle) -> bool: ...
def synchronize(handle: AnyHandle) -> Any: ...

def broadcast_parameters(
    params: Union[Mapping[str, Any], Sequence[Any], Iterator[Tuple[str, Tensor]]],
    root_rank: int, process_set: ProcessSet = ...) -> None: ...
def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int,
                              model: Optional[Module] = None) -> None: ...
def broadcast_object(obj: Any, root_rank: int = 0, name: Optional[str] = None,
                     process_set: ProcessSet = ...) -> Any: ...
def allgather_object(obj: Any, name: Optional[str] = None) -> List[Any]: ...

class _Distributed(Optimizer):
    """Really of a subclass of the class of the optimizer that was wrapped."""
    backward_passes_per_step: int
    def synchronize(self) -> None: ...
    def skip_synchronize(self) -> AbstractContextManager[None]: ...
    def set_backward_passes_per_step(self, passes: int) -> None: ...

def DistributedOptimizer(optimizer: Optimizer,
                         named_parameters: Optional[Iterable[Tuple[str, Tensor]]] = None,
                         compression: Type[Compressor] = ..., backward_passes_per_step: int = 1,
                         op: int = ..., gradient_predivide_factor: float = 1.0,
                         num_groups: int = 0,
                         groups: Union[None, int, Sequence[Sequence[Tensor]]] = None,
                         sparse_as_dense: bool = False,
                         process_set: ProcessSet = ...) -> _Distributed: ...
