// SPDX-License-Identifier: Apache-2.0
//
// cores.c - one word per rank in the shared segment says on which core it waits. The words are only
// hints: a stale one costs a needless yield. Any thread may call, whoever holds the engine.
#define _GNU_SOURCE
#include "net/cores.h"

#include <sched.h>

#define MOVE_EVERY_NS (4 * NS_PER_MS)

void cores_init(cores_t *cores, domain_t *shm, const net_job_t *job)
{
    if (shm != NULL && shm_slot_bytes(shm) > 0) {
        cores->shm = shm;
        cores->n_local = shm_n_local(shm);
        cores->own_index = shm_local_index(shm, job->rank);
        cores->sees_all = cores->n_local == job->size;
    }
}

static int waits_on(const cores_t *cores, int index)
{
    return atomic_load_explicit(shm_core_word(cores->shm, index), memory_order_relaxed) - 1;
}

core_use_t cores_look(cores_t *cores)
{
    int core = cores->shm != NULL ? sched_getcpu() : -1;
    if (core < 0) {
        return CORE_UNKNOWN;
    }
    if (waits_on(cores, cores->own_index) != core) { // others read this line: write it rarely
        atomic_store_explicit(shm_core_word(cores->shm, cores->own_index), core + 1,
                              memory_order_relaxed);
    }
    for (int i = 0; i < cores->n_local; i++) {
        if (i != cores->own_index && waits_on(cores, i) == core) {
            return CORE_SHARED;
        }
    }
    return cores->sees_all ? CORE_OWN : CORE_UNKNOWN;
}

// The cores of `allowed` on which no earlier rank waits.
static cpu_set_t free_cores(const cores_t *cores, const cpu_set_t *allowed)
{
    cpu_set_t free = *allowed;
    for (int i = 0; i < cores->n_local; i++) {
        int core = waits_on(cores, i);
        if (i != cores->own_index && core >= 0 && core < CPU_SETSIZE) {
            CPU_CLR((size_t)core, &free);
        }
    }
    return free;
}

void cores_part(cores_t *cores, uint64_t now_ns)
{
    int core = waits_on(cores, cores->own_index);
    bool is_later = false;
    cpu_set_t allowed;
    for (int i = 0; i < cores->own_index; i++) {
        is_later |= waits_on(cores, i) == core;
    }
    if (!is_later || now_ns < atomic_load_explicit(&cores->next_move_ns, memory_order_relaxed) ||
        sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return;
    }
    atomic_store_explicit(&cores->next_move_ns, now_ns + MOVE_EVERY_NS, memory_order_relaxed);
    cpu_set_t free = free_cores(cores, &allowed);
    // Forbidding a thread its core is the only way to make it move. It is allowed all again at
    // once: where it stays is the scheduler's business.
    if (CPU_COUNT(&free) > 0 && sched_setaffinity(0, sizeof free, &free) == 0) {
        sched_setaffinity(0, sizeof allowed, &allowed);
        cores_look(cores);
    }
}
