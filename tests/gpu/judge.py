# SPDX-License-Identifier: Apache-2.0
"""A rank of PyTorch's own NCCL backend on the simulated GPU: code that is not ours, and known to be
right. If it gives right results under every schedule, the simulation is not too strict; if reading
a result without waiting gives wrong ones, it is not too lax.

Usage: judge.py RANK SIZE FILE      prints a line of JSON
"""
import json
import sys

import fallback  # noqa: F401
import torch
import torch.distributed as dist


def reads(tries=20):
    """How many results were wrong with wait(), and without."""
    wrong = early = 0
    expected = float(sum(range(1, dist.get_world_size() + 1)))
    for _ in range(tries):
        tensor = torch.full((64,), float(dist.get_rank() + 1)).cuda()
        work = dist.all_reduce(tensor, async_op=True)
        before = tensor.clone()
        work.wait()
        after = tensor.clone()
        early += int((before.cpu() != expected).any())
        wrong += int((after.cpu() != expected).any())
    return wrong, early


def train(module, rank, size, device):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    inputs, targets = torch.randn(8 * size, 4), torch.randn(8 * size, 1)
    for _ in range(3):
        optimizer.zero_grad()
        output = module(inputs[rank::size].to(device))
        torch.nn.functional.mse_loss(output, targets[rank::size].to(device)).backward()
        optimizer.step()
    return [p.detach().cpu().sum().item() for p in module.parameters()]


def main():
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size,
                            store=dist.FileStore(sys.argv[3], size))
    wrong, early = reads()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    parallel = torch.nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[rank])
    weights = train(parallel, rank, size, "cuda")
    dist.destroy_process_group()
    print(json.dumps({"wrong": wrong, "early": early, "weights": weights,
                      "device": torch.cuda.get_device_name(rank)}))


if __name__ == "__main__":
    main()
