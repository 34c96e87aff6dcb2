# SPDX-License-Identifier: Apache-2.0
"""Distributed training: `import horovod.torch as hvd`, `import horovod.tensorflow as hvd`, ..."""

__version__ = "1.0.0"


def __getattr__(name):
    if name == "run":  # the launcher is loaded only by those who launch
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
