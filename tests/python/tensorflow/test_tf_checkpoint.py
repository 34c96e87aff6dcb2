# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Keras and TensorFlow: fit() that is killed goes on where it was."""
import os
import signal
import subprocess
import sys

from tf_jobs import ENVIRONMENT

TRAIN = """
import os, signal, sys
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd

folder, killed_in = sys.argv[1], int(sys.argv[2])
hvd.init()
keras = tf.keras
keras.utils.set_random_seed(1 if killed_in < 9 else 7)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
inputs = np.random.default_rng(0).random((32, 4))


class Death(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        if epoch == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)


callback = hvd.callbacks.CheckpointCallback(folder)
model.fit(inputs, inputs.sum(1), batch_size=8, epochs=5, verbose=0, shuffle=False,
          callbacks=[callback, Death()])
print("weights", [weight.tolist() for weight in model.get_weights()], flush=True)

variable = tf.Variable([1.0, 2.0], dtype=tf.bfloat16)
hvd_tf.checkpoint.save(folder + "/plain", {"v": variable, "list": [tf.constant(3)]}, 1, wait=True)
variable.assign([0.0, 0.0])
found = hvd_tf.checkpoint.load(folder + "/plain", {"v": variable})
assert variable.numpy().tolist() == [1.0, 2.0] and found.state["list"][0] == 3, (variable, found)
other = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
try:
    hvd.checkpoint.load(folder, {"model": other})
    raise SystemExit("a model of another shape was taken")
except ValueError as error:
    assert "does not fit model" in str(error), error
"""


def run(folder, checkpoints, killed_in):
    (folder / "train.py").write_text(TRAIN)
    return subprocess.run([sys.executable, folder / "train.py", folder / checkpoints,
                           str(killed_in)], env={**os.environ, **ENVIRONMENT}, timeout=600,
                          capture_output=True, text=True)


def weights_of(done):
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("weights"))


def test_fit_goes_on_after_a_kill(tmp_path):
    killed = run(tmp_path, "a", 3)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run(tmp_path, "a", 9)  # with another seed: nothing but the checkpoint counts
    first = int(resumed.stdout.split()[1])
    assert first in (2, 3)  # that of the third epoch may not have been complete
    assert weights_of(resumed) == weights_of(run(tmp_path, "b", 8))
