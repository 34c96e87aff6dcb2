# SPDX-License-Identifier: Apache-2.0
"""horovod.torch: every row is a job of real ranks."""
import pytest

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
