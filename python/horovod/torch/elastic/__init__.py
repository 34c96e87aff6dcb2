# SPDX-License-Identifier: Apache-2.0
"""Elastic training with PyTorch: hvd.elastic.run, TorchState, ElasticSampler."""
import functools

from horovod.common.basics import rejoin
from horovod.common.elastic import run_fn
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func=None, *, checkpoint=None, on_failure="restart"):
    """Decorator: calls func(state, ...) again when ranks fail or change.

    After a failure training continues after the last step that was whole, if the state has what
    the script needs for that, else after the last commit. checkpoint: the path of
    state.commit(path=...); a job that begins goes on from the newest checkpoint there. on_failure:
    "shrink": the ranks that are left finish their step without the lost ones, and do not wait for
    those that are started in their place; these join at a later commit.
    """
    if func is None:
        return functools.partial(run, checkpoint=checkpoint, on_failure=on_failure)
    return run_fn(func, rejoin, checkpoint, on_failure)
