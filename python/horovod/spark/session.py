# SPDX-License-Identifier: Apache-2.0
"""A session of horovodrun as the driver of a Spark job sees it: a child process.

The child waits for the agents that tasks start (task.py), gives them their ranks, passes the
function on and results back, watches over all of it and says how it went: a line for each event on
a pipe of its own. Output of the ranks comes out of it as lines that are ready to be printed. It
ends when this process does, and takes the agents and their ranks along.
"""
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
from typing import IO, Any, Dict, List, NamedTuple, Optional

from horovod.common.memory_file import memory_file
from horovod.runner.launch import find_launcher
from horovod.spark import rank
from horovod.spark.output import Output

BEGIN_SECONDS = 60.0
# What a task runs as its rank; the agent has been told by the task which Python that is.
RANK_COMMAND = ["/bin/sh", "-c", 'exec "$HOROVOD_SPARK_PYTHON" -m horovod.spark.rank']


class Failure(NamedTuple):
    rank: int
    name: str            # of its host
    code: Optional[int]  # exit status; None: its task is gone
    error: Optional[Dict[str, Any]]

    def where(self) -> str:
        return f"rank {self.rank} on {self.name}" if self.rank >= 0 else f"a task on {self.name}"


class Session(threading.Thread):
    """words: options of horovodrun that say how many ranks there are, and what if they fail."""

    def __init__(self, words: List[str], address: str, secret: bytes, code: bytes,
                 output: Output) -> None:
        super().__init__(name="horovod-spark-session", daemon=True)
        self.n_registered = 0
        self.n_running = 0
        self.port = 0
        self.failure: Optional[Failure] = None  # the last; an elastic job may go on
        self.problem: List[str] = []  # why an elastic job cannot go on: a word, and numbers
        self.n_spare = 0  # copies of tasks
        self.finished = threading.Event()  # nothing of it is left
        self.tasks_of: Dict[str, List[int]] = {}  # by host, as ranks go, once all are there
        self._names: Dict[int, str] = {}    # of the hosts that tasks are on, by task
        self._devices: Dict[int, List[str]] = {}
        self._begun = threading.Event()
        self._n_ranks = 0
        self._stopped = False
        self._place = tempfile.TemporaryDirectory(prefix="horovod-spark-")  # for this user only
        self._folder = pathlib.Path(self._place.name)
        (self._folder / "payload").write_bytes(code)
        self._child = self._start(words, address, secret, output)
        self.start()

    def _start(self, words: List[str], address: str, secret: bytes,
               output: Output) -> subprocess.Popen:
        secret_fd = memory_file("horovod secret", secret.hex().encode())
        events, events_end = os.pipe()
        self._events = os.fdopen(events, encoding="utf-8", errors="replace")
        command = [find_launcher(), "--life-fd", "0", "--await-agents", "0",
                   "--await-address", address, "--secret-fd", str(secret_fd),
                   "--events-fd", str(events_end), "--payload", str(self._folder / "payload"),
                   "--results", self._place.name, *output.words(), *words, *RANK_COMMAND]
        # Ranks get the environment of their tasks; of the driver's, only what it is run with.
        own = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        try:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, pass_fds=(secret_fd, events_end),
                                     env=own, start_new_session=True)
        finally:
            os.close(secret_fd)
            os.close(events_end)
        self._pumps = [output.pump("stdout", child.stdout), output.pump("stderr", child.stderr)]
        return child

    # --- Called by the thread that called run() ----------------------------------------------

    def wait_until_open(self) -> None:
        if not self._begun.wait(BEGIN_SECONDS) or self.port == 0:
            self.stop()
            raise RuntimeError("the launcher of the job did not start; what it said is above")

    def results(self) -> List[bytes]:
        """Pickled, by rank; once finished, without a failure."""
        return [self._report(number)[1] for number in range(self._n_ranks)]

    def has_succeeded(self) -> bool:
        return self.finished.is_set() and self._child.returncode == 0

    def hosts(self) -> Dict[str, int]:
        """Names of the hosts that have registered, and how many tasks each has."""
        names = list(self._names.values())
        return {name: names.count(name) for name in names}

    def devices_of(self, task: int) -> List[str]:
        return self._devices[task]

    def stop(self) -> None:
        """Ends the ranks and the agents; `finished` is set when they are gone."""
        if not self._stopped:
            self._stopped = True
            try:
                self._child.send_signal(signal.SIGTERM)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """Not before it is finished, or too late to wait for that."""
        if not self.finished.is_set():
            self._child.kill()
            self.finished.wait()
        self._place.cleanup()

    # --- Its own thread ----------------------------------------------------------------------

    def run(self) -> None:
        assert self._child.stdin is not None
        try:
            for line in self._events:
                kind, _, rest = line.rstrip("\n").partition(" ")
                getattr(self, f"_on_{kind}")(rest)
        finally:  # whatever was told: who waits for the end must hear of it
            self._events.close()
            self._child.stdin.close()  # it ends, if it has not
            self._child.wait()
            for pump in self._pumps:
                pump.join()
            self._begun.set()
            self.finished.set()

    def _on_open(self, port: str) -> None:
        self.port = int(port)
        self._begun.set()

    def _on_agent(self, rest: str) -> None:
        """An agent has come."""
        n, slot, name, *devices = rest.split(" ")
        self.n_registered = int(n)
        self._names[int(slot)] = name
        self._devices[int(slot)] = devices

    def _on_gone(self, n: str) -> None:
        self.n_registered = int(n)

    def _on_ranks(self, n: str) -> None:
        """A generation has been formed."""
        self._n_ranks = int(n)

    def _on_hosts(self, rest: str) -> None:
        """All have come that are to carry commands."""
        self.tasks_of = {host: [int(task) for task in tasks.split(",")]
                         for host, tasks in (word.split("=") for word in rest.split())}

    def _on_running(self, n: str) -> None:
        self.n_running = max(self.n_running, int(n))  # what has begun, has begun

    def _on_failed(self, rest: str) -> None:
        number, code, slot = (int(word) for word in rest.split())
        self.failure = Failure(number, self._names.get(slot, "an unknown host"),
                               None if code < 0 else code, self._error_of(number))

    def _on_problem(self, rest: str) -> None:
        self.problem = rest.split()

    def _on_spare(self, n: str) -> None:
        self.n_spare = int(n)

    # --- What ranks have left ----------------------------------------------------------------

    def _report(self, number: int) -> Any:
        """(kind, data) of what a rank has written; see rank.py."""
        try:
            data = (self._folder / f"rank.{number}").read_bytes()
        except OSError:
            data = b""
        return data[:1], data[1:]

    def _error_of(self, number: int) -> Optional[Dict[str, Any]]:
        kind, data = self._report(number)
        try:
            return json.loads(data) if kind == rank.ERROR else None
        except ValueError:
            return None  # it was killed while it wrote
