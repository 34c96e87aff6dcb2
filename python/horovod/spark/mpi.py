# SPDX-License-Identifier: Apache-2.0
"""run(use_mpi=True): the ranks are started by Open MPI's mpirun, with Spark tasks as its hosts.

    driver   mpirun ── horovodrun --shell ──▶ session of the hosts ──▶ agent of a task ── orted
    host     daemon of mpirun ── mpi_rank.py: an agent too ──▶ session of the ranks

There are two sessions. The Spark tasks call that of the hosts, which then only carries: a command
of mpirun's to the first task of a host, its output and exit status back. The ranks' own agents call
an ordinary one, as the tasks do without MPI, so output, results and errors are no different.
"""
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from horovod.common.memory_file import memory_file
from horovod.runner.launch import find_launcher
from horovod.spark import slots
from horovod.spark.agent import JobSpec
from horovod.spark.launch import (WAIT_SECONDS, Call, SparkRun, bind_address, describe,
                                  driver_addresses)
from horovod.spark.session import Session

NO_MPI = ("horovod does not find an installed MPI. use_mpi=True needs mpirun of Open MPI in PATH, "
          "on the driver and on all hosts; without use_mpi no MPI is needed.")
# How long mpirun may take to leave once all ranks have ended, or when it is told to.
LEAVE_SECONDS = 4.0
# How long a failed rank's own words may take when mpirun has left already.
WORDS_SECONDS = 3.0
# Where a process that mpirun starts finds the way to the driver.
LETTER_VARIABLE = "HOROVOD_SPARK_LETTER"


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
             dialect.setting, dialect.agent, f"{find_launcher()} --shell", "-x", LETTER_VARIABLE,
             dialect.setting, dialect.no_tree, "1"]
    if nics:
        names = nics if isinstance(nics, str) else ",".join(nics)
        words += [dialect.setting, "oob_tcp_if_include", names]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    return words + shlex.split(extra or "")


class MpiRun(SparkRun):
    """One call of run(use_mpi=True)."""

    def __init__(self, sc: Any, start_timeout: float, profile: Any, nics: Any,
                 extra_mpi_args: Optional[str]) -> None:
        super().__init__(sc, start_timeout, profile)
        self._nics = nics
        self._extra = extra_mpi_args
        self._mpirun: Optional[subprocess.Popen] = None

    def _carry_out(self, n: int, n_tasks: int, words: List[str], call: Call,
                   max_failures: int = 0) -> List[bytes]:
        mpirun = find_mpirun(call.environment)
        dialect = dialect_of(mpirun)
        here = bind_address(self.sc)
        ranks = Session(words, here, self._secret, call.code, call.output)
        hosts = Session([*words, "--carry-commands"], here, self._secret,
                        self._secret.hex().encode(), call.output)
        secret_fd = memory_file("horovod secret", self._secret.hex().encode())
        try:
            ranks.wait_until_open()
            hosts.wait_until_open()
            addresses = driver_addresses(self.sc)
            self._submit(n, JobSpec(addresses, hosts.port, self._secret, self.start_timeout,
                                    call.environment, call.executable))
            self._await(lambda: bool(hosts.tasks_of), hosts, n)
            words = command_of(mpirun, dialect,
                               {host: len(tasks) for host, tasks in hosts.tasks_of.items()},
                               self._nics, self._extra)
            # mpirun takes a colon in its shell's command for the end of it.
            shell = {"HOROVODRUN_DIAL": f"{addresses[0]}:{hosts.port}",
                     "HOROVODRUN_SECRET_FILE": f"/proc/{os.getpid()}/fd/{secret_fd}"}
            letter = JobSpec(addresses, ranks.port, b"", self.start_timeout, call.environment,
                             call.executable)
            devices = [hosts.devices_of(task) for tasks in hosts.tasks_of.values()
                       for task in tasks]
            self._launch([*words, call.executable or sys.executable, "-m",
                          "horovod.spark.mpi_rank"], {**call.environment, **shell},
                         [letter, devices])
            self._await(ranks.finished.is_set, ranks, n)
            if not ranks.has_succeeded():
                raise self._mpi_failure(ranks)
            return ranks.results()
        finally:
            self._leave(ranks)
            self._end(hosts)
            ranks.close()
            os.close(secret_fd)

    def _launch(self, words: List[str], environment: Dict[str, Optional[str]],
                letter: List[Any]) -> None:
        """mpirun, with a letter for the processes it will start. It reads nothing."""
        own = {**os.environ, LETTER_VARIABLE: json.dumps(
            letter, default=lambda value: "")}
        own.update({name: value for name, value in environment.items() if value is not None})
        self._mpirun = subprocess.Popen(words, env=own, stdin=subprocess.DEVNULL,
                                        start_new_session=True)

    def _await(self, is_so: Callable[[], bool], session: Session, n: int) -> None:
        """Raises if Spark, mpirun or the time ends first."""
        while not is_so():
            session.finished.wait(WAIT_SECONDS)
            if self._is_over(session) and not is_so():
                raise self._spark_failure()
            if self._mpirun is not None and self._mpirun.poll() is not None:
                session.finished.wait(WORDS_SECONDS)
                if is_so():
                    return
                raise RuntimeError(f"mpirun failed with exit code {self._mpirun.returncode}")
            if session.n_running < n and time.monotonic() >= self.deadline:
                raise slots.timed_out(self._how_far(session, n), self.start_timeout)
            if session.finished.is_set() and not is_so():
                raise self._failure_of(session)

    def _mpi_failure(self, ranks: Session) -> Exception:
        assert self._mpirun is not None
        failure = ranks.failure
        code: Optional[int] = failure.code or 1 if failure is not None else 1
        try:
            code = self._mpirun.wait(WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # it is still ending the others
        if failure is None:
            words = "what its ranks said is above"
        else:
            words = (describe(failure) if failure.code is not None
                     else f"Lost the process of {failure.where()}.")
        return RuntimeError(f"mpirun failed with exit code {code}\n{words}")

    def _leave(self, ranks: Session) -> None:
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
