# SPDX-License-Identifier: Apache-2.0
"""The job that computes input for another, on all task slots of a Spark application.

    spark-submit .../horovod/spark/tensorflow/compute_worker.py /shared/compute.json

Rank 0 writes the file, on an executor; the training job reads it. The job ends when the training
job says so. horovod.tensorflow.data.compute_worker is the same under horovodrun.
"""
import horovod.spark
from horovod.tensorflow.data import compute_worker


def main() -> None:
    from pyspark.sql import SparkSession

    args = compute_worker.make_parser().parse_args()
    spark = SparkSession.builder.appName("horovod compute worker").getOrCreate()
    try:
        horovod.spark.run(compute_worker.serve,
                          (args.configfile, args.dispatchers, args.dispatcher_side))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
