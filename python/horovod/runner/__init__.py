# SPDX-License-Identifier: Apache-2.0
"""horovod.run: a function on many ranks, from a program or a notebook.

The function, its arguments and the results are pickled here and on the ranks only; horovodrun
carries them as bytes, over the same channel as its orders, into files that only this user can read.
"""
import contextlib
import importlib
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
from collections import deque
from typing import Any, Dict, List, Optional

import cloudpickle

from horovod.runner.elastic.discovery import script_of
from horovod.runner.script import Function, call_of

FAILED = ("Horovod detected that one or more processes exited with non-zero status, thus causing "
          "the job to be terminated. The first process to do so was:\n"
          "Process name: {}\nExit code: {}\n")
TAIL_LINES = 20  # of the launcher's stderr, for errors that no rank explains

# keyword of run() -> flag of horovodrun
_FLAGS = {"num_proc": "--num-proc", "hosts": "--hosts", "hostfile": "--hostfile",
          "start_timeout": "--start-timeout", "ssh_port": "--ssh-port",
          "ssh_identity_file": "--ssh-identity-file", "output_filename": "--output-filename",
          "mpi_args": "--mpi-args", "network_interfaces": "--network-interfaces",
          "min_num_proc": "--min-num-proc", "max_num_proc": "--max-num-proc",
          "slots": "--slots-per-host", "reset_limit": "--reset-limit",
          "host_discovery_script": "--host-discovery-script"}
_SWITCHES = {"disable_cache": "--disable-cache", "verbose": "--verbose", "use_gloo": "--gloo",
             "use_mpi": "--mpi"}


def find_launcher() -> str:
    """Path of the horovodrun that belongs to this package."""
    package = pathlib.Path(__file__).absolute().parent.parent
    candidates = [
        package.parent.parent / "horovodrun",  # <build>/python/horovod
        pathlib.Path(sysconfig.get_path("scripts")) / "horovodrun",
        pathlib.Path(sys.executable).parent / "horovodrun",
    ]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("horovodrun")
    if found is None:
        raise RuntimeError("horovodrun is not installed beside this package nor in PATH; install "
                           "horovod again")
    return found


def start_launcher(words: List[str], secret: bytes, environment: Dict[str, str], *fds: int,
                   has_output: bool = False) -> subprocess.Popen:
    """horovodrun as a child that leaves when its standard input is closed, or this process ends.

    The secret goes through a pipe. fds: descriptors that it takes over. has_output: its output is
    to be read, else it goes where that of this process goes.
    """
    secret_fd, secret_end = os.pipe()
    os.write(secret_end, secret.hex().encode())
    os.close(secret_end)
    stream = subprocess.PIPE if has_output else None
    try:
        return subprocess.Popen([find_launcher(), "--life-fd", "0", "--secret-fd", str(secret_fd),
                                 *words], stdin=subprocess.PIPE, stdout=stream, stderr=stream,
                                pass_fds=(secret_fd, *fds), env=environment, start_new_session=True)
    finally:
        for fd in (secret_fd, *fds):
            os.close(fd)


def __getattr__(name: str) -> Any:
    if name == "launch":  # not before it is asked for: python -m horovod.runner.launch runs it
        return importlib.import_module("horovod.runner.launch")
    if name == "_HorovodArgs":
        return importlib.import_module("horovod.runner.launch")._HorovodArgs
    raise AttributeError(f"module 'horovod.runner' has no attribute {name!r}")


def run(func: Function, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None,
        slots=None, reset_limit=None, cooldown_range=None, hosts=None, hostfile=None,
        host_discovery_script=None, start_timeout=None, ssh_port=None, ssh_identity_file=None,
        disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None,
        mpi_args=None, network_interface=None, network_interfaces=None, executable=None, np=None,
        min_np=None, max_np=None, dashboard=None, report=None) -> List[Any]:
    """Calls func(*args, **kwargs) on num_proc ranks and returns the results by rank.

    func may be the name of a Python file: every rank runs it as a script, with args as sys.argv.
    hosts is "a:2,b:2", hostfile a file with one host per line; neither means the hosts of the
    scheduler's allocation, or else this machine. What the ranks print comes out here, with the rank
    in front. An exception on a rank is a RuntimeError here that ends with the remote traceback.
    With min_num_proc or host_discovery_script the job is elastic, and the results are those of the
    first min_num_proc ranks; the script may also be a HostDiscovery
    (horovod.runner.elastic.discovery). dashboard: True shows the job on a page, whose address is
    printed; a number is its port. report: file for that page when the job is over.
    """
    num_proc = renamed("np", np, "num_proc", num_proc)
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    network_interfaces = renamed("network_interface", network_interface, "network_interfaces",
                                 network_interfaces)
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if isinstance(network_interfaces, (list, tuple, set)):
        network_interfaces = ",".join(network_interfaces)
    with script_of(host_discovery_script) as host_discovery_script:
        return _run_words(dict(locals()), func, args, kwargs)


def _run_words(said: dict, func: Function, args, kwargs) -> List[Any]:
    """run() with its arguments by name."""
    words = []
    for name, flag in _FLAGS.items():
        if said[name] is not None:
            words += [flag, str(said[name])]
    words += [flag for name, flag in _SWITCHES.items() if said[name]]
    if said["cooldown_range"] is not None:
        words += ["--blacklist-cooldown-range", *map(str, said["cooldown_range"])]
    words += watching_words(said["dashboard"], said["report"], "horovod.run", func)
    payload = cloudpickle.dumps(call_of(func, args, kwargs))
    # An elastic job may end with fewer ranks than it began with, but no fewer than these.
    n_results = min(said["num_proc"], said["min_num_proc"] or said["num_proc"])
    return _run_payload(payload, n_results, words, said["executable"] or sys.executable)


def watching_words(dashboard, report, caller: str, func: Function) -> List[str]:
    """Of horovodrun. dashboard: True for any free port, or the port. report: a file, or None."""
    words = ["--title", f"{caller}({getattr(func, '__name__', func)})"]
    if dashboard is not None and dashboard is not False:
        words += ["--dashboard" if dashboard is True else f"--dashboard={int(dashboard)}"]
    return words + ([] if report is None else ["--report", os.path.abspath(report)])


def renamed(old_name, old, new_name, new):
    if old is None:
        return new
    warnings.warn(f"{old_name} is deprecated, use {new_name} instead", DeprecationWarning,
                  stacklevel=3)
    return old


def _run_payload(payload: bytes, n_results: int, words: List[str], executable: str) -> List[Any]:
    with tempfile.TemporaryDirectory(prefix="horovod-run-") as place:  # for this user only
        directory = pathlib.Path(place)
        (directory / "payload").write_bytes(payload)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if "--mpi" in words:  # mpirun carries no files: this directory must be seen by all hosts
            environment["HOROVOD_RUN_PAYLOAD"] = str(directory / "payload")
            environment["HOROVOD_RUN_RESULTS"] = place
        command = [find_launcher(), *words, "--payload", str(directory / "payload"),
                   "--results", place, executable, "-m", "horovod.runner.run_task"]
        code, tail = _call(command, environment)
        return _collect(directory, n_results, "mpirun" if "--mpi" in words else "horovodrun", code,
                        tail)


def _call(command: List[str], environment: dict):
    """Runs it with its output on our streams, whatever they are; (exit code, end of stderr)."""
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    tail = deque(maxlen=TAIL_LINES)
    pumps = [threading.Thread(target=_pump, args=(child.stdout, sys.stdout, None), daemon=True),
             threading.Thread(target=_pump, args=(child.stderr, sys.stderr, tail), daemon=True)]
    for pump in pumps:
        pump.start()
    try:
        code = child.wait()
    except BaseException:  # an interrupted notebook cell, for one: no rank may stay behind
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise
    for pump in pumps:
        pump.join()
    return code, "".join(tail)


def _pump(source, target, tail: Optional[deque]) -> None:
    for line in source:
        text = line.decode(errors="replace")
        with contextlib.suppress(ValueError, OSError):  # somebody closed our stream
            target.write(text)
            target.flush()
        if tail is not None:
            tail.append(text)


def _collect(directory: pathlib.Path, n_results: int, program: str, code: int,
             tail: str) -> List[Any]:
    outcomes = {}
    for rank in range(n_results):
        file = directory / f"rank.{rank}"
        if file.exists():
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the rank died writing
                outcomes[rank] = pickle.loads(file.read_bytes())
    if code == 0 and len(outcomes) == n_results:
        return [cloudpickle.loads(outcomes[rank][1]) for rank in range(n_results)]
    raise RuntimeError(_explain(directory, outcomes, program, code, tail))


def _explain(directory: pathlib.Path, outcomes: dict, program: str, code: int, tail: str) -> str:
    first = directory / "first_failure"
    if not first.exists():  # mpirun does not tell
        traces = [text for kind, text in outcomes.values() if kind == "error"]
        return f"{program} failed with exit code {code}\n{''.join(traces[:1]) or tail}"
    rank, rank_code = first.read_text().split()
    outcome = outcomes.get(int(rank))
    text = FAILED.format(rank, rank_code)
    return text + (outcome[1] if outcome is not None and outcome[0] == "error" else tail)
