# SPDX-License-Identifier: Apache-2.0
"""Becoming the program horovodrun: the console command, and python -m horovod.runner.launch.

Programs that launched jobs through the original's modules fill an object with options instead and
hand it to _run().
"""
import os
import subprocess
import sys

import cloudpickle

from horovod.runner import _run_payload, find_launcher
from horovod.runner.script import call_of

# Attributes that are not called as the flag is.
_FLAGS = {"nics": "network-interfaces", "slots": "slots-per-host", "tcp_flag": "tcp",
          "use_gloo": "gloo", "use_mpi": "mpi", "use_jsrun": "jsrun",
          "cooldown_range": "blacklist-cooldown-range"}
_NO_FLAGS = ("command", "run_func", "executable")


def run_commandline() -> None:
    """The console command: this process becomes horovodrun."""
    launcher = find_launcher()
    os.execv(launcher, [launcher, *sys.argv[1:]])


class _HorovodArgs:
    """horovodrun's options as attributes; one that is not set is None."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _words_of(args):
    words = []
    for name, value in vars(args).items():
        if name in _NO_FLAGS or value is None or value is False:
            continue
        words.append("--" + _FLAGS.get(name, name).replace("_", "-"))
        if value is not True:
            several = isinstance(value, (list, tuple, set))
            joined = [",".join(value)] if several and name == "nics" else value
            words += map(str, joined if several else [value])
    return words


def _run(args):
    """Runs args.command on the ranks, or args.run_func, whose results are returned by rank."""
    words = _words_of(args)
    if args.run_func is not None:
        n_results = args.min_num_proc or args.num_proc or 1
        return _run_payload(cloudpickle.dumps(call_of(args.run_func, (), None)), n_results, words,
                            args.executable or sys.executable)
    code = subprocess.call([find_launcher(), *words, *(args.command or [])])
    if code != 0:
        raise RuntimeError(f"horovodrun failed with exit code {code}")
    return None


if __name__ == "__main__":
    run_commandline()
