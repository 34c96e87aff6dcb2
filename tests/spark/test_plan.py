# SPDX-License-Identifier: Apache-2.0
"""Slots, environments and lines: no Spark, no processes."""
import io
import os
import threading
import time
import types

import cloudpickle
import pytest

from horovod.spark import agent, conf, connect, elastic, launch, slots
from horovod.spark.session import Output
from horovod.runner.common.util.timeout import TimeoutException


def test_what_comes_in_pieces_is_written_in_lines():
    read, write = os.pipe()
    out = io.StringIO()
    output = Output(out, io.StringIO(), bar_is_up=True)
    pump = threading.Thread(target=output.pump, args=("stdout", open(read, "rb")))
    pump.start()
    for byte in "one\ntwo \u00fc\nbar\rlast".encode():
        os.write(write, bytes([byte]))
    os.close(write)
    pump.join()
    assert out.getvalue() == "\none\ntwo \u00fc\nbar\rlast"


@pytest.mark.parametrize("prefix, timestamp, wanted", [
    (False, False, ["--plain-output"]), (True, False, []),
    (False, True, ["--prefix-output-with-timestamp"])])
def test_what_stands_in_front_of_lines(prefix, timestamp, wanted):
    file = io.StringIO() if prefix else None
    assert Output(file, None, timestamp).words == ["--color", "never", *wanted]


@pytest.mark.parametrize("devices, visible, wanted", [
    (["2"], None, "2"), (["1", "0"], "4,5,6", "5,4"), (["GPU-x"], "4,5", "GPU-x"),
    (["7"], "4,5", "7")])
def test_visible_devices(devices, visible, wanted):
    assert agent.visible_devices(devices, visible) == wanted


@pytest.mark.parametrize("environment, given, devices, wanted", [
    ({}, {}, ["1"], True), ({}, {}, [], False), ({}, {"CUDA_VISIBLE_DEVICES": "0"}, ["1"], False),
    ({"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "1"}, {}, ["1"], False)])
def test_whose_devices_a_rank_sees(monkeypatch, environment, given, devices, wanted):
    monkeypatch.setattr(os, "environ", {**environment, "CUDA_VISIBLE_DEVICES": "4,5"})
    seen = agent.rank_environment(agent.JobSpec([], 0, b"", 1.0, given), devices)
    assert (seen["CUDA_VISIBLE_DEVICES"] == "5") == wanted
    assert seen["HOROVOD_SPARK_DEVICES"] == ",".join(devices)


class FakeContext:
    """As much of a SparkContext as slots.py looks at; slots come as time goes by, four to an
    executor, each on a host of its own. The master does not answer."""
    defaultParallelism = 2
    master = "spark://x:7077"

    def __init__(self, counts, **conf):
        self.counts = list(counts)
        self.conf = {key.replace("_", "."): value for key, value in conf.items()}
        self.now = 0.0
        self.applicationId = f"application {id(self)}"
        self._jsc = self._jvm = self
        self.told = []

    def getConf(self):
        return self

    def get(self, key, default=None):
        return self.conf.get(key, default)

    def getAll(self):
        return list(self.conf.items())

    def __getattr__(self, name):  # whatever else there is in Java
        return self

    def __call__(self, *args):
        return self

    def schedulerBackend(self):
        raise RuntimeError("no master")

    def maxNumConcurrentTasks(self, _):
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]

    def executorList(self, _):
        listed = [types.SimpleNamespace(id=lambda: "driver", totalCores=lambda: 0)]
        # Spark does not know the port of one that has just come.
        listed += [types.SimpleNamespace(id=str, hostPort=lambda i=i: f"10.0.0.{i}{':1' * (i % 2)}",
                                         totalCores=lambda: 4) for i in range(self.counts[0] // 4)]
        return types.SimpleNamespace(size=lambda: len(listed), apply=listed.__getitem__)

    def sleep(self, seconds):
        self.now += seconds

    def clock(self):
        return self.now

    def choose(self):
        return slots.default_num_proc(self, 600, None, self.clock, self.sleep, self.told.append)


def test_num_proc_waits_for_executors():
    sc = FakeContext([0, 0, 4, 4, 8, 8, 16])
    assert sc.choose() == 16
    assert slots.QUIET_SECONDS <= sc.now < 5
    first = sc.now
    assert sc.choose() == 16
    assert sc.now == first and sc.told == []  # once for an application


def test_num_proc_waits_longer_for_executors_that_were_asked_for():
    sc = FakeContext([4] * 200 + [16], spark_executor_instances="4", spark_executor_cores="4")
    sc.master = "yarn"
    assert sc.choose() == 16
    assert sc.told == ["Waiting for executors: 4 of 16 cores are there "
                       "(spark.executor.instances=4)."]
    sc = FakeContext([4], spark_executor_instances="5", spark_executor_cores="4")  # one never comes
    sc.master = "k8s://x"
    assert sc.choose() == 4
    assert slots.MISSING_SECONDS <= sc.now < slots.MISSING_SECONDS + 1
    assert sc.told[-1] == ("Only 4 of 20 cores are there (spark.executor.instances=5); not waiting "
                           "for more.")


def test_num_proc_waits_for_all_that_is_promised_and_no_longer():
    sc = FakeContext([4] * 50 + [12] * 100 + [16], spark_cores_max="16")
    assert sc.choose() == 16
    assert sc.now < 16 and "(spark.cores.max=16)" in sc.told[0]
    sc = FakeContext([0] * 10 + [8])
    sc.master = "local-cluster[2,4,1024]"
    assert sc.choose() == 8
    assert sc.now < 2 and sc.told == []


@pytest.mark.parametrize("master, conf, workers, cores, why", [
    ("spark://x:7077", {}, [(4, 1024)] * 4, 16, "the master has 4 workers with 16 cores"),
    ("spark://x:7077", {}, [(4, 1024)], 4, "the master has 1 worker with 4 cores"),
    ("spark://x:7077", {"spark_cores_max": "6"}, [(4, 1024)] * 4, 6, "spark.cores.max=6"),
    ("spark://x:7077", {"spark_cores_max": "99"}, [(4, 1024)] * 4, 16,
     "the master has 4 workers with 16 cores"),
    ("spark://x:7077", {"spark_executor_cores": "3"}, [(4, 1024), (7, 2048)], 9,
     "the master has 2 workers with 9 cores"),
    ("spark://x:7077", {"spark_executor_cores": "2", "spark_cores_max": "5"}, [(8, 8192)], 4,
     "spark.cores.max=5"),
    ("spark://x:7077", {}, [(4, 1024), (4, 256)], 4, "the master has 2 workers with 4 cores"),
    ("spark://x:7077", {}, [], 0, "the master has 0 workers with 0 cores"),
    ("local-cluster[2,3,1024]", {}, [], 6, "local-cluster[2,3,1024]"),
    ("yarn", {"spark_executor_instances": "3"}, [], 3, "spark.executor.instances=3")])
def test_what_is_promised(master, conf, workers, cores, why):
    sc = FakeContext([0], **conf)
    sc.master = master
    sc.executorMemory = lambda: 512
    answer = [types.SimpleNamespace(isAlive=lambda alive=alive: alive, cores=lambda c=c: c,
                                    memory=lambda m=m: m)
              for alive, kind in ((True, workers), (False, [(64, 65536)])) for c, m in kind]
    sc.schedulerBackend = lambda: sc
    sc.workers = lambda: answer
    assert slots.promised_cores(sc) == (cores, why)


def test_num_proc_is_what_the_user_set():
    sc = FakeContext([4], spark_default_parallelism="2")
    assert sc.choose() == 2


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


CALL = launch.Call(None, None, None, None, None, False, None, None, 0, [])


@pytest.mark.parametrize("told", ["abc", "-3", "0", "nan", "inf"])
def test_a_time_that_is_none(monkeypatch, told):
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", told)
    with pytest.raises(ValueError, match=f"HOROVOD_SPARK_START_TIMEOUT is '{told}'"):
        launch.start_timeout_of(None)
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", told)
    with pytest.raises(ValueError, match=f"HOROVOD_ELASTIC_TIMEOUT is '{told}'"):
        elastic.ElasticRun(FakeContext([4]), 9.0, CALL, None, None, None)


@pytest.mark.parametrize("given, variable, argument",
                         [(-3, "HOROVOD_SPARK_START_TIMEOUT", "start_timeout"),
                          ("soon", "HOROVOD_ELASTIC_TIMEOUT", "elastic_timeout")])
def test_a_timeout_that_cannot_be_is_refused(given, variable, argument):
    with pytest.raises(ValueError, match=f"^{argument} is {given!r}: a number of seconds"):
        launch.start_timeout_of(given, variable)


def test_old_names_of_the_limits(monkeypatch):
    """run_elastic as far as it starts something."""
    def no_job(job, n, n_tasks, words):
        return [cloudpickle.dumps((n, int(words[3]), n_tasks, job.spec.max_failures))]

    monkeypatch.setattr(launch, "find_spark",
                        lambda: (None, FakeContext([4], spark_task_maxFailures="9")))
    monkeypatch.setattr(launch.SparkRun, "carry_out", no_job)
    with pytest.warns(DeprecationWarning) as seen:
        found = elastic.run_elastic(print, num_proc=3, min_np=2, max_np=4, verbose=0)
    assert found == [(3, 2, 4, 9)]
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
    return connect.Job(n, b"", [], agent.JobSpec([], 0, bytes(32), start_timeout, {}))


def test_a_profile_through_connect():
    profile = Profile()
    client = FakeClient([types.SimpleNamespace(number=0, kind="result", rank=0, data=b"x")])
    deadline = time.monotonic() + 9
    assert connect.carry_out(client, connect_job(1, 9), deadline, Output(), profile) == [b"x"]
    assert client.told["profile"] is profile and client.told["barrier"]
    assert connect.task_cpus(client, profile) == 2 and client.handlers == []


def test_a_job_of_connect_that_does_not_begin(monkeypatch):
    monkeypatch.setattr(connect, "PROGRESS_SECONDS", 0.1)
    client = FakeClient(None)
    with pytest.raises(TimeoutException, match="Spark has not started the 2 tasks.*after 0.2 s"):
        connect.carry_out(client, connect_job(2, 0.2), time.monotonic() + 0.2, Output())
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


def test_slots_that_come_late_are_told(capsys):
    sc = FakeContext([16])
    job = launch.SparkRun(sc, 9.0, CALL._replace(verbose=1))
    job.carry_out = lambda n, n_tasks, words: [cloudpickle.dumps((n, n_tasks, words))]
    sc.conf["spark.cores.max"] = "16"
    assert job.run(None) == [(16, 16, ["-np", "16"])]
    assert capsys.readouterr().out == "Running 16 processes on 4 hosts...\n"
    job.thread = threading.current_thread()
    session = types.SimpleNamespace(counts={"running": 16}, finished=threading.Event())
    job.check(session, 16)
    sc.counts = [20]
    job.check(session, 16)  # not asked every time
    assert capsys.readouterr().out == ""
    job._look = 0.0
    job.check(session, 16)
    job.check(session, 16)
    assert capsys.readouterr().out == (
        "4 task slots came after the job had begun with 16, and are not used by it; the next run "
        "will use all.\n")


@pytest.mark.parametrize("num_proc, conf, words", [
    (1, {}, "Running 1 process..."), (3, {}, "Running 3 processes..."),
    (None, {"spark_default_parallelism": "2"}, "Running 2 processes..."),
    (None, {"spark_cores_max": "4"}, "Running 4 processes on 1 host...")])
def test_what_is_said_at_the_start(capsys, num_proc, conf, words):
    job = launch.SparkRun(FakeContext([4], **conf), 9.0, CALL._replace(verbose=1))
    job.carry_out = lambda n, n_tasks, words: []
    job.run(num_proc)
    assert capsys.readouterr().out == words + "\n"
