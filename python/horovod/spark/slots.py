# SPDX-License-Identifier: Apache-2.0
"""How many tasks a Spark application can run at once, and waiting until it is enough.

Spark's default parallelism counts cores, and is a constant before executors have registered. What
counts here are task slots: cores and GPUs of the executors that are there, divided by what a task
takes. Spark knows the number (its barrier jobs are checked against it) but has no public call.
"""
import re
import time
from typing import Any, Callable, Optional, Set, Tuple

from horovod.runner.common.util.timeout import TimeoutException

POLL_SECONDS = 0.1
# Executors have stopped coming when none has come for this long; or for longer, if the application
# has asked for more than there are.
QUIET_SECONDS = 3.0
MISSING_SECONDS = 30.0

# (application, slots) that have been waited for once.
_settled: Set[Tuple[str, int]] = set()


def java_profile(sc: Any, profile: Any = None) -> Any:
    """Spark's own object for a pyspark.resource.ResourceProfile, or for the default one."""
    if profile is None:
        return sc._jsc.sc().resourceProfileManager().defaultResourceProfile()
    return sc.parallelize([0], 1).withResources(profile)._jrdd.getResourceProfile()


def count(sc: Any, profile: Any = None) -> int:
    """Tasks that can run at once now."""
    if profile is not None:
        sc._jsc.sc().resourceProfileManager().addResourceProfile(java_profile(sc, profile))
    return int(sc._jsc.sc().maxNumConcurrentTasks(java_profile(sc, profile)))


def is_dynamic(sc: Any) -> bool:
    return bool(sc.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true")


def is_local(sc: Any) -> bool:
    """Driver and tasks are on one machine."""
    return bool(sc.master.startswith("local"))


def max_failures(sc: Any) -> int:
    """How often Spark starts a task: with a local master once, or as often as that says."""
    local = re.fullmatch(r"local(?:\[[^,\]]+(?:,\s*(\d+))?\])?", sc.master)
    if local is not None:
        return int(local.group(1) or 1)
    return int(sc.getConf().get("spark.task.maxFailures", "4"))


def task_needs(sc: Any, profile: Any = None) -> str:
    """What one task takes, for sentences."""
    if profile is not None:
        return "resource_profile: " + ", ".join(
            f"{name}={need.amount:g}" for name, need in sorted(profile.taskResources.items()))
    conf = sc.getConf()
    needs = [f"spark.task.cpus={conf.get('spark.task.cpus', '1')}"]
    needs += [f"{key}={value}" for key, value in conf.getAll()
              if key.startswith("spark.task.resource.")]
    return ", ".join(needs)


def timed_out(what: str, start_timeout: float) -> TimeoutException:
    return TimeoutException(
        f"Timed out waiting for Spark tasks to start. {what} Give the application more cores or "
        "executors, ask for fewer processes with num_proc, or, where executors come on demand, "
        "allow more time with start_timeout or HOROVOD_SPARK_START_TIMEOUT. "
        f"Timeout after {start_timeout:g} seconds.")


def quiet_seconds(sc: Any) -> float:
    """How long no executor must have come for all to be there."""
    n_executors = int(sc._jsc.sc().getExecutorMemoryStatus().size()) - 1  # the driver is in it
    wanted = int(sc.getConf().get("spark.executor.instances", "0"))
    return QUIET_SECONDS if n_executors >= wanted else MISSING_SECONDS


def default_num_proc(sc: Any, deadline: float, profile: Any = None,
                     clock: Callable[[], float] = time.monotonic,
                     sleep: Callable[[float], None] = time.sleep) -> int:
    """All task slots, once executors have stopped coming."""
    conf = sc.getConf()
    if conf.get("spark.default.parallelism") is not None or is_dynamic(sc):
        return int(sc.defaultParallelism)
    seen, since = count(sc, profile), clock()
    if sc.master.startswith("local") and not sc.master.startswith("local-cluster"):
        return seen
    if (sc.applicationId, seen) in _settled:
        return seen
    while clock() < deadline:
        if seen > 0 and clock() - since >= quiet_seconds(sc):
            _settled.add((sc.applicationId, seen))
            return seen
        sleep(POLL_SECONDS)
        now = count(sc, profile)
        if now != seen:
            seen, since = now, clock()
    return max(seen, 1)


def wait_for(sc: Any, n: int, deadline: float, start_timeout: float,
             profile: Optional[Any] = None, clock: Callable[[], float] = time.monotonic,
             sleep: Callable[[float], None] = time.sleep) -> None:
    """Until n tasks can run at once; TimeoutException says how many could."""
    while True:
        found = count(sc, profile)
        if found >= n:
            return
        if clock() >= deadline:
            raise timed_out(f"{n} task slots are needed, but only {found} were found "
                            f"({task_needs(sc, profile)}).", start_timeout)
        sleep(POLL_SECONDS)
