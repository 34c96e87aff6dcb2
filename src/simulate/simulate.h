// SPDX-License-Identifier: Apache-2.0
//
// simulate.h - what an operation would take on a machine that is not here: up to a hundred thousand
// ranks, priced with the code that runs in the product.
//
// The agreement is that of coord/, the plans are those of coll/; only time is not real. A message
// costs its sender and its receiver some processor time, the wires of both hosts some time for each
// byte, and it is on its way for a while. Ranks
// have a core each, unless told otherwise. Nothing else is in the
// model: no congestion inside the network, no noise, no packets that are lost.
//
// Owns nothing between calls. Threads: any; no state outside the arguments.
#ifndef HVD_SIMULATE_H
#define HVD_SIMULATE_H

#include "coll/coll.h"

// What a message costs on its way between two ranks.
typedef struct path_cost {
    double latency_ns; // on its way, after it was sent and before it is taken
    double message_ns; // of the sender's core, and of the receiver's
    double byte_ns;    // of the wire, which all ranks of a host share; of the core, inside a host
} path_cost_t;

typedef struct machine {
    int n_ranks, per_host; // ranks are numbered host by host
    path_cost_t network, host;
    int n_cores; // that all ranks share, in turn: several hosts played on one; 0: one for each rank
    int tree_arity;
    size_t segment_bytes;
} machine_t;

int machine_n_hosts(const machine_t *m);
int machine_core_of(const machine_t *m, int rank);
// The tree of the agreement; one entry for each rank.
void machine_tree(const machine_t *m, int *parent);

// --- The agreement (simulate_agreement.c) -------------------------------------------------------

// Above so many ranks only one path of the tree is run, the longest; all that hangs beside it is
// taken to behave as the path does. That is exact for full trees, and too slow for others.
#define SIMULATE_WHOLE_TREE_RANKS 1024

// From the moment all ranks submit an allreduce of a known name to the moment the last one may
// start; with payload_bytes that ride along, to the moment the last one has the result.
hvd_status_t simulate_agreement(const machine_t *m, size_t payload_bytes, int whole_tree_ranks,
                                double *ns_p, err_t *err);

// --- Plans (simulate_plan.c) --------------------------------------------------------------------

#define SIMULATE_MOST_STEPS 20000000

// How long the plan takes among args->size members (args->member is not looked at), per_host of
// them on each host; `lanes` such plans run at the same time and share the wires.
// HVD_UNSUPPORTED: more steps than SIMULATE_MOST_STEPS.
hvd_status_t simulate_plan(const machine_t *m, const algorithm_t *algorithm,
                           const coll_args_t *args, int per_host, int lanes, double *ns_p,
                           err_t *err);

// --- Operations (simulate.c) --------------------------------------------------------------------

typedef struct price {
    const char *way;       // of the engine, as in timelines
    const char *algorithm; // of its plan; "": it has none
    double agreement_ns;
    double data_ns; // negative: the plan has too many steps
} price_t;

// An operation on float32, of so many bytes: of the tensor; of what each rank brings where blocks
// are gathered or exchanged.
hvd_status_t simulate_operation(const machine_t *m, const config_t *config, hvd_op_t op,
                                size_t bytes, price_t *price_p, err_t *err);

// --- For all of them (simulate_events.c) --------------------------------------------------------

typedef struct event {
    double at_ns;
    uint64_t order; // of equal times, the earlier made comes first
    int32_t what, number;
} sim_event_t;

typedef struct events {
    sim_event_t *heap;
    size_t n, cap;
    uint64_t n_made;
    bool failed; // out of memory; stays set
} events_t;

void events_add(events_t *events, double at_ns, int what, int number);
bool events_next(events_t *events, sim_event_t *event_p); // false: there are none
void events_free(events_t *events);

#endif
