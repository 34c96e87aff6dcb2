# SPDX-License-Identifier: Apache-2.0
"""Giving all ranks the same start: parameters, optimizer state, any object."""
import collections.abc

import torch

from horovod.common.basics import rank
from horovod.common.objects import allgather_object as _allgather_object
from horovod.common.objects import broadcast_object
from horovod.common.process_sets import global_process_set
from horovod.torch.mpi_ops import broadcast_async_, synchronize

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state",
           "broadcast_parameters"]


def allgather_object(obj, name=None):
    """The objects of all ranks, as a list in the order of the ranks."""
    return _allgather_object(obj, name)


def _named_tensors(params):
    if isinstance(params, dict):
        return sorted(params.items())
    if isinstance(params, (list, tuple)) or isinstance(params, collections.abc.Iterator):
        return [item if isinstance(item, tuple) else (f"parameter.{i}", item)
                for i, item in enumerate(params)]
    raise ValueError(f"invalid params of type: {type(params)}")


def broadcast_parameters(params, root_rank, process_set=global_process_set):
    """Gives every parameter the values it has on the root rank, in place.

    params: a state_dict, model.named_parameters(), or a list of tensors. Entries that are not
    tensors are left as they are.
    """
    handles = []
    for name, tensor in _named_tensors(params):
        if not isinstance(tensor, torch.Tensor):
            continue
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise ValueError(f"parameter {name} has no shape yet; run the model once first")
        handles.append(broadcast_async_(tensor.detach(), root_rank, name, process_set))
    for handle in handles:
        synchronize(handle)


class _Blank:
    """Stands for a tensor that will be broadcast."""

    def __init__(self, tensor):
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def make(self):
        return torch.empty(self.shape, dtype=self.dtype)


def _map_tensors(value, function, path=""):
    """The same nested value with function(path, tensor) in place of tensors and blanks."""
    if isinstance(value, (torch.Tensor, _Blank)):
        return function(path, value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, function, f"{path}.{i}")
                           for i, item in enumerate(value))
    return value


def broadcast_optimizer_state(optimizer, root_rank, model=None):
    """Gives the optimizer the state and the options it has on the root rank.

    The shape of the state travels first, so ranks whose optimizer has not made a step yet need not
    make one. model is accepted for compatibility.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        # Its state holds whatever the closure made of the parameters, in no fixed shape.
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = rank() == root_rank
    state = optimizer.state_dict()
    blank = _map_tensors(state, lambda _, tensor: _Blank(tensor)) if is_root else None
    blank = broadcast_object(blank, root_rank, name="optimizer_state")
    if not is_root:
        state = _map_tensors(blank, lambda _, hole: hole.make())
    handles = []

    def send(path, tensor):
        handles.append((tensor, broadcast_async_(tensor, root_rank, f"optimizer{path}")))
        return tensor

    _map_tensors(state, send)
    for _, handle in handles:
        synchronize(handle)
    if not is_root:
        optimizer.load_state_dict(state)
