// SPDX-License-Identifier: Apache-2.0
//
// ranks.h - a job of forked ranks on this machine, for tools that measure or test.
//
// ranks.c; called before the program has threads.
#ifndef HVD_TOOLS_RANKS_H
#define HVD_TOOLS_RANKS_H

#include "base/base.h"

#define RANKS_MOST 512

typedef struct rank_job {
    const char *tool;                                        // its name, in front of messages
    int ranks, hosts;                                        // more hosts than one are played
    const char *const *env;                                  // of ranks, besides what they need
    int n_env;                                               // at most 32
    int (*run)(void *arg, int rank, const char *const *env); // a rank; its exit code
    void *arg;
} rank_job_t;

// The first exit code that is not 0 (128 + n: of a signal); the other ranks are ended then.
int ranks_run(const rank_job_t *job);

#endif
