# SPDX-License-Identifier: Apache-2.0
"""Images per second of a Keras model on random images.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_synthetic_benchmark.py

The defaults suit a few CPU cores; --model takes any name of tf.keras.applications.
"""
import argparse
import timeit

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--model", default="MobileNetV2", help="a name of tf.keras.applications")
parser.add_argument("--image-size", type=int, default=96)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=4)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
args = parser.parse_args()

hvd.init()

gpus = [] if args.no_cuda else tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
elif args.no_cuda:
    tf.config.set_visible_devices([], "GPU")
device = "GPU" if gpus else "CPU"

shape = (args.image_size, args.image_size, 3)
model = getattr(tf.keras.applications, args.model)(weights=None, input_shape=shape)
optimizer = tf.keras.optimizers.SGD(0.01)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy()
images = tf.random.uniform([args.batch_size, *shape])
labels = tf.random.uniform([args.batch_size], minval=0, maxval=999, dtype=tf.int64)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def benchmark_step():
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


log(f"Model: {args.model}")
log(f"Batch size: {args.batch_size}")
log(f"Number of {device}s: {hvd.size()}")
log("Running warmup...")
benchmark_step()
hvd.broadcast_variables(model.variables, root_rank=0)
timeit.timeit(benchmark_step, number=args.num_warmup_batches)

log("Running benchmark...")
rates = []
for i in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
    log(f"Iter #{i}: {rates[-1]:.1f} img/sec per {device}")

mean, spread = np.mean(rates), 1.96 * np.std(rates)
log(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
log(f"Total img/sec on {hvd.size()} {device}(s): {hvd.size() * mean:.1f} "
    f"+-{hvd.size() * spread:.1f}")
