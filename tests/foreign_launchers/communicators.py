# SPDX-License-Identifier: Apache-2.0
"""Jobs of communicators of mpi4py, one after another: mpirun -n 2 python communicators.py

Says "rank R of S: communicators ok" at the end. What moves the tensors follows from the
environment, as ever; mpi_enabled() and its kin must tell it truly.
"""
import os

import torch
from mpi4py import MPI

import horovod.torch as hvd

WORLD = MPI.COMM_WORLD
BY_MPI = os.environ.get("HOROVOD_CPU_OPERATIONS") == "MPI"


def check_job(comm, ranks: list) -> None:
    """`ranks`: of the world, in the order of the job."""
    assert hvd.size() == len(ranks) == comm.Get_size(), (hvd.size(), ranks)
    assert ranks[hvd.rank()] == WORLD.Get_rank(), (hvd.rank(), ranks)
    values = torch.full((100000,), float(WORLD.Get_rank()))
    assert hvd.allreduce(values, op=hvd.Sum)[0] == sum(ranks)
    assert hvd.broadcast(values, root_rank=hvd.size() - 1)[0] == ranks[-1]
    assert hvd.mpi_built()
    assert hvd.mpi_enabled() == BY_MPI
    if BY_MPI:
        assert hvd.mpi_threads_supported() == (MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def leave() -> None:
    hvd.barrier()  # a rank that shuts down ends the job for all
    hvd.shutdown()


def main() -> None:
    rank, size = WORLD.Get_rank(), WORLD.Get_size()
    assert not hvd.mpi_enabled()

    hvd.init(comm=WORLD)
    check_job(WORLD, list(range(size)))
    leave()

    backwards = WORLD.Split(0, key=-rank)
    hvd.init(comm=backwards)
    check_job(backwards, list(range(size))[::-1])
    leave()

    last_alone = WORLD.Split(rank == size - 1)
    ranks = [size - 1] if rank == size - 1 else list(range(size - 1))
    hvd.init(comm=last_alone)
    check_job(last_alone, ranks)
    leave()

    hvd.init(comm=ranks)
    check_job(last_alone, ranks)
    leave()

    mine = hvd.ProcessSet(last_alone)
    hvd.init(comm=WORLD, process_sets=[mine])
    check_job(WORLD, list(range(size)))
    assert mine.ranks == ranks and mine.included() and mine.size() == len(ranks)
    value = hvd.allreduce(torch.ones(1) * (rank + 1), op=hvd.Sum, process_set=mine)
    assert value.item() == sum(ranks) + len(ranks)
    leave()

    try:
        hvd.init(comm=[size])
    except ValueError as error:
        assert "ranks of mpirun" in str(error), error
    else:
        raise AssertionError("a list without this rank was taken")
    print(f"rank {rank} of {size}: communicators ok", flush=True)


if __name__ == "__main__":
    main()
