# SPDX-License-Identifier: Apache-2.0
"""A backend for torch.distributed on the same core.

    import horovod.torch.c10d
    torch.distributed.init_process_group("hvd")

DistributedDataParallel, FSDP2, ZeroRedundancyOptimizer and plain torch.distributed calls on tensors
of the CPU and of CUDA then use Horovod's collectives. Ranks may be started by horovodrun or mpirun:
then no address needs to be given (init_method "horovod://", which also stands in for "env://" where
MASTER_ADDR is not set). Or by torchrun or anything else torch.distributed understands: then rank 0
opens a rendezvous and tells the others through torch's own store, which should be trusted with the
job's secret just as it is with the job.

Collectives start at once and complete in the order a thread of this module sees them done, so DDP
overlaps them with the backward pass. On a GPU they complete when they are queued there: wait()
orders the current stream behind them, and is_completed() tells when the device is done. A group of
some of the ranks is a job of its own beside that of hvd.init(). There are no point-to-point calls.
"""
import atexit
import contextlib
import datetime
import importlib
import os
import queue
import socket
import threading
import time

import torch
import torch.distributed as dist

from horovod import _core
from horovod.common import basics, communicators
from horovod.common.objects import broadcast_object
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch import mpi_ops
from horovod.torch.adapter import DTYPES, is_usable, where

END_S = 30.0  # longest wait for the thread below when the process ends
LOOK_EVERY_S = 0.0005  # at a work that is waited for with a timeout
_FOREVER = datetime.timedelta(0)  # what torch.distributed means by it

_create_work = dist._create_work_from_future if hasattr(dist, "_create_work_from_future") \
    else torch._C._distributed_c10d._create_work_from_future

_REDUCTIONS = [(dist.ReduceOp.SUM, _core.SUM), (dist.ReduceOp.AVG, _core.AVERAGE),
               (dist.ReduceOp.MIN, _core.MIN), (dist.ReduceOp.MAX, _core.MAX),
               (dist.ReduceOp.PRODUCT, _core.PRODUCT)]


def _reduction(options):
    for theirs, ours in _REDUCTIONS:
        if options.reduceOp == theirs:
            return ours
    theirs = getattr(options.reduceOp, "op", options.reduceOp)
    raise ValueError(f"the hvd backend does not support {theirs}; "
                     "use SUM, AVG, MIN, MAX or PRODUCT")


# --- Completion -----------------------------------------------------------------------------------


_streams = {}  # device -> the stream in which results are put in place there


@contextlib.contextmanager
def _at_work_on(device):
    """Makes our stream of this device the current one; does nothing for the host."""
    if device is None:
        yield None
        return
    with torch.cuda.device(device):
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.stream(_streams[device]):
            yield _streams[device]


def _cuda_tensors(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.is_cuda else []
    return [tensor for item in value for tensor in _cuda_tensors(item)] \
        if isinstance(value, (list, tuple)) else []


class _Work(dist.Work):
    """A collective in flight: the handle it ends with, and what its future is to hold then.

    PyTorch's own code, as DDP, comes through wait() and get_future().
    """

    def __init__(self, handle, value, then):
        super().__init__()
        self._handle, self._value, self._then = handle, value, then
        self._error = self._landed = None
        there = _cuda_tensors(value)
        self._device = there[0].device if there else None
        # Future.set_exception() is an error only to those who wait in Python: PyTorch's own code,
        # as DDP, would take the exception for the result. One raised by a callback is one to all.
        self._done = torch.futures.Future(devices=[self._device] if there else None)
        self._future = self._done.then(self._result)

    def _result(self, _):
        if self._error is not None:
            raise self._error
        return self._value

    def finish(self):
        """Waits for the handle, puts the results in place and tells whoever waits for the work."""
        with _at_work_on(self._device) as stream:
            try:
                result = self._handle.wait()
                if self._then is not None:
                    with torch.no_grad():
                        self._then(result)
                self._keep(stream, result)
            except Exception as error:  # whatever it is, the waiter must get it
                self._error = error
            self._handle = self._then = None
            # The value tells the future on which devices it is to record where the stream stands.
            self._done.set_result(self._value if self._error is None else None)

    def _keep(self, stream, result):
        """Nobody gets the memory of these tensors while our stream is at work on it."""
        if stream is not None:
            for tensor in _cuda_tensors([self._value, result]):
                tensor.record_stream(stream)
            self._landed = stream.record_event()

    def wait(self, timeout=_FOREVER):
        return _wait_for(self._future, timeout)

    def get_future(self):
        return self._future

    def is_completed(self):
        return self._future.done() and (self._landed is None or self._landed.query())


def _wait_for(future, timeout):
    if timeout > _FOREVER:
        deadline = time.monotonic() + timeout.total_seconds()
        while not future.done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the collective is not done after {timeout.total_seconds()} s; "
                                   "look for ranks that have not started it")
            time.sleep(LOOK_EVERY_S)
    future.wait()
    return True


class _PatchedWorks:
    """dist.Work, in versions of PyTorch that lose what a work of Python's class says of itself.

    They get works made of futures, which know neither whether they are done, nor how to wait for a
    while only, nor of errors. So while there are groups of ours, these two methods ask the future,
    of works that have one.
    """

    def __init__(self):
        self._n_groups = 0
        self._wait, self._is_completed = dist.Work.wait, dist.Work.is_completed

    def add_group(self):
        self._n_groups += 1
        before = self

        def wait(work, timeout=_FOREVER):
            future = _future_of(work)
            return before._wait(work, timeout) if future is None else _wait_for(future, timeout)

        def is_completed(work):
            future = _future_of(work)
            return before._is_completed(work) if future is None else future.done()

        dist.Work.wait, dist.Work.is_completed = wait, is_completed

    def remove_group(self):
        self._n_groups -= 1
        if self._n_groups == 0:
            dist.Work.wait, dist.Work.is_completed = self._wait, self._is_completed


def _future_of(work):
    try:
        return work.get_future()
    except RuntimeError:  # a work of another backend
        return None


# Versions that can box a work keep its Python part alive as long as anybody has the work.
_patched_works = None if hasattr(dist.Work, "boxed") else _PatchedWorks()


class _Finisher:
    """A thread that waits for handles in turn and completes their works.

    What users have put behind a work runs on it too, and may wait for works it starts there: then
    another thread takes over.

    It must be gone when the interpreter ends: a thread that comes back from PyTorch's code to a
    Python that is no more takes the process down with it.
    """

    def __init__(self):
        self._queue = queue.SimpleQueue()
        self._thread = None
        self._pid = None
        self.newest = None  # work
        atexit.register(self._end)

    def complete(self, handle, value, then=None):
        """The work that ends with handle; then(result) runs before, to put results in place."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._queue = queue.SimpleQueue()
            self._start()
        elif threading.current_thread() is self._thread:
            self._start(self._thread)
        work = _Work(handle, value, then)
        self._queue.put(work)
        self.newest = work if _patched_works is None else _create_work(work.get_future())
        return self.newest

    def _start(self, before=None):
        self._thread = threading.Thread(target=self._run, args=(before,), name="hvd-c10d",
                                        daemon=True)
        self._thread.start()

    def _end(self):
        if self._pid == os.getpid():
            basics.shutdown()  # fails what is still in flight
            self._queue.put(None)
            self._thread.join(END_S)

    def _run(self, before):
        me = threading.current_thread()
        _core.count_with_main_thread()  # as callbacks that run where they were put behind a work
        while self._thread is me and (work := self._queue.get()) is not None:
            work.finish()
            del work  # its tensors are not to live on until the next comes
        if before is not None:
            before.join(END_S)


_finisher = _Finisher()

# --- The backend ----------------------------------------------------------------------------------


def _into(op, tensor, output, process_set, reduce=_core.SUM):
    """Starts an operation whose output has known memory; None if that cannot be used as it is."""
    if not (is_usable(tensor) and is_usable(output) and tensor.device == output.device):
        return None
    return _core.submit(op=op, dtype=DTYPES[tensor.dtype], reduce=reduce, process_set=process_set,
                        inputs=tensor, outputs=output, **where(tensor))


class _Collectives:
    """All collectives of a process group, on a process set that counts its ranks as the group."""

    _name = ""  # that PyTorch gives the group, where the base class in C++ has no place for it

    def __init__(self, rank, size, process_set):
        super().__init__(rank, size)
        self._rank, self._size, self._set = rank, size, process_set
        if _patched_works is not None:
            _patched_works.add_group()

    @property
    def _ordered_set(self):
        """The process set, for an operation. A group has one order, whichever threads keep it."""
        _core.count_with_main_thread()
        return self._set

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name

    def shutdown(self):
        """What destroy_process_group() calls; the job of hvd.init() goes on."""
        if _patched_works is not None:
            _patched_works.remove_group()
        if self._set is not global_process_set:
            _core.close(self._set.process_set_id)

    def getBackendName(self):
        return "hvd"

    def name(self):
        return "hvd"

    # --- reductions ---

    def allreduce(self, tensors, opts=None):
        reduce = _reduction(opts) if opts is not None else _core.SUM
        tensor = tensors[0]
        handle = mpi_ops.allreduce_async_(tensor, op=reduce, process_set=self._ordered_set)
        return _finisher.complete(handle, tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        reduce = _reduction(opts) if opts is not None else _core.SUM
        handle = mpi_ops.grouped_allreduce_async_(tensors, op=reduce, process_set=self._ordered_set)
        return _finisher.complete(handle, tensors)

    def reduce(self, tensors, opts):
        tensor = tensors[0]
        handle = mpi_ops.allreduce_async(tensor, op=_reduction(opts), process_set=self._ordered_set)
        is_root = opts.rootRank == self._rank
        return _finisher.complete(handle, tensors, tensor.copy_ if is_root else None)

    def _reduce_scatter_base(self, output, input, opts=None):
        reduce = _reduction(opts) if opts is not None else _core.SUM
        rows = input.view(self._size, -1) if input.is_contiguous() else \
            input.reshape(self._size, -1)
        handle = _into(_core.REDUCESCATTER, rows, output.view(1, -1), self._ordered_set, reduce) \
            if output.is_contiguous() else None
        if handle is not None:
            return _finisher.complete(handle, [output])
        handle = mpi_ops.reducescatter_async(rows, op=reduce, process_set=self._ordered_set)
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
        handle = mpi_ops.broadcast_async_(tensors[0], opts.rootRank, process_set=self._ordered_set)
        return _finisher.complete(handle, tensors)

    def _gather(self, input):
        return mpi_ops.allgather_async(input.reshape(-1), process_set=self._ordered_set)

    def _allgather_base(self, output, input, opts=None):
        handle = _into(_core.ALLGATHER, input.view(-1), output.view(-1), self._ordered_set) \
            if input.is_contiguous() and output.is_contiguous() else None
        if handle is not None:
            return _finisher.complete(handle, [output])
        handle = self._gather(input)
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

        return _finisher.complete(self._gather(input), output_lists, put)

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

        return _finisher.complete(self._gather(input), output_lists, put)

    def scatter(self, outputs, input_lists, opts):
        output = outputs[0]
        n_rows = [0] * self._size
        rows = output.new_empty(0)
        if opts.rootRank == self._rank:
            n_rows = [output.numel()] * self._size
            rows = torch.cat([input.reshape(-1) for input in input_lists[0]])
        handle = mpi_ops.alltoall_async(rows, n_rows, process_set=self._ordered_set)
        return _finisher.complete(handle, outputs,
                                  lambda result: output.copy_(result[0].view(output.shape)))

    def alltoall_base(self, output, input, output_splits, input_splits, opts=None):
        splits = list(input_splits) or None
        handle = mpi_ops.alltoall_async(input, splits, process_set=self._ordered_set)
        return _finisher.complete(handle, [output],
                                  lambda result: output.copy_(result[0].view(output.shape)))

    all_to_all_single = alltoall_base

    def alltoall(self, outputs, inputs, opts=None):
        handle = mpi_ops.alltoall_async(torch.cat([input.reshape(-1) for input in inputs]),
                                        [input.numel() for input in inputs],
                                        process_set=self._ordered_set)

        def put(result):
            for output, row in zip(outputs, result[0].split([o.numel() for o in outputs])):
                output.copy_(row.view(output.shape))

        return _finisher.complete(handle, outputs, put)

    def barrier(self, opts=None):
        def settle(_):
            """What was waited for before is over on the device, too."""
            for stream in _streams.values():
                stream.synchronize()

        handle = _core.submit(op=_core.BARRIER, process_set=self._ordered_set)
        return _finisher.complete(handle, [torch.empty(0, device="cpu")], settle)

    # --- several as one: works complete in the order they were started, so the last stands for all

    def _start_coalescing(self, device=None):
        _finisher.newest = None

    def _end_coalescing(self, device=None):
        return _finisher.newest


class HvdBackend(_Collectives, dist.ProcessGroup):
    """The whole group rather than a backend behind it: so its works reach Python as they are."""


class _BesideOthers(_Collectives, getattr(torch._C._distributed_c10d, "Backend", object)):
    """One of several backends of a group, as of "cpu:hvd,cuda:nccl".

    Its works come out of PyTorch as plain ones, whose is_completed() cannot tell.
    """


# --- Joining --------------------------------------------------------------------------------------

# What the environment says of the launcher's job, and may say of nobody else's.
_OF_ANOTHER_JOB = ("HOROVOD_TIMELINE", "HOROVOD_BLAME_FILE", "HOROVOD_CPU_OPERATIONS",
                   "HOROVOD_CONTROLLER", *communicators.JOB_VARIABLES)


def _job_of(store, rank, size):
    """The variables with which ranks that share a store of torch's find each other."""
    def hand_over(ticket):
        if ticket is not None:
            store.set("hvd/rendezvous", ticket)
        return store.get("hvd/rendezvous").decode()

    return communicators.hosted_job(rank, size, hand_over)


def _join_world(store, rank, size):
    """hvd.init(), if nobody has called it, for ranks of a launcher or of torch's."""
    launched = "HOROVOD_RENDEZVOUS_PORT" in os.environ or "HOROVOD_SECRET_FD" in os.environ
    if basics.is_initialized() or size == 1 or launched:
        basics.init()
    else:
        with _job_of(store, rank, size) as variables:
            os.environ.update(variables)
            try:
                basics.init()
            finally:
                del os.environ["HOROVOD_SECRET_FILE"]
    if (rank, size) != (basics.rank(), basics.size()):
        raise ValueError(f"rank {rank} of {size} is rank {basics.rank()} of {basics.size()} of the "
                         "job Horovod was initialized in")
    return global_process_set


def _join_group(store, rank, size):
    """A job of the group's ranks alone: the others do not take part in making it."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_JOB}
    with _job_of(store, rank, size) as variables:
        kept.update(variables)
        group = ProcessSet(range(size))
        group.process_set_id = _core.open(tuple(f"{name}={value}" for name, value in kept.items()))
    return group


def _create(options, _):
    """What torch.distributed calls on the members of a new group."""
    store, rank, size = options.store, options.group_rank, options.group_size
    ranks = list(options.global_ranks_in_group)  # empty for the first group
    is_world = not basics.is_initialized() or not ranks or ranks == list(range(basics.size()))
    join = _join_world if is_world else _join_group
    others = getattr(options, "process_group", None)  # unknown to versions that take one backend
    make = HvdBackend if others is None or others.name() == "custom" else _BesideOthers
    return make(rank, size, join(store, rank, size))


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
    raise RuntimeError("horovod:// cannot be used a second time; start the job again")


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
dist.Backend.register_backend("hvd", _create, extended_api=True, devices=["cpu", "cuda"])
