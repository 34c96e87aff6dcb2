// SPDX-License-Identifier: Apache-2.0
//
// agent.h - the agent of a host, and what it works with there.
//
// agent.c has its loop, agent_plan.c starts the ranks; keeper.c removes what a killed agent would
// leave, notes.c carries notes to ranks of an elastic job, oom.c and doctor.c look at the host. One
// thread.
#ifndef HVD_LAUNCH_AGENT_H
#define HVD_LAUNCH_AGENT_H

#include "launch/frame.h"
#include "launch/options.h"
#include "launch/process.h"

int agent_main(const options_t *options);

#define AGENT_DIRECTORY "hvd-agent-" // the name begins with it

typedef struct keeper {
    int fd;
    pid_t pid;
} keeper_t;

// A small process that outlives the agent: when the agent is gone it kills the groups it was told
// of, and removes the directory.
hvd_status_t keeper_start(const char *directory, keeper_t *keeper_p, err_t *err);
void keeper_add(keeper_t *keeper, pid_t group);
void keeper_remove(keeper_t *keeper, pid_t group);
void keeper_stop(keeper_t *keeper); // it acts, and has ended when this returns

// Notes between the agent and ranks of an elastic job (notes.c). The descriptor is readable when
// there may be something for notes_read.
typedef void (*ready_fn)(void *arg, int id, uint32_t generation);
hvd_status_t notes_watch(const char *directory, int *fd_p, err_t *err);
void notes_read(int fd, const char *directory, ready_fn ready, void *arg);
bool notes_write_place(const char *directory, int id, const uint8_t *env, size_t bytes);
bool notes_write_news(const char *directory, uint32_t number, uint32_t what);
bool notes_read_number(const char *path, uint32_t *number_p); // false: there is none

// Checks of the doctor on this host; a finding for each through report().
typedef void (*finding_fn)(void *arg, bool is_fault, const char *what, const char *found,
                           const char *fix);
uint64_t oom_kills(void); // by the kernel, on this host or in this group, so far (oom.c)
void examine_host(const char *addresses, int port, int64_t launcher_time_s, finding_fn report,
                  void *arg);

// --- The agent itself: private to agent.c and agent_plan.c ---------------------------------------

typedef struct agent_rank {
    int rank;
    child_t child;                // fds -1 once at their end
    bool is_running, was_halted;  // halted: as by SIGSTOP, when it was to end
    char result[128], blame[128]; // paths; result "": not wanted
} agent_rank_t;

typedef struct agent {
    channel_t channel;
    int signal_fd, notes_fd; // notes: of an elastic job, else -1
    int life_fd;             // of who started this agent; -1: none
    keeper_t keeper;
    bool has_keeper;
    char directory[96], program[4096];
    const char *launcher; // its address as seen from here, up to a blank; NULL: not known
    char dialled[64];     // the same, if we have dialled
    agent_rank_t *ranks;
    int n_ranks, n_running;
    bool has_plan, is_stopping, was_killed, is_done;
    bool has_failed; // one of its ranks has
    uint64_t kill_at_ns, close_at_ns;                   // NEVER_NS: not
    uint64_t silence_ns, heard_ns, ping_ns, ping_at_ns; // silence 0: any
    uint64_t oom_at_start;
} agent_t;

void agent_report(agent_t *agent, const frame_t *frame);
void agent_report_problem(agent_t *agent, int rank, int code, const char *text);
// FRAME_PLAN: starts the ranks, or reports why not.
void agent_start_plan(agent_t *agent, const frame_t *frame);

#endif
