# SPDX-License-Identifier: Apache-2.0
"""Programs of the original: names they import, settings they set, and what becomes of both."""
import os
import subprocess
import sys

from horovod.runner.launch import find_launcher


def launched(code, *flags, **settings):
    """stdout and stderr of a Python program on two ranks."""
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("HOROVOD", "NCCL", "CCL"))}
    done = subprocess.run([find_launcher(), "-np", "2", *flags, sys.executable, "-c", code],
                          env={**environment, **settings}, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


JOB = """
from horovod.common import basics
basics.init()
print("size", basics.size())
"""


def test_settings_that_do_nothing_are_told_once():
    out, err = launched(JOB, "--autotune", HOROVOD_GPU_OPERATIONS="NCCL", NCCL_DEBUG="INFO")
    assert out.count("size 2") == 2
    [line] = [line for line in err.splitlines() if "these settings do nothing here" in line]
    assert line.startswith("[0]")
    for name in ("HOROVOD_AUTOTUNE", "HOROVOD_GPU_OPERATIONS", "NCCL_DEBUG",
                 "HOROVOD_FUSION_THRESHOLD", "HOROVOD_TRANSPORTS"):
        assert name in line


def test_what_the_launcher_sets_itself_is_no_reason_to_warn():
    _, err = launched(JOB, "--network-interfaces", "lo", "--no-autotune")
    assert "do nothing" not in err
