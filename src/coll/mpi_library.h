// SPDX-License-Identifier: Apache-2.0
//
// mpi_library.h - an MPI library found at run time: its ABI, its functions, and the plane they
// serve.
//
// mpi_library.c finds the library and fills in abi, library, name, constants and the functions;
// the rest of the plane belongs to mpi.c. Private to these two.
#ifndef HVD_COLL_MPI_LIBRARY_H
#define HVD_COLL_MPI_LIBRARY_H

#include "coll/mpi.h"

#include <pthread.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "handles of MPI are read as on little-endian machines"
#endif

typedef uintptr_t mpi_handle_t;

// Constants, in the order of the rows below.
typedef enum mpi_constant {
    WORLD,
    ERRORS_RETURN,
    BYTE,
    UINT8,
    INT8,
    UINT16,
    INT16,
    INT32,
    INT64,
    FLOAT,
    DOUBLE,
    SUM,
    MIN,
    MAX,
    PRODUCT,
    N_CONSTANTS
} mpi_constant_t;

// A variable of the library (MPI_T) that makes the non-blocking form of an operation fast.
typedef struct cure {
    hvd_op_t op;
    const char *variable; // NULL: there is none
    int value;
} cure_t;

typedef struct abi {
    const char *name;
    const char *libraries[3];           // file names, best first
    enum launch_var launchers[2];       // one of them is set by launchers of such libraries
    int funneled, serialized, multiple; // levels of thread support
    uintptr_t in_place, no_status;      // special addresses
    unsigned slow_ops;                  // bit per operation: if large, better blocking, or cured
    cure_t cure;
    uint32_t numbers[N_CONSTANTS]; // or
    const char *symbols[N_CONSTANTS];
} abi_t;

// What the worker does; 0, or an error of MPI.
typedef int work_t(mpi_plane_t *plane);

// Does one thing at a time, which may block. Nothing can take back a call that a dead peer holds
// up: such a worker, and the plane with it, stays until the process ends.
enum { WORKER_IDLE, WORKER_ASKED, WORKER_DONE, WORKER_ENDS };

// What ranks can do, which all must do alike: 1 or 0.
enum { WAY_CURED, WAY_ANY_THREAD, N_WAYS };

typedef struct mpi_worker {
    pthread_t thread;
    bool runs; // there is a thread
    atomic_bool may_spin;
    atomic_uint state; // what follows belongs to the worker while it is WORKER_ASKED
    work_t *work;
    int code;
} mpi_worker_t;

struct mpi_plane {
    const abi_t *abi;
    void *library;
    char name[256];
    mpi_handle_t constants[N_CONSTANTS];
    mpi_handle_t world, comm, request;
    bool is_ours;         // we have initialised it
    bool has_comm;        // of our own
    int level;            // of thread support
    int32_t ways[N_WAYS]; // while they are compared
    unsigned slow_ops;    // those of the ABI that are not cured on all ranks
    bool one_thread;      // some rank may call MPI from its worker only
    mpi_worker_t worker;
    uint64_t deadline_ns;    // of make_comm
    const coll_args_t *args; // of the collective that runs, and its memory
    const void *input;
    void *output;
    int rank, size;
    int *counts, *offsets, *sent_counts, *sent_offsets; // by rank; kept while a collective runs

    int (*Initialized)(int *flag_p);
    int (*Finalized)(int *flag_p);
    int (*Init_thread)(int *argc, char ***argv, int wanted, int *given_p);
    int (*Query_thread)(int *given_p);
    int (*Finalize)(void);
    int (*Comm_rank)(mpi_handle_t comm, int *rank_p);
    int (*Comm_size)(mpi_handle_t comm, int *size_p);
    int (*Comm_idup)(mpi_handle_t comm, mpi_handle_t *comm_p, mpi_handle_t *request_p);
    int (*Comm_free)(mpi_handle_t *comm);
    int (*Comm_set_errhandler)(mpi_handle_t comm, mpi_handle_t handler);
    int (*Test)(mpi_handle_t *request, int *flag_p, uintptr_t status);
    int (*Allreduce)(uintptr_t in, void *out, int n, mpi_handle_t type, mpi_handle_t op,
                     mpi_handle_t comm);
    int (*Bcast)(void *buffer, int n, mpi_handle_t type, int root, mpi_handle_t comm);
    int (*Allgatherv)(const void *in, int n, mpi_handle_t in_type, void *out, const int *counts,
                      const int *offsets, mpi_handle_t out_type, mpi_handle_t comm);
    int (*Alltoallv)(const void *in, const int *in_counts, const int *in_offsets,
                     mpi_handle_t in_type, void *out, const int *counts, const int *offsets,
                     mpi_handle_t out_type, mpi_handle_t comm);
    int (*Reduce_scatter)(const void *in, void *out, const int *counts, mpi_handle_t type,
                          mpi_handle_t op, mpi_handle_t comm);
    int (*Iallreduce)(uintptr_t in, void *out, int n, mpi_handle_t type, mpi_handle_t op,
                      mpi_handle_t comm, mpi_handle_t *request_p);
    int (*Ibcast)(void *buffer, int n, mpi_handle_t type, int root, mpi_handle_t comm,
                  mpi_handle_t *request_p);
    int (*Iallgatherv)(const void *in, int n, mpi_handle_t in_type, void *out, const int *counts,
                       const int *offsets, mpi_handle_t out_type, mpi_handle_t comm,
                       mpi_handle_t *request_p);
    int (*Ialltoallv)(const void *in, const int *in_counts, const int *in_offsets,
                      mpi_handle_t in_type, void *out, const int *counts, const int *offsets,
                      mpi_handle_t out_type, mpi_handle_t comm, mpi_handle_t *request_p);
    int (*Ireduce_scatter)(const void *in, void *out, const int *counts, mpi_handle_t type,
                           mpi_handle_t op, mpi_handle_t comm, mpi_handle_t *request_p);
    int (*T_init_thread)(int wanted, int *given_p); // NULL: there are no variables
    int (*T_finalize)(void);
    int (*T_cvar_get_index)(const char *name, int *index_p);
    int (*T_cvar_handle_alloc)(int index, void *object, mpi_handle_t *handle_p, int *count_p);
    int (*T_cvar_handle_free)(mpi_handle_t *handle);
    int (*T_cvar_write)(mpi_handle_t handle, const void *value);
};

// Finds the library that the process has loaded, or the launcher's, and its functions.
hvd_status_t mpi_library_open(mpi_plane_t *plane, const config_t *config, err_t *err);

#endif
