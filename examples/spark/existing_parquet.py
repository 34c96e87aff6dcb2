# SPDX-License-Identifier: Apache-2.0
"""Training on Parquet that is already there, without an estimator: each rank reads its share.

    python examples/spark/existing_parquet.py [FOLDER]      default: a new one, with made-up data

Whoever wrote the files does not matter. Nothing is copied, and no rank holds more than its batches.
"""
import sys
import tempfile

from pyspark.sql import SparkSession

import horovod.spark


def write(spark, folder):
    rows = [(float(i % 17), float(i % 5), 2.0 * (i % 17) - (i % 5)) for i in range(2000)]
    spark.createDataFrame(rows, ["a", "b", "y"]).repartition(4).write.mode("overwrite").parquet(
        folder)


def fn(folder):
    import torch

    import horovod.torch as hvd
    from horovod.spark.data import ParquetReader

    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    losses = []
    # All ranks get the same number of batches, whatever the files are like.
    reader = ParquetReader(folder, ["a", "b", "y"], batch_size=50, shard=hvd.rank(),
                           n_shards=hvd.size(), seed=1)
    for epoch in range(4):
        for batch in reader.torch(epoch):
            a, b, y = (batch[name].float() for name in "aby")
            optimizer.zero_grad()
            found = model(torch.stack([a / 17, b / 5], dim=1)).squeeze(1)
            loss = torch.nn.functional.mse_loss(found, y / 34)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").appName("horovod parquet").getOrCreate()
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp() + "/data"
    if len(sys.argv) == 1:
        write(spark, folder)
    first, *_, last = horovod.spark.run(fn, args=(folder,), num_proc=2)[0]
    print(f"loss {first:.4f}, then {last:.4f}")
    spark.stop()
