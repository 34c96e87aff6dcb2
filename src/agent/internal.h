// SPDX-License-Identifier: Apache-2.0
//
// internal.h - the agent, and what it works with on its host.
//
// agent.c has its loop, agent_plan.c starts the ranks, agent_end.c ends them; supervisor.c removes
// what a killed agent would leave, mailbox.c carries notes to and from ranks. Private to agent/.
// One thread.
#ifndef HVD_AGENT_INTERNAL_H
#define HVD_AGENT_INTERNAL_H

#include "agent/agent.h"
#include "observe/observe.h"

#define AGENT_DIRECTORY "hvd-agent-" // the name begins with it

typedef struct supervisor {
    int fd;
    pid_t pid;
} supervisor_t;

// A small process that outlives the agent: when the agent is gone it kills the groups it was told
// of, and removes the directory.
hvd_status_t supervisor_start(const char *directory, supervisor_t *supervisor_p, err_t *err);
void supervisor_add(supervisor_t *supervisor, pid_t group);
void supervisor_remove(supervisor_t *supervisor, pid_t group);
// It acts, and has ended when this returns; its directory is gone even if it was killed before.
void supervisor_stop(supervisor_t *supervisor, const char *directory);

// Notes between the agent and ranks of an elastic job (mailbox.c). The descriptor is readable when
// there may be something for mailbox_read.
typedef struct mailbox_fns {
    void (*ready)(void *arg, int id, uint32_t generation); // it has left that generation
    void (*wants)(void *arg, int id, uint32_t what);       // WANTS_..., added up
} mailbox_fns_t;
hvd_status_t mailbox_watch(const char *directory, int *fd_p, err_t *err);
void mailbox_read(int fd, const char *directory, const mailbox_fns_t *fns, void *arg);
bool mailbox_write_place(const char *directory, int id, const uint8_t *env, size_t bytes);
bool mailbox_write_news(const char *directory, uint32_t number, uint32_t what);
// What the library notes when its rank fails: whose fault it is, and what that rank did (a line,
// terminated). False: nothing.
bool mailbox_read_blame(const char *path, int *rank_p, char *what, size_t bytes);

// --- The agent itself ----------------------------------------------------------------------------

typedef struct agent_rank {
    int rank;
    child_t child;                // fds -1 once at their end
    bool is_running, was_halted;  // halted: as by SIGSTOP, when it was to end
    bool is_told;                 // how it has ended, after all it has left
    int status, result_fd;        // once it has ended; result_fd -1: nothing more of its result
    char result[128], blame[128]; // paths; result "": not wanted
    live_rank_t live;             // its socket; name "": not known
    bool was_found;               // it was known
} agent_rank_t;

// While the launcher watches (watch.c).
typedef struct watch {
    int epoll_fd; // of the ranks that are asked; -1: nobody watches
    uint64_t period_ns, next_ns;
} agent_watch_t;

typedef struct agent {
    channel_t channel;
    int signal_fd, mailbox_fd; // mailbox: of an elastic job, else -1
    int life_fd;               // of who started this agent; -1: none
    supervisor_t supervisor;
    bool has_supervisor;
    char directory[96], program[4096];
    const char *launcher; // its address as seen from here, up to a blank; NULL: not known
    char dialled[64];     // the same, if we have dialled
    const char *keeps;    // --keep-env
    agent_rank_t *ranks;
    int n_ranks, n_running; // running: the launcher does not know yet that they have ended
    bool has_plan, is_stopping, was_killed, is_done;
    bool is_leaving;     // somebody wants the host back; the launcher knows
    bool has_failed;     // one of its ranks has
    bool stays, is_told; // told: how everything has ended
    int end_code;
    uint64_t kill_at_ns, close_at_ns;                   // NEVER_NS: not
    uint64_t silence_ns, heard_ns, ping_ns, ping_at_ns; // silence 0: any
    uint64_t looked_ns;                                 // what had come by then has been heard
    uint64_t oom_at_start;
    agent_watch_t watch;
} agent_t;

void agent_report(agent_t *agent, const frame_t *frame);
void agent_report_problem(agent_t *agent, int rank, int code, const char *text);
// Will the launcher take more? Memory is bounded, and the loop goes round often enough.
bool agent_has_room(const agent_t *agent);
// Output of a rank. agent_forward: one read; false: nothing more for now.
bool agent_forward(agent_t *agent, agent_rank_t *rank, int stream);
// Of one that has ended, with its result. False: there is no room, call it again.
bool agent_forward_rest(agent_t *agent, agent_rank_t *rank);
// Whether the process belongs to a rank; arg: the agent.
bool agent_has_process(void *arg, int pid);

void agent_watch(agent_t *agent, int period_ms); // 0: ends it
void agent_watch_forget(agent_rank_t *rank);     // it has ended
void agent_watch_hear(agent_t *agent);           // epoll_fd is readable
void agent_watch_on_time(agent_t *agent, uint64_t now_ns);
// FRAME_PLAN: starts the ranks, or reports why not.
void agent_start_plan(agent_t *agent, const frame_t *frame);
// The end of ranks: those that have ended are reaped, and reported when all they have left has been
// passed on; the others are sent a signal, and SIGKILL after grace_ms, by whoever watches
// kill_at_ns.
void agent_reap(agent_t *agent);
void agent_report_ends(agent_t *agent);
void agent_signal_ranks(agent_t *agent, int signo);
void agent_stop_ranks(agent_t *agent, int signo, int grace_ms);
void agent_kill_leftovers(agent_t *agent);

#endif
