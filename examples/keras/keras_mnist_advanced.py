# SPDX-License-Identifier: Apache-2.0
"""Keras with all callbacks: warm-up, a learning rate schedule, averaged metrics, shifted images.

    horovodrun -np 2 python examples/keras/keras_mnist_advanced.py
"""
import argparse
import pathlib
import sys

import keras
import numpy as np

import horovod.keras as hvd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from digits import load_digits  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())

(train_images, train_labels), (test_images, test_labels) = load_digits()
train_images, test_images = train_images[..., None], test_images[..., None]


def batches(images, labels):
    """Endless: random images of this rank, each moved by up to two pixels."""
    random = np.random.RandomState(hvd.rank())
    while True:
        chosen = random.randint(0, len(images), args.batch_size)
        shifts = random.randint(-2, 3, (args.batch_size, 2))
        moved = [np.roll(image, shift, axis=(0, 1)) for image, shift in zip(images[chosen], shifts)]
        yield np.stack(moved), labels[chosen]


model = keras.Sequential([
    keras.layers.Input((28, 28, 1)),
    keras.layers.Conv2D(16, 3, activation="relu"),
    keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
    keras.layers.MaxPooling2D(2),
    keras.layers.Dropout(0.25),
    keras.layers.Flatten(),
    keras.layers.Dense(64, activation="relu"),
    keras.layers.Dropout(0.5),
    keras.layers.Dense(10, activation="softmax"),
])
scaled_lr = 0.02 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(scaled_lr, momentum=0.9))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

# Warm-up, then the full rate for most of the epochs; the last ones settle.
full_until = max(3, args.epochs * 3 // 4)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(scaled_lr, warmup_epochs=2, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(scaled_lr, start_epoch=2, end_epoch=full_until,
                                               multiplier=1.0),
    hvd.callbacks.LearningRateScheduleCallback(scaled_lr, start_epoch=full_until,
                                               multiplier=lambda epoch: 0.1),
    hvd.callbacks.ReportCallback(args.batch_size),  # for the status line and the job page
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

# All ranks together see as many images in an epoch as there are.
steps = max(1, len(train_images) // args.batch_size // hvd.size())
model.fit(batches(train_images, train_labels), steps_per_epoch=steps, epochs=args.epochs,
          callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0,
          validation_data=(test_images, test_labels))

loss, accuracy = model.evaluate(test_images, test_labels, verbose=0)
if hvd.rank() == 0:
    print(f"test loss {loss:.3f}, test accuracy {accuracy:.3f}")
