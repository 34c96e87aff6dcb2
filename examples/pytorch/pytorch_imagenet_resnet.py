#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a residual network as one trains on ImageNet: warm-up, decay, checkpoints, resuming.

    horovodrun -np 2 python examples/pytorch/pytorch_imagenet_resnet.py --epochs 2
    horovodrun -np 2 python examples/pytorch/pytorch_imagenet_resnet.py --epochs 4   # goes on

Pictures are made up, so that nothing is downloaded; put a torchvision ImageFolder in the place of
pictures() for real ones. Rank 0 writes a checkpoint after each epoch, and every rank continues from
the newest.
"""
import argparse
import os
import pathlib

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--checkpoints", type=pathlib.Path, default=pathlib.Path("."))
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16, help="per rank")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.02, help="for one rank")
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--pictures", type=int, default=512)


def pictures(n):
    """Kinds of stripes: the class is their direction."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(4, (n,), generator=generator)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    waves = torch.stack([x, y, x + y, x - y]).mul(0.7).sin()
    noise = torch.rand(n, 3, 32, 32, generator=generator)
    return torch.utils.data.TensorDataset(waves[labels].unsqueeze(1) * 0.5 + noise, labels)


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(n_out),
            nn.ReLU(), nn.Conv2d(n_out, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out))
        self.short = nn.Conv2d(n_in, n_out, 1, stride=2, bias=False)

    def forward(self, x):
        return functional.relu(self.body(x) + self.short(x))


def learning_rate(options, epoch):
    """Relative to that of one rank: up to the number of ranks, then down in steps."""
    n = options.batches_per_allreduce * hvd.size()
    if epoch < options.warmup_epochs:
        return 1 + epoch * (n - 1) / options.warmup_epochs
    return n * 0.1 ** sum(epoch >= step for step in (30, 60, 80))


def newest(folder):
    """-> the number of the last finished epoch, or 0; rank 0 knows, the others are told."""
    found = [int(path.stem.partition("-")[2]) for path in folder.glob("checkpoint-*.pt")]
    return hvd.broadcast_object(max(found, default=0), root_rank=0, name="epoch")


def main():
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    data = pictures(options.pictures)
    sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())
    loader = torch.utils.data.DataLoader(data, options.batch_size, sampler=sampler)
    model = nn.Sequential(Block(3, 16), Block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.base_lr, momentum=0.9)
    first = newest(options.checkpoints)
    if first > 0 and hvd.rank() == 0:
        saved = torch.load(options.checkpoints / f"checkpoint-{first}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        print(f"continues after epoch {first}", flush=True)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        backward_passes_per_step=options.batches_per_allreduce)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(first + 1, options.epochs + 1):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for i, (x, y) in enumerate(loader):
            lr = options.base_lr * learning_rate(options, epoch - 1 + i / len(loader))
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = functional.cross_entropy(model(x), y)
            (loss / options.batches_per_allreduce).backward()
            total += loss.detach()
            hvd.report(step=(epoch - 1) * len(loader) + i, samples=len(x))
            if (i + 1) % options.batches_per_allreduce == 0:
                optimizer.step()
                optimizer.zero_grad()
        mean = hvd.allreduce(total / len(loader), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch} loss {mean.item():.4f}", flush=True)
            path = options.checkpoints / f"checkpoint-{epoch}.pt"
            # Renamed when it is whole: a job that ends here leaves no half of one.
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                       f"{path}.part")
            os.replace(f"{path}.part", path)


if __name__ == "__main__":
    main()
