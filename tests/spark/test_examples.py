# SPDX-License-Identifier: Apache-2.0
"""The examples, as a user runs them: what they print and write, and the same again."""
import csv
import os
import re
import subprocess
import sys
import time

import pytest

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples")


def run(name, *options, cwd):
    done = subprocess.run([sys.executable, os.path.join(EXAMPLES, name), *options], cwd=cwd,
                          stdout=subprocess.PIPE, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout
    return done.stdout


def rossmann(folder, name):
    """RMSPE of the best model and of a constant guess, and the lines of the submission."""
    out = run("keras_spark_rossmann.py", "--data-dir", f"{folder}/data", "--work-dir",
              f"{folder}/{name}", "--checkpoint-file", f"{folder}/{name}.keras",
              "--submission-file", f"{folder}/{name}.csv", "--epochs", "3", "--layers", "256",
              "128", "--learning-rate", "0.001", "--warmup-epochs", "1", "--num-proc", "2",
              cwd=folder)
    best, constant = map(float, re.search(
        r"Best RMSPE: ([\d.]+), of a constant guess: ([\d.]+)", out).groups())
    with open(f"{folder}/{name}.csv", newline="") as file:
        return best, constant, list(csv.reader(file))


def test_rossmann(tmp_path):
    """40 stores. A minute or two on a quiet machine; six are allowed on two cores."""
    began = time.monotonic()
    best, constant, lines = rossmann(str(tmp_path), "first")
    print(f"rossmann: {time.monotonic() - began:.0f} s, RMSPE {best} beside {constant}")
    assert best < 0.8 * constant
    assert lines[0] == ["Id", "Sales"]
    assert [int(number) for number, _ in lines[1:]] == list(range(1, 1441))
    assert all(100 < float(sales) < 100000 for _, sales in lines[1:])
    assert rossmann(str(tmp_path), "second") == (best, constant, lines)


def test_hello(tmp_path):
    pytest.importorskip("torch")
    out = run("spark_hello.py", cwd=str(tmp_path))
    assert "Running 2 processes...\n" in out
    assert "Hello, rank = 1, local_rank = 1, size = 2, local_size = 2, magic_number = 42" in out
    assert out.strip().endswith("[0, 1]")


def test_mnist(tmp_path):
    pytest.importorskip("torch")
    out = run("pytorch_spark_mnist.py", cwd=str(tmp_path))
    assert float(re.search(r"Test accuracy: ([\d.]+)", out).group(1)) > 0.5


def test_store_sales(tmp_path):
    pytest.importorskip("torch")
    out = run("spark/store_sales.py", cwd=str(tmp_path))
    mean, model = map(float, re.search(
        r"of the mean ([\d.]+), of the model ([\d.]+)", out).groups())
    assert model < 0.8 * mean
