# SPDX-License-Identifier: Apache-2.0
"""Data loaders: batches one after the other, or made ahead by a thread.

    class Rows(BaseDataLoader):
        def __len__(self): ...
        def _iterate(self): ...                       # yields the batches of an epoch

    class RowsAhead(AsyncDataLoaderMixin, Rows): ...  # the same, made ahead

    for batch in RowsAhead(async_loader_queue_size=8): ...

Each time a loader is gone through, _iterate() is called anew, ahead in a thread of its own that
lives as long as this iteration. There is never more than one: _iterate() needs no lock.
"""
import abc
import collections
import logging
import threading
import time
from typing import Any, Callable, Deque, Iterable, Iterator, Optional

CLOSE_SECONDS = 5.0  # how long a thread is waited for that is told to end

_log = logging.getLogger("horovod")


class BaseDataLoader(abc.ABC):
    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of batches in an epoch."""

    @abc.abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """The batches of one epoch."""

    def _process_batch(self, batch: Any) -> Any:
        """What is to be done to a batch in the thread that takes it, as moving it to a device."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class Prefetch:
    """A thread that takes batches from a source, up to n_ahead more than were asked for."""

    def __init__(self, source: Callable[[], Iterable[Any]], n_ahead: int) -> None:
        self._source = source
        self._n_ahead = n_ahead
        self._ready: Deque[Any] = collections.deque()
        self._error: Optional[BaseException] = None
        self._is_over = False  # nothing more will be ready
        self._is_closed = False
        self._changed = threading.Condition()
        # A daemon: whoever leaves the program does not wait for a batch nobody wants.
        self._thread = threading.Thread(target=self._run, name="horovod.data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for batch in self._source():
                if not self._offer(batch):
                    break
        except BaseException as error:  # it is the consumer's, whatever it is
            self._error = error
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _offer(self, batch: Any) -> bool:
        """Waits until there is room; does anybody want it still?"""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._n_ahead)
            if not self._is_closed:
                self._ready.append(batch)
                self._changed.notify_all()
            return not self._is_closed

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._ready or self._is_over)
                if self._is_closed or not self._ready:
                    break
                batch = self._ready.popleft()
                self._changed.notify_all()
            yield batch
        if self._error is not None and not self._is_closed:
            raise self._error

    def close(self) -> bool:
        """Ends the thread. One that is stuck in its source is left behind: False."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        # The loader may be freed by this very thread, if that is the last to know it.
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()


class AsyncDataLoaderMixin:
    """Stands before a BaseDataLoader among the bases of a class. Size 0: no thread."""

    _prefetch: Optional[Prefetch] = None

    def __init__(self, async_loader_queue_size: int = 64, debug_data_loader: bool = False,
                 *args: Any, **kwargs: Any) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(f"async_loader_queue_size is {async_loader_queue_size}: it must be 0, "
                             "for no thread, or the number of batches to make ahead")
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends an iteration that is under way, and its thread."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None and not prefetch.close():
            self._prefetch = prefetch
            _log.warning("the thread of a data loader is stuck in %s._iterate(); it is left "
                         "running", type(self).__name__)

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()
        if self._prefetch is not None:
            raise RuntimeError("the previous iteration cannot be ended: it is still waiting for "
                               f"a batch of {type(self).__name__}._iterate()")
        mine = self._prefetch = Prefetch(self._iterate, self.async_loader_queue_size)
        try:
            for batch in self._told(mine) if self.debug_data_loader else mine:
                yield self._process_batch(batch)
        finally:  # also where the loop is left early
            if self._prefetch is mine:
                self.close_async_loader()

    def _told(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, and in the end how long they were waited for."""
        n_batches, waited, start = 0, 0.0, time.monotonic()
        try:
            for batch in batches:
                waited += time.monotonic() - start
                n_batches += 1
                yield batch
                start = time.monotonic()
        finally:  # who takes as many as there are does not ask for one more
            print(f"{type(self).__name__}: {n_batches} batches, waited {waited:.3f} s for them "
                  f"with a queue of {self.async_loader_queue_size}", flush=True)

    def __del__(self) -> None:
        self.close_async_loader()
