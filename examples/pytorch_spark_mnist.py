# SPDX-License-Identifier: Apache-2.0
"""Digits from a Spark DataFrame, learned by a PyTorch network with TorchEstimator.

    python examples/pytorch_spark_mnist.py [--master local[2]] [--data mnist.libsvm]

--data is a file in LIBSVM format with 784 features, as MNIST is offered in. Without it digits are
drawn, so that the example runs offline.
"""
import argparse
import tempfile

import torch
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn
from torch.nn import functional

from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, pictures):
        x = functional.relu(functional.max_pool2d(self.conv1(pictures.float()), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
        x = functional.dropout(functional.relu(self.fc1(x.flatten(1))), training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def load(spark, args):
    """A DataFrame of features (784 numbers from 0 to 1) and label."""
    if args.data:
        rows = spark.read.format("libsvm").option("numFeatures", "784").load(args.data)
        return rows.select("features", F.col("label").cast("int").alias("label"))
    import digits

    (pictures, labels), _ = digits.load_digits(args.rows)
    rows = [(picture.ravel().tolist(), int(label)) for picture, label in zip(pictures, labels)]
    frame = spark.createDataFrame(rows, "pixels array<float>, label int")
    return frame.select(array_to_vector("pixels").alias("features"), "label")


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--master", default="local[2]")
    options.add_argument("--num-proc", type=int, help="processes; default: all task slots")
    options.add_argument("--data", help="LIBSVM file; default: digits are drawn")
    options.add_argument("--rows", type=int, default=2000, help="how many digits to draw")
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--work-dir", help="for the store; default: a temporary folder")
    args = options.parse_args()

    spark = (SparkSession.builder.master(args.master).appName("MNIST with PyTorch")
             .config("spark.ui.showConsoleProgress", "false").getOrCreate())
    train, test = load(spark, args).randomSplit([0.9, 0.1], seed=1)
    torch.manual_seed(1)
    model = Net()
    with tempfile.TemporaryDirectory() as folder:
        estimator = TorchEstimator(
            num_proc=args.num_proc, store=Store.create(args.work_dir or folder), model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.002),
            loss=functional.nll_loss, feature_cols=["features"], label_cols=["label"],
            input_shapes=[[-1, 1, 28, 28]], validation=0.1, batch_size=args.batch_size,
            epochs=args.epochs, partitions_per_process=1, random_seed=1)
        fitted = estimator.fit(train).setOutputCols(["scores"])
    told = fitted.transform(test).select("label", vector_to_array("scores").alias("scores"))
    told = told.selectExpr("label", "array_position(scores, array_max(scores)) - 1 as told")
    right = told.select(F.avg((F.col("label") == F.col("told")).cast("double"))).head()[0]
    print(f"Test accuracy: {right:.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
