// SPDX-License-Identifier: Apache-2.0
//
// elastic.h - an elastic job: a session with many generations of ranks.
//
// elastic.c has its policy and owns it; suspects.c finds out which ranks are out of reach;
// handover.c hears of ends in advance; spares.c starts ranks while others go on; generation.c forms
// the next generation; host_pool.c says which hosts there are, which may be used, and how many
// ranks each has, and does nothing else. Private to these, which share one thread.
#ifndef HVD_LAUNCH_ELASTIC_H
#define HVD_LAUNCH_ELASTIC_H

#include "launch/session.h"

// --- Hosts (host_pool.c) -------------------------------------------------------------------------

typedef struct pool_host {
    host_t host;              // stays where it is
    bool is_there;            // named by the last discovery
    bool is_absent;           // its agent is to dial, and has not
    bool is_full;             // an agent is to dial before it gets more ranks
    bool is_leaving;          // somebody wants it back
    int n_spare;              // ranks there that wait for a place; kept by generation.c
    int n_coming;             // those that start
    int n_failures;           // of its ranks, or of reaching it
    uint64_t barred_until_ns; // 0: not barred; NEVER_NS: for good
    int n_restarts;           // of its ranks, since it was last forgiven
    uint64_t failed_ns;       // when the last of these failed
    uint64_t restart_at_ns;   // no new ranks before
    bool is_pausing;          // that is later than the last host_pool_share
    bool is_given_up;         // it may be forgiven, but a job that needs it does not wait for that
    int n_alive;              // ranks of ours that go on there; kept by elastic.c
    int quota;                // ranks it has in the next generation: host_pool_share
} pool_host_t;

typedef struct host_pool {
    pool_host_t **hosts; // in order of appearance
    pool_host_t **order; // after host_pool_share: those with a quota, in order of their ranks
    int n_hosts, n_order;
    double cooldown_min_s, cooldown_max_s; // 0: failed hosts are given up
    int max_restarts;                      // 0: a host is barred with its first failure, for good
    bool starts_none;                      // places only for ranks there are
} host_pool_t;

enum { NEWS_REMOVED = 1, NEWS_ADDED = 2, NEWS_ENDING = 4 }; // as Python's HostUpdateResult has it

hvd_status_t host_pool_read_cooldown(host_pool_t *pool, const char *text,
                                     err_t *err); // "MIN MAX", or ""
// Takes the names over. false: no memory.
bool host_pool_update(host_pool_t *pool, const hosts_t *found);
pool_host_t *host_pool_find(const host_pool_t *pool, const host_t *host); // one of its own
void host_pool_bar(host_pool_t *pool, pool_host_t *host, uint64_t now_ns, uint32_t random);
// A rank of the host has failed: may another be started there? After a pause that doubles, and so
// often; then none before the host is forgiven, which it is when it has not failed for a while.
bool host_pool_restart(const host_pool_t *pool, pool_host_t *host, uint64_t now_ns);
// Gives places to hosts: first to those that have ranks, in order, at most max_ranks (0: any
// number); the sum.
int host_pool_share(host_pool_t *pool, int max_ranks, uint64_t now_ns);
unsigned
host_pool_news(const host_pool_t *pool); // after host_pool_share: how that differs from what runs
bool host_pool_may_grow(const host_pool_t *pool); // a barred host will be welcome again
void host_pool_free(host_pool_t *pool);

// A thread that asks for the hosts once a second.
typedef struct discovery discovery_t;

// Asks once, and starts the thread if there is a script to ask.
hvd_status_t discovery_start(const options_t *options, discovery_t **discovery_p, err_t *err);
// true: another list than before; the caller frees it.
bool discovery_take(discovery_t *discovery, hosts_t *hosts_p);
bool discovery_goes_on(const discovery_t *discovery); // hosts may still come
void discovery_stop(discovery_t *discovery);

// --- The job -------------------------------------------------------------------------------------

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
    return !worker->end.has_ended && !worker->is_leaving && !worker->is_coming;
}

// A rank of the generation that runs, or of one before.
static inline bool worker_has_state(const worker_t *worker)
{
    return worker_is_alive(worker) && worker->joined > 0;
}

// elastic.c
// The first reason is the one that counts; stops everything.
void elastic_give_up(driver_t *driver, int code, const char *format, ...) PRINTF_LIKE(3, 4);

// suspects.c
// A rank has left a generation, because of another one (rank -1: not).
void suspects_note(session_t *session, worker_t *accuser, int rank);
// Ends those that have been given up by others. false: an agent has been asked, call again.
bool suspects_settle(driver_t *driver, uint64_t now_ns);
bool suspects_has_cut(const worker_t *worker); // it ran, out of reach of the others

// handover.c
void handover_host(driver_t *driver, const host_t *host); // is about to go
// The job is about to end: true if ranks have been told, and end by themselves.
bool handover_job(session_t *session);

// spares.c
// Do ranks want to go on without waiting for those that are started in the place of others?
bool spares_are_wanted(const session_t *session);
// Starts ranks where there is room, and tells the others once they wait for a place.
void spares_tend(driver_t *driver);
void spares_admit(driver_t *driver);   // those that start count as well
void spares_dismiss(driver_t *driver); // nobody needs them any more

// generation.c
void generation_count(driver_t *driver); // what runs on each host
// An agent without a plan on the host; NULL: there is none.
agent_link_t *generation_fresh_link(const session_t *session, const pool_host_t *host);
// Forms the next generation if there are slots enough and the agents are there; else brings them
// up, to be called again, or gives up.
void generation_form(driver_t *driver);
// Tells ranks that hosts have come or gone, so that they leave the generation when they can.
void generation_tell_news(driver_t *driver);
void generation_tell(driver_t *driver, unsigned news);

#endif
