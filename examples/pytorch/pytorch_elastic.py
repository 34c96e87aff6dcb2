#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A job that goes on when ranks are lost or hosts are added.

    horovodrun -np 2 --min-np 1 --max-np 4 -H localhost:4 python examples/pytorch/pytorch_elastic.py

With --host-discovery-script the hosts may change while it runs. What is in the state is what
survives: the model, the optimizer, the place in the data, the epoch.
"""
import argparse

import torch

import horovod.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batches-per-commit", type=int, default=8)
options = parser.parse_args()

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
inputs = torch.randn(2048, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(data)  # shards again when the job changes
loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, options.epochs):
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(batch, len(x))
            if batch % options.batches_per_commit == 0:
                state.commit()  # after a failure, training continues from here
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} on {hvd.size()} ranks loss {mean.item():.4f}", flush=True)
        state.sampler.set_epoch(state.epoch + 1)


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))
