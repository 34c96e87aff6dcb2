// SPDX-License-Identifier: Apache-2.0
//
// chaos_plan.h - what happens to a job of a given seed: drawn once, carried out twice.
//
// test_chaos.c does it to real processes, tests/unit/test_agreement_sim.c to coordinators on a
// virtual clock. A plan is a few faults one after the other that a job must survive, and in most
// plans one at the end that it must not. Pure functions of the seed.
#ifndef TESTS_FAULT_CHAOS_PLAN_H
#define TESTS_FAULT_CHAOS_PLAN_H

#include "base/base.h"

#define CHAOS_MAX_FAULTS 4
#define CHAOS_SURVIVED_MS 1500 // the longest stop or cut a job must survive
#define CHAOS_HEARTBEAT_MS 500 // limits of the jobs these plans are for
#define CHAOS_WARNING_MS 2000
#define CHAOS_TIMEOUT_MS 6000

typedef enum fault_kind {
    FAULT_STOP,      // a rank, for a while
    FAULT_SHORT_CUT, // the network, for a while
    FAULT_LOSS,      // one packet in twenty, for a while
    N_SURVIVED,
    FAULT_KILL = N_SURVIVED,
    FAULT_KILL_TWO, // the victim and the next
    FAULT_LONG_STOP,
    FAULT_CUT,
    FAULT_CUT_ONE_WAY,
    FAULT_RESET,
    N_FAULTS
} fault_kind_t;

static const struct {
    const char *name;
    bool needs_hosts; // two of them
} fault_kinds[N_FAULTS] = {
    [FAULT_STOP] = {"stop", false},
    [FAULT_SHORT_CUT] = {"short cut", true},
    [FAULT_LOSS] = {"loss", true},
    [FAULT_KILL] = {"kill", false},
    [FAULT_KILL_TWO] = {"kill two", false},
    [FAULT_LONG_STOP] = {"long stop", false},
    [FAULT_CUT] = {"cut", true},
    [FAULT_CUT_ONE_WAY] = {"cut one way", true},
    [FAULT_RESET] = {"reset", true},
};

typedef struct planned {
    fault_kind_t kind;
    int victim;
    int after_ms, lasts_ms;
} planned_t;

typedef struct chaos_plan {
    uint64_t seed;
    int n_ranks;
    bool has_two_hosts; // the lower half of the ranks on the first
    size_t n;           // elements of each operation
    planned_t faults[CHAOS_MAX_FAULTS];
    int n_faults;
    bool is_fatal; // the last of them is
} chaos_plan_t;

static inline int chaos_below(uint64_t *state, int n)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (int)((x ^ (x >> 31)) % (uint64_t)n);
}

static inline fault_kind_t chaos_draw(uint64_t *state, int from, int to, bool has_two_hosts)
{
    for (;;) {
        fault_kind_t kind = (fault_kind_t)(from + chaos_below(state, to - from));
        if (!fault_kinds[kind].needs_hosts || has_two_hosts) {
            return kind;
        }
    }
}

static inline chaos_plan_t chaos_plan(uint64_t seed)
{
    static const size_t sizes[] = {10, 1000, 50000, 300000};
    uint64_t state = seed;
    chaos_plan_t plan = {.seed = seed, .n_ranks = 3 + chaos_below(&state, 2)};
    plan.has_two_hosts = chaos_below(&state, 2) == 1;
    plan.n = sizes[chaos_below(&state, N_ELEMENTS(sizes))];
    int n_survived = chaos_below(&state, 3);
    plan.is_fatal = chaos_below(&state, 5) > 0;
    plan.n_faults = n_survived + plan.is_fatal;
    for (int i = 0; i < plan.n_faults; i++) {
        bool fatal = i == n_survived;
        plan.faults[i] = (planned_t){
            .kind = chaos_draw(&state, fatal ? N_SURVIVED : 0, fatal ? N_FAULTS : N_SURVIVED,
                               plan.has_two_hosts),
            .victim = chaos_below(&state, plan.n_ranks),
            .after_ms = 20 + chaos_below(&state, 400),
            .lasts_ms = 100 + chaos_below(&state, CHAOS_SURVIVED_MS - 100),
        };
    }
    return plan;
}

#endif
