#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One rank of a measurement of torch_bench.py: runs a test with a contender, prints JSON on rank 0.

    torch_job.py CONTENDER TEST

The contenders: hvd (horovod.torch), gloo (torch.distributed's own), single (no communication), and
for training ddp-gloo and ddp-hvd: DistributedDataParallel on Gloo and on our backend, and apart: as
many processes as ranks, which do not talk. Times are
those of the slowest rank; every test checks a result before it measures.
"""
import json
import os
import pathlib
import statistics
import sys
import time

import torch
from torch.nn import functional

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
N_MANY = 500
MANY_ELEMENTS = 2560  # 10 KiB
BYTES = [4, 4096, 1 << 20, 16 << 20]
SECONDS = float(os.environ.get("BENCH_SECONDS", "1.0"))  # for each figure


class Hvd:
    """horovod.torch"""

    def __init__(self):
        import horovod.torch as hvd
        hvd.init()
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()

    def allreduce(self, tensor, name):
        self.hvd.allreduce_(tensor, name=name, op=self.hvd.Sum)

    def start(self, tensor, name):
        return self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum)

    def finish(self, handle):
        self.hvd.synchronize(handle)

    def slowest(self, value):
        return self.hvd.allreduce(torch.tensor([value], dtype=torch.float64), op=self.hvd.Max)[0]

    def prepare(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, self.hvd.DistributedOptimizer(optimizer, model.named_parameters())


class Distributed:
    """torch.distributed with one of its backends"""

    def __init__(self, backend):
        import torch.distributed as dist
        if backend == "hvd":
            import horovod.torch.c10d  # noqa: F401 - registers the backend
        dist.init_process_group(backend)
        self.dist, self.rank, self.size = dist, dist.get_rank(), dist.get_world_size()

    def allreduce(self, tensor, name):
        self.dist.all_reduce(tensor)

    def start(self, tensor, name):
        return self.dist.all_reduce(tensor, async_op=True)

    def finish(self, handle):
        handle.wait()

    def slowest(self, value):
        tensor = torch.tensor([value], dtype=torch.float64)
        self.dist.all_reduce(tensor, self.dist.ReduceOp.MAX)
        return tensor[0]

    def prepare(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return torch.nn.parallel.DistributedDataParallel(model), optimizer


class Single:
    """One process on its own"""

    rank, size = 0, 1

    def slowest(self, value):
        return value

    def prepare(self, model):
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Transformer(torch.nn.Module):
    """A small one: 6 layers, 256 wide, 5.8 million parameters"""

    def __init__(self, n_words=2048, width=256):
        super().__init__()
        self.words = torch.nn.Embedding(n_words, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.guess = torch.nn.Linear(width, n_words)

    def forward(self, words):
        return self.guess(self.layers(self.words(words))).flatten(0, 1)


CONTENDERS = {
    "hvd": Hvd,
    "gloo": lambda: Distributed("gloo"),
    "ddp-gloo": lambda: Distributed("gloo"),
    "ddp-hvd": lambda: Distributed("hvd"),
    "single": Single,
    "apart": Single,
}


def median_us(contender, function):
    """Median time of a call on the slowest rank, after some to warm up."""
    samples = []
    for _ in range(5):
        function()
    left = contender.slowest(time.perf_counter()) + SECONDS
    while True:
        for _ in range(20):
            started = time.perf_counter()
            function()
            samples.append(time.perf_counter() - started)
        if contender.slowest(time.perf_counter()) > left:  # the ranks must stop together
            break
    return 1e6 * float(contender.slowest(statistics.median(samples)))


def check_sum(contender):
    tensor = torch.full((1000,), float(contender.rank + 1))
    contender.allreduce(tensor, "check")
    expected = contender.size * (contender.size + 1) / 2
    assert torch.equal(tensor, torch.full((1000,), expected)), tensor


def test_sizes(contender):
    figures = {}
    for n_bytes in BYTES:
        tensor = torch.zeros(n_bytes // 4)
        figures[f"allreduce {n_bytes} B us"] = median_us(
            contender, lambda: contender.allreduce(tensor, f"bytes{n_bytes}"))
    return figures


def test_dtypes(contender):
    figures = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.zeros((16 << 20) // dtype.itemsize, dtype=dtype)
        figures[f"16 MiB of {dtype} us"] = median_us(
            contender, lambda: contender.allreduce(tensor, f"{dtype}"))
    return figures


def test_many(contender):
    tensors = [(torch.zeros(MANY_ELEMENTS), f"many{i}") for i in range(N_MANY)]

    def all_of_them():
        handles = [contender.start(tensor, name) for tensor, name in tensors]
        for handle in handles:
            contender.finish(handle)

    return {f"{N_MANY} x 10 KiB us": median_us(contender, all_of_them)}


def test_hook(contender):
    """What a gradient hook adds to the backward pass, on its own thread's clock."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(100)])
    _, optimizer = contender.prepare(model)
    hooks = [(optimizer._hooks[p], p) for p in model.parameters()]
    for _, p in hooks:
        p.grad = torch.zeros_like(p)
    samples = []
    for _ in range(100):
        started = time.thread_time()
        for hook, p in hooks:
            hook(p)
        samples.append((time.thread_time() - started) / len(hooks))
        optimizer.synchronize()
    return {"gradient hook us": 1e6 * statistics.median(samples)}


def train_images(contender, name, batch, steps):
    sys.path.insert(0, str(EXAMPLES))
    from pytorch_synthetic_benchmark import make_model
    torch.manual_seed(1)
    data, target = torch.randn(batch, 3, 64, 64), torch.randint(1000, (batch,))
    return {f"{name} images/s": batch * train(contender, make_model(name), data, target, steps)}


def train_words(contender, batch, length, steps):
    torch.manual_seed(1)
    data, target = torch.randint(2048, (batch, length)), torch.randint(2048, (batch * length,))
    rate = train(contender, Transformer(), data, target, steps)
    return {"transformer words/s": batch * length * rate}


def train(contender, model, data, target, steps):
    """Steps per second, of all ranks together"""
    model, optimizer = contender.prepare(model)

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(data), target).backward()
        optimizer.step()

    for _ in range(3):
        step()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = float(contender.slowest(time.perf_counter() - started))
    return contender.size * steps / seconds


TESTS = {
    "sizes": test_sizes,
    "dtypes": test_dtypes,
    "many": test_many,
    "hook": test_hook,
    "resnet18": lambda contender: train_images(contender, "resnet18", 16, 20),
    "resnet50": lambda contender: train_images(contender, "resnet50", 16, 10),
    "transformer": lambda contender: train_words(contender, 8, 64, 30),
}


def main():
    name, test = sys.argv[1:]
    torch.set_num_threads(1)
    contender = CONTENDERS[name]()
    if contender.size > 1:
        check_sum(contender)
    figures = TESTS[test](contender)
    if contender.rank == 0:
        print("FIGURES " + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
