# SPDX-License-Identifier: Apache-2.0
"""Jobs of the ranks of an MPI communicator: init(comm=...) with mpi4py.

The first rank of the communicator opens a rendezvous and tells the others where by a broadcast of
MPI; from there on it is a job like any other. So a communicator may have any of the processes that
mpirun has started, in any order, and several jobs of disjoint ones may run side by side.
"""
import contextlib
import os
import secrets
import socket
import sys

from horovod import _core
from horovod.common.memory_file import memory_file

# They describe the launcher's job, and must say nothing of one that begins inside it.
JOB_VARIABLES = tuple(f"HOROVOD_{word}" for word in (
    "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "RENDEZVOUS_ADDR",
    "RENDEZVOUS_PORT", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT", "SECRET_FILE", "SECRET_FD"))


def is_communicator(value):
    return hasattr(value, "Get_rank") and hasattr(value, "Get_size") and hasattr(value, "bcast")


def of_ranks(ranks):
    """The communicator of some of the ranks of mpirun, or ValueError. Only they need to call it."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise ValueError(
            f"init(comm={ranks}) names some of the ranks: that takes mpi4py and mpirun; with other "
            "launchers use process sets"
        ) from None
    world = MPI.COMM_WORLD
    if world.Get_rank() not in ranks or not set(ranks) <= set(range(world.Get_size())):
        raise ValueError(
            f"init(comm={ranks}) on rank {world.Get_rank()} of {world.Get_size()}: the list has "
            "ranks of mpirun, this one among them; use process sets for ranks that stay outside"
        )
    return world.Create_group(world.group.Incl(ranks))


def ranks_in(comm, part):
    """The ranks of the communicator `part`, as `comm` counts them."""
    ranks = part.group.Translate_ranks(list(range(part.Get_size())), comm.group)
    if min(ranks) < 0:
        raise ValueError("a process set is defined by a communicator that is not part of comm")
    return sorted(ranks)


def gather_sets(comm, process_sets):
    """Gives sets defined by communicators their ranks; every rank's sets, in one order for all."""
    for process_set in process_sets:
        if process_set.mpi_comm is not None:
            process_set.ranks = ranks_in(comm, process_set.mpi_comm)
    mine = [tuple(process_set.ranks) for process_set in process_sets]
    return list(dict.fromkeys(ranks for of_rank in comm.allgather(mine) for ranks in of_rank))


def own_addresses():
    """Where other hosts may find this one, and last where its own processes do."""
    import psutil  # here: every import of horovod would pay for it

    found = [address.address for name, addresses in psutil.net_if_addrs().items()
             for address in addresses
             if address.family == socket.AF_INET and not address.address.startswith("127.")]
    return ",".join([*found[:8], "127.0.0.1"])


@contextlib.contextmanager
def hosted_job(rank, size, hand_over):
    """The variables of a job, whose rank 0 serves the rendezvous until init() has returned.

    hand_over(ticket) gives rank 0's ticket to the others, who pass None, and returns it on each.
    """
    server = ticket = None
    if rank == 0:
        secret = secrets.token_bytes(32)
        server, port = _core.rendezvous_start("*", 0, secret)
        ticket = f"{own_addresses()} {port} {secret.hex()}"
    addresses, port, digits = hand_over(ticket).split()
    # The library opens it by its path, so that each side closes what is its own: a number closed
    # twice may be somebody else's by then.
    secret_file = memory_file("hvd-secret", digits.encode())
    try:
        yield {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size),
               "HOROVOD_RENDEZVOUS_ADDR": addresses, "HOROVOD_RENDEZVOUS_PORT": port,
               "HOROVOD_SECRET_FILE": f"/proc/self/fd/{secret_file}"}
    finally:
        os.close(secret_file)
        if server is not None:
            _core.rendezvous_stop(server)


@contextlib.contextmanager
def job_of(comm):
    """While it lasts, the environment describes the job of a communicator; yields its handle."""
    with hosted_job(comm.Get_rank(), comm.Get_size(), comm.bcast) as variables:
        before = {name: os.environ.pop(name) for name in JOB_VARIABLES if name in os.environ}
        os.environ.update(variables)
        try:
            yield _handle_of(comm)
        finally:
            for name in variables:
                os.environ.pop(name, None)
            os.environ.update(before)


def _handle_of(comm):
    """MPI_Comm as a number; 0 if it is none of mpi4py's."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi._handleof(comm) if mpi is not None and isinstance(comm, mpi.Comm) else 0
