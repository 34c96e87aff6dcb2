# SPDX-License-Identifier: Apache-2.0
"""The rank itself: python -m horovod.spark.rank, started by the agent of its task.

The function comes in the file HOROVOD_RUN_PAYLOAD. What becomes of it goes to HOROVOD_RUN_RESULT:
RESULT and the pickle, or ERROR and JSON, what was raised, as text. The pickle is made here, so that
a result that cannot be pickled is an error of this rank and not of Spark.
"""
import json
import os
import sys
import threading
import traceback
from typing import Any, Dict

from horovod.common import uncaught

RESULT = b"R"
ERROR = b"E"
SOME_RANK = 2**31 - 1  # it is not known which
# Raised by a rank because of another one.
CONSEQUENCES = ("HorovodInternalError",)
# How long a rank may take to exit after it has handed over its result.
LINGER_SECONDS = 30.0


def describe(error: BaseException) -> Dict[str, Any]:
    return {"type": type(error).__name__, "text": str(error),
            "traceback": "".join(traceback.format_exception(type(error), error,
                                                            error.__traceback__))}


def call() -> bytes:
    import cloudpickle

    with open(os.environ["HOROVOD_RUN_PAYLOAD"], "rb") as file:
        fn, args, kwargs = cloudpickle.load(file)
    put_down(os.environ["HOROVOD_RUN_READY"], b"0")  # the launcher's clock for the start stops
    result = fn(*args, **kwargs)
    try:
        return cloudpickle.dumps(result, protocol=5)
    except Exception as error:
        raise TypeError(f"the function returned a {type(result).__name__} that cannot be pickled: "
                        f"{error}; return plain data instead") from error


def put_down(path: str, *pieces: bytes) -> None:
    """All of it or nothing: a rank may be killed while it writes."""
    with open(path + ".part", "wb") as file:
        for piece in pieces:
            file.write(piece)
    os.rename(path + ".part", path)


def blame_another() -> None:
    """For the launcher, which looks for the cause. The library may have noted whom already."""
    path = os.environ.get("HOROVOD_BLAME_FILE", "")
    if path and not os.path.exists(path):
        with open(path, "w") as file:
            file.write(str(SOME_RANK))


def leave_in_time() -> None:
    """Threads or handlers of the program may keep it from ending, although it has ended well."""
    timer = threading.Timer(LINGER_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()


def main() -> int:
    """The exit status. An error has been told, on stderr too, as Python would have."""
    try:
        data = call()
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        if type(error).__name__ in CONSEQUENCES:
            blame_another()
        else:
            uncaught.tell(error)
        put_down(os.environ["HOROVOD_RUN_RESULT"], ERROR, json.dumps(describe(error)).encode())
        return 1
    sys.stdout.flush()
    put_down(os.environ["HOROVOD_RUN_RESULT"], RESULT, data)
    leave_in_time()
    return 0


if __name__ == "__main__":
    sys.exit(main())
