// SPDX-License-Identifier: Apache-2.0
//
// trials.c - see trials.h.
// Threads: pure; a table belongs to the holder of its engine.
#include "engine/trials.h"

trial_t *trial_of(trials_t *trials, hvd_op_t op, size_t bytes)
{
    int size = 0;
    while (size < TRIAL_SIZES - 1 && bytes >> (size + 1) != 0) {
        size++;
    }
    return &trials->of[op][size];
}

bool trial_counts(const trial_t *trial)
{
    return trial->n_tasks < TRIAL_TURNS;
}

copying_t trial_copying(const trial_t *trial)
{
    bool by_windows = trial_counts(trial) ? trial->n_tasks % 2 == 0 : trial->by_windows;
    return by_windows ? COPY_BY_WINDOWS : COPY_DIRECTLY;
}

bool trial_is_for_windows(const trial_t *trial)
{
    return trial->windows_ns < trial->direct_ns;
}

void trial_ended(trial_t *trial, uint64_t ns, int n_for_windows, int n_members)
{
    uint64_t *best = trial->n_tasks % 2 == 0 ? &trial->windows_ns : &trial->direct_ns;
    if (trial_counts(trial)) {
        *best = trial->n_tasks < 2 ? ns : MIN(*best, ns); // the first two begin it
    }
    if (trial->n_tasks == TRIAL_TURNS - 1) {
        trial->by_windows = 2 * n_for_windows > n_members;
    }
    trial->n_tasks = (trial->n_tasks + 1) % TRIAL_LASTS_TASKS;
}
