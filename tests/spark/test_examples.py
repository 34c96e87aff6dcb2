# SPDX-License-Identifier: Apache-2.0
"""The examples, as a user runs them: what they print and write, and the same again."""
import csv
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from horovod.runner.launch import find_launcher

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples")


def run(name, *options, cwd):
    done = subprocess.run([sys.executable, os.path.join(EXAMPLES, name), *options], cwd=cwd,
                          stdout=subprocess.PIPE, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout
    return done.stdout


def rossmann(folder, *options, start=(sys.executable,), check=0):
    """The script alone in a folder of its own, as a reader has it: what it said and submitted."""
    shutil.copy(os.path.join(EXAMPLES, "keras_spark_rossmann.py"), folder)
    done = subprocess.run([*start, "keras_spark_rossmann.py", "--epochs", "3", "--layers", "256",
                           "128", "--learning-rate", "0.001", "--warmup-epochs", "1", *options],
                          cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=3000, env={**os.environ, "PYSPARK_DRIVER_PYTHON": sys.executable})
    print(done.stdout, done.stderr)
    assert done.returncode == check
    if check:
        return done.stderr
    with open(f"{folder}/submission.csv", newline="") as file:
        return done.stdout, done.stderr, list(csv.reader(file))


def errors_in(out):
    """RMSPE of the best model and of a constant guess."""
    return map(float, re.search(r"Best RMSPE: ([\d.]+), of a constant guess: ([\d.]+)",
                                out).groups())


def closed_days(folder):
    with open(f"{folder}/test.csv", newline="") as file:
        return {row["Id"] for row in csv.DictReader(file) if row["Open"] == "0"}


def unpack(tmp_path, name, archive):
    """A folder with what is in the archive."""
    folder = tmp_path / name
    folder.mkdir()
    subprocess.run(["tar", "zxf", archive], cwd=folder, check=True)
    return str(folder)


def test_rossmann(tmp_path):
    """40 stores. A minute or two on a quiet machine; six are allowed on two cores."""
    began = time.monotonic()
    made = tmp_path / "made"
    made.mkdir()
    words = rossmann(str(made), check=1)
    assert "no train.csv, test.csv" in words and "rossmann.tgz" in words and "--make-data" in words
    assert os.listdir(made) == ["keras_spark_rossmann.py"]  # nothing is invented
    out, err, lines = rossmann(str(made), "--make-data", "--num-proc", "2")
    best, constant = errors_in(out)
    print(f"rossmann: {time.monotonic() - began:.0f} s, RMSPE {best} beside {constant}")
    assert best < 0.8 * constant
    # The model is loaded with all that its optimizer knows.
    assert re.search("Skipping variable loading|UserWarning.*optimizer", err + out) is None
    assert lines[0] == ["Id", "Sales"]
    assert [int(number) for number, _ in lines[1:]] == list(range(1, 1441))
    closed = closed_days(made)
    assert 0 < len(closed) < 400
    for number, sales in lines[1:]:
        assert sales == "0.00" if number in closed else 100 < float(sales) < 100000

    # The files of an archive beside the script, and nothing to say; the same seed, the same lines.
    archive = str(tmp_path / "rossmann.tgz")
    files = [name for name in os.listdir(made) if name.endswith(".csv")]
    files.remove("submission.csv")
    assert len(files) == 7
    subprocess.run(["tar", "zcf", archive, *files], cwd=made, check=True)
    folder = unpack(tmp_path, "plain", archive)
    assert rossmann(folder, "--num-proc", "2")[2] == lines


def test_rossmann_is_submitted(tmp_path):
    """spark-submit's master is obeyed, and the model may be kept as HDF5."""
    import pyspark

    submit = os.path.join(os.path.dirname(pyspark.__file__), "bin", "spark-submit")
    out, err, lines = rossmann(str(tmp_path), "--make-data", "--stores", "8", "--epochs", "1",
                               "--checkpoint-file", "best.h5",
                               start=(submit, "--master", "local[3]"))
    assert "Running 3 processes..." in out
    with open(tmp_path / "best.h5", "rb") as file:
        assert file.read(8) == b"\x89HDF\r\n\x1a\n"
    assert len(lines) == 1 + 6 * 48


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


def test_lightning(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("pytorch_lightning")
    out = subprocess.run([find_launcher(), "-np", "2", sys.executable, os.path.join(
        EXAMPLES, "pytorch/pytorch_lightning_digits.py")], stdout=subprocess.PIPE, text=True,
        check=True, cwd=tmp_path, timeout=1200).stdout
    assert float(re.search(r"accuracy ([\d.]+) on 2 ranks", out).group(1)) > 0.5


def test_store_sales(tmp_path):
    pytest.importorskip("torch")
    out = run("spark/store_sales.py", cwd=str(tmp_path))
    mean, model = map(float, re.search(
        r"of the mean ([\d.]+), of the model ([\d.]+)", out).groups())
    assert model < 0.8 * mean


def test_run_elastic(tmp_path):
    out = run("spark/run_elastic.py", cwd=tmp_path)
    assert re.findall(r"rank (\d) loss 0\.\d+", out) == ["0", "1"]


def test_existing_parquet(tmp_path):
    out = run("spark/existing_parquet.py", cwd=tmp_path)
    first, last = map(float, re.search(r"loss ([\d.]+), then ([\d.]+)", out).groups())
    assert last < first
