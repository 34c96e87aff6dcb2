// SPDX-License-Identifier: Apache-2.0
//
// trials.h - which of two ways of copying is faster on this machine: found out by its first tasks.
//
// Bytes move among ranks of a host through windows, which costs a second copy, or straight from
// process to process, which costs work of the kernel for each page. Either may be twice as
// fast: it depends on which caches cores share, on the size of pages and on the kernel. So the
// first tasks of each operation and size take turns, and each member keeps its best time of either
// way. In the last turn, which goes straight, the members tell each other what they are for
// (coll/direct.h); when it ends all of them know what all have said, and go on alike. After many
// tasks they try again.
//
// Only for sets of all ranks of the host: these run the same tasks in the same order.
// Pure; the tables belong to the holder of the engine.
#ifndef HVD_ENGINE_TRIALS_H
#define HVD_ENGINE_TRIALS_H

#include "base/base.h"

typedef enum copying { COPY_UNTRIED, COPY_BY_WINDOWS, COPY_DIRECTLY } copying_t;

#define TRIAL_TURNS 8          // half of them through windows
#define TRIAL_LASTS_TASKS 2000 // then again
#define TRIAL_SIZES 48         // powers of two

typedef struct trial {
    uint32_t n_tasks; // since it began
    uint64_t windows_ns, direct_ns;
    bool by_windows; // what was found
} trial_t;

typedef struct trials {
    trial_t of[HVD_N_OPS][TRIAL_SIZES];
} trials_t;

trial_t *trial_of(trials_t *trials, hvd_op_t op, size_t bytes);
// How the next task goes.
copying_t trial_copying(const trial_t *trial);
// The next task is one whose time counts.
bool trial_counts(const trial_t *trial);
// What this member says at the end of one that goes straight.
bool trial_is_for_windows(const trial_t *trial);
// A task has ended; n_for_windows of n_members were for windows, if it went straight.
void trial_ended(trial_t *trial, uint64_t ns, int n_for_windows, int n_members);

#endif
