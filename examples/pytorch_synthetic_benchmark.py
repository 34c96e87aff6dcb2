#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Images per second of a ResNet on random images, on as many ranks as it is launched on.

    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py
    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py --model resnet50 --num-iters 3

The network is written here, so that nothing but PyTorch is needed.
"""
import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd

MODELS = {  # blocks per stage, is each a bottleneck of three convolutions
    "resnet18": ([2, 2, 2, 2], False),
    "resnet34": ([3, 4, 6, 3], False),
    "resnet50": ([3, 4, 6, 3], True),
}


class Block(nn.Module):
    def __init__(self, n_in, width, stride, bottleneck):
        super().__init__()
        n_out = width * 4 if bottleneck else width
        shapes = ([(n_in, width, 1, 1), (width, width, 3, stride), (width, n_out, 1, 1)]
                  if bottleneck else [(n_in, width, 3, stride), (width, n_out, 3, 1)])
        self.convs = nn.ModuleList([nn.Conv2d(a, b, k, s, k // 2, bias=False)
                                    for a, b, k, s in shapes])
        self.norms = nn.ModuleList([nn.BatchNorm2d(shape[1]) for shape in shapes])
        self.shortcut = None
        if stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False),
                                          nn.BatchNorm2d(n_out))

    def forward(self, x):
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(y))
            if i < len(self.convs) - 1:
                y = functional.relu(y)
        return functional.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def make_model(name, n_classes=1000):
    blocks, bottleneck = MODELS[name]
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
              nn.MaxPool2d(3, 2, 1)]
    n_in = 64
    for stage, n_blocks in enumerate(blocks):
        width = 64 << stage
        for i in range(n_blocks):
            layers.append(Block(n_in, width, 2 if stage > 0 and i == 0 else 1, bottleneck))
            n_in = width * 4 if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, n_classes))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--num-warmup-batches", type=int, default=2)
    parser.add_argument("--num-batches-per-iter", type=int, default=3)
    parser.add_argument("--num-iters", type=int, default=4)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, per rank")
    return parser.parse_args()


def main():
    options = arguments()
    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(options.threads)
    model = make_model(options.model)
    compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters(),
                                         compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    data = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    target = torch.randint(1000, (options.batch_size,))

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(data), target).backward()
        optimizer.step()
        hvd.report(samples=options.batch_size)

    def say(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    say(f"{options.model}, {options.batch_size} images of {options.image_size} px per rank, "
        f"{hvd.size()} ranks")
    for _ in range(options.num_warmup_batches):
        step()
    rates = []
    for i in range(options.num_iters):
        started = time.perf_counter()
        for _ in range(options.num_batches_per_iter):
            step()
        seconds = time.perf_counter() - started
        rates.append(options.batch_size * options.num_batches_per_iter / seconds)
        say(f"iteration {i}: {rates[-1]:.1f} images/s per rank")
    mean = statistics.mean(rates)
    say(f"images/s per rank: {mean:.1f}, on {hvd.size()} ranks: {mean * hvd.size():.1f}")


if __name__ == "__main__":
    main()
