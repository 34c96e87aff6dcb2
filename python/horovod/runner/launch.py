# SPDX-License-Identifier: Apache-2.0
"""Where the program horovodrun is, and becoming it."""
import os
import pathlib
import shutil
import sys
import sysconfig


def find_launcher() -> str:
    """Path of the horovodrun that belongs to this package."""
    package = pathlib.Path(__file__).absolute().parent.parent
    candidates = [
        package.parent.parent / "horovodrun",  # <build>/python/horovod
        pathlib.Path(sysconfig.get_path("scripts")) / "horovodrun",
        pathlib.Path(sys.executable).parent / "horovodrun",
    ]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("horovodrun")
    if found is None:
        raise RuntimeError("horovodrun is not installed beside this package nor in PATH; install "
                           "horovod again")
    return found


def run_commandline() -> None:
    """The console command: this process becomes horovodrun."""
    launcher = find_launcher()
    os.execv(launcher, [launcher, *sys.argv[1:]])


if __name__ == "__main__":
    run_commandline()
