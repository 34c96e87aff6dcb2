// SPDX-License-Identifier: Apache-2.0
//
// cores.h - keeps ranks that wait for each other on different cores.
//
// Two ranks of a host may find themselves on one core: a busy neighbour has the other, or a wake-up
// put them together. As both mostly wait and make room for each other, the scheduler takes them for
// light work and leaves them there for as long as the neighbour lasts, and every exchange pays for
// two switches. So ranks tell each other, through shared memory, on which core they wait. Those who
// meet yield at once instead of spinning, and one of the two moves away.
#ifndef HVD_NET_CORES_H
#define HVD_NET_CORES_H

#include "net/shm.h"

typedef struct cores {
    domain_t *shm; // NULL: ranks of this host cannot see each other
    int n_local;
    int own_index;
    bool sees_all; // every rank of the job is on this host
    atomic_uint_fast64_t next_move_ns;
} cores_t;

// *cores is zeroed.
void cores_init(cores_t *cores, domain_t *shm, const net_job_t *job);
// Says where the calling thread waits, and who else does.
core_use_t cores_look(cores_t *cores);
// Moves the calling thread to another of the cores it may use, if that is its part: of two ranks
// the later one goes, and not all the time.
void cores_part(cores_t *cores, uint64_t now_ns);

#endif
