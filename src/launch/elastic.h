// SPDX-License-Identifier: Apache-2.0
//
// elastic.h - an elastic job: its agents, its ranks, its generations.
//
// elastic.c runs the loop and owns the job; generation.c forms the next generation of it. Private
// to these two, which share one thread.
#ifndef HVD_LAUNCH_ELASTIC_H
#define HVD_LAUNCH_ELASTIC_H

#include "launch/crew.h"
#include "launch/ending.h"
#include "launch/launch.h"
#include "launch/link.h"

#define GRACE_MS 5000

// An agent, and the ranks it has been told to start.
typedef struct squad {
    agent_link_t *link;
    crew_host_t *host;
    bool has_plan, is_stopping;
    uint64_t deadline_ns; // for its hello
} squad_t;

typedef struct worker {
    int id; // stays, while its rank may change
    squad_t *squad;
    rank_place_t place;
    bool is_leaving;   // told to go: how it ends does not matter
    uint32_t has_left; // the last generation it has left
    rank_end_t end;
    splitter_t splitters[N_STREAMS];
    int result_fd;
} worker_t;

typedef struct driver {
    const options_t *options;
    crew_t crew;
    discovery_t *discovery;
    job_info_t info;
    orders_t orders;
    hvd_rendezvous_t *server;
    uint8_t secret[SECRET_BYTES];
    char job_name[16];
    squad_t **squads;
    worker_t **workers;
    int n_squads, n_workers;
    int min_ranks, n_ranks; // n_ranks: of the generation that runs
    uint32_t generation, n_news;
    unsigned news; // told in this generation
    uint64_t form_at_ns, give_up_at_ns, ping_at_ns, late_at_ns;
    worker_t *cause; // the first that failed in this generation
    sink_t *sink;
    prefix_style_t style;
    output_files_t files;
    buf_t lines;
    int signal_fd, signo;
    bool is_finishing, is_stopping;
    int problem_code;
    char problem[HVD_TEXT_BYTES + 300];
} driver_t;

static inline bool worker_is_alive(const worker_t *worker)
{
    return !worker->end.has_ended && !worker->is_leaving;
}

static inline bool squad_is_running(const squad_t *squad)
{
    return squad->has_plan && squad->link->phase == LINK_READY;
}

// elastic.c
void elastic_stop_squad(squad_t *squad, int signo, int grace_ms);
// The first reason is the one that counts; stops everything.
void elastic_give_up(driver_t *driver, int code, const char *format, ...) PRINTF_LIKE(3, 4);

// generation.c
// Forms the next generation if there are slots enough and the agents are there; else brings them
// up, to be called again, or gives up.
void generation_form(driver_t *driver);
// Tells ranks that hosts have come or gone, so that they leave the generation when they can.
void generation_tell_news(driver_t *driver);

#endif
