# SPDX-License-Identifier: Apache-2.0
"""tf.data service with workers on Spark: what they compute comes here, and they go when told."""
import os
import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")


def test_workers_on_spark(tmp_path):
    import tensorflow as tf

    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    path = str(tmp_path / "compute.json")
    job = subprocess.Popen(
        [sys.executable, "-m", "horovod.spark.tensorflow.compute_worker", path],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell"})
    try:
        config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
        assert config.workers_per_dispatcher == 2
        numbers = tf.data.Dataset.range(20).map(lambda number: number * number)
        computed = numbers.send_to_data_service(config, 0, 1)
        assert sorted(int(number) for number in computed) == [n * n for n in range(20)]
        config.compute_client().shutdown()
        assert job.wait(timeout=300) == 0
    finally:
        job.kill()
        job.wait()
    assert not os.path.exists(path)
