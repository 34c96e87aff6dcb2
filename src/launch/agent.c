// SPDX-License-Identifier: Apache-2.0
//
// agent.c - the launcher's hand on one host: starts the ranks there, passes on what they say, and
// makes sure that they end.
//
// `horovodrun --agent` takes commands on stdin and reports on stdout (frame.c): on this host one
// socket, on others an ssh session. It says hello, gets a plan, starts the ranks, forwards
// output in pieces, reports each end. It stops the ranks when told to, when it is terminated, and
// when the launcher is gone: SIGTERM, a while, SIGKILL, to whole process groups. Orphans of ranks
// become its children and are killed in the end. The secret lies in a file that only this user can
// read, in a directory that the keeper (keeper.c) removes whatever happens here, as it does with
// the sockets that killed ranks leave.
//
// One thread, one poll. No order is trusted beyond its length: what cannot be read ends the agent.
#define _GNU_SOURCE
#include "launch/agent.h"
#include "launch/launch.h"

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
#define LAST_WORDS_MS 500      // for output after the last process of a rank is dead
#define RESULT_CHUNK MIB
#define N_OWN_FDS 4 // polled besides the output of ranks: signals, orders, reports, notes

// --- Reports -------------------------------------------------------------------------------------

static void report_hello(agent_t *agent)
{
    size_t begin = frame_begin(&agent->channel, FRAME_HELLO);
    put_text(&agent->channel.out, hvd_version());
    frame_end(&agent->channel, begin);
}

void agent_report_problem(agent_t *agent, int rank, int code, const char *text)
{
    size_t begin = frame_begin(&agent->channel, FRAME_PROBLEM);
    put_u32(&agent->channel.out, (uint32_t)rank);
    put_u32(&agent->channel.out, (uint32_t)code);
    put_text(&agent->channel.out, text);
    frame_end(&agent->channel, begin);
}

void agent_report(agent_t *agent, uint8_t type, int rank, int value)
{
    size_t begin = frame_begin(&agent->channel, type);
    put_u32(&agent->channel.out, (uint32_t)rank);
    put_u32(&agent->channel.out, (uint32_t)value);
    frame_end(&agent->channel, begin);
}

static void report_exit(agent_t *agent, const agent_rank_t *rank, int status)
{
    int signo = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    int code = signo > 0 ? EXIT_BY_SIGNAL + signo : WEXITSTATUS(status);
    bool was_oom = signo == SIGKILL && !agent->was_killed && oom_kills() > agent->oom_at_start;
    size_t begin = frame_begin(&agent->channel, FRAME_EXITED);
    put_u32(&agent->channel.out, (uint32_t)rank->rank);
    put_u32(&agent->channel.out, (uint32_t)code);
    put_u32(&agent->channel.out, (uint32_t)signo);
    put_u8(&agent->channel.out, was_oom);
    put_u8(&agent->channel.out, rank->was_halted);
    frame_end(&agent->channel, begin);
}

// --- Output --------------------------------------------------------------------------------------

// One read; false: nothing more for now.
static bool forward_once(agent_t *agent, agent_rank_t *rank, int stream)
{
    buf_t *out = &agent->channel.out;
    size_t begin = frame_begin(&agent->channel, FRAME_OUTPUT);
    put_u32(out, (uint32_t)rank->rank);
    put_u8(out, (uint8_t)stream);
    if (!buf_reserve(out, OUTPUT_CHUNK)) {
        agent->channel.is_closed = true;
        return false;
    }
    ssize_t n = read(rank->child.fds[stream], out->data + out->len, OUTPUT_CHUNK);
    if (n > 0) {
        out->len += (size_t)n;
        frame_end(&agent->channel, begin);
        return true;
    }
    out->len = begin;
    if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        close(rank->child.fds[stream]);
        rank->child.fds[stream] = -1;
    }
    return n < 0 && errno == EINTR;
}

static void forward_all(agent_t *agent, agent_rank_t *rank)
{
    for (int stream = 0; stream < N_STREAMS; stream++) {
        while (rank->child.fds[stream] >= 0 && forward_once(agent, rank, stream)) {
        }
    }
}

static void forward_result(agent_t *agent, agent_rank_t *rank)
{
    int fd = rank->result[0] == '\0' ? -1 : open(rank->result, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    buf_t *out = &agent->channel.out;
    ssize_t n = fd >= 0;
    while (n > 0) {
        size_t begin = frame_begin(&agent->channel, FRAME_RESULT);
        put_u32(out, (uint32_t)rank->rank);
        if (!buf_reserve(out, RESULT_CHUNK)) {
            agent->channel.is_closed = true;
            break;
        }
        n = read(fd, out->data + out->len, RESULT_CHUNK);
        out->len = n > 0 ? out->len + (size_t)n : begin;
        if (n > 0) {
            frame_end(&agent->channel, begin);
        }
    }
    if (fd >= 0) {
        close(fd);
    }
}

// --- Ending --------------------------------------------------------------------------------------

static void signal_ranks(agent_t *agent, int signo)
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

static void stop_ranks(agent_t *agent, int signo, int grace_ms)
{
    uint64_t kill_at_ns = deadline_in_ms(grace_ms);
    if (!agent->is_stopping) {
        note_halted_ranks(agent);
    }
    if (signo == SIGKILL || grace_ms == 0) {
        agent->was_killed = true;
        signal_ranks(agent, SIGKILL);
    } else if (!agent->is_stopping) {
        signal_ranks(agent, signo);
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

static void reap(agent_t *agent)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        agent_rank_t *rank = rank_of_pid(agent, pid);
        if (rank == NULL) {
            continue; // an orphan
        }
        rank->is_running = false;
        agent->n_running--;
        forward_all(agent, rank);
        forward_result(agent, rank);
        report_exit(agent, rank, status);
        if (group_is_empty(pid)) {
            keeper_remove(&agent->keeper, pid);
            rank->child.pid = 0; // the number may be given to somebody else
        }
    }
}

// Processes that ranks have left behind: in their groups, or orphans that are now our children.
static void kill_leftovers(agent_t *agent)
{
    char path[64], text[4096];
    for (int i = 0; i < agent->n_ranks; i++) {
        kill_group(agent->ranks[i].child.pid, SIGKILL);
    }
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *file = fopen(path, "re");
    size_t n = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file != NULL) {
        fclose(file);
    }
    text[n] = '\0';
    for (char *at = text, *end; (n = strtoul(at, &end, 10)) > 0 && end != at; at = end) {
        if ((pid_t)n != agent->keeper.pid) {
            kill((pid_t)n, SIGKILL);
        }
    }
}

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
        kill_leftovers(agent);
        agent->close_at_ns = deadline_in_ms(LAST_WORDS_MS);
    }
    if (!has_open_output(agent) || clock_ns() >= agent->close_at_ns) {
        size_t begin = frame_begin(&agent->channel, FRAME_DONE);
        frame_end(&agent->channel, begin);
        agent->is_done = true;
    }
}

// --- The loop ------------------------------------------------------------------------------------

static void report_finding(void *arg, bool is_fault, const char *what, const char *found,
                           const char *fix)
{
    agent_t *agent = arg;
    size_t begin = frame_begin(&agent->channel, FRAME_FINDING);
    put_u8(&agent->channel.out, is_fault);
    put_text(&agent->channel.out, what);
    put_text(&agent->channel.out, found);
    put_text(&agent->channel.out, fix);
    frame_end(&agent->channel, begin);
}

static void on_ready(void *arg, int id, uint32_t generation)
{
    agent_report(arg, FRAME_READY, id, (int)generation);
}

static void on_place(agent_t *agent, reader_t *reader)
{
    int id = (int)get_u32(reader);
    size_t bytes = get_u32(reader);
    const uint8_t *env = get_bytes(reader, bytes);
    if (!reader->bad && !notes_write_place(agent->directory, id, env, bytes)) {
        agent_report_problem(
            agent, id, EXIT_INTERNAL,
            "cannot write the rank's new place into the agent's directory; is /dev/shm full?");
    }
}

static void on_news(agent_t *agent, reader_t *reader)
{
    uint32_t number = get_u32(reader), what = get_u32(reader);
    if (!reader->bad && !notes_write_news(agent->directory, number, what)) {
        agent_report_problem(
            agent, -1, EXIT_INTERNAL,
            "cannot write the notification into the agent's directory; is /dev/shm full?");
    }
}

static void on_frame(agent_t *agent, const frame_t *frame)
{
    reader_t reader = reader_of(frame->data, frame->bytes);
    agent->heard_ns = clock_ns();
    if (frame->type == FRAME_PLAN && !agent->has_plan) {
        agent_start_plan(agent, &reader);
    } else if (frame->type == FRAME_STOP) {
        int signo = (int)get_u32(&reader), grace_ms = (int)get_u32(&reader);
        if (!reader.bad && signo > 0 && signo < NSIG) {
            stop_ranks(agent, signo, grace_ms);
        }
        agent->is_done |= !agent->has_plan;
    } else if (frame->type == FRAME_PLACE && agent->notes_fd >= 0) {
        on_place(agent, &reader);
    } else if (frame->type == FRAME_NEWS && agent->notes_fd >= 0) {
        on_news(agent, &reader);
    } else if (frame->type == FRAME_EXAMINE) {
        const char *addresses = get_text(&reader);
        int port = (int)get_u32(&reader);
        int64_t time_s = (int64_t)get_u64(&reader);
        if (!reader.bad) {
            examine_host(addresses, port, time_s, report_finding, agent);
        }
        size_t begin = frame_begin(&agent->channel, FRAME_DONE);
        frame_end(&agent->channel, begin);
        agent->is_done = true;
    }
}

static void on_signal(agent_t *agent)
{
    struct signalfd_siginfo info;
    while (read(agent->signal_fd, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGCHLD) {
            reap(agent);
        } else {
            agent_report_problem(agent, -1, EXIT_BY_SIGNAL + (int)info.ssi_signo,
                                 "a signal asked the agent of this host to end");
            stop_ranks(agent, SIGTERM, ORPHANED_GRACE_MS);
        }
    }
}

static void on_time(agent_t *agent)
{
    uint64_t now_ns = clock_ns();
    if (now_ns >= agent->kill_at_ns) {
        agent->was_killed = true;
        signal_ranks(agent, SIGKILL);
        agent->kill_at_ns = now_ns + NS_PER_S;
    }
    if (now_ns >= agent->ping_at_ns) {
        size_t begin = frame_begin(&agent->channel, FRAME_PING);
        frame_end(&agent->channel, begin);
        agent->ping_at_ns = now_ns + agent->ping_ns;
    }
    bool is_silent = agent->silence_ns > 0 && now_ns - agent->heard_ns > agent->silence_ns;
    if (agent->channel.is_closed || is_silent) {
        agent->channel.is_closed = true;
        if (!agent->is_stopping) {
            stop_ranks(agent, SIGTERM, ORPHANED_GRACE_MS);
        }
        agent->kill_at_ns = MIN(agent->kill_at_ns, deadline_in_ms(ORPHANED_GRACE_MS));
    }
}

static int next_wait_ms(const agent_t *agent)
{
    uint64_t now_ns = clock_ns();
    uint64_t next_ns = MIN(agent->ping_at_ns, MIN(agent->kill_at_ns, agent->close_at_ns));
    return next_ns <= now_ns ? 0 : (int)MIN((next_ns - now_ns) / NS_PER_MS + 1, PING_MS);
}

static void poll_once(agent_t *agent, struct pollfd *polled)
{
    bool reads_ranks = agent->channel.out.len - agent->channel.out_sent < BACKLOG_BYTES;
    bool is_open = !agent->channel.is_closed;
    int n = N_OWN_FDS;
    polled[0] = (struct pollfd){.fd = agent->signal_fd, .events = POLLIN};
    polled[1] = (struct pollfd){.fd = is_open ? agent->channel.in_fd : -1, .events = POLLIN};
    polled[2] = (struct pollfd){
        .fd = channel_wants_write(&agent->channel) ? agent->channel.out_fd : -1, .events = POLLOUT};
    polled[3] = (struct pollfd){.fd = agent->notes_fd, .events = POLLIN};
    for (int i = 0; i < agent->n_ranks; i++) {
        for (int stream = 0; stream < N_STREAMS; stream++) {
            int fd = agent->ranks[i].child.fds[stream];
            polled[n++] = (struct pollfd){.fd = reads_ranks ? fd : -1, .events = POLLIN};
        }
    }
    if (poll(polled, (nfds_t)n, next_wait_ms(agent)) < 0) {
        return;
    }
    for (int i = 0; i < n - N_OWN_FDS; i++) {
        if (polled[N_OWN_FDS + i].revents != 0) {
            forward_once(agent, &agent->ranks[i / N_STREAMS], i % N_STREAMS);
        }
    }
    if (polled[3].revents != 0) {
        notes_read(agent->notes_fd, agent->directory, on_ready, agent);
    }
    if (polled[0].revents != 0) {
        on_signal(agent);
    }
    if (polled[1].revents != 0) {
        frame_t frame;
        channel_receive(&agent->channel);
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
    return agent->is_done && !channel_wants_write(&agent->channel);
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
        if (agent->has_plan && agent->n_running == 0 && !agent->is_done) {
            finish(agent);
        }
    }
    free(polled);
    return 0;
}

int agent_main(void)
{
    agent_t agent = {.notes_fd = -1,
                     .kill_at_ns = NEVER_NS,
                     .close_at_ns = NEVER_NS,
                     .heard_ns = clock_ns(),
                     .ping_ns = PING_MS * NS_PER_MS,
                     .keeper = {.fd = -1, .pid = -1}};
    agent.signal_fd = signals_open(SIG_SETMASK, (const int[]){SIGCHLD, SIGTERM, SIGINT, SIGHUP, 0});
    agent.ping_at_ns = deadline_in_ms(PING_MS);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_DUMPABLE, 0); // the secret passes through this memory
    if (!own_path(agent.program, sizeof agent.program)) {
        snprintf(agent.program, sizeof agent.program, "%s", PROGRAM);
    }
    if (agent.signal_fd < 0 || !set_nonblocking(STDIN_FILENO) || !set_nonblocking(STDOUT_FILENO)) {
        say("the agent takes commands on stdin and reports on stdout; %s starts it", PROGRAM);
        return EXIT_INTERNAL;
    }
    // Ranks must not inherit the channel, whatever they do with their own descriptors.
    int in = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3),
        out = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(nothing, STDOUT_FILENO);
    close(nothing);
    channel_open(&agent.channel, in, out);
    report_hello(&agent);
    channel_send(&agent.channel);
    int code = serve(&agent);
    kill_leftovers(&agent);
    if (agent.has_keeper) {
        keeper_stop(&agent.keeper);
    }
    channel_close(&agent.channel);
    free(agent.ranks);
    return code;
}
