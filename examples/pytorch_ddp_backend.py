#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own DistributedDataParallel on Horovod's collectives.

    horovodrun -np 2 python examples/pytorch_ddp_backend.py
    torchrun --nproc-per-node 2 examples/pytorch_ddp_backend.py

Only the two marked lines differ from a script for another backend.
"""
import torch
import torch.distributed as dist
from torch import nn

import horovod.torch.c10d  # noqa: F401  (1) makes the backend known


def main():
    dist.init_process_group("hvd")  # (2) the name of the backend
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(rank)  # other data on each rank
    for step in range(201):
        data = torch.randn(64, 20, generator=generator)
        target = data[:, :5].sum(1, keepdim=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step:3d} loss {mean:.4f} on {size} ranks", flush=True)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    parts = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(parts, weights)
    if rank == 0:
        print("weights are equal on all ranks:", all(torch.equal(part, weights) for part in parts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
