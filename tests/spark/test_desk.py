# SPDX-License-Identifier: Apache-2.0
"""The desk, agents, wardens and ranks, with processes of ours in the place of Spark tasks."""
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest

from horovod.spark import driver, plan
from horovod.spark.agent import SPARK_SECRETS, JobSpec, serve
from horovod.spark.launch import describe
from horovod.spark.line import Kind, Line, dial
from horovod.spark.output import Output

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests

SECRET = bytes(range(32))
PATIENCE_SECONDS = 60

AGENT = ("import sys; from horovod.spark.agent import JobSpec, serve;"
         "serve(JobSpec(['127.0.0.1'], int(sys.argv[1]), bytes(range(32)), 60.0),"
         " int(sys.argv[2]), int(sys.argv[3]), [], 1)")


class Job:
    """n agents on this machine, and the desk they call."""

    def __init__(self, n, fn, args=(), env=None, executable=None):
        self.out, self.err = io.StringIO(), io.StringIO()
        self.desk = driver.Desk(n, SECRET, "127.0.0.1", Output(self.out, self.err))
        self.desk.open(cloudpickle.dumps((fn, args, {})), env or {}, executable)
        self.agents = [self.start_agent(index) for index in range(n)]

    def start_agent(self, index, attempt=0):
        return subprocess.Popen([sys.executable, "-c", AGENT, str(self.desk.port), str(index),
                                 str(attempt)])

    def wait(self):
        assert self.desk.done.wait(PATIENCE_SECONDS)

    def close(self):
        self.desk.stop()
        assert self.desk.finished.wait(PATIENCE_SECONDS)
        return [agent.wait(timeout=PATIENCE_SECONDS) for agent in self.agents]


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition, seconds=PATIENCE_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def say_who(folder):
    rank = os.environ["HOROVOD_RANK"]
    with open(f"{folder}/{rank}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")


def pids_in(folder):
    return [int(open(f"{folder}/{name}").read()) for name in os.listdir(folder)
            if name.isdigit() and not name.endswith(".tmp")]


def test_results_and_output():
    def fn(x):
        print(f"rank {os.environ['HOROVOD_RANK']} of {os.environ['HOROVOD_SIZE']}")
        return os.environ["HOROVOD_RANK"], x, os.environ["COLOUR"]

    job = Job(2, fn, (b"x" * 3000000,), {"COLOUR": "blue"})
    job.wait()
    assert job.desk.failure is None
    results = [cloudpickle.loads(data) for data in job.desk.results()]
    assert results == [("0", b"x" * 3000000, "blue"), ("1", b"x" * 3000000, "blue")]
    assert job.close() == [0, 0]
    assert sorted(job.out.getvalue().split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"]


def test_folders_the_user_wants_first(tmp_path):
    job = Job(1, lambda: sys.path[1], (),  # the first is where the agent was started
              {"HOROVOD_SPARK_PYTHONPATH": str(tmp_path / "first")})
    job.wait()
    first = cloudpickle.loads(job.desk.results()[0])
    job.close()
    assert first == str(tmp_path / "first")


def test_a_python_path_of_the_user_is_added(tmp_path, monkeypatch):
    """Else the rank would lose what its agent has found, this package first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "agents"), prepend=os.pathsep)
    job = Job(1, lambda: sys.path[1:], (), {"PYTHONPATH": str(tmp_path / "first")})
    job.wait()
    assert job.desk.failure is None, describe(job.desk.failure)
    path = cloudpickle.loads(job.desk.results()[0])
    job.close()
    assert path[0] == str(tmp_path / "first")
    assert str(tmp_path / "agents") in path


def test_secrets_of_spark_stay_where_they_are():
    job = Job(1, lambda: [name for name in SPARK_SECRETS if name in os.environ], (),
              dict.fromkeys(SPARK_SECRETS, "secret"))
    job.wait()
    seen = cloudpickle.loads(job.desk.results()[0])
    job.close()
    assert seen == []


def test_the_secret_is_a_memory_file():
    def fn():
        path = os.environ["HOROVOD_SECRET_FILE"]
        twice = [open(path).read() for _ in range(2)]
        everything = open("/proc/self/environ").read() + open("/proc/self/cmdline").read()
        return twice, oct(os.stat(path).st_mode), bytes(range(32)).hex() in everything

    job = Job(1, fn)
    job.wait()
    twice, mode, seen = cloudpickle.loads(job.desk.results()[0])
    job.close()
    assert twice == [SECRET.hex()] * 2 and mode.endswith("600") and not seen


def test_the_cause_is_told_not_its_consequence(tmp_path):
    def fn(folder):
        if os.environ["HOROVOD_RANK"] == "0":
            class HorovodInternalError(RuntimeError):
                pass
            raise HorovodInternalError("rank 1 has left")
        time.sleep(0.2)
        raise KeyError("the cause")

    job = Job(2, fn, (str(tmp_path),))
    job.wait()
    job.close()
    assert job.desk.failure.rank == 1 and job.desk.failure.code == 1
    text = describe(job.desk.failure)
    assert "Process name: 1\nExit code: 1\n" in text
    assert "KeyError: 'the cause'" in text and "in fn" in text
    assert "KeyError: 'the cause'" in job.err.getvalue()


def test_a_crash_is_the_cause_though_heard_last(tmp_path):
    """Who reports first depends on the load of the machine."""
    def fn(folder):
        if os.environ["HOROVOD_RANK"] == "0":
            raise RuntimeError("a rank has gone")
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSEGV)

    job = Job(2, fn, (str(tmp_path),))
    job.wait()
    job.close()
    assert (job.desk.failure.rank, job.desk.failure.code) == (1, 128 + signal.SIGSEGV)


def test_nobody_is_listened_for_when_all_have_ended(monkeypatch):
    """Spark's job is over then, and would be taken for the failure."""
    monkeypatch.setattr(driver, "SETTLE_SECONDS", (600.0,) * 3)

    def fn():
        if os.environ["HOROVOD_RANK"] == "0":
            raise KeyError("the cause")

    job = Job(2, fn)
    job.wait()
    assert "KeyError: 'the cause'" in describe(job.desk.failure)
    job.close()


@pytest.mark.parametrize("fn, code, words", [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "killed by signal 9"),
    (lambda: sys.exit(3), 3, "ended without raising"),
    (lambda: sys.exit(0), 0, "left without a result"),
    (lambda: (x for x in ()), 1, "cannot be pickled"),
])
def test_ways_to_fail(fn, code, words):
    job = Job(1, fn)
    job.wait()
    job.close()
    assert job.desk.failure.code == code
    assert words in describe(job.desk.failure)


def test_a_python_that_is_not_there():
    """The agents leave at once, maybe before the desk has answered them."""
    job = Job(2, print, executable="/nowhere/python")
    job.wait()
    job.close()
    assert job.desk.crash is None
    assert "cannot start /nowhere/python: " in describe(job.desk.failure)


def test_an_agent_that_has_gone_is_dropped_once():
    desk = driver.Desk(1, SECRET, "127.0.0.1", Output(io.StringIO(), io.StringIO()))
    ours, theirs = socket.socketpair()
    line = Line(ours, True, SECRET)
    desk._lines[line] = 0
    desk._selector.register(line, selectors.EVENT_READ)
    task = desk._tasks[0] = driver.Task(line, {"index": 0, "attempt": 0, "name": "here"})
    task.place = plan.places({0: "here"})[0]
    ended = json.dumps({"code": 1, "error": None, "has_result": False}).encode()
    line.shake = lambda: True
    line.pump = lambda: [(Kind.ENDED, ended), (Kind.STDERR, b"late")]
    desk._serve(line)  # not being open, it is dropped where it would be answered
    desk._drop(line)
    assert desk.cause().code == 1 and not desk._lines
    theirs.close()


def test_stop_ends_ranks_and_all_they_started(tmp_path):
    def fn(folder):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(f"{folder}/1{daemon.pid}", "w") as file:
            file.write(str(daemon.pid))
        say_who(folder)
        time.sleep(600)

    job = Job(2, fn, (str(tmp_path),))
    wait_for(lambda: len(pids_in(tmp_path)) == 4)
    began = time.monotonic()
    job.close()
    assert time.monotonic() - began < 15  # 1.5 s of grace, on a busy machine
    wait_for(lambda: all(is_gone(pid) for pid in pids_in(tmp_path)), 15)


def test_a_killed_agent_takes_its_rank_along(tmp_path):
    def fn(folder):
        say_who(folder)
        time.sleep(600)

    job = Job(2, fn, (str(tmp_path),))
    wait_for(lambda: len(pids_in(tmp_path)) == 2)
    job.agents[1].kill()
    job.wait()
    assert job.desk.failure.code is None and "rank 1" in job.desk.failure.where()
    job.close()
    wait_for(lambda: all(is_gone(pid) for pid in pids_in(tmp_path)), 15)


def vanish(desk):
    """As the kernel of a killed driver would."""
    for line in list(desk._lines):
        line.sock.shutdown(socket.SHUT_RDWR)


def test_a_vanished_driver_ends_everything(tmp_path):
    def fn(folder):
        say_who(folder)
        time.sleep(600)

    job = Job(1, fn, (str(tmp_path),))
    wait_for(lambda: len(pids_in(tmp_path)) == 1)
    vanish(job.desk)
    wait_for(lambda: all(is_gone(pid) for pid in pids_in(tmp_path)), 15)
    job.close()


class Brief(driver.Desk):
    """Is gone in the middle of the function."""

    def _start_rank(self, task, place):
        task.line.post_json(Kind.START, {**self._start, "environment": place})
        task.line.post(Kind.CODE, b"half of it")
        self._drop(task.line)


def pipes_and_memory_files():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass  # that of the folder itself
    return sorted(link for link in links if link.startswith(("pipe:", "/memfd:")))


@pytest.mark.parametrize("kind, start, vanishes", [
    (driver.Desk, {"executable": "/nowhere/python"}, False),
    (driver.Desk, {"command": ["exit 3"], "letter": {}}, False), (driver.Desk, {}, True),
    (Brief, {}, False)])
def test_an_agent_leaves_nothing_behind(kind, start, vanishes):
    """Its process is a Python worker of Spark's, which serves one job after the other."""
    before = pipes_and_memory_files()
    desk = kind(1, SECRET, "127.0.0.1", Output(io.StringIO(), io.StringIO()))
    desk.open(cloudpickle.dumps((time.sleep, (600,), {})), {}, None)
    desk._start.update(start)
    spec = JobSpec(["127.0.0.1"], desk.port, SECRET, 60.0)
    agent = threading.Thread(target=serve, args=(spec, 0, 0, [], 1))
    agent.start()
    if vanishes:
        wait_for(lambda: desk.n_running == 1)
        vanish(desk)
    agent.join(PATIENCE_SECONDS)
    desk.stop()
    assert desk.finished.wait(PATIENCE_SECONDS) and not agent.is_alive()
    assert pipes_and_memory_files() == before


def test_copies_and_retries_are_not_started(tmp_path):
    def fn(folder):
        say_who(folder)
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.05)
        return os.getpid()

    job = Job(1, fn, (str(tmp_path),))
    wait_for(lambda: len(pids_in(tmp_path)) == 1)
    job.agents.append(job.start_agent(0, attempt=0))
    job.agents.append(job.start_agent(0, attempt=1))
    wait_for(lambda: sum(line.is_open for line in list(job.desk._lines)) == 3)
    (tmp_path / "go").write_text("")
    job.wait()
    assert job.desk.failure is None
    assert cloudpickle.loads(job.desk.results()[0]) == pids_in(tmp_path)[0]
    assert job.close() == [0, 0, 0]


def test_strangers_do_not_get_in():
    job = Job(1, lambda: "fine")
    with pytest.raises(ConnectionError):
        dial(["127.0.0.1"], job.desk.port, bytes(32), time.monotonic() + 1)
    silent = socket.create_connection(("127.0.0.1", job.desk.port))
    rude = socket.create_connection(("127.0.0.1", job.desk.port))
    rude.send(b"GET / HTTP/1.1\r\n" * 8)
    job.wait()
    assert cloudpickle.loads(job.desk.results()[0]) == "fine"
    job.close()
    silent.close()
    rude.close()


def test_a_frame_that_claims_too_much_is_refused():
    ours, theirs = socket.socketpair()
    lines = Line(ours, True, SECRET), Line(theirs, False, SECRET)
    while not all([line.shake() for line in lines]):
        pass
    lines[0].post(Kind.RESULT, b"y" * 5000)
    assert lines[1].pump() == [(Kind.RESULT, b"y" * 5000)]
    lines[0]._channel.send(b"\x08\xff\xff\xff\xff")
    with pytest.raises(ConnectionError, match="claims"):
        lines[1].pump()
    for line in lines:
        line.close()
