# SPDX-License-Identifier: Apache-2.0
"""Elastic jobs: the session with real agents and ranks, with this test in the place of Spark."""
import io
import os
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest
from test_session import PATIENCE_SECONDS, SECRET, PlainOutput, start_agent, wait_for

from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark import elastic, slots
from horovod.spark.launch import describe
from horovod.spark.session import Session

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests

N_STEPS = 6


def train(folder, n_late=0):
    """Adds up the sizes of the generations it has seen; rank 1 is killed once at step 2.

    With n_late, step 3 is not left before the job has that many ranks."""
    from horovod.common import basics
    from horovod.common.elastic import ObjectState, run_fn
    from horovod.common.objects import broadcast_object

    basics.init()
    state = ObjectState(lambda value: broadcast_object(value, 0), basics.rank, step=0, sizes=[])

    def loop(state):
        while state.step < N_STEPS:
            marker = f"{folder}/killed"
            if basics.rank() == 1 and state.step == 2 and not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            seen = broadcast_object(os.getpid(), 0)
            if state.step == 3:
                open(f"{folder}/third.{seen}", "w").close()
                if basics.size() < n_late:
                    time.sleep(0.05)
                    state.check_host_updates()
                    continue
            state.sizes = state.sizes + [basics.size()]
            state.step += 1
            state.commit()
        return basics.rank(), basics.size(), state.sizes

    return run_fn(loop, basics.rejoin)(state)


class Job:
    def __init__(self, fn, args, n, n_agents=None, **limits):
        given = dict(n_begin=n, n_min=n, n_max=n, elastic_timeout=60.0, reset_limit=None,
                     max_failures=4)
        self.limits = elastic.Limits(**{**given, **limits})
        self.out = io.StringIO()
        self.session = Session(self.limits.words(), "127.0.0.1", SECRET,
                               cloudpickle.dumps((fn, args, {})), PlainOutput(self.out, self.out))
        self.agents = {}
        for index in range(n if n_agents is None else n_agents):
            self.start_agent(index)

    def start_agent(self, index, attempt=0):
        self.agents[index] = start_agent(self.session.port, index, attempt, {}, None,
                                         self.limits.max_failures, stderr=subprocess.PIPE,
                                         text=True)

    def failed_agent(self):
        """Which task has failed, as Spark would see it; it waits for one."""
        wait_for(lambda: any(agent.poll() not in (None, 0) for agent in self.agents.values()))
        return next(index for index, agent in self.agents.items() if agent.poll() not in (None, 0))

    def results(self):
        assert self.session.finished.wait(PATIENCE_SECONDS)
        assert self.session.has_succeeded(), (self.session.failure, self.out.getvalue())
        return [cloudpickle.loads(data) for data in self.session.results()]

    def close(self):
        self.session.stop()
        assert self.session.finished.wait(PATIENCE_SECONDS)
        codes = [agent.wait(timeout=PATIENCE_SECONDS) for agent in self.agents.values()]
        self.session.close()
        return codes


def test_a_killed_rank_is_started_again(tmp_path):
    job = Job(train, (str(tmp_path),), 3)
    index = job.failed_agent()
    assert "RankFailed" in job.agents[index].stderr.read()
    job.start_agent(index, attempt=1)
    assert job.results() == [(rank, 3, [3] * N_STEPS) for rank in range(3)]
    assert job.close() == [0, 0, 0]


def test_the_job_goes_on_with_fewer(tmp_path):
    job = Job(train, (str(tmp_path),), 3, n_min=2, max_failures=1)
    assert job.results() == [(rank, 2, [3, 3] + [2] * (N_STEPS - 2)) for rank in range(2)]
    job.close()


def test_tasks_that_come_later_join(tmp_path):
    (tmp_path / "killed").write_text("")
    job = Job(train, (str(tmp_path), 3), 2, n_max=3)
    wait_for(lambda: any(name.startswith("third") for name in os.listdir(tmp_path)))
    job.start_agent(2)
    results = job.results()
    assert [result[:2] for result in results] == [(rank, 3) for rank in range(3)]
    assert [sizes for *_, sizes in results] == [[2, 2, 2, 3, 3, 3]] * 3
    job.close()


def test_a_second_copy_takes_over(tmp_path):
    """The agent of a lost executor is killed; its copy, which Spark started before, goes on."""
    (tmp_path / "killed").write_text("")
    job = Job(train, (str(tmp_path), 3), 2, n_max=3)
    wait_for(lambda: any(name.startswith("third") for name in os.listdir(tmp_path)))
    lost = job.agents[1]
    job.start_agent(1, attempt=1)
    wait_for(lambda: job.session.counts["spare"] == 1)
    lost.kill()
    lost.wait()
    job.start_agent(2)
    assert [result[:2] for result in job.results()] == [(rank, 3) for rank in range(3)]
    job.close()


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_task_that_is_told_in_advance_leaves_after_its_step(tmp_path, leaving):
    """Its agent gets SIGTERM: no step is done twice, and Spark hears that the task has failed."""
    def fn(folder, leaving):
        from horovod.common import basics
        from horovod.common.elastic import ObjectState, run_fn
        from horovod.common.objects import broadcast_object

        basics.init()
        me = int(os.environ["HOROVOD_RANK"])  # of the first generation
        state = ObjectState(lambda value: broadcast_object(value, 0), basics.rank, step=0, sizes=[])

        def loop(state):
            while state.step < N_STEPS:
                with open(f"{folder}/{me}.{basics.size()}.steps", "a") as file:
                    file.write(f"{state.step} ")
                if me == leaving and basics.size() == 3 and state.step == 2:
                    os.kill(os.getppid(), signal.SIGTERM)
                while state.step == 3 and basics.size() == 3:  # until it is told
                    time.sleep(0.02)
                    broadcast_object(0, 0)
                    state.check_host_updates()
                state.sizes = state.sizes + [basics.size()]
                state.step += 1
                state.commit()
            return basics.rank(), basics.size(), state.sizes

        return run_fn(loop, basics.rejoin)(state)

    job = Job(fn, (str(tmp_path), leaving), 3, n_min=2)
    index = job.failed_agent()
    assert "RankFailed" in job.agents[index].stderr.read()
    results = job.results()
    assert results == [(rank, 2, [3] * 3 + [2] * 3) for rank in range(2)]
    # The step in which it heard of it may have been begun; all others were done once.
    others = [str(rank) for rank in range(3) if rank != leaving]
    for rank in others:
        began = [int(step) for size in (3, 2)
                 for step in (tmp_path / f"{rank}.{size}.steps").read_text().split()]
        assert sorted(set(began)) == list(range(N_STEPS)) and len(began) <= N_STEPS + 1
    assert job.session.failure is None
    job.close()


def test_a_copy_of_a_rank_that_ended_well_is_not_started(tmp_path):
    def fn(folder):
        from horovod.common import basics

        basics.init()
        while basics.rank() == 0 and not os.path.exists(f"{folder}/go"):
            time.sleep(0.05)
        return basics.rank()

    job = Job(fn, (str(tmp_path),), 2)
    wait_for(lambda: any(agent.poll() is not None for agent in job.agents.values()))
    index = next(index for index, agent in job.agents.items() if agent.poll() is not None)
    job.start_agent(index, attempt=1)
    wait_for(lambda: job.session.counts["spare"] == 1)
    (tmp_path / "go").write_text("")
    assert job.results() == [0, 1]
    job.close()


def fail_by_itself(folder):
    raise KeyError("the cause")


@pytest.mark.parametrize("fn, limits, words", [
    (fail_by_itself, {}, "all its processes have failed"),
    (train, {"max_failures": 1}, "Spark starts no more"),
    (train, {"elastic_timeout": 1.0}, "within 1 s (elastic_timeout)"),
    (train, {"n_min": 1, "reset_limit": 0}, "restarted 0 times"),
])
def test_when_it_cannot_go_on(tmp_path, fn, limits, words):
    job = Job(fn, (str(tmp_path),), 2, **limits)
    assert job.session.finished.wait(PATIENCE_SECONDS)
    problem = job.limits.problem(job.session.told.get("problem", []))
    assert words in str(problem)
    assert isinstance(problem, TimeoutException) == ("elastic_timeout" in limits)
    wanted = "KeyError: 'the cause'" if fn is fail_by_itself else "killed by signal 9"
    assert wanted in describe(job.session.failure)
    job.close()


@pytest.mark.parametrize("master, conf, wanted", [
    ("local", "9", 1), ("local[4]", "9", 1), ("local[*]", "9", 1), ("local[4,3]", "9", 3),
    ("local[*, 2]", "9", 2), ("local-cluster[2,2,1024]", "9", 9), ("spark://a:7077", "4", 4)])
def test_how_often_spark_starts_a_task(master, conf, wanted):
    class Context:
        def getConf(self):
            return {"spark.task.maxFailures": conf}

    context = Context()
    context.master = master
    assert slots.max_failures(context) == wanted


@pytest.mark.parametrize("numbers", [(2, 3, None), (2, None, 1), (2, 3, 1)])
def test_numbers_that_do_not_fit(numbers):
    with pytest.raises(ValueError, match="in ascending order"):
        elastic.limits_of(*numbers, 600.0, None, 4)
