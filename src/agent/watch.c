// SPDX-License-Identifier: Apache-2.0
//
// watch.c - how the ranks of this host do, passed on to the launcher while it watches.
//
// Once a period each rank is asked for its page (/watch) at its socket, without waiting: who has
// not answered when the period is over is reported as it is, with the state of its process. The
// socket of a rank is found in the kernel's list of names, once; it must belong to a process of
// ours. A report is bounded, and none is made while the launcher is slow to read. One thread, the
// agent's.
#define _GNU_SOURCE
#include "agent/internal.h"

#include "base/peer.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define MAX_FOUND 1024            // ranks of all jobs on this host
#define LEAST_MS 100              // of a period
#define BACKLOG_BYTES (256 * KIB) // unsent, from which on nothing is reported
#define PROC_BYTES 1024

// --- What the host says of a process -------------------------------------------------------------

static size_t read_proc(int pid, const char *file, char text[PROC_BYTES])
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, PROC_BYTES - 1) : 0;
    if (fd >= 0) {
        close(fd);
    }
    text[MAX(n, 0)] = '\0';
    return (size_t)MAX(n, 0);
}

// Memory and processor time of the process.
static void put_process(int pid, buf_t *out)
{
    char text[PROC_BYTES], state;
    unsigned long long user, system, resident;
    long tick = sysconf(_SC_CLK_TCK), page = sysconf(_SC_PAGESIZE);
    const char *behind_name = read_proc(pid, "stat", text) > 0 ? strrchr(text, ')') : NULL;
    if (behind_name != NULL &&
        sscanf(behind_name + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &state,
               &user, &system) == 3) {
        buf_printf(out, "process\t%c\ncpu\t%.2f\n", state,
                   (double)(user + system) / (double)MAX(tick, 1));
    }
    if (read_proc(pid, "statm", text) > 0 && sscanf(text, "%*u %llu", &resident) == 1) {
        buf_printf(out, "memory\t%llu\n", resident * (unsigned long long)page);
    }
}

// --- Asking --------------------------------------------------------------------------------------

static void report(agent_t *agent, const agent_rank_t *rank, const char *page)
{
    buf_t text = {0};
    size_t bytes = page != NULL ? strlen(page) : 0;
    buf_append(&text, page, bytes <= WATCH_BYTES ? bytes : 0);
    if (page == NULL) {
        buf_printf(&text, "state\t%s\n",
                   rank->live.name[0] != '\0' ? "no answer"
                   : rank->was_found          ? "left"
                                              : "starting");
    }
    put_process(rank->live.pid > 0 ? rank->live.pid : (int)rank->child.pid, &text);
    buf_append(&text, "", 1);
    if (!text.failed) {
        agent_report(agent,
                     &(frame_t){.kind = FRAME_SNAPSHOT,
                                .snapshot = {.rank = rank->rank, .text = (const char *)text.data}});
    }
    buf_free(&text);
}

void agent_watch_forget(agent_rank_t *rank)
{
    live_end(&rank->live);
    rank->live.name[0] = '\0';
    rank->live.pid = 0;
}

static void ask(agent_t *agent, int i)
{
    const live_question_t question = {"/watch", 0, agent_has_process, agent};
    agent_rank_t *rank = &agent->ranks[i];
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
    live_end(&rank->live);
    if (rank->live.name[0] == '\0' || !live_begin(&rank->live, &question)) {
        agent_watch_forget(rank);
        report(agent, rank, NULL);
    } else if (rank->live.fd >= 0 &&
               epoll_ctl(agent->watch.epoll_fd, EPOLL_CTL_ADD, rank->live.fd, &event) != 0) {
        live_end(&rank->live);
    }
}

// The rank to whose session the process belongs, if its socket is not known yet.
static agent_rank_t *nameless(agent_t *agent, int pid)
{
    for (int i = 0; i < agent->n_ranks; i++) {
        agent_rank_t *rank = &agent->ranks[i];
        if (rank->is_running && rank->live.name[0] == '\0' && getsid(pid) == rank->child.pid) {
            return rank;
        }
    }
    return NULL;
}

// Looks for the sockets of ranks that have begun since.
static void find_names(agent_t *agent)
{
    live_rank_t *found = calloc(MAX_FOUND, sizeof *found);
    int n = found != NULL ? live_find(found, MAX_FOUND) : 0;
    for (int i = 0; i < n; i++) {
        live_peer_t peer;
        int fd = live_connect(found[i].name);
        agent_rank_t *rank =
            fd >= 0 && live_peer_is(fd, found[i].uid, &peer) ? nameless(agent, peer.pid) : NULL;
        if (rank != NULL) {
            rank->live = found[i];
            rank->live.fd = -1;
            rank->live.pid = peer.pid;
            rank->was_found = true;
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    free(found);
}

static void ask_all(agent_t *agent)
{
    bool lacks_name = false;
    for (int i = 0; i < agent->n_ranks; i++) {
        agent_rank_t *rank = &agent->ranks[i];
        if (rank->is_running && rank->live.fd >= 0 && rank->live.name[0] != '\0') {
            report(agent, rank, NULL); // it has had its time
        }
        lacks_name |= rank->is_running && rank->live.name[0] == '\0';
    }
    if (lacks_name) {
        find_names(agent);
    }
    for (int i = 0; i < agent->n_ranks; i++) {
        if (agent->ranks[i].is_running) {
            ask(agent, i);
        }
    }
}

void agent_watch_hear(agent_t *agent)
{
    struct epoll_event events[64];
    int n = epoll_wait(agent->watch.epoll_fd, events, N_ELEMENTS(events), 0);
    for (int i = 0; i < n; i++) {
        agent_rank_t *rank = events[i].data.u32 < (uint32_t)agent->n_ranks
                                 ? &agent->ranks[events[i].data.u32]
                                 : NULL;
        if (rank == NULL || rank->live.fd < 0) {
            continue;
        }
        live_hear(&rank->live);
        if (rank->live.fd < 0) {
            report(agent, rank, rank->live.answer);
        }
    }
}

// --- When ----------------------------------------------------------------------------------------

void agent_watch_on_time(agent_t *agent, uint64_t now_ns)
{
    agent_watch_t *watch = &agent->watch;
    if (now_ns < watch->next_ns) {
        return;
    }
    watch->next_ns = now_ns + watch->period_ns;
    if (agent->channel.out.len - agent->channel.out_sent < BACKLOG_BYTES) {
        ask_all(agent);
    }
}

void agent_watch(agent_t *agent, int period_ms)
{
    agent_watch_t *watch = &agent->watch;
    if (watch->epoll_fd >= 0 && period_ms == 0) {
        for (int i = 0; i < agent->n_ranks; i++) {
            live_end(&agent->ranks[i].live);
        }
        close(watch->epoll_fd);
        *watch = (agent_watch_t){.epoll_fd = -1, .next_ns = NEVER_NS};
    } else if (period_ms > 0) {
        watch->epoll_fd = watch->epoll_fd >= 0 ? watch->epoll_fd : epoll_create1(EPOLL_CLOEXEC);
        watch->period_ns = (uint64_t)MAX(period_ms, LEAST_MS) * NS_PER_MS;
        watch->next_ns = watch->epoll_fd >= 0 ? 0 : NEVER_NS;
    }
}
