# SPDX-License-Identifier: Apache-2.0
"""Operations without a name, from several threads.

Ranks match operations without a name by the order of the calls. A thread keeps an order, several do
not: what they submit would be added up crosswise. So what a thread submits is counted apart from
the others' by what the thread runs, which is equal on all ranks; its name need not be, since Python
numbers threads, and one rank may have more of them. Threads that run the same function at a time,
as those of a pool, cannot be told apart, and are refused.
"""
import functools
import sys
import threading

from horovod import _core

LONGEST = 80  # what the core shows of it, in bytes

# Threads that only their first operation shows to us: idents of those that Python has not started,
# and names of pools. A second one is refused.
_native, _pools = set(), set()

# What several threads have run at a time: how many. Who is refused may end, and leave one of them
# alone; on another rank that may be another one.
_crowds = {}


def series():
    """What the calling thread's operations without a name are counted by; None: with those of the
    main thread. ValueError: they cannot be matched."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or _core.size() == 1:
        return None
    if isinstance(thread, threading._DummyThread):
        return _series_of_native(thread)
    work = _work_of(thread)
    if _pool_of(thread) is not None:
        _pools.add(_pool_of(thread))
        _refuse_unless_one(len(_pools), "pools of threads")
        siblings = [one for one in threading.enumerate() if _pool_of(one) == _pool_of(thread)]
        _refuse_a_crowd(len(siblings), f"threads of the pool '{_pool_of(thread)}'")
    else:
        siblings = [one for one in threading.enumerate() if _work_of(one) == work]
        _refuse_a_crowd(len(siblings), f"threads that run '{work}'")
    return work


def _series_of_native(thread):
    if _is_in_backward():
        return "backward"
    _native.add(thread.ident)
    _refuse_unless_one(len(_native), "threads that were not started by Python")
    return "native"


def _is_in_backward():
    """Is this thread one of PyTorch's, running a backward pass for the thread that waits for it?"""
    torch = sys.modules.get("torch")
    task = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    return task is not None and task() != -1


def _work_of(thread):
    target = getattr(thread, "_target", None)
    while isinstance(target, functools.partial):
        target = target.func
    what = type(thread) if target is None else target
    what = what if hasattr(what, "__qualname__") else type(what)
    return f"{what.__module__}.{what.__qualname__}".removeprefix("__main__.")[-LONGEST:]


def _pool_of(thread):
    """The name of the ThreadPoolExecutor it belongs to, or None."""
    if _work_of(thread) != "concurrent.futures.thread._worker":
        return None
    return thread.name.rpartition("_")[0]


def _refuse_a_crowd(n, of_what):
    if n > 1:
        _crowds[of_what] = max(n, _crowds.get(of_what, 0))
    _refuse_unless_one(_crowds.get(of_what, 1), of_what)


def _refuse_unless_one(n, of_what):
    if n > 1:
        raise ValueError(
            f"Rank {_core.rank()} was asked for an operation without a name by one of {n} "
            f"{of_what}. Ranks match such operations by the order of the calls, which these "
            "threads do not keep: pass a name that is equal on all ranks, as in "
            "allreduce(tensor, name=\"loss\").")
