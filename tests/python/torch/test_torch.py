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
