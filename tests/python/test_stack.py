# SPDX-License-Identifier: Apache-2.0
"""The flight recorder tells where in the Python program an operation was submitted."""
import array
import os
import signal
import threading
import time

from horovod import _core
from horovod.common import basics
from ranks import run_ranks

WAIT_S = 60


def waits_in_a_function_of_this_name(event, handles):
    data = array.array("f", [1.0] * 1000)
    handles.append(_core.submit(_core.ALLREDUCE, "held back", _core.FLOAT32, _core.SUM, 0, 0, 1.0,
                                1.0, data, data, None, False, data, None))
    event.wait(WAIT_S)


def dump_on_a_rank(folder):
    """The batch is held back by the cycle time, so that the dump finds it in flight."""
    basics.init()
    event, handles = threading.Event(), []
    thread = threading.Thread(target=waits_in_a_function_of_this_name, args=(event, handles))
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while not handles and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR2)
    path = os.path.join(folder, f"hvd-signal-rank-0-pid-{os.getpid()}.txt")
    text = ""
    while "finished:" not in text and time.monotonic() < deadline:
        time.sleep(0.01)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                text = file.read()
    event.set()
    thread.join()
    basics.shutdown()
    return text


def test_dump_has_the_python_stack(tmp_path):
    text, = run_ranks(1, "test_stack", "dump_on_a_rank", str(tmp_path),
                      env={"HOROVOD_RECORDER_DIR": str(tmp_path), "HOROVOD_CYCLE_TIME": "10000"})
    assert "in flight: 1\n" in text
    assert "'held back'" in text and "waiting" in text
    assert "in waits_in_a_function_of_this_name" in text
    assert "event.wait(WAIT_S)" in text
    assert "dump_on_a_rank" not in text  # another thread's
