# SPDX-License-Identifier: Apache-2.0
"""Where the job's secret can be found while a job runs, and after it: nowhere.

Looked at as another user: arguments, environment, memory and files. As root, what a core file would
hold: all memory but the pages that are kept out of it, and after shutdown those as well. That the
search finds what is there is shown by the one page that has it.
"""
import array
import os
import pathlib
import pickle
import re
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import ranks  # noqa: E402
from horovod import _core  # noqa: E402
from horovod.common import basics  # noqa: E402

THIS = "../security/test_secret"
SIZE = 4
SHOWN = 5  # exit code: run_ranks() then gives the output
NOBODY = 65534
SECRET = os.urandom(32)
AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) \S+ \S+ \S+ *(.*)")


def hits(data):
    return data.count(SECRET) + data.lower().count(SECRET.hex().encode())


def areas(pid):
    """(start, end, is kept out of core files) of the memory of a process that can be read."""
    area = None
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := AREA.match(line):
            start, end, rights, name = found.groups()
            is_odd = rights[0] != "r" or name in ("[vvar]", "[vvar_vclock]", "[vsyscall]")
            area = None if is_odd else (int(start, 16), int(end, 16))
        elif area and line.startswith("VmFlags:"):
            yield *area, "dd" in line.split()


def hits_in_memory(pid, kept_out):
    n = 0
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end, is_kept_out in areas(pid):
            if is_kept_out == kept_out:
                memory.seek(start)
                try:
                    n += hits(memory.read(end - start))
                except OSError:  # of a device
                    pass
    return n


def places_of(pids):
    """What of the job's processes and of the usual places somebody else could try to read."""
    for pid in pids:
        for name in ("cmdline", "environ", "mem", "maps", "status", "stat"):
            yield pathlib.Path("/proc", str(pid), name)
    for folder in ("/dev/shm", "/tmp", "/var/tmp"):
        for at, _, names in os.walk(folder):
            yield from (pathlib.Path(at, name) for name in names if "hvd" in name or "hvd" in at)


def search(pids):
    """The places that have it, and how many could be read."""
    found, n_read = [], 0
    for place in places_of(pids):
        try:
            data = place.read_bytes() if place.is_file() else b""
        except OSError:
            continue
        n_read += 1
        if hits(data) > 0:
            found.append(str(place))
    return found, n_read


def search_as_nobody(pids):
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.write(ends[1], pickle.dumps(search(pids)))
        os._exit(0)
    os.close(ends[1])
    with open(ends[0], "rb") as file:
        answer = pickle.loads(file.read())
    os.waitpid(child, 0)
    return answer


def wait_for(path):
    deadline = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def rank_main(folder):
    folder = pathlib.Path(folder)
    basics.init()
    data = array.array("f", [1.0] * 1000)
    for _ in range(20):
        _core.submit(op=_core.ALLREDUCE, name="sum", dtype=_core.FLOAT32, inputs=data,
                     outputs=data).wait()
    (folder / f"runs-{basics.rank()}-{os.getpid()}").touch()
    wait_for(folder / "look at the end")
    rank = basics.rank()
    basics.shutdown()
    (folder / f"over-{rank}-{os.getpid()}").touch()
    wait_for(folder / "end")
    os._exit(SHOWN)


def pids_of(folder, state):
    deadline = time.monotonic() + 100
    while len(names := [path.name for path in folder.glob(state + "-*")]) < SIZE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(name.split("-")[2]) for name in names]


def look(folder, seen):
    try:
        pids = pids_of(folder, "runs")
        seen["by nobody"] = search_as_nobody(pids)
        seen["arguments"] = [hits(pathlib.Path(f"/proc/{pid}/{name}").read_bytes())
                             for pid in pids for name in ("cmdline", "environ")]
        seen["core"] = [hits_in_memory(pid, False) for pid in pids]
        seen["kept out"] = [hits_in_memory(pid, True) for pid in pids]
        (folder / "look at the end").touch()
        pids = pids_of(folder, "over")
        seen["after"] = [hits_in_memory(pid, True) + hits_in_memory(pid, False) for pid in pids]
    finally:
        (folder / "look at the end").touch()
        (folder / "end").touch()


def test_the_secret_is_nowhere_to_be_found(monkeypatch):
    monkeypatch.setattr(ranks.secrets, "token_bytes", lambda n: SECRET)
    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=look, args=(pathlib.Path(folder), seen))
        thread.start()
        try:
            outputs = ranks.run_ranks(SIZE, THIS, "rank_main", folder, codes=[SHOWN] * SIZE,
                                      hosts=2, env={"HOROVOD_LOG_LEVEL": "trace"})
        finally:
            thread.join()
    found, n_read = seen["by nobody"]
    assert found == [] and n_read >= 2 * SIZE  # arguments and state of every rank
    assert seen["arguments"] == [0] * 2 * SIZE
    assert seen["core"] == [0] * SIZE
    assert all(n > 0 for n in seen["kept out"])  # where it belongs, so the search finds it
    assert seen["after"] == [0] * SIZE
    assert all(hits(output.encode()) == 0 and "debug" in output for output in outputs)
