# SPDX-License-Identifier: Apache-2.0
"""What code inside a rank, or inside a Spark task, may ask about its task."""
import os
from typing import List

DEVICES_VARIABLE = "HOROVOD_SPARK_DEVICES"


def get_available_devices() -> List[str]:
    """Addresses of the GPUs Spark has given to this task; [] without GPU scheduling."""
    told = os.environ.get(DEVICES_VARIABLE)
    if told is not None:
        return [address for address in told.split(",") if address]
    try:
        from pyspark import TaskContext
    except ImportError:
        return []
    context = TaskContext.get()
    resources = context.resources() if context is not None else {}
    return list(resources["gpu"].addresses) if "gpu" in resources else []
