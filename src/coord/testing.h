// SPDX-License-Identifier: Apache-2.0
//
// testing.h - what only tests ask of a coordinator: how much it holds and remembers.
//
// Kept out of coord.h, so that the product cannot come to depend on it. Any time, by the owner.
#ifndef HVD_COORD_TESTING_H
#define HVD_COORD_TESTING_H

#include "coord/coord.h"

int coord_set_count(const coord_t *coord);
int coord_set_id(const coord_t *coord, int index);
int coord_pending(const coord_t *coord);   // submissions of this rank not yet decided
size_t coord_memory(const coord_t *coord); // bytes held, for the bound on memory

#endif
