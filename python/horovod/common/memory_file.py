# SPDX-License-Identifier: Apache-2.0
"""Files in memory: for secrets, and for what is passed on to other processes by descriptor."""
import ctypes
import os

_MFD_CLOEXEC = 1


def memory_file(name: str, data: bytes = b"") -> int:
    """A descriptor of a new file that only this user may read; its path is below /proc/self/fd.

    Pythons built for glibc before 2.27, as those of conda and uv are, have no os.memfd_create().
    The C library they run with has it: libhvd needs it too.
    """
    fd = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC)
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot make a file in memory: {os.strerror(error)}")
    os.fchmod(fd, 0o600)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
