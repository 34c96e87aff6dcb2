# SPDX-License-Identifier: Apache-2.0
"""run(use_mpi=True): the ranks are started by Open MPI's mpirun, with Spark tasks as its hosts.

    driver   mpirun ── shell.py ──▶ HostDesk ──▶ agent of a task ── warden ── orted or prted
    host     daemon of mpirun ── mpi_rank.py, an agent too ── warden ── rank

There are two desks. The Spark tasks call the HostDesk, which then only carries: a command of
mpirun's to the first task of a host, its output and exit status back. The ranks' own agents call
an ordinary Desk, as the tasks do without MPI, so output, results and errors are no different.
"""
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional

from horovod.common.memory_file import memory_file
from horovod.spark import agent, plan, slots
from horovod.spark.driver import Desk, Task
from horovod.spark.launch import WAIT_SECONDS, Call, SparkRun, describe
from horovod.spark.line import Kind, Line
from horovod.spark.output import Output

NO_MPI = ("horovod does not find an installed MPI. use_mpi=True needs mpirun of Open MPI in PATH, "
          "on the driver and on all hosts; without use_mpi no MPI is needed.")
# How long mpirun may take to leave once all ranks have ended, or when it is told to.
LEAVE_SECONDS = 4.0
# How long a failed rank's own words may take when mpirun has left already.
WORDS_SECONDS = 3.0


class Dialect(NamedTuple):
    """How a version of mpirun wants to be told."""
    setting: str
    agent: str
    no_tree: str


DIALECTS = {4: Dialect("-mca", "plm_rsh_agent", "plm_rsh_no_tree_spawn"),
            5: Dialect("--prtemca", "plm_ssh_agent", "plm_ssh_no_tree_spawn")}


def find_mpirun(env: Dict[str, Optional[str]]) -> str:
    """The whole path: mpirun then tells its daemons where they are installed."""
    path = env.get("PATH") or os.environ.get("PATH")
    found = shutil.which("mpirun", path=path)
    if found is None:
        raise Exception(NO_MPI)
    return found


def dialect_of(mpirun: str) -> Dialect:
    told = subprocess.run([mpirun, "--version"], stdout=subprocess.PIPE, text=True,
                          stdin=subprocess.DEVNULL, timeout=60).stdout
    version = re.search(r"\(Open MPI\) (\d+)\.", told)
    if version is None:
        raise Exception(f"{NO_MPI} {mpirun} says: {told.strip()[:80]!r}")
    return DIALECTS[max(min(int(version.group(1)), max(DIALECTS)), min(DIALECTS))]


def command_of(mpirun: str, dialect: Dialect, hosts: Dict[str, int], nics: Any,
               extra: Optional[str]) -> List[str]:
    """The command line; hosts in the order their ranks come."""
    words = [mpirun, "-np", str(sum(hosts.values())),
             "-H", ",".join(f"{host}:{n}" for host, n in hosts.items()),
             "--map-by", "slot", "--bind-to", "none", "--leave-session-attached",
             dialect.setting, "plm", "rsh" if "rsh" in dialect.agent else "ssh",
             dialect.setting, dialect.agent, f"{sys.executable} -m horovod.spark.shell",
             dialect.setting, dialect.no_tree, "1"]
    if nics:
        names = nics if isinstance(nics, str) else ",".join(nics)
        words += [dialect.setting, "oob_tcp_if_include", names]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    return words + shlex.split(extra or "")


class HostDesk(Desk):
    """The desk the Spark tasks call: it waits for all, then carries commands to them."""

    def __init__(self, n_tasks: int, secret: bytes, bind_address: str, output: Output) -> None:
        super().__init__(n_tasks, secret, bind_address, output)
        self.gathered = threading.Event()
        self.letter: Dict[str, Any] = {}  # for the ranks; set before mpirun starts
        self._shells: Dict[int, Line] = {}  # of the task that runs a command for it

    def counts(self) -> Dict[str, int]:
        """The hosts in the order their ranks come, and how many each has."""
        host_of = {index: task.told["host"] for index, task in self._tasks.items()}
        return {host: list(host_of.values()).count(host)
                for host in plan.hosts_in_order(host_of)}

    def _start_all(self) -> None:
        placed = plan.places({index: task.told["host"] for index, task in self._tasks.items()})
        for index, task in self._tasks.items():
            task.place = placed[index]
        self.gathered.set()

    def _hear(self, line: Line, kind: int, payload: bytes) -> None:
        index = self._lines[line]
        if kind == Kind.SHELL:
            self._run(line, **json.loads(payload))
        elif kind in (Kind.STDOUT, Kind.STDERR) and index in self._shells:
            self._answer(index, Kind(kind), payload)
        else:
            super()._hear(line, kind, payload)

    def _answer(self, index: int, kind: Kind, payload: bytes) -> None:
        shell = self._shells[index]
        if shell in self._lines:
            shell.post(kind, payload)
            self._watch(shell)

    def _run(self, shell: Line, host: str, command: str) -> None:
        """On the first task of the host; a host has one daemon."""
        free = [index for index, task in sorted(self._tasks.items())
                if task.told["host"] == host and index not in self._shells]
        if not free:
            raise ValueError(f"mpirun asks for {host}, where no task runs")
        devices = {str(task.place.rank): task.told["devices"] for task in self._tasks.values()
                   if task.place is not None and task.told["host"] == host}
        self._shells[free[0]] = shell
        line = self._tasks[free[0]].line
        line.post_json(Kind.START, {**self._start, "command": [command],
                                    "letter": {**self.letter, "devices": devices}})
        self._watch(line)

    def _ended(self, task: Task, told: Dict[str, Any]) -> None:
        """A daemon has ended. That its ranks have failed, if so, is heard elsewhere."""
        task.has_ended = True
        for index, other in self._tasks.items():
            if other is task:
                self._answer(index, Kind.ENDED, str(told["code"]).encode())
        self._dismiss(task.line)


class MpiRun(SparkRun):
    """One call of run(use_mpi=True)."""

    def __init__(self, sc: Any, start_timeout: float, profile: Any, nics: Any,
                 extra_mpi_args: Optional[str]) -> None:
        super().__init__(sc, start_timeout, profile)
        self._nics = nics
        self._extra = extra_mpi_args
        self._mpirun: Optional[subprocess.Popen] = None

    def _carry_out(self, n: int, call: Call, here: str, addresses: List[str]) -> List[bytes]:
        mpirun = find_mpirun(call.environment)
        dialect = dialect_of(mpirun)
        hosts = HostDesk(n, self._secret, here, call.output)
        ranks = Desk(n, self._secret, here, call.output)
        try:
            ranks.open(call.code, call.environment, call.executable)
            hosts.letter = {"addresses": addresses, "port": ranks.port,
                            "start_timeout": self.start_timeout}
            hosts.open(b"", call.environment, call.executable)
            self._submit(n, agent.JobSpec(addresses, hosts.port, self._secret, self.start_timeout))
            self._await(hosts.gathered, hosts, n)
            words = command_of(mpirun, dialect, hosts.counts(), self._nics, self._extra)
            self._launch(words + [call.executable or sys.executable, "-m",
                                  "horovod.spark.mpi_rank"], call.environment,
                         {**hosts.letter, "port": hosts.port})
            self._await(ranks.done, ranks, n)
            if ranks.failure is not None:
                raise self._mpi_failure(ranks)
        finally:
            self._leave(ranks)
            self._end(hosts)
        return ranks.results()

    def _launch(self, words: List[str], environment: Dict[str, Optional[str]],
                letter: Dict[str, Any]) -> None:
        """mpirun, with a letter for the remote shells it will start. It reads nothing."""
        self._letter_fd = memory_file("horovod letter", json.dumps(
            {**letter, "secret": self._secret.hex()}).encode())
        own = {**os.environ,
               agent.LETTER_VARIABLE: f"/proc/{os.getpid()}/fd/{self._letter_fd}"}
        own.update({name: value for name, value in environment.items() if value is not None})
        self._mpirun = subprocess.Popen(words, env=own, stdin=subprocess.DEVNULL,
                                        start_new_session=True)

    def _await(self, event: threading.Event, desk: Desk, n: int) -> None:
        """Until the event; raises if Spark, mpirun or the time ends first."""
        while not event.wait(WAIT_SECONDS):
            if self._is_over(desk) and not event.is_set():
                raise self._spark_failure()
            if self._mpirun is not None and self._mpirun.poll() is not None:
                if event.wait(WORDS_SECONDS):
                    return
                raise RuntimeError(f"mpirun failed with exit code {self._mpirun.returncode}")
            if desk.n_running < n and time.monotonic() >= self.deadline:
                raise slots.timed_out(self._how_far(desk, n), self.start_timeout)
            if desk.failure is not None:
                raise self._rank_failure(desk.failure)

    def _mpi_failure(self, ranks: Desk) -> Exception:
        assert self._mpirun is not None and ranks.failure is not None
        failure = ranks.failure
        ranks.stop()
        code: Optional[int] = failure.code or 1
        try:
            code = self._mpirun.wait(WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # it is still ending the others
        words = describe(failure) if failure.code is not None else (
            f"Lost the process of {failure.where()}.")
        return RuntimeError(f"mpirun failed with exit code {code}\n{words}")

    def _leave(self, ranks: Desk) -> None:
        """mpirun ends by itself when its ranks have; if not, it is told."""
        ranks.stop()
        if self._mpirun is None:
            return
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            try:
                if number:
                    self._mpirun.send_signal(number)
                self._mpirun.wait(LEAVE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        os.close(self._letter_fd)
