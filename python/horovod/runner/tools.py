# SPDX-License-Identifier: Apache-2.0
"""hvd-info and hvd-bench, as the wheel installs them: horovodrun by another name."""
import os
import sys

from horovod.runner import find_launcher


def info() -> None:
    os.execv(find_launcher(), ["hvd-info", *sys.argv[1:]])


def bench() -> None:
    os.execv(find_launcher(), ["hvd-bench", *sys.argv[1:]])
