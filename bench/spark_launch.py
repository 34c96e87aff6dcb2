# SPDX-License-Identifier: Apache-2.0
"""What a job in Spark costs before it does anything, beside Spark's own TorchDistributor.

    .venv/bin/python bench/spark_launch.py              4 ranks on a warm local session
    .venv/bin/python bench/spark_launch.py --cluster    16 ranks on four hosts (needs root)

Contenders take turns, one after the other in each round, on the same session; the table has medians
and extremes. "hello" initialises Horovod and returns the rank; "hello, torch" imports PyTorch too,
as the toy of the documentation does; TorchDistributor's function makes a gloo process group.
"""
import argparse
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def hello():
    from horovod import _core as hvd

    hvd.init([])
    rank = hvd.rank()
    hvd.shutdown()
    return rank


def hello_torch():
    import horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
    hvd.shutdown()
    return rank


def hello_distributor():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank


def contenders(n):
    import horovod.spark
    from pyspark.ml.torch.distributor import TorchDistributor

    def ours(fn):
        return lambda: horovod.spark.run(fn, num_proc=n, verbose=0) == list(range(n))

    return {"horovod.spark.run, hello": ours(hello),
            "horovod.spark.run, hello, torch": ours(hello_torch),
            "TorchDistributor, gloo group": lambda: TorchDistributor(
                num_processes=n, local_mode=False, use_gpu=False).run(hello_distributor) == 0}


def measure(master, n, rounds, conf):
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    for name, value in {"spark.ui.showConsoleProgress": "false", **conf}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    seconds = {}
    for number in range(rounds + 1):
        for name, run in contenders(n).items():
            began = time.monotonic()
            if not run():
                raise RuntimeError(f"{name} has the wrong result")
            if number > 0:  # the first round warms the session up
                seconds.setdefault(name, []).append(time.monotonic() - began)
    print(f"\n| {n} ranks, {master} | median s | least | most |\n|---|---|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | "
              f"{max(values):.2f} |")
    spark.stop()


def measure_cluster(args):
    """Again as a driver on a host of its own."""
    sys.path.insert(0, os.path.join(HERE, "..", "tests", "spark"))
    import hosts

    cluster = hosts.Cluster(4, 4)
    try:
        cluster.wait_for_workers()
        print(cluster.run_driver(os.path.abspath(__file__), "--ranks", "16", "--rounds",
                                 str(args.rounds), "--master", "spark://spark0:7077"))
    finally:
        cluster.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--master", default="local[4]")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--cluster", action="store_true")
    args = options.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if args.cluster:
        measure_cluster(args)
    elif args.master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        measure(args.master, args.ranks, args.rounds, {})
    else:
        measure(args.master, args.ranks, args.rounds,
                {"spark.driver.host": "spark0", "spark.executor.memory": "512m"})
