// SPDX-License-Identifier: Apache-2.0
//
// funneled.c - an MPI that may be called by one thread only.
//
// Stands before a library of the MPICH ABI (FUNNELED_MPI names its file): built with the soname
// libmpi.so.12 and preloaded, it is found as the one the process has loaded. Gives no more than
// MPI_THREAD_FUNNELED, and ends the process when another thread than the one that initialised MPI
// calls it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define THREAD_FUNNELED 1

typedef long function_t(long, long, long, long, long, long, long, long, long, long);

static pthread_t owner;

static function_t *real(const char *name)
{
    void *library = dlopen(getenv("FUNNELED_MPI"), RTLD_NOW | RTLD_GLOBAL);
    function_t *function = library != NULL ? (function_t *)dlsym(library, name) : NULL;
    if (function == NULL) {
        fprintf(stderr, "funneled: %s\n", dlerror());
        exit(1);
    }
    return function;
}

static void check_thread(const char *name)
{
    if (!pthread_equal(owner, pthread_self())) {
        fprintf(stderr, "funneled: %s by another thread than MPI_Init_thread\n", name);
        exit(1);
    }
}

static void own(const char *name)
{
    (void)name;
    owner = pthread_self();
}

static void allow(const char *name)
{
    (void)name;
}

static void give_funneled(int *given)
{
    *given = THREAD_FUNNELED;
}

// Arguments are integers and addresses: more of them than a function takes do no harm.
#define FORWARD(name, before, after)                                                               \
    long name(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j);     \
    long name(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j)      \
    {                                                                                              \
        before(#name);                                                                             \
        int code = (int)real(#name)(a, b, c, d, e, f, g, h, i, j);                                 \
        after;                                                                                     \
        return code;                                                                               \
    }

FORWARD(MPI_Init_thread, own, give_funneled((int *)d))
FORWARD(MPI_Initialized, allow, )
FORWARD(MPI_Finalized, allow, )
FORWARD(MPI_Finalize, check_thread, )
FORWARD(MPI_Query_thread, check_thread, )
FORWARD(MPI_Comm_rank, check_thread, )
FORWARD(MPI_Comm_size, check_thread, )
FORWARD(MPI_Comm_idup, check_thread, )
FORWARD(MPI_Comm_free, check_thread, )
FORWARD(MPI_Comm_set_errhandler, check_thread, )
FORWARD(MPI_Test, check_thread, )
FORWARD(MPI_Allreduce, check_thread, )
FORWARD(MPI_Bcast, check_thread, )
FORWARD(MPI_Allgatherv, check_thread, )
FORWARD(MPI_Alltoallv, check_thread, )
FORWARD(MPI_Reduce_scatter, check_thread, )
FORWARD(MPI_Iallreduce, check_thread, )
FORWARD(MPI_Ibcast, check_thread, )
FORWARD(MPI_Iallgatherv, check_thread, )
FORWARD(MPI_Ialltoallv, check_thread, )
FORWARD(MPI_Ireduce_scatter, check_thread, )
