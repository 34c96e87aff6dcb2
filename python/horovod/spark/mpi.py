# SPDX-License-Identifier: Apache-2.0
"""run(use_mpi=True): the ranks are started by Open MPI's mpirun, with Spark tasks as its hosts.

    driver   mpirun ── horovodrun --shell ──▶ session of the hosts ──▶ agent of a task ── orted
    host     daemon of mpirun ── this file: an agent too ──▶ session of the ranks

There are two sessions. The Spark tasks call that of the hosts, which then only carries: a command
of mpirun's to the first task of a host, its output and exit status back. The ranks' own agents call
an ordinary one, as the tasks do without MPI, so output, results and errors are no different.
"""
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from horovod.common.memory_file import memory_file
from horovod.runner.launch import find_launcher
from horovod.spark import agent
from horovod.spark.launch import WAIT_SECONDS, Call, SparkRun, describe
from horovod.spark.session import Failure, Session

NO_MPI = ("horovod does not find an installed MPI. use_mpi=True needs mpirun of Open MPI in PATH, "
          "on the driver and on all hosts; without use_mpi no MPI is needed.")
# How long mpirun may take to leave once all ranks have ended, or when it is told to.
LEAVE_SECONDS = 4.0
# How long a failed rank's own words may take when mpirun has left already.
WORDS_SECONDS = 3.0
# Where a process that mpirun starts finds the way to the driver.
LETTER_VARIABLE = "HOROVOD_SPARK_LETTER"


# By version of mpirun: how it is told a setting, and what it calls its remote shell.
Dialect = Tuple[str, str]
DIALECTS = {4: ("-mca", "rsh"), 5: ("--prtemca", "ssh")}


def find_mpirun(env: Mapping[str, Optional[str]]) -> Tuple[str, Dialect]:
    """The whole path: mpirun then tells its daemons where they are installed."""
    found = shutil.which("mpirun", path=env.get("PATH") or os.environ.get("PATH"))
    if found is None:
        raise Exception(NO_MPI)
    told = subprocess.run([found, "--version"], stdout=subprocess.PIPE, text=True,
                          stdin=subprocess.DEVNULL, timeout=60).stdout
    version = re.search(r"\(Open MPI\) (\d+)\.", told)
    if version is None:
        raise Exception(f"{NO_MPI} {found} says: {told.strip()[:80]!r}")
    return found, DIALECTS[max(min(int(version.group(1)), max(DIALECTS)), min(DIALECTS))]


def command_of(mpirun: str, dialect: Dialect, hosts: Dict[str, int], nics: Any,
               extra: Optional[str]) -> List[str]:
    """The command line; hosts in the order their ranks come."""
    setting, shell = dialect
    words = [mpirun, "-np", str(sum(hosts.values())),
             "-H", ",".join(f"{host}:{n}" for host, n in hosts.items()),
             "--map-by", "slot", "--bind-to", "none", "--leave-session-attached",
             setting, "plm", shell, setting, f"plm_{shell}_no_tree_spawn", "1",
             setting, f"plm_{shell}_agent", f"{find_launcher()} --shell", "-x", LETTER_VARIABLE]
    if nics:
        names = nics if isinstance(nics, str) else ",".join(nics)
        words += [setting, "oob_tcp_if_include", names]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    return words + shlex.split(extra or "")


class MpiRun(SparkRun):
    """One call of run(use_mpi=True)."""

    def __init__(self, sc: Any, start_timeout: float, call: Call, extra: Optional[str]) -> None:
        super().__init__(sc, start_timeout, call)
        self._extra = extra
        self._mpirun: Optional[subprocess.Popen] = None

    def carry_out(self, n: int, n_tasks: int, words: List[str]) -> List[bytes]:
        from pyspark import InheritableThread

        mpirun, dialect = find_mpirun(self.spec.environment)
        ranks = Session([*self.call.watching, *words], self.address, self.spec.secret,
                        self.call.code, self.output)
        digits = self.spec.secret.hex().encode()
        hosts = Session([*words, "--carry-commands"], self.address, self.spec.secret, digits,
                        self.output)
        secret_fd = memory_file("horovod secret", digits)
        spec = self.spec._replace(port=hosts.port)
        letter = self.spec._replace(port=ranks.port, secret=b"")
        try:
            self.thread = InheritableThread(target=self.spark_job, daemon=True, args=(n, spec))
            self.thread.start()
            self._await(lambda: "hosts" in hosts.told, hosts, n)
            tasks_of = {host: [int(task) for task in tasks.split(",")] for host, tasks in
                        (word.split("=") for word in hosts.told["hosts"])}
            devices = [hosts.agents[task][1:] for tasks in tasks_of.values() for task in tasks]
            # mpirun takes a colon in its shell's command for the end of it.
            given = {**spec.environment, "HOROVODRUN_DIAL": f"{spec.addresses[0]}:{spec.port}",
                     "HOROVODRUN_SECRET_FILE": f"/proc/{os.getpid()}/fd/{secret_fd}",
                     LETTER_VARIABLE: json.dumps([letter, devices], default=lambda value: "")}
            words = command_of(mpirun, dialect, {host: len(tasks_of[host]) for host in tasks_of},
                               self.call.nics, self._extra)
            self._mpirun = subprocess.Popen(
                [*words, self.call.executable or sys.executable, "-m", "horovod.spark.mpi"],
                env={**os.environ, **{name: value for name, value in given.items()
                                      if value is not None}},
                stdin=subprocess.DEVNULL, start_new_session=True)
            self._await(ranks.finished.is_set, ranks, n)
            if not ranks.has_succeeded():
                raise self._mpi_failure(ranks.failure)
            return ranks.results()
        finally:
            self._leave(ranks)
            self.end(hosts)
            ranks.close()
            os.close(secret_fd)

    def _await(self, is_so: Callable[[], bool], session: Session, n: int) -> None:
        """Raises if Spark, mpirun or the time ends first."""
        while not is_so():
            if session.finished.wait(WAIT_SECONDS) and not is_so():
                raise self.failure_of(session)
            self.check(session, n)
            if self._mpirun is not None and self._mpirun.poll() is not None:
                session.finished.wait(WORDS_SECONDS)
                if not is_so():
                    raise RuntimeError(f"mpirun failed with exit code {self._mpirun.returncode}")

    def _mpi_failure(self, failure: Optional[Failure]) -> Exception:
        assert self._mpirun is not None
        code, words = 1, "what its ranks said is above"
        if failure is not None:
            code = failure.code or 1
            words = (describe(failure) if failure.code is not None
                     else f"Lost the process of {failure.where()}.")
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is still ending the others
            code = self._mpirun.wait(WORDS_SECONDS)
        return RuntimeError(f"mpirun failed with exit code {code}\n{words}")

    def _leave(self, ranks: Session) -> None:
        """mpirun ends by itself when its ranks have; if not, it is told."""
        ranks.stop()
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if self._mpirun is None or self._mpirun.poll() is not None:
                return
            self._mpirun.send_signal(number)  # 0: none
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._mpirun.wait(LEAVE_SECONDS)


def main() -> int:
    """What mpirun starts for each rank does what a Spark task does, but its number is the rank that
    mpirun gave. The rank has mpirun's environment and can use MPI itself."""
    letter, devices = json.loads(os.environ.pop(LETTER_VARIABLE))
    with open(os.environ["HOROVOD_RUN_PAYLOAD"]) as file:  # of the agent that runs the daemon
        secret = bytes.fromhex(file.read())
    index = int(os.environ["OMPI_COMM_WORLD_RANK"])
    return agent.serve(agent.JobSpec(*letter)._replace(secret=secret), index, 0, devices[index])


if __name__ == "__main__":
    sys.exit(main())
