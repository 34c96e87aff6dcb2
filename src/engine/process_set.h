// SPDX-License-Identifier: Apache-2.0
//
// process_set.h - what the engine knows of a process set: its members, and where they sit.
//
// Made when the set is agreed upon (process_sets.c), and not changed afterwards but for the count
// of operations without a name.
#ifndef HVD_ENGINE_PROCESS_SET_H
#define HVD_ENGINE_PROCESS_SET_H

#include "base/base.h"

// Who of the members of a process set sits where; found once, when it is made.
typedef struct host_split {
    int *local_ranks; // members on this host
    int n_local, local_member;
    int *cross_ranks; // members with this rank's place on their hosts, in the order of members
    int n_cross, cross_member;
    int fewest, most; // members on a host that has any
} host_split_t;

// Operations without a name that are counted together: see hvd_request_t.series.
typedef struct series {
    struct series *next;
    uint64_t n[HVD_N_OPS];
    char name[]; // "" for the one that has none
} series_t;

typedef struct process_set {
    int id;
    int n;
    int *ranks;
    int member;    // this rank's position; -1: not a member
    uint64_t hash; // of the ranks
    host_split_t split;
    bool on_this_host; // all members share memory with this rank
    // Under lock; by set: ranks outside do not count what it does. Since all ranks last joined.
    series_t *series; // those that were asked for
} process_set_t;

#endif
