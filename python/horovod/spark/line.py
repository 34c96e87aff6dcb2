# SPDX-License-Identifier: Apache-2.0
"""Frames between the driver and its agents, over a channel that has proved the job's secret.

A frame is a kind (one byte), a length (four) and that many bytes, at most MAX_FRAME_BYTES. What
the two sides tell each other is JSON; the function, results and output are opaque bytes that
nobody here unpickles. Nothing blocks: whoever owns a Line sleeps in select and calls pump() and
push(). One thread at a time.
"""
import collections
import enum
import json
import select
import socket
import struct
import time
from typing import Any, Deque, Iterable, List, Tuple

from horovod import _core

HEAD = struct.Struct("<BI")
MAX_FRAME_BYTES = 1 << 20
# The longest wait for a caller to prove the secret.
SHAKE_SECONDS = 30.0


class Kind(enum.IntEnum):
    REGISTER = 1  # agent: who and where I am
    LEAVE = 2     # driver: go away, why, and whether Spark shall start the task again
    START = 3     # driver: your place and environment; CODE follows
    CODE = 4      # driver: a piece of the pickled function; an empty one is the end
    RUNNING = 5   # agent: the function is being called
    STDOUT = 6    # agent: output of the rank
    STDERR = 7
    RESULT = 8    # agent: a piece of the pickled result
    ENDED = 9     # agent: the rank is gone; exit code, and the error if it told one
    SHELL = 10    # remote shell of mpirun: run this command on that host
    PLACE = 11    # driver, to an elastic rank: your place in the next generation
    NEWS = 12     # driver, to an elastic rank: tasks have come
    READY = 13    # agent: the elastic rank has left this generation


Frame = Tuple[int, bytes]


class Line:
    def __init__(self, sock: socket.socket, is_server: bool, secret: bytes) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
        self.sock = sock
        self.is_open = False  # the peer has proved the secret
        self.opened_by = time.monotonic() + SHAKE_SECONDS
        self._channel = _core.Channel(sock.fileno(), is_server, secret)
        self._out: Deque[memoryview] = collections.deque()
        self._in = bytearray()
        self._chunk = bytearray(1 << 18)
        self.n_queued_bytes = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    def shake(self) -> bool:
        """Goes on proving; True once both sides have. ConnectionError if the peer cannot."""
        if not self.is_open:
            self.is_open = self._channel.shake()
            if not self.is_open and time.monotonic() > self.opened_by:
                raise ConnectionError("the peer did not prove the job's secret in time")
        return self.is_open

    def wants_write(self) -> bool:
        return bool(self._out) or self._channel.wants_write()

    def post(self, kind: Kind, payload: bytes = b"") -> None:
        """Queues one frame (or several of the kind, if the payload is long) and sends what goes."""
        view = memoryview(payload)
        for at in range(0, max(len(view), 1), MAX_FRAME_BYTES):
            piece = view[at:at + MAX_FRAME_BYTES]
            self._out.append(memoryview(HEAD.pack(kind, len(piece))))
            self.n_queued_bytes += HEAD.size + len(piece)
            if len(piece):
                self._out.append(piece)
        self.push()

    def post_json(self, kind: Kind, value: Any) -> None:
        self.post(kind, json.dumps(value).encode())

    def push(self) -> None:
        while self._out:
            n = self._channel.send(self._out[0])
            self.n_queued_bytes -= n
            if n < len(self._out[0]):
                self._out[0] = self._out[0][n:]
                return
            self._out.popleft()
        self._channel.send(b"")

    def pump(self) -> List[Frame]:
        """The frames that have come. ConnectionError when the peer is gone and all were given."""
        frames: List[Frame] = []
        while True:
            try:
                n = self._channel.recv(self._chunk)
            except ConnectionError:
                if frames:
                    return frames
                raise
            if n == 0:
                return frames
            self._in += memoryview(self._chunk)[:n]
            frames.extend(self._take())

    def _take(self) -> Iterable[Frame]:
        at = 0
        while len(self._in) - at >= HEAD.size:
            kind, n_bytes = HEAD.unpack_from(self._in, at)
            if n_bytes > MAX_FRAME_BYTES:
                raise ConnectionError(f"a frame claims {n_bytes} bytes")
            end = at + HEAD.size + n_bytes
            if len(self._in) < end:
                break
            yield kind, bytes(memoryview(self._in)[at + HEAD.size:end])
            at = end
        del self._in[:at]

    def close(self) -> None:
        self._channel.close()
        self.sock.close()


def keep_alive(sock: socket.socket) -> None:
    """A host that is gone without a word is noticed after some 25 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def wait(line: Line, seconds: float) -> bool:
    """Sleeps until the line can go on; False if the time is over first."""
    writes = [line] if line.wants_write() else []
    readable, writable, _ = select.select([line], writes, [], max(seconds, 0.0))
    return bool(readable or writable)


def dial(addresses: List[str], port: int, secret: bytes, deadline: float) -> Line:
    """Tries every address in turn until one proves the secret; again until the deadline."""
    problem: Exception = ConnectionError("no address to call")
    while True:
        for address in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return _dial_one(address, port, secret, min(left, 10.0))
            except OSError as error:
                problem = error
        if time.monotonic() >= deadline:
            raise ConnectionError(f"cannot reach the driver at {' or '.join(addresses)} port "
                                  f"{port}: {problem}; if the driver is behind another address, "
                                  "set spark.driver.host") from problem
        time.sleep(0.2)


def _dial_one(address: str, port: int, secret: bytes, seconds: float) -> Line:
    deadline = time.monotonic() + seconds
    line = Line(socket.create_connection((address, port), timeout=seconds), False, secret)
    try:
        while not line.shake():
            if not wait(line, deadline - time.monotonic()):
                raise ConnectionError(f"{address} accepted the connection but did not finish the "
                                      "handshake")
    except BaseException:
        line.close()
        raise
    return line
