#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer on text, in bfloat16 where autocast says so, with clipped gradients.

    horovodrun -np 2 python examples/pytorch/pytorch_transformer_amp.py

It learns to predict the next letter of this file. Gradients are clipped after they were reduced, so
all ranks clip alike: synchronize() first, then step() without a second one.
"""
import argparse
import contextlib
import pathlib

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd

LENGTH = 64


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.letters = nn.Embedding(128, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(width, 128)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.body(self.letters(x) + self.places(torch.arange(x.shape[1])), mask))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--no-amp", action="store_true", help="everything in float32")
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    text = torch.tensor(list(pathlib.Path(__file__).read_bytes())) % 128
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=hvd.Compression.fp16)
    places = torch.Generator().manual_seed(hvd.rank())  # each rank reads elsewhere
    for step in range(options.steps):
        starts = torch.randint(len(text) - LENGTH - 1, (options.batch_size,), generator=places)
        batch = torch.stack([text[start:start + LENGTH + 1] for start in starts])
        optimizer.zero_grad()
        amp = contextlib.nullcontext() if options.no_amp else torch.autocast("cpu", torch.bfloat16)
        with amp:
            logits = model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        hvd.report(step=step, samples=options.batch_size)
        if step % 20 == 0 or step == options.steps - 1:
            mean = hvd.allreduce(loss.detach().float(), name="loss")
            if hvd.rank() == 0:
                print(f"step {step} loss {mean.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
