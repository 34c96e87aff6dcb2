# SPDX-License-Identifier: Apache-2.0
"""Python programs that go wrong: what is said of a rank that hangs, and where in its program it is.

The C programs beside this file have the failures that need no interpreter.
"""
import array
import ctypes
import os
import pathlib
import re
import sys
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

from horovod import _core  # noqa: E402
from horovod.common import basics  # noqa: E402
from ranks import run_ranks  # noqa: E402

THIS = "../fault/test_python"
SIZE = 4
STUCK = 2
SHOWN = 5  # exit code: run_ranks() then gives the output
STUCK_S = 9  # the report must come meanwhile: after 3 s, times 3 on a busy machine


def submit(name, n=1000):
    data = array.array("f", [1.0] * n)
    return _core.submit(op=_core.ALLREDUCE, name=name, dtype=_core.FLOAT32, inputs=data,
                        outputs=data, result=data)


def hangs_with_the_gil_free():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=STUCK_S)


def hangs_with_the_gil_held():
    ctypes.PyDLL(None).usleep(STUCK_S * 1000000)


def a_rank_hangs(how):
    basics.init()
    for _ in range(40):  # the job shows its rhythm
        submit("step").wait()
        time.sleep(0.001)
    if basics.rank() == STUCK:
        globals()[how]()
        print("goes on", flush=True)
    submit("step").wait()
    basics.shutdown()
    os._exit(SHOWN)


@pytest.mark.parametrize("how, where", [
    ("hangs_with_the_gil_free", "lock.acquire(timeout=STUCK_S)"),
    ("hangs_with_the_gil_held", "holds the GIL"),
])
def test_a_rank_that_hangs_is_found_in_its_program(how, where):
    outputs = run_ranks(SIZE, THIS, "a_rank_hangs", how, codes=[SHOWN] * SIZE,
                        env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "3",
                             "HOROVOD_LOG_LEVEL": "info"})
    for output in outputs:
        assert re.search(rf"Missing ranks:\n[^\n]*: {STUCK}: \[step\]\n", output)
        assert f"rank {STUCK}: it had nothing in flight, and the last done was 'step'" in output
    told = outputs[STUCK].split("goes on")[0]  # while it hangs
    assert "the thread that submitted the last operation is now here" in told
    assert f"in {how}" in told and where in told and "test_python.py" in told


def one_name_twice():
    basics.init()
    if basics.rank() == 0:
        first = submit("grad.7")
        try:
            submit("grad.7")
        except ValueError as error:
            print(error, flush=True)
    else:
        time.sleep(1)
        first = submit("grad.7")
    first.wait()
    basics.shutdown()
    os._exit(SHOWN)


def test_a_name_twice_is_told_with_the_line_of_the_first():
    output = run_ranks(SIZE, THIS, "one_name_twice", codes=[SHOWN] * SIZE)[0]
    assert "same name as another tensor that is currently being processed: 'grad.7'" in output
    assert "that one was submitted at " in output and "test_python.py:" in output
