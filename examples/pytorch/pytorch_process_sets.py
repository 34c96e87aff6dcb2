#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two models in one job: each half of the ranks trains its own, and all compare them at the end.

    horovodrun -np 4 python examples/pytorch/pytorch_process_sets.py

A process set is a part of the ranks that reduces among itself. All ranks add all sets, in the same
order, whether they are in them or not.
"""
import torch

import horovod.torch as hvd


def main():
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    halves = [hvd.add_process_set(range(first, hvd.size(), 2)) for first in range(2)]
    mine = halves[hvd.rank() % 2]
    torch.manual_seed(1)
    inputs = torch.randn(1024, 16)
    targets = inputs.sum(dim=1, keepdim=True)
    share = slice(mine.rank(), None, mine.size())
    width = (4, 32)[hvd.rank() % 2]  # the two halves try different models
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(),
                                torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.rank() % 2, process_set=mine)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         process_set=mine)
    for epoch in range(3):
        for x, y in zip(inputs[share].split(16), targets[share].split(16)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name=f"loss {width}", process_set=mine)
        everyone = hvd.allgather(mean.reshape(1), name="all losses")
        if hvd.rank() == 0:
            print(f"epoch {epoch} widths 4 and 32 loss {everyone[0]:.4f} and {everyone[1]:.4f}",
                  flush=True)


if __name__ == "__main__":
    main()
