# SPDX-License-Identifier: Apache-2.0
"""A process that ends while works of the hvd backend are still on their way.

The thread that completes them must be gone before the interpreter is, or it takes the process down.
"""
import atexit
import os
import threading
import time


def no_thread_left():
    if any(thread.name == "hvd-c10d" for thread in threading.enumerate()):
        os.write(2, b"the thread of the backend outlives the process\n")
        os._exit(3)


atexit.register(no_thread_left)  # before the backend's own, to be called after it

import torch.distributed as dist  # noqa: E402

import horovod.torch.c10d  # noqa: E402


class Slow:
    """A handle of an operation that takes its time."""

    def wait(self):
        time.sleep(0.01)


def run():
    dist.init_process_group("hvd")
    for _ in range(30):
        horovod.torch.c10d._finisher.complete(Slow(), [])
    return True
