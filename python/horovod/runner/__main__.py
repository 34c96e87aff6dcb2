# SPDX-License-Identifier: Apache-2.0
"""python -m horovod.runner: horovodrun, as python -m horovod.runner.launch is."""
from horovod.runner.launch import run_commandline

if __name__ == "__main__":
    run_commandline()
