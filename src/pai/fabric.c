// SPDX-License-Identifier: Apache-2.0
//
// fabric.c - what Intel MPI must be told about the RDMA devices of an OpenPAI container.
//
// Two generations of Azure's RDMA machines differ in everything: the older ones speak DAPL, through
// a file that OpenPAI puts into the container, and Intel MPI 5; the newer ones have ordinary verbs
// devices, and Intel MPI since 2019 speaks libfabric only. Which of them this is, the container
// shows; --azure-rdma says it where that is not enough. A variable that the user has set stays.
#include "pai/internal.h"

#include <stdlib.h>
#include <unistd.h>

enum { AZURE_AUTO, AZURE_LEGACY, AZURE_MODERN, AZURE_OFF };

static const struct {
    int generation;
    const char *name, *value;
} settings[] = {
    {AZURE_LEGACY, "I_MPI_FABRICS", "shm:dapl"},
    {AZURE_LEGACY, "I_MPI_DAPL_PROVIDER", "ofa-v2-ib0"},
    {AZURE_LEGACY, "I_MPI_DYNAMIC_CONNECTION", "0"},
    {AZURE_MODERN, "I_MPI_FABRICS", "shm:ofi"},
    {AZURE_MODERN, "FI_PROVIDER", "verbs;ofi_rxm"},
};

static int generation_here(void)
{
    static const struct {
        const char *file;
        int generation;
    } signs[] = {{"/etc/dat.conf", AZURE_LEGACY}, {"/dev/infiniband/uverbs0", AZURE_MODERN}};

    for (size_t i = 0; i < N_ELEMENTS(signs); i++) {
        if (access(signs[i].file, R_OK) == 0) {
            return signs[i].generation;
        }
    }
    return AZURE_OFF;
}

void pai_choose_fabric(const options_t *options)
{
    int generation = options->azure_rdma == AZURE_AUTO ? generation_here() : options->azure_rdma;
    for (size_t i = 0; i < N_ELEMENTS(settings); i++) {
        if (settings[i].generation == generation && environment(settings[i].name) == NULL) {
            setenv(settings[i].name, settings[i].value, 1);
            say("setting %s=%s for the RDMA devices of this container (--azure-rdma)",
                settings[i].name, settings[i].value);
        }
    }
}
