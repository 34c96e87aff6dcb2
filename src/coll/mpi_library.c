// SPDX-License-Identifier: Apache-2.0
//
// mpi_library.c - finds the MPI library of the launcher, and speaks its ABI.
//
// MPI libraries share functions but not constants: a handle is an int in MPICH and its kin, the
// address of a symbol in Open MPI, a small number in a pointer in the MPI-5 standard. All three are
// passed in a register, so one type wide enough for each (mpi_handle_t) serves, and an ABI is a row
// of numbers or names below. Results that are handles are written to zeroed mpi_handle_t: on
// little-endian machines a narrower one lands in its low half.
#define _GNU_SOURCE
#include "coll/mpi_library.h"

#include <dlfcn.h>
#include <stdio.h>

// --- ABIs ----------------------------------------------------------------------------------------

static const abi_t abis[] = {
    {.name = "Open MPI",
     .libraries = {"libmpi.so.40"},
     .launchers = {SEEN_OMPI_COMM_WORLD_SIZE, SEEN_PMIX_RANK},
     .funneled = 1,
     .serialized = 2,
     .multiple = 3,
     .in_place = 1,
     .no_status = 0,
     .slow_ops = 1 << HVD_ALLREDUCE | 1 << HVD_ALLGATHER | 1 << HVD_REDUCESCATTER,
     .cure = {HVD_ALLREDUCE, "coll_libnbc_iallreduce_algorithm", 3}, // Rabenseifner's
     .symbols = {"ompi_mpi_comm_world", "ompi_mpi_errors_return", "ompi_mpi_byte",
                 "ompi_mpi_uint8_t", "ompi_mpi_int8_t", "ompi_mpi_uint16_t", "ompi_mpi_int16_t",
                 "ompi_mpi_int32_t", "ompi_mpi_int64_t", "ompi_mpi_float", "ompi_mpi_double",
                 "ompi_mpi_op_sum", "ompi_mpi_op_min", "ompi_mpi_op_max", "ompi_mpi_op_prod"}},
    {.name = "MPI-5 standard ABI",
     .libraries = {"libmpi_abi.so.1"},
     .launchers = {SEEN_PMI_RANK, SEEN_PMI_SIZE},
     .funneled = 1024,
     .serialized = 2048,
     .multiple = 4096,
     .in_place = 1,
     .no_status = 0,
     .numbers = {0x101, 0x143, 0x247, 0x241, 0x240, 0x249, 0x248, 0x250, 0x258, 0x210, 0x214, 0x21,
                 0x22, 0x23, 0x24}},
    {.name = "MPICH ABI",
     .libraries = {"libmpi.so.12", "libmpich.so.12"},
     .launchers = {SEEN_PMI_RANK, SEEN_PMI_SIZE},
     .funneled = 1,
     .serialized = 2,
     .multiple = 3,
     .in_place = (uintptr_t)-1,
     .no_status = 1,
     .numbers = {0x44000000, 0x54000001, 0x4c00010d, 0x4c00013b, 0x4c000137, 0x4c00023c, 0x4c000238,
                 0x4c000439, 0x4c00083a, 0x4c00040a, 0x4c00080b, 0x58000003, 0x58000002, 0x58000001,
                 0x58000004}},
};

// --- The library ---------------------------------------------------------------------------------

#define FUNCTION(name) {"MPI_" #name, offsetof(mpi_plane_t, name), false}
#define IF_THERE(name) {"MPI_" #name, offsetof(mpi_plane_t, name), true}

static const struct {
    const char *name;
    size_t offset;
    bool may_lack;
} functions[] = {
    FUNCTION(Initialized),
    FUNCTION(Finalized),
    FUNCTION(Init_thread),
    FUNCTION(Query_thread),
    FUNCTION(Finalize),
    FUNCTION(Comm_rank),
    FUNCTION(Comm_size),
    FUNCTION(Comm_idup),
    FUNCTION(Comm_free),
    FUNCTION(Test),
    FUNCTION(Iallreduce),
    FUNCTION(Comm_set_errhandler),
    FUNCTION(Ibcast),
    FUNCTION(Ialltoallv),
    FUNCTION(Iallgatherv),
    FUNCTION(Ireduce_scatter),
    FUNCTION(Allreduce),
    FUNCTION(Bcast),
    FUNCTION(Allgatherv),
    FUNCTION(Alltoallv),
    FUNCTION(Reduce_scatter),
    IF_THERE(T_init_thread),
    IF_THERE(T_finalize),
    IF_THERE(T_cvar_get_index),
    IF_THERE(T_cvar_handle_alloc),
    IF_THERE(T_cvar_handle_free),
    IF_THERE(T_cvar_write),
};

static hvd_status_t find_symbols(mpi_plane_t *plane, err_t *err)
{
    for (size_t i = 0; i < N_ELEMENTS(functions); i++) {
        void *symbol = dlsym(plane->library, functions[i].name);
        if (symbol == NULL && !functions[i].may_lack) {
            return fail(err, HVD_UNSUPPORTED,
                        "%s has no %s: an MPI of version 3.1 or later is "
                        "needed",
                        plane->name, functions[i].name);
        }
        memcpy((char *)plane + functions[i].offset, &symbol, sizeof symbol);
    }
    for (int i = 0; i < N_CONSTANTS; i++) {
        const char *name = plane->abi->symbols[i];
        plane->constants[i] =
            name != NULL ? (mpi_handle_t)dlsym(plane->library, name) : plane->abi->numbers[i];
        if (plane->constants[i] == 0) {
            return fail(err, HVD_UNSUPPORTED, "%s has no %s", plane->name, name);
        }
    }
    return HVD_OK;
}

// flags: RTLD_NOLOAD to take only what the process has loaded.
static bool load(mpi_plane_t *plane, const abi_t *abi, int flags)
{
    for (size_t i = 0; i < N_ELEMENTS(abi->libraries) && abi->libraries[i] != NULL; i++) {
        plane->library = dlopen(abi->libraries[i], RTLD_NOW | RTLD_GLOBAL | flags);
        if (plane->library != NULL) {
            plane->abi = abi;
            snprintf(plane->name, sizeof plane->name, "%s (%s)", abi->libraries[i], abi->name);
            return true;
        }
    }
    return false;
}

static bool is_launched(const abi_t *abi, const config_t *config)
{
    return config->seen[abi->launchers[0]] != NULL || config->seen[abi->launchers[1]] != NULL;
}

// What is merely installed says nothing: the library must be the launcher's.
static hvd_status_t find_library(mpi_plane_t *plane, const config_t *config, err_t *err)
{
    bool launched = false;
    for (size_t i = 0; i < N_ELEMENTS(abis); i++) {
        if (load(plane, &abis[i], RTLD_NOLOAD)) {
            return HVD_OK;
        }
    }
    for (size_t i = 0; i < N_ELEMENTS(abis); i++) {
        if (is_launched(&abis[i], config)) {
            launched = true;
            if (load(plane, &abis[i], 0)) {
                return HVD_OK;
            }
        }
    }
    if (launched) {
        const char *why = dlerror();
        return fail(err, HVD_SYSTEM,
                    "HOROVOD_CPU_OPERATIONS is MPI, but the MPI library of the launcher cannot be "
                    "loaded: %s; add its folder to LD_LIBRARY_PATH",
                    why != NULL ? why : "not found");
    }
    return fail(
        err, HVD_INVALID_ARGUMENT,
        "HOROVOD_CPU_OPERATIONS is MPI, but this process was not started by mpirun; start it with "
        "mpirun, srun --mpi=pmix or horovodrun --mpi, or unset HOROVOD_CPU_OPERATIONS");
}

hvd_status_t mpi_library_open(mpi_plane_t *plane, const config_t *config, err_t *err)
{
    hvd_status_t status = find_library(plane, config, err);
    return status != HVD_OK ? status : find_symbols(plane, err);
}
