# SPDX-License-Identifier: Apache-2.0
"""A small network for digits, trained with tf.keras on every rank's share of the data.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_keras_mnist.py
"""
import argparse
import pathlib
import sys

import tensorflow as tf

import horovod.tensorflow.keras as hvd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from digits import load_digits  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()

hvd.init()
keras = tf.keras

# Each rank takes its own share of the data.
(images, labels), test = load_digits()
images, labels = images[hvd.rank()::hvd.size(), ..., None], labels[hvd.rank()::hvd.size()]

model = keras.Sequential([
    keras.layers.Input((28, 28, 1)),
    keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
    keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
    keras.layers.Flatten(),
    keras.layers.Dense(64, activation="relu"),
    keras.layers.Dense(10, activation="softmax"),
])

# More ranks see more data in a step, so the learning rate grows with them.
scaled_lr = 0.001 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(scaled_lr))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    # All ranks start from the model of rank 0.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Metrics at the end of an epoch are those of all ranks.
    hvd.callbacks.MetricAverageCallback(),
    # The large learning rate is approached gently.
    hvd.callbacks.LearningRateWarmupCallback(scaled_lr, warmup_epochs=2),
    # What horovodrun shows in its status line and on the job page (--dashboard).
    hvd.callbacks.ReportCallback(args.batch_size),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.weights.h5",
                                                     save_weights_only=True))

model.fit(images, labels, batch_size=args.batch_size, epochs=args.epochs, callbacks=callbacks,
          verbose=2 if hvd.rank() == 0 else 0)

loss, accuracy = model.evaluate(test[0][..., None], test[1], verbose=0)
if hvd.rank() == 0:
    print(f"test loss {loss:.3f}, test accuracy {accuracy:.3f}")
