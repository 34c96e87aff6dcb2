// SPDX-License-Identifier: Apache-2.0
//
// crew.h - the hosts of an elastic job: which there are, which may be used, how many ranks each
// has.
//
// crew.c decides and does nothing else; discovery.c asks for the hosts; elastic.c acts. Private to
// launch/. The crew belongs to the thread of elastic.c.
#ifndef HVD_LAUNCH_CREW_H
#define HVD_LAUNCH_CREW_H

#include "launch/plan.h"

typedef struct crew_host {
    host_t host;              // stays where it is
    bool is_there;            // named by the last discovery
    int n_failures;           // of its ranks, or of reaching it
    uint64_t barred_until_ns; // 0: not barred; NEVER_NS: for good
    int n_alive;              // ranks of ours that go on there; kept by elastic.c
    int quota;                // ranks it has in the next generation: crew_share
} crew_host_t;

typedef struct crew {
    crew_host_t **hosts; // in order of appearance
    crew_host_t **order; // after crew_share: those with a quota, in order of their ranks
    int n_hosts, n_order;
    double cooldown_min_s, cooldown_max_s; // 0: failed hosts are barred for good
} crew_t;

enum { NEWS_REMOVED = 1, NEWS_ADDED = 2 }; // as Python's HostUpdateResult has it

hvd_status_t crew_read_cooldown(crew_t *crew, const char *text, err_t *err); // "MIN MAX", or ""
// Takes the names over. false: no memory.
bool crew_update(crew_t *crew, const hosts_t *found);
crew_host_t *crew_host_of(const crew_t *crew, const host_t *host); // one of its own
void crew_bar(crew_t *crew, crew_host_t *host, uint64_t now_ns, uint32_t random);
// Gives places to hosts: first to those that have ranks, in order, at most max_ranks (0: any
// number); the sum.
int crew_share(crew_t *crew, int max_ranks, uint64_t now_ns);
unsigned crew_news(const crew_t *crew); // after crew_share: how that differs from what runs
bool crew_may_grow(const crew_t *crew); // a barred host will be welcome again
void crew_free(crew_t *crew);

// A thread that asks for the hosts once a second.
typedef struct discovery discovery_t;

// Asks once, and starts the thread if there is a script to ask.
hvd_status_t discovery_start(const options_t *options, discovery_t **discovery_p, err_t *err);
// true: another list than before; the caller frees it.
bool discovery_take(discovery_t *discovery, hosts_t *hosts_p);
bool discovery_goes_on(const discovery_t *discovery); // hosts may still come
void discovery_stop(discovery_t *discovery);

#endif
