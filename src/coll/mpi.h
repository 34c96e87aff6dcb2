// SPDX-License-Identifier: Apache-2.0
//
// mpi.h - collectives by the user's MPI library (HOROVOD_CPU_OPERATIONS=MPI).
//
// Owns: finding and initialising an MPI library, a communicator of the whole job in it, and the one
// collective that is under way. The library is opened at run time; none is linked, and Open MPI,
// MPICH, Intel MPI and libraries of the MPI-5 standard ABI all do. Agreement, failure detection and
// what MPI cannot do, or not well, stay with us: Adasum, process sets, sums of bool, sizes over
// 1 GiB, allgathers of very uneven blocks.
//
// Threads: mpi_open, mpi_attach and mpi_close by the thread that starts and ends the context; the
// rest by the holder of the engine. MPI that the program has initialised must allow calls from
// changing threads, one at a time (MPI_THREAD_SERIALIZED); that of ours may be FUNNELED.
#ifndef HVD_COLL_MPI_H
#define HVD_COLL_MPI_H

#include "coll/coll.h"

typedef struct mpi_plane mpi_plane_t;

// Loads the library that belongs to the launcher, or takes the one this process has loaded, and
// initialises it unless the program has. Comes before boot_open: a process manager serves MPI once.
hvd_status_t mpi_open(const config_t *config, mpi_plane_t **plane_p, err_t *err);
// Makes the communicator, when rank and size are known; collective over the job. `comm`: handle of
// one that has these ranks, or 0 for all that mpirun has started. has_spare_core: for the thread of
// the plane, which then waits awake for a while.
hvd_status_t mpi_attach(mpi_plane_t *plane, uintptr_t comm, int rank, int size, bool has_spare_core,
                        uint64_t deadline_ns, err_t *err);
// Finalises MPI if mpi_open has initialised it and the job ended well: it waits for the other
// ranks, so not after a failure. A plane with a collective that never ended is left as it is. Safe
// on NULL.
void mpi_close(mpi_plane_t *plane, bool ended_well);

const char *mpi_library_name(const mpi_plane_t *plane);
bool mpi_has_threads(const mpi_plane_t *plane); // MPI_THREAD_MULTIPLE

// Whether MPI can run this; all ranks answer alike. total_bytes: of the largest buffer of any rank.
bool mpi_can_run(const coll_args_t *args, size_t total_bytes);
// Half types are reduced as float32: the caller widens them. args stays as it is until the end.
hvd_status_t mpi_start(mpi_plane_t *plane, const coll_args_t *args, size_t total_bytes,
                       const void *input, void *output, err_t *err);
// HVD_IN_PROGRESS until the collective is done; may sleep for a fraction of a millisecond.
hvd_status_t mpi_progress(mpi_plane_t *plane, err_t *err);

#endif
