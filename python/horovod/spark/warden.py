# SPDX-License-Identifier: Apache-2.0
"""The parent of one rank: python -m horovod.spark.warden CODE_FD RESULT_FD LIFE_FD [COMMAND].

A Spark worker may be killed at any moment, and its children would live on. So the agent starts this
process and holds the other end of LIFE_FD. It forks the rank before anything has a thread, into a
process group of its own, and then only waits: for the rank to end, for a byte (end it: SIGTERM,
then SIGKILL), or for the end of the pipe (the agent is gone: SIGKILL at once). Whatever the rank
left behind is killed, also what left its group: orphans come to this process (subreaper), and the
folder of an elastic rank is removed. Its exit status is the rank's, 128 + n for a signal. With a
COMMAND a shell runs it in the rank's place.
"""
import ctypes
import os
import select
import signal
import sys
import time
from typing import List, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 1.5


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def start_rank(code_fd: int, result_fd: int, life_fd: int, command: List[str]) -> int:
    """Forks; returns in the parent only."""
    warden = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    os.close(life_fd)
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != warden:
        os._exit(1)
    if command:
        os.execv("/bin/sh", ["sh", "-c", *command])
    from horovod.spark import rank

    sys.exit(rank.main(code_fd, result_fd))


def children() -> List[int]:
    """Processes whose parent this is; those the rank left behind among them."""
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            if parent == me:
                found.append(int(name))
    return found


def kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def sweep(pid: int) -> None:
    """Kills whatever is left of the rank: its group, and orphans until there are none."""
    kill_group(pid, signal.SIGKILL)
    for _ in range(100):
        left = children()
        if not left:
            return
        for child in left:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for child in left:
            try:
                os.waitpid(child, 0)
            except ChildProcessError:
                pass


def watch(pid: int, life_fd: int) -> int:
    """Waits for the rank to end, or ends it; its exit status."""
    pid_fd = os.pidfd_open(pid)
    kill_at = None
    fds = [pid_fd, life_fd]
    while True:
        left = None if kill_at is None else max(kill_at - time.monotonic(), 0.0)
        readable, _, _ = select.select(fds, [], [], left)
        if pid_fd in readable:
            break
        if life_fd in readable:
            fds = [pid_fd]
            if os.read(life_fd, 1):
                kill_group(pid, signal.SIGTERM)
                kill_at = time.monotonic() + GRACE_SECONDS
            else:
                kill_at = time.monotonic()
        elif kill_at is not None and time.monotonic() >= kill_at:
            kill_group(pid, signal.SIGKILL)
            kill_at = None
    status = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def main() -> NoReturn:
    code_fd, result_fd, life_fd = (int(text) for text in sys.argv[1:4])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = start_rank(code_fd, result_fd, life_fd, sys.argv[4:])
    # From here on the rank alone holds what the agent reads from.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    os.close(code_fd)
    os.close(result_fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the agent decides
    status = watch(pid, life_fd)
    sweep(pid)
    if "HOROVOD_ELASTIC_WORKER" in os.environ:
        from horovod.spark import notes  # here: every rank would wait for the import

        notes.remove_left()
    os._exit(status)


if __name__ == "__main__":
    main()
