# SPDX-License-Identifier: Apache-2.0
"""The session, agents and ranks, with processes of ours in the place of Spark tasks."""
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import cloudpickle
import pytest

from horovod.spark.agent import SPARK_SECRETS, JobSpec, serve
from horovod.spark.launch import describe
from horovod.spark.session import Output, Session

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests

SECRET = bytes(range(32))
PATIENCE_SECONDS = 60

AGENT = ("import sys, json; from horovod.spark.agent import JobSpec, serve;"
         "spec = JobSpec(['127.0.0.1'], int(sys.argv[1]), bytes(range(32)), 60.0,"
         " *json.loads(sys.argv[4]));"
         "sys.exit(serve(spec, int(sys.argv[2]), int(sys.argv[3]), []))")


def start_agent(port, index, attempt, *spec, **options):
    return subprocess.Popen([sys.executable, "-c", AGENT, str(port), str(index), str(attempt),
                             json.dumps(spec)], **options)


class PlainOutput(Output):
    """Into files, but with nothing in front of the lines."""

    def __init__(self, stdout, stderr):
        super().__init__(stdout, stderr)
        self.words = Output().words


class Job:
    """n agents on this machine, and the session they call."""

    def __init__(self, n, fn, args=(), env=None, executable=None):
        self.out, self.err = io.StringIO(), io.StringIO()
        self.session = Session(["-np", str(n)], "127.0.0.1", SECRET,
                               cloudpickle.dumps((fn, args, {})), PlainOutput(self.out, self.err))
        self.spec = env or {}, executable
        self.agents = [self.start_agent(index) for index in range(n)]

    def start_agent(self, index, attempt=0):
        return start_agent(self.session.port, index, attempt, *self.spec)

    def wait(self):
        assert self.session.finished.wait(PATIENCE_SECONDS)

    def results(self):
        self.wait()
        assert self.session.has_succeeded(), self.err.getvalue()
        return [cloudpickle.loads(data) for data in self.session.results()]

    def close(self):
        self.session.stop()
        self.wait()
        codes = [agent.wait(timeout=PATIENCE_SECONDS) for agent in self.agents]
        self.session.close()
        return codes

    @property
    def failure(self):
        self.wait()
        assert self.session.failure is not None, self.err.getvalue()
        return self.session.failure


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
    assert job.results() == [("0", b"x" * 3000000, "blue"), ("1", b"x" * 3000000, "blue")]
    assert job.close() == [0, 0]
    assert sorted(job.out.getvalue().split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"]


def test_a_large_result_passes_in_pieces():
    """The agent has little of it at a time, and so time for whom it must hear meanwhile."""
    def fn(folder):
        say_who(folder)
        with open(f"{folder}/agent.tmp", "w") as file:
            file.write(str(os.getppid()))
        os.rename(f"{folder}/agent.tmp", f"{folder}/agent")
        return bytes(256 << 20)

    def most_memory(pid):
        try:
            with open(f"/proc/{pid}/status") as file:
                return max(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
        except (OSError, ValueError):  # it has ended
            return 0

    with tempfile.TemporaryDirectory() as folder:
        job, most = Job(1, fn, (folder,)), 0
        wait_for(lambda: os.path.exists(f"{folder}/agent"))
        with open(f"{folder}/agent") as file:
            agent = int(file.read())
        while not job.session.finished.wait(0.002):
            most = max(most, most_memory(agent))
    assert [len(result) for result in job.results()] == [256 << 20]
    assert job.close() == [0]
    assert 0 < most < 64 << 10, f"{most} KiB"


def test_folders_the_user_wants_first(tmp_path):
    job = Job(1, lambda: sys.path[1], (),  # the first is where the agent was started
              {"HOROVOD_SPARK_PYTHONPATH": str(tmp_path / "first")})
    first = job.results()[0]
    job.close()
    assert first == str(tmp_path / "first")


def test_a_python_path_of_the_user_is_added(tmp_path, monkeypatch):
    """Else the rank would lose what its agent has found, this package first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "agents"), prepend=os.pathsep)
    job = Job(1, lambda: sys.path[1:], (), {"PYTHONPATH": str(tmp_path / "first")})
    path = job.results()[0]
    job.close()
    assert path[0] == str(tmp_path / "first")
    assert str(tmp_path / "agents") in path


def test_secrets_of_spark_stay_where_they_are():
    job = Job(1, lambda: [name for name in SPARK_SECRETS if name in os.environ], (),
              dict.fromkeys(SPARK_SECRETS, "secret"))
    seen = job.results()[0]
    job.close()
    assert seen == []


def test_a_variable_is_removed(monkeypatch):
    monkeypatch.setenv("COLOUR", "blue")
    job = Job(1, lambda: os.environ.get("COLOUR"), (), {"COLOUR": None})
    assert job.results() == [None]
    job.close()


def test_the_secret_is_a_file_of_this_user():
    def fn():
        path = os.environ["HOROVOD_SECRET_FILE"]
        twice = [open(path).read() for _ in range(2)]
        everything = open("/proc/self/environ").read() + open("/proc/self/cmdline").read()
        return (twice, oct(os.stat(path).st_mode),
                twice[0] in everything or bytes(range(32)).hex() in everything)

    job = Job(1, fn)
    twice, mode, seen = job.results()[0]
    job.close()
    assert twice[0] == twice[1] and len(bytes.fromhex(twice[0])) == 32
    assert twice[0] != SECRET.hex()  # which is between agents and session only
    assert mode.endswith("600") and not seen


def test_the_cause_is_told_not_its_consequence(tmp_path):
    def fn(folder):
        if os.environ["HOROVOD_RANK"] == "0":
            class HorovodInternalError(RuntimeError):
                pass
            raise HorovodInternalError("rank 1 has left")
        time.sleep(0.2)
        raise KeyError("the cause")

    job = Job(2, fn, (str(tmp_path),))
    assert job.failure.rank == 1 and job.failure.code == 1
    text = describe(job.failure)
    job.close()
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
    assert (job.failure.rank, job.failure.code) == (1, 128 + signal.SIGSEGV)
    job.close()


@pytest.mark.parametrize("fn, code, words", [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "killed by signal 9"),
    (lambda: sys.exit(3), 3, "ended without raising"),
    (lambda: sys.exit(0), 0, "left without a result"),
    (lambda: (x for x in ()), 1, "cannot be pickled"),
])
def test_ways_to_fail(fn, code, words):
    job = Job(1, fn)
    assert job.failure.code == code
    assert words in describe(job.failure)
    job.close()


def test_a_python_that_is_not_there():
    job = Job(2, print, executable="/nowhere/python")
    assert job.failure.code == 127
    assert "/nowhere/python" in job.err.getvalue()
    job.close()


def test_a_rank_that_does_not_end_has_ended_well(monkeypatch):
    def fn():
        from horovod.spark import rank

        rank.LINGER_SECONDS = 1.0
        threading.Thread(target=time.sleep, args=(600,)).start()
        return "fine"

    job = Job(1, fn)
    assert job.results() == ["fine"]
    assert job.close() == [0]


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


def sleep_in(folder):
    say_who(folder)
    time.sleep(600)


def test_a_killed_task_takes_its_rank_along(tmp_path):
    job = Job(2, sleep_in, (str(tmp_path),))
    wait_for(lambda: len(pids_in(tmp_path)) == 2)
    job.agents[1].kill()
    assert job.failure.code is None and "rank 1" in job.failure.where()
    job.close()
    wait_for(lambda: all(is_gone(pid) for pid in pids_in(tmp_path)), 15)


def test_a_vanished_driver_ends_everything(tmp_path):
    job = Job(1, sleep_in, (str(tmp_path),))
    wait_for(lambda: len(pids_in(tmp_path)) == 1)
    job.session._child.kill()
    wait_for(lambda: all(is_gone(pid) for pid in pids_in(tmp_path)), 15)
    job.close()


def pipes_and_memory_files():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass  # that of the folder itself
    return sorted(link for link in links if link.startswith(("pipe:", "/memfd:")))


@pytest.mark.parametrize("executable, vanishes", [("/nowhere/python", False), (None, True)])
def test_an_agent_leaves_nothing_behind(executable, vanishes):
    """Its process is a Python worker of Spark's, which serves one job after the other."""
    before = pipes_and_memory_files()
    session = Session(["-np", "1"], "127.0.0.1", SECRET,
                      cloudpickle.dumps((time.sleep, (600,), {})),
                      PlainOutput(io.StringIO(), io.StringIO()))
    spec = JobSpec(["127.0.0.1"], session.port, SECRET, 60.0, {}, executable)
    agent = threading.Thread(target=serve, args=(spec, 0, 0, []))
    agent.start()
    if vanishes:
        wait_for(lambda: session.counts["running"] == 1)
        session._child.kill()
    agent.join(PATIENCE_SECONDS)
    session.stop()
    assert session.finished.wait(PATIENCE_SECONDS) and not agent.is_alive()
    session.close()
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
    wait_for(lambda: job.session.counts["spare"] == 2)
    (tmp_path / "go").write_text("")
    assert job.results() == [pids_in(tmp_path)[0]]
    assert job.close() == [0, 0, 0]


def listening_addresses(pid):
    """Addresses at which a process listens, as the kernel prints them."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for family in ("tcp", "tcp6")
            for line in open(f"/proc/{pid}/net/{family}").readlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_it_listens_only_where_it_was_told_to(tmp_path):
    job = Job(1, sleep_in, (str(tmp_path),))
    wait_for(lambda: len(pids_in(tmp_path)) == 1)
    addresses = listening_addresses(job.session._child.pid)
    assert addresses == ["0100007F"] * 2  # for agents, and for the rendezvous
    job.close()


def test_what_cannot_be_understood_ends_the_session():
    """Else who waits for its end would wait for ever."""
    job = Job(1, lambda: time.sleep(600))
    wait_for(lambda: job.session.counts["running"] == 1)
    port = job.session.port
    job.session.told = ()  # which takes no event
    job.agents.append(start_agent(port, 0, 0, *job.spec))
    job.wait()
    assert not job.session.has_succeeded()
    job.close()


def test_strangers_do_not_get_in():
    job = Job(1, lambda: time.sleep(1) or "fine")
    silent = socket.create_connection(("127.0.0.1", job.session.port))
    rude = socket.create_connection(("127.0.0.1", job.session.port))
    rude.send(b"GET / HTTP/1.1\r\n" * 8)
    stranger = start_agent(job.session.port, 0, 0, {})
    assert job.results() == ["fine"]
    job.close()
    stranger.wait(PATIENCE_SECONDS)
    silent.close()
    rude.close()


def test_an_agent_without_the_secret_does_not_get_in():
    job = Job(1, lambda: time.sleep(2) or "fine")
    spec = JobSpec(["127.0.0.1"], job.session.port, bytes(32), 1.0, {})
    assert serve(spec, 0, 0, []) != 0
    assert job.results() == ["fine"]
    job.close()
