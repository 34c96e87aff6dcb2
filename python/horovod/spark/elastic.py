# SPDX-License-Identifier: Apache-2.0
"""horovod.spark.run_elastic: a job that goes on when ranks fail, and grows when tasks come.

Plain Spark tasks, up to max_num_proc of them. The ranks that run at a time are a generation, with a
rendezvous of its own. When a rank fails, its task fails too, and Spark starts it anew, on another
executor if this one is lost. The desk gives everybody that is there a place in the next generation:
a new task is told by START, a rank that goes on by PLACE. docs/elastic.md tells what ranks see;
what horovodrun is there, the desk is here.
"""
import json
import os
import time
import warnings
from typing import (Any, Dict, List, Mapping, NamedTuple, Optional, TextIO, Tuple,
                    Type)

from horovod import _core
from horovod.common.elastic import HostUpdateResult
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark import launch, plan, slots
from horovod.spark.agent import JobSpec
from horovod.spark.driver import Desk, Failure, Task
from horovod.spark.line import Kind, Line
from horovod.spark.output import Output

DEFAULT_ELASTIC_TIMEOUT = 600.0
# At the start: others register soon after those that are enough.
GATHER_SECONDS = 0.5
# After a failure: others may fail for the same reason.
MOMENT_SECONDS = 0.25
# After the first rank has left a generation: the others are about to.
LEFT_SECONDS = 1.0
# Failures that follow each other within this time have one cause.
BURST_SECONDS = 5.0
NEVER = float("inf")


class Limits(NamedTuple):
    n_begin: int
    n_min: int
    n_max: int
    elastic_timeout: float
    reset_limit: Optional[int]
    max_failures: int  # how often Spark starts a task


class Member(Task):
    """A task whose rank gets a place in one generation after the other."""

    def __init__(self, line: Line, told: Dict[str, Any]) -> None:
        super().__init__(line, told)
        self.generation = 0  # the last it has a place in
        self.has_left = 0    # the last it has left
        self.is_running = False
        self.is_done = False  # its result is here
        self.may_return = False  # failed, and Spark will start its task again

    def order(self, generation: int) -> Tuple[bool, int]:
        """Those of the generation before go first, by rank."""
        goes_on = self.generation == generation and self.place is not None
        return not goes_on, self.place.rank if goes_on else self.told["index"]  # type: ignore


class ElasticDesk(Desk):
    def __init__(self, limits: Limits, secret: bytes, bind_address: str, output: Output) -> None:
        super().__init__(limits.n_max, secret, bind_address, output)
        self.problem = ""  # why there is no next generation
        self.problem_kind: Type[Exception] = RuntimeError
        self._limits = limits
        self._bind_address = bind_address
        self._generation = 0
        self._n_news = 0
        self._server_now: Any = None  # the rendezvous of the generation
        self._form_at = self._give_up_at = NEVER
        self._failed_at: List[float] = []
        self._is_finishing = False  # a rank has ended well
        self._waiting: Dict[int, Tuple[Line, Dict[str, Any]]] = {}  # second copies of a task

    def results(self) -> List[bytes]:
        """By rank, of the last generation."""
        members = sorted(self._of_generation(), key=lambda member: member.place.rank)
        return [b"".join(member.pieces) for member in members]

    def run(self) -> None:
        super().run()
        if self._server_now is not None:
            _core.rendezvous_stop(self._server_now)

    def cause(self) -> Optional[Failure]:
        """Of the failures that came last, the one that explains the others."""
        first = len(self._failed_at) - 1
        while first > 0 and self._failed_at[first] - self._failed_at[first - 1] < BURST_SECONDS:
            first -= 1
        return min(self._failures[first:], key=Failure.doubt, default=None)

    # --- Who there is --------------------------------------------------------------------------

    def _members(self) -> List[Any]:
        return list(self._tasks.values())

    def _alive(self) -> List[Any]:
        return [member for member in self._members() if not member.has_ended]

    def _of_generation(self) -> List[Any]:
        return [member for member in self._members() if member.generation == self._generation]

    def _n_possible(self) -> int:
        """Those that are there, and those Spark has still to start."""
        gone = [member for member in self._members() if member.has_ended and not member.may_return]
        return self._limits.n_max - len(gone)

    # --- What agents say -----------------------------------------------------------------------

    def _hear(self, line: Line, kind: int, payload: bytes) -> None:
        index = self._lines[line]
        member: Any = self._tasks.get(index) if index is not None else None
        if kind == Kind.READY and member is not None:
            self._left(member, json.loads(payload)["generation"])
            return
        if kind == Kind.RUNNING and member is not None:
            member.is_running = True
            members = self._of_generation()
            running = sum(other.is_running for other in members)
            n = self._limits.n_begin if running == len(members) else running
            self.n_running = max(n, self.n_running)  # what has begun, has begun
            return
        super()._hear(line, kind, payload)

    def _register(self, line: Line, told: Dict[str, Any]) -> None:
        index = int(told["index"])
        if self._stopping:
            self._dismiss(line)
        elif not 0 <= index < self._n_tasks:
            raise ValueError(f"there is no task {index}")
        elif index in self._tasks and not self._is_free(self._tasks[index]):
            self._waiting[index] = line, told  # in case the first copy is lost
        else:
            self._admit(line, told)

    def _is_free(self, member: Any) -> bool:
        """Its task may be started again. A rank can outlive its executor and still end well."""
        return member.has_ended and not member.is_done

    def _admit(self, line: Line, told: Dict[str, Any]) -> None:
        index = int(told["index"])
        self._tasks[index] = Member(line, told)
        self._lines[line] = index
        n = self.n_registered = len(self._alive())
        if self._is_finishing:
            return  # too late: it waits for the end
        if self._generation == 0:
            if n >= self._limits.n_begin:
                self._form_soon(0.0 if n == self._limits.n_max else GATHER_SECONDS)
        elif self._give_up_at != NEVER:
            self._form_soon(MOMENT_SECONDS)
        elif self._form_at == NEVER:
            self._tell_news()

    def _tell_news(self) -> None:
        self._n_news += 1
        for member in self._of_generation():
            if not member.has_ended:
                self._post(member, Kind.NEWS, {"number": self._n_news,
                                               "what": HostUpdateResult.added})

    def _left(self, member: Member, generation: int) -> None:
        member.has_left = generation
        if generation == self._generation:
            waited_for = [other for other in self._of_generation()
                          if not other.has_ended and other.has_left < generation]
            self._form_soon(LEFT_SECONDS if waited_for else 0.0)

    def _post(self, member: Member, kind: Kind, value: Any) -> None:
        try:
            member.line.post_json(kind, value)
            self._watch(member.line)
        except (ConnectionError, OSError):
            self._drop(member.line)

    # --- The end of a rank ---------------------------------------------------------------------

    def _ended(self, task: Task, told: Dict[str, Any]) -> None:
        task.has_ended = True
        assert task.place is not None
        self._output.end(task.place.rank)
        if told["code"] != 0 or not told["has_result"]:
            self._dismiss(task.line, self._comes_again(task))
            self._fail(task, int(told["code"]), told["error"])
            return
        self._dismiss(task.line)
        task.is_done = self._is_finishing = True  # type: ignore
        self._form_at = self._give_up_at = NEVER
        if all(member.has_ended for member in self._of_generation()) and not self.failure:
            self.done.set()

    def _comes_again(self, task: Task) -> bool:
        """Not beyond what Spark allows, which would end the whole job."""
        return (not self._is_finishing and not self._stopping
                and task.told["attempt"] + 1 < self._limits.max_failures)

    def _fail(self, task: Task, code: Optional[int], error: Optional[Dict[str, Any]]) -> None:
        task.may_return = self._comes_again(task)  # type: ignore
        had_place = task.place is not None
        super()._fail(task, code, error)
        self._failed_at.append(time.monotonic())
        self.n_registered = len(self._alive())
        if not self._is_finishing:  # else the job has failed, and the base settles on the cause
            self._settle_at = NEVER
            if had_place:
                self._form_soon(MOMENT_SECONDS)
        spare = self._waiting.pop(task.told["index"], None)
        if spare is not None and spare[0] in self._lines:
            self._admit(*spare)

    # --- Generations ---------------------------------------------------------------------------

    def _form_soon(self, seconds: float) -> None:
        if not self._is_finishing:
            self._form_at = min(self._form_at, time.monotonic() + seconds)

    def _turn(self) -> None:
        super()._turn()
        now = time.monotonic()
        if self._stopping or self.done.is_set():
            return
        if now >= self._form_at:
            self._form_at = NEVER
            self._form()
        if now >= self._give_up_at:
            self._give_up(f"no new tasks came within {self._limits.elastic_timeout:g} s "
                          "(elastic_timeout)", TimeoutException)

    def _give_up(self, why: str, kind: Type[Exception] = RuntimeError) -> None:
        self._give_up_at = NEVER
        self.problem_kind = kind
        self.problem = f"The elastic job cannot go on: {why}."
        self.failure = self.cause()
        self.done.set()

    def _form(self) -> None:
        alive = self._alive()
        if self._generation == 0:
            if len(alive) < self._limits.n_begin:
                return  # one was lost before it began; Spark starts it again
        else:
            if not any(member.generation == self._generation for member in alive):
                return self._give_up("all its processes have failed")
            if self._generation > (NEVER if self._limits.reset_limit is None
                                   else self._limits.reset_limit):
                return self._give_up(f"it was formed anew {self._limits.reset_limit} times "
                                     "(reset_limit)")
        if len(alive) < self._limits.n_min:
            if self._n_possible() < self._limits.n_min:
                return self._give_up(f"{len(alive)} processes are left, {self._limits.n_min} are "
                                     "needed, and Spark starts no more (spark.task.maxFailures)")
            self._give_up_at = min(self._give_up_at,
                                   time.monotonic() + self._limits.elastic_timeout)
            return
        self._give_up_at = NEVER
        self._begin(alive)

    def _begin(self, members: List[Any]) -> None:
        port = self._new_rendezvous()
        members.sort(key=lambda member: member.order(self._generation))
        placed = plan.deal([(member.told["index"], member.told["host"]) for member in members])
        self._generation += 1
        for member in members:
            goes_on = member.generation > 0
            member.place = placed[member.told["index"]]
            member.generation = self._generation
            place = {**member.place.environment(), "HOROVOD_RENDEZVOUS_PORT": str(port),
                     "HOROVOD_JOB_ID": f"{self._start['environment']['HOROVOD_JOB_ID']}."
                                       f"{self._generation}",
                     "HOROVOD_ELASTIC_WORKER": str(member.told["index"]),
                     "HOROVOD_ELASTIC_GENERATION": str(self._generation)}
            if goes_on:
                self._post(member, Kind.PLACE, place)
            else:
                self._start_rank(member, place)

    def _new_rendezvous(self) -> int:
        """Whoever still waits at the old one fails at once, and takes its next place."""
        before = self._server_now
        here = "*" if self._bind_address == "0.0.0.0" else self._bind_address
        self._server_now, port = _core.rendezvous_start(here, 0, self._secret)
        if before is not None:
            _core.rendezvous_stop(before)
        return port


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
        here, addresses = launch.bind_address(self.sc), launch.driver_addresses(self.sc)
        self._desk = desk = ElasticDesk(self._limits, self._secret, here, call.output)
        try:
            desk.open(call.code, {**call.environment, **self._variables(addresses)},
                      call.executable)
            self._submit(self._limits.n_max,
                         JobSpec(addresses, desk.port, self._secret, self.start_timeout))
            self._watch(desk, n)
        finally:
            self._end(desk)
        return launch.load_results(desk.results())

    def _variables(self, addresses: List[str]) -> Dict[str, str]:
        waits = max(self._limits.elastic_timeout, self.start_timeout)
        return {"HOROVOD_ELASTIC": "1", "HOROVOD_JOB_ID": self._group,
                "HOROVOD_RENDEZVOUS_ADDR": ",".join(addresses),
                "HOROVOD_ELASTIC_TIMEOUT": f"{self._limits.elastic_timeout:g}",
                # Who has left a generation waits for the others as long as for tasks.
                "HOROVOD_START_TIMEOUT": f"{min(max(waits, 1.0), 86400.0):g}"}

    def _leave_seconds(self, desk: Desk) -> float:
        return launch.MOMENT_SECONDS  # there may be tasks that Spark has had no slot for

    def _rank_failure(self, failure: Failure) -> Exception:
        error = super()._rank_failure(failure)
        if not self._desk.problem:
            return error
        return self._desk.problem_kind(f"{self._desk.problem}\n{error}")

    def _spark_failure(self) -> Exception:
        error = super()._spark_failure()
        cause = self._desk.cause()
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
    HOROVOD_ELASTIC_TIMEOUT, or 600. reset_limit: how often the job may be formed anew. The other
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
