# SPDX-License-Identifier: Apache-2.0
"""Where jobs that compute input and jobs that train meet: who serves, and at what address.

A ComputeService runs in one process, in threads of its own: one listens, and each caller that has
proved the key has one. A ComputeClient asks it questions, each over a connection of its own that
has proved the key both ways (Channel and Listener of src/bind). A question and its answer are JSON
in one frame: four bytes of length, and the text. Whoever waits asks again every few seconds, so
that no wait outlives its caller.
"""
import hashlib
import json
import select
import socket
import struct
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import psutil

from horovod import _core
from horovod.runner.common.util.timeout import TimeoutException

MAX_FRAME_BYTES = 1 << 16
ANSWER_SECONDS = 30.0  # the longest silence of a peer that has something to say
PATIENCE_SECONDS = 5.0  # of the service with one question, before it says "not yet"
_LENGTH = struct.Struct("<I")
_RAISED = {"IndexError": IndexError, "ValueError": ValueError}

Addresses = Dict[str, List[Tuple[str, int]]]


def own_addresses(port: int, nics: Optional[Set[str]] = None) -> Addresses:
    """The addresses of this host by network interface; loopback comes last."""
    found: Addresses = {}
    for nic, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if addresses and (nics is None or nic in nics):
            found[nic] = [(address, port) for address in addresses]
    return dict(sorted(found.items(), key=lambda item: item[1][0][0].startswith("127.")))


def _secret_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _patience(seconds: float) -> float:
    return max(0.0, min(float(seconds), PATIENCE_SECONDS))


class _Talk:
    """A conversation in frames; every step has ANSWER_SECONDS."""

    def __init__(self, sock: socket.socket, channel: _core.Channel) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._channel = channel
        deadline = time.monotonic() + ANSWER_SECONDS
        while not channel.shake():
            self._sleep(deadline)

    def _sleep(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConnectionError("the peer does not answer")
        poll = select.poll()
        poll.register(self._sock, select.POLLIN |
                      (select.POLLOUT if self._channel.wants_write() else 0))
        poll.poll(left * 1000)

    def tell(self, value: Any) -> None:
        text = json.dumps(value).encode()
        data = memoryview(_LENGTH.pack(len(text)) + text)
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(data) or self._channel.wants_write():
            data = data[self._channel.send(data):]
            if len(data) or self._channel.wants_write():
                self._sleep(deadline)

    def hear(self) -> Any:
        chunk = bytearray(4096)
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            if len(self._in) >= _LENGTH.size:
                n_bytes = _LENGTH.unpack_from(self._in)[0]
                if n_bytes > MAX_FRAME_BYTES:
                    raise ConnectionError(f"a frame claims {n_bytes} bytes")
                end = _LENGTH.size + n_bytes
                if len(self._in) >= end:
                    text = bytes(self._in[_LENGTH.size:end])
                    del self._in[:end]
                    return json.loads(text)
            n = self._channel.recv(chunk)
            self._in += chunk[:n]
            if n == 0:
                self._sleep(deadline)

    def close(self) -> None:
        self._channel.close()
        self._sock.close()


class ComputeService:
    """Remembers dispatchers and their workers, and whether all is over. Serves until shutdown()."""

    def __init__(self, dispatchers: int, workers_per_dispatcher: int, key: bytes,
                 nics: Optional[Set[str]] = None) -> None:
        if dispatchers < 1 or workers_per_dispatcher < 1:
            raise ValueError("there must be at least one dispatcher, and one worker for each")
        self._workers_per_dispatcher = workers_per_dispatcher
        self._dispatchers: List[Optional[str]] = [None] * dispatchers
        self._workers: List[Set[int]] = [set() for _ in range(dispatchers)]
        self._over = False
        self._changed = threading.Condition()
        self._nics = nics
        listener = _core.Listener(_secret_of(key))
        self._port = listener.port()
        self._stops, self._stop = socket.socketpair()
        threading.Thread(target=self._listen, args=(listener,), name="compute-service",
                         daemon=True).start()

    def addresses(self) -> Addresses:
        return own_addresses(self._port, self._nics)

    def shutdown(self) -> None:
        """Lets everybody know that it is over, and takes no more callers."""
        self._end()
        self._stop.close()

    def _listen(self, listener: _core.Listener) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(self._stops, select.POLLIN)
        while self._stops.fileno() not in dict(poll.poll()):  # shutdown() ends it
            while entrant := listener.accept():
                fd, channel = entrant
                threading.Thread(target=self._serve, args=(socket.socket(fileno=fd), channel),
                                 daemon=True).start()
        listener.close()
        self._stops.close()

    def _serve(self, sock: socket.socket, channel: _core.Channel) -> None:
        """One caller, until it hangs up."""
        talk = _Talk(sock, channel)
        try:
            while True:
                talk.tell(self._answer(talk.hear()))
        except (ConnectionError, ValueError):
            pass
        finally:
            talk.close()

    def _answer(self, question: Any) -> Dict[str, Any]:
        handlers: Dict[str, Callable[..., Any]] = {
            "register_dispatcher": self._register_dispatcher,
            "wait_for_dispatcher": self._wait_for_dispatcher,
            "register_worker": self._register_worker,
            "wait_for_workers": self._wait_for_workers,
            "shutdown": self._end,
            "wait_for_shutdown": self._wait_for_shutdown,
        }
        try:
            return {"value": handlers[question["what"]](*question["args"])}
        except (KeyError, TypeError):
            return {"error": "ValueError", "text": "the compute service does not know this request"}
        except (IndexError, ValueError) as error:
            return {"error": type(error).__name__, "text": str(error)}

    def _checked(self, dispatcher_id: int) -> int:
        if not isinstance(dispatcher_id, int) or not 0 <= dispatcher_id < len(self._dispatchers):
            raise IndexError(f"there is no dispatcher {dispatcher_id}, only 0 to "
                             f"{len(self._dispatchers) - 1}")
        return dispatcher_id

    def _register_dispatcher(self, dispatcher_id: int, address: str) -> None:
        with self._changed:
            known = self._dispatchers[self._checked(dispatcher_id)]
            if known not in (None, address):
                raise ValueError(f"dispatcher {dispatcher_id} is registered already, with address "
                                 f"{known} instead of {address}")
            self._dispatchers[dispatcher_id] = address
            self._changed.notify_all()

    def _wait_for_dispatcher(self, dispatcher_id: int, seconds: float) -> Optional[str]:
        with self._changed:
            self._checked(dispatcher_id)
            self._changed.wait_for(lambda: self._dispatchers[dispatcher_id] is not None,
                                   _patience(seconds))
            return self._dispatchers[dispatcher_id]

    def _register_worker(self, dispatcher_id: int, worker_id: int) -> None:
        with self._changed:
            self._workers[self._checked(dispatcher_id)].add(int(worker_id))
            self._changed.notify_all()

    def _wait_for_workers(self, dispatcher_id: int, seconds: float) -> bool:
        with self._changed:
            workers = self._workers[self._checked(dispatcher_id)]
            return self._changed.wait_for(
                lambda: len(workers) >= self._workers_per_dispatcher, _patience(seconds))

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _wait_for_shutdown(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._over, _patience(seconds))


class ComputeClient:
    """Asks a ComputeService. timeout is in seconds; TimeoutException when it is over."""

    def __init__(self, addresses: Addresses, key: bytes, verbose: int = 1) -> None:
        del verbose
        self._addresses = [tuple(address) for group in addresses.values() for address in group]
        self._key = key

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        self._ask("register_dispatcher", dispatcher_id, dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """The address of the dispatcher, once it has one."""
        return self._wait(timeout, f"dispatcher {dispatcher_id} to register",
                          "wait_for_dispatcher", dispatcher_id)

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        self._ask("register_worker", dispatcher_id, worker_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        self._wait(timeout, f"all workers of dispatcher {dispatcher_id} to register",
                   "wait_for_workers", dispatcher_id)

    def shutdown(self) -> None:
        """Ends the service and lets its workers go."""
        self._ask("shutdown")

    def wait_for_shutdown(self) -> None:
        """Returns when somebody has called shutdown(), or the service is gone."""
        try:
            self._wait(None, "", "wait_for_shutdown")
        except ConnectionError:
            pass

    def _call(self) -> _Talk:
        problem: Exception = ConnectionError("it has no address")
        for address in self._addresses:
            try:
                sock = socket.create_connection(address, timeout=PATIENCE_SECONDS)
            except OSError as error:
                problem = error
                continue
            try:
                return _Talk(sock, _core.Channel(sock.fileno(), False, _secret_of(self._key)))
            except ConnectionError as error:
                problem = error
                sock.close()
        raise ConnectionError(f"cannot reach the compute service: {problem}") from problem

    def _ask(self, what: str, *args: Any) -> Any:
        talk = self._call()
        try:
            return self._one(talk, what, args)
        finally:
            talk.close()

    def _one(self, talk: _Talk, what: str, args: Tuple[Any, ...]) -> Any:
        talk.tell({"what": what, "args": args})
        answer = talk.hear()
        if "error" in answer:
            raise _RAISED.get(answer["error"], ValueError)(answer["text"])
        return answer["value"]

    def _wait(self, timeout: Optional[float], waited_for: str, what: str, *args: Any) -> Any:
        """Asks until the answer is not false any more."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        talk = self._call()
        try:
            while True:
                left = min(deadline - time.monotonic(), PATIENCE_SECONDS)
                value = self._one(talk, what, (*args, left))
                if value:
                    return value
                if time.monotonic() >= deadline:
                    raise TimeoutException(f"waited {timeout} s for {waited_for}; is the job that "
                                           "computes the input running?")
        finally:
            talk.close()
