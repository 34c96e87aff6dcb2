// SPDX-License-Identifier: Apache-2.0
//
// rows.h - the table of transports and what a context keeps of each.
//
// For net.c and net_address.c, which share a net_t. Thread: the holder of the engine.
#ifndef HVD_NET_ROWS_H
#define HVD_NET_ROWS_H

#include "net/cores.h"
#include "net/net.h"
#include "net/sleeper.h"

// In order of preference.
static const transport_t *const transports[] = {&transport_self, &transport_shm, &transport_ofi,
                                                &transport_tcp};

#define N_TRANSPORTS ((int)N_ELEMENTS(transports))
#define NO_ROW (-1)
#define CPU_MASK_BYTES 1024 // 8192 cores

// One transport in this context, by its row in the table.
typedef struct row {
    domain_t *domain; // NULL: left out
    bool carries;     // may be chosen for links; false: opened for lifelines only
    bool needs_call;  // progress costs a system call
    bool cannot_wake; // nothing tells a sleeping rank that its progress has work
    int n_links;
    char left_out[320]; // why there is no domain
} row_t;

// What a rank offers: rows of the table, in its order of preference.
typedef struct offers {
    int8_t order[N_TRANSPORTS];
    int8_t n;
    int8_t chosen; // row between it and this rank, or NO_ROW
} offers_t;

struct net {
    net_job_t job;
    row_t rows[N_TRANSPORTS];
    int8_t order[N_TRANSPORTS]; // this rank's preference
    int n_order;
    offers_t *offers; // by rank, after net_attach
    bool settled;
    net_link_t **links;  // [rank * N_LANES + lane]
    net_link_t **hooked; // those wrapped by a hook
    int n_hooked;
    net_link_t **lifelines;
    int n_lifelines;
    sleeper_t *sleeper;
    atomic_uint_fast64_t due_ns; // a sleep ends at the latest: held-back data must leave
    unsigned n_quiet;            // sleeps since something happened
    bool look;                   // just woken: ask every domain
    unsigned n_calls;
    uint64_t last_look_ns;
    uint8_t cpus[CPU_MASK_BYTES]; // cores of this machine that ranks may use
    bool oversubscribed;
    bool has_spare_cores;
    cores_t cores;
};

int net_row_named(const char *name, size_t bytes); // NO_ROW: none has this name

static inline bool net_same_host(const net_t *net, int rank)
{
    return net->job.host_of == NULL || net->job.host_of[rank] == net->job.host_of[net->job.rank];
}

#endif
