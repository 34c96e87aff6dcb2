// SPDX-License-Identifier: Apache-2.0
//
// sets.c - process sets, as seen from one node of the tree, and who has joined.
//
// For every set a node knows which of its branches (itself, each child's subtree) hold members,
// how many, and how many of those have joined: all that counting a round needs. Sets come and go
// with records of the log, so all ranks give them the same ids in the same order. Ids of removed
// sets are given out again, oldest first. A line for a removed set may still arrive, but never for
// its successor of the same id: every rank has a part in adding a set, and says so after all it had
// to say about the old one. Memory per set: a few words for each member below this node. The holder
// of the engine owns it.
#include "coord/internal.h"

#include <stdlib.h>

set_t *sets_find(const coord_t *coord, int id)
{
    return id >= 0 && id < coord->sets.n_slots ? coord->sets.at[id] : NULL;
}

set_t *sets_find_ranks(const coord_t *coord, const int64_t *ranks, int n_ranks)
{
    for (int id = 0; id < coord->sets.n_slots; id++) {
        const set_t *set = coord->sets.at[id];
        if (set == NULL || set->n_ranks != n_ranks) {
            continue;
        }
        int same = 0;
        while (same < n_ranks && set->ranks[same] == ranks[same]) {
            same++;
        }
        if (same == n_ranks) {
            return coord->sets.at[id];
        }
    }
    return NULL;
}

int set_position(const set_t *set, int rank)
{
    int low = 0, high = set->n_ranks;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (set->ranks[middle] < rank) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < set->n_ranks && set->ranks[low] == rank ? low : -1;
}

static int compare_ranks(const void *a, const void *b)
{
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

bool sets_sort_ranks(int *ranks, int n_ranks, int size)
{
    qsort(ranks, (size_t)n_ranks, sizeof *ranks, compare_ranks);
    for (int i = 0; i < n_ranks; i++) {
        if (ranks[i] < 0 || ranks[i] >= size || (i > 0 && ranks[i] == ranks[i - 1])) {
            return false;
        }
    }
    return n_ranks > 0;
}

// --- Making one ---------------------------------------------------------------------------------

static size_t block_bytes_of(int n_ranks, int n_branches)
{
    return sizeof(set_t) + (size_t)n_branches * sizeof(part_t) +
           ((size_t)n_ranks * 2 + (size_t)n_branches) * sizeof(int);
}

// One block: the set, its parts, then ranks, part_of and the parts' positions.
static set_t *set_alloc(coord_t *coord, int n_ranks)
{
    int n_branches = coord->n_children + 1;
    set_t *set = calloc(1, block_bytes_of(n_ranks, n_branches));
    if (set == NULL) {
        return NULL;
    }
    set->parts = (part_t *)(void *)(set + 1);
    set->ranks = (int *)(void *)(set->parts + n_branches);
    set->part_of = set->ranks + n_ranks;
    set->n_ranks = n_ranks;
    return set;
}

// Sorts the members into branches, in two passes: count, then place.
static void set_divide(const coord_t *coord, set_t *set)
{
    int n_branches = coord->n_children + 1;
    int *positions = set->part_of + n_branches;
    int counts_at = 0;
    for (int branch = 0; branch < n_branches; branch++) {
        set->part_of[branch] = 0;
    }
    for (int i = 0; i < set->n_ranks; i++) {
        int branch = coord->branch_of[set->ranks[i]];
        if (branch >= 0) {
            set->part_of[branch]++;
        }
    }
    for (int branch = 0; branch < n_branches; branch++) {
        int n_members = set->part_of[branch];
        set->part_of[branch] = n_members > 0 ? set->n_parts : -1;
        if (n_members > 0) {
            part_t *part = &set->parts[set->n_parts++];
            *part = (part_t){.branch = branch, .positions = positions + counts_at};
            counts_at += n_members;
        }
    }
    for (int i = 0; i < set->n_ranks; i++) {
        int branch = coord->branch_of[set->ranks[i]];
        if (branch < 0) {
            continue;
        }
        part_t *part = set_part(set, branch);
        if (part->n_members == 0) {
            part->lowest = set->ranks[i];
        }
        part->positions[part->n_members++] = i;
        part->n_joined += coord->joins.has_joined[set->ranks[i]];
    }
    for (int i = 0; i < set->n_parts; i++) {
        set->n_parts_joined += set->parts[i].n_joined == set->parts[i].n_members;
    }
}

static bool reserve_slot(coord_t *coord, int id)
{
    if (id < coord->sets.n_slots) {
        return true;
    }
    set_t **sets = realloc(coord->sets.at, ((size_t)id + 1) * sizeof(set_t *));
    if (sets == NULL) {
        return false;
    }
    for (int i = coord->sets.n_slots; i <= id; i++) {
        sets[i] = NULL;
    }
    coord->sets.at = sets;
    coord->sets.n_slots = id + 1;
    return true;
}

int sets_free_id(coord_t *coord)
{
    return coord->sets.n_free_ids > 0 ? coord->sets.free_ids[0] : coord->sets.n_slots;
}

static void take_id(coord_t *coord, int id)
{
    for (int i = 0; i < coord->sets.n_free_ids; i++) {
        if (coord->sets.free_ids[i] == id) {
            coord->sets.n_free_ids--;
            memmove(&coord->sets.free_ids[i], &coord->sets.free_ids[i + 1],
                    (size_t)(coord->sets.n_free_ids - i) * sizeof(int));
            return;
        }
    }
}

hvd_status_t sets_register(coord_t *coord, int id, const int *ranks, int n_ranks, err_t *err)
{
    if (sets_find(coord, id) != NULL || id > coord->sets.n_slots) {
        return fail(err, HVD_PROTOCOL, "process set %d cannot be added: the id is %s", id,
                    id > coord->sets.n_slots ? "not the next one" : "in use");
    }
    set_t *set = set_alloc(coord, n_ranks);
    if (set == NULL || !reserve_slot(coord, id)) {
        free(set);
        return fail(err, HVD_NO_MEMORY, "no memory for a process set of %d ranks", n_ranks);
    }
    set->id = id;
    memcpy(set->ranks, ranks, (size_t)n_ranks * sizeof *ranks);
    set->self = set_position(set, coord->params.rank);
    set_divide(coord, set);
    take_id(coord, id);
    coord->sets.at[id] = set;
    return HVD_OK;
}

// --- Removing one -------------------------------------------------------------------------------

static void set_free(set_t *set)
{
    map_free(&set->names);
    free(set);
}

void sets_remove(coord_t *coord, set_t *set)
{
    coord->sets.at[set->id] = NULL;
    set->removed = true;
    if (coord->sets.n_free_ids == coord->sets.cap_free_ids) {
        int cap = MAX(8, coord->sets.cap_free_ids * 2);
        int *ids = realloc(coord->sets.free_ids, (size_t)cap * sizeof *ids);
        if (ids == NULL) {
            coord->no_memory = true;
            sets_drop(coord, set);
            return;
        }
        coord->sets.free_ids = ids;
        coord->sets.cap_free_ids = cap;
    }
    coord->sets.free_ids[coord->sets.n_free_ids++] = set->id;
    sets_drop(coord, set);
}

void sets_drop(coord_t *coord, set_t *set)
{
    (void)coord;
    if (set->removed && set->n_entries == 0) {
        set_free(set);
    }
}

void sets_free(coord_t *coord)
{
    for (int id = 0; id < coord->sets.n_slots; id++) {
        if (coord->sets.at[id] != NULL) {
            set_free(coord->sets.at[id]);
        }
    }
    free(coord->sets.at);
    free(coord->sets.free_ids);
}

size_t sets_memory(const coord_t *coord)
{
    size_t bytes = (size_t)coord->sets.n_slots * sizeof(set_t *) +
                   (size_t)coord->sets.cap_free_ids * sizeof(int);
    for (int id = 0; id < coord->sets.n_slots; id++) {
        const set_t *set = coord->sets.at[id];
        if (set != NULL) {
            bytes += block_bytes_of(set->n_ranks, coord->n_children + 1) + set->name_bytes +
                     set->names.n_slots * sizeof(map_slot_t);
        }
    }
    return bytes;
}

// --- Joining ------------------------------------------------------------------------------------

void joins_add(coord_t *coord, int rank)
{
    coord->joins.has_joined[rank] = 1;
    coord->joins.n++;
    coord->joins.last = rank;
    for (int id = 0; id < coord->sets.n_slots; id++) {
        set_t *set = coord->sets.at[id];
        if (set == NULL || set_position(set, rank) < 0) {
            continue;
        }
        part_t *part = set_part(set, coord->branch_of[rank]);
        if (++part->n_joined == part->n_members) {
            set->n_parts_joined++;
            merge_recheck(coord, set);
        }
    }
}

void joins_clear(coord_t *coord)
{
    memset(coord->joins.has_joined, 0, (size_t)coord->params.size);
    coord->joins.n = 0;
    coord->joins.tag = 0;
    for (int id = 0; id < coord->sets.n_slots; id++) {
        set_t *set = coord->sets.at[id];
        if (set == NULL) {
            continue;
        }
        set->n_parts_joined = 0;
        for (int i = 0; i < set->n_parts; i++) {
            set->parts[i].n_joined = 0;
        }
    }
}
