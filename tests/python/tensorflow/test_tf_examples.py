# SPDX-License-Identifier: Apache-2.0
"""The examples for TensorFlow and Keras run on two ranks, shortened, and learn or measure."""
import contextlib
import io
import os
import pathlib
import re
import runpy
import sys

from tf_jobs import run_tf

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"

# path, arguments, what rank 0 must print, and the least its first number must be
RUNS = [
    ("tensorflow2/tensorflow2_keras_mnist.py", ["--epochs", "3"], r"test accuracy ([\d.]+)", 0.2),
    ("tensorflow2/tensorflow2_mnist.py", ["--steps", "160"], r"test accuracy ([\d.]+)", 0.2),
    ("tensorflow2/tensorflow2_keras_mnist_elastic.py", ["--checkpoint", "digits.weights.h5"],
     r"test accuracy ([\d.]+)", 0.2),
    ("keras/keras_mnist_advanced_modified.py", [], r"test accuracy ([\d.]+)", 0.95),
    ("tensorflow2/tensorflow2_synthetic_benchmark.py",
     ["--image-size", "32", "--batch-size", "2", "--num-iters", "2", "--num-batches-per-iter", "1"],
     r"Total img/sec on 2 CPU\(s\): ([\d.]+)", 0.0),
]


def run_all(folder):
    """All in one process after the other: importing TensorFlow takes longer than some of them."""
    os.chdir(folder)
    outputs = []
    for path, arguments, _, _ in RUNS:
        sys.argv = [path, *arguments]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(EXAMPLES / path), run_name="__main__")
        outputs.append(output.getvalue())
    return outputs


def test_examples_on_two_ranks(tmp_path):
    outputs = run_tf(2, "test_tf_examples", "run_all", str(tmp_path))[0]
    for (path, _, pattern, least), output in zip(RUNS, outputs):
        found = re.search(pattern, output)
        assert found, f"{path} printed:\n{output}"
        assert float(found.group(1)) >= least, f"{path} printed:\n{output}"
