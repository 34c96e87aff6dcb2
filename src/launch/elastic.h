// SPDX-License-Identifier: Apache-2.0
//
// elastic.h - an elastic job: a session with many generations of ranks.
//
// elastic.c has its policy and owns it; generation.c forms the next generation. Private to these
// two, which share one thread.
#ifndef HVD_LAUNCH_ELASTIC_H
#define HVD_LAUNCH_ELASTIC_H

#include "launch/host_pool.h"
#include "launch/session.h"

typedef struct driver {
    session_t session; // first: the policy finds the driver by it
    host_pool_t pool;
    discovery_t *discovery;
    char job_name[16];
    int min_ranks, n_news;
    unsigned news; // told in this generation
    uint64_t form_at_ns, give_up_at_ns;
    worker_t *cause; // the first that failed in this generation
} driver_t;

static inline bool worker_is_alive(const worker_t *worker)
{
    return !worker->end.has_ended && !worker->is_leaving;
}

// elastic.c
// The first reason is the one that counts; stops everything.
void elastic_give_up(driver_t *driver, int code, const char *format, ...) PRINTF_LIKE(3, 4);

// generation.c
// Forms the next generation if there are slots enough and the agents are there; else brings them
// up, to be called again, or gives up.
void generation_form(driver_t *driver);
// Tells ranks that hosts have come or gone, so that they leave the generation when they can.
void generation_tell_news(driver_t *driver);

#endif
