# SPDX-License-Identifier: Apache-2.0
"""The smallest Horovod job in Spark: every task slot says hello.

    python examples/spark_hello.py [MASTER]      default: local[2]
"""
import sys

from pyspark.sql import SparkSession

import horovod.spark


def fn(magic_number):
    import horovod.torch as hvd

    hvd.init()
    print("Hello, rank = %d, local_rank = %d, size = %d, local_size = %d, magic_number = %d" % (
        hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), magic_number))
    return hvd.rank()


if __name__ == "__main__":
    master = sys.argv[1] if len(sys.argv) > 1 else "local[2]"
    spark = SparkSession.builder.master(master).appName("horovod hello").getOrCreate()
    print(horovod.spark.run(fn, args=(42,)))
    spark.stop()
