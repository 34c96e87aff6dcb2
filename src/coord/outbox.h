// SPDX-License-Identifier: Apache-2.0
//
// outbox.h - bytes for the neighbours in the tree: lines, collected in frames.
//
// Owned by outbox.c; everybody writes lines.
#ifndef HVD_COORD_OUTBOX_H
#define HVD_COORD_OUTBOX_H

#include "coord/sets.h"

typedef struct outbox {
    int rank;
    buf_t bytes;
    size_t sent;     // taken from the front
    size_t frame_at; // header of the open frame, if is_open
    bool is_open;
} outbox_t;

// A buffer to write one line for neighbour i into, inside its open frame.
buf_t *outbox_line(coord_t *coord, int neighbour);
static inline buf_t *line_to_parent(coord_t *coord)
{
    return outbox_line(coord, 0);
}
// The same bytes to every child, or to those with members of the set.
void outbox_to_children(coord_t *coord, const set_t *set, const void *line, size_t bytes);
int branch_rank(const coord_t *coord, int branch); // at the top of a branch

#endif
