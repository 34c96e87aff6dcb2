# SPDX-License-Identifier: Apache-2.0
"""A session of horovodrun as the driver of a Spark job sees it: a child process.

The child waits for the agents that tasks start (agent.py), gives them their ranks, passes the
function on and results back, watches over all of it and says how it went: a line for each event on
a pipe of its own (src/launch/gather.c has them all). Output of the ranks comes out of it as lines
that are ready to be printed. It ends when this process does, and takes the agents and their ranks
along.
"""
import collections
import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
from typing import IO, Any, Dict, List, NamedTuple, Optional, TextIO

from horovod.runner import start_launcher
from horovod.spark import rank

BEGIN_SECONDS = 60.0
PIECE_BYTES = 1 << 16
# What a task runs as its rank; the agent has been told by the task which Python that is.
RANK_COMMAND = ["/bin/sh", "-c", 'exec "$HOROVOD_SPARK_PYTHON" -m horovod.spark.rank']


class Output:
    """Where lines go. prefix: '[rank]<stdout>:' in front of each; timestamp: and the time before
    that. bar_is_up: Spark's progress bar may stand at the start of the first line."""

    def __init__(self, stdout: Optional[TextIO] = None, stderr: Optional[TextIO] = None,
                 timestamp: bool = False, bar_is_up: bool = False) -> None:
        self._streams = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
        self._bar_is_up = bar_is_up
        prefix = timestamp or stdout is not None or stderr is not None
        self.words = ["--color", "never", *([] if prefix else ["--plain-output"]),
                      *(["--prefix-output-with-timestamp"] if timestamp else [])]  # of horovodrun

    def pump(self, stream: str, source: IO[bytes]) -> None:
        rest = b""
        while data := source.read1(PIECE_BYTES):  # type: ignore
            data = rest + data
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # letters may be cut in two
            self.write(stream, data[:whole])
            rest = data[whole:]
        self.write(stream, rest)
        source.close()

    def write(self, stream: str, data: bytes) -> None:
        if not data:
            return
        file = self._streams[stream]
        with contextlib.suppress(OSError, ValueError):  # somebody has closed it; the job goes on
            file.write(("\n" if self._bar_is_up else "") + data.decode("utf-8", "replace"))
            file.flush()
        self._bar_is_up = False


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
        self.told: Dict[str, List[str]] = {}     # the last event of each kind
        self.counts: Dict[str, int] = collections.defaultdict(int)  # what these have counted
        self.agents: Dict[int, List[str]] = {}   # by task: its host's name, and its devices
        self.failure: Optional[Failure] = None   # the last; an elastic job may go on
        self.finished = threading.Event()        # nothing of it is left
        self._begun = threading.Event()
        self._stopped = False
        self._place = tempfile.TemporaryDirectory(prefix="horovod-spark-")  # for this user only
        self._folder = pathlib.Path(self._place.name)
        (self._folder / "payload").write_bytes(code)
        events, events_end = os.pipe()
        self._events = os.fdopen(events, encoding="utf-8", errors="replace")
        # Ranks get the environment of their tasks; of the driver's, only what it is run with.
        own = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        self._child = start_launcher(
            ["--await-agents", "0", "--await-address", address, "--events-fd", str(events_end),
             "--payload", str(self._folder / "payload"), "--results", self._place.name,
             *output.words, *words, *RANK_COMMAND], secret, own, events_end, has_output=True)
        self._pumps = [threading.Thread(target=output.pump, args=(stream, source), daemon=True)
                       for stream, source in (("stdout", self._child.stdout),
                                              ("stderr", self._child.stderr))]
        for thread in (self, *self._pumps):
            thread.start()
        if not self._begun.wait(BEGIN_SECONDS) or "open" not in self.told:
            self.stop()
            raise RuntimeError("the launcher of the job did not start; what it said is above")
        self.port = self.counts["open"]  # where agents are awaited

    # --- Called by the thread that called run() ----------------------------------------------

    def results(self) -> List[bytes]:
        """Pickled, by rank; once finished, without a failure."""
        return [self._report(number)[1:] for number in range(self.counts["ranks"])]

    def has_succeeded(self) -> bool:
        return self.finished.is_set() and self._child.returncode == 0

    def stop(self) -> None:
        """Ends the ranks and the agents; `finished` is set when they are gone."""
        if not self._stopped:
            self._stopped = True
            self._child.send_signal(signal.SIGTERM)

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
                kind, *words = line.split()
                if kind == "agent":
                    self.agents[int(words[1])] = words[2:]
                elif kind == "failed":
                    self._hear_failure(*map(int, words))
                kind = "agent" if kind == "gone" else kind
                self.told[kind] = words
                if words[0].isdigit():
                    self.counts[kind] = int(words[0])
                self._begun.set()
        finally:  # whatever was told: who waits for the end must hear of it
            self._events.close()
            self._child.stdin.close()  # it ends, if it has not
            self._child.wait()
            for pump in self._pumps:
                pump.join()
            self._begun.set()
            self.finished.set()

    def _hear_failure(self, number: int, code: int, task: int) -> None:
        report, error = self._report(number), None
        with contextlib.suppress(ValueError):  # it was killed while it wrote
            error = json.loads(report[1:]) if report.startswith(rank.ERROR) else None
        name = self.agents.get(task, ["an unknown host"])[0]
        self.failure = Failure(number, name, None if code < 0 else code, error)

    def _report(self, number: int) -> bytes:
        """What a rank has written: its kind, and the data; see rank.py."""
        try:
            return (self._folder / f"rank.{number}").read_bytes()
        except OSError:
            return b""
