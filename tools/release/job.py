#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A job that needs the installed package only, or PyTorch as well: job.py [torch]

Each rank checks every sum it gets; with PyTorch it trains, too, and all get equal weights.
"""
import array
import sys


def plain():
    from horovod import _core
    from horovod.common import basics as hvd

    hvd.init()
    for n in (1, 1000, 300_000):
        values = array.array("f", [hvd.rank() + 1.0] * n)
        _core.submit(op=_core.ALLREDUCE, name=f"sum {n}", dtype=_core.FLOAT32, reduce=_core.SUM,
                     root=0, process_set=0, prescale=1.0, inputs=values, outputs=values,
                     splits=None, result=values, finish=None).wait()
        assert set(values) == {sum(range(1, hvd.size() + 1))}, (n, set(values))
    return hvd


def with_torch():
    import torch

    import horovod.torch as hvd

    hvd.init()
    total = float(sum(range(1, hvd.size() + 1)))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        found = hvd.allreduce(torch.full((1000,), hvd.rank() + 1).to(dtype), op=hvd.Sum)
        assert (found == total).all(), (dtype, found)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(8, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                         named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for _ in range(10):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = hvd.allgather(model.weight.detach())
    assert (weights == weights[0]).all() and losses[-1] < losses[0], (weights, losses)
    return hvd


if __name__ == "__main__":
    used = with_torch() if "torch" in sys.argv else plain()
    print(f"rank {used.rank()} of {used.size()}: sums are right", flush=True)
    used.shutdown()
