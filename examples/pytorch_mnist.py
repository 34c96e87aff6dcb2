#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small network on MNIST or Fashion-MNIST, on as many ranks as it is launched on.

    horovodrun -np 2 python examples/pytorch_mnist.py
    python examples/pytorch_mnist.py --epochs 1 --limit 10000

Works offline with the four files of any MNIST folder (Debian: apt-get install
dataset-fashion-mnist). Without one it trains on synthetic images, and says so.
"""
import argparse
import gzip
import pathlib
import struct
import time

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd

FOLDERS = ["/usr/share/datasets/fashion-mnist", "data/mnist", "data"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", help="folder with train-images-idx3-ubyte(.gz) and the others")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--limit", type=int, default=12000, help="images to train on; 0: all")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def read_idx(path):
    """A file of the MNIST format, compressed or not."""
    opened = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")
    with opened as file:
        _, n_dims = struct.unpack(">HxB", file.read(4))
        shape = struct.unpack(f">{n_dims}I", file.read(4 * n_dims))
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(shape)


def find(folders, stem):
    for folder in folders:
        for path in sorted(pathlib.Path(folder).glob(f"{stem}*")):
            return path
    return None


def made_up(n):
    """Pictures of ten kinds that a network can learn to tell apart."""
    generator = torch.Generator().manual_seed(0)
    coarse = (torch.rand(10, 7, 7, generator=generator) > 0.5).float()
    kinds = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)
    labels = torch.randint(10, (n,), generator=generator)
    noise = torch.rand(n, 28, 28, generator=generator)
    return ((kinds[labels] * 0.6 + noise * 0.4) * 255).to(torch.uint8), labels


def load(options):
    folders = [options.data] if options.data else FOLDERS
    parts = {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        images, labels = find(folders, f"{stem}-images"), find(folders, f"{stem}-labels")
        if images is None or labels is None:
            if hvd.rank() == 0:
                print("MNIST not found, using synthetic images")
            return {"train": made_up(12000), "test": made_up(2000)}
        parts[part] = (read_idx(images), read_idx(labels).long())
    return parts


def as_dataset(images, labels, limit=0):
    limit = limit or len(labels)
    pictures = images[:limit].unsqueeze(1).float() / 255
    return torch.utils.data.TensorDataset(pictures, labels[:limit])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def train(epoch, model, optimizer, loader, sampler):
    sampler.set_epoch(epoch)
    model.train()
    started = time.perf_counter()
    n_seen = 0
    for i, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        n_seen += len(data)
        # For the status line of horovodrun and the job page (--dashboard).
        hvd.report(step=(epoch - 1) * len(loader) + i, loss=loss.item(), samples=len(data))
        if i % 25 == 0:
            mean = hvd.allreduce(loss.detach(), name="loss")
            if hvd.rank() == 0:
                print(f"epoch {epoch} step {i:4d}/{len(loader)} loss {mean:.4f}", flush=True)
    rate = n_seen * hvd.size() / (time.perf_counter() - started)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: {rate:.0f} images/s on {hvd.size()} ranks", flush=True)


@torch.no_grad()
def test(model, loader):
    model.eval()
    right = torch.zeros(2)
    for data, target in loader:
        right += torch.tensor([(model(data).argmax(1) == target).sum(), len(target)])
    right = hvd.allreduce(right, op=hvd.Sum, name="accuracy")
    if hvd.rank() == 0:
        print(f"test accuracy {100 * right[0] / right[1]:.1f} %", flush=True)


def main():
    options = arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    parts = load(options)
    train_set, test_set = as_dataset(*parts["train"], options.limit), as_dataset(*parts["test"])
    sampler = torch.utils.data.distributed.DistributedSampler(train_set, hvd.size(), hvd.rank())
    test_sampler = torch.utils.data.distributed.DistributedSampler(test_set, hvd.size(), hvd.rank(),
                                                                   shuffle=False)
    loader = torch.utils.data.DataLoader(train_set, options.batch_size, sampler=sampler)
    test_loader = torch.utils.data.DataLoader(test_set, 500, sampler=test_sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=compression)
    for epoch in range(1, options.epochs + 1):
        train(epoch, model, optimizer, loader, sampler)
        test(model, test_loader)


if __name__ == "__main__":
    main()
