# SPDX-License-Identifier: Apache-2.0
"""horovod.spark.run_elastic: a job that goes on when ranks fail, and grows when tasks come.

Plain Spark tasks, up to max_num_proc of them. The ranks that run at a time are a generation, with a
rendezvous of its own. When a rank fails, its task fails too, and Spark starts it anew, on another
executor if this one is lost. The session gives everybody that is there a place in the next
generation, as horovodrun does with hosts that come and go. docs/elastic.md tells what ranks see.
"""
import os
import time
import warnings
from typing import Any, List, Mapping, NamedTuple, Optional, TextIO

from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark import launch, slots
from horovod.spark.output import Output
from horovod.spark.session import Session

DEFAULT_ELASTIC_TIMEOUT = 600.0


class Limits(NamedTuple):
    n_begin: int
    n_min: int
    n_max: int
    elastic_timeout: float
    reset_limit: Optional[int]
    max_failures: int  # how often Spark starts a task

    def words(self) -> List[str]:
        """For horovodrun."""
        words = ["-np", str(self.n_begin), "--min-np", str(self.n_min), "--max-np", str(self.n_max),
                 "--elastic-timeout", f"{self.elastic_timeout:.0f}",
                 "--agent-attempts", str(self.max_failures)]
        return words + ([] if self.reset_limit is None
                        else ["--reset-limit", str(self.reset_limit)])

    def problem(self, told: List[str]) -> Optional[Exception]:
        """Why there is no next generation, if the session has said so."""
        sentences = {
            "failed": "all its processes have failed",
            "resets": f"it was restarted {self.reset_limit} times (reset_limit)",
            "late": f"no new tasks started within {self.elastic_timeout:g} s (elastic_timeout)",
            "exhausted": "{} processes are left, {} are needed, and Spark starts no more "
                         "(spark.task.maxFailures)"}
        if not told:
            return None
        kind = TimeoutException if told[0] == "late" else RuntimeError
        return kind(f"The elastic job cannot go on: {sentences[told[0]].format(*told[1:])}.")


class ElasticRun(launch.SparkRun):
    """One call of run_elastic()."""

    def __init__(self, sc: Any, start_timeout: float, limits: Limits) -> None:
        super().__init__(sc, start_timeout, None)
        self._limits = limits

    def _wants_barrier(self) -> bool:
        return False  # Spark would end the whole job with the first task

    def run(self, n: int, call: launch.Call) -> List[Any]:
        if not slots.is_dynamic(self.sc):
            slots.wait_for(self.sc, n, self.deadline, self.start_timeout)
        limits = self._limits
        waits = max(limits.elastic_timeout, self.start_timeout)
        # Who has left a generation waits for the others as long as for tasks.
        environment = {**call.environment,
                       "HOROVOD_START_TIMEOUT": f"{min(max(waits, 1.0), 86400.0):g}"}
        return launch.load_results(self._carry_out(
            n, limits.n_max, limits.words(), call._replace(environment=environment),
            limits.max_failures))

    def _leave_seconds(self, session: Session) -> float:
        return launch.MOMENT_SECONDS  # there may be tasks that Spark has had no slot for

    def _failure_of(self, session: Session) -> Exception:
        error = super()._failure_of(session)
        problem = self._limits.problem(session.problem)
        return error if problem is None else type(problem)(f"{problem}\n{error}")

    def _spark_failure(self) -> Exception:
        error = super()._spark_failure()
        cause = self._session.failure
        if cause is not None and cause.code is not None:
            error.args = (f"{error.args[0]}\n{launch.describe(cause)}",)
        return error


def limits_of(sc: Any, n: int, min_num_proc: Optional[int], max_num_proc: Optional[int],
              elastic_timeout: Optional[float], reset_limit: Optional[int]) -> Limits:
    """What is not given follows from num_proc."""
    least, most = min_num_proc or n, max_num_proc or n
    if not 1 <= least <= n <= most:
        raise ValueError(f"min_num_proc {least}, num_proc {n} and max_num_proc {most} must be "
                         "at least 1 and in ascending order")
    if elastic_timeout is None:
        elastic_timeout = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT")
                                or DEFAULT_ELASTIC_TIMEOUT)
    return Limits(n, least, most, float(elastic_timeout), reset_limit, slots.max_failures(sc))


def renamed(old_name: str, old: Optional[int], new: Optional[int]) -> Optional[int]:
    if old is None:
        return new
    warnings.warn(f"{old_name} is deprecated, use {old_name[:3]}_num_proc instead",
                  DeprecationWarning, stacklevel=3)
    return old


def run_elastic(fn: launch.Function, args: Any = (),
                kwargs: Optional[Mapping[str, Any]] = None, num_proc: Optional[int] = None,
                min_num_proc: Optional[int] = None, max_num_proc: Optional[int] = None,
                start_timeout: Optional[float] = None, elastic_timeout: Optional[float] = None,
                reset_limit: Optional[int] = None,
                env: Optional[Mapping[str, Optional[str]]] = None,
                stdout: Optional[TextIO] = None, stderr: Optional[TextIO] = None,
                verbose: int = 1, nics: Any = None, prefix_output_with_timestamp: bool = False,
                min_np: Optional[int] = None, max_np: Optional[int] = None) -> List[Any]:
    """Runs fn(*args, **kwargs) on Spark tasks as an elastic job; results by rank, at the end.

    fn trains in a function decorated with hvd.elastic.run. The job begins with num_proc processes
    (default: all task slots), goes on with min_num_proc at least and takes up to max_num_proc (both
    default to num_proc). elastic_timeout: the longest wait for enough tasks; default:
    HOROVOD_ELASTIC_TIMEOUT, or 600. reset_limit: how often the job may be restarted. The other
    arguments are those of run().
    """
    min_num_proc = renamed("min_np", min_np, min_num_proc)
    max_num_proc = renamed("max_np", max_np, max_num_proc)
    if launch.connect_session() is not None:
        raise ValueError("run_elastic is not possible with Spark Connect: its jobs are barrier "
                         "jobs, which Spark ends with their first failure; use run")
    sc = launch.active_context()
    start_timeout = launch.start_timeout_of(start_timeout)
    deadline = time.monotonic() + start_timeout
    n = num_proc or slots.default_num_proc(sc, deadline)
    limits = limits_of(sc, n, min_num_proc, max_num_proc, elastic_timeout, reset_limit)
    job = ElasticRun(sc, start_timeout, limits)
    job.deadline = deadline
    if verbose >= 1:
        print(f"Running {n} processes...", flush=True)
    output = Output(stdout, stderr, prefix=stdout is not None or stderr is not None,
                    timestamp=prefix_output_with_timestamp, bar_is_up=launch.shows_bar(sc, stdout))
    return job.run(n, launch.Call(launch.pickle_call(fn, args, kwargs),
                                  launch.tunables(sc.getConf(), env, nics, start_timeout), output,
                                  None))
