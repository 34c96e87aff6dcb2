# SPDX-License-Identifier: Apache-2.0
"""The tf.data service: a job that trains with another's input."""
import contextlib
import io
import pathlib
import re
import runpy
import sys
import threading

import pytest
from tf_jobs import run_tf


def compute(configfile, side):
    from horovod.tensorflow.data.compute_worker import serve

    serve(configfile, dispatcher_side=side, timeout=300)


def train(configfile):
    """The elements this rank got; the whole data are shared out."""
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

    hvd.init()
    config = TfDataServiceConfig.read(configfile, wait_for_file_creation=True)
    assert TfDataServiceConfig.from_dict(config.to_dict()) == config
    dataset = tf.data.Dataset.range(20).map(lambda number: number * number)
    if config.dispatcher_side == "compute":
        computed = dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
        mine = [int(number) for number in computed]
    else:
        with pytest.raises(RuntimeError, match="training side"):
            dataset.send_to_data_service(config, hvd.rank())
        with tf_data_service(config, hvd.rank()) as address:
            computed = dataset.apply(tf.data.experimental.service.distribute(
                "distributed_epoch", address, job_name="job"))
            mine = [int(number) for number in computed]
            hvd.barrier()  # the dispatcher stays until all have read everything
    hvd.barrier()
    if hvd.rank() == 0:
        config.compute_client().shutdown()
    return mine


def example(configfile):
    """What examples/tensorflow2/tensorflow2_mnist_data_service.py prints here."""
    path = pathlib.Path(__file__).parents[3] / "examples/tensorflow2"
    sys.argv = ["example", configfile]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(path / "tensorflow2_mnist_data_service.py"), run_name="__main__")
    return output.getvalue()


def beside_another_job(configfile, side, function):
    """What the ranks of a job return that trains with the input of another."""
    failed = []

    def run_compute():
        try:
            run_tf(2, "test_tf_data", "compute", configfile, side)
        except BaseException as error:
            failed.append(error)

    job = threading.Thread(target=run_compute)
    job.start()
    returned = run_tf(2, "test_tf_data", function, configfile)
    job.join()
    assert not failed, failed[0]
    return returned


@pytest.mark.parametrize("side", ["compute", "training"])
def test_training_with_the_input_of_another_job(tmp_path, side):
    elements = beside_another_job(str(tmp_path / "compute.json"), side, "train")
    assert sorted(sum(elements, [])) == [number * number for number in range(20)]


def test_the_example(tmp_path):
    said = beside_another_job(str(tmp_path / "compute.json"), "compute", "example")
    first, last = map(float, re.search(r"loss ([\d.]+), then ([\d.]+) after", said[0]).groups())
    assert last < first
