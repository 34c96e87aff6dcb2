# SPDX-License-Identifier: Apache-2.0
"""What a Spark task does for its rank: registers with the driver, starts the rank, carries bytes.

One thread, one loop. The agent calls the driver (never the other way round), proves the job's
secret and says where it is; the driver answers with the rank's place and the pickled function. The
function and the secret go to the rank as memory files it inherits, never as arguments or
environment. Output and result flow back as they come; when the driver says so or cannot be reached
any more, the rank is ended. The task itself returns nothing through Spark.
"""
import hashlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional

from horovod.common.memory_file import memory_file
from horovod.spark import rank, task
from horovod.spark.line import Frame, Kind, Line, dial, wait
from horovod.spark.notes import LOOK_SECONDS, Notes

PIPE_BYTES = 1 << 16
# No more is read from the rank while this much waits for the driver.
QUEUE_LIMIT_BYTES = 4 << 20
# How long a rank may take to exit after it has handed over its result.
LINGER_SECONDS = 30.0
FAREWELL_SECONDS = 60.0
# Where a process that mpirun starts finds the way to the driver.
LETTER_VARIABLE = "HOROVOD_SPARK_LETTER"
# What Spark puts into the environment of its driver and its workers for itself: whoever has one may
# do with the driver what he likes.
SPARK_SECRETS = ("PYSPARK_GATEWAY_SECRET", "PYTHON_WORKER_FACTORY_SECRET",
                 "SPARK_CONNECT_AUTHENTICATE_TOKEN", "_SPARK_AUTH_SECRET")


class JobSpec(NamedTuple):
    """What travels in Spark's closure."""
    addresses: List[str]
    port: int
    secret: bytes
    start_timeout: float


class DriverGone(Exception):
    pass


class RankFailed(Exception):
    """For Spark, which starts the task of an elastic rank again when it fails."""


def host_key() -> str:
    """Equal for tasks on one machine in the same namespaces: containers are their own hosts."""
    parts = [platform.node(), os.environ.get("CONTAINER_ID", "")]
    for name in ("cgroup", "ipc", "mnt", "net", "user", "uts"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            pass
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{platform.node().split('.')[0]}-{digest[:12]}"


def serve(spec: JobSpec, index: int, attempt: int, devices: List[str], cpus: int) -> int:
    """The whole life of one task; the exit status of its rank."""
    deadline = time.monotonic() + spec.start_timeout
    line = dial(spec.addresses, spec.port, spec.secret, deadline)
    try:
        line.post_json(Kind.REGISTER, {
            "index": index, "attempt": attempt, "host": host_key(), "name": platform.node(),
            "pid": os.getpid(), "devices": devices, "cpus": cpus})
        agent = Agent(line, spec.secret, devices)
        code = agent.run()
        if agent.comes_again:
            raise RankFailed(f"the rank of task {index} ended with exit code {code}")
        return code
    except (DriverGone, ConnectionError):
        return 1  # the driver knows, or is no more
    finally:
        line.close()


def serve_partition(spec: JobSpec, indexes: Iterable[int]) -> Iterator[Any]:
    """For mapPartitions: one element, the partition's number."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    for index in indexes:
        serve(spec, index, context.attemptNumber(), task.get_available_devices(), context.cpus())
    return iter(())


def read_letter() -> Dict[str, Any]:
    """What whoever started mpirun, or its daemon, has left for the processes started by it."""
    with open(os.environ[LETTER_VARIABLE]) as file:
        return json.load(file)


class Agent:
    def __init__(self, line: Line, secret: bytes, devices: List[str]) -> None:
        self._line = line
        self._secret = secret
        self._devices = devices
        self._frames: List[Frame] = []
        self._process: Optional[subprocess.Popen] = None
        self._life_fd = -1
        self._fds: List[int] = []  # kept until the rank is gone
        self._error: Optional[Dict[str, Any]] = None
        self._part = b""  # which part of the rank's report is being read
        self._error_text = bytearray()
        self._has_result = False
        self._notes: Optional[Notes] = None  # of an elastic rank
        self.comes_again = False  # Spark is to start this task anew

    def run(self) -> int:
        start = self._await_start()
        if start is None:
            return 1
        # With a command there is no function: the ranks it starts will get theirs.
        code_fd = memory_file("no function") if "command" in start else self._await_code()
        try:
            code = self._carry(self._spawn(start, code_fd))
            self._say_farewell()
        finally:
            self._kill()
            if self._notes is not None:
                self._notes.close()
        return code

    # --- Before the rank ---------------------------------------------------------------------

    def _next_frame(self) -> Frame:
        while not self._frames:
            self._line.push()
            wait(self._line, 1.0)
            try:
                self._frames = self._line.pump()
            except ConnectionError as error:
                raise DriverGone from error
        return self._frames.pop(0)

    def _await_start(self) -> Optional[Dict[str, Any]]:
        kind, payload = self._next_frame()
        return json.loads(payload) if kind == Kind.START else None

    def _await_code(self) -> int:
        fd = memory_file("horovod function")
        try:
            while True:
                kind, payload = self._next_frame()
                if kind != Kind.CODE:
                    raise DriverGone  # it has thought better of it
                if not payload:
                    return fd
                rank.write_all(fd, payload)
        except BaseException:
            os.close(fd)
            raise

    def _environment(self, start: Dict[str, Any], secret_fd: int) -> Dict[str, str]:
        given = start["environment"]
        merged = {**os.environ, **given}
        if "command" not in start and shows_own_devices(merged, given, self._devices):
            merged["CUDA_VISIBLE_DEVICES"] = visible_devices(
                self._devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if given.get("PYTHONPATH", "") is not None:
            merged["PYTHONPATH"] = python_path(merged, given)
        environment = {name: value for name, value in merged.items()
                       if value is not None and name not in SPARK_SECRETS}
        environment.update(PYTHONUNBUFFERED="1", HOROVOD_HOSTNAME=host_key(),
                           HOROVOD_SECRET_FILE=f"/proc/self/fd/{secret_fd}",
                           HOROVOD_SPARK_WORK_DIR=os.getcwd())
        environment[task.DEVICES_VARIABLE] = ",".join(self._devices)
        if "HOROVOD_ELASTIC_WORKER" in environment:
            self._notes = Notes(environment["HOROVOD_ELASTIC_WORKER"])
            environment.update(self._notes.environment())
        if "letter" in start:  # a launcher between us and the ranks closes what they inherit
            fd = memory_file("horovod letter", json.dumps(
                {**start["letter"], "secret": self._secret.hex()}).encode())
            self._fds.append(fd)
            environment[LETTER_VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}"
        return environment

    def _spawn(self, start: Dict[str, Any], code_fd: int) -> int:
        """Starts the warden, which starts the rank; the descriptor results come from."""
        secret_fd = memory_file("horovod secret", self._secret.hex().encode())
        result_fd, result_end = os.pipe()
        self._fds.append(result_fd)
        life_end, self._life_fd = os.pipe()
        given = (code_fd, secret_fd, result_end, life_end)
        executable = start.get("executable") or sys.executable
        try:
            self._process = subprocess.Popen(
                [executable, "-m", "horovod.spark.warden", str(code_fd), str(result_end),
                 str(life_end)] + start.get("command", []),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=given, env=self._environment(start, secret_fd))
        except OSError as error:
            self._report_ended(1, {"type": type(error).__name__, "traceback": "",
                                   "text": f"cannot start {executable}: {error}"})
            raise DriverGone from error
        finally:
            for fd in given:
                os.close(fd)
        return result_fd

    # --- While the rank runs -----------------------------------------------------------------

    def _carry(self, result_fd: int) -> int:
        """Until the rank has ended; its exit status."""
        process = self._process
        assert process is not None and process.stdout and process.stderr
        kinds = {process.stdout.fileno(): Kind.STDOUT, process.stderr.fileno(): Kind.STDERR,
                 result_fd: Kind.RESULT}
        kill_at = float("inf")
        early, self._frames = self._frames, []  # what came together with the function
        self._obey(early)
        while kinds:
            reads: List[Any] = [self._line]
            if self._line.n_queued_bytes < QUEUE_LIMIT_BYTES:
                reads += kinds
            writes = [self._line] if self._line.wants_write() else []
            readable, _, _ = select.select(reads, writes, [],
                                           LOOK_SECONDS if self._notes is not None else 1.0)
            for fd in readable:
                if fd is self._line:
                    self._listen()
                    continue
                data = os.read(fd, PIPE_BYTES)
                if data and kinds[fd] == Kind.RESULT:
                    self._take_report(data)
                elif data:
                    self._line.post(kinds[fd], data)
                else:
                    if kinds[fd] == Kind.RESULT:
                        kill_at = time.monotonic() + LINGER_SECONDS
                    del kinds[fd]
            self._tell_ready()
            self._line.push()
            if time.monotonic() > kill_at:
                self._end_rank()
        code = process.wait()
        lingered = self._has_result and time.monotonic() > kill_at
        if self._error_text:
            self._error = json.loads(self._error_text.decode())
        code = 0 if lingered else code if code >= 0 else 128 - code
        self._report_ended(code, self._error)
        return code

    def _listen(self) -> None:
        try:
            self._obey(self._line.pump())
        except ConnectionError as error:
            raise DriverGone from error

    def _obey(self, frames: List[Frame]) -> None:
        for kind, payload in frames:
            if kind == Kind.LEAVE:
                self._end_rank()
            elif self._notes is not None and kind == Kind.PLACE:
                self._notes.place(json.loads(payload))
            elif self._notes is not None and kind == Kind.NEWS:
                self._notes.news(**json.loads(payload))

    def _tell_ready(self) -> None:
        left = self._notes.newly_left() if self._notes is not None else None
        if left is not None:
            self._line.post_json(Kind.READY, {"generation": left})

    def _take_report(self, data: bytes) -> None:
        """The rank's own report: RUNNING, then RESULT or ERROR with what follows."""
        if self._part == b"" and data[:1] == rank.RUNNING:
            self._line.post(Kind.RUNNING)
            data = data[1:]
            self._part = rank.RUNNING
        if self._part in (b"", rank.RUNNING) and data:
            self._part, data = data[:1], data[1:]
            self._has_result = self._part == rank.RESULT
        if self._part == rank.ERROR:
            self._error_text += data
        elif self._part == rank.RESULT and data:
            self._line.post(Kind.RESULT, data)

    def _report_ended(self, code: int, error: Optional[Dict[str, Any]]) -> None:
        self._line.post_json(Kind.ENDED, {"code": code, "error": error,
                                          "has_result": self._has_result})

    # --- The end -----------------------------------------------------------------------------

    def _end_rank(self) -> None:
        if self._life_fd >= 0:
            try:
                os.write(self._life_fd, b"T")
            except BrokenPipeError:
                pass  # it has just ended by itself

    def _kill(self) -> None:
        """The warden sees the end of its pipe and kills; it is waited for, but not for ever."""
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)  # the rank goes with its warden
                self._process.wait()
        for fd in self._fds:
            os.close(fd)

    def _say_farewell(self) -> None:
        """Stays until the driver has everything, and says so."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        while time.monotonic() < deadline:
            kind, payload = self._next_frame()
            if kind == Kind.LEAVE:
                self.comes_again = json.loads(payload)["again"]
                return


def python_path(environment: Dict[str, Optional[str]], given: Dict[str, Optional[str]]) -> str:
    """Modules the worker can import, the rank can: Spark adds folders of its own. What the user
    wants first comes first."""
    wanted = [environment.get("HOROVOD_SPARK_PYTHONPATH"), given.get("PYTHONPATH")]
    added = [path for path in sys.path if not path.startswith((sys.base_prefix, sys.prefix))]
    texts = [*wanted, *added, os.environ.get("PYTHONPATH")]
    return os.pathsep.join(dict.fromkeys(
        path for text in texts if text for path in text.split(os.pathsep) if path))


def shows_own_devices(environment: Dict[str, Optional[str]], given: Dict[str, Optional[str]],
                      devices: List[str]) -> bool:
    """Is the rank to see the GPUs of its task only? Not if the user has decided otherwise."""
    return (bool(devices) and "CUDA_VISIBLE_DEVICES" not in given
            and environment.get("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX") != "1")


def visible_devices(devices: List[str], visible: Optional[str]) -> str:
    """Spark counts the devices its executor sees; CUDA may know them by other names."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    return ",".join(names[int(device)] if device.isdigit() and int(device) < len(names) else device
                    for device in devices)
