# SPDX-License-Identifier: Apache-2.0
"""The tf.data service: a job that trains with another's input."""
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


@pytest.mark.parametrize("side", ["compute", "training"])
def test_training_with_the_input_of_another_job(tmp_path, side):
    configfile = str(tmp_path / "compute.json")
    failed = []

    def run_compute():
        try:
            run_tf(2, "test_tf_data", "compute", configfile, side)
        except BaseException as error:
            failed.append(error)

    job = threading.Thread(target=run_compute)
    job.start()
    elements = run_tf(2, "test_tf_data", "train", configfile)
    job.join()
    assert not failed, failed[0]
    assert sorted(sum(elements, [])) == [number * number for number in range(20)]
