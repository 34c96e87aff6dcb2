# SPDX-License-Identifier: Apache-2.0
"""Training on input that another job prepares, through the tf.data service.

    horovodrun -np 2 python -m horovod.tensorflow.data.compute_worker /tmp/compute.json &
    horovodrun -np 2 python examples/tensorflow2/tensorflow2_mnist_data_service.py /tmp/compute.json

The file is where the two jobs meet. All ranks share one pass over the data; the other job ends when
this one has finished.
"""
import pathlib
import sys

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from digits import load_digits  # noqa: E402


def noisy(image, label):
    """What is worth another machine: here it only turns the picture into a noisy one."""
    return image[..., None] + tf.random.normal(image.shape + [1], stddev=0.05), label


def main():
    hvd.init()
    config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
    dataset = tf.data.Dataset.from_tensor_slices(load_digits(train=2048)[0])
    dataset = dataset.repeat(2).map(noisy).batch(32, drop_remainder=True)
    dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    model = tf.keras.Sequential([
        tf.keras.layers.Input((28, 28, 1)), tf.keras.layers.Conv2D(16, 5, 2, activation="relu"),
        tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
    optimizer = tf.keras.optimizers.Adam(0.002)
    measure = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = measure(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    hvd.broadcast_variables(model.variables, root_rank=0)
    first = last = None
    n_steps = 0
    for images, labels in dataset.take(128 // hvd.size()):
        last = float(step(images, labels))
        first = last if first is None else first
        n_steps += 1
    # Ranks that got fewer batches wait here for those that got more.
    hvd.join()
    if hvd.rank() == 0:
        print(f"loss {first:.3f}, then {last:.3f} after {n_steps} steps", flush=True)
        config.compute_client().shutdown()


if __name__ == "__main__":
    main()
