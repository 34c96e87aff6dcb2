# SPDX-License-Identifier: Apache-2.0
"""The flight recorder tells where in the Python program an operation was submitted."""
import array
import os
import signal
import threading
import time

from horovod import _core
from horovod.common import basics
from horovod.common.elastic import ObjectState, run_fn
from ranks import run_ranks

WAIT_S = 60


def waits_in_a_function_of_this_name(event, handles):
    data = array.array("f", [1.0] * 1000)
    handles.append(_core.submit(op=_core.ALLREDUCE, name="held back", dtype=_core.FLOAT32,
                                inputs=data, outputs=data, result=data))
    event.wait(WAIT_S)


def waits_below_the_loop_of_elastic_jobs(event, handles):
    state = ObjectState(bcast_object=lambda value, **_: value, get_rank=basics.rank)
    run_fn(lambda _: waits_in_a_function_of_this_name(event, handles), lambda: None)(state)


def read_dump(folder, reason, rank, deadline):
    path = os.path.join(folder, f"hvd-{reason}-rank-{rank}-pid-{os.getpid()}.txt")
    text = ""
    while "finished:" not in text and time.monotonic() < deadline:
        time.sleep(0.01)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                text = file.read()
    return text


def dump_on_a_rank(folder):
    """The batch is held back by the cycle time, so that the dump finds it in flight."""
    basics.init()
    event, handles = threading.Event(), []
    thread = threading.Thread(target=waits_below_the_loop_of_elastic_jobs, args=(event, handles))
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while not handles and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR2)
    text = read_dump(folder, "signal", 0, deadline)
    event.set()
    thread.join()
    basics.shutdown()
    return text


def fail_on_a_rank(folder):
    """Rank 1 dies; rank 0 has submitted what it never gets, and is elsewhere by now."""
    basics.init()
    deadline = time.monotonic() + WAIT_S
    is_submitted = os.path.join(folder, "is_submitted")
    if basics.rank() == 1:
        while not os.path.exists(is_submitted) and time.monotonic() < deadline:
            time.sleep(0.01)
        os._exit(7)
    event, handles = threading.Event(), []
    thread = threading.Thread(target=waits_in_a_function_of_this_name, args=(event, handles))
    thread.start()
    while not handles and time.monotonic() < deadline:
        time.sleep(0.01)
    with open(is_submitted, "w", encoding="utf-8"):
        pass
    text = read_dump(folder, "failure", 0, deadline)
    event.set()
    thread.join()
    return text


def test_dump_has_the_python_stack(tmp_path):
    text, = run_ranks(1, "test_stack", "dump_on_a_rank", str(tmp_path),
                      env={"HOROVOD_RECORDER_DIR": str(tmp_path), "HOROVOD_CYCLE_TIME": "10000"})
    assert "in flight: 1\n" in text
    assert "'held back'" in text and "waiting" in text
    assert "in waits_in_a_function_of_this_name" in text
    assert "event.wait(WAIT_S)" in text
    assert "in waits_below_the_loop" in text and "/common/elastic.py" not in text
    assert "dump_on_a_rank" not in text  # another thread's


def test_dump_of_a_failure_has_it_too(tmp_path):
    text = run_ranks(2, "test_stack", "fail_on_a_rank", str(tmp_path), codes=[0, 7],
                     env={"HOROVOD_RECORDER_DIR": str(tmp_path)})[0]
    assert "ended: " in text and "rank 1" in text
    assert "the thread that submitted the last operation is now here:" in text
    assert "in waits_in_a_function_of_this_name" in text
