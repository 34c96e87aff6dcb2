# SPDX-License-Identifier: Apache-2.0
"""run() through Spark Connect, where there is no SparkContext and nobody can call the client.

The job is a barrier mapInArrow. The task of partition 0 is the driver of the job: it has the desk
and the rendezvous, tells the others where by the one allGather of the job, and hands everything
that has happened back as rows: output, results in pieces, or the failure. So output comes at the
end, and results pass through Spark.
"""
import contextlib
import io
import json
import threading
import time
import uuid
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

from horovod.spark import agent, task
from horovod.spark.driver import Desk, Failure
from horovod.spark.output import Output

SCHEMA = "number long, kind string, rank int, data binary"
PIECE_BYTES = 1 << 20
# A client is told every 2 s how far its job is, by default: so much later it knows for sure.
PROGRESS_SECONDS = 5.0


class Job(NamedTuple):
    """What travels in Spark's closure."""
    n: int
    code: bytes
    environment: Dict[str, Optional[str]]
    executable: Optional[str]
    secret: bytes
    start_timeout: float


class Collected(Output):
    """Keeps what comes, in order, instead of writing it."""

    def __init__(self) -> None:
        super().__init__(io.StringIO(), io.StringIO())
        self.pieces: List[Any] = []

    def take(self, rank: int, stream: str, data: bytes) -> None:
        self.pieces.append((stream, rank, data))

    def end(self, rank: int) -> None:
        pass


# --- In the tasks ------------------------------------------------------------------------------


@contextlib.contextmanager
def headquarters(job: Job, host: str) -> Iterator[Any]:
    """The desk and the rendezvous, on the host of partition 0."""
    from horovod import _core
    from horovod.spark.launch import resolved

    here = "127.0.0.1" if host == "localhost" else resolved(host)
    desk = Desk(job.n, job.secret, here, Collected())
    server, port = _core.rendezvous_start("*" if here == "0.0.0.0" else here, 0, job.secret)
    try:
        desk.open(job.code, {**job.environment, "HOROVOD_RENDEZVOUS_ADDR": host,
                             "HOROVOD_RENDEZVOUS_PORT": str(port)}, job.executable)
        yield desk
    finally:
        desk.stop()
        desk.finished.wait(agent.FAREWELL_SECONDS)
        _core.rendezvous_stop(server)


def supervise(desk: Desk, job: Job) -> None:
    """Ends the job when it is over, or when it has not started in time."""
    deadline = time.monotonic() + job.start_timeout
    while not desk.done.wait(0.1):
        if desk.n_running < job.n and time.monotonic() > deadline:
            break
    desk.stop()


def report(desk: Desk, job: Job) -> Iterator[Any]:
    """(kind, rank, data) of everything the client is to know."""
    yield from desk._output.pieces  # type: ignore
    if desk.failure is not None:
        yield "failure", desk.failure.rank, json.dumps(desk.failure).encode()
    elif desk.n_running < job.n:
        yield "late", 0, f"{desk.n_registered} {desk.n_running}".encode()
    else:
        for rank, data in enumerate(desk.results()):
            for at in range(0, max(len(data), 1), PIECE_BYTES):
                yield "result", rank, data[at:at + PIECE_BYTES]


def serve_batches(job: Job, batches: Iterator[Any]) -> Iterator[Any]:
    """For mapInArrow, in a barrier stage: one of n tasks."""
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    index = context.partitionId()
    host = context.getTaskInfos()[0].address.rpartition(":")[0] or "localhost"
    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(headquarters(job, host)) if index == 0 else None
        port = int(context.allGather(str(desk.port) if desk is not None else "")[0])
        watcher = threading.Thread(target=supervise, args=(desk, job), daemon=True)
        if desk is not None:
            watcher.start()
        spec = agent.JobSpec([host], port, job.secret, job.start_timeout)
        agent.serve(spec, index, context.attemptNumber(), task.get_available_devices(),
                    context.cpus())
        if desk is None:
            return
        watcher.join()
        desk.finished.wait(agent.FAREWELL_SECONDS)
        for number, (kind, rank, data) in enumerate(report(desk, job)):
            yield pa.RecordBatch.from_pydict(
                {"number": [number], "kind": [kind], "rank": pa.array([rank], pa.int32()),
                 "data": pa.array([data], pa.binary())})


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
    from horovod.spark import slots

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
        from horovod.spark import launch, slots

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


def carry_out(spark: Any, job: Job, deadline: float, profile: Any) -> List[Any]:
    """The rows of the job. From its begin on the task of partition 0 watches the time."""
    options = {} if profile is None else {"profile": profile}
    submission = Submission(spark, lambda: spark.range(0, job.n, 1, job.n).mapInArrow(
        lambda batches: serve_batches(job, batches), SCHEMA, barrier=True, **options).collect())
    return submission.wait(deadline, job.start_timeout, f"Spark has not started the {job.n} "
                           "tasks, which must start all at once.")


def run(spark: Any, job: Job, deadline: float, output: Output,
        profile: Any = None) -> List[bytes]:
    """The pickled results by rank; raises what classic run() would."""
    from horovod.spark import launch, slots

    wait_for_slots(spark, job.n, deadline, job.start_timeout, profile)
    rows = carry_out(spark, job, deadline, profile)
    results: Dict[int, List[bytes]] = {rank: [] for rank in range(job.n)}
    for row in sorted(rows, key=lambda row: row.number):
        if row.kind in ("stdout", "stderr"):
            output.take(row.rank, row.kind, bytes(row.data))
        elif row.kind == "result":
            results[row.rank].append(bytes(row.data))
    for rank in range(job.n):
        output.end(rank)
    last = max(rows, key=lambda row: row.number)
    if last.kind == "failure":
        raise RuntimeError(launch.describe(Failure(*json.loads(bytes(last.data)))))
    if last.kind == "late":
        registered, running = bytes(last.data).decode().split()
        raise slots.timed_out(f"Of {job.n} tasks {registered} have registered and {running} run "
                              "the function.", job.start_timeout)
    return [b"".join(results[rank]) for rank in range(job.n)]
