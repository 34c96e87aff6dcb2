// SPDX-License-Identifier: Apache-2.0
//
// agent.c - the launcher's hand on one host: starts the ranks there, passes on what they say, and
// makes sure that they end.
//
// `horovodrun --agent` takes commands on stdin and reports on stdout (frame.c), which are a socket
// on this host and an ssh session on others, or both over a channel that it has opened itself
// (--dial). It says hello, gets a plan, starts the ranks, forwards
// output in pieces, reports each end. It stops the ranks when told to, when it is terminated, and
// when the launcher is gone: SIGTERM, a while, SIGKILL, to whole process groups. Orphans of ranks
// become its children and are killed in the end. The secret lies in a file that only this user can
// read, in a directory that the supervisor (supervisor.c) removes whatever happens here, as it does
// with the sockets that killed ranks leave.
//
// One thread, one poll. No order is trusted beyond its length: what cannot be read ends the agent.
#define _GNU_SOURCE
#include "agent/internal.h"

#include "base/peer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define BACKLOG_BYTES (4 * MIB) // unsent output above which ranks are not read
#define PING_MS 5000
#define ORPHANED_GRACE_MS 1000 // the launcher is gone: ranks end within two seconds
#define MAX_FOUND 1024         // ranks of all jobs on this host
#define WHERE_MS 1500          // to say where a rank is; one that keeps the GIL needs a second
#define LAST_WORDS_MS 500      // for output after the last process of a rank is dead
#define N_OWN_FDS 6 // besides the output of ranks: signals, orders, reports, mailbox, life, watch

// --- Reports -------------------------------------------------------------------------------------

void agent_report(agent_t *agent, const frame_t *frame)
{
    channel_put(&agent->channel, frame);
}

void agent_report_problem(agent_t *agent, int rank, int code, const char *text)
{
    agent_report(agent, &(frame_t){.kind = FRAME_PROBLEM,
                                   .problem = {.rank = rank, .code = code, .text = text}});
}

static void report_done(agent_t *agent)
{
    agent_report(agent, &(frame_t){.kind = FRAME_DONE});
    agent->is_done = true;
}

bool agent_has_room(const agent_t *agent)
{
    return agent->channel.out.len - agent->channel.out_sent < BACKLOG_BYTES;
}

// --- Ending --------------------------------------------------------------------------------------

static bool has_open_output(const agent_t *agent)
{
    for (int i = 0; i < agent->n_ranks; i++) {
        if (agent->ranks[i].child.fds[0] >= 0 || agent->ranks[i].child.fds[1] >= 0) {
            return true;
        }
    }
    return false;
}

// All ranks have ended: clean up, listen to last words, say that it is done.
static void finish(agent_t *agent)
{
    if (agent->close_at_ns == NEVER_NS) {
        agent_kill_leftovers(agent);
        agent->close_at_ns = deadline_in_ms(LAST_WORDS_MS);
    }
    if (!has_open_output(agent) || clock_ns() >= agent->close_at_ns) {
        report_done(agent);
    }
}

// --- The loop ------------------------------------------------------------------------------------

static void report_finding(void *arg, const finding_t *finding)
{
    agent_report(arg, &(frame_t){.kind = FRAME_FINDING, .finding = *finding});
}

static agent_rank_t *rank_of_id(agent_t *agent, int id)
{
    for (int i = 0; i < agent->n_ranks; i++) {
        if (agent->ranks[i].rank == id) {
            return &agent->ranks[i];
        }
    }
    return NULL;
}

// Whoever it has noted is blamed for being lost, unless that one did something: then it will end.
static void on_ready(void *arg, int id, uint32_t generation)
{
    const agent_rank_t *rank = rank_of_id(arg, id);
    int blamed = -1;
    char what[BLAME_BYTES] = "";
    if (rank == NULL || !mailbox_read_blame(rank->blame, &blamed, what, sizeof what) ||
        what[0] != '\0') {
        blamed = -1;
    }
    agent_report(
        arg,
        &(frame_t){.kind = FRAME_READY,
                   .ready = {.rank = id, .generation = (int32_t)generation, .blames = blamed}});
}

static void on_wants(void *arg, int id, uint32_t what)
{
    agent_report(arg,
                 &(frame_t){.kind = FRAME_WANTS, .wants = {.rank = id, .what = (int32_t)what}});
}

static const mailbox_fns_t mailbox_fns = {.ready = on_ready, .wants = on_wants};

// A rank is a session of its own; what shows its state may be a child of what we started.
bool agent_has_process(void *arg, int pid)
{
    const agent_t *agent = arg;
    for (int i = 0; i < agent->n_ranks; i++) {
        if (agent->ranks[i].is_running && getsid(pid) == agent->ranks[i].child.pid) {
            return true;
        }
    }
    return false;
}

static void tell_where_ranks_are(agent_t *agent)
{
    live_rank_t *found = calloc(MAX_FOUND, sizeof *found);
    int n = found != NULL ? live_find(found, MAX_FOUND) : 0;
    live_question_t question = {"/where", WHERE_MS, agent_has_process, agent};
    n = n > 0 ? live_ask(found, n, &question) : 0;
    for (int i = 0; i < n; i++) {
        if (found[i].answer != NULL) {
            found[i].answer[strcspn(found[i].answer, "\n")] = '\0';
            agent_report(agent,
                         &(frame_t){.kind = FRAME_WHERE,
                                    .where = {.rank = found[i].rank, .text = found[i].answer}});
        }
    }
    live_forget(found, n);
    free(found);
}

static void stop_rank(agent_rank_t *rank, int signo)
{
    if (rank != NULL && rank->is_running) {
        rank->was_halted = process_is_stopped(rank->child.pid);
        kill_group(rank->child.pid, signo);
    }
}

static void on_stop(agent_t *agent, int id, int signo, int grace_ms)
{
    bool is_valid = signo > 0 && signo < NSIG;
    if (is_valid && id >= 0) {
        stop_rank(rank_of_id(agent, id), signo);
    } else if (is_valid) {
        agent_stop_ranks(agent, signo, grace_ms);
    }
    agent->is_done |= !agent->has_plan;
}

static void on_frame(agent_t *agent, const frame_t *frame)
{
    bool is_elastic = agent->mailbox_fd >= 0, is_noted = true;
    switch (frame->kind) {
    case FRAME_PLAN:
        if (!agent->has_plan) {
            agent_start_plan(agent, frame);
        }
        break;
    case FRAME_WHERE:
        tell_where_ranks_are(agent);
        break;
    case FRAME_STOP:
        on_stop(agent, frame->stop.rank, frame->stop.signo, frame->stop.grace_ms);
        break;
    case FRAME_PLACE:
        is_noted = !is_elastic || mailbox_write_place(agent->directory, frame->place.rank,
                                                      frame->place.env.data, frame->place.env.len);
        break;
    case FRAME_NEWS:
        is_noted = !is_elastic || mailbox_write_news(agent->directory, (uint32_t)frame->news.number,
                                                     (uint32_t)frame->news.what);
        break;
    case FRAME_WATCH:
        agent_watch(agent, frame->watch.period_ms);
        break;
    case FRAME_EXAMINE:
        examine_host(frame, report_finding, agent);
        report_done(agent);
        break;
    case FRAME_END:
        agent->end_code = frame->end.code;
        agent->is_told = agent->is_done = true;
        break;
    default:
        break;
    }
    if (!is_noted) {
        agent_report_problem(agent, frame->kind == FRAME_PLACE ? frame->place.rank : -1,
                             EXIT_INTERNAL,
                             "cannot write to the agent's directory; is /dev/shm full?");
    }
}

// Who wants the host back says so in advance: ranks of an elastic job leave it after their step.
// Asked once more, they end at once.
static bool hand_over(agent_t *agent, int signo)
{
    bool can = signo == SIGTERM && agent->mailbox_fd >= 0 && agent->n_running > 0 &&
               !agent->is_stopping && !agent->is_leaving && !agent->channel.is_closed;
    if (can) {
        agent->is_leaving = true;
        agent_report(agent, &(frame_t){.kind = FRAME_LEAVING});
    }
    return can;
}

static void on_signal(agent_t *agent)
{
    struct signalfd_siginfo info;
    while (read(agent->signal_fd, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGCHLD) {
            agent_reap(agent);
        } else if (!hand_over(agent, (int)info.ssi_signo)) {
            agent_report_problem(agent, -1, EXIT_BY_SIGNAL + (int)info.ssi_signo,
                                 "a signal asked the agent of this host to end");
            agent_stop_ranks(agent, SIGTERM, ORPHANED_GRACE_MS);
        }
    }
}

static void on_time(agent_t *agent)
{
    uint64_t now_ns = clock_ns();
    if (now_ns >= agent->kill_at_ns) {
        agent->was_killed = true;
        agent_signal_ranks(agent, SIGKILL);
        agent->kill_at_ns = now_ns + NS_PER_S;
    }
    if (now_ns >= agent->ping_at_ns) {
        agent_report(agent, &(frame_t){.kind = FRAME_PING});
        agent->ping_at_ns = now_ns + agent->ping_ns;
    }
    agent_watch_on_time(agent, now_ns);
    bool is_silent = agent->silence_ns > 0 && agent->looked_ns > agent->heard_ns &&
                     agent->looked_ns - agent->heard_ns > agent->silence_ns;
    if (agent->channel.is_closed || is_silent) {
        agent->channel.is_closed = true;
        if (!agent->is_stopping) {
            agent_stop_ranks(agent, SIGTERM, ORPHANED_GRACE_MS);
        }
        agent->kill_at_ns = MIN(agent->kill_at_ns, deadline_in_ms(ORPHANED_GRACE_MS));
    }
}

static int next_wait_ms(const agent_t *agent)
{
    uint64_t now_ns = clock_ns();
    uint64_t next_ns = MIN(agent->ping_at_ns, MIN(agent->kill_at_ns, agent->close_at_ns));
    next_ns = MIN(next_ns, agent->watch.next_ns);
    return next_ns <= now_ns ? 0 : (int)MIN((next_ns - now_ns) / NS_PER_MS + 1, PING_MS);
}

static void poll_once(agent_t *agent, struct pollfd *polled)
{
    bool reads_ranks = agent_has_room(agent);
    bool is_open = !agent->channel.is_closed;
    int n = N_OWN_FDS;
    polled[0] = (struct pollfd){.fd = agent->signal_fd, .events = POLLIN};
    polled[1] = (struct pollfd){.fd = is_open ? agent->channel.in_fd : -1, .events = POLLIN};
    polled[2] = (struct pollfd){
        .fd = channel_wants_write(&agent->channel) ? agent->channel.out_fd : -1, .events = POLLOUT};
    polled[3] = (struct pollfd){.fd = agent->mailbox_fd, .events = POLLIN};
    polled[4] = (struct pollfd){.fd = is_open ? agent->life_fd : -1, .events = POLLIN};
    polled[5] = (struct pollfd){.fd = agent->watch.epoll_fd, .events = POLLIN};
    for (int i = 0; i < agent->n_ranks; i++) {
        for (int stream = 0; stream < N_STREAMS; stream++) {
            int fd = agent->ranks[i].child.fds[stream];
            polled[n++] = (struct pollfd){.fd = reads_ranks ? fd : -1, .events = POLLIN};
        }
    }
    bool has_more = channel_has_more(&agent->channel);
    agent->looked_ns = clock_ns();
    if (poll(polled, (nfds_t)n, has_more ? 0 : next_wait_ms(agent)) < 0) {
        return;
    }
    for (int i = 0; i < n - N_OWN_FDS; i++) {
        if (polled[N_OWN_FDS + i].revents != 0) {
            agent_forward(agent, &agent->ranks[i / N_STREAMS], i % N_STREAMS);
        }
    }
    if (polled[3].revents != 0) {
        mailbox_read(agent->mailbox_fd, agent->directory, &mailbox_fns, agent);
    }
    if (polled[5].revents != 0) {
        agent_watch_hear(agent);
    }
    if (polled[0].revents != 0) {
        on_signal(agent);
    }
    if (polled[4].revents != 0) {
        agent->channel.is_closed = true; // who started this agent is gone
        return;
    }
    if (polled[1].revents != 0 || has_more) {
        frame_t frame;
        if (channel_receive(&agent->channel)) {
            agent->heard_ns = clock_ns(); // part of a long frame is a sign of life too
        }
        while (channel_next(&agent->channel, &frame)) {
            on_frame(agent, &frame);
        }
    }
    channel_send(&agent->channel);
}

// Nobody to report to, or nothing more to report.
static bool is_over(const agent_t *agent)
{
    if (agent->channel.is_closed) {
        return agent->n_running == 0;
    }
    return agent->is_done && (!agent->stays || agent->is_told) &&
           !channel_wants_write(&agent->channel);
}

static int serve(agent_t *agent)
{
    struct pollfd *polled = NULL;
    int n_polled = 0;
    while (!is_over(agent)) {
        if (N_OWN_FDS + agent->n_ranks * N_STREAMS > n_polled || polled == NULL) {
            n_polled = N_OWN_FDS + agent->n_ranks * N_STREAMS;
            struct pollfd *larger = realloc(polled, (size_t)n_polled * sizeof *polled);
            if (larger == NULL) {
                break;
            }
            polled = larger;
        }
        poll_once(agent, polled);
        on_time(agent);
        agent_report_ends(agent);
        if (agent->has_plan && agent->n_running == 0 && !agent->is_done) {
            finish(agent);
        }
    }
    free(polled);
    return 0;
}

// Commands and reports on stdin and stdout, which ranks must not inherit, whatever they do with
// their own descriptors.
static int open_streams(agent_t *agent)
{
    if (!set_nonblocking(STDIN_FILENO) || !set_nonblocking(STDOUT_FILENO)) {
        say("the agent takes commands on stdin and reports on stdout; %s starts it", PROGRAM);
        return EXIT_INTERNAL;
    }
    int in = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3),
        out = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(nothing, STDOUT_FILENO);
    close(nothing);
    channel_open(&agent->channel, in, out);
    agent->launcher = environment("SSH_CONNECTION");
    return 0;
}

// Or over a channel that this agent has opened itself.
static int open_dialled(agent_t *agent, const options_t *options)
{
    signal(SIGPIPE, SIG_IGN);
    int code = dial_launcher(options, &agent->channel);
    if (code == 0) {
        agent->launcher = peer_address(agent->channel.in_fd, agent->dialled, sizeof agent->dialled);
        agent->silence_ns = (uint64_t)(options->peer_timeout * 1e9);
        agent->ping_ns = MIN(agent->ping_ns, agent->silence_ns / 4);
    }
    return code;
}

static void report_hello(agent_t *agent, const options_t *options)
{
    char name[256] = "";
    bool has_dialled = options->dial[0] != '\0';
    gethostname(name, sizeof name - 1);
    agent_report(agent,
                 &(frame_t){.kind = FRAME_HELLO,
                            .hello = {.version = hvd_version(),
                                      .host = !has_dialled                     ? ""
                                              : options->agent_name[0] != '\0' ? options->agent_name
                                                                               : name,
                                      .slot = (int32_t)options->agent_slot,
                                      .about = options->agent_about}});
}

static int run(const options_t *options, bool stays, bool *is_told_p)
{
    agent_t agent = {.mailbox_fd = -1,
                     .stays = stays,
                     .life_fd = (int)options->life_fd,
                     .keeps = options->keep_env,
                     .kill_at_ns = NEVER_NS,
                     .close_at_ns = NEVER_NS,
                     .ping_ns = PING_MS * NS_PER_MS,
                     .watch = {.epoll_fd = -1, .next_ns = NEVER_NS},
                     .supervisor = {.fd = -1, .pid = -1}};
    prctl(PR_SET_DUMPABLE, 0); // the secret passes through this memory
    int code = options->dial[0] != '\0' ? open_dialled(&agent, options) : open_streams(&agent);
    if (code != 0) {
        return code;
    }
    agent.signal_fd = signals_open(SIG_SETMASK, (const int[]){SIGCHLD, SIGTERM, SIGINT, SIGHUP, 0});
    agent.heard_ns = clock_ns();
    agent.ping_at_ns = clock_ns() + agent.ping_ns;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (!own_path(agent.program, sizeof agent.program)) {
        snprintf(agent.program, sizeof agent.program, "%s", PROGRAM);
    }
    report_hello(&agent, options);
    channel_send(&agent.channel);
    code = agent.signal_fd < 0 ? EXIT_INTERNAL : serve(&agent);
    agent_kill_leftovers(&agent);
    if (agent.has_supervisor) {
        supervisor_stop(&agent.supervisor, agent.directory);
    }
    agent_watch(&agent, 0);
    channel_close(&agent.channel);
    free(agent.ranks);
    *is_told_p = agent.is_told;
    bool is_cut_short = agent.has_failed || (agent.is_leaving && agent.is_stopping);
    // Whoever holds its life line is told.
    return agent.is_told                                     ? agent.end_code
           : code == 0 && is_cut_short && agent.life_fd >= 0 ? EXIT_FAILURE
                                                             : code;
}

int agent_main(const options_t *options)
{
    bool is_told;
    return run(options, false, &is_told);
}

int agent_stay(const options_t *options, bool *is_told_p)
{
    *is_told_p = false;
    return run(options, true, is_told_p);
}
