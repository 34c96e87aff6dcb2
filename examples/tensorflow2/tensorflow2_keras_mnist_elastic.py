# SPDX-License-Identifier: Apache-2.0
"""Keras training that goes on when ranks are lost or hosts are added, and keeps checkpoints.

    horovodrun -np 2 --min-np 1 -H localhost:2 python \
        examples/tensorflow2/tensorflow2_keras_mnist_elastic.py --checkpoint digits.weights.h5

The state is what survives the loss of a rank; the file is what survives the end of the whole job.
"""
import argparse
import os
import pathlib
import sys

import tensorflow as tf

import horovod.tensorflow.keras as hvd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from digits import load_digits  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--checkpoint", default="")
args = parser.parse_args()

hvd.init()
keras = tf.keras
train_set, test_set = load_digits()
model = keras.Sequential([
    keras.layers.Input((28, 28, 1)),
    keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
    keras.layers.Flatten(),
    keras.layers.Dense(10, activation="softmax"),
])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.002))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
if args.checkpoint and os.path.exists(args.checkpoint):
    model.load_weights(args.checkpoint)
    if hvd.rank() == 0:
        print("continues from", args.checkpoint, flush=True)
# The variables of the optimizer have to exist before the state can keep them.
model.fit(train_set[0][:1, ..., None], train_set[1][:1], verbose=0)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


@hvd.elastic.run
def train(state):
    # Another number of ranks shares the data in another way.
    images = train_set[0][hvd.rank()::hvd.size(), ..., None]
    labels = train_set[1][hvd.rank()::hvd.size()]
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=16),
    ]
    model.fit(images, labels, batch_size=args.batch_size, epochs=args.epochs - state.epoch,
              callbacks=callbacks, verbose=0)


train(state)
if hvd.rank() == 0:
    loss, accuracy = model.evaluate(test_set[0][..., None], test_set[1], verbose=0)
    print(f"test loss {loss:.3f}, test accuracy {accuracy:.3f}", flush=True)
    if args.checkpoint:
        model.save_weights(args.checkpoint)
