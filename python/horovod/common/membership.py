# SPDX-License-Identifier: Apache-2.0
"""A rank's place in an elastic job of horovodrun: which generation, which rank, what is new.

The agent of this host and the rank leave each other small files in a directory of the job
(HOROVOD_ELASTIC_DIR): place.<worker> tells who this rank is in the next generation, news that hosts
have come or gone or that the job is about to end, ready.<worker> that this rank has left its
generation, wants.<worker> how the launcher is to treat it. docs/elastic.md.
"""
import os
import sys
import time

LOOK_EVERY_S = 0.05
# The launcher gives up after --elastic-timeout, and says why; it must be the first to do so.
LATER_S = 30.0
FIRST_GENERATION = 1
WANTS_WARNING = 1  # it writes a checkpoint if it is told of the end
WANTS_SHRINK = 2  # after a failure, to go on without waiting for others
_NO_PLACE = "-1"


def is_elastic() -> bool:
    return "HOROVOD_ELASTIC_DIR" in os.environ


def _path(name: str) -> str:
    return os.path.join(os.environ["HOROVOD_ELASTIC_DIR"], name)


def _read(name: str) -> str:
    try:
        with open(_path(name), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _generation() -> int:
    return int(os.environ["HOROVOD_ELASTIC_GENERATION"])


def is_later_generation() -> bool:
    """Was there one before? Then ranks that were in it know more than new ones."""
    return is_elastic() and _generation() > FIRST_GENERATION


def _say_ready(worker: str) -> None:
    """Atomically: the agent reads the file as soon as it is there."""
    path = _path(f"ready.{worker}")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(str(_generation()))
    os.rename(path + ".new", path)


def say_wants(what: int) -> None:
    """How the launcher is to treat this rank: WANTS_..., added up."""
    if is_elastic():
        path = _path(f"wants.{os.environ['HOROVOD_ELASTIC_WORKER']}")
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(str(what))
        os.rename(path + ".new", path)


def has_no_place_yet() -> bool:
    """Was this process started while the others go on? It joins them when it is ready."""
    return is_elastic() and os.environ["HOROVOD_RANK"] == _NO_PLACE


def _newer_place(worker: str) -> dict:
    """What place.<worker> says, if it is about a later generation than this rank's; else {}."""
    lines = _read(f"place.{worker}").splitlines()
    place = dict(line.split("=", 1) for line in lines)
    return place if int(place.get("HOROVOD_ELASTIC_GENERATION", 0)) > _generation() else {}


def take_next_place() -> None:
    """Leaves this generation and waits for a place in the next; the environment has it then."""
    worker = os.environ["HOROVOD_ELASTIC_WORKER"]
    timeout_s = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", "600")) + LATER_S
    deadline = time.monotonic() + timeout_s
    _say_ready(worker)
    while not (place := _newer_place(worker)):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the launcher gave rank {os.environ['HOROVOD_RANK']} no place in the next "
                f"generation of the elastic job within {timeout_s:.0f} s (--elastic-timeout, and "
                f"{LATER_S:.0f} s); does the launcher still run?")
        time.sleep(LOOK_EVERY_S)
    os.environ.update(place)
    if place["HOROVOD_RANK"] == _NO_PLACE:
        print(f"rank on host {os.environ.get('HOROVOD_HOSTNAME')} has been removed from elastic "
              "job", file=sys.stderr, flush=True)
        raise SystemExit(0)


def news() -> tuple:
    """(number, what) of the last news about hosts, what as HostUpdateResult has it; or (0, 0)."""
    words = _read("news").split() if is_elastic() else []
    return (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)
