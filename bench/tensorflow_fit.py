# SPDX-License-Identifier: Apache-2.0
"""Images per second of Keras fit() on two ranks, beside one process alone and two that do not talk.

    horovodrun -np 2 python bench/tensorflow_fit.py [--rounds 5]

Each rank has one core and one thread. In every round, in the same two processes: rank 0 trains
alone while rank 1 waits; both train, each for itself; both train together. The middle figure is
what the machine gives two processes that share its memory and caches: the first ratio, the one
with the target, compares with twice the process alone, the second with the two that do not talk.
"""
import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_NUM_INTEROP_THREADS"] = os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import horovod.tensorflow as hvd_tf  # noqa: E402
import horovod.tensorflow.keras as hvd  # noqa: E402

TARGET = 0.95

parser = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--steps", type=int, default=30, help="steps of each fit()")
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()

keras = tf.keras


def make_model(optimizer):
    model = keras.Sequential([
        keras.layers.Input((32, 32, 3)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(10, activation="softmax"),
    ])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


class Clock(keras.callbacks.Callback):
    """Times the batches alone. Before them fit() builds tf.data's pipeline, after them it waits for
    the pipeline's tuner, which looks up only after 10, 20, 40 ... 1280 ms."""

    def on_train_batch_end(self, batch, logs=None):
        self.end = time.perf_counter()
        if batch == 0:
            self.begin = self.end


def seconds_of_fit(model):
    clock = Clock()
    model.fit(images, labels, batch_size=args.batch_size, shuffle=False, verbose=0,
              callbacks=[clock])
    return clock.end - clock.begin


def images_per_second(model, ranks):
    """Over all given ranks; the slowest counts, the others wait."""
    hvd_tf.barrier()
    seconds = seconds_of_fit(model) if hvd.rank() in ranks else 0.0
    slowest = max(hvd_tf.allgather_object(seconds))
    return len(ranks) * (args.steps - 1) * args.batch_size / slowest


hvd.init()
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[hvd.local_rank() % len(cores)]})
random = np.random.RandomState(hvd.rank())
images = random.rand(args.steps * args.batch_size, 32, 32, 3).astype("float32")
labels = random.randint(0, 10, len(images))
plain = make_model(keras.optimizers.SGD(0.01))
distributed = make_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
everyone = range(hvd.size())
# what | model | ranks that train
CASES = [("one process", plain, [0]), ("two that do not talk", plain, everyone),
         ("two ranks", distributed, everyone)]

for _, model, ranks in CASES:
    images_per_second(model, ranks)
rounds = []
for number in range(args.rounds):
    order = CASES[number % 3:] + CASES[:number % 3]
    rounds.append({what: images_per_second(model, ranks) for what, model, ranks in order})

if hvd.rank() == 0:
    print(f"{args.rounds} rounds, load average {os.getloadavg()[0]:.2f}, "
          f"TensorFlow {tf.__version__}, Keras {keras.__version__}\n")
    print("| what | images/s | of what is possible | target | verdict |")
    print("|---|---|---|---|---|")
    for what, _, ranks in CASES:
        rate = statistics.median(figures[what] for figures in rounds)
        if what != "two ranks":
            print(f"| {what} | {rate:.0f} | - | - | - |")
    for yardstick, factor, target in (("one process", hvd.size(), TARGET),
                                      ("two that do not talk", 1, None)):
        parts = [figures["two ranks"] / (factor * figures[yardstick]) for figures in rounds]
        part = statistics.median(parts)
        verdict = "-" if target is None else "PASS" if part >= target else "FAIL"
        print(f"| two ranks | {rate:.0f} | {part:.3f} ({min(parts):.3f} to {max(parts):.3f}) of "
              f"{'twice ' if factor > 1 else ''}{yardstick} | "
              f"{'-' if target is None else f'>= {target}'} | {verdict} |")
