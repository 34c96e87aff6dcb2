# SPDX-License-Identifier: Apache-2.0
"""How the files in rows/ were made, by petastorm itself, in an environment of its own:

    pip install petastorm==0.13.1 pyarrow==12.0.1 "numpy<2" "pandas<2.1" pyspark==3.5.9 \
        opencv-python-headless
    python make.py $PWD/rows
"""
import sys

import numpy as np
from petastorm.codecs import (CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec,
                              ScalarCodec)
from petastorm.etl.dataset_metadata import materialize_dataset
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, ShortType

SCHEMA = Unischema("Rows", [
    UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False),
    UnischemaField("small", np.uint8, (), ScalarCodec(ShortType()), False),
    UnischemaField("matrix", np.float64, (4, 3), NdarrayCodec(), False),
    UnischemaField("packed", np.int16, (None,), CompressedNdarrayCodec(), False),
    UnischemaField("picture", np.uint8, (6, 5, 3), CompressedImageCodec("png"), False),
    UnischemaField("grey", np.uint8, (6, 5), CompressedImageCodec("png"), False)])


def row(i):
    return {"id": np.int32(i), "small": np.uint8(i), "matrix": np.full((4, 3), i / 2),
            "packed": np.full(8, -i, np.int16),
            "picture": np.full((6, 5, 3), [i, 2 * i, 3 * i], np.uint8),
            "grey": np.full((6, 5), 10 * i, np.uint8)}


spark = SparkSession.builder.master("local[1]").getOrCreate()
url = "file://" + sys.argv[1]
with materialize_dataset(spark, url, SCHEMA, 1):
    rows = spark.sparkContext.parallelize(range(20)).map(row).map(
        lambda values: dict_to_spark_row(SCHEMA, values))
    spark.createDataFrame(rows, SCHEMA.as_spark_schema()).coalesce(2).write.parquet(url)
spark.stop()
