# SPDX-License-Identifier: Apache-2.0
"""A rank of an elastic job: counts steps with the others until the test says it is over.

Usage: elastic_rank.py FOLDER. In the folder the test leaves files: `over` ends the job,
`die.<host>` makes a rank of that host exit with 3, once. With a second
argument the state goes to checkpoints there. Every step all ranks must be at the same
number; it is committed, so it never goes back by more than the step that failed.
"""
import os
import pathlib
import sys
import time

from horovod.common import basics as hvd
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.objects import allgather_object, broadcast_object

FOLDER = pathlib.Path(sys.argv[1])
HOST = os.environ["HOROVOD_HOSTNAME"]


def obey():
    order = FOLDER / f"die.{HOST}"
    try:
        order.unlink()
    except FileNotFoundError:  # there is none, or another rank of this host was first
        return
    os._exit(3)


def count(state):
    is_over = False
    while not is_over:
        obey()
        is_over = broadcast_object((FOLDER / "over").exists(), name="over")
        numbers = allgather_object(state.number)
        assert numbers == [state.number] * hvd.size(), numbers
        state.number += 1
        print(f"step {state.number} rank {hvd.rank()} of {hvd.size()} on {HOST}", flush=True)
        time.sleep(0.05)
        state.commit()


hvd.init()
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None
run_fn(count, hvd.rejoin, checkpoint)(ObjectState(broadcast_object, hvd.rank, number=0))
print(f"done rank {hvd.rank()} of {hvd.size()}", flush=True)
