# SPDX-License-Identifier: Apache-2.0
"""Elastic training with Keras under horovodrun: a rank dies inside fit(), the others go on."""
import pathlib

from ranks import run_after_a_loss
from tf_jobs import ENVIRONMENT

# The rank of the second host dies in the second epoch, while the others wait for it in a graph. The
# layer that normalizes over all ranks was traced for three of them, and two use it again.
TRAIN = """
import os, pathlib, sys
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd

EPOCHS = 4
hvd.init()
keras = tf.keras
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.layers.Input((4,)), hvd_tf.SyncBatchNormalization(),
                          keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
order = pathlib.Path(sys.argv[1])
inputs = np.random.rand(32, 4)


class Death(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if (os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1" and state.epoch == 1 and batch == 2
                and order.exists()):
            order.unlink()
            os._exit(3)


@hvd.elastic.run
def train(state):
    callbacks = [hvd.elastic.UpdateBatchStateCallback(state),
                 hvd.elastic.UpdateEpochStateCallback(state),
                 hvd.elastic.CommitStateCallback(state), Death()]
    model.fit(inputs, inputs.sum(1), batch_size=8, epochs=EPOCHS - state.epoch, verbose=0,
              callbacks=callbacks)


train(state)
assert state.epoch == EPOCHS, state.epoch
weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
everyone = hvd.allgather(weights[None]).numpy()
assert np.allclose(everyone, everyone[0]), everyone
print("done on", hvd.size(), "ranks", flush=True)
"""


def test_fit_goes_on_without_a_lost_rank(tmp_path: pathlib.Path):
    run_after_a_loss(tmp_path, TRAIN, ENVIRONMENT, timeout_s=900)
