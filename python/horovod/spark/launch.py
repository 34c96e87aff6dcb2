# SPDX-License-Identifier: Apache-2.0
"""horovod.spark.run: a Horovod job on the task slots of a Spark application.

The Spark job runs in a thread of its own, so that the calling thread can wait in short steps:
Ctrl-C, a failed rank and a failed Spark job all end up in the same place, which ends the session
(session.py) and so its agents and ranks, cancels the job group if that is not enough, and raises. A
barrier job is used unless dynamic allocation is on, which Spark does not allow together: then plain
tasks, and the session refuses copies and retries.
"""
import functools
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, TextIO

from horovod.runner.script import Function, call_of
from horovod.spark import slots
from horovod.spark.agent import JobSpec, serve_partition
from horovod.spark.output import Output
from horovod.spark.session import Failure, Session

DEFAULT_START_TIMEOUT = 600.0
START_TIMEOUT_VARIABLE = "HOROVOD_SPARK_START_TIMEOUT"
WAIT_SECONDS = 0.1
# How long agents have to end their ranks before Spark is asked to; Spark then needs some seconds.
LEAVE_SECONDS = 4.0
CANCEL_SECONDS = 10.0
MOMENT_SECONDS = 0.5
# After the end of Spark's job: a rank's failure may be its cause, and is about to be told.
SETTLE_SECONDS = 3.0
# How long to wait for Spark's own words about a task that is gone.
SPARK_WORDS_SECONDS = 3.0

_group_numbers = itertools.count()


def run(fn: Function, args: Any = (), kwargs: Optional[Mapping[str, Any]] = None,
        num_proc: Optional[int] = None, start_timeout: Optional[float] = None,
        use_mpi: Optional[bool] = None, use_gloo: Optional[bool] = None,
        extra_mpi_args: Optional[str] = None, env: Optional[Mapping[str, Optional[str]]] = None,
        stdout: Optional[TextIO] = None, stderr: Optional[TextIO] = None, verbose: int = 1,
        nics: Any = None, prefix_output_with_timestamp: bool = False,
        executable: Optional[str] = None, *, resource_profile: Any = None) -> List[Any]:
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
    MPI, and use_gloo means just that.
    """
    if use_mpi and use_gloo:
        raise ValueError("use_mpi and use_gloo are both set: choose one")
    if use_mpi and isinstance(env, os._Environ):
        raise Exception(f"env argument must be a dict, not {type(env)}: copy it with dict(env) and "
                        "leave out what belongs to this host only")
    if num_proc is not None and num_proc < 1:
        raise ValueError(f"num_proc is {num_proc}: at least one process is needed")
    start_timeout = start_timeout_of(start_timeout)
    session = connect_session()
    if session is not None:
        if use_mpi:
            raise ValueError("use_mpi=True is not possible with Spark Connect: executors cannot "
                             "call this process, where mpirun would be")
        environment = {**threads_of(resource_profile),
                       **tunables(session.conf, env, nics, start_timeout)}
        output = Output(stdout, stderr, stdout is not None or stderr is not None,
                        prefix_output_with_timestamp)
        return run_connect(session, num_proc, start_timeout, verbose, resource_profile,
                           Call(pickle_call(fn, args, kwargs), environment, output, executable))
    sc = active_context()
    if use_mpi:
        from horovod.spark.mpi import MpiRun

        job: SparkRun = MpiRun(sc, start_timeout, resource_profile, nics, extra_mpi_args)
    else:
        job = SparkRun(sc, start_timeout, resource_profile)
    n = num_proc or slots.default_num_proc(sc, job.deadline, resource_profile)
    if verbose >= 1:
        print(f"Running {n} processes...", flush=True)
    output = Output(stdout, stderr, prefix=stdout is not None or stderr is not None,
                    timestamp=prefix_output_with_timestamp, bar_is_up=shows_bar(sc, stdout))
    environment = {**threads_of(resource_profile),
                   **tunables(sc.getConf(), env, nics, start_timeout)}
    return job.run(n, Call(pickle_call(fn, args, kwargs), environment, output, executable))


def connect_session() -> Any:
    """The session, if it is one of Spark Connect."""
    try:
        from pyspark.sql.utils import is_remote

        if not is_remote():
            return None
        from pyspark.sql.connect.session import SparkSession
    except ImportError:
        return None
    return SparkSession.getActiveSession()


def run_connect(session: Any, num_proc: Optional[int], start_timeout: float, verbose: int,
                profile: Any, call: "Call") -> List[Any]:
    from horovod.spark import connect

    deadline = time.monotonic() + start_timeout
    if num_proc is None:
        num_proc = connect.default_num_proc(session, deadline, start_timeout, profile)
    if verbose >= 1:
        print(f"Running {num_proc} processes...", flush=True)
    job = connect.Job(num_proc, call.code, call.environment, call.executable,
                      secrets.token_bytes(32), start_timeout, *call.output.style())
    return load_results(connect.run(session, job, deadline, call.output, profile))


def active_context() -> Any:
    from pyspark import SparkContext

    sc = SparkContext._active_spark_context
    if sc is None or sc._jsc is None:
        raise Exception("Could not find an active SparkContext, are you running in a PySpark "
                        "session?")
    return sc


def start_timeout_of(start_timeout: Optional[float]) -> float:
    if start_timeout is not None:
        return float(start_timeout)
    text = os.environ.get(START_TIMEOUT_VARIABLE) or str(DEFAULT_START_TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ValueError(f"{START_TIMEOUT_VARIABLE} is {text!r}: a number of seconds is needed, "
                         "such as 600")
    return seconds


def pickle_call(fn: Function, args: Any, kwargs: Optional[Mapping[str, Any]]) -> bytes:
    """Before anything is started: a function that cannot travel is the caller's error."""
    import cloudpickle

    return cloudpickle.dumps(call_of(fn, args, kwargs), protocol=5)


def shows_bar(sc: Any, stdout: Optional[TextIO]) -> bool:
    enabled = sc.getConf().get("spark.ui.showConsoleProgress", "false").lower() == "true"
    return bool(enabled and stdout is None and sys.stdout.isatty())


def tunables(conf: Any, env: Optional[Mapping[str, Optional[str]]], nics: Any,
             start_timeout: float) -> Dict[str, Optional[str]]:
    """What the ranks get besides the executors' environment and their place."""
    environment: Dict[str, Optional[str]] = {
        "HOROVOD_START_TIMEOUT": f"{min(max(start_timeout, 1.0), 86400.0):g}"}  # its knob's range
    if any(conf.get(key, "false").lower() == "true"
           for key in ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption",
                       "spark.ssl.enabled")):
        environment["HOROVOD_ENCRYPT"] = "always"  # as private as the rest of the application
    if nics:
        environment["HOROVOD_GLOO_IFACE"] = nics if isinstance(nics, str) else ",".join(nics)
    environment.update(env or {})
    return environment


def threads_of(profile: Any) -> Dict[str, Optional[str]]:
    """Spark 3.5 sets OMP_NUM_THREADS by spark.task.cpus, whatever the profile says."""
    cpus = profile.taskResources.get("cpus") if profile is not None else None
    return {"OMP_NUM_THREADS": str(int(cpus.amount))} if cpus is not None else {}


def driver_addresses(sc: Any) -> List[str]:
    if slots.is_local(sc):
        return ["127.0.0.1"]
    return [sc.getConf().get("spark.driver.host")]


def bind_address(sc: Any) -> str:
    """Where the driver listens: where Spark does, if that can be told; else everywhere."""
    if slots.is_local(sc):
        return "127.0.0.1"
    conf = sc.getConf()
    return resolved(conf.get("spark.driver.bindAddress", conf.get("spark.driver.host")))


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
    """What is to be run, and how."""
    code: bytes
    environment: Dict[str, Optional[str]]
    output: Output
    executable: Optional[str]


class SparkRun:
    """One call of run(), from the secret to the results."""

    def __init__(self, sc: Any, start_timeout: float, profile: Any) -> None:
        self.sc = sc
        self.start_timeout = start_timeout
        self.deadline = time.monotonic() + start_timeout
        self._profile = profile
        self._group = f"horovod.spark.run.{next(_group_numbers)}"
        self._secret = secrets.token_bytes(32)
        self._spark_error: Optional[BaseException] = None
        self._thread: Optional[threading.Thread] = None

    def run(self, n: int, call: Call) -> List[Any]:
        if not slots.is_dynamic(self.sc):
            slots.wait_for(self.sc, n, self.deadline, self.start_timeout, self._profile)
        return load_results(self._carry_out(n, n, ["-np", str(n)], call))

    def _carry_out(self, n: int, n_tasks: int, words: List[str], call: Call,
                   max_failures: int = 0) -> List[bytes]:
        """The pickled results, by rank. n: how many ranks it begins with."""
        self._session = session = Session(words, bind_address(self.sc), self._secret, call.code,
                                          call.output)
        try:
            session.wait_until_open()
            self._submit(n_tasks, JobSpec(driver_addresses(self.sc), session.port, self._secret,
                                          self.start_timeout, call.environment, call.executable,
                                          max_failures))
            self._watch(session, n)
            return session.results()
        finally:
            self._end(session)

    # --- The Spark job -------------------------------------------------------------------------

    def _submit(self, n: int, spec: JobSpec) -> None:
        from pyspark import InheritableThread

        barrier = self._wants_barrier()

        def job() -> None:
            try:
                self.sc.setJobGroup(self._group, "Horovod Spark Run", interruptOnCancel=True)
                rdd = self.sc.parallelize(range(n), n)
                if self._profile is not None:
                    rdd = rdd.withResources(self._profile)
                serve = functools.partial(serve_partition, spec)
                # Ends in collect, so that Spark never runs a barrier stage again by itself.
                (rdd.barrier() if barrier else rdd).mapPartitions(serve).collect()
            except BaseException as error:
                self._spark_error = error

        self._thread = InheritableThread(target=job, name=self._group, daemon=True)
        self._thread.start()

    def _wants_barrier(self) -> bool:
        """HOROVOD_SPARK_BARRIER=1 or 0 forces one kind of job."""
        forced = os.environ.get("HOROVOD_SPARK_BARRIER", "")
        return forced == "1" if forced in ("0", "1") else not slots.is_dynamic(self.sc)

    def _watch(self, session: Session, n: int) -> None:
        """Until the job is over; raises if it is not well over."""
        while not session.finished.wait(WAIT_SECONDS):
            if self._is_over(session) and not session.finished.is_set():
                raise self._spark_failure()
            if session.n_running < n and time.monotonic() >= self.deadline:
                raise slots.timed_out(self._how_far(session, n), self.start_timeout)
        if not session.has_succeeded():
            raise self._failure_of(session)

    def _is_over(self, session: Session) -> bool:
        """Spark's job has ended, and the session has had the time to settle on a cause."""
        assert self._thread is not None
        if self._thread.is_alive():
            return False
        session.finished.wait(SETTLE_SECONDS)
        return True

    def _how_far(self, session: Session, n: int) -> str:
        try:
            found = f", and the application has {slots.count(self.sc, self._profile)} task slots"
        except Exception:  # a context that has been stopped meanwhile
            found = ""
        hosts = ", ".join(f"{name} ({count})" for name, count in sorted(session.hosts().items()))
        return (f"Of {n} tasks {session.n_registered} have registered"
                f"{' from ' + hosts if hosts else ''} and {session.n_running} run the function"
                f"{found} ({slots.task_needs(self.sc, self._profile)}).")

    def _end(self, session: Session) -> None:
        """Whatever happened: nothing of the job is left when this returns."""
        leave_seconds = self._leave_seconds(session)
        session.stop()
        agents_have_left = session.finished.wait(LEAVE_SECONDS)
        if self._thread is not None:
            self._thread.join(leave_seconds if agents_have_left else 0.0)
            if self._thread.is_alive():
                self._cancel()
                self._thread.join(CANCEL_SECONDS)
        session.close()

    def _leave_seconds(self, session: Session) -> float:
        """How long the tasks have to end by themselves. After a failure Spark may just be starting
        some of them again: these would look for a driver that is not there any more."""
        return LEAVE_SECONDS if session.has_succeeded() else MOMENT_SECONDS

    def _cancel(self) -> None:
        try:
            self.sc.cancelJobGroup(self._group)
        except Exception:
            pass  # a context that has been stopped has cancelled everything

    # --- What went wrong -----------------------------------------------------------------------

    def _spark_failure(self) -> Exception:
        error = self._spark_error
        if error is None:
            return RuntimeError("Spark job has failed: it ended while its tasks were "
                                "still needed; was it cancelled?")
        failure = RuntimeError(f"Spark job has failed, see the error above.\n{first_words(error)}")
        failure.__cause__ = error
        return failure

    def _failure_of(self, session: Session) -> Exception:
        if session.failure is None:
            return RuntimeError("the launcher of the job could not go on; what it said is above")
        return self._rank_failure(session.failure)

    def _rank_failure(self, failure: Failure) -> Exception:
        if failure.code is None:
            assert self._thread is not None
            if self._wants_barrier():  # else Spark does not mind, and starts the task again
                self._thread.join(SPARK_WORDS_SECONDS)
            if self._spark_error is not None:
                problem = self._spark_failure()
                problem.args = (f"{problem.args[0]}\nThe task of {failure.where()} was lost.",)
                return problem
            return RuntimeError(f"Lost the Spark task of {failure.where()}: its executor or its "
                                "Python worker ended, or the network between it and the driver "
                                "was cut.")
        return RuntimeError(describe(failure))


def first_words(error: BaseException) -> str:
    """Spark's reason without the Java stack, and the last line of a Python traceback in it."""
    lines = []
    for line in str(error).split("\n"):
        if line.startswith("\tat ") and lines:
            break
        if line.strip():
            lines.append(line)
    words = "\n".join(lines[:3] + lines[3:][-1:])
    if "No module named 'horovod'" in words:
        words += "\nInstall this package on the executors, for the Python of PYSPARK_PYTHON."
    return words


def describe(failure: Failure) -> str:
    text = ("Horovod detected that one or more processes exited with non-zero status, thus causing "
            "the job to be terminated. The first process to do so was:\n"
            f"Process name: {failure.rank}\nExit code: {failure.code}\n")
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
    import cloudpickle

    results = []
    for rank, data in enumerate(pickles):
        try:
            results.append(cloudpickle.loads(data))
        except Exception as error:
            raise RuntimeError(f"The result of rank {rank} cannot be unpickled on the driver: "
                               f"{type(error).__name__}: {error}") from error
    return results
