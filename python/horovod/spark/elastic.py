# SPDX-License-Identifier: Apache-2.0
"""horovod.spark.run_elastic: a job that goes on when ranks fail, and grows when tasks come.

Plain Spark tasks, up to max_num_proc of them. The ranks that run at a time are a generation, with a
rendezvous of its own. When a rank fails, its task fails too, and Spark starts it anew, on another
executor if this one is lost. The session gives everybody that is there a place in the next
generation, as horovodrun does with hosts that come and go. docs/elastic.md tells what ranks see.
"""
from typing import Any, List, Mapping, NamedTuple, Optional, TextIO

import cloudpickle

from horovod.runner import renamed, watching_words
from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.script import Function, call_of
from horovod.spark import launch, slots
from horovod.spark.session import Session


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


def limits_of(n: int, n_min: Optional[int], n_max: Optional[int], *others: Any) -> Limits:
    """What is not given follows from n."""
    least, most = n_min or n, n_max or n
    if not 1 <= least <= n <= most:
        raise ValueError(f"min_num_proc {least}, num_proc {n} and max_num_proc {most} must be "
                         "at least 1 and in ascending order")
    return Limits(n, least, most, *others)


class ElasticRun(launch.SparkRun):
    """One call of run_elastic()."""

    def __init__(self, sc: Any, start_timeout: float, call: launch.Call,
                 elastic_timeout: Optional[float], reset_limit: Optional[int],
                 num_proc: Optional[int], *limits: Optional[int]) -> None:
        super().__init__(sc, start_timeout, call)
        self.is_barrier = False  # Spark would end the whole job with the first task
        timeout = launch.start_timeout_of(elastic_timeout, "HOROVOD_ELASTIC_TIMEOUT")
        max_failures = slots.max_failures(sc)
        self._given = *limits, timeout, reset_limit, max_failures
        if num_proc is not None:
            limits_of(num_proc, *self._given)  # what cannot be is told before anything is done
        # Who has left a generation waits for the others as long as for tasks.
        waits = min(max(timeout, start_timeout, 1.0), 86400.0)
        self.spec = self.spec._replace(max_failures=max_failures, environment={
            **self.spec.environment, "HOROVOD_START_TIMEOUT": f"{waits:g}"})

    def carry_out(self, n: int, n_tasks: int, words: List[str]) -> List[bytes]:
        self.limits = limits_of(n, *self._given)
        return super().carry_out(n, self.limits.n_max, self.limits.words())

    def failure_of(self, session: Session) -> Exception:
        error = super().failure_of(session)
        problem = self.limits.problem(session.told.get("problem", []))
        return error if problem is None else type(problem)(f"{problem}\n{error}")

    def spark_failure(self) -> Exception:
        error = super().spark_failure()
        cause = self.session.failure
        if cause is not None and cause.code is not None:
            error.args = (f"{error.args[0]}\n{launch.describe(cause)}",)
        return error


def run_elastic(fn: Function, args: Any = (),
                kwargs: Optional[Mapping[str, Any]] = None, num_proc: Optional[int] = None,
                min_num_proc: Optional[int] = None, max_num_proc: Optional[int] = None,
                start_timeout: Optional[float] = None, elastic_timeout: Optional[float] = None,
                reset_limit: Optional[int] = None,
                env: Optional[Mapping[str, Optional[str]]] = None,
                stdout: Optional[TextIO] = None, stderr: Optional[TextIO] = None,
                verbose: int = 1, nics: Any = None, prefix_output_with_timestamp: bool = False,
                min_np: Optional[int] = None, max_np: Optional[int] = None, *,
                dashboard: Any = None, report: Any = None) -> List[Any]:
    """Runs fn(*args, **kwargs) on Spark tasks as an elastic job; results by rank, at the end.

    fn trains in a function decorated with hvd.elastic.run. The job begins with num_proc processes
    (default: all task slots), goes on with min_num_proc at least and takes up to max_num_proc (both
    default to num_proc). elastic_timeout: the longest wait for enough tasks; default:
    HOROVOD_ELASTIC_TIMEOUT, or 600. reset_limit: how often the job may be restarted. The other
    arguments are those of run().
    """
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    session, context = launch.find_spark()
    if session is not None:
        raise ValueError("run_elastic is not possible with Spark Connect: its jobs are barrier "
                         "jobs, which Spark ends with their first failure; use run")
    call = launch.Call(cloudpickle.dumps(call_of(fn, args, kwargs), protocol=5), env, nics, stdout,
                       stderr, prefix_output_with_timestamp, None, None, verbose,
                       watching_words(dashboard, report, "horovod.spark.run_elastic", fn))
    job = ElasticRun(context, launch.start_timeout_of(start_timeout), call,
                     elastic_timeout, reset_limit, num_proc, min_num_proc, max_num_proc)
    return job.run(num_proc)
