# SPDX-License-Identifier: Apache-2.0
"""The rank itself: loads the function, calls it, and hands back its result or its error.

Runs in the process the warden forked. On RESULT_FD it writes one byte, RUNNING, before the call and
then RESULT with the pickle, or ERROR with JSON: what was raised, as text. The pickle is made here,
so that a result that cannot be pickled is an error of this rank and not of Spark.
"""
import json
import os
import sys
import traceback
from typing import Any, Dict

RUNNING = b"S"
RESULT = b"R"
ERROR = b"E"


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view):]


def describe(error: BaseException) -> Dict[str, Any]:
    return {"type": type(error).__name__, "text": str(error),
            "traceback": "".join(traceback.format_exception(type(error), error,
                                                            error.__traceback__))}


def call(code_fd: int, result_fd: int) -> bytes:
    import cloudpickle

    with os.fdopen(code_fd, "rb") as file:
        fn, args, kwargs = cloudpickle.load(file)
    write_all(result_fd, RUNNING)
    result = fn(*args, **kwargs)
    try:
        return cloudpickle.dumps(result, protocol=5)
    except Exception as error:
        raise TypeError(f"the function returned a {type(result).__name__} that cannot be pickled: "
                        f"{error}; return plain data instead") from error


def main(code_fd: int, result_fd: int) -> int:
    """The exit status. An error has been told, on stderr too, as Python would have."""
    for fd in (code_fd, result_fd):
        os.set_inheritable(fd, False)
    secret_file = os.environ.get("HOROVOD_SECRET_FILE", "")
    if secret_file.startswith("/proc/self/fd/"):  # for this process, not for those it starts
        os.set_inheritable(int(secret_file.rpartition("/")[2]), False)
    os.lseek(code_fd, 0, os.SEEK_SET)
    try:
        data = call(code_fd, result_fd)
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        write_all(result_fd, ERROR + json.dumps(describe(error)).encode())
        return 1
    sys.stdout.flush()
    write_all(result_fd, RESULT)
    write_all(result_fd, data)
    os.close(result_fd)
    return 0
