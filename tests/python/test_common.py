# SPDX-License-Identifier: Apache-2.0
"""horovod.common and the extension, without any framework: 1, 2 and 3 ranks."""
import array
import itertools
import os
import pickle
import re
import sys
import threading
import time

import pytest

from horovod import _core
from horovod.common import basics, elastic, objects, util
from horovod.common.compression import NoneCompressor, make_compression
from horovod.common.exceptions import (HorovodInternalError, HostsUpdatedInterrupt,
                                       NotInitializedError)
from horovod.common.memory_file import memory_file
from horovod.common.process_sets import (ProcessSet, add_process_set, global_process_set,
                                         remove_process_set)
from ranks import RankFailed, run_ranks

THIS = "test_common"


def submit(op, name, data, output, finish=None, reduce=_core.SUM, root=0, set_id=0, scale=1.0,
           splits=None, dtype=_core.FLOAT32):
    return _core.submit(op=op, name=name, dtype=dtype, reduce=reduce, root=root,
                        process_set=set_id, prescale=scale, inputs=data, outputs=output,
                        splits=splits, result=output, finish=finish)


def floats(*values):
    return array.array("f", values)


# --- On every rank --------------------------------------------------------------------------------


def basics_on_a_rank():
    with pytest.raises(NotInitializedError, match="use hvd.init()"):
        basics.rank()
    with pytest.raises(ValueError):
        basics.size()
    basics.init()
    basics.init()  # does nothing
    assert basics.is_initialized() and basics.is_homogeneous()
    assert basics.size() == int(os.environ["HOROVOD_SIZE"])
    assert basics.local_size() * basics.cross_size() == basics.size()
    assert global_process_set.ranks == list(range(basics.size()))
    assert global_process_set.included() and global_process_set.rank() == basics.rank()
    assert basics.gloo_built() and not basics.mpi_enabled() and basics.nccl_built() == 0
    with pytest.raises(ValueError, match="MPI is not enabled"):
        basics.mpi_threads_supported()
    with pytest.raises(ValueError, match="HOROVOD_TIMELINE=DYNAMIC"):
        basics.start_timeline("timeline.json")
    rank = basics.rank()
    basics.shutdown()
    assert not basics.is_initialized()
    return rank


def operations_on_a_rank():
    basics.init()
    rank, size = basics.rank(), basics.size()
    data = floats(rank, 1)
    submit(_core.ALLREDUCE, "sum", data, data).wait()
    assert list(data) == [sum(range(size)), size]
    separate = floats(0, 0)
    submit(_core.ALLREDUCE, "mean", floats(rank, 1), separate, reduce=_core.AVERAGE).wait()
    assert list(separate) == [sum(range(size)) / size, 1]
    submit(_core.ALLREDUCE, "scaled", floats(1, 1), separate, scale=0.5).wait()
    assert list(separate) == [size / 2, size / 2]

    group = (floats(1), floats(2, 3))
    assert submit(_core.ALLREDUCE, "group", group, group).wait() is group
    assert [list(part) for part in group] == [[size], [2 * size, 3 * size]]

    def gathered(handle):
        memory, shape = handle.memory(0)
        assert shape == (sum(range(1, size + 1)),)
        return list(memoryview(memory).cast("B").cast("f"))

    mine = floats(*[rank] * (rank + 1))
    handle = submit(_core.ALLGATHER, "gather", mine, None, gathered)
    expected = [float(r) for r in range(size) for _ in range(r + 1)]
    assert handle.wait() == expected and handle.wait() == expected and handle.poll()
    handle = submit(_core.ALLTOALL, "all to all", floats(*range(size)), None,
                    lambda done: (done.received_splits, list(memoryview(done.memory(0)[0])
                                                             .cast("B").cast("f"))),
                    splits=[1] * size)
    assert handle.wait() == ((1,) * size, [float(rank)] * size)
    results = _core.wait_all([submit(_core.ALLREDUCE, f"many {i}", floats(i), floats(0))
                              for i in range(100)])
    assert [list(result) for result in results] == [[i * size] for i in range(100)]
    handle = _core.submit(op=_core.JOIN, waits=True, finish=lambda done: done.last_joined)
    assert 0 <= handle.wait() < size
    return "operations_on_a_rank" not in handle.where and __file__ in handle.where


def dropped_handles_on_a_rank():
    basics.init()
    size = basics.size()
    for i in range(200):
        submit(_core.ALLREDUCE, f"dropped {i}", floats(*range(64)), floats(*range(64)))
        submit(_core.ALLGATHER, f"dropped gather {i}", floats(*range(64)), None, lambda done: None)
    data = floats(1)
    submit(_core.ALLREDUCE, "kept", data, data).wait()
    assert list(data) == [size]
    pending = submit(_core.ALLREDUCE, f"alone {basics.rank()}", floats(1), floats(1))
    if size > 1:
        with pytest.raises((TimeoutError, HorovodInternalError)):  # the other may shut down first
            pending.wait(0.05)
    basics.shutdown()
    if size > 1:
        with pytest.raises(HorovodInternalError, match="Horovod has been shut down."):
            pending.wait()
    assert pending.poll()
    basics.init()
    submit(_core.ALLREDUCE, "again", data, data).wait()
    return list(data) == [size * size]


def errors_on_a_rank():
    basics.init()
    rank, size = basics.rank(), basics.size()
    with pytest.raises(ValueError, match="invalid root rank 17"):
        submit(_core.BROADCAST, "root", floats(1), floats(1), root=17)
    with pytest.raises(ValueError, match="does not exist, or has not been registered"):
        submit(_core.ALLREDUCE, "set", floats(1), floats(1), set_id=5)
    with pytest.raises(HorovodInternalError, match="only supports AVERAGE and SUM"):
        submit(_core.REDUCESCATTER, "min", floats(1), None, reduce=_core.MIN)
    with pytest.raises(BufferError):
        submit(_core.ALLREDUCE, "frozen", b"1234", b"1234")
    if size > 1:
        if rank == 0:  # the others come later, so the first is still in flight
            first = submit(_core.ALLREDUCE, "twice", floats(1), floats(1))
            with pytest.raises(ValueError, match="same name as another tensor"):
                submit(_core.ALLREDUCE, "twice", floats(1), floats(1))
        objects.allgather_object(rank)
        if rank != 0:
            first = submit(_core.ALLREDUCE, "twice", floats(1), floats(1))
        first.wait()
        bad = submit(_core.ALLREDUCE, "shapes", floats(*range(3 + rank)), floats(*range(3 + rank)))
        with pytest.raises(HorovodInternalError, match="Mismatched") as caught:
            bad.wait()
        assert caught.value.status == "HVD_MISMATCH"
        assert f"{__file__}:" in str(caught.value) and "try:" in str(caught.value)
        with pytest.raises(HorovodInternalError, match="Mismatched"):
            _core.wait_all([bad])
    return True


def process_sets_on_a_rank():
    basics.init(process_sets="dynamic")
    rank, size = basics.rank(), basics.size()
    with pytest.raises(ValueError):
        ProcessSet(["a"])
    with pytest.raises(ValueError):
        add_process_set(range(size))
    if size > 1:
        odd = add_process_set([1])
        assert str(odd) == "ProcessSet(process_set_id=1, ranks=[1], mpi_comm=None)"
        assert odd.size() == 1 and odd.included() == (rank == 1)
        if rank == 1:
            assert odd.rank() == 0
            data = floats(3)
            submit(_core.ALLREDUCE, "in the set", data, data, set_id=odd.process_set_id).wait()
            assert list(data) == [3]
        else:
            with pytest.raises(ValueError, match="not part of provided process set"):
                odd.rank()
            with pytest.raises(ValueError, match="not a member of the provided process set"):
                submit(_core.ALLREDUCE, "x", floats(1), floats(1), set_id=odd.process_set_id)
        assert remove_process_set(odd) and not remove_process_set(odd)
        assert odd.process_set_id is None and odd.size() is None and odd.rank() is None
    assert not remove_process_set(global_process_set)
    basics.shutdown()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "0"
    if size > 1:
        twins = [ProcessSet([0, 1]), ProcessSet([1, 0])]
        with pytest.raises(ValueError, match=r"process_sets\[1\]"):
            basics.init(process_sets=twins)
        two = [ProcessSet([0]), ProcessSet([1])]
        basics.init(process_sets=two)
        assert [each.process_set_id for each in two] == [1, 2]
        with pytest.raises(ValueError, match="after init"):
            add_process_set([0])
        data = floats(1)
        submit(_core.ALLREDUCE, "all have seen it", data, data).wait()  # before a rank shuts down
    return True


def objects_on_a_rank():
    basics.init()
    rank, size = basics.rank(), basics.size()
    root = size - 1
    thing = {"rank": rank, "blob": os.urandom(1000 * rank), "nested": [None, 1.5, "ü"]}
    assert objects.broadcast_object(thing, root)["rank"] == root
    everything = objects.allgather_object((rank, "x" * rank))
    assert everything == [(r, "x" * r) for r in range(size)]
    assert objects.broadcast_object(None if rank else [], 0) == []
    return True


def waits_in_threads_on_a_rank():
    basics.init()
    size = basics.size()
    wrong = []

    def work(thread):
        for i in range(50):
            data = floats(i)
            submit(_core.ALLREDUCE, f"thread {thread}.{i}", data, data).wait()
            if list(data) != [i * size]:
                wrong.append((thread, i, list(data)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stuck = submit(_core.ALLREDUCE, f"never {basics.rank()}", floats(1), floats(1))
    submit(_core.ALLREDUCE, "all have", floats(1), floats(1)).wait()
    seen = []

    def wait():
        try:
            stuck.wait()
        except HorovodInternalError as error:
            seen.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    basics.shutdown()
    waiter.join(60)
    assert not waiter.is_alive()
    return not wrong and (size == 1 or "shut down" in seen[0])


def shut_down_under_threads_on_a_rank():
    """Other threads are inside the library, and keep coming, while one shuts it down."""
    errors = []
    numbers = itertools.count()

    def submit_one():
        name = f"of {basics.rank()} alone {next(numbers)}"  # the others never agree
        submit(_core.ALLREDUCE, name, floats(1), floats(1)).poll()
        time.sleep(0.001)

    def use(call):
        try:
            while True:
                call()
        except (HorovodInternalError, ValueError) as error:
            errors.append(str(error))

    for life in range(3):
        basics.init(process_sets="dynamic")
        calls = [basics.rank, submit_one]
        if basics.rank() == 0 and basics.size() > 1:
            calls.append(lambda: add_process_set([0]))
        threads = [threading.Thread(target=use, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        basics.shutdown()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), life
    for error in errors:
        assert "shut down" in error or "not been initialized" in error, error


def children_are_a_job():
    basics.init()
    data = floats(1)
    submit(_core.ALLREDUCE, "children", data, data).wait()
    size = basics.size()
    basics.shutdown()
    return 0 if list(data) == [size] else 5


def fork_on_a_rank():
    basics.init()
    child = os.fork()
    if child == 0:
        try:
            assert not basics.is_initialized()
            submit(_core.ALLREDUCE, "child", floats(1), floats(1))
        except HorovodInternalError as error:
            os._exit(3 if error.status != "HVD_FORKED" or "try:" in str(error) else
                     children_are_a_job())
        os._exit(4)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    data = floats(1)
    submit(_core.ALLREDUCE, "parent", data, data).wait()
    return code == 0 and list(data) == [basics.size()]


def one_rank_dies():
    basics.init()
    data = floats(1)
    if basics.rank() == 1:
        os._exit(7)
    submit(_core.ALLREDUCE, "waits", data, data).wait()


def rank_1_never_comes():
    if os.environ["HOROVOD_RANK"] == "0":
        basics.init()


def timeline_nowhere_on_a_rank():
    basics.init()
    with pytest.raises(ValueError, match="'/nonexistent/x'.*: No such file or directory"):
        basics.start_timeline("/nonexistent/x")


def numbers_on_a_rank():
    with pytest.raises(NotInitializedError):
        basics.metrics()
    with pytest.raises(NotInitializedError):
        basics.report(step=1)
    basics.init()
    assert "hvd_report_step" not in basics.metrics() and "hvd_report_loss" not in basics.metrics()
    for step in range(3):
        submit(_core.ALLREDUCE, "sum", floats(1, 2), floats(0, 0)).wait()
        basics.report(step=step, loss=0.5 / (step + 1), samples=32)
    basics.report(loss=float("nan"))
    with pytest.raises(TypeError):
        basics.report(samples=[])
    numbers = basics.metrics()
    assert numbers["hvd_info"]["rank"] == basics.rank()
    assert numbers["hvd_operations_total"]["allreduce"] == 3
    assert numbers["hvd_bytes_total"]["allreduce"] == 24 and numbers["hvd_failed_total"] == 0
    assert numbers["hvd_report_step"] == 2 and numbers["hvd_report_samples_total"] == 96
    assert numbers["hvd_report_loss"] != numbers["hvd_report_loss"]


# --- The tests ------------------------------------------------------------------------------------

ON_RANKS = ["basics_on_a_rank", "operations_on_a_rank", "dropped_handles_on_a_rank",
            "errors_on_a_rank", "process_sets_on_a_rank", "objects_on_a_rank",
            "waits_in_threads_on_a_rank", "shut_down_under_threads_on_a_rank", "fork_on_a_rank",
            "numbers_on_a_rank"]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("function", ON_RANKS)
def test_on_ranks(function, size):
    results = run_ranks(size, THIS, function)
    assert all(result is not False for result in results)


def test_over_tcp():
    assert run_ranks(2, THIS, "operations_on_a_rank", hosts=2) == [True, True]


def test_a_timeline_that_cannot_be_written_says_why():
    run_ranks(1, THIS, "timeline_nowhere_on_a_rank", env={"HOROVOD_TIMELINE": "DYNAMIC"})


def test_a_lost_rank_is_named():
    output = run_ranks(2, THIS, "one_rank_dies", codes=[1, 7])[0]
    assert "HorovodInternalError" in output and "rank 1" in output
    assert "submitted at" in output and f"{THIS}.py:" in output


def test_a_rank_that_never_comes_is_named():
    env = {"HOROVOD_START_TIMEOUT": "2"}
    output = run_ranks(2, THIS, "rank_1_never_comes", codes=[1, 0], env=env)[0]
    assert re.search(r"ValueError: Horovod initialization failed: waited [0-9.]+ s for rank 1 of 2",
                     output)


def test_the_helper_notices_failures():
    with pytest.raises(RankFailed, match="rank 1 ended with 7"):
        run_ranks(2, THIS, "one_rank_dies")


def test_average_and_op():
    assert util.handle_average_backwards_compatibility(None, None) == basics.Average
    assert util.handle_average_backwards_compatibility(basics.Max, None) == basics.Max
    with pytest.warns(DeprecationWarning):
        assert util.handle_average_backwards_compatibility(None, False) == basics.Sum
    with pytest.raises(ValueError):
        util.handle_average_backwards_compatibility(basics.Sum, True)


def test_split_list():
    assert util.split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    assert util.split_list([1, 2], 5) == [[1], [2]]


def test_init_refuses_what_is_no_communicator():
    for wrong in (3, "0", [0, "1"], [None]):
        with pytest.raises(ValueError, match="argument comm"):
            basics.init(comm=wrong)


def test_init_with_some_ranks_needs_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match="takes mpi4py and mpirun.*process sets"):
        basics.init(comm=[0, 1])


def communicators_side_by_side(folder):
    """Jobs of stand-ins for communicators, whose broadcasts are files; all ranks, then halves."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    before = dict(os.environ)
    for name, ranks in [("all", list(range(size))), ("parity", list(range(rank % 2, size, 2)))]:
        comm = FileCommunicator(f"{folder}/{name}{ranks[0]}", ranks.index(rank), len(ranks))
        basics.init(comm=comm)
        assert (basics.rank(), basics.size()) == (ranks.index(rank), len(ranks))
        assert not basics.mpi_enabled() and basics.mpi_built()
        basics.shutdown()
    assert dict(os.environ) == before
    return rank


class FileCommunicator:
    def __init__(self, path, rank, size):
        self.path, self.rank, self.size = path, rank, size

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def bcast(self, value, root=0):
        if self.rank == root:
            with open(self.path + ".new", "wb") as file:
                pickle.dump(value, file)
            os.rename(self.path + ".new", self.path)
        while not os.path.exists(self.path):
            time.sleep(0.01)
        with open(self.path, "rb") as file:
            return pickle.load(file)


def test_jobs_of_communicators(tmp_path):
    assert run_ranks(3, "test_common", "communicators_side_by_side", str(tmp_path)) == [0, 1, 2]


def close_what_is_its_own(folder):
    """A descriptor that the library has closed already may be one of its new ones by now."""
    closed, close = [], os.close

    def close_and_tell(descriptor):
        closed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        close(descriptor)

    os.close = close_and_tell
    basics.init(comm=FileCommunicator(f"{folder}/alone", 0, 1))
    os.close = close
    basics.shutdown()
    return closed


def test_init_with_a_communicator_closes_what_is_its_own(tmp_path):
    [closed] = run_ranks(1, "test_common", "close_what_is_its_own", str(tmp_path))
    assert len(closed) == 1 and "hvd-secret" in closed[0]


def test_errors_of_a_slow_hook_pass():
    class Refused(Exception):
        status = b"A" * 64  # no name of ours

    class Param:
        grad = None

    def slow(hook, param):
        raise Refused

    hook = _core.GradientHook(parameter="name", torch_dtype=None, strided=None, slow=slow,
                              always_slow=True, passes=1, name="name", dtype=_core.FLOAT32,
                              reduce=_core.SUM, process_set=0, prescale=1.0, postscale=1.0)
    with pytest.raises(Refused):
        hook(Param())


def test_what_a_request_must_say():
    data = floats(1.0)
    for said in ({}, {"dtype": _core.FLOAT32}, {"op": _core.ALLREDUCE, "inputs": data}):
        with pytest.raises(TypeError, match="submit.. takes keywords: op, with tensors dtype"):
            _core.submit(**said)
    with pytest.raises(TypeError, match="takes keywords"):
        _core.submit(_core.BARRIER, op=_core.BARRIER)
    with pytest.raises(TypeError, match="a request has no keyword 'roots'"):
        _core.submit(op=_core.BARRIER, roots=0)
    for wrong in ({"op": "barrier"}, {"prescale": "1"}, {"name": 1}, {"process_set": "all"}):
        with pytest.raises((TypeError, AttributeError)):
            _core.submit(**{"op": _core.BARRIER, **wrong})
    with pytest.raises(ValueError, match="has not been registered"):
        _core.submit(op=_core.BARRIER, process_set=ProcessSet([0]))
    late = {"".join(("o", "p")): _core.BARRIER}  # a keyword that is not interned
    with pytest.raises(ValueError, match="use hvd.init"):
        _core.submit(**late)


def test_files_in_memory_where_python_does_not_know_them(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)  # as in Pythons built for an old glibc
    fd = memory_file("some name", b"content")
    path = f"/proc/self/fd/{fd}"
    assert "some name" in os.readlink(path) and not os.get_inheritable(fd)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    with open(path, "rb") as file:
        assert file.read() == b"content"
    os.close(fd)


def test_compression():
    class Number:
        def __init__(self, value, dtype):
            self.value, self.dtype = value, dtype

    compression = make_compression("half", "bfloat16", lambda t: t.dtype != "int",
                                   lambda t, dtype: Number(t.value, dtype))
    sent, ctx = compression.fp16.compress(Number(1, "single"))
    assert sent.dtype == "half" and ctx == "single"
    assert compression.fp16.decompress(sent, ctx).dtype == "single"
    whole = Number(1, "int")
    assert compression.bf16.compress(whole) == (whole, None)
    assert compression.none is NoneCompressor and compression.none.compress(whole)[0] is whole


def test_elastic_state_and_loop():
    state = elastic.ObjectState(lambda value: value, lambda: 0, batch=0, log=[])
    steps = []
    resets = []
    state.register_reset_callbacks([lambda: resets.append("callback")])

    def train(the_state):
        while the_state.batch < 4:
            the_state.batch += 1
            the_state.log.append(the_state.batch)
            steps.append(the_state.batch)
            if len(steps) == 3:
                raise HorovodInternalError("lost")
            if len(steps) == 4:
                elastic.notification_manager.handle_hosts_updated(
                    1, elastic.HostUpdateResult.added)
            if the_state.batch % 2 == 0:
                the_state.commit()
        return "done"

    assert elastic.run_fn(train, lambda: resets.append("reset"))(state) == "done"
    assert steps == [1, 2, 3, 3, 4]
    assert state.log == [1, 2, 3, 4]
    assert resets == ["reset", "callback"] * 2
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.on_hosts_updated(2, elastic.HostUpdateResult.removed)
        state.check_host_updates()
    assert caught.value.skip_sync
    assert "horovod.torch" not in sys.modules
