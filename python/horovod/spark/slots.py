# SPDX-License-Identifier: Apache-2.0
"""How many tasks a Spark application can run at once, and waiting until it is enough.

Spark's default parallelism counts cores, and is a constant before executors have registered. What
counts here are task slots: cores and GPUs of the executors that are there, divided by what a task
takes. Spark knows the number (its barrier jobs are checked against it) but has no public call.
"""
import re
import time
from typing import Any, Callable, List, Optional, Set, Tuple

from horovod.runner.common.util.timeout import TimeoutException

POLL_SECONDS = 0.1
# Executors have stopped coming when none has come for this long, if nobody promises more of them;
# or for this long, if somebody does.
QUIET_SECONDS = 3.0
MISSING_SECONDS = 60.0
MASTER_SECONDS = 10  # for the standalone master to say which workers it has

# (application, slots) that have been waited for once.
_settled: Set[Tuple[str, int]] = set()


def count(sc: Any, profile: Any = None) -> int:
    """Tasks that can run at once now."""
    manager = sc._jsc.sc().resourceProfileManager()
    if profile is None:
        needs = manager.defaultResourceProfile()
    else:
        needs = sc.parallelize([0], 1).withResources(profile)._jrdd.getResourceProfile()
        manager.addResourceProfile(needs)
    return int(sc._jsc.sc().maxNumConcurrentTasks(needs))


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


# --- What there is, and what there is to be ------------------------------------------------------


def executors(sc: Any) -> Tuple[int, int]:
    """Cores of the executors that have registered, and the number of hosts they are on."""
    listed = sc._jsc.sc().statusStore().executorList(True)
    found = [listed.apply(i) for i in range(listed.size())]
    found = [executor for executor in found if executor.id() != "driver"]
    hosts = {re.sub(r":\d+$", "", executor.hostPort()) for executor in found}  # ports come later
    return sum(executor.totalCores() for executor in found), len(hosts)


def promised_cores(sc: Any) -> Tuple[int, str]:
    """How many cores the application is to get, and who says so; 0 if nobody does."""
    conf = sc.getConf()
    size = int(conf.get("spark.executor.cores", "0"))
    local = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*", sc.master)
    if sc.master.startswith("spark://"):
        cores, why = cores_of_workers(sc, size)
    elif local is not None:
        cores, why = int(local.group(1)) * int(local.group(2)), sc.master
    else:  # a cluster manager that is asked for a number of executors
        asked = conf.get("spark.executor.instances", "0")
        return int(asked) * max(size, 1), f"spark.executor.instances={asked}"
    most = int(conf.get("spark.cores.max", "0"))
    if most and (cores == 0 or most < cores):
        return most - (most % size if size else 0), f"spark.cores.max={most}"
    return cores, why


def cores_of_workers(sc: Any, size: int) -> Tuple[int, str]:
    """Those that executors of this size (0: one takes a whole worker) can have on the workers of
    the standalone master."""
    total = n_workers = 0
    for address in sc.master[len("spark://"):].split(","):
        try:
            workers = workers_of(sc, address)
        except Exception:
            continue  # one that is to stand by and is not there, or a Spark that tells otherwise
        for worker in workers:
            if worker.isAlive():
                n_workers += 1
                n_fit = worker.memory() // sc._jsc.sc().executorMemory()
                total += (min(n_fit, worker.cores() // size) * size if size
                          else worker.cores() if n_fit else 0)
    return total, f"the master has {plural(n_workers, 'worker')} with {plural(total, 'core')}"


def workers_of(sc: Any, address: str) -> List[Any]:
    """What the master answers to its own web pages; there is no public call."""
    jvm = sc._jvm
    host, _, port = address.rpartition(":")
    messages = "org.apache.spark.deploy.DeployMessages$"
    question = jvm.java.lang.Class.forName(messages + "RequestMasterState$")
    answer = jvm.java.lang.Class.forName(messages + "MasterStateResponse")
    seconds = jvm.scala.concurrent.duration.FiniteDuration(
        MASTER_SECONDS, jvm.java.util.concurrent.TimeUnit.SECONDS)
    master = sc._jsc.sc().schedulerBackend().rpcEnv().setupEndpointRef(
        jvm.org.apache.spark.rpc.RpcAddress(host, int(port)), "Master")
    return list(master.askSync(question.getField("MODULE$").get(None),
                               jvm.org.apache.spark.rpc.RpcTimeout(seconds, "horovod.spark"),
                               jvm.scala.reflect.ClassTag.apply(answer)).workers())


def plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 'es' if word.endswith('s') else 's'}"


# --- Waiting -------------------------------------------------------------------------------------


def default_num_proc(sc: Any, deadline: float, profile: Any = None,
                     clock: Callable[[], float] = time.monotonic,
                     sleep: Callable[[float], None] = time.sleep,
                     tell: Callable[[str], None] = lambda text: None) -> int:
    """All task slots, once there are all that were promised, or executors have stopped coming."""
    conf = sc.getConf()
    if (conf.get("spark.default.parallelism") is not None
            or conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true"):
        return int(sc.defaultParallelism)
    seen, since = count(sc, profile), clock()
    if sc.master.startswith("local") and not sc.master.startswith("local-cluster"):
        return seen
    if (sc.applicationId, seen) in _settled:
        return seen
    cores, why = promised_cores(sc)
    there, has_told = executors(sc)[0], False
    while clock() < deadline:
        quiet = clock() - since
        if seen > 0 and (there >= cores > 0 or quiet >= MISSING_SECONDS
                         or (there >= cores and quiet >= QUIET_SECONDS)):
            break
        if there < cores and quiet >= QUIET_SECONDS and not has_told:
            tell(f"Waiting for executors: {there} of {plural(cores, 'core')} are there ({why}).")
            has_told = True
        sleep(POLL_SECONDS)
        there, now = executors(sc)[0], count(sc, profile)  # so that none counts as a core alone
        if now != seen:
            seen, since = now, clock()
    if there < cores:
        tell(f"Only {there} of {plural(cores, 'core')} are there ({why}); not waiting for more.")
    _settled.add((sc.applicationId, seen))
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
