# SPDX-License-Identifier: Apache-2.0
"""run() through Spark Connect, where there is no SparkContext and nobody can call the client.

The job is a barrier mapInArrow. The task of partition 0 is the driver of the job: it has the
session, tells the others where by the one allGather of the job, and hands everything that has
happened back as rows: output, results in pieces, or the failure. So output comes at the end, and
results pass through Spark.
"""
import json
import secrets
import threading
import time
import uuid
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

from horovod.spark import agent, launch, slots, task
from horovod.spark.session import Failure, Output, Session

SCHEMA = "number long, kind string, rank int, data binary"
PIECE_BYTES = 1 << 20
# A client is told every 2 s how far its job is, by default: so much later it knows for sure.
PROGRESS_SECONDS = 5.0


class Job(NamedTuple):
    """What travels in Spark's closure."""
    n: int
    code: bytes
    words: List[str]     # of horovodrun, about output
    spec: agent.JobSpec  # but for the address of the task of partition 0


class Collected(Output):
    """Keeps what comes, in order, instead of writing it."""

    def __init__(self, words: List[str]) -> None:
        super().__init__()
        self.words = words
        self.pieces: List[Any] = []

    def write(self, stream: str, data: bytes) -> None:
        if data:
            self.pieces.append((stream, 0, data))


# --- In the tasks ------------------------------------------------------------------------------


def stop_if_late(session: Session, n: int) -> None:
    if session.counts["running"] < n:
        session.stop()


def report(session: Session, output: Collected) -> Iterator[Any]:
    """(kind, rank, data) of everything the client is to know."""
    yield from output.pieces
    if session.has_succeeded():
        for rank, data in enumerate(session.results()):
            for at in range(0, max(len(data), 1), PIECE_BYTES):
                yield "result", rank, data[at:at + PIECE_BYTES]
    elif session.failure is not None:
        yield "failure", session.failure.rank, json.dumps(session.failure).encode()
    else:
        yield "late", 0, f"{session.counts['agent']} {session.counts['running']}".encode()


def serve_batches(job: Job, batches: Iterator[Any]) -> Iterator[Any]:
    """For mapInArrow, in a barrier stage: one of n tasks."""
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    index = context.partitionId()
    host = context.getTaskInfos()[0].address.rpartition(":")[0] or "localhost"
    output = Collected(job.words)
    session = None
    if index == 0:
        session = Session(["-np", str(job.n)], launch.resolved(host), job.spec.secret, job.code,
                          output)
    try:
        port = int(context.allGather(str(session.port) if session is not None else "")[0])
        if session is not None:
            clock = threading.Timer(job.spec.start_timeout, stop_if_late, (session, job.n))
            clock.daemon = True
            clock.start()
        agent.serve(job.spec._replace(addresses=[host], port=port), index,
                    context.attemptNumber(), task.get_available_devices())
        if session is None:
            return
        session.finished.wait()
        for number, (kind, rank, data) in enumerate(report(session, output)):
            yield pa.RecordBatch.from_pydict(
                {"number": [number], "kind": [kind], "rank": pa.array([rank], pa.int32()),
                 "data": pa.array([data], pa.binary())})
    finally:
        if session is not None:
            session.stop()
            session.finished.wait(agent.LEAVE_SECONDS)
            session.close()


# --- On the client -----------------------------------------------------------------------------


def task_cpus(spark: Any, profile: Any = None) -> int:
    cpus = profile.taskResources.get("cpus") if profile is not None else None
    return int(cpus.amount if cpus is not None else spark.conf.get("spark.task.cpus", "1"))


def default_num_proc(spark: Any, deadline: float, start_timeout: float, profile: Any = None) -> int:
    """Spark cuts a range into as many parts as it has cores, unless it is told how many."""
    from pyspark.sql import functions as F

    count = Submission(spark, lambda: spark.range(1 << 16).select(
        F.spark_partition_id()).distinct().count())
    n_parts = count.wait(deadline, start_timeout, "Spark could not count its task slots: all of "
                                                  "them are taken.")
    if spark.conf.get("spark.default.parallelism", "") != "":
        return int(n_parts)
    return max(n_parts // task_cpus(spark, profile), 1)


def wait_for_slots(spark: Any, n: int, deadline: float, start_timeout: float,
                   profile: Any = None) -> None:
    """Until n tasks can run at once, as far as a client can know that."""
    if spark.conf.get("spark.default.parallelism", "") != "":
        return
    while (found := default_num_proc(spark, deadline, start_timeout, profile)) < n:
        if time.monotonic() >= deadline:
            raise slots.timed_out(f"{n} task slots are needed, but only {found} were found "
                                  f"({task_cpus(spark, profile)} cores for a task).", start_timeout)
        time.sleep(1.0)


class Submission(threading.Thread):
    """A job of Spark's in a thread of its own, given up if it does not begin in time."""

    def __init__(self, spark: Any, work: Callable[[], Any]) -> None:
        super().__init__(name=f"horovod.spark.run.{uuid.uuid4().hex[:8]}", daemon=True)
        self._spark = spark
        self._work = work
        self._is_told = hasattr(spark, "registerProgressHandler")  # from Spark 4 on
        self._has_begun = not self._is_told
        self._result: Any = None
        self._problem: Optional[BaseException] = None

    def run(self) -> None:
        try:
            self._spark.addTag(self.name)
            self._result = self._work()
        except BaseException as error:
            self._problem = error

    def _hear(self, stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
        """What Connect tells of each of its jobs, in the thread that waits for it."""
        if threading.current_thread() is self and inflight_tasks:
            self._has_begun = True

    def wait(self, deadline: float, start_timeout: float, late: str) -> Any:
        """The result; late: what to say if the job has not begun by the deadline."""
        if self._is_told:
            self._spark.registerProgressHandler(self._hear)
        self.start()
        try:
            while self.is_alive():
                if not self._has_begun and time.monotonic() >= deadline + PROGRESS_SECONDS:
                    raise slots.timed_out(late, start_timeout)
                self.join(0.1)
        except BaseException:
            self._spark.interruptTag(self.name)
            self.join(launch.CANCEL_SECONDS)
            raise
        finally:
            if self._is_told:
                self._spark.removeProgressHandler(self._hear)
        if self._problem is not None:
            raise RuntimeError("Spark job has failed, see the error above.\n"
                               + launch.first_words(self._problem)) from self._problem
        return self._result


def run(spark: Any, num_proc: Optional[int], start_timeout: float,
        call: launch.Call) -> List[bytes]:
    """The pickled results by rank; raises what classic run() would."""
    output = Output(call.stdout, call.stderr, call.timestamp)
    deadline = time.monotonic() + start_timeout
    n = num_proc or default_num_proc(spark, deadline, start_timeout, call.profile)
    call.tell(f"Running {slots.plural(n, 'process')}...")
    job = Job(n, call.code, output.words,
              agent.JobSpec([], 0, secrets.token_bytes(32), start_timeout,
                            call.environment(spark.conf, start_timeout), call.executable))
    return carry_out(spark, job, deadline, output, call.profile)


def carry_out(spark: Any, job: Job, deadline: float, output: Output,
              profile: Any = None) -> List[bytes]:
    wait_for_slots(spark, job.n, deadline, job.spec.start_timeout, profile)
    options = {} if profile is None else {"profile": profile}
    submission = Submission(spark, lambda: spark.range(0, job.n, 1, job.n).mapInArrow(
        lambda batches: serve_batches(job, batches), SCHEMA, barrier=True, **options).collect())
    # From its begin on the task of partition 0 watches the time.
    rows = submission.wait(deadline, job.spec.start_timeout, f"Spark has not started the {job.n} "
                           "tasks, which must start all at once.")
    results: Dict[int, List[bytes]] = {rank: [] for rank in range(job.n)}
    for row in sorted(rows, key=lambda row: row.number):
        if row.kind in ("stdout", "stderr"):
            output.write(row.kind, bytes(row.data))
        elif row.kind == "result":
            results[row.rank].append(bytes(row.data))
        elif row.kind == "failure":
            raise RuntimeError(launch.describe(Failure(*json.loads(bytes(row.data)))))
        else:
            registered, running = bytes(row.data).decode().split()
            raise slots.timed_out(f"Of {job.n} tasks {registered} have registered and {running} "
                                  "run the function.", job.spec.start_timeout)
    return [b"".join(results[rank]) for rank in range(job.n)]
