// SPDX-License-Identifier: Apache-2.0
//
// gather.h - a job on whatever agents dial in.
//
// gather.c has the policy and owns it; gather_form.c forms generations. Private to these two, which
// share one thread.
#ifndef HVD_LAUNCH_GATHER_H
#define HVD_LAUNCH_GATHER_H

#include "launch/session.h"

#define LEAVE_MS 1500 // between SIGTERM and SIGKILL: whoever asked waits for the end

// An agent that has come.
typedef struct arrival {
    agent_link_t *link;
    worker_t *worker; // NULL: it has no rank yet
    int slot;
    uint32_t generation; // the last in which it has a place; 0: none
    bool is_spare;       // another has its slot
    bool has_begun;      // its rank has called the function it was started for
    bool is_leaving;     // its task is about to be ended: its rank is to leave at the end of a step
    bool has_failed, is_done;
} arrival_t;

typedef struct gathering {
    session_t session; // first: the policy finds the gathering by it
    arrival_t **arrivals;
    int n_arrivals;
    int n_begin, n_min, n_max;
    int n_attempts;      // how often its platform starts an agent for a slot
    uint32_t generation; // that runs; 0: none yet
    int n_news;
    char job_name[16];
    uint64_t begin_by_ns, form_at_ns, give_up_at_ns;
    worker_t *cause; // of the last burst of failures
    uint64_t failed_ns;
    int events;
} gathering_t;

static inline bool is_alive(const arrival_t *a)
{
    return !a->is_spare && !a->has_failed && !a->is_done;
}

static inline bool has_rank(const arrival_t *a)
{
    return is_alive(a) && a->worker != NULL;
}

static inline bool is_elastic(const gathering_t *g)
{
    return g->session.policy->is_elastic;
}

extern const session_policy_t carry_policy; // carry.c

arrival_t *gather_arrival(const gathering_t *g, const agent_link_t *link);
// NULL: it was refused, or there is no memory; that was said.
arrival_t *gather_welcome(gathering_t *g, const channel_t *channel,
                          const introduction_t *introduction);
int gather_count(const gathering_t *g, bool (*is_one)(const arrival_t *));
// Tells an event; see gather.c.
void gather_tell(const gathering_t *g, const char *format, ...) PRINTF_LIKE(2, 3);

// gather_form.c
// Begins the next generation if there are enough for it, waits for more, or gives up.
void gather_form(gathering_t *g);
void gather_give_up(gathering_t *g, const char *kind, int n, int wanted);
// Puts members into the order of their ranks, and makes their places.
hvd_status_t gather_place(arrival_t **members, int n, bool is_elastic, job_plan_t *plan_p,
                          err_t *err);

#endif
