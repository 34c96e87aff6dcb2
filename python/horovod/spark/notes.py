# SPDX-License-Identifier: Apache-2.0
"""What the agent of an elastic rank and the rank leave each other: small files in a folder.

The same files as under horovodrun (horovod/common/membership.py reads them): place.<worker>, news
and ready.<worker>. Only this user can enter the folder.
"""
import os
import shutil
import tempfile
from typing import Dict, Optional

# How often to look whether the rank has left something.
LOOK_SECONDS = 0.1


PREFIX = "horovod-elastic-"
VARIABLE = "HOROVOD_ELASTIC_DIR"


def remove_left() -> None:
    """For the warden, which outlives an agent that was killed."""
    folder = os.environ.get(VARIABLE, "")
    if os.path.basename(folder).startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


class Notes:
    def __init__(self, worker: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._worker = worker
        self._left = 0

    def environment(self) -> Dict[str, str]:
        return {VARIABLE: self._folder.name}

    def place(self, place: Dict[str, str]) -> None:
        self._write(f"place.{self._worker}",
                    "".join(f"{name}={value}\n" for name, value in place.items()))

    def news(self, number: int, what: int) -> None:
        self._write("news", f"{number} {what}")

    def newly_left(self) -> Optional[int]:
        """The generation the rank has left, once for each."""
        try:
            with open(self._path(f"ready.{self._worker}"), encoding="utf-8") as file:
                left = int(file.read())
        except FileNotFoundError:
            return None
        if left <= self._left:
            return None
        self._left = left
        return left

    def close(self) -> None:
        self._folder.cleanup()

    def _path(self, name: str) -> str:
        return os.path.join(self._folder.name, name)

    def _write(self, name: str, text: str) -> None:
        """At once: the rank reads it as soon as it is there."""
        try:
            with open(self._path(name + ".new"), "w", encoding="utf-8") as file:
                file.write(text)
            os.rename(self._path(name + ".new"), self._path(name))
        except FileNotFoundError:
            pass  # the rank has just ended, and its warden has removed the folder
