# SPDX-License-Identifier: Apache-2.0
"""Executors that are processes of their own: losing one, dynamic allocation, GPUs, secrets."""
import glob
import os
import signal
import sys
import threading
import time

import cloudpickle
import pytest

import horovod.spark

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests

CLUSTER = "local-cluster[2,2,1024]"


def sleep_long(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(600)


def executors_of(pids):
    """Process ids of the JVMs that are ancestors of these ranks."""
    found = set()
    for pid in pids:
        while pid > 1:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"CoarseGrainedExecutorBackend" in file.read():
                    found.add(pid)
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
    return sorted(found)


def kill_executor_when_running(ranks, n):
    def kill():
        ranks.wait_for(n)
        pids = [int(name) for name in os.listdir(ranks.folder) if name.isdigit()]
        ranks.strike()
        os.kill(executors_of(pids)[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_num_proc_is_all_slots(sessions):
    sessions.get(CLUSTER)
    assert horovod.spark.run(lambda: int(os.environ["HOROVOD_RANK"])) == [0, 1, 2, 3]


def test_a_lost_executor_ends_the_job(sessions, ranks):
    sessions.get(CLUSTER)
    thread = kill_executor_when_running(ranks, 4)
    # In Spark's words, or in ours if Spark takes longer to notice than we wait for it.
    with pytest.raises(RuntimeError, match="(?s)Spark job has failed.*(lost|exit)|Lost the Spark"):
        horovod.spark.run(sleep_long, (ranks.folder,), num_proc=4)
    ranks.check_end()
    thread.join()


def test_task_cpus_divide_the_slots(sessions):
    sessions.get(CLUSTER, spark__task__cpus="2")
    assert horovod.spark.run(lambda: os.environ["OMP_NUM_THREADS"]) == ["2", "2"]


def test_dynamic_allocation_uses_plain_tasks(sessions, ranks):
    sessions.get(CLUSTER, spark__dynamicAllocation__enabled="true",
                 spark__dynamicAllocation__shuffleTracking__enabled="true")
    ranks_seen = horovod.spark.run(lambda: int(os.environ["HOROVOD_RANK"]), num_proc=4)
    assert ranks_seen == [0, 1, 2, 3]
    # Spark would start the lost tasks again, and a job of two halves would go on.
    thread = kill_executor_when_running(ranks, 4)
    with pytest.raises(RuntimeError, match="Lost the Spark task of rank|Spark job has failed"):
        horovod.spark.run(sleep_long, (ranks.folder,), num_proc=4)
    ranks.check_end()
    thread.join()
    pids = [name for name in os.listdir(ranks.folder) if name.isdigit()]
    assert len(pids) == 4  # no rank was started a second time


def test_gpus_are_told_apart(sessions, gpu_script):
    sessions.get(CLUSTER, spark__worker__resource__gpu__amount="2",
                 spark__worker__resource__gpu__discoveryScript=gpu_script,
                 spark__executor__resource__gpu__amount="2", spark__task__resource__gpu__amount="1")

    def fn():
        from horovod.spark.task import get_available_devices

        return get_available_devices(), os.environ["CUDA_VISIBLE_DEVICES"]

    seen = horovod.spark.run(fn, num_proc=4)
    assert all(devices == [visible] for devices, visible in seen)
    assert sorted(visible for _, visible in seen) == ["0", "0", "1", "1"]


def test_a_resource_profile(sessions):
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    sessions.get(CLUSTER)
    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
    threads = horovod.spark.run(lambda: os.environ["OMP_NUM_THREADS"], resource_profile=profile)
    assert threads == ["2", "2"]


def test_secrets_are_nowhere_to_be_read(sessions, tmp_path):
    """Every process's arguments and environment, and the event log, while a job runs."""
    log = tmp_path / "events"
    log.mkdir()
    sessions.get(CLUSTER, spark__eventLog__enabled="true", spark__eventLog__dir=f"file://{log}",
                 spark__eventLog__compress="false",
                 spark__authenticate="true", spark__authenticate__secret=os.urandom(16).hex(),
                 spark__network__crypto__enabled="true")

    def fn():
        secret = open(os.environ["HOROVOD_SECRET_FILE"]).read()
        found = []
        for pid in os.listdir("/proc"):
            for name in ("environ", "cmdline"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        if secret.encode() in file.read():
                            found.append((pid, name))
                except OSError:
                    pass
        spark_secret = [name for name in os.environ if name == "_SPARK_AUTH_SECRET"]
        return secret, found, spark_secret, os.environ["HOROVOD_ENCRYPT"]

    secret, found, spark_secret, encrypt = horovod.spark.run(fn, num_proc=2)[0]
    assert len(secret) == 64 and found == [] and spark_secret == [] and encrypt == "always"
    sessions.stop()
    texts = [open(path, "rb").read() for path in glob.glob(f"{log}/**", recursive=True)
             if os.path.isfile(path)]
    assert any(b"SparkListenerJobStart" in text for text in texts)
    for text in texts:
        assert secret.encode() not in text and bytes.fromhex(secret) not in text
