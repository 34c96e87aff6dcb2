# SPDX-License-Identifier: Apache-2.0
"""More rows of test_torch.py, and jobs of many steps: minutes. pytest runs this file if named."""
import pytest

from ranks import run_ranks
from test_torch import TCP, run_under_horovodrun

TIMEOUT_S = 1800

OPS = [  # process set, ranks, hosts, environment
    ("world", 1, 1, TCP),
    ("world", 2, 1, {}),
    ("world", 2, 1, TCP),
    ("world", 3, 1, TCP),
    ("world", 4, 1, {}),
    ("world", 4, 2, {}),
    ("world", 4, 1, TCP),
    ("set", 3, 1, {}),
    ("set", 3, 1, TCP),
    ("set", 4, 1, {}),
    ("set", 4, 1, TCP),
]


@pytest.mark.parametrize("which,size,hosts,env", OPS)
def test_operations(which, size, hosts, env):
    assert run_ranks(size, "torch/ops_suite", "run", which, hosts=hosts, env=env,
                     timeout_s=TIMEOUT_S) == [True] * size


@pytest.mark.parametrize("which,size", [("world", 3), ("world", 4), ("set", 4)])
def test_operations_under_horovodrun(which, size):
    run_under_horovodrun(size, "ops_suite.py", which, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("size,env", [(1, {}), (2, TCP), (4, {})])
def test_training(size, env):
    assert run_ranks(size, "torch/training_suite", "run", env=env,
                     timeout_s=TIMEOUT_S) == [True] * size


def test_many_steps():
    assert run_ranks(2, "torch/training_suite", "run_long", timeout_s=TIMEOUT_S) == [True] * 2
