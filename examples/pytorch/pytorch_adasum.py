#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adasum beside the average, on the same data with the learning rates that suit each.

    horovodrun -np 2 python examples/pytorch/pytorch_adasum.py

Adasum adds gradients that have nothing in common and averages those that are parallel, so the
learning rate of one rank suits any number of them; with the average it is multiplied by it. Here
the gradients of all ranks are nearly parallel: Adasum steps as far as one rank alone would, and the
average, with its larger rate, is ahead. Adasum is the careful choice, not always the fast one.
"""
import argparse

import torch

import horovod.torch as hvd


def train(op, lr, epochs):
    """-> the loss on data that no rank has trained on"""
    torch.manual_seed(1)
    inputs = torch.randn(2304, 16)
    targets = inputs.sum(dim=1, keepdim=True)
    held = slice(2048, None)
    mine = slice(hvd.rank(), 2048, hvd.size())
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         op=op)
    for _ in range(epochs):
        for x, y in zip(inputs[mine].split(32), targets[mine].split(32)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(inputs[held]), targets[held])
        if hvd.rank() == 0:
            print(f"{'adasum' if op == hvd.Adasum else 'average'} loss {loss.item():.4f}",
                  flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.005, help="for one rank")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    train(hvd.Average, options.lr * hvd.size(), options.epochs)
    train(hvd.Adasum, options.lr, options.epochs)


if __name__ == "__main__":
    main()
