# SPDX-License-Identifier: Apache-2.0
"""Runs test functions as jobs of real ranks: every rank is a process of its own.

    from ranks import run_ranks
    results = run_ranks(2, "test_file", "function", arg, ...)

The function lives in a module of this folder tree, is called on every rank, and its return values
come back by rank. A rank that fails makes run_ranks() fail with that rank's output. Where a rank is
to be lost, run_after_a_loss() has horovodrun start a script.

PyTorch takes two seconds of a processor to be imported. For functions of torch/ one process does it
once, and every rank begins as a copy of it; what is Horovod's, each rank imports and starts itself.
"""
import atexit
import functools
import os
import pathlib
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time

from horovod import _core
from horovod.runner.launch import find_launcher

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT_S = 240
FIRST = {"torch": ("torch", "torch._dynamo")}  # what copies begin with, by folder


class RankFailed(AssertionError):
    """Some ranks ended with an error; the message has their output."""


def _rank_main(folder, module, function, job_file, result_file):
    sys.path[:0] = [folder, str(HERE)]
    with open(job_file, "rb") as file:
        args = pickle.load(file)
    value = getattr(__import__(module), function)(*args)
    with open(result_file, "wb") as file:
        pickle.dump(value, file)


def _environment(rank, size, port, secret_file, hosts, extra):
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("HOROVOD_")}
    environment.update({
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size),
        "HOROVOD_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_RENDEZVOUS_PORT": str(port),
        "HOROVOD_SECRET_FILE": str(secret_file), "HOROVOD_HOSTNAME": f"host{rank % hosts}",
        "OMP_NUM_THREADS": "1",
    })
    environment.update(extra or {})
    return environment


def run_ranks(size, module, function, *args, env=None, hosts=1, timeout_s=TIMEOUT_S, codes=None):
    """Calls module.function(*args) on `size` ranks; their return values by rank.

    module: a path below this folder without .py, as "torch/test_ops". hosts: how many hosts the
    ranks pretend to be on. codes: expected exit codes by rank; ranks that do not end with 0 return
    their output instead of a value.
    """
    codes = codes or [0] * size
    folder, _, name = str(HERE / module).rpartition("/")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        secret = secrets.token_bytes(32)
        secret_file = scratch / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(secret.hex())
        (scratch / "args").write_bytes(pickle.dumps(args))
        server, port = _core.rendezvous_start(None, 0, secret)
        words = [folder, name, function, str(scratch / "args")]
        ranks = [(words + [str(scratch / f"result{rank}")],
                  _environment(rank, size, port, secret_file, hosts, env),
                  str(scratch / f"out{rank}")) for rank in range(size)]
        try:
            found = _run_here_or_copied(folder, env or {})(ranks, codes, timeout_s)
        finally:
            _core.rendezvous_stop(server)
        outputs = [(scratch / f"out{rank}").read_text(errors="replace") for rank in range(size)]
        if found != codes:
            parts = [f"--- rank {rank} ended with {found[rank]}\n{outputs[rank][-6000:]}"
                     for rank in range(size)]
            raise RankFailed(f"{module}.{function} on {size} ranks\n" + "\n".join(parts))
        return [pickle.loads((scratch / f"result{rank}").read_bytes()) if codes[rank] == 0
                else outputs[rank] for rank in range(size)]


def _wait_for(ranks, codes, timeout_s):
    """Until all have ended, or some seconds after the first has failed, or time is up.

    A rank that ends as the test expects has not failed: others may need long to notice it.
    """
    deadline = time.monotonic() + timeout_s
    failed_at = None
    while any(process.poll() is None for process in ranks):
        now = time.monotonic()
        if failed_at is None and any(
                process.poll() not in (None, code) for process, code in zip(ranks, codes)):
            failed_at = now
        if now > deadline or (failed_at is not None and now > failed_at + 30):
            return
        time.sleep(0.01)


def _codes_of(start, ranks, codes, timeout_s):
    """Starts (words, environment, output file) for each rank; the codes when all have ended."""
    processes = [start(*rank) for rank in ranks]  # a copy leaves from here
    try:
        _wait_for(processes, codes, timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [process.returncode for process in processes]


# --- Ranks that begin as what they are ------------------------------------------------------------


def _start(words, environment, output):
    with open(output, "wb") as file:
        return subprocess.Popen([sys.executable, str(HERE / "ranks.py"), *words], env=environment,
                                stdout=file, stderr=subprocess.STDOUT)


# --- Ranks that begin as copies of a process that has imported what takes long --------------------


def _run_here_or_copied(folder, extra):
    """What runs ranks. Only names that are read later than at the start may differ in a copy."""
    first = FIRST.get(pathlib.Path(folder).name)
    if first and all(name.startswith(("HOROVOD_", "TEST_")) for name in extra):
        return _copier(first)
    return functools.partial(_codes_of, _start)


@functools.lru_cache(maxsize=None)
def _copier(first):
    process = subprocess.Popen([sys.executable, str(HERE / "ranks.py"), "--copies", *first],
                               env={**os.environ, "OMP_NUM_THREADS": "1"},
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.communicate)

    def run(*job):
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)

    return run


class _Copy:
    """A copy of this process, with those members of a Popen that are used here."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self, flags=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        return self.poll(0)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


class _InACopy(BaseException):
    """Leads a copy out of the loop of the process that it was made of, to args[0], its words."""


def _start_copy(words, environment, output):
    pid = os.fork()
    if pid != 0:
        return _Copy(pid)
    os.environ.clear()
    os.environ.update(environment)
    for number, name, flags in ((0, os.devnull, os.O_RDONLY),
                                (1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        file = os.open(name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    raise _InACopy(words)


def _make_copies():
    """Until the input ends; a copy comes back with its words."""
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return None
        pickle.dump(_codes_of(_start_copy, *job), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _main(words):
    if words[0] == "--copies":
        for name in words[1:]:
            __import__(name)
        try:
            words = _make_copies()
        except _InACopy as copy:
            words = copy.args[0]
    if words:
        _rank_main(*words)


# --- Elastic jobs ---------------------------------------------------------------------------------


def run_after_a_loss(folder, script, env=None, timeout_s=300):
    """Runs a script as an elastic job of three ranks, one of which ends itself with code 3.

    That is the rank of host 127.0.0.1; it takes the file named in argv[1] away before. Returns what
    the two others printed on stdout, and everything; fails unless they come to a good end.
    """
    (folder / "train.py").write_text(script)
    (folder / "order").touch()
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("HOROVOD")}
    environment.update(env or {}, OMP_NUM_THREADS="1",
                       PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run(
        [find_launcher(), "--verbose", "-np", "3", "--min-np", "2", "--elastic-restarts", "0", "-H",
         "localhost:2,127.0.0.1:1",
         sys.executable, folder / "train.py", folder / "order"], text=True, timeout=timeout_s,
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Process 2 exit with status code 3." in said
    assert done.stdout.count("done on 2 ranks") == 2, said
    return done.stdout, said


if __name__ == "__main__":
    _main(sys.argv[1:])
