# SPDX-License-Identifier: Apache-2.0
"""init(), rank() and friends: the names every framework's package exports.

They do so by `from horovod.common.basics import *`: this is the one list of them.
"""
import atexit
import os
from typing import Any, Dict, Optional, Sequence, Union

from horovod import _core
from horovod.common import communicators as _communicators
from horovod.common import membership
from horovod.common import process_sets as _sets
from horovod.common import uncaught as _uncaught
from horovod.common.exceptions import NotInitializedError
from horovod.common.profiling import profile, show_ranges

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "ccl_built", "cross_rank",
    "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "metrics", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "profile", "rank", "report",
    "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
]

_uncaught.install_before_init()

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
# What the core's init can raise; callers see one kind.
_INIT_ERRORS = (RuntimeError, ValueError, TimeoutError)


def on_init(function):
    _after_init.append(function)
    return function


def on_shutdown(function):
    _before_shutdown.append(function)
    return function


def init(comm: Any = None,
         process_sets: Union[None, str, Sequence[_sets.ProcessSet]] = None) -> None:
    """Joins the job this process was launched in; alone, it is a job of one. Blocks until all have.

    comm: None or [] for the whole world; a communicator of mpi4py, or a list of ranks of mpirun,
    for a job of just those. process_sets: list of ProcessSet, or "dynamic" to add them later.
    """
    comm = _as_communicator(comm)
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is {process_sets!r}: a list of sets, or "dynamic"')
        _sets.enable_dynamic_sets()
        process_sets = None
    static_sets = list(process_sets or [])
    if _core.is_initialized():
        return
    ranks = _sets.check_static_sets(static_sets, comm)
    _sets.want_sets(static_sets, _sets.wanted_sets()[1])
    if comm is not None:
        _join_communicator(ranks, comm)
        _sets.attach_static_sets(static_sets)
    elif membership.is_elastic():
        _join_generation(static_sets)
    else:
        _join(ranks)
        _sets.attach_static_sets(static_sets)
    _shut_down_at_exit()
    show_ranges()
    for function in _after_init:
        function()


def _join(ranks):
    try:
        _core.init(ranks)
    except _INIT_ERRORS as error:
        raise ValueError(f"Horovod initialization failed: {error}") from error


def _join_generation(static_sets):
    """In an elastic job a generation may end before all have joined it: then it is the next."""
    _, dynamic_sets = _sets.wanted_sets()
    if membership.has_no_place_yet():
        membership.take_next_place()
    while True:
        _sets.want_sets(static_sets, dynamic_sets)  # what is agreed on may have come to nothing
        try:
            size = int(os.environ["HOROVOD_SIZE"])
            fitting = _sets.fitting(static_sets, size)
            _core.init([one.ranks for one in fitting if one.ranks != list(range(size))])
            _sets.attach_static_sets(fitting)
            if membership.is_later_generation() and _sets.has_dynamic_sets():
                _sets.add_again()
            return
        except _INIT_ERRORS:
            _leave()
            membership.take_next_place()


def _join_communicator(ranks, comm):
    try:
        with _communicators.job_of(comm) as handle:
            _core.init(ranks, handle)
    except _INIT_ERRORS as error:
        raise ValueError(f"Horovod initialization failed: {error}") from error


def rejoin():
    """Leaves the job and joins it anew, in an elastic one with the place of the next generation.

    Process sets stay, as far as their ranks exist then.
    """
    static_sets, dynamic_sets = _sets.wanted_sets()
    _leave_whole()
    if membership.is_elastic():
        membership.take_next_place()
    _sets.want_sets(static_sets, dynamic_sets)
    init(process_sets=static_sets)
    if dynamic_sets and not membership.is_elastic():
        _sets.add_again()


def _as_communicator(comm):
    """None: the job of the launcher."""
    if comm is None or _communicators.is_communicator(comm):
        return comm
    if not isinstance(comm, (list, tuple)) or not all(isinstance(rank, int) for rank in comm):
        raise ValueError("Invalid type for argument comm: a list of ranks, a communicator of "
                         "mpi4py, or None")
    if not comm or sorted(comm) == list(range(int(os.environ.get("HOROVOD_SIZE", "0")))):
        return None
    return _communicators.of_ranks(list(comm))


def training_checks_are_on():
    """Are mistakes that let each rank train by itself to be told?"""
    return _core.config("HOROVOD_TRAINING_CHECKS")[0] == "1"


# What launchers say, each in its own words.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def check_not_left_out():
    """Refuses to train alone in a process that was launched together with others."""
    sizes = [os.environ.get(name, "") for name in _SIZES]
    if not is_initialized() and any(size.isdigit() and int(size) > 1 for size in sizes):
        raise NotInitializedError(
            "Horovod has not been initialized; use hvd.init(). Without it, each of the ranks that "
            "were launched would train a model of its own: call hvd.init() before the model is "
            "built.")


def _shut_down_at_exit():
    global _exit_hook_of
    if _exit_hook_of != os.getpid():  # a forked child that calls init() needs its own
        _exit_hook_of = os.getpid()
        _uncaught.install_hooks()
        atexit.register(_leave_at_exit)


def _leave_at_exit():
    _uncaught.tell_at_exit()
    _leave_whole()


def shutdown() -> None:
    """Leaves the job. What is in flight fails; init() may be called again."""
    _uncaught.tell_before_shutdown()
    _leave_whole()


def _leave_whole():
    if _core.is_initialized():
        for function in _before_shutdown:
            function()
        _leave()
        _sets.want_sets([], [])


def _leave():
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


def start_timeline(file_path: Union[str, "os.PathLike[str]"], mark_cycles: bool = False) -> None:
    """Begins to write a timeline. HOROVOD_TIMELINE must have been set (DYNAMIC will do)."""
    status, text = _core.timeline_start(os.fspath(file_path), mark_cycles)
    if status == "HVD_UNSUPPORTED":
        raise ValueError(
            "Set HOROVOD_TIMELINE=DYNAMIC before init() to start the timeline at run time."
        )
    if status != "HVD_OK":
        raise ValueError(f"{text} ({status})")


def stop_timeline() -> None:
    """Ends the timeline; its file is then complete."""
    _core.timeline_stop()


def report(step: Optional[int] = None, loss: Any = None, samples: Any = None) -> None:
    """Tells whoever watches the job how far this rank's program has got.

    step: its number. loss: the last one. samples: how many this rank has seen since its last
    report. All may be left out. The job page, the launcher's status line and metrics() show them.
    """
    _core.report(None if step is None else int(step), None if loss is None else float(loss),
                 None if samples is None else float(samples))


def metrics() -> Dict[str, Any]:
    """The numbers that this rank shows to Prometheus, by name (docs/observability.md).

    What is counted by operation, or by rank, is a dict in turn.
    """
    numbers: Dict[str, Any] = {}
    for line in _core.metrics().splitlines():
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        name, _, labels = name.partition("{")
        pairs = dict(pair.split("=", 1) for pair in labels.rstrip("}").split(",") if pair)
        pairs = {label: _number(text.strip('"')) for label, text in pairs.items()}
        if name == "hvd_info":
            numbers[name] = pairs
        elif pairs:
            numbers.setdefault(name, {})[next(iter(pairs.values()))] = _number(value)
        else:
            numbers[name] = _number(value)
    return numbers


def _number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# --- Questions about how this was built -----------------------------------------------------------
# There is one build. Its transports need neither MPI nor Gloo; collectives by the user's MPI are
# built in, and used where HOROVOD_CPU_OPERATIONS or HOROVOD_CONTROLLER says so.


def mpi_threads_supported() -> bool:
    """Has the MPI library MPI_THREAD_MULTIPLE? ValueError where none is used."""
    if not is_initialized():
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; HOROVOD_CPU_OPERATIONS=MPI under mpirun "
                         "enables it.")
    return _core.mpi_threads() == 1


def mpi_enabled() -> bool:
    """Does an MPI library move the tensors of this job?"""
    return is_initialized() and _core.mpi_threads() >= 0


def mpi_built() -> bool:
    return True


def gloo_enabled() -> bool:
    return True


def gloo_built() -> bool:
    return True


def nccl_built() -> int:
    """The version of the NCCL (or RCCL) that is found here, as 22703; 0: none."""
    return _core.gpu()[2]


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    """Is there a CUDA driver?"""
    return _core.gpu()[0] == "CUDA"


def rocm_built() -> bool:
    """Is there a driver for AMD's GPUs?"""
    return _core.gpu()[0] == "HIP"


class HorovodBasics:
    """The functions of this module as methods, for programs that have mpi_ops._basics."""

    def __init__(self, pkg_path=None, *args):
        """Takes what named a library once: there is one for all frameworks."""
        del pkg_path, args

    @property
    def MPI_LIB_CTYPES(self):
        raise AttributeError("MPI_LIB_CTYPES: this Horovod has no library for ctypes; use the "
                             "methods of _basics, or include/hvd.h from C")


for _name in __all__:
    _value = globals()[_name]
    setattr(HorovodBasics, _name, staticmethod(_value) if callable(_value) else _value)
del _name, _value
