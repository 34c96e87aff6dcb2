# SPDX-License-Identifier: Apache-2.0
"""Training inside Spark that goes on when an executor is lost.

    python examples/spark/run_elastic.py [MASTER]      default: local[2]

Spark starts the tasks; those that come later join at the next commit.
"""
import sys

from pyspark.sql import SparkSession

import horovod.spark


def fn(epochs):
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    inputs = torch.randn(512, 16)
    targets = inputs.sum(dim=1, keepdim=True)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        mine = slice(hvd.rank(), None, hvd.size())
        for state.epoch in range(state.epoch, epochs):
            for x, y in zip(inputs[mine].split(32), targets[mine].split(32)):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            state.commit()
        return hvd.rank(), loss.item()

    return train(state)


if __name__ == "__main__":
    master = sys.argv[1] if len(sys.argv) > 1 else "local[2]"
    spark = SparkSession.builder.master(master).appName("horovod elastic").getOrCreate()
    for rank, loss in sorted(horovod.spark.run_elastic(fn, args=(4,), num_proc=2, min_num_proc=1)):
        print(f"rank {rank} loss {loss:.4f}")
    spark.stop()
