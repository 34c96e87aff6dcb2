# SPDX-License-Identifier: Apache-2.0
"""A job to look at: steps of a few allreduces, which it reports. Ends by itself after two minutes.

watched.py [healthy|slow RANK|stall RANK|kill RANK|raise RANK|for SECONDS]
"""
import array
import os
import signal
import sys
import time

from horovod import _core
from horovod.common import basics as hvd

WHAT, NUMBER = [*sys.argv[1:], "healthy", "-1"][:2] if len(sys.argv) != 2 else (sys.argv[1], "-1")
NUMBER = int(NUMBER)
FAULT_AT = 40
STEP_S = float(os.environ.get("WATCHED_STEP_S", "0.03"))


def load_data():
    time.sleep(100)


def reduce(name, numbers, how=_core.SUM):
    out = array.array("f", numbers)
    handle = _core.submit(op=_core.ALLREDUCE, name=name, dtype=_core.FLOAT32, reduce=how,
                          inputs=numbers, outputs=out)
    return handle, out


hvd.init()
rank = hvd.rank()
gradients = array.array("f", [1.0]) * int(os.environ.get("WATCHED_FLOATS", "50000"))
end = time.monotonic() + (NUMBER if WHAT == "for" else 120)
step = 0
is_over = False
while not is_over:
    time.sleep(STEP_S * (3 if WHAT == "slow" and rank == NUMBER else 1))
    for handle, _ in [reduce(f"grad.<b>{i}", gradients) for i in range(4)]:
        handle.wait()
    step += 1
    hvd.report(step=step, loss=2.0 / (step + 1), samples=64)
    if step % 20 == 0:
        print("step", step, "<script>alert(1)</script>", flush=True)
    if step == FAULT_AT and rank == NUMBER:
        if WHAT == "stall":
            load_data()
        elif WHAT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif WHAT == "raise":
            raise RuntimeError("the <img src=x> is broken")
    handle, said = reduce("end", array.array("f", [time.monotonic() > end]), _core.MAX)
    handle.wait()
    is_over = said[0] > 0
