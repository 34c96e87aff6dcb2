# SPDX-License-Identifier: Apache-2.0
"""save() and load() of estimators and models: Spark's own layout, values pickled.

Metadata is written by pyspark.ml, so that a pipeline with these stages can be saved too. Values
need not be JSON: they are pickled and written as base64. Loading unpickles: load only what you
trust.
"""
import base64
import copy
from typing import Any

import cloudpickle
from pyspark import SparkContext
from pyspark.ml.util import (DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader,
                             MLWritable, MLWriter)

from horovod.spark.common.params import NOT_SAVED


class HorovodParamsWriter(MLWriter):
    """Writes the parameters of an estimator or a model that have been set."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        values = {param.name: value for param, value in self._instance._paramMap.items()
                  if param.name not in NOT_SAVED}
        text = base64.b64encode(cloudpickle.dumps(self._instance.pack(values))).decode()
        bare = copy.copy(self._instance)
        bare._defaultParamMap = {}  # defaults need not be JSON either, and the class has them
        DefaultParamsWriter.saveMetadata(bare, path, SparkContext._active_spark_context,
                                         extraMetadata={"horovod": text}, paramMap={})


class HorovodParamsReader(MLReader):
    """Reads them into a new one of a class."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, SparkContext._active_spark_context)
        values = self._cls.unpack(cloudpickle.loads(base64.b64decode(metadata["horovod"])))
        instance = self._cls()
        instance._set(**values)
        instance._resetUid(metadata["uid"])
        return instance


class Saved(MLReadable, MLWritable):
    def write(self) -> MLWriter:
        return HorovodParamsWriter(self)

    @classmethod
    def read(cls) -> MLReader:
        return HorovodParamsReader(cls)

    def pack(self, values: Any) -> Any:
        """Turns values into what can be pickled."""
        return values

    @classmethod
    def unpack(cls, values: Any) -> Any:
        return values
