# SPDX-License-Identifier: Apache-2.0
"""The desk on the driver that agents call: it places them, starts them, hears how it went.

A thread of its own owns every socket. The thread that called run() only reads the counts, waits for
`done`, and calls stop(). When all tasks have registered each is told its place; then output and
results come in. The first failure is not at once believed to be the cause: other ranks fail because
of it and may be heard first, so the desk listens a little longer and then decides.
"""
import json
import selectors
import signal
import socket
import threading
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

from horovod.spark import plan
from horovod.spark.line import Kind, Line
from horovod.spark.output import Output

# How long to listen for the failure of another rank before this one is called the cause, by doubt.
SETTLE_SECONDS = (0.1, 0.5, 2.0)
MAX_STRANGERS = 256
# Raised by a rank because of another one.
CONSEQUENCES = ("HorovodInternalError",)


class Failure(NamedTuple):
    rank: int
    task: Dict[str, Any]  # as it registered
    code: Optional[int]   # exit status; None: its task is gone
    error: Optional[Dict[str, Any]]

    def doubt(self) -> int:
        """How likely another rank's failure is the cause of this one. A crashed rank has not heard
        of others; one that lost another says so; the rest may be either."""
        if self.error is not None:
            return 2 if self.error["type"] in CONSEQUENCES else 1
        crashed = self.code is not None and self.code > 128
        return 0 if crashed and self.code != 128 + signal.SIGTERM else 1

    def where(self) -> str:
        return f"rank {self.rank} on {self.task['name']}"


class Task:
    def __init__(self, line: Line, told: Dict[str, Any]) -> None:
        self.line = line
        self.told = told
        self.place: Optional[plan.Place] = None
        self.pieces: List[bytes] = []
        self.has_ended = False


class Desk(threading.Thread):
    def __init__(self, n_tasks: int, secret: bytes, bind_address: str, output: Output) -> None:
        super().__init__(name="horovod-spark-desk", daemon=True)
        self.n_running = 0
        self.n_registered = 0
        self.done = threading.Event()      # all results are there, or a failure is decided
        self.finished = threading.Event()  # and all agents have gone
        self.failure: Optional[Failure] = None
        self.crash: Optional[BaseException] = None
        self._n_tasks = n_tasks
        self._secret = secret
        self._output = output
        self._code = b""
        self._start: Dict[str, Any] = {}
        self._tasks: Dict[int, Task] = {}
        self._lines: Dict[Line, Optional[int]] = {}  # and which task each is; None: not told
        self._failures: List[Failure] = []
        self._settle_at = float("inf")
        self._stopping = False
        self._leave_text = "the job is over"
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server(
            (bind_address, 0), family=socket.AF_INET6 if ":" in bind_address else socket.AF_INET,
            backlog=1024)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._selector.register(self._server, selectors.EVENT_READ)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)

    # --- Called by the thread that called run() ----------------------------------------------

    def open(self, code: bytes, environment: Mapping[str, Optional[str]],
             executable: Optional[str]) -> None:
        """Begins to answer. environment: what each rank gets besides its place."""
        self._code = code
        self._start = {"environment": dict(environment), "executable": executable}
        self.start()

    def results(self) -> List[bytes]:
        """By rank; only after done, without a failure."""
        tasks = sorted(self._tasks.values(), key=lambda task: task.place.rank)  # type: ignore
        return [b"".join(task.pieces) for task in tasks]

    def has_succeeded(self) -> bool:
        return self.done.is_set() and self.failure is None and self.crash is None

    def cause(self) -> Optional[Failure]:
        """The failure that explains the others."""
        return min(self._failures, key=Failure.doubt, default=None)

    def hosts(self) -> Dict[str, int]:
        """Names of the hosts that have registered, and how many tasks each has."""
        counts: Dict[str, int] = {}
        for task in list(self._tasks.values()):
            counts[task.told["name"]] = counts.get(task.told["name"], 0) + 1
        return counts

    def stop(self, text: str = "the job is over") -> None:
        """Tells every agent to end its rank and leave; `finished` is set when they have."""
        self._leave_text = text
        self._stopping = True
        try:
            self._waker.send(b"s")
        except OSError:
            pass  # it has finished

    # --- The desk's own thread ---------------------------------------------------------------

    def run(self) -> None:
        try:
            while not (self._stopping and not self._lines):
                self._turn()
        except BaseException as error:  # told to the caller of run()
            self.crash = error
        finally:
            for line in list(self._lines):
                line.close()
            self._server.close()
            self._wake.close()
            self._waker.close()
            self._selector.close()
            self.done.set()
            self.finished.set()

    def _turn(self) -> None:
        for key, _ in self._selector.select(0.1):
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj is self._wake:
                self._wake.recv(16)
                for line in list(self._lines):
                    self._dismiss(line)
            else:
                self._serve(key.fileobj)  # type: ignore
        for line in list(self._lines):
            if not line.is_open and time.monotonic() > line.opened_by:
                self._drop(line)
        if time.monotonic() >= self._settle_at and not self.done.is_set():
            self.failure = self.cause()
            self.done.set()

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:
            return
        if sum(not line.is_open for line in self._lines) >= MAX_STRANGERS:
            sock.close()
            return
        line = Line(sock, True, self._secret)
        self._lines[line] = None
        self._selector.register(line, selectors.EVENT_READ)

    def _serve(self, line: Line) -> None:
        if line not in self._lines:
            return
        try:
            if not line.shake():
                return
            for kind, payload in line.pump():
                self._hear(line, kind, payload)
                if line not in self._lines:
                    return  # the agent has gone, as was noticed when it was answered
            line.push()
            self._watch(line)
        except (ConnectionError, OSError, ValueError, KeyError, TypeError):
            self._drop(line)

    def _watch(self, line: Line) -> None:
        if line in self._lines:
            writes = selectors.EVENT_WRITE if line.wants_write() else 0
            self._selector.modify(line, selectors.EVENT_READ | writes)

    def _drop(self, line: Line) -> None:
        if line not in self._lines:
            return
        index = self._lines.pop(line)
        self._selector.unregister(line)
        line.close()
        task = self._tasks.get(index) if index is not None else None
        if (task is not None and task.line is line and not task.has_ended
                and not self._stopping):
            task.has_ended = True
            self._fail(task, None, None)

    def _dismiss(self, line: Line, again: bool = False) -> None:
        """again: Spark is to take the task for failed, and to start it anew."""
        try:
            if line.is_open:
                line.post_json(Kind.LEAVE, {"text": self._leave_text, "again": again})
                self._watch(line)
            else:
                self._drop(line)
        except (ConnectionError, OSError):
            self._drop(line)

    # --- What agents say ---------------------------------------------------------------------

    def _hear(self, line: Line, kind: int, payload: bytes) -> None:
        if kind == Kind.REGISTER:
            self._register(line, json.loads(payload))
            return
        index = self._lines[line]
        if index is None:
            raise ValueError("an agent that has not registered")
        task = self._tasks[index]
        place = task.place
        assert place is not None
        if kind == Kind.RUNNING:
            self.n_running += 1
        elif kind == Kind.STDOUT:
            self._output.take(place.rank, "stdout", payload)
        elif kind == Kind.STDERR:
            self._output.take(place.rank, "stderr", payload)
        elif kind == Kind.RESULT:
            task.pieces.append(payload)
        elif kind == Kind.ENDED:
            self._ended(task, json.loads(payload))

    def _register(self, line: Line, told: Dict[str, Any]) -> None:
        index = int(told["index"])
        if self._stopping:
            self._dismiss(line)
        elif index in self._tasks or not 0 <= index < self._n_tasks:
            # A second copy of a task, or a retry. It gets no answer until the job is over: if it
            # came to an end, Spark would take that for the end of the first one and kill it.
            if told["attempt"] > 0 and self._tasks[index].has_ended:
                self._fail(self._tasks[index], None, None)
        else:
            self._tasks[index] = Task(line, told)
            self._lines[line] = index
            self.n_registered = len(self._tasks)
            if self.n_registered == self._n_tasks:
                self._start_all()

    def _start_all(self) -> None:
        placed = plan.places({index: task.told["host"] for index, task in self._tasks.items()})
        for index, task in self._tasks.items():
            task.place = placed[index]
        for task in self._tasks.values():
            self._start_rank(task, task.place.environment())  # type: ignore

    def _start_rank(self, task: Task, place: Dict[str, str]) -> None:
        start = {**self._start, "environment": {**self._start["environment"], **place}}
        try:
            task.line.post_json(Kind.START, start)
            task.line.post(Kind.CODE, self._code)
            task.line.post(Kind.CODE)
            self._watch(task.line)
        except (ConnectionError, OSError):
            self._drop(task.line)

    def _ended(self, task: Task, told: Dict[str, Any]) -> None:
        task.has_ended = True
        assert task.place is not None
        self._output.end(task.place.rank)
        self._dismiss(task.line)
        if told["code"] != 0 or not told["has_result"]:
            self._fail(task, int(told["code"]), told["error"])
        elif self._all_have_ended():
            if self._failures:
                self._settle_at = 0.0
            else:
                self.done.set()

    def _fail(self, task: Task, code: Optional[int], error: Optional[Dict[str, Any]]) -> None:
        rank = task.place.rank if task.place is not None else -1
        failure = Failure(rank, task.told, code, error)
        self._failures.append(failure)
        # When all have ended there is nothing more to hear.
        listens = 0.0 if self._all_have_ended() else SETTLE_SECONDS[failure.doubt()]
        self._settle_at = min(self._settle_at, time.monotonic() + listens)

    def _all_have_ended(self) -> bool:
        return all(task.has_ended for task in self._tasks.values())
