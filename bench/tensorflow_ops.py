# SPDX-License-Identifier: Apache-2.0
"""What an operation of Horovod costs inside a tf.function, beside operations of TensorFlow itself.

    python bench/tensorflow_ops.py [--rounds 9]

One process and one rank, so that nobody is waited for. A graph is a chain of 200 equal operations
on 16 floats; one thread runs it. Every round runs every graph, in rotated order; a ratio is the
median over the rounds of ours / the dearest of TensorFlow's in that round. A collective is
completed by Horovod's own thread: "wall" is the time until the next operation of the chain can
start, "CPU" what all threads of the process used for it.
"""
import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_NUM_INTEROP_THREADS"] = os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

import tensorflow as tf  # noqa: E402

import horovod.tensorflow as hvd  # noqa: E402

CHAIN = 200
TARGET = 1.5

parser = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--runs", type=int, default=40, help="runs of each graph in a round")
args = parser.parse_args()


def chain(operation):
    """A graph of CHAIN operations, each waiting for the one before, as a function."""

    @tf.function(autograph=False)
    def run(tensor):
        for i in range(CHAIN):
            tensor = operation(tensor, name=f"link_{i}")
        return tensor

    return run


def question(tensor, name):
    """An operation that depends on the chain although it has no input."""
    with tf.control_dependencies([tensor]):
        return hvd.rank_op(name)


def snapshot(tensor, name):
    return tf.raw_ops.Snapshot(input=tensor, name=name)


def allreduce(tensor, name):
    return hvd.allreduce(tensor, op=hvd.Sum, name=name)


def independent(tensor):
    return tf.add_n([allreduce(tensor, f"part_{i}") for i in range(CHAIN)])


hvd.init()
numbers = tf.linspace(0.0, 0.5, 16)
# name | graph | TensorFlow's own?
CONTENDERS = [
    ("tf.raw_ops.Snapshot", chain(snapshot), True),
    ("tf.sinh", chain(tf.sinh), True),
    ("hvd.rank_op", chain(question), False),
    ("hvd.allreduce", chain(allreduce), False),
    ("hvd.allreduce, 200 at once", tf.function(independent, autograph=False), False),
]


def measure(graph):
    """Microseconds for an operation: by the clock, and of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(args.runs):
        graph(numbers)
    each = 1e6 / (args.runs * CHAIN)
    return (time.perf_counter() - wall) * each, (time.process_time() - cpu) * each


for _, graph, _ in CONTENDERS:
    measure(graph)
rounds = []
for number in range(args.rounds):
    order = CONTENDERS[number % len(CONTENDERS):] + CONTENDERS[:number % len(CONTENDERS)]
    rounds.append({name: measure(graph) for name, graph, _ in order})

print(f"{args.rounds} rounds, load average {os.getloadavg()[0]:.2f}, TensorFlow {tf.__version__}\n")
print("| operation | wall, us | CPU, us | wall / TensorFlow's | target | verdict |")
print("|---|---|---|---|---|---|")
for name, _, is_theirs in CONTENDERS:
    wall = statistics.median(figures[name][0] for figures in rounds)
    cpu = statistics.median(figures[name][1] for figures in rounds)
    row = f"| {name} | {wall:.2f} | {cpu:.2f} |"
    if is_theirs:
        print(row, "- | - | - |")
        continue
    ratios = [figures[name][0] / max(figures[theirs][0] for theirs, _, own in CONTENDERS if own)
              for figures in rounds]
    ratio = statistics.median(ratios)
    print(row, f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | <= {TARGET} |",
          "PASS |" if ratio <= TARGET else "FAIL |")
hvd.shutdown()
