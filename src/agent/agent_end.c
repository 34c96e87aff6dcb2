// SPDX-License-Identifier: Apache-2.0
//
// agent_end.c - how ranks of an agent end: by themselves, or because they are told to.
//
// Whoever ends is reaped, and its end reported with what it says about the fault. Ranks are stopped
// with a signal to their process groups, a while, then SIGKILL; what they leave behind, in their
// groups or as orphans that are now children of the agent, is killed in the end. Nothing here
// waits: the loop of agent.c has the clock.
#include "agent/internal.h"

#include "base/peer.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEFTOVERS_MS 1000
#define LOOK_US 1000

// It has ended by itself, and not as it should.
static bool has_failed(const agent_t *agent, const agent_rank_t *rank, int status)
{
    bool lacks_result = rank->result[0] != '\0' && access(rank->result, F_OK) != 0;
    return !agent->is_stopping && (status != 0 || lacks_result);
}

static void report_exit(agent_t *agent, const agent_rank_t *rank, int status)
{
    int signo = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    int blamed = -1;
    char what[BLAME_BYTES] = "";
    mailbox_read_blame(rank->blame, &blamed, what, sizeof what);
    agent_report(agent, &(frame_t){.kind = FRAME_EXITED,
                                   .exited = {.rank = rank->rank,
                                              .code = signo > 0 ? EXIT_BY_SIGNAL + signo
                                                                : WEXITSTATUS(status),
                                              .signo = signo,
                                              .was_oom = signo == SIGKILL && !agent->was_killed &&
                                                         oom_kills() > agent->oom_at_start,
                                              .was_halted = rank->was_halted,
                                              .blames = blamed,
                                              .what = what}});
}

void agent_signal_ranks(agent_t *agent, int signo)
{
    for (int i = 0; i < agent->n_ranks; i++) {
        if (agent->ranks[i].is_running) {
            kill_group(agent->ranks[i].child.pid, signo);
            kill_group(agent->ranks[i].child.pid, SIGCONT); // a stopped one could not obey
        }
    }
}

static void note_halted_ranks(agent_t *agent)
{
    for (int i = 0; i < agent->n_ranks; i++) {
        agent->ranks[i].was_halted =
            agent->ranks[i].is_running && process_is_stopped(agent->ranks[i].child.pid);
    }
}

void agent_stop_ranks(agent_t *agent, int signo, int grace_ms)
{
    uint64_t kill_at_ns = deadline_in_ms(grace_ms);
    if (!agent->is_stopping) {
        note_halted_ranks(agent);
    }
    if (signo == SIGKILL || grace_ms == 0) {
        agent->was_killed = true;
        agent_signal_ranks(agent, SIGKILL);
    } else if (!agent->is_stopping) {
        agent_signal_ranks(agent, signo);
    }
    agent->is_stopping = true;
    agent->kill_at_ns = MIN(agent->kill_at_ns, kill_at_ns);
}

static agent_rank_t *rank_of_pid(agent_t *agent, pid_t pid)
{
    for (int i = 0; i < agent->n_ranks; i++) {
        if (agent->ranks[i].is_running && agent->ranks[i].child.pid == pid) {
            return &agent->ranks[i];
        }
    }
    return NULL;
}

// Somebody has killed it: without one our own end would leave the secret, and the ranks.
static void renew_supervisor(agent_t *agent)
{
    err_t err;
    close(agent->supervisor.fd);
    agent->has_supervisor = supervisor_start(agent->directory, &agent->supervisor, &err) == HVD_OK;
    for (int i = 0; i < agent->n_ranks && agent->has_supervisor; i++) {
        if (agent->ranks[i].child.pid > 0) {
            supervisor_add(&agent->supervisor, agent->ranks[i].child.pid);
        }
    }
}

void agent_reap(agent_t *agent)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        agent_rank_t *rank = rank_of_pid(agent, pid);
        if (agent->has_supervisor && pid == agent->supervisor.pid) {
            renew_supervisor(agent);
        }
        if (rank == NULL) {
            continue; // an orphan
        }
        rank->is_running = false;
        rank->status = status;
        agent_watch_forget(rank);
        if (rank->result[0] != '\0') {
            rank->result_fd = open(rank->result, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        }
        if (group_is_empty(pid)) {
            supervisor_remove(&agent->supervisor, pid);
            rank->child.pid = 0; // the number may be given to somebody else
        }
    }
    agent_report_ends(agent);
}

// All at once where there is room, so that what happens later does not change what is reported.
void agent_report_ends(agent_t *agent)
{
    for (int i = 0; i < agent->n_ranks; i++) {
        agent_rank_t *rank = &agent->ranks[i];
        bool is_due = !rank->is_running && !rank->is_told;
        if (is_due && agent_forward_rest(agent, rank)) {
            rank->is_told = true;
            agent->n_running--;
            report_exit(agent, rank, rank->status);
            agent->has_failed |= has_failed(agent, rank, rank->status);
        }
    }
}

// How many there were.
static int kill_children(const agent_t *agent)
{
    char path[64], text[4096];
    int n_killed = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *file = fopen(path, "re");
    size_t n = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file != NULL) {
        fclose(file);
    }
    text[n] = '\0';
    for (char *at = text, *end; (n = strtoul(at, &end, 10)) > 0 && end != at; at = end) {
        if ((pid_t)n != agent->supervisor.pid) {
            kill((pid_t)n, SIGKILL);
            n_killed++;
        }
    }
    return n_killed;
}

// Processes that ranks have left behind: in their groups, or orphans that are now our children.
// Those of a killed one become our children in turn, wherever they are, so that is done until there
// are none.
void agent_kill_leftovers(agent_t *agent)
{
    uint64_t deadline_ns = deadline_in_ms(LEFTOVERS_MS);
    for (int i = 0; i < agent->n_ranks; i++) {
        kill_group(agent->ranks[i].child.pid, SIGKILL);
    }
    while (kill_children(agent) > 0 && clock_ns() < deadline_ns) {
        usleep(LOOK_US);
        agent_reap(agent);
    }
}
