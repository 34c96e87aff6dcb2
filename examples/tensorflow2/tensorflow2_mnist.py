# SPDX-License-Identifier: Apache-2.0
"""A training loop of one's own: DistributedGradientTape inside a tf.function.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_mnist.py
"""
import argparse
import pathlib
import sys

import tensorflow as tf

import horovod.tensorflow as hvd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from digits import load_digits  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=400, help="of all ranks together")
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()

hvd.init()
keras = tf.keras

(images, labels), test = load_digits()
dataset = tf.data.Dataset.from_tensor_slices((images[..., None], labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(2000).batch(args.batch_size)

model = keras.Sequential([
    keras.layers.Input((28, 28, 1)),
    keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
    keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
    keras.layers.Flatten(),
    keras.layers.Dense(64, activation="relu"),
    keras.layers.Dense(10),
])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(0.001 * hvd.size())


@tf.function
def training_step(batch, answers):
    with tf.GradientTape() as tape:
        loss = loss_of(answers, model(batch, training=True))
    # From here on the gradients are those of all ranks.
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for step, (batch, answers) in enumerate(dataset.take(args.steps // hvd.size())):
    loss = training_step(batch, answers)
    if step == 0:
        # After the first step all variables exist: every rank gets those of rank 0.
        hvd.broadcast_variables(model.variables, root_rank=0)
        variables = optimizer.variables
        hvd.broadcast_variables(variables() if callable(variables) else variables, root_rank=0)
    if step % 20 == 0 and hvd.rank() == 0:
        print(f"step {step}: loss {float(loss):.3f}")

if hvd.rank() == 0:
    answers = tf.argmax(model(test[0][..., None]), axis=1)
    print(f"test accuracy {float(tf.reduce_mean(tf.cast(answers == test[1], tf.float32))):.3f}")
