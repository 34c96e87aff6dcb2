# SPDX-License-Identifier: Apache-2.0
"""A rank of horovod.run: takes the function out of the payload, calls it, puts the result down.

The result file has ("result", pickled value) or ("error", text). It is written to a name of its own
first, so that a rank that dies while writing leaves none.
"""
import os
import pickle
import sys
import traceback

import cloudpickle

from horovod.common import uncaught
from horovod.common.exceptions import HorovodInternalError


def _result_path() -> str:
    if "HOROVOD_RUN_RESULT" in os.environ:
        return os.environ["HOROVOD_RUN_RESULT"]
    names = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_RANK"]
    rank = next(os.environ[name] for name in names if name in os.environ)
    return os.path.join(os.environ["HOROVOD_RUN_RESULTS"], f"rank.{rank}")


def _write(outcome) -> None:
    path = _result_path()
    with open(path + ".part", "wb") as file:
        pickle.dump(outcome, file)
    os.rename(path + ".part", path)


def main() -> int:
    with open(os.environ["HOROVOD_RUN_PAYLOAD"], "rb") as file:
        payload = file.read()
    try:
        func, args, kwargs = cloudpickle.loads(payload)
        value = func(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            value = None
        else:
            text = traceback.format_exc()
            is_cause = uncaught.tell(error)
            if is_cause or not isinstance(error, HorovodInternalError):
                print("User function raise error: " + text, file=sys.stderr, flush=True)
            else:
                uncaught.print_consequence(error)
            _write(("error", text))
            code = getattr(error, "code", 1)  # of a SystemExit
            return code if isinstance(code, int) else 1
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        text = (f"the result of this rank, of type {type(value).__name__}, cannot be pickled: "
                f"{error}; return plain data, such as numbers, lists or arrays\n")
        print("User function raise error: " + text, file=sys.stderr, flush=True)
        _write(("error", text))
        return 1
    _write(("result", pickled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
