# SPDX-License-Identifier: Apache-2.0
"""Data preparation, distributed training and prediction in one Spark program.

Sales of some stores over two years are made up (with a pattern that can be learned), prepared in
Spark, learned by a PyTorch model on all task slots, and predicted for the last weeks. Printed is
the root mean square percentage error beside that of always telling the mean of the store.

    python examples/spark/store_sales.py [--master local[2]] [--stores 40] [--epochs 6]
"""
import argparse
import datetime
import math
import random
import tempfile

import torch
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F

from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator

FIRST_DAY = datetime.date(2013, 1, 1)
N_DAYS = 730
CATEGORIES = {"Store": None, "DayOfWeek": 8, "Month": 13, "Promo": 2}  # None: known later


def make_rows(n_stores):
    """(store, date, open, promo, sales), as a shop's books would have it."""
    rng = random.Random(17)
    for store in range(n_stores):
        level = math.exp(rng.gauss(8.5, 0.4))
        for number in range(N_DAYS):
            day = FIRST_DAY + datetime.timedelta(days=number)
            is_open = day.isoweekday() != 7
            promo = number // 7 % 2 == 0 and day.isoweekday() <= 5
            sales = level * (1.38 if promo else 1.0) * (1.25 if day.month == 12 else 1.0)
            sales *= (1.15 if day.isoweekday() == 1 else 1.0) * math.exp(rng.gauss(0, 0.05))
            yield store, day, is_open, promo, int(sales) if is_open else 0


def prepare(spark, n_stores):
    """Features and the logarithm of the sales; the last six weeks are for validation."""
    rows = spark.createDataFrame(list(make_rows(n_stores)),
                                 "Store int, Date date, Open boolean, Promo boolean, Sales int")
    last = FIRST_DAY + datetime.timedelta(days=N_DAYS - 42)
    return (rows.filter("Sales > 0")
            .withColumn("DayOfWeek", ((F.dayofweek("Date") + 5) % 7 + 1).cast("int"))
            .withColumn("Month", F.month("Date"))
            .withColumn("Promo", F.col("Promo").cast("int"))
            .withColumn("LogSales", F.log("Sales"))
            .withColumn("Held", F.col("Date") >= F.lit(last)))


class Sales(torch.nn.Module):
    """An embedding for each category, and two layers over them."""

    def __init__(self, sizes):
        super().__init__()
        self.embeddings = torch.nn.ModuleList(torch.nn.Embedding(n, 8) for n in sizes)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8 * len(sizes), 64), torch.nn.ReLU(),
                                          torch.nn.Linear(64, 1))

    def forward(self, *columns):
        parts = [embed(column) for embed, column in zip(self.embeddings, columns)]
        return self.layers(torch.cat(parts, dim=1)) + 8.5  # near the mean from the start


def rmspe(frame, column):
    error = F.pow((F.col("Sales") - F.col(column)) / F.col("Sales"), 2)
    return math.sqrt(frame.select(F.avg(error)).head()[0])


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--master", default="local[2]")
    options.add_argument("--stores", type=int, default=40)
    options.add_argument("--epochs", type=int, default=6)
    args = options.parse_args()

    spark = (SparkSession.builder.master(args.master).appName("store sales")
             .config("spark.sql.shuffle.partitions", 8).getOrCreate())
    data = prepare(spark, args.stores).cache()
    torch.manual_seed(1)
    model = Sales([size or args.stores for size in CATEGORIES.values()])
    with tempfile.TemporaryDirectory() as folder:
        estimator = TorchEstimator(
            store=Store.create(folder), model=model, loss=torch.nn.functional.l1_loss,
            optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
            feature_cols=list(CATEGORIES), input_shapes=[[-1]] * len(CATEGORIES),
            label_cols=["LogSales"], validation="Held", batch_size=100, epochs=args.epochs,
            partitions_per_process=2, random_seed=1)
        fitted = estimator.fit(data)
    told = (fitted.transform(data)
            .withColumn("Told", F.exp("LogSales__output"))
            .withColumn("Mean", F.avg(F.when(~F.col("Held"), F.col("Sales")))
                        .over(Window.partitionBy("Store")))
            .filter("Held").cache())
    print(f"RMSPE of the mean {rmspe(told, 'Mean'):.4f}, of the model {rmspe(told, 'Told'):.4f}")
    told.orderBy("Store", "Date").select("Store", "Date", "Sales", F.round("Told")).show(5)
    spark.stop()


if __name__ == "__main__":
    main()
