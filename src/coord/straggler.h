// SPDX-License-Identifier: Apache-2.0
//
// straggler.h - who comes last.
//
// Owned by straggler.c.
#ifndef HVD_COORD_STRAGGLER_H
#define HVD_COORD_STRAGGLER_H

#include "coord/entry.h"

typedef struct straggler_branch {
    int n_ranks;
    uint64_t n_last, late_ns;        // since the beginning
    uint64_t window_last, window_ns; // since the last verdict
} straggler_branch_t;

typedef struct stragglers {
    straggler_branch_t *branches; // this rank, then the children
    uint32_t step;                // names the one under way; entries remember theirs
    uint64_t n_steps;
    int worst; // of the step under way; -1: none
    uint64_t worst_ns;
    int window_steps;
    uint64_t window_since_ns;
    bool has_verdict;
    coord_straggler_t verdict;
} stragglers_t;

bool straggler_init(coord_t *coord); // false: no memory
void straggler_free(coord_t *coord);
void straggler_note(coord_t *coord, entry_t *entry, int branch); // whose share completes the round

#endif
