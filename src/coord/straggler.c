// SPDX-License-Identifier: Apache-2.0
//
// straggler.c - who comes last.
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

bool straggler_init(coord_t *coord)
{
    stragglers_t *stragglers = &coord->stragglers;
    stragglers->step = 1;
    stragglers->worst = -1;
    stragglers->branches = calloc((size_t)coord->n_children + 1, sizeof *stragglers->branches);
    coord->fixed_bytes += ((size_t)coord->n_children + 1) * sizeof *stragglers->branches;
    for (int rank = 0; stragglers->branches != NULL && rank < coord->params.size; rank++) {
        if (coord->branch_of[rank] >= 0) {
            stragglers->branches[coord->branch_of[rank]].n_ranks++;
        }
    }
    return stragglers->branches != NULL;
}

void straggler_free(coord_t *coord)
{
    free(coord->stragglers.branches);
}

static void close_window(coord_t *coord)
{
    stragglers_t *stragglers = &coord->stragglers;
    int worst = 0;
    for (int i = 0; i <= coord->n_children; i++) {
        if (stragglers->branches[i].window_ns > stragglers->branches[worst].window_ns) {
            worst = i;
        }
    }
    stragglers->verdict = coord_straggler(coord, worst);
    stragglers->verdict.n_last = stragglers->branches[worst].window_last;
    stragglers->verdict.late_ns = stragglers->branches[worst].window_ns;
    stragglers->verdict.n_steps = WINDOW_STEPS;
    stragglers->verdict.elapsed_ns = coord->now_ns - stragglers->window_since_ns;
    stragglers->has_verdict = true;
    for (int i = 0; i <= coord->n_children; i++) {
        stragglers->branches[i].window_last = stragglers->branches[i].window_ns = 0;
    }
    stragglers->window_steps = 0;
    stragglers->window_since_ns = coord->now_ns;
}

static void close_step(coord_t *coord)
{
    stragglers_t *stragglers = &coord->stragglers;
    if (stragglers->n_steps == 0) {
        stragglers->window_since_ns = coord->now_ns;
    }
    stragglers->step++;
    stragglers->n_steps++;
    stragglers->window_steps++;
    straggler_branch_t *branch = &stragglers->branches[stragglers->worst];
    branch->n_last++;
    branch->late_ns += stragglers->worst_ns;
    branch->window_last++;
    branch->window_ns += stragglers->worst_ns;
    stragglers->worst = -1;
    stragglers->worst_ns = 0;
    if (stragglers->window_steps == WINDOW_STEPS) {
        close_window(coord);
    }
}

void straggler_note(coord_t *coord, entry_t *entry, int branch)
{
    stragglers_t *stragglers = &coord->stragglers;
    uint64_t waited_ns = coord->now_ns - MIN(entry->since_ns, coord->now_ns);
    if (entry->step == stragglers->step) {
        close_step(coord);
    }
    entry->step = stragglers->step;
    if (stragglers->worst < 0 || waited_ns > stragglers->worst_ns) {
        stragglers->worst = branch;
        stragglers->worst_ns = waited_ns;
    }
}

coord_straggler_t coord_straggler(const coord_t *coord, int branch)
{
    const stragglers_t *stragglers = &coord->stragglers;
    return (coord_straggler_t){.rank = branch_rank(coord, branch),
                               .n_ranks = stragglers->branches[branch].n_ranks,
                               .n_last = stragglers->branches[branch].n_last,
                               .n_steps = stragglers->n_steps,
                               .late_ns = stragglers->branches[branch].late_ns};
}

bool coord_worst_straggler(coord_t *coord, coord_straggler_t *late_p)
{
    if (LIKELY(!coord->stragglers.has_verdict)) {
        return false;
    }
    *late_p = coord->stragglers.verdict;
    coord->stragglers.has_verdict = false;
    return true;
}
