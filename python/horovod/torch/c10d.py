# SPDX-License-Identifier: Apache-2.0
"""A backend for torch.distributed on the same core.

    import horovod.torch.c10d
    torch.distributed.init_process_group("hvd")

DistributedDataParallel, FSDP2, ZeroRedundancyOptimizer and plain torch.distributed calls on CPU
tensors then use Horovod's collectives. Ranks may be started by horovodrun or mpirun: then no
address needs to be given (init_method "horovod://", which also stands in for "env://" where
MASTER_ADDR is not set). Or by torchrun or anything else torch.distributed understands: then rank 0
opens a rendezvous and tells the others through torch's own store, which should be trusted with the
job's secret just as it is with the job.

Collectives start at once and complete in the order a thread of this module sees them done, so DDP
overlaps them with the backward pass. Groups must hold all ranks; there are no point-to-point calls.
"""
import atexit
import importlib
import os
import queue
import secrets
import socket
import tempfile
import threading

import torch
import torch.distributed as dist

from horovod import _core
from horovod.common import basics
from horovod.common.objects import broadcast_object
from horovod.common.process_sets import global_process_set
from horovod.torch import mpi_ops
from horovod.torch.adapter import DTYPES, is_plain

END_S = 30.0  # longest wait for the thread below when the process ends

_create_work = dist._create_work_from_future if hasattr(dist, "_create_work_from_future") \
    else torch._C._distributed_c10d._create_work_from_future

_REDUCTIONS = [(dist.ReduceOp.SUM, _core.SUM), (dist.ReduceOp.AVG, _core.AVERAGE),
               (dist.ReduceOp.MIN, _core.MIN), (dist.ReduceOp.MAX, _core.MAX),
               (dist.ReduceOp.PRODUCT, _core.PRODUCT)]


def _reduction(options):
    for theirs, ours in _REDUCTIONS:
        if options.reduceOp == theirs:
            return ours
    raise ValueError(f"the hvd backend cannot reduce by {options.reduceOp}; "
                     "SUM, AVG, MIN, MAX and PRODUCT it can")


# --- Completion -----------------------------------------------------------------------------------


class _Completion:
    """A work in flight: the handle it ends with, and what its future is to hold then."""

    has_failed = False

    def __init__(self, handle, value, then):
        self._handle, self._value, self._then = handle, value, then
        self._error = None
        # Future.set_exception() is an error only to those who wait in Python: PyTorch's own code,
        # as DDP, would take the exception for the result. One raised by a callback is one to all.
        self._done = torch.futures.Future()
        self.work = _create_work(self._done.then(self._result))

    def _result(self, _):
        if self._error is not None:
            raise self._error
        return self._value

    def finish(self):
        """Waits for the handle, puts the results in place and tells whoever waits for the work."""
        try:
            result = self._handle.wait()
            if self._then is not None:
                with torch.no_grad():
                    self._then(result)
        except Exception as error:  # whatever it is, the waiter must get it
            self._error = error
            _Completion.has_failed = True
        self._done.set_result(None)


_wait = dist.Work.wait


def _wait_and_raise(work, *args, **kwargs):
    """Work.wait(), which does not tell of errors where the work is made of a future."""
    done = _wait(work, *args, **kwargs)
    if _Completion.has_failed:  # some work of ours, ever: this one?
        try:
            future = work.get_future()
        except RuntimeError:  # of another backend, which has none
            return done
        future.wait()
    return done


dist.Work.wait = _wait_and_raise


class _Finisher:
    """A thread that waits for handles in turn and completes their works.

    It must be gone when the interpreter ends: a thread that comes back from PyTorch's code to a
    Python that is no more takes the process down with it.
    """

    def __init__(self):
        self._queue = queue.SimpleQueue()
        self._thread = None
        self._pid = None
        atexit.register(self._end)

    def complete(self, handle, value, then=None):
        """The work that ends with handle; then(result) runs before, to put results in place."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._queue = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, name="hvd-c10d", daemon=True)
            self._thread.start()
        completion = _Completion(handle, value, then)
        self._queue.put(completion)
        return completion.work

    def _end(self):
        if self._pid == os.getpid():
            basics.shutdown()  # fails what is still in flight
            self._queue.put(None)
            self._thread.join(END_S)

    def _run(self):
        while (completion := self._queue.get()) is not None:
            completion.finish()
            del completion  # its tensors are not to live on until the next comes


_finisher = _Finisher()

# --- The backend ----------------------------------------------------------------------------------


def _base_class():
    backend = getattr(torch._C._distributed_c10d, "Backend", None)
    if backend is not None:
        try:
            type("Probe", (backend,), {})(0, 1)
            return backend
        except TypeError:  # older versions cannot construct it from Python
            pass
    return dist.ProcessGroup


def _into(op, tensor, output, reduce=_core.SUM):
    """Starts an operation whose output has known memory; None if that cannot be used as it is."""
    if not (is_plain(tensor) and is_plain(output)):
        return None
    return _core.submit(op, None, DTYPES[tensor.dtype], reduce, 0, 0, 1.0, 1.0, tensor, output,
                        None, False, None, None)


class _Named:
    """The name PyTorch gives a group, where the base class in C++ has no place for it."""

    _name = ""

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name


_base = _base_class()


class HvdBackend(*((_Named, _base) if _base is dist.ProcessGroup else (_base,))):
    """All collectives of a process group that holds every rank."""

    def __init__(self, rank, size):
        _base.__init__(self, rank, size)
        self._rank, self._size = rank, size

    def getBackendName(self):
        return "hvd"

    def name(self):
        return "hvd"

    # --- reductions ---

    def allreduce(self, tensors, opts=None):
        reduce = _reduction(opts) if opts is not None else _core.SUM
        tensor = tensors[0]
        handle = mpi_ops.allreduce_async_(tensor, op=reduce)
        return _finisher.complete(handle, tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        reduce = _reduction(opts) if opts is not None else _core.SUM
        return _finisher.complete(mpi_ops.grouped_allreduce_async_(tensors, op=reduce), tensors)

    def reduce(self, tensors, opts):
        tensor = tensors[0]
        handle = mpi_ops.allreduce_async(tensor, op=_reduction(opts))
        is_root = opts.rootRank == self._rank
        return _finisher.complete(handle, tensors, tensor.copy_ if is_root else None)

    def _reduce_scatter_base(self, output, input, opts=None):
        reduce = _reduction(opts) if opts is not None else _core.SUM
        rows = input.view(self._size, -1) if input.is_contiguous() else \
            input.reshape(self._size, -1)
        handle = _into(_core.REDUCESCATTER, rows, output.view(1, -1), reduce) \
            if output.is_contiguous() else None
        if handle is not None:
            return _finisher.complete(handle, [output])
        handle = mpi_ops.reducescatter_async(rows, op=reduce)
        return _finisher.complete(handle, [output],
                                  lambda result: output.copy_(result.view(output.shape)))

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        # Works complete in the order they were started: the last stands for all.
        for output, input in zip(outputs[:-1], inputs[:-1]):
            self._reduce_scatter_base(output, input, opts)
        return self._reduce_scatter_base(outputs[-1], inputs[-1], opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs, input_lists, opts=None):
        return self._reduce_scatter_base(outputs[0], torch.stack(list(input_lists[0])), opts)

    # --- movements ---

    def broadcast(self, tensors, opts):
        handle = mpi_ops.broadcast_async_(tensors[0], opts.rootRank)
        return _finisher.complete(handle, tensors)

    def _allgather_base(self, output, input, opts=None):
        handle = _into(_core.ALLGATHER, input.view(-1), output.view(-1)) \
            if input.is_contiguous() and output.is_contiguous() else None
        if handle is not None:
            return _finisher.complete(handle, [output])
        handle = mpi_ops.allgather_async(input.reshape(-1))
        return _finisher.complete(handle, [output],
                                  lambda result: output.copy_(result.view(output.shape)))

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        for output, input in zip(outputs[:-1], inputs[:-1]):
            self._allgather_base(output, input, opts)
        return self._allgather_base(outputs[-1], inputs[-1], opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, output_lists, inputs, opts=None):
        outputs, input = output_lists[0], inputs[0]

        def put(result):
            for output, row in zip(outputs, result.split([o.numel() for o in outputs])):
                output.copy_(row.view(output.shape))

        return _finisher.complete(mpi_ops.allgather_async(input.reshape(-1)), output_lists, put)

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        for outputs, input in zip(output_lists[:-1], inputs[:-1]):
            self.allgather([outputs], [input], opts)
        return self.allgather([output_lists[-1]], [inputs[-1]], opts)

    def gather(self, output_lists, inputs, opts):
        input = inputs[0]

        def put(result):
            if opts.rootRank == self._rank:
                for output, row in zip(output_lists[0], result.view(self._size, -1)):
                    output.copy_(row.view(output.shape))

        return _finisher.complete(mpi_ops.allgather_async(input.reshape(-1)), output_lists, put)

    def scatter(self, outputs, input_lists, opts):
        output = outputs[0]
        n_rows = [0] * self._size
        rows = output.new_empty(0)
        if opts.rootRank == self._rank:
            n_rows = [output.numel()] * self._size
            rows = torch.cat([input.reshape(-1) for input in input_lists[0]])
        handle = mpi_ops.alltoall_async(rows, n_rows)
        return _finisher.complete(handle, outputs,
                                  lambda result: output.copy_(result[0].view(output.shape)))

    def alltoall_base(self, output, input, output_splits, input_splits, opts=None):
        splits = list(input_splits) or None
        handle = mpi_ops.alltoall_async(input, splits)
        return _finisher.complete(handle, [output],
                                  lambda result: output.copy_(result[0].view(output.shape)))

    all_to_all_single = alltoall_base

    def alltoall(self, outputs, inputs, opts=None):
        handle = mpi_ops.alltoall_async(torch.cat([input.reshape(-1) for input in inputs]),
                                        [input.numel() for input in inputs])

        def put(result):
            for output, row in zip(outputs, result[0].split([o.numel() for o in outputs])):
                output.copy_(row.view(output.shape))

        return _finisher.complete(handle, outputs, put)

    def barrier(self, opts=None):
        handle = _core.submit(_core.BARRIER, None, _core.UINT8, _core.SUM, 0, 0, 1.0, 1.0, None,
                              None, None, False, None, None)
        return _finisher.complete(handle, [torch.empty(0)])


# --- Joining --------------------------------------------------------------------------------------


def _meet_through_store(store, rank, size):
    """Makes the environment hvd.init() looks for, for ranks that horovodrun has not started."""
    key = "hvd/rendezvous"
    if rank == 0:
        secret = secrets.token_bytes(32)
        addresses = {"127.0.0.1", os.environ.get("MASTER_ADDR", "127.0.0.1"), socket.gethostname()}
        server, port = _core.rendezvous_start("*", 0, secret)
        _meet_through_store.server = server  # lives as long as the process
        store.set(key, f"{','.join(sorted(addresses))} {port} {secret.hex()}")
    addresses, port, secret = store.get(key).decode().split()
    with tempfile.NamedTemporaryFile("w", delete=False) as file:  # mode 0600; read by init()
        file.write(secret)
    os.environ.update({
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size),
        "HOROVOD_RENDEZVOUS_ADDR": addresses, "HOROVOD_RENDEZVOUS_PORT": port,
        "HOROVOD_SECRET_FILE": file.name,
    })
    return file.name


def _create(store, rank, size, timeout=None):
    if not basics.is_initialized():
        secret_file = None
        if size > 1 and "HOROVOD_RENDEZVOUS_PORT" not in os.environ \
                and "HOROVOD_SECRET_FD" not in os.environ:
            secret_file = _meet_through_store(store, rank, size)
        try:
            basics.init()
        finally:
            if secret_file is not None:
                os.unlink(secret_file)
                os.environ.pop("HOROVOD_SECRET_FILE", None)
    if size != global_process_set.size() or rank != basics.rank():
        raise NotImplementedError(
            f"the hvd backend serves groups of all {global_process_set.size()} ranks; this group "
            f"has {size}. Use another backend for it: new_group(ranks, backend=\"gloo\")")
    return HvdBackend(rank, size)


def _open_store(timeout, size, is_local):
    """(the store rank 0 serves, where the others find it); on one host only loopback is bound."""
    host = "127.0.0.1" if is_local else socket.gethostname()
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, size, True, timeout, wait_for_workers=False,
                          master_listen_fd=listener.detach(), use_libuv=False)
    return store, (host, port)


def _rendezvous(url, timeout=dist.distributed_c10d.default_pg_timeout, **_):
    """(store, rank, size) for ranks that a launcher of ours, or mpirun, has started: they know each
    other already, but torch wants a store all the same."""
    basics.init()
    rank, size = basics.rank(), basics.size()
    store, place = None, None
    if rank == 0:
        store, place = _open_store(timeout, size, basics.local_size() == size)
    host, port = broadcast_object(place)
    if store is None:
        store = dist.TCPStore(host, port, size, False, timeout, wait_for_workers=False,
                              use_libuv=False)
    yield store, rank, size
    raise RuntimeError("horovod:// cannot meet a second time; start the job anew")


def _stand_in_for_env():
    """init_process_group("hvd") means env://, which fails without MASTER_ADDR: then it is ours."""
    # Not dist.rendezvous: that is a function of the same name.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", {})
    env = handlers.get("env")
    if env is not None:
        handlers["env"] = lambda url, **options: \
            (env if "MASTER_ADDR" in os.environ else _rendezvous)(url, **options)


dist.register_rendezvous_handler("horovod", _rendezvous)
_stand_in_for_env()
dist.Backend.register_backend("hvd", _create, devices=["cpu"])
