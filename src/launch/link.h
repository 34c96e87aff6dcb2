// SPDX-License-Identifier: Apache-2.0
//
// link.h - the launcher's side of the agents: one link a host, from starting it to its hello.
//
// Shared by job.c and doctor.c; private to launch/. One thread.
#ifndef HVD_LAUNCH_LINK_H
#define HVD_LAUNCH_LINK_H

#include "launch/frame.h"
#include "launch/plan.h"
#include "launch/process.h"

#define SSH_SAID_BYTES 2048

typedef enum link_phase {
    LINK_WAITING, // to be started, or started again
    LINK_CONNECTING,
    LINK_READY, // has said hello
    LINK_DONE,  // nothing is left there
    LINK_FAILED,
} link_phase_t;

typedef struct agent_link {
    const host_t *host;
    link_phase_t phase;
    child_t process;
    bool has_process;
    channel_t channel;
    int attempts;
    uint64_t started_ns, retry_at_ns, heard_ns;
    char said[SSH_SAID_BYTES];    // end of what ssh printed
    int exit_code;                // of the last attempt; -1: none, or by a signal
    char problem[HVD_TEXT_BYTES]; // when failed
    bool is_late;                 // failed because of --start-timeout
} agent_link_t;

agent_link_t *links_new(const hosts_t *hosts, int n_hosts);
// Starts all agents, at most a bounded number at a time, until each is ready or has failed, or the
// deadline. Returns early when signal_fd becomes readable, or at the first failure if asked to.
void links_gather(agent_link_t *links, int n, const options_t *options, uint64_t deadline_ns,
                  int signal_fd, bool until_failure, sink_t *sink);
// What its ssh prints is kept, and passed on where the user asked for it.
void link_read_errors(agent_link_t *link, bool is_verbose, sink_t *sink);
void link_close(agent_link_t *link); // ends its process
void links_free(agent_link_t *links, int n);
// One step of links_gather that waits for nothing; true: each is ready or has failed.
bool links_advance(agent_link_t *links, int n, const options_t *options, uint64_t deadline_ns,
                   sink_t *sink);

// --- Orders to agents (order.c) ------------------------------------------------------------------

// What all agents of a job are told alike.
typedef struct orders {
    const options_t *options;
    bool is_elastic;
    char *directory;
    buf_t env, payload;
} orders_t;

hvd_status_t orders_make(const options_t *options, const job_info_t *job, orders_t *orders_p,
                         err_t *err);
void orders_free(orders_t *orders);
// The plan of a host: begin, each of its n ranks, end.
size_t order_plan_begin(agent_link_t *link, const orders_t *orders, const uint8_t *secret,
                        uint32_t n_ranks);
void order_plan_rank(agent_link_t *link, int id, const buf_t *env);
void order_end(agent_link_t *link, size_t begin);
void order_stop(agent_link_t *link, int signo, int grace_ms);
void order_ping(agent_link_t *link);
// Elastic jobs: the place of a rank in the next generation; that hosts have come or gone.
void order_place(agent_link_t *link, int id, const buf_t *env);
void order_news(agent_link_t *link, uint32_t number, unsigned what);

#endif
