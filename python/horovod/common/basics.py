# SPDX-License-Identifier: Apache-2.0
"""init(), rank() and friends: the names every framework's package exports."""
import atexit
import os

from horovod import _core
from horovod.common import membership
from horovod.common import process_sets as _sets
from horovod.common.exceptions import NotInitializedError

Average = _core.AVERAGE
Sum = _core.SUM
Adasum = _core.ADASUM
Min = _core.MIN
Max = _core.MAX
Product = _core.PRODUCT

# Functions to call after each successful init (a framework's own bookkeeping).
_after_init = []
# And before each shutdown: whoever holds the context lets go of it.
_before_shutdown = []
_exit_hook_of = None


def on_init(function):
    _after_init.append(function)
    return function


def on_shutdown(function):
    _before_shutdown.append(function)
    return function


def init(comm=None, process_sets=None):
    """Joins the job this process was launched in; alone, it is a job of one. Blocks until all have.

    comm: None, or [] for the whole world. process_sets: list of ProcessSet, or "dynamic" to add
    them later.
    """
    _check_comm(comm)
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is {process_sets!r}: a list of sets, or "dynamic"')
        _sets.enable_dynamic_sets()
        process_sets = None
    static_sets = list(process_sets or [])
    ranks = _sets.check_static_sets(static_sets)
    if _core.is_initialized():
        return
    _join(ranks)
    _sets.attach_static_sets(static_sets)
    _shut_down_at_exit()
    for function in _after_init:
        function()


def _join(ranks):
    """In an elastic job a generation may end before all have joined it: then it is the next."""
    while True:
        try:
            return _core.init(ranks)
        except (RuntimeError, ValueError) as error:
            if not membership.is_elastic():
                raise ValueError(f"Horovod initialization failed: {error}") from error
            membership.take_next_place()


def rejoin():
    """Leaves the job and joins it anew, in an elastic one with the place of the next generation."""
    shutdown()
    if membership.is_elastic():
        membership.take_next_place()
    init()


def _check_comm(comm):
    if comm is None or (isinstance(comm, (list, tuple)) and not comm):
        return
    if isinstance(comm, (list, tuple)):
        world = int(os.environ.get("HOROVOD_SIZE", "1"))
        if sorted(comm) != list(range(world)):
            raise ValueError(
                f"init(comm={list(comm)}) names some of {world} ranks; use process sets for that"
            )
        return
    if hasattr(comm, "Get_size"):
        raise ValueError(
            "init(comm=...) got an MPI communicator; ranks are found by the launcher here, and "
            "subsets are process sets"
        )
    raise ValueError("Invalid type for argument comm: a list of ranks, or None")


def _shut_down_at_exit():
    global _exit_hook_of
    if _exit_hook_of != os.getpid():  # a forked child that calls init() needs its own
        _exit_hook_of = os.getpid()
        atexit.register(shutdown)


def shutdown():
    """Leaves the job. What is in flight fails; init() may be called again."""
    if _core.is_initialized():
        for function in _before_shutdown:
            function()
        _core.shutdown()
        _sets.detach_all()


is_initialized = _core.is_initialized
rank = _core.rank
size = _core.size
local_rank = _core.local_rank
local_size = _core.local_size
cross_rank = _core.cross_rank
cross_size = _core.cross_size
is_homogeneous = _core.is_homogeneous


def start_timeline(file_path, mark_cycles=False):
    """Begins to write a timeline. HOROVOD_TIMELINE must have been set (DYNAMIC will do)."""
    status = _core.timeline_start(os.fspath(file_path), mark_cycles)
    if status == "HVD_UNSUPPORTED":
        raise ValueError(
            "Set HOROVOD_TIMELINE=DYNAMIC before init() to start the timeline at run time."
        )
    if status != "HVD_OK":
        raise ValueError(f"cannot start a timeline at {file_path}: {status}")


def stop_timeline():
    """Ends the timeline; its file is then complete."""
    _core.timeline_stop()


# --- Questions about how this was built -----------------------------------------------------------
# There is one build. Its transports need neither MPI nor Gloo; scripts that ask expect the answers
# of a build that works without MPI.


def mpi_threads_supported():
    """ValueError: there is no MPI whose threads could be supported."""
    if not is_initialized():
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    raise ValueError("Horovod MPI is not enabled; this build needs no MPI.")


def mpi_enabled():
    return False


def mpi_built():
    return False


def gloo_enabled():
    return True


def gloo_built():
    return True


def nccl_built():
    return 0


def ddl_built():
    return False


def ccl_built():
    return False


def cuda_built():
    return False


def rocm_built():
    return False
