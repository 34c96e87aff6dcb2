# SPDX-License-Identifier: Apache-2.0
"""run_elastic on real Spark: Spark itself starts failed tasks and lost executors again."""
import os
import signal
import sys
import threading

import cloudpickle
import pytest
import test_cluster
import test_elastic_session

import horovod.spark

for module in (sys.modules[__name__], test_cluster, test_elastic_session):
    cloudpickle.register_pickle_by_value(module)  # ranks cannot import the tests

N_STEPS = test_elastic_session.N_STEPS


def test_a_killed_rank_is_started_again(sessions, tmp_path):
    sessions.get(test_cluster.CLUSTER)
    results = horovod.spark.run_elastic(test_elastic_session.train, (str(tmp_path),), num_proc=3)
    assert results == [(rank, 3, [3] * N_STEPS) for rank in range(3)]
    assert horovod.spark.run(lambda: 1, num_proc=4) == [1] * 4  # all slots are free again


def train_and_tell(folder):
    """Leaves process ids at the third step, and waits there for an executor to be killed."""
    import time

    from horovod.common import basics
    from horovod.common.elastic import ObjectState, run_fn
    from horovod.common.objects import broadcast_object

    basics.init()
    state = ObjectState(lambda value: broadcast_object(value, 0), basics.rank, step=0)

    def loop(state):
        while state.step < N_STEPS:
            broadcast_object(state.step, 0)
            if state.step == 2:
                open(f"{folder}/{os.getpid()}", "w").close()
                if os.environ["HOROVOD_ELASTIC_GENERATION"] == "1":
                    time.sleep(0.1)
                    continue
            state.step += 1
            state.commit()
        return basics.rank(), basics.size()

    return run_fn(loop, basics.rejoin)(state)


def test_a_lost_executor_is_replaced(sessions, ranks):
    sessions.get(test_cluster.CLUSTER)

    def kill():
        ranks.wait_for(4)
        pids = [int(name) for name in os.listdir(ranks.folder) if name.isdigit()]
        os.kill(test_cluster.executors_of(pids)[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    results = horovod.spark.run_elastic(train_and_tell, (ranks.folder,), num_proc=4)
    thread.join()
    assert results == [(rank, 4) for rank in range(4)]
    pids = [int(name) for name in os.listdir(ranks.folder) if name.isdigit()]
    assert len(pids) >= 6 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_fewer_go_on_where_spark_starts_no_task_twice(spark, tmp_path):
    results = horovod.spark.run_elastic(test_elastic_session.train, (str(tmp_path),), num_proc=3,
                                        min_num_proc=2)
    assert results == [(rank, 2, [3, 3] + [2] * (N_STEPS - 2)) for rank in range(2)]


def test_more_than_there_are_slots(spark, tmp_path):
    """Tasks Spark has no slot for are waited for by nobody."""
    (tmp_path / "killed").write_text("")
    results = horovod.spark.run_elastic(test_elastic_session.train, (str(tmp_path),), num_proc=4,
                                        max_num_proc=6)
    assert [result[:2] for result in results] == [(rank, 4) for rank in range(4)]


def test_the_cause_of_the_end_is_told(spark):
    def fn():
        raise ValueError("planted")

    with pytest.raises(RuntimeError, match="(?s)^The elastic job cannot go on: .*ValueError: p"):
        horovod.spark.run_elastic(fn, num_proc=2)
