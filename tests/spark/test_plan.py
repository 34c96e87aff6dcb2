# SPDX-License-Identifier: Apache-2.0
"""Slots, environments and lines: no Spark, no processes."""
import io
import os
import threading
import time
import types

import pytest

from horovod.spark import agent, conf, connect, elastic, launch, slots
from horovod.spark.output import Output
from horovod.runner.common.util.timeout import TimeoutException


def test_what_comes_in_pieces_is_written_in_lines():
    read, write = os.pipe()
    out = io.StringIO()
    pump = Output(out, io.StringIO(), bar_is_up=True).pump("stdout", open(read, "rb"))
    for byte in "one\ntwo \u00fc\nbar\rlast".encode():
        os.write(write, bytes([byte]))
    os.close(write)
    pump.join()
    assert out.getvalue() == "\none\ntwo \u00fc\nbar\rlast"


@pytest.mark.parametrize("prefix, timestamp, wanted", [
    (False, False, ["--plain-output"]), (True, False, []),
    (False, True, ["--prefix-output-with-timestamp"])])
def test_what_stands_in_front_of_lines(prefix, timestamp, wanted):
    assert Output(None, None, prefix, timestamp).words() == ["--color", "never", *wanted]


@pytest.mark.parametrize("devices, visible, wanted", [
    (["2"], None, "2"), (["1", "0"], "4,5,6", "5,4"), (["GPU-x"], "4,5", "GPU-x"),
    (["7"], "4,5", "7")])
def test_visible_devices(devices, visible, wanted):
    assert agent.visible_devices(devices, visible) == wanted


@pytest.mark.parametrize("environment, given, devices, wanted", [
    ({}, {}, ["1"], True), ({}, {}, [], False), ({}, {"CUDA_VISIBLE_DEVICES": "0"}, ["1"], False),
    ({"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "1"}, {}, ["1"], False)])
def test_whose_devices_a_rank_sees(environment, given, devices, wanted):
    assert agent.shows_own_devices(environment, given, devices) == wanted


class FakeContext:
    """As much of a SparkContext as slots.py looks at; slots come as time goes by."""
    defaultParallelism = 2

    def __init__(self, counts, **conf):
        self.master = "spark://x:7077"
        self.counts = list(counts)
        self.conf = {key.replace("_", "."): value for key, value in conf.items()}
        self.now = 0.0
        self.applicationId = f"application {id(self)}"
        self.n_executors = 4
        self._jsc = self

    def getConf(self):
        return self

    def get(self, key, default=None):
        return self.conf.get(key, default)

    def getAll(self):
        return list(self.conf.items())

    def sc(self):
        return self

    resourceProfileManager = defaultResourceProfile = sc

    def maxNumConcurrentTasks(self, _):
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]

    def getExecutorMemoryStatus(self):
        return self

    def size(self):
        return self.n_executors + 1

    def sleep(self, seconds):
        self.now += seconds

    def clock(self):
        return self.now


def test_num_proc_waits_for_executors():
    sc = FakeContext([0, 0, 4, 4, 8, 8, 16])
    assert slots.default_num_proc(sc, 600, None, sc.clock, sc.sleep) == 16
    assert slots.QUIET_SECONDS <= sc.now < 5
    first = sc.now
    assert slots.default_num_proc(sc, 600, None, sc.clock, sc.sleep) == 16
    assert sc.now == first  # once for an application


def test_num_proc_waits_longer_for_executors_that_were_asked_for():
    sc = FakeContext([4] * 200 + [16], spark_executor_instances="4")
    sc.n_executors = 1
    assert slots.default_num_proc(sc, 600, None, sc.clock, sc.sleep) == 16
    sc = FakeContext([4], spark_executor_instances="5")  # one never comes
    assert slots.default_num_proc(sc, 600, None, sc.clock, sc.sleep) == 4
    assert slots.MISSING_SECONDS <= sc.now < slots.MISSING_SECONDS + 1


def test_num_proc_is_what_the_user_set():
    sc = FakeContext([4], spark_default_parallelism="2")
    assert slots.default_num_proc(sc, 600, None, sc.clock, sc.sleep) == 2


def test_too_few_slots_are_told():
    sc = FakeContext([3], spark_task_cpus="2", spark_task_resource_gpu_amount="1")
    with pytest.raises(TimeoutException, match="^Timed out waiting for Spark tasks to start.") as e:
        slots.wait_for(sc, 5, 10, 10, None, sc.clock, sc.sleep)
    text = str(e.value)
    for part in ("5 task slots", "3 were found", "spark.task.cpus=2",
                 "spark.task.resource.gpu.amount=1", "start_timeout", "Timeout after 10 seconds."):
        assert part in text
    assert 10 <= sc.now < 11


@pytest.mark.parametrize("given, told, seconds", [
    (None, None, 600.0), (None, "", 600.0), (None, "45", 45.0), (7, "45", 7.0)])
def test_how_long_tasks_may_take_to_start(monkeypatch, given, told, seconds):
    monkeypatch.delenv("HOROVOD_SPARK_START_TIMEOUT", raising=False)
    if told is not None:
        monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", told)
    assert launch.start_timeout_of(given) == seconds


@pytest.mark.parametrize("told", ["abc", "-3", "0", "nan", "inf"])
def test_a_time_that_is_none(monkeypatch, told):
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", told)
    with pytest.raises(ValueError, match=f"HOROVOD_SPARK_START_TIMEOUT is '{told}'"):
        launch.start_timeout_of(None)


def test_old_names_of_the_limits(monkeypatch):
    """run_elastic as far as it starts something."""
    class NoRun:
        def __init__(self, sc, start_timeout, limits):
            self.limits = limits

        def run(self, n, call):
            return n, self.limits.n_min, self.limits.n_max, self.limits.max_failures

    monkeypatch.setattr(launch, "connect_session", lambda: None)
    monkeypatch.setattr(launch, "active_context",
                        lambda: FakeContext([4], spark_task_maxFailures="9"))
    monkeypatch.setattr(elastic, "ElasticRun", NoRun)
    with pytest.warns(DeprecationWarning) as seen:
        assert elastic.run_elastic(print, num_proc=3, min_np=2, max_np=4, verbose=0) == (3, 2, 4, 9)
    assert [str(warning.message) for warning in seen] == [
        "min_np is deprecated, use min_num_proc instead",
        "max_np is deprecated, use max_num_proc instead"]
    with pytest.raises(ValueError, match="min_num_proc 4, num_proc 3"):
        elastic.run_elastic(print, num_proc=3, min_num_proc=4)


def test_settings_for_elastic_jobs():
    """Pairs for SparkConf.set(), of settings whose defaults are known too."""
    pairs = {name: value for name, value in vars(conf).items()
             if name.startswith("SPARK_CONF_") and isinstance(value, tuple)}
    assert len(pairs) == 19
    for key, value in pairs.values():
        assert isinstance(value, str) and key in conf.SPARK_CONF_DEFAULT_VALUES
    assert {key for key, _ in pairs.values()} == set(conf.SPARK_CONF_DEFAULT_VALUES)
    job = "spark.excludeOnFailure.stage.maxFailedTasksPerExecutor"
    assert conf.SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR == (job, "1")
    assert conf.SPARK_CONF_REUSE_FAILED_EXECUTOR == (job, conf.SPARK_CONF_MAX_INT)
    assert conf.SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK == (
        "spark.excludeOnFailure.task.maxTaskAttemptsPerNode", "2")
    assert int(conf.SPARK_CONF_MAX_INT_MINUS_ONE) == int(conf.SPARK_CONF_MAX_INT) - 1
    sc = FakeContext([1])
    sc.conf = dict([conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK])
    assert slots.max_failures(sc) == 2 ** 31 - 1


class Profile:
    """In the place of a ResourceProfile: two cores for a task."""
    taskResources = {"cpus": types.SimpleNamespace(amount=2.0)}


def test_slots_of_a_profile_are_told():
    needs = slots.task_needs(FakeContext([3], spark_task_cpus="1"), Profile())
    assert needs == "resource_profile: cpus=2"


class FakeClient:
    """A session of Connect whose job is at once over, or never."""

    def __init__(self, rows):
        self.conf = {"spark.default.parallelism": "4"}
        self.rows = rows
        self.told = {}
        self.handlers = []
        self.interrupted = threading.Event()
        self.registerProgressHandler = self.handlers.append
        self.removeProgressHandler = self.handlers.remove
        self.interruptTag = lambda tag: self.interrupted.set()

    def addTag(self, tag):
        self.told["tag"] = tag

    def range(self, *args):
        return self

    def mapInArrow(self, fn, schema, **options):
        self.told.update(options)
        return self

    def collect(self):
        if self.rows is None:
            self.interrupted.wait(60)
        return self.rows


def connect_job(n, start_timeout):
    return connect.Job(n, b"", {}, None, bytes(32), start_timeout, False, False)


def test_a_profile_through_connect():
    profile = Profile()
    client = FakeClient([types.SimpleNamespace(number=0, kind="result", rank=0, data=b"x")])
    deadline = time.monotonic() + 9
    assert connect.run(client, connect_job(1, 9), deadline, Output(), profile) == [b"x"]
    assert client.told["profile"] is profile and client.told["barrier"]
    assert connect.task_cpus(client, profile) == 2 and client.handlers == []


def test_a_job_of_connect_that_does_not_begin(monkeypatch):
    monkeypatch.setattr(connect, "PROGRESS_SECONDS", 0.1)
    client = FakeClient(None)
    with pytest.raises(TimeoutException, match="Spark has not started the 2 tasks.*after 0.2 s"):
        connect.run(client, connect_job(2, 0.2), time.monotonic() + 0.2, Output())
    assert client.interrupted.is_set() and client.handlers == []


def test_sparks_reason_is_short():
    text = ("An error occurred while calling z:x.\n: org.apache.spark.SparkException: Job aborted: "
            "task 0 failed\norg.apache.spark.PythonException: Traceback (most recent call last):\n"
            "  File \"worker.py\", line 1, in main\nModuleNotFoundError: No module named "
            "'horovod'\n\n\tat org.apache.spark.X.y(Z.scala:1)\n\tat a.b(C.java:2)\nCaused by: d\n")
    words = launch.first_words(Exception(text))
    assert "Job aborted: task 0 failed" in words and "\tat" not in words
    assert "ModuleNotFoundError: No module named 'horovod'" in words
    assert "on the executors" in words
