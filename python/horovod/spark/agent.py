# SPDX-License-Identifier: Apache-2.0
"""What a Spark task does for its rank: it starts the launcher's agent and waits until that leaves.

The agent (horovodrun --agent --dial) calls the driver, proves the job's secret, starts the rank and
carries its output and result. It ends with this process, of which it holds one end of a pipe, and
with the driver. The task itself returns nothing through Spark. What ranks find in their environment
besides their place in the job is put together here, where the worker's own is known.
"""
import contextlib
import hashlib
import os
import platform
import subprocess
import sys
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional

from horovod.runner import start_launcher
from horovod.spark import task

# Of an agent that has been let go: it ends its rank first.
LEAVE_SECONDS = 5.0
# What Spark puts into the environment of its driver and its workers for itself: whoever has one may
# do with the driver what he likes.
SPARK_SECRETS = ("PYSPARK_GATEWAY_SECRET", "PYTHON_WORKER_FACTORY_SECRET",
                 "SPARK_CONNECT_AUTHENTICATE_TOKEN", "_SPARK_AUTH_SECRET")


class JobSpec(NamedTuple):
    """What travels in Spark's closure."""
    addresses: List[str]
    port: int
    secret: bytes
    start_timeout: float
    environment: Mapping[str, Optional[str]]  # of the ranks; None removes a variable
    executable: Optional[str] = None          # their Python; None: the worker's own
    max_failures: int = 0                     # how often Spark starts the task of an elastic rank


class RankFailed(Exception):
    """For Spark, which starts the task of an elastic rank again when it fails."""


def serve(spec: JobSpec, index: int, attempt: int, devices: List[str]) -> int:
    """The whole life of one task; the exit status of its agent, 1 if its rank has failed or was
    taken away."""
    # The host's name wherever there is talk of it, with a mark that is equal for tasks on one
    # machine in the same namespaces: containers are their own hosts.
    parts = [platform.node(), os.environ.get("CONTAINER_ID", "")]
    for name in ("cgroup", "ipc", "mnt", "net", "user", "uts"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    mark = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:6]
    host = f"{platform.node().split('.')[0]}-{mark}"
    agent = start_launcher(
        ["--agent", "--dial", f"{','.join(spec.addresses)}:{spec.port}",
         "--agent-name", host, "--agent-slot", str(index),
         "--agent-about", " ".join([host, *devices]),
         "--start-timeout", f"{min(max(spec.start_timeout, 1.0), 86400.0):g}"],
        spec.secret, rank_environment(spec, devices))
    try:
        code = agent.wait()
    finally:
        let_go(agent)
    if code != 0 and attempt + 1 < spec.max_failures:
        raise RankFailed(f"the rank of task {index} has failed")
    return code


def let_go(agent: subprocess.Popen) -> None:
    """It sees the end of the pipe, and leaves."""
    assert agent.stdin is not None
    agent.stdin.close()
    try:
        agent.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        agent.kill()  # its supervisor ends the rank
        agent.wait()


def serve_partition(spec: JobSpec, indexes: Iterable[int]) -> Iterator[Any]:
    """For mapPartitions: one element, the partition's number."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    gpu = context.resources().get("gpu")
    for index in indexes:
        serve(spec, index, context.attemptNumber(), list(gpu.addresses) if gpu else [])
    return iter(())


# --- The environment of the rank ---------------------------------------------------------------


def rank_environment(spec: JobSpec, devices: List[str]) -> Dict[str, str]:
    given = spec.environment
    merged: Dict[str, Optional[str]] = {**os.environ, **given}
    # Is the rank to see the GPUs of its task only? Not if the user has decided otherwise.
    if (devices and "CUDA_VISIBLE_DEVICES" not in given
            and merged.get("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX") != "1"):
        merged["CUDA_VISIBLE_DEVICES"] = visible_devices(devices,
                                                         os.environ.get("CUDA_VISIBLE_DEVICES"))
    if given.get("PYTHONPATH", "") is not None:
        # Modules the worker can import, the rank can: Spark adds folders of its own. What the user
        # wants first comes first.
        added = [path for path in sys.path if not path.startswith((sys.base_prefix, sys.prefix))]
        texts = [merged.get("HOROVOD_SPARK_PYTHONPATH"), given.get("PYTHONPATH"), *added,
                 os.environ.get("PYTHONPATH")]
        merged["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(
            path for text in texts if text for path in text.split(os.pathsep) if path))
    merged.update({"PYTHONUNBUFFERED": "1", "HOROVOD_SPARK_WORK_DIR": os.getcwd(),
                   "HOROVOD_SPARK_PYTHON": spec.executable or sys.executable,
                   task.DEVICES_VARIABLE: ",".join(devices)})
    return {name: value for name, value in merged.items()
            if value is not None and name not in SPARK_SECRETS}


def visible_devices(devices: List[str], visible: Optional[str]) -> str:
    """Spark counts the devices its executor sees; CUDA may know them by other names."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    return ",".join(names[int(device)] if device.isdigit() and int(device) < len(names) else device
                    for device in devices)
