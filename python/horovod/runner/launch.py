# SPDX-License-Identifier: Apache-2.0
"""Becoming the program horovodrun: the console command, and python -m horovod.runner.launch."""
import os
import sys

from horovod.runner import find_launcher


def run_commandline() -> None:
    """The console command: this process becomes horovodrun."""
    launcher = find_launcher()
    os.execv(launcher, [launcher, *sys.argv[1:]])


if __name__ == "__main__":
    run_commandline()
