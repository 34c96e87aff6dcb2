# SPDX-License-Identifier: Apache-2.0
"""horovod.torch: every row is a job of real ranks."""
import pathlib
import re
import subprocess
import sys

import pytest

from horovod import _core
from ranks import run_ranks

TCP = {"HOROVOD_TRANSPORTS": "tcp"}

OPS = [  # process set, ranks, hosts, environment
    ("world", 1, 1, {}),
    ("world", 2, 2, {}),
    ("world", 3, 1, {}),
    ("set", 3, 1, TCP),
]


@pytest.mark.parametrize("which,size,hosts,env", OPS)
def test_operations(which, size, hosts, env):
    assert run_ranks(size, "torch/ops_suite", "run", which, hosts=hosts, env=env) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_training(size):
    assert run_ranks(size, "torch/training_suite", "run") == [True] * size


@pytest.mark.parametrize("started_by", ["launcher", "torch"])
def test_torch_distributed(started_by, tmp_path):
    env = {"TEST_STORE": str(tmp_path / "store")}
    assert run_ranks(2, "torch/c10d_suite", "run", started_by, env=env) == [True, True]


EXAMPLES = [  # file, arguments, what its output must have
    ("pytorch_mnist.py", ["--epochs", "1", "--limit", "6000"], "images/s on 2 ranks"),
    ("pytorch_synthetic_benchmark.py", ["--num-iters", "1", "--num-batches-per-iter", "1"],
     "on 2 ranks"),
    ("pytorch_ddp_backend.py", [], "weights are equal on all ranks: True"),
]


@pytest.mark.parametrize("name,arguments,expected", EXAMPLES)
def test_examples_under_horovodrun(name, arguments, expected):
    root = pathlib.Path(__file__).resolve().parents[3]
    horovodrun = pathlib.Path(_core.__file__).parents[2] / "horovodrun"
    done = subprocess.run([horovodrun, "-np", "2", sys.executable, root / "examples" / name,
                           *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert not losses or losses[-1] < losses[0]
