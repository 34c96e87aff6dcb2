# SPDX-License-Identifier: Apache-2.0
"""Elastic training with PyTorch: hvd.elastic.run, TorchState, ElasticSampler."""
from horovod.common.basics import rejoin
from horovod.common.elastic import run_fn
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func):
    """Decorator: calls func(state, ...) again from the last commit when ranks fail or change."""
    return run_fn(func, rejoin)
