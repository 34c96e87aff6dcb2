// SPDX-License-Identifier: Apache-2.0
//
// ofi_memory.c - registered memory of the libfabric transport.
//
// Registering pins pages and tells the device of them: slow, and limited (ulimit -l). So memory is
// registered in slabs, the buffers of one direction of a link, and a slab that is given back stays
// registered for the next link that sends. When what is spare exceeds HOROVOD_OFI_CACHE_BYTES, the
// slab that has lain there longest is released.
//
// Thread: the holder of the engine.
#define _GNU_SOURCE
#include "net/net.h"

#if __has_include(<rdma/fabric.h>)
#include "net/ofi.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>

static void release(domain_t *d, ofi_slab_t *slab)
{
    if (slab->mr != NULL) {
        fi_close(&slab->mr->fid);
    }
    munmap(slab->memory, OFI_SLAB_BYTES);
    free(slab);
    d->registered_bytes -= OFI_SLAB_BYTES;
}

static void fail_registration(const domain_t *d, long code, err_t *err)
{
    struct rlimit limit = {0};
    char may_lock[32] = "any number of";
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur != RLIM_INFINITY) {
        snprintf(may_lock, sizeof may_lock, "%llu", (unsigned long long)limit.rlim_cur / KIB);
    }
    fail(err, HVD_SYSTEM,
         "cannot register %zu KiB of memory with the %s provider: %s; this process may lock %s "
         "KiB; raise the limit (ulimit -l unlimited; in a container --ulimit memlock=-1 or the "
         "capability IPC_LOCK)",
         OFI_SLAB_BYTES / KIB, d->provider, ofi_text(d, code), may_lock);
}

static ofi_slab_t *make(domain_t *d, err_t *err)
{
    ofi_slab_t *slab = calloc(1, sizeof *slab);
    void *memory =
        mmap(NULL, OFI_SLAB_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (slab == NULL || memory == MAP_FAILED) {
        fail(err, HVD_NO_MEMORY, "no memory for the buffers of the ofi transport");
        goto undo;
    }
    madvise(memory, OFI_SLAB_BYTES, MADV_DONTFORK); // a child must not share what a device writes
    slab->memory = memory;
    if (d->info->domain_attr->mr_mode & FI_MR_LOCAL) {
        int code = fi_mr_reg(d->domain, memory, OFI_SLAB_BYTES, FI_SEND | FI_RECV, 0, 0, 0,
                             &slab->mr, NULL);
        if (code != 0) {
            fail_registration(d, code, err);
            goto undo;
        }
    }
    d->registered_bytes += OFI_SLAB_BYTES;
    return slab;
undo:
    if (memory != MAP_FAILED) {
        munmap(memory, OFI_SLAB_BYTES);
    }
    free(slab);
    return NULL;
}

ofi_slab_t *ofi_slab_take(domain_t *d, err_t *err)
{
    ofi_slab_t *slab = d->spare;
    if (slab == NULL) {
        return make(d, err);
    }
    d->spare = slab->next;
    d->spare_bytes -= OFI_SLAB_BYTES;
    return slab;
}

ofi_message_t *ofi_slab_message(const ofi_slab_t *slab, int i)
{
    return (ofi_message_t *)(slab->memory + OFI_LEAD_BYTES + (size_t)i * OFI_STRIDE_BYTES);
}

static void release_oldest(domain_t *d)
{
    ofi_slab_t **last = &d->spare;
    while ((*last)->next != NULL) {
        last = &(*last)->next;
    }
    release(d, *last);
    *last = NULL;
    d->spare_bytes -= OFI_SLAB_BYTES;
}

void ofi_slab_give(domain_t *d, ofi_slab_t *slab)
{
    if (slab == NULL) {
        return;
    }
    slab->next = d->spare;
    d->spare = slab;
    d->spare_bytes += OFI_SLAB_BYTES;
    while (d->spare_bytes > (size_t)d->job->config->ofi_cache_bytes) {
        release_oldest(d);
    }
}

void ofi_slabs_free(domain_t *d)
{
    while (d->spare != NULL) {
        release_oldest(d);
    }
}

#endif
