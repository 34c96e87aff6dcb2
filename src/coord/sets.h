// SPDX-License-Identifier: Apache-2.0
//
// sets.h - process sets and the part of each that lies below this node; who has joined.
//
// Owned by sets.c: the others read. n_entries, names and name_bytes of a set are entry.c's.
#ifndef HVD_COORD_SETS_H
#define HVD_COORD_SETS_H

#include "coord/coord.h"

// The members of a set that lie in one branch.
typedef struct part {
    int branch; // 0: this rank itself; i + 1: child i
    int n_members;
    int n_joined;
    int lowest;     // rank
    int *positions; // of its members in set->ranks, ascending
} part_t;

typedef struct set {
    int id;
    bool removed;
    int n_entries; // that exist, named or still being run; the last one frees a removed set
    int n_ranks;
    int *ranks; // ascending
    int self;   // position of this rank, or -1
    int n_parts;
    part_t *parts;      // branches with members, in order
    int *part_of;       // branch -> index of its part, or -1
    int n_parts_joined; // parts all of whose members have joined
    map_t names;        // name -> entry
    size_t name_bytes;  // of the keys, for coord_memory
} set_t;

typedef struct set_table {
    set_t **at; // by id; NULL: free
    int n_slots;
    int *free_ids; // oldest first
    int n_free_ids, cap_free_ids;
    uint32_t n_ops; // names the next change of sets: coord.c
} set_table_t;

typedef struct joins {
    uint8_t *has_joined; // per rank, of those in this subtree
    int n;
    int last;
    uint64_t tag; // this rank has joined; 0: it has not
} joins_t;

set_t *sets_find(const coord_t *coord, int id);
set_t *sets_find_ranks(const coord_t *coord, const int64_t *ranks, int n_ranks);
int sets_free_id(coord_t *coord); // the id the next set gets; taken by sets_register
hvd_status_t sets_register(coord_t *coord, int id, const int *ranks, int n_ranks, err_t *err);
void sets_remove(coord_t *coord, set_t *set); // its entries must be gone, or pinned
void sets_drop(coord_t *coord, set_t *set);   // after an entry went
void sets_free(coord_t *coord);
size_t sets_memory(const coord_t *coord);
bool sets_sort_ranks(int *ranks, int n_ranks, int size); // false: twice the same, or out of range
static inline part_t *set_part(const set_t *set, int branch)
{
    int index = set->part_of[branch];
    return index < 0 ? NULL : &set->parts[index];
}
int set_position(const set_t *set, int rank); // or -1

void joins_add(coord_t *coord, int rank); // counts it, and completes what waited for it only
void joins_clear(coord_t *coord);

#endif
