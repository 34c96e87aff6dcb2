# SPDX-License-Identifier: Apache-2.0
"""hvd.profile: what all ranks do for a while, in one file for Perfetto; ranges for profilers.

Every rank writes a timeline of its own and, where PyTorch is loaded, lets its profiler look. The
traces then travel to rank 0, which lays them on one clock. Clocks of hosts differ: each rank finds
out by how much its own is ahead of rank 0's, from moments at which all ranks leave an exchange.
"""
import gzip
import json
import os
import pathlib
import sys
import tempfile
import time
import zlib
from typing import Any, Dict, List, Tuple, Union

from horovod import _core
from horovod.common.objects import allgather_object, allgather_size
from horovod.common.process_sets import global_process_set

CLOCK_ROUNDS = 9
# When it began, in microseconds since 1970 by rank 0's clock, and events with times from there.
Trace = Tuple[float, List[Dict[str, Any]]]
PIDS_OF_A_RANK = 1000


def clock_lead_us() -> float:
    """How far this rank's clock is ahead of rank 0's, in microseconds."""
    leads = []
    for _ in range(CLOCK_ROUNDS):
        allgather_size(0, global_process_set, "profile.meet")
        mine = time.time_ns()
        leads.append((mine - allgather_size(mine, global_process_set, "profile.clock")[0]) / 1e3)
    return sorted(leads)[CLOCK_ROUNDS // 2]


class profile:
    """with hvd.profile("trace.json"): writes what all ranks do meanwhile to that file, on rank 0.

    A collective operation: every rank opens and leaves it. The file is for https://ui.perfetto.dev;
    a name that ends with .gz makes it a smaller one. Where PyTorch is loaded its profiler looks
    too: python=True has the frames of Python in the file, options are those of
    torch.profiler.profile. Profiling costs time and memory: a few steps are enough.
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"], python: bool = True,
                 **options: Any) -> None:
        self.path = os.fspath(path)
        self._options = {"with_stack": python, **options}
        self._torch: Any = None

    def __enter__(self) -> "profile":
        self._folder = tempfile.TemporaryDirectory(prefix="horovod-profile-")
        self._lead_us = clock_lead_us()
        status, text = _core.profile_start(self._part("operations"))
        if status != "HVD_OK":
            self._folder.cleanup()
            raise RuntimeError(f"{text} ({status})")
        torch = sys.modules.get("torch")
        if torch is not None:
            self._torch = torch.profiler.profile(**self._options)
            self._torch.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self._torch is not None:
            self._torch.__exit__(kind, error, traceback)
        _core.timeline_stop()
        try:
            if kind is None:  # else the other ranks may be somewhere else
                self._write()
        finally:
            self._folder.cleanup()

    def _part(self, name: str) -> str:
        return os.path.join(self._folder.name, name + ".json")

    def _write(self) -> None:
        pieces = gather(zlib.compress(json.dumps(self._trace()).encode(), 1))
        problem = None
        if _core.rank() == 0:
            try:
                write_trace(self.path, [json.loads(zlib.decompress(piece)) for piece in pieces])
            except OSError as error:
                problem = f"cannot write the profile to {self.path}: {error.strerror}"
        problem = allgather_object(problem, "profile.end")[0]  # and the file is there for everybody
        if problem is not None:
            raise OSError(problem)

    def _trace(self) -> Trace:
        begun_us, events = of_timeline(pathlib.Path(self._part("operations")))
        if self._torch is not None:
            self._torch.export_chrome_trace(self._part("torch"))
            events += of_torch(pathlib.Path(self._part("torch")), begun_us)
        rank = _core.rank()
        pids: Dict[str, int] = {}
        for event in events:
            number = pids.setdefault(str(event.get("pid")), len(pids))
            event["pid"] = rank * PIDS_OF_A_RANK + number
            tell_rank(event, rank)
        return begun_us - self._lead_us, events


def of_timeline(path: pathlib.Path) -> Tuple[int, List[Dict[str, Any]]]:
    """When it began, in microseconds since 1970, and events whose times count from there."""
    events = json.loads(path.read_text())
    for event in events:
        event["pid"] = f"operations {event.get('pid')}"
    return events[0]["args"]["start_time_since_epoch_in_micros"], events


def of_torch(path: pathlib.Path, begun_us: int) -> List[Dict[str, Any]]:
    """Events whose times count from begun_us."""
    trace = json.loads(path.read_text())
    shift_us = (trace.get("baseTimeNanoseconds", 0) - begun_us * 1000) / 1e3
    events = [event for event in trace["traceEvents"] if event.get("ph") in "XMCiIsft"]
    for event in events:
        if "ts" in event:
            event["ts"] = float(event["ts"]) + shift_us
    return events


# What rows are called: the first two are those of the timeline.
ROWS = {"tensors": "rank {}: operations", "ranks": "rank {}: arrivals"}


def tell_rank(event: Dict[str, Any], rank: int) -> None:
    """Names and order of the groups of rows: rank by rank."""
    args = event.get("args")
    if event.get("ph") != "M" or not isinstance(args, dict):
        return
    if event["name"] == "process_name":
        name = str(args.get("name"))
        own = f"rank {rank}: steps" if name == f"rank {rank}" else f"rank {rank}: {name}"
        args["name"] = ROWS.get(name, own).format(rank)
    elif event["name"] == "process_sort_index":
        args["sort_index"] = event["pid"]


def gather(data: bytes) -> List[bytes]:
    """The pieces of all ranks, on rank 0; empty ones elsewhere."""
    size = _core.size()
    lengths = allgather_size(len(data), global_process_set, "profile.size")
    whole = _core.submit(op=_core.ALLTOALL, name="profile.trace", dtype=_core.UINT8,
                         process_set=global_process_set, inputs=bytearray(data),
                         splits=[len(data)] + [0] * (size - 1), waits=True,
                         finish=lambda done: bytes(memoryview(done.memory(0)[0]))).wait()
    pieces = []
    for length in lengths if _core.rank() == 0 else []:
        pieces.append(whole[:length])
        whole = whole[length:]
    return pieces


def write_trace(path: str, parts: List[Trace]) -> None:
    """One file, whose times count from the first beginning."""
    first = min(begun_us for begun_us, _ in parts)
    events = []
    for begun_us, part in parts:
        for event in part:
            if "ts" in event:
                event["ts"] = round(event["ts"] + (begun_us - first), 3)
        events += part
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms",
                       "beginsMicrosecondsSince1970": first}).encode()
    with open(path, "wb") as file:
        file.write(gzip.compress(text, 6) if path.endswith(".gz") else text)


# --- Ranges ---------------------------------------------------------------------------------------

# Function of PyTorch's library: whether its profiler looks at this thread.
TORCH_LOOKS = "_ZN5torch8profiler4impl15profilerEnabledEv"
NVTX_LIBRARIES = ("libnvToolsExt.so.1", "libnvtx3interop.so.1")


def addresses(path: str, *names: str) -> List[int]:
    """Of functions of a library; 0 for each if it, or one of them, is not there."""
    import ctypes  # not before it is needed: every rank would start later

    try:
        library = ctypes.CDLL(path)
        return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    except (OSError, AttributeError):
        return [0] * len(names)


def find_torch() -> int:
    """0: a PyTorch that does not tell."""
    libraries = pathlib.Path(str(sys.modules["torch"].__file__)).parent / "lib"
    return addresses(str(libraries / "libtorch_cpu.so"), TORCH_LOOKS)[0]


def find_nvtx() -> List[int]:
    """Where a profiler is that takes NVTX: it names its library to the processes it looks at."""
    is_wanted = (os.environ.get("NVTX_INJECTION64_PATH")
                 and os.environ.get("HOROVOD_DISABLE_NVTX_RANGES", "0") in ("", "0"))
    found = [addresses(name, "nvtxRangePushA", "nvtxRangePop")
             for name in (NVTX_LIBRARIES if is_wanted else ())]
    return next((pair for pair in found if pair[0]), [0, 0])


def show_ranges() -> None:
    """From now on submissions and waits are ranges for the profilers there are."""
    looks = find_torch() if "torch" in sys.modules else 0
    record = sys.modules["torch"].profiler.record_function if looks else None
    _core.set_ranges(looks, record, *find_nvtx())
