# SPDX-License-Identifier: Apache-2.0
"""Process sets: subsets of ranks that run collectives of their own."""
import logging
import os

from horovod import _core
from horovod.common import communicators
from horovod.common.text import counted

# What every framework's package exports.
__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


_log = logging.getLogger("horovod")


class ProcessSet:
    """Ranks that communicate among themselves. Usable once registered: see add_process_set().

    process_set_id is None until then, and again after removal.
    """

    def __init__(self, ranks_or_comm):
        self.process_set_id = None
        self.mpi_comm = None
        self.ranks = None
        if communicators.is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = sorted(_as_rank(rank) for rank in ranks_or_comm)

    def _invalidate(self):
        self.process_set_id = None

    def size(self):
        """Number of members, or None while not registered."""
        if self.process_set_id is None:
            return None
        return len(self._registered_ranks())

    def rank(self):
        """Position of this process among the members, or None while not registered."""
        if self.process_set_id is None:
            return None
        ranks = self._registered_ranks()
        try:
            return ranks.index(_core.rank())
        except ValueError:
            raise ValueError("Process is not part of provided process set.") from None

    def included(self):
        """Is this process a member? None while the ranks are unknown."""
        if self.ranks is None:
            return None
        return _core.rank() in self.ranks

    def _registered_ranks(self):
        if self.ranks is None:
            self.ranks = _core.process_set_ranks(self.process_set_id)
        return self.ranks

    def __str__(self):
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


def _as_rank(value):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"ProcessSet expects ranks as integers, not {value!r}")
    return value.__index__()


# All ranks. Its `ranks` are filled in by init().
global_process_set = ProcessSet([])
global_process_set.ranks = None
global_process_set.process_set_id = 0

# Registered sets other than the global one, by id.
_registered = {}


def check_static_sets(process_sets, comm=None):
    """The sets to give to init, once: ValueError names the index of a duplicate.

    comm: the communicator of the job. Sets defined by communicators may differ from rank to rank.
    """
    seen = []
    gathered = None
    if comm is not None and any(getattr(s, "mpi_comm", None) for s in process_sets):
        gathered = communicators.gather_sets(comm, process_sets)
    for i, process_set in enumerate(process_sets):
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_sets[{i}] is not a ProcessSet: {process_set!r}")
        if process_set.mpi_comm is not None and gathered is None:
            raise NotImplementedError(
                f"process_sets[{i}] is defined by a communicator: give init the communicator of "
                "the job too (comm=MPI.COMM_WORLD), or the set its ranks"
            )
        if process_set.ranks in seen:
            raise ValueError(
                f"process_sets[{i}] has the same ranks as an earlier one: {process_set.ranks}"
            )
        seen.append(process_set.ranks)
    return seen if gathered is None else gathered


def attach_static_sets(process_sets):
    """After init: gives the global set its ranks and every static set its id."""
    _registered.clear()
    global_process_set.ranks = _core.process_set_ranks(0)
    ids_by_ranks = {tuple(_core.process_set_ranks(i)): i for i in _core.process_set_ids()}
    for process_set in process_sets:
        process_set.process_set_id = ids_by_ranks[tuple(process_set.ranks)]
        if process_set.process_set_id != 0:
            _registered[process_set.process_set_id] = process_set


def detach_all():
    """After shutdown: no set is registered any more; the global one waits for the next init."""
    for process_set in [*_registered.values(), *_static, *_dynamic]:
        process_set._invalidate()
    _registered.clear()
    _unclaimed.clear()
    global_process_set.ranks = None


# --- Over the resets of an elastic job ------------------------------------------------------------

# What the program has registered, for the next generation: those of init(), and those of
# add_process_set() in their order. A set that names ranks a generation does not have waits for one
# that has them; one that names all it has is the global one for that time.
_static = []
_dynamic = []
# Of the latter those that are there again, until the program asks for them once more, as it may:
# new ranks begin at the beginning.
_unclaimed = []


def wanted_sets():
    """(those of init(), those that were added later), as the program has registered them."""
    return list(_static), list(_dynamic)


def want_sets(static, dynamic):
    _static[:] = static
    _dynamic[:] = dynamic


def fitting(process_sets, size):
    """Those whose ranks exist; tells about the others."""
    fit = []
    for process_set in process_sets:
        if process_set.ranks is None or max(process_set.ranks, default=-1) < size:
            fit.append(process_set)
        else:
            _log.warning("process set %s is not available while the elastic job has only %s",
                         process_set.ranks, counted(size, "rank"))
    return fit


def add_again():
    """In a new generation, on all ranks: sets that were added earlier, also on ranks new to it."""
    from horovod.common.objects import allgather_object

    lists = allgather_object([one.ranks for one in _dynamic], name="horovod.process_sets")
    known = {tuple(one.ranks): one for one in _dynamic}
    _dynamic[:] = [known.get(tuple(ranks)) or ProcessSet(ranks)
                   for ranks in next(filter(None, lists), [])]
    for process_set in fitting(_dynamic, _core.size()):
        if process_set.ranks == global_process_set.ranks:
            process_set.process_set_id = 0
        else:
            process_set.process_set_id = _core.process_set_add(process_set.ranks)
            _registered[process_set.process_set_id] = process_set
        _unclaimed.append(process_set)


def _claim(process_set):
    """Is it there again already? Then this one is it."""
    for kept in _unclaimed:
        if kept.ranks == process_set.ranks:
            _unclaimed.remove(kept)
            _dynamic[_dynamic.index(kept)] = process_set
            process_set.process_set_id = kept.process_set_id
            if kept.process_set_id != 0:
                _registered[kept.process_set_id] = process_set
            return True
    return False


def is_process_set_included(process_set=global_process_set):
    """Does this process belong to the set? Unlike included(), never None once initialised."""
    return _core.rank() in _core.process_set_ranks(process_set.process_set_id)


def add_process_set(process_set):
    """Registers a ProcessSet, or a sequence of ranks, on all ranks; returns the ProcessSet.

    Collective: every rank of the job must call it, members or not.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.mpi_comm is not None:
        raise NotImplementedError(
            "Dynamically adding process sets defined by an MPI communicator is not supported."
        )
    if _claim(process_set):
        return process_set
    if process_set.process_set_id is not None:
        raise ValueError(f"the process set is registered already: {process_set}")
    try:
        process_set.process_set_id = _core.process_set_add(process_set.ranks)
    except RuntimeError as error:  # all ways to fail are a ValueError here
        raise ValueError(str(error)) from error
    _registered[process_set.process_set_id] = process_set
    _dynamic.append(process_set)
    return process_set


def remove_process_set(process_set):
    """Unregisters a set on all ranks. False if it was not registered, or is the global one."""
    if process_set.process_set_id is None or process_set.process_set_id == 0:
        return False
    try:
        _core.process_set_remove(process_set.process_set_id)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    _registered.pop(process_set.process_set_id, None)
    for known in (_static, _dynamic, _unclaimed):
        known[:] = [one for one in known if one.ranks != process_set.ranks]
    process_set._invalidate()
    return True


def enable_dynamic_sets():
    """Lets sets be added after init; must come before it."""
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"


def has_dynamic_sets():
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
