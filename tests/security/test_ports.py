# SPDX-License-Identifier: Apache-2.0
"""Which addresses a job listens at: while all its ranks are on one host, nothing but loopback.

/proc says it of every process: the sockets it has, and the addresses of those that listen.
"""
import os
import pathlib
import subprocess
import sys

import psutil

LISTENS = "0A"  # the state, as /proc/net/tcp writes it
LOOPBACK = ("0100007F", "0" * 24 + "01000000")  # 127.0.0.1 and ::1

# Says where itself and its launcher listen, between an allreduce and the end.
RANK = """
import os, sys
sys.path.insert(0, os.environ["HERE"])
from horovod.common import basics
import test_ports
basics.init()
mine = test_ports.addresses(os.getpid())
launcher = test_ports.addresses(int(os.environ["LAUNCHER"] or os.getppid()))
print("listens", basics.rank(), *sorted(mine), "launcher", *sorted(launcher), flush=True)
basics.shutdown()
"""


def listening():
    """inode -> address of every listening TCP socket of this network namespace."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == LISTENS:
                found[cells[9]] = cells[1].split(":")[0]
    return found


def addresses(pid):
    sockets = listening()
    found = set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found.add(sockets.get(target[len("socket:["):-1]))
    return found - {None}


def run(*arguments, **environment):
    build = pathlib.Path(os.environ["HVD_BUILD"])
    command = [build / "horovodrun", "-np", "2", *arguments, sys.executable, "-c", RANK]
    environment = {**os.environ, "HERE": str(pathlib.Path(__file__).parent),
                   "PYTHONPATH": str(build / "python"), **environment}
    launcher = subprocess.Popen(["sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh", *command],
                                env=environment, stdout=subprocess.PIPE, text=True)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    lines = [line.split("listens ", 1)[1].split() for line in output.splitlines()
             if "listens " in line]
    assert len(lines) == 2, output
    ranks, launchers = set(), set()
    for line in lines:
        at = line.index("launcher")
        ranks.update(line[1:at])
        launchers.update(line[at + 1:])
    return ranks, launchers


def test_a_job_on_one_host_listens_on_loopback_only():
    ranks, launcher = run()
    assert ranks, "the look finds what is there: ranks do listen"
    assert ranks <= set(LOOPBACK), ranks
    assert launcher <= set(LOOPBACK), launcher


def test_ranks_on_two_hosts_listen_on_the_network():
    """The same two ranks, taken for two hosts: the test above sees a difference."""
    ranks, _ = run("-H", "localhost:1,127.0.0.1:1")
    is_alone = all(name == "lo" for name, state in psutil.net_if_stats().items() if state.isup)
    assert is_alone or not ranks <= set(LOOPBACK), ranks
