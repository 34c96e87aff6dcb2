# SPDX-License-Identifier: Apache-2.0
"""An elastic job to look at, for two minutes."""
import array
import time

from horovod import _core
from horovod.common import basics as hvd
from horovod.common import elastic
from horovod.common.objects import broadcast_object


def train(state):
    while state.step < 1200:
        numbers = array.array("f", [1.0]) * 10000
        _core.submit(op=_core.ALLREDUCE, name="gradient", dtype=_core.FLOAT32, reduce=_core.SUM,
                     inputs=numbers, outputs=array.array("f", numbers)).wait()
        time.sleep(0.05)
        state.step += 1
        hvd.report(step=state.step, samples=32)
        if state.step % 10 == 0:
            state.commit()


hvd.init()
elastic.run_fn(train, hvd.rejoin)(elastic.ObjectState(broadcast_object, hvd.rank, step=0))
