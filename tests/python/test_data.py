# SPDX-License-Identifier: Apache-2.0
"""Data loaders: the same batches with and without a thread, and no thread that stays."""
import gc
import itertools
import threading
import time

import pytest

from horovod import data
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, n, fails_at=None):
        self.n = n
        self.fails_at = fails_at
        self.made = 0

    def __len__(self):
        return self.n

    def _iterate(self):
        for i in range(self.n):
            if i == self.fails_at:
                raise KeyError("planted")
            self.made += 1
            yield i

    def _process_batch(self, batch):
        return batch * 10


class NumbersAhead(AsyncDataLoaderMixin, Numbers):
    pass


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "horovod.data"]


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    gc.collect()
    wait_until(lambda: not threads())


def test_the_base_is_abstract():
    with pytest.raises(TypeError):
        BaseDataLoader()


@pytest.mark.parametrize("size", [0, 1, 3, 64])
def test_the_same_batches_again_and_again(size):
    loader = NumbersAhead(size, n=7)
    assert len(loader) == 7
    for _ in range(3):
        assert list(loader) == list(Numbers(7)) == [0, 10, 20, 30, 40, 50, 60]
    assert not threads()


def test_defaults_and_what_cannot_be():
    assert NumbersAhead(n=1).async_loader_queue_size == 64
    assert not NumbersAhead(n=1).debug_data_loader
    with pytest.raises(ValueError, match="async_loader_queue_size is -1"):
        NumbersAhead(-1, n=1)


def test_no_more_than_asked_for_is_made_ahead():
    loader = NumbersAhead(3, n=100)
    batches = iter(loader)
    assert next(batches) == 0
    wait_until(lambda: loader.made == 5)  # one taken, three in the queue, one in the hand
    time.sleep(0.1)
    assert loader.made == 5


@pytest.mark.parametrize("size", [0, 2])
def test_an_error_comes_after_the_batches_before_it(size):
    batches = iter(NumbersAhead(size, n=9, fails_at=3))
    assert list(itertools.islice(batches, 3)) == [0, 10, 20]
    with pytest.raises(KeyError, match="planted"):
        next(batches)


def test_left_early_and_begun_again():
    loader = NumbersAhead(2, n=1000)
    for batch in loader:
        if batch == 50:
            break
    wait_until(lambda: not threads())
    first = iter(loader)
    assert next(first) == 0
    second = iter(loader)
    assert [next(second), next(second)] == [0, 10]
    assert list(first) == []  # its thread had to go
    assert next(second) == 20 and len(threads()) == 1


def test_closing_ends_an_iteration():
    loader = NumbersAhead(2, n=1000)
    batches = iter(loader)
    next(batches)
    loader.close_async_loader()
    loader.close_async_loader()
    assert not threads() and list(batches) == []
    assert len(list(loader)) == 1000


def test_who_forgets_a_loader_ends_its_thread():
    batches = iter(NumbersAhead(2, n=1000))
    next(batches)
    assert len(threads()) == 1
    del batches


class Stuck(AsyncDataLoaderMixin, Numbers):
    def __init__(self, size):
        super().__init__(size, n=2)
        self.go_on = threading.Event()

    def _iterate(self):
        yield 1
        self.go_on.wait(60)


def test_closing_does_not_wait_for_ever(monkeypatch, caplog):
    monkeypatch.setattr(data, "CLOSE_SECONDS", 0.2)
    loader = Stuck(2)
    batches = iter(loader)
    next(batches)
    start = time.monotonic()
    loader.close_async_loader()
    assert time.monotonic() - start < 5 and "stuck in Stuck._iterate()" in caplog.text
    with pytest.raises(RuntimeError, match="cannot be ended"):
        next(iter(loader))
    loader.go_on.set()
    wait_until(lambda: not threads())
    assert next(iter(loader)) == 10


def test_what_is_told(capfd):
    list(NumbersAhead(2, debug_data_loader=True, n=4))
    assert "NumbersAhead: 4 batches, waited" in capfd.readouterr().out
    for _ in zip(range(3), NumbersAhead(2, debug_data_loader=True, n=4)):
        pass
    assert "NumbersAhead: 3 batches, waited" in capfd.readouterr().out
