# SPDX-License-Identifier: Apache-2.0
"""The ranks' output on the driver: whole lines, plain or with the rank in front.

Lines of different ranks never mix: a line is written when its end has come. A carriage return ends
a line too (progress bars). What is left without an end is written when the rank has gone.
"""
import re
import sys
import time
from typing import Dict, List, Optional, TextIO, Tuple

LINE_END = re.compile(rb"\r\n|\n|\r")
# A line that never ends is written in pieces of this size.
LONGEST_LINE_BYTES = 1 << 20


class Output:
    """prefix: '[rank]<stdout>:' in front of each line; timestamp: and the time before that."""

    def __init__(self, stdout: Optional[TextIO] = None, stderr: Optional[TextIO] = None,
                 prefix: bool = False, timestamp: bool = False, bar_is_up: bool = False) -> None:
        self._streams = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
        self._prefix = prefix or timestamp
        self._timestamp = timestamp
        self._bar_is_up = bar_is_up
        self._rests: Dict[Tuple[int, str], bytes] = {}

    def take(self, rank: int, stream: str, data: bytes) -> None:
        rest = self._rests.pop((rank, stream), b"") + data
        lines: List[bytes] = []
        at = 0
        for end in LINE_END.finditer(rest):
            if end.group() == b"\r" and end.end() == len(rest):
                break  # perhaps the first half of \r\n
            lines.append(rest[at:end.end()])
            at = end.end()
        if len(rest) - at > LONGEST_LINE_BYTES:
            lines.append(rest[at:])
            at = len(rest)
        if at < len(rest):
            self._rests[rank, stream] = rest[at:]
        self._write(rank, stream, lines)

    def end(self, rank: int) -> None:
        """Writes what has no line end."""
        for stream in self._streams:
            rest = self._rests.pop((rank, stream), b"")
            if rest:
                self._write(rank, stream, [rest])

    def _write(self, rank: int, stream: str, lines: List[bytes]) -> None:
        if not lines:
            return
        head = f"[{rank}]<{stream}>:" if self._prefix else ""
        if self._timestamp:
            head = time.asctime() + head
        text = "".join(head + line.decode("utf-8", "replace") for line in lines)
        if self._bar_is_up:  # Spark's progress bar stands at the start of this line
            self._bar_is_up = False
            text = "\n" + text
        file = self._streams[stream]
        file.write(text)
        file.flush()
