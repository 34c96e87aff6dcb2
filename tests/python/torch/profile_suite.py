# SPDX-License-Identifier: Apache-2.0
"""What runs on every rank for test_profile.py."""
import time

import torch

import horovod.torch as hvd

STEPS = 4
LATE_S = 0.05


def load_slowly():
    if hvd.rank() == 1:
        time.sleep(LATE_S)


def profiled(path):
    hvd.init()
    model = torch.nn.Linear(8, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                         named_parameters=model.named_parameters())
    with hvd.profile(path):
        for _ in range(STEPS):
            load_slowly()
            hvd.allreduce(torch.ones(4), name="x")
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    hvd.allreduce(torch.ones(4), name="x")  # nobody looks any more
    hvd.shutdown()


def left_by_an_error(path):
    hvd.init()
    try:
        with hvd.profile(path):
            raise KeyError("of the program")
    except KeyError:
        pass
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item()
    with hvd.profile(path + ".gz"):
        pass
    hvd.shutdown()
    return total


def beside_a_timeline(path):
    hvd.init()
    try:
        with hvd.profile(path):
            return "not refused"
    except RuntimeError as error:
        return str(error)
    finally:
        hvd.shutdown()


def seen_by_torch():
    hvd.init()
    with torch.profiler.profile() as seen:
        hvd.allreduce(torch.ones(4), name="x")
    hvd.shutdown()
    return [event.name for event in seen.events()]


def seen_by_nvtx():
    hvd.init()
    hvd.allreduce(torch.ones(4), name="x")
    hvd.shutdown()
