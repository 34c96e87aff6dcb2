# SPDX-License-Identifier: Apache-2.0
"""Where the ranks' output goes on the driver: lines, as horovodrun has put them together."""
import sys
import threading
from typing import IO, Any, List, Optional, TextIO, Tuple

PIECE_BYTES = 1 << 16


class Output:
    """prefix: '[rank]<stdout>:' in front of each line; timestamp: and the time before that."""

    def __init__(self, stdout: Optional[TextIO] = None, stderr: Optional[TextIO] = None,
                 prefix: bool = False, timestamp: bool = False, bar_is_up: bool = False) -> None:
        self._streams = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
        self._prefix = prefix or timestamp
        self._timestamp = timestamp
        self._bar_is_up = bar_is_up

    def style(self) -> Tuple[bool, bool]:
        return self._prefix, self._timestamp

    def words(self) -> List[str]:
        """For horovodrun."""
        return ["--color", "never", *([] if self._prefix else ["--plain-output"]),
                *(["--prefix-output-with-timestamp"] if self._timestamp else [])]

    def pump(self, stream: str, source: Any) -> threading.Thread:
        thread = threading.Thread(target=self._pump, args=(stream, source), daemon=True,
                                  name=f"horovod-spark-{stream}")
        thread.start()
        return thread

    def _pump(self, stream: str, source: IO[bytes]) -> None:
        rest = b""
        while data := source.read1(PIECE_BYTES):  # type: ignore
            data = rest + data
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # letters may be cut in two
            self.write(stream, data[:whole])
            rest = data[whole:]
        self.write(stream, rest)
        source.close()

    def write(self, stream: str, data: bytes) -> None:
        if not data:
            return
        file = self._streams[stream]
        try:
            # Spark's progress bar may stand at the start of this line.
            file.write(("\n" if self._bar_is_up else "") + data.decode("utf-8", "replace"))
            file.flush()
        except (OSError, ValueError):
            pass  # somebody has closed it; the job goes on
        self._bar_is_up = False
