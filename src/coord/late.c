// SPDX-License-Identifier: Apache-2.0
//
// late.c - who comes last.
//
// A round is completed by the last of its branches, so each node knows whom it has waited for, and
// how long: since the first share came. Rounds are gathered into steps, which the names tell apart:
// when a name comes again, a new step of the training has begun. What counts for a step is its
// longest wait. Rank 0 sees every branch of the job; a branch with several ranks is one to it, and
// the rank at its top knows which of them it was.
//
// Cost: a few comparisons per round. The holder of the engine calls.
#include "coord/internal.h"

#include <stdlib.h>

#define WINDOW_STEPS 100

bool late_init(coord_t *coord)
{
    late_t *late = &coord->late;
    late->step = 1;
    late->worst = -1;
    late->branches = calloc((size_t)coord->n_children + 1, sizeof *late->branches);
    coord->fixed_bytes += ((size_t)coord->n_children + 1) * sizeof *late->branches;
    for (int rank = 0; late->branches != NULL && rank < coord->params.size; rank++) {
        if (coord->branch_of[rank] >= 0) {
            late->branches[coord->branch_of[rank]].n_ranks++;
        }
    }
    return late->branches != NULL;
}

void late_free(coord_t *coord)
{
    free(coord->late.branches);
}

static void close_window(coord_t *coord)
{
    late_t *late = &coord->late;
    int worst = 0;
    for (int i = 0; i <= coord->n_children; i++) {
        if (late->branches[i].window_ns > late->branches[worst].window_ns) {
            worst = i;
        }
    }
    late->verdict = coord_late(coord, worst);
    late->verdict.n_last = late->branches[worst].window_last;
    late->verdict.late_ns = late->branches[worst].window_ns;
    late->verdict.n_steps = WINDOW_STEPS;
    late->verdict.elapsed_ns = coord->now_ns - late->window_since_ns;
    late->has_verdict = true;
    for (int i = 0; i <= coord->n_children; i++) {
        late->branches[i].window_last = late->branches[i].window_ns = 0;
    }
    late->window_steps = 0;
    late->window_since_ns = coord->now_ns;
}

static void close_step(coord_t *coord)
{
    late_t *late = &coord->late;
    if (late->n_steps == 0) {
        late->window_since_ns = coord->now_ns;
    }
    late->step++;
    late->n_steps++;
    late->window_steps++;
    late_branch_t *branch = &late->branches[late->worst];
    branch->n_last++;
    branch->late_ns += late->worst_ns;
    branch->window_last++;
    branch->window_ns += late->worst_ns;
    late->worst = -1;
    late->worst_ns = 0;
    if (late->window_steps == WINDOW_STEPS) {
        close_window(coord);
    }
}

void late_note(coord_t *coord, entry_t *entry, int branch)
{
    late_t *late = &coord->late;
    uint64_t waited_ns = coord->now_ns - MIN(entry->since_ns, coord->now_ns);
    if (entry->step == late->step) {
        close_step(coord);
    }
    entry->step = late->step;
    if (late->worst < 0 || waited_ns > late->worst_ns) {
        late->worst = branch;
        late->worst_ns = waited_ns;
    }
}

int branch_rank(const coord_t *coord, int branch)
{
    return branch == 0 ? coord->params.rank : coord->outboxes[coord->n_parents + branch - 1].rank;
}

coord_late_t coord_late(const coord_t *coord, int branch)
{
    const late_t *late = &coord->late;
    return (coord_late_t){.rank = branch_rank(coord, branch),
                          .n_ranks = late->branches[branch].n_ranks,
                          .n_last = late->branches[branch].n_last,
                          .n_steps = late->n_steps,
                          .late_ns = late->branches[branch].late_ns};
}

bool coord_latest(coord_t *coord, coord_late_t *late_p)
{
    if (LIKELY(!coord->late.has_verdict)) {
        return false;
    }
    *late_p = coord->late.verdict;
    coord->late.has_verdict = false;
    return true;
}
