# SPDX-License-Identifier: Apache-2.0
"""horovod.spark.run: a Horovod job on the task slots of a Spark application.

The Spark job runs in a thread of its own, so that the calling thread can wait in short steps:
Ctrl-C, a failed rank and a failed Spark job all end up in the same place, which ends the session
(session.py) and so its agents and ranks, cancels the job group if that is not enough, and raises. A
barrier job is used unless dynamic allocation is on, which Spark does not allow together: then plain
tasks, and the session refuses copies and retries.
"""
import contextlib
import functools
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, TextIO, Tuple

import cloudpickle

from horovod.runner import FAILED, watching_words
from horovod.runner.script import Function, call_of
from horovod.spark import slots
from horovod.spark.agent import JobSpec, serve_partition
from horovod.spark.session import Failure, Output, Session

DEFAULT_START_TIMEOUT = 600.0
START_TIMEOUT_VARIABLE = "HOROVOD_SPARK_START_TIMEOUT"
WAIT_SECONDS = 0.1
# How often to look for slots that come later than they were counted.
LOOK_SECONDS = 5.0
# How long agents have to end their ranks before Spark is asked to; Spark then needs some seconds.
LEAVE_SECONDS = 4.0
CANCEL_SECONDS = 10.0
MOMENT_SECONDS = 0.5
# After the end of Spark's job: a rank's failure may be its cause, and is about to be told.
SETTLE_SECONDS = 3.0
# Tasks that have all ended well have told the session everything, and it may be busy with that.
DRAIN_SECONDS = 60.0
# How long to wait for Spark's own words about a task that is gone.
SPARK_WORDS_SECONDS = 3.0

_group_numbers = itertools.count()


def run(fn: Function, args: Any = (), kwargs: Optional[Mapping[str, Any]] = None,
        num_proc: Optional[int] = None, start_timeout: Optional[float] = None,
        use_mpi: Optional[bool] = None, use_gloo: Optional[bool] = None,
        extra_mpi_args: Optional[str] = None, env: Optional[Mapping[str, Optional[str]]] = None,
        stdout: Optional[TextIO] = None, stderr: Optional[TextIO] = None, verbose: int = 1,
        nics: Any = None, prefix_output_with_timestamp: bool = False,
        executable: Optional[str] = None, *, resource_profile: Any = None, dashboard: Any = None,
        report: Any = None) -> List[Any]:
    """Runs fn(*args, **kwargs) on num_proc Spark tasks as one Horovod job; results by rank.

    fn: a function, or the name of a Python file, which every rank runs as a script with args as
    sys.argv; its results are None.
    num_proc: default: all task slots. start_timeout: seconds until all tasks must run the function;
    default: HOROVOD_SPARK_START_TIMEOUT, or 600. env: variables for the ranks, besides the
    executors' own; None removes one. stdout, stderr: files that get the ranks' lines, each with
    "[rank]<stdout>:" in front; default: this process's own, without. verbose 0: says nothing
    itself. nics: network interfaces to use. executable: the ranks' Python; default: that of the
    Spark workers. resource_profile: a pyspark.resource.ResourceProfile for the tasks.
    use_mpi: the ranks are started by mpirun of Open MPI, with extra_mpi_args; the default needs no
    MPI, and use_gloo means just that. dashboard: True shows the job on a page of the driver, whose
    address is printed; a number is its port. report: file for that page when the job is over.
    """
    if use_mpi and use_gloo:
        raise ValueError("use_mpi and use_gloo are both set: choose one")
    if use_mpi and isinstance(env, os._Environ):
        raise Exception(f"env argument must be a dict, not {type(env)}: copy it with dict(env) and "
                        "leave out what belongs to this host only")
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"num_proc is {num_proc}: at least one process is needed")
    wait = start_timeout_of(start_timeout)
    if callable(fn):
        work: Any = fn, tuple(args), dict(kwargs or {})
    else:
        work = call_of(fn, args, kwargs)
    call = Call(cloudpickle.dumps(work, protocol=5), env, nics, stdout, stderr,
                prefix_output_with_timestamp, executable, resource_profile, verbose,
                watching_words(dashboard, report, "horovod.spark.run", fn))
    session, context = find_spark()
    if session is not None:
        from horovod.spark import connect

        if dashboard or report:
            raise ValueError("dashboard and report are not possible with Spark Connect: the "
                             "launcher, which shows the page, is in an executor then")
        if use_mpi:
            raise ValueError("use_mpi=True is not possible with Spark Connect: executors cannot "
                             "call this process, where mpirun would be")
        return load_results(connect.run(session, num_proc, wait, call))
    if use_mpi:
        from horovod.spark.mpi import MpiRun

        job: SparkRun = MpiRun(context, wait, call, extra_mpi_args)
    else:
        job = SparkRun(context, wait, call)
    return job.run(num_proc)


def find_spark() -> Tuple[Any, Any]:
    """(session, None) if the active session is one of Spark Connect, else (None, the context)."""
    try:
        from pyspark.sql.utils import is_remote

        if is_remote():
            from pyspark.sql.connect.session import SparkSession

            session = SparkSession.getActiveSession()
            if session is not None:
                return session, None
    except ImportError:
        pass
    from pyspark import SparkContext

    sc = SparkContext._active_spark_context
    if sc is None or sc._jsc is None:
        raise Exception("Could not find an active SparkContext, are you running in a PySpark "
                        "session?")
    return None, sc


def start_timeout_of(given: Optional[float], variable: str = START_TIMEOUT_VARIABLE) -> float:
    """As given, or as in the environment; seconds."""
    asked = given if given is not None else os.environ.get(variable) or DEFAULT_START_TIMEOUT
    try:
        seconds = float(asked)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        argument = variable.removeprefix("HOROVOD_").removeprefix("SPARK_").lower()
        said_as = variable if given is None else argument
        raise ValueError(f"{said_as} is {asked!r}: a number of seconds is needed, such as 600")
    return seconds


def resolved(name: str) -> str:
    """The address of this host's that has the name; 0.0.0.0 if none has."""
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
        return str(address[0])
    except OSError:
        return "0.0.0.0"


class Call(NamedTuple):
    """What is to be run, and how: the arguments of run()."""
    code: bytes  # the function and its arguments, pickled before anything is started
    env: Optional[Mapping[str, Optional[str]]]
    nics: Any
    stdout: Optional[TextIO]
    stderr: Optional[TextIO]
    timestamp: bool
    executable: Optional[str]
    profile: Any
    verbose: int
    watching: List[str]  # of horovodrun, about its page

    def tell(self, text: str) -> None:
        if self.verbose >= 1:
            print(text, flush=True)

    def environment(self, conf: Any, start_timeout: float) -> Dict[str, Optional[str]]:
        """What the ranks get besides the executors' environment and their place."""
        environment: Dict[str, Optional[str]] = {
            "HOROVOD_START_TIMEOUT": f"{min(max(start_timeout, 1.0), 86400.0):g}"}  # knob's range
        cpus = self.profile.taskResources.get("cpus") if self.profile is not None else None
        if cpus is not None:  # Spark 3.5 goes by spark.task.cpus, whatever the profile says
            environment["OMP_NUM_THREADS"] = str(int(cpus.amount))
        private = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption",
                   "spark.ssl.enabled")
        if "true" in [conf.get(key, "false").lower() for key in private]:
            environment["HOROVOD_ENCRYPT"] = "always"  # as private as the rest of the application
        if self.nics:
            environment["HOROVOD_GLOO_IFACE"] = (self.nics if isinstance(self.nics, str)
                                                 else ",".join(self.nics))
        return {**environment, **(self.env or {})}


class SparkRun:
    """One call of run(), from the secret to the results."""

    def __init__(self, sc: Any, start_timeout: float, call: Call) -> None:
        conf = sc.getConf()
        self.sc, self.call, self.start_timeout = sc, call, start_timeout
        self.deadline = time.monotonic() + start_timeout
        self.is_local = sc.master.startswith("local")  # driver and tasks are on one machine
        self.is_dynamic = conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true"
        forced = os.environ.get("HOROVOD_SPARK_BARRIER", "")  # one kind of job
        self.is_barrier = forced == "1" if forced in ("0", "1") else not self.is_dynamic
        # Tasks find the driver where Spark says; it listens where Spark does, or everywhere.
        driver = "127.0.0.1" if self.is_local else conf.get("spark.driver.host")
        self.address = (driver if self.is_local
                        else resolved(conf.get("spark.driver.bindAddress", driver)))
        self.spec = JobSpec([driver], 0, secrets.token_bytes(32), start_timeout,
                            call.environment(conf, start_timeout), call.executable)
        shows_bar = conf.get("spark.ui.showConsoleProgress", "false").lower() == "true"
        self.output = Output(call.stdout, call.stderr, call.timestamp,
                             shows_bar and call.stdout is None and sys.stdout.isatty())
        self._group = f"horovod.spark.run.{next(_group_numbers)}"
        self._n_all = 0  # task slots, if all there are have been taken
        self._look = 0.0  # when to look for others
        self._spark_error: Optional[BaseException] = None
        self.thread: Optional[threading.Thread] = None

    def run(self, num_proc: Optional[int]) -> List[Any]:
        """The results, by rank."""
        profile, where = self.call.profile, ""
        n = num_proc or slots.default_num_proc(self.sc, self.deadline, profile, tell=self.call.tell)
        is_asked_for = num_proc or self.sc.getConf().get("spark.default.parallelism")
        if not (is_asked_for or self.is_dynamic or self.is_local):
            self._n_all = n
            where = f" on {slots.plural(slots.executors(self.sc)[1], 'host')}"
        self.call.tell(f"Running {n} process{'' if n == 1 else 'es'}{where}...")
        if is_asked_for and not self.is_dynamic:
            slots.wait_for(self.sc, n, self.deadline, self.start_timeout, profile)
        return load_results(self.carry_out(n, n, ["-np", str(n)]))

    def carry_out(self, n: int, n_tasks: int, words: List[str]) -> List[bytes]:
        """The pickled results. n: how many ranks it begins with."""
        from pyspark import InheritableThread

        self.session = session = Session([*self.call.watching, *words], self.address,
                                         self.spec.secret, self.call.code, self.output)
        try:
            self.thread = InheritableThread(target=self.spark_job, daemon=True, args=(
                n_tasks, self.spec._replace(port=session.port)))
            self.thread.start()
            while not session.finished.wait(WAIT_SECONDS):
                self.check(session, n)
            if not session.has_succeeded():
                raise self.failure_of(session)
            return session.results()
        finally:
            self.end(session)

    # --- While it runs -------------------------------------------------------------------------

    def _tell_of_more(self) -> None:
        """Once, if slots have come after they were counted."""
        self._look = time.monotonic() + LOOK_SECONDS
        more = slots.count(self.sc, self.call.profile) - self._n_all
        if more > 0:
            self.call.tell(f"{slots.plural(more, 'task slot')} came after the job had begun with "
                           f"{self._n_all}, and {'is' if more == 1 else 'are'} not used by it; the "
                           "next run will use all.")
            self._n_all = 0

    def spark_job(self, n: int, spec: JobSpec) -> None:
        """In a thread of its own."""
        try:
            self.sc.setJobGroup(self._group, "Horovod Spark Run", interruptOnCancel=True)
            rdd = self.sc.parallelize(range(n), n)
            if self.call.profile is not None:
                rdd = rdd.withResources(self.call.profile)
            serve = functools.partial(serve_partition, spec)
            # Ends in collect, so that Spark never runs a barrier stage again by itself.
            (rdd.barrier() if self.is_barrier else rdd).mapPartitions(serve).collect()
        except BaseException as error:
            self._spark_error = error

    def check(self, session: Session, n: int) -> None:
        """Raises if Spark's job has ended, or has not begun in time."""
        assert self.thread is not None
        if not self.thread.is_alive():
            seconds = DRAIN_SECONDS if self._spark_error is None else SETTLE_SECONDS
            if not session.finished.wait(seconds):
                raise self.spark_failure()
        if session.counts["running"] < n and time.monotonic() >= self.deadline:
            raise slots.timed_out(self._how_far(session, n), self.start_timeout)
        if session.counts["running"] >= n:
            self.deadline = float("inf")  # what has begun, has begun
        if self._n_all and time.monotonic() >= self._look:
            self._tell_of_more()

    def _how_far(self, session: Session, n: int) -> str:
        profile = self.call.profile
        try:
            found = f", and the application has {slots.count(self.sc, profile)} task slots"
        except Exception:  # a context that has been stopped meanwhile
            found = ""
        names = [name for name, *_ in session.agents.values()]
        hosts = ", ".join(f"{name} ({names.count(name)})" for name in sorted(set(names)))
        return (f"Of {n} tasks {session.counts['agent']} have registered"
                f"{' from ' + hosts if hosts else ''} and {session.counts['running']} run the "
                f"function{found} ({slots.task_needs(self.sc, profile)}).")

    def end(self, session: Session) -> None:
        """Whatever happened: nothing of the job is left when this returns."""
        # After a failure Spark may just be starting tasks again, and an elastic job may have some
        # that got no slot: these would look for a driver that is not there any more.
        leave_seconds = (LEAVE_SECONDS if session.has_succeeded() and not self.spec.max_failures
                         else MOMENT_SECONDS)
        session.stop()
        agents_have_left = session.finished.wait(LEAVE_SECONDS)
        if self.thread is not None:
            self.thread.join(leave_seconds if agents_have_left else 0.0)
            if self.thread.is_alive():
                with contextlib.suppress(Exception):  # a stopped context has cancelled everything
                    self.sc.cancelJobGroup(self._group)
                self.thread.join(CANCEL_SECONDS)
        session.close()

    # --- What went wrong -----------------------------------------------------------------------

    def spark_failure(self) -> Exception:
        error = self._spark_error
        if error is None:
            return RuntimeError("Spark job has failed: it ended while its tasks were "
                                "still needed; was it cancelled?")
        failure = RuntimeError(f"Spark job has failed, see the error above.\n{first_words(error)}")
        failure.__cause__ = error
        return failure

    def failure_of(self, session: Session) -> Exception:
        failure = session.failure
        if failure is None:
            return RuntimeError("the launcher of the job could not go on; what it said is above")
        if failure.code is not None:
            return RuntimeError(describe(failure))
        assert self.thread is not None
        if self.is_barrier:  # else Spark does not mind, and starts the task again
            self.thread.join(SPARK_WORDS_SECONDS)
        if self._spark_error is not None:
            problem = self.spark_failure()
            problem.args = (f"{problem.args[0]}\nThe task of {failure.where()} was lost.",)
            return problem
        return RuntimeError(f"Lost the Spark task of {failure.where()}: its executor or its Python "
                            "worker ended, or the network between it and the driver was cut.")


def first_words(error: BaseException) -> str:
    """Spark's reason without the Java stack, and the last line of a Python traceback in it."""
    reason = str(error).partition("\n\tat ")[0]
    lines = [line for line in reason.split("\n") if line.strip()]
    words = "\n".join(lines[:3] + lines[3:][-1:])
    if "No module named 'horovod'" in words:
        words += "\nInstall this package on the executors, for the Python of PYSPARK_PYTHON."
    return words


def describe(failure: Failure) -> str:
    text = FAILED.format(failure.rank, failure.code)
    error = failure.error
    if error is not None:
        words = error["traceback"] or error["text"]  # where no Python of the rank has run yet
        return f"{text}{failure.where()} raised {error['type']}:\n{words}"
    if failure.code == 0:
        return f"{text}{failure.where()} left without a result: the function called exit."
    if failure.code is not None and failure.code > 128:
        return f"{text}{failure.where()} was killed by signal {failure.code - 128}."
    return f"{text}{failure.where()} ended without raising an exception."


def load_results(pickles: List[bytes]) -> List[Any]:
    results = []
    for rank, data in enumerate(pickles):
        try:
            results.append(cloudpickle.loads(data))
        except Exception as error:
            raise RuntimeError(f"The result of rank {rank} cannot be unpickled on the driver: "
                               f"{type(error).__name__}: {error}") from error
    return results
