# SPDX-License-Identifier: Apache-2.0
"""The collectives on PyTorch tensors: asynchronous, in place, grouped.

Every operation becomes one _core.submit(), which returns a handle; synchronize(handle) waits and
gives the result. The blocking forms with gradients are in autograd_ops.py; this module exports
both, as scripts import them from here.
"""
import torch

from horovod import _core
from horovod.common import basics
from horovod.common.basics import *  # noqa: F401,F403 - exported
from horovod.common.basics import Adasum, Average, Sum
from horovod.common.exceptions import HorovodInternalError  # noqa: F401 - exported
from horovod.common.process_sets import *  # noqa: F401,F403 - exported
from horovod.common.process_sets import global_process_set
from horovod.common.util import (  # noqa: F401 - exported, some of them
    check_adasum, check_extension, check_installed_version, check_op,
    get_average_backwards_compatibility_fun, gpu_available, handle_average_backwards_compatibility,
    num_rank_is_power_2)
from horovod.torch.adapter import (  # noqa: F401 - from_memory is exported
    DTYPES, check_tensor, from_handle, from_memory, from_wire, is_plain, is_usable, to_wire, where,
    write_back)

_submit = _core.submit
_Handle = _core.Handle
_basics = basics.HorovodBasics()
_handle_map = {}  # always empty: handles hold what they need

# --- Handles --------------------------------------------------------------------------------------


class JointHandle:
    """Several operations as one; assemble(results) makes the result."""

    def __init__(self, handles, assemble):
        self._handles = handles
        self._assemble = assemble

    def wait(self):
        return self._assemble(_core.wait_all(self._handles))

    def poll(self):
        return all(handle.poll() for handle in self._handles)


def poll(handle):
    """True when synchronize(handle) will not block."""
    return handle.poll() if hasattr(handle, "poll") else True


def synchronize(handle):
    """Waits for an asynchronous operation and returns its result."""
    if type(handle) is _Handle or hasattr(handle, "wait"):
        return handle.wait()
    return handle() if callable(handle) else None


# --- Operations whose result is shaped like the input: allreduce, broadcast -----------------------


def _same_shape(op, name, tensor, output, reduce, root, process_set, pre=1.0, post=1.0,
                waits=False):
    """One tensor, into the output or a new one. reduce is None when bytes are only moved."""
    check_tensor(tensor)
    output = _like(tensor) if output is None else output
    code = DTYPES.get(tensor.dtype)
    if (code is not None and tensor.layout is torch.strided and tensor.is_cpu
            and tensor.is_contiguous() and (output is tensor or is_plain(output))):
        return _submit(op=op, name=name, dtype=code, reduce=reduce, root=root,
                       process_set=process_set, prescale=pre, postscale=post, inputs=tensor,
                       outputs=output, waits=waits, result=output)
    if is_usable(tensor) and (output is tensor or is_usable(output)):
        return _submit(op=op, name=name, dtype=code, reduce=reduce, root=root,
                       process_set=process_set, prescale=pre, postscale=post, inputs=tensor,
                       outputs=output, waits=waits, result=output, **where(tensor))
    wire, into = _wires(tensor, output, reduce)
    return _submit(op=op, name=name, dtype=DTYPES[wire.dtype], reduce=reduce, root=root,
                   process_set=process_set, prescale=pre, postscale=post, inputs=wire,
                   outputs=into, waits=waits, finish=lambda _: write_back(into, output),
                   **where(wire))


def _wires(tensor, output, reduce):
    wire = to_wire(tensor, reduce)
    shares = wire.data_ptr() == tensor.data_ptr() and output is not tensor
    return wire, torch.empty_like(wire) if shares else wire


def _same_shape_group(op, name, tensors, outputs, reduce, process_set, pre, post):
    """A group: one submission for each dtype, which nearly always is one."""
    parts = {}
    for i, (tensor, output) in enumerate(zip(tensors, outputs)):
        if is_usable(tensor) and (output is tensor or is_usable(output)):
            wire, into = tensor, output
        else:
            wire, into = _wires(tensor, output, reduce)
        parts.setdefault(wire.dtype, []).append((i, wire, into))
    handles = []
    for dtype, part in parts.items():
        suffix = "" if len(parts) == 1 else f".{dtype}"
        _, wires, intos = zip(*part)
        handles.append(_submit(op=op, name=None if name is None else name + suffix,
                               dtype=DTYPES[dtype], reduce=reduce, process_set=process_set,
                               prescale=pre, postscale=post, inputs=wires, outputs=intos,
                               **where(wires[0])))
    outputs = tuple(outputs)

    def assemble(_):
        for part in parts.values():
            for i, _wire, into in part:
                if into is not outputs[i]:
                    write_back(into, outputs[i])
        return outputs

    return JointHandle(handles, assemble)


def _check_group(tensors):
    tensors = list(tensors)
    for tensor in tensors:
        check_tensor(tensor)
    if len({tensor.device for tensor in tensors}) > 1:
        raise RuntimeError("the tensors of a group are on different devices; move them to one")
    return tensors


def _like(tensor):
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def _reduction(op, average, process_set):
    op = handle_average_backwards_compatibility(op, average)
    if op == Adasum:
        check_adasum(op, process_set, basics.size())
    return op


def _named(kind, name):
    return None if name is None else f"{kind}.{name}"


# One tensor in place is what scripts call most: C does it, and comes back here for the rest.


def _allreduce_slowly(tensor, name, reduce, process_set, prescale, postscale, waits=False):
    return _same_shape(_core.ALLREDUCE, _named("allreduce", name), tensor, tensor,
                       _reduction(reduce, None, process_set), 0, process_set, prescale, postscale,
                       waits)


def _broadcast_slowly(tensor, name, root, process_set, waits=False):
    return _same_shape(_core.BROADCAST, _named("broadcast", name), tensor, tensor, None, root,
                       process_set, waits=waits)


_start_allreduce = _core.InPlace(op=_core.ALLREDUCE, reduce=_core.AVERAGE, prefix="allreduce.",
                                 dtypes=DTYPES, strided=torch.strided,
                                 slow=_allreduce_slowly).start
_start_broadcast = _core.InPlace(op=_core.BROADCAST, reduce=_core.SUM, prefix="broadcast.",
                                 dtypes=DTYPES, strided=torch.strided,
                                 slow=_broadcast_slowly).start


def allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0,
                    postscale_factor=1.0, process_set=global_process_set):
    """Starts an allreduce into a new tensor; returns a handle."""
    op = _reduction(op, average, process_set)
    return _same_shape(_core.ALLREDUCE, _named("allreduce", name), tensor, None, op, 0,
                       process_set, prescale_factor, postscale_factor)


def allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0,
                     postscale_factor=1.0, process_set=global_process_set):
    """Starts an allreduce in place; returns a handle."""
    if average is not None:
        op = _reduction(op, average, process_set)
    return _start_allreduce(tensor, name=name, reduce=op, process_set=process_set,
                            prescale=prescale_factor, postscale=postscale_factor)


def allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0,
               postscale_factor=1.0, process_set=global_process_set):
    """Reduces the tensor over all members, in place."""
    if _is_compiling():
        op = _reduction(op, average, process_set)
        torch.ops.horovod.allreduce_(tensor, name, op, prescale_factor, postscale_factor,
                                     process_set.process_set_id)
        return tensor
    if average is not None:
        op = _reduction(op, average, process_set)
    return _start_allreduce(tensor, name=name, reduce=op, process_set=process_set,
                            prescale=prescale_factor, postscale=postscale_factor,
                            waits=True).wait()


def grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0,
                            postscale_factor=1.0, process_set=global_process_set):
    """Starts allreduces that run all or nothing, into new tensors; returns one handle."""
    op = _reduction(op, average, process_set)
    tensors = _check_group(tensors)
    return _same_shape_group(_core.ALLREDUCE, _named("grouped_allreduce", name), tensors,
                             [_like(tensor) for tensor in tensors], op, process_set,
                             prescale_factor, postscale_factor)


def grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0,
                             postscale_factor=1.0, process_set=global_process_set):
    """Starts allreduces that run all or nothing, in place; returns one handle."""
    op = _reduction(op, average, process_set)
    tensors = _check_group(tensors)
    return _same_shape_group(_core.ALLREDUCE, _named("grouped_allreduce", name), tensors, tensors,
                             op, process_set, prescale_factor, postscale_factor)


def grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0,
                       postscale_factor=1.0, process_set=global_process_set):
    """Reduces all tensors over all members, in place."""
    if _is_compiling():
        op = _reduction(op, average, process_set)
        torch.ops.horovod.grouped_allreduce_(list(tensors), name, op, prescale_factor,
                                             postscale_factor, process_set.process_set_id)
        return tuple(tensors)
    return grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor,
                                    process_set).wait()


def sparse_allreduce_async(tensor, name, op, process_set=global_process_set):
    """Starts the sum or average of a sparse tensor; returns a function that gives the result.

    Indices and values of all members are gathered; duplicates are left uncoalesced.
    """
    if op not in (Average, Sum):
        raise ValueError("sparse tensors can be averaged and summed only")
    tensor = tensor.coalesce() if not tensor.is_coalesced() else tensor
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def wait():
        all_values = values.wait()
        all_indices = indices.wait()
        if op == Average:
            all_values = all_values / process_set.size()
        if all_indices.numel() == 0:
            return torch.sparse_coo_tensor(tensor.shape, dtype=tensor.dtype, device=tensor.device,
                                           check_invariants=False)
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape,
                                       check_invariants=False)

    return wait


def broadcast_async(tensor, root_rank, name=None, process_set=global_process_set):
    """Starts a broadcast into a new tensor; returns a handle."""
    return _same_shape(_core.BROADCAST, _named("broadcast", name), tensor, None, None,
                       root_rank, process_set)


def broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set):
    """Starts a broadcast in place; returns a handle."""
    return _start_broadcast(tensor, name=name, root=root_rank, process_set=process_set)


def broadcast_(tensor, root_rank, name=None, process_set=global_process_set):
    """Gives the tensor the values it has on the root rank, a global rank; in place."""
    if _is_compiling():
        torch.ops.horovod.broadcast_(tensor, root_rank, name, process_set.process_set_id)
        return tensor
    return _start_broadcast(tensor, name=name, root=root_rank, process_set=process_set,
                            waits=True).wait()


# --- Operations whose result only the agreement knows: allgather, alltoall, reducescatter ---------


def _other_shape(op, name, tensors, reduce, process_set, pre=1.0, post=1.0, splits=None,
                 finish=None, waits=False):
    """One tensor, or a list of one dtype; finish(handle, outputs) makes the result."""
    many = isinstance(tensors, (list, tuple))
    originals = list(tensors) if many else [tensors]
    if reduce is not None:
        check_op(reduce)
    wires = [tensor if is_usable(tensor) else to_wire(tensor, reduce) for tensor in originals]
    dtype, device = wires[0].dtype, wires[0].device

    def collect(handle):
        outputs = [from_wire(from_handle(handle, i, dtype, device), original)
                   for i, original in enumerate(originals)]
        return finish(handle, outputs) if finish is not None else outputs[0]

    return _submit(op=op, name=name, dtype=DTYPES[dtype], reduce=reduce, process_set=process_set,
                   prescale=pre, postscale=post, inputs=tuple(wires) if many else wires[0],
                   splits=splits, waits=waits, finish=collect, **where(wires[0]))


def _other_shape_group(op, kind, name, tensors, reduce, process_set, as_result, pre=1.0, post=1.0):
    tensors = _check_group(tensors)
    parts = {}
    for i, tensor in enumerate(tensors):
        parts.setdefault(tensor.dtype, []).append(i)
    handles = []
    for dtype, places in parts.items():
        suffix = "" if len(parts) == 1 else f".{dtype}"
        handles.append(_other_shape(op, None if name is None else f"{kind}.{name}{suffix}",
                                    [tensors[i] for i in places], reduce, process_set, pre, post,
                                    finish=lambda _, outputs: outputs))

    def assemble(results):
        outputs = [None] * len(tensors)
        for places, values in zip(parts.values(), results):
            for i, value in zip(places, values):
                outputs[i] = value
        return as_result(outputs)

    return JointHandle(handles, assemble)


def allgather_async(tensor, name=None, process_set=global_process_set):
    """Starts an allgather; returns a handle."""
    check_tensor(tensor)
    return _other_shape(_core.ALLGATHER, _named("allgather", name), tensor, None, process_set)


def grouped_allgather_async(tensors, name=None, process_set=global_process_set):
    """Starts allgathers that run all or nothing; returns one handle."""
    return _other_shape_group(_core.ALLGATHER, "grouped_allgather", name, tensors, None,
                              process_set, tuple)


def _as_splits(splits):
    """How many rows go to whom: None, or a tensor whose device the received splits will be on."""
    if splits is None:
        return None
    if not isinstance(splits, torch.Tensor):
        splits = torch.tensor(splits, dtype=torch.int32)
    if splits.dim() != 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    if splits.dtype != torch.int32:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    return splits


def alltoall_async(tensor, splits=None, name=None, process_set=global_process_set):
    """Starts an alltoall; the handle gives (output, received_splits)."""
    check_tensor(tensor)
    splits = _as_splits(splits)
    rows, device = (splits.tolist(), splits.device) if splits is not None else (None, None)

    def finish(handle, outputs):
        received = torch.tensor(handle.received_splits, dtype=torch.int32, device=device)
        return outputs[0], received

    return _other_shape(_core.ALLTOALL, _named("alltoall", name), tensor, None, process_set,
                        splits=rows, finish=finish)


def reducescatter_async(tensor, name=None, op=Average, process_set=global_process_set,
                        prescale_factor=1.0, postscale_factor=1.0):
    """Starts a reducescatter; returns a handle."""
    check_tensor(tensor)
    return _other_shape(_core.REDUCESCATTER, _named("reducescatter", name), tensor, op, process_set,
                        prescale_factor, postscale_factor)


def grouped_reducescatter_async(tensors, name=None, op=Average, process_set=global_process_set,
                                prescale_factor=1.0, postscale_factor=1.0):
    """Starts reducescatters that run all or nothing; returns one handle."""
    return _other_shape_group(_core.REDUCESCATTER, "grouped_reducescatter", name, tensors, op,
                              process_set, list, prescale_factor, postscale_factor)


# --- Operations without tensors -------------------------------------------------------------------

_era = 0


@basics.on_init
def _begin_era():
    global _era
    _era += 1


def era():
    """A number that changes when all ranks meet: at init() and at the end of join().

    What ranks have agreed on since is known to all; what they agreed on before may be unknown to
    ranks that are new, or had joined.
    """
    return _era


def join(device=-1):
    """Takes part in the others' allreduces with zeros until every rank has joined.

    Returns the rank that joined last. device is accepted for compatibility.
    """
    last = _submit(op=_core.JOIN, waits=True, finish=lambda handle: handle.last_joined).wait()
    _begin_era()
    return last


def barrier(process_set=global_process_set):
    """Returns when all members have called it."""
    if _is_compiling():
        torch.ops.horovod.barrier(process_set.process_set_id)
        return
    _submit(op=_core.BARRIER, process_set=process_set, waits=True).wait()


def _check_has_gpu():
    return torch.cuda.is_available()


_is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)

from horovod.torch.autograd_ops import (  # noqa: E402,F401 - exported; it imports from above
    HorovodAllgather, HorovodAllreduce, HorovodAlltoall, HorovodBroadcast, HorovodGroupedAllgather,
    HorovodGroupedAllreduce, HorovodGroupedReducescatter, HorovodReducescatter, allgather,
    allreduce, alltoall, broadcast, grouped_allgather, grouped_allreduce, grouped_reducescatter,
    reducescatter)
