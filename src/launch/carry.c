// SPDX-License-Identifier: Apache-2.0
//
// carry.c - agents that have dialled as hosts of another launcher: commands are carried to them.
//
// mpirun reaches hosts through a remote shell. Where nothing but dialled agents leads to a host,
// `horovodrun --shell HOST COMMAND` takes its place (shell_main): it dials the session that awaits
// the agents (--carry-commands), as they do, and asks for its command by a slot that no agent has.
// The first agent of that host that is free runs it; what it prints and how it ends is passed on.
// An errand for which no agent is free waits for one, up to --start-timeout; this machine's own
// agent is started when it is first needed.
//
// There are two kinds of such sessions. One takes agents as they come and carries what is asked
// for until it is told to end: mpirun may be run as often as one likes. The other has -np agents,
// says on --events-fd which host has which when all have come (`hosts A=0,2 B=1`; gather.c has the
// other events), and ends when one is lost. The session's thread.
#define _GNU_SOURCE
#include "launch/gather.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define LOOK_MS 1000
#define SHELL_SLOT (-1)

struct errand {
    agent_link_t *shell; // who asks; NULL: nobody any more
    worker_t *worker;    // NULL: it has no agent yet
    char *command;
    uint64_t deadline_ns; // for an agent
};

// --- Errands -------------------------------------------------------------------------------------

bool carry_is_asked(const introduction_t *introduction)
{
    return introduction->slot == SHELL_SLOT;
}

static void answer(const errand_t *errand, const frame_t *frame)
{
    if (errand->shell != NULL && !errand->shell->channel.is_closed) {
        channel_put(&errand->shell->channel, frame);
        channel_send(&errand->shell->channel);
    }
}

static void close_errand(errand_t *errand, int code)
{
    answer(errand, &(frame_t){.kind = FRAME_EXITED, .exited = {.code = code}});
    errand->shell = NULL;
}

static void refuse(errand_t *errand, const char *format, ...) PRINTF_LIKE(2, 3);

static void refuse(errand_t *errand, const char *format, ...)
{
    char text[HVD_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    answer(errand,
           &(frame_t){.kind = FRAME_OUTPUT,
                      .output = {.stream = STREAM_STDERR,
                                 .data = {.data = (const uint8_t *)text, .len = strlen(text)}}});
    close_errand(errand, EXIT_UNREACHABLE);
}

static errand_t *errand_of(const session_t *session, const worker_t *worker)
{
    for (int i = 0; i < session->n_errands; i++) {
        if (session->errands[i]->worker == worker) {
            return session->errands[i];
        }
    }
    return NULL;
}

void carry_take(session_t *session, const channel_t *channel, const introduction_t *introduction)
{
    agent_link_t *shell = session_admit(session, channel, introduction);
    errand_t *errand = shell != NULL ? calloc(1, sizeof *errand) : NULL;
    if (errand != NULL) {
        *errand = (errand_t){.shell = shell,
                             .command = strdup(introduction->about),
                             .deadline_ns =
                                 deadline_in_ms((int64_t)(session->options->start_timeout * 1000))};
    }
    if (errand == NULL || errand->command == NULL ||
        !session_append(&session->errands, &session->n_errands, errand)) {
        free(errand != NULL ? errand->command : NULL);
        free(errand);
        session_fail(session, EXIT_INTERNAL, "no memory for a command");
        return;
    }
    shell->is_shell = true;
    if (shell->phase != LINK_READY) { // of another version
        refuse(errand, "%s\n", shell->problem);
    }
    carry_serve(session);
}

// The agent of that host that has nothing to do, with the lowest slot.
static agent_link_t *free_link(const session_t *session, const char *host)
{
    agent_link_t *found = NULL;
    for (int i = 0; i < session->n_links; i++) {
        agent_link_t *link = session->links[i];
        if (link->phase == LINK_READY && !link->has_plan && !link->is_shell &&
            strcmp(link->host->name, host) == 0 && (found == NULL || link->slot < found->slot)) {
            found = link;
        }
    }
    return found;
}

static bool is_this_machine(const char *host)
{
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return strcmp(host, "localhost") == 0 || strcmp(host, name) == 0;
}

// A child, where nobody dials; on_ready tells when it is there.
static void start_own_agent(session_t *session, const char *host)
{
    for (int i = 0; i < session->n_links; i++) {
        link_phase_t phase = session->links[i]->phase;
        if (session->links[i]->host->is_local &&
            (phase == LINK_WAITING || phase == LINK_CONNECTING)) {
            return; // it is coming
        }
    }
    host_t own = {.name = strdup(host), .slots = 1, .is_local = true};
    agent_link_t *link = own.name != NULL ? session_add_link(session, &own) : NULL;
    if (link == NULL) {
        free(own.name);
        session_fail(session, EXIT_INTERNAL, "no memory for an agent on host %s", host);
        return;
    }
    link->own = own;
    link->host = &link->own;
}

// What an agent tells its ranks would mislead those of another launcher.
static const char not_a_rank[] =
    "unset HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK "
    "HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME HOROVOD_RENDEZVOUS_ADDR HOROVOD_RENDEZVOUS_PORT "
    "HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_JOB_ID HOROVOD_SECRET_FILE "
    "HOROVOD_SECRET_FD HOROVOD_BLAME_FILE; ";

static void start(session_t *session, errand_t *errand, agent_link_t *link)
{
    buf_clear(&session->command);
    buf_append(&session->command, "/bin/sh\0-c", sizeof "/bin/sh\0-c");
    buf_append(&session->command, not_a_rank, strlen(not_a_rank));
    buf_append(&session->command, errand->command, strlen(errand->command) + 1);
    errand->worker = session_add_worker(session, link, &(rank_place_t){.rank = link->slot});
    if (errand->worker == NULL || session->command.failed) {
        session_fail(session, EXIT_INTERNAL, "no memory for a command");
        return;
    }
    command_plan(session, link);
}

uint64_t carry_serve(session_t *session)
{
    uint64_t next_ns = NEVER_NS;
    for (int i = 0; i < session->n_errands && !session->is_stopping; i++) {
        errand_t *errand = session->errands[i];
        if (errand->shell == NULL || errand->worker != NULL) {
            continue;
        }
        const char *host = errand->shell->host->name;
        agent_link_t *link = free_link(session, host);
        if (link != NULL) {
            start(session, errand, link);
        } else if (clock_ns() >= errand->deadline_ns) {
            refuse(errand,
                   PROGRAM
                   ": no agent of host %s is free within %g s (--start-timeout); does " PROGRAM
                   " --agent --dial run there, with --agent-name %s?\n",
                   host, session->options->start_timeout, host);
        } else {
            next_ns = MIN(next_ns, errand->deadline_ns);
            if (is_this_machine(host)) {
                start_own_agent(session, host);
            }
        }
    }
    return next_ns;
}

void carry_pass_on(session_t *session, const worker_t *worker, int stream, bytes_t data)
{
    const errand_t *errand = errand_of(session, worker);
    answer(errand, &(frame_t){.kind = FRAME_OUTPUT, .output = {.stream = stream, .data = data}});
}

void carry_end(session_t *session, const worker_t *worker)
{
    close_errand(errand_of(session, worker), worker->end.code);
}

void carry_lose(session_t *session, const agent_link_t *link)
{
    for (int i = 0; i < session->n_errands; i++) {
        errand_t *errand = session->errands[i];
        if (errand->shell == link) { // nobody wants to know any more: the command ends
            errand->shell = NULL;
            if (errand->worker != NULL && !errand->worker->end.has_ended) {
                session_stop_link(errand->worker->link, SIGTERM, LEAVE_MS);
            }
        } else if (errand->worker != NULL && errand->worker->link == link) {
            refuse(errand, PROGRAM ": lost the agent on host %s\n", link->host->name);
        }
    }
}

void carry_free(session_t *session)
{
    for (int i = 0; i < session->n_errands; i++) {
        free(session->errands[i]->command);
        free(session->errands[i]);
    }
    free(session->errands);
}

// --- A session that only carries -----------------------------------------------------------------

void carry_arrival(session_t *session, const channel_t *channel, const introduction_t *introduction)
{
    if (carry_is_asked(introduction)) {
        carry_take(session, channel, introduction);
        return;
    }
    const agent_link_t *link = session_admit(session, channel, introduction);
    if (link == NULL) {
        session_fail(session, EXIT_INTERNAL, "no memory for the agent of host %s",
                     introduction->host);
    } else if (link->phase == LINK_FAILED) {
        sink_say(session->sink, STREAM_STDERR, "%s: %s", PROGRAM, link->problem);
    }
    carry_serve(session);
}

static void on_ready(session_t *session, agent_link_t *link)
{
    (void)link;
    carry_serve(session);
}

static void on_exit_of(session_t *session, worker_t *worker)
{
    carry_end(session, worker);
}

static void on_lost(session_t *session, agent_link_t *link, const char *how)
{
    (void)how;
    carry_lose(session, link);
    link_close(link);
}

static uint64_t on_time(session_t *session, uint64_t now_ns)
{
    (void)now_ns;
    return carry_serve(session);
}

static int conclude_well(session_t *session)
{
    (void)session;
    return 0;
}

static const session_policy_t carrier_policy = {.hears_signals = true,
                                                .at_home = true,
                                                .look_ms = LOOK_MS,
                                                .grace_ms = LEAVE_MS,
                                                .on_arrival = carry_arrival,
                                                .on_ready = on_ready,
                                                .on_exit = on_exit_of,
                                                .on_output = carry_pass_on,
                                                .on_lost = on_lost,
                                                .on_time = on_time,
                                                .conclude = conclude_well};

int carry_run(const options_t *options)
{
    session_t session = {.signal_fd = -1};
    err_t err = {0};
    hvd_status_t status;
    TRY(session_init(&session, options, &carrier_policy, &err), out);
    TRY(session_prepare(&session, false, 0, &err), out);
out:
    if (status != HVD_OK) {
        return session_refuse(&session, &err);
    }
    int code = session_run(&session);
    session_close(&session);
    return code;
}

// --- One that has a number of agents, and tells of them ------------------------------------------

static gathering_t *gathering_of(session_t *session)
{
    return (gathering_t *)session;
}

static void tell_hosts(gathering_t *g)
{
    arrival_t **members = calloc((size_t)g->n_arrivals, sizeof(arrival_t *));
    job_plan_t plan = {0};
    buf_t text = {0};
    err_t err;
    int n = 0;
    for (int i = 0; members != NULL && i < g->n_arrivals; i++) {
        if (is_alive(g->arrivals[i])) {
            members[n++] = g->arrivals[i];
        }
    }
    if (members == NULL || gather_place(members, n, false, &plan, &err) != HVD_OK) {
        session_fail(&g->session, EXIT_INTERNAL, "no memory for %d hosts", n);
        free(members);
        return;
    }
    for (int i = 0; i < n; i++) {
        const char *host = members[i]->link->host->name;
        bool is_same = i > 0 && strcmp(host, members[i - 1]->link->host->name) == 0;
        if (is_same) {
            buf_printf(&text, ",%d", members[i]->slot);
        } else {
            buf_printf(&text, " %s=%d", host, members[i]->slot);
        }
    }
    if (!text.failed) {
        gather_tell(g, "hosts%.*s\n", (int)text.len, (const char *)text.data);
    }
    buf_free(&text);
    job_plan_free(&plan);
    free(members);
}

static void take_one_of_them(session_t *session, const channel_t *channel,
                             const introduction_t *introduction)
{
    gathering_t *g = gathering_of(session);
    if (carry_is_asked(introduction)) {
        carry_take(session, channel, introduction);
        return;
    }
    const arrival_t *a = gather_welcome(g, channel, introduction);
    if (a == NULL) {
        return;
    }
    gather_tell(g, "agent %d %d %s\n", gather_count(g, is_alive), a->slot, introduction->about);
    if (!a->is_spare && gather_count(g, is_alive) == g->n_begin) {
        tell_hosts(g);
    }
}

static void on_exit_of_one(session_t *session, worker_t *worker)
{
    gather_arrival(gathering_of(session), worker->link)->is_done = true;
    carry_end(session, worker);
}

static void on_lost_one(session_t *session, agent_link_t *link, const char *how)
{
    gathering_t *g = gathering_of(session);
    arrival_t *a = gather_arrival(g, link);
    (void)how;
    if (a != NULL && !a->is_spare && !a->is_done && !session->is_stopping) {
        gather_tell(g, "failed -1 -1 %d\n", a->slot);
        session_stop(session, SIGTERM, LEAVE_MS);
    }
    if (a != NULL) {
        a->has_failed = true;
    }
    carry_lose(session, link);
    link_close(link);
}

static int conclude_lost(session_t *session)
{
    (void)session;
    return EXIT_UNREACHABLE; // it was not told to end, and so has lost an agent
}

const session_policy_t carry_policy = {.hears_signals = true,
                                       .at_home = true,
                                       .look_ms = LOOK_MS,
                                       .grace_ms = LEAVE_MS,
                                       .on_arrival = take_one_of_them,
                                       .on_exit = on_exit_of_one,
                                       .on_output = carry_pass_on,
                                       .on_lost = on_lost_one,
                                       .on_time = on_time,
                                       .conclude = conclude_lost};

// --- The remote shell ----------------------------------------------------------------------------

static void write_all(int fd, bytes_t data)
{
    for (ssize_t n; data.len > 0; data.data += n, data.len -= (size_t)n) {
        n = write(fd, data.data, data.len);
        if (n < 0) {
            return; // nobody reads it any more
        }
    }
}

// Passes on what comes until the command has ended; its exit code.
static int hear(channel_t *channel)
{
    frame_t frame;
    while (!channel->is_closed) {
        struct pollfd polled = {.fd = channel->in_fd,
                                .events =
                                    (short)(POLLIN | (channel_wants_write(channel) ? POLLOUT : 0))};
        if (!channel_has_more(channel)) {
            poll(&polled, 1, LOOK_MS);
        }
        channel_send(channel);
        channel_receive(channel);
        while (channel_next(channel, &frame)) {
            if (frame.kind == FRAME_OUTPUT) {
                write_all(frame.output.stream == STREAM_STDERR ? STDERR_FILENO : STDOUT_FILENO,
                          frame.output.data);
            } else if (frame.kind == FRAME_EXITED) {
                return frame.exited.code;
            }
        }
    }
    return EXIT_UNREACHABLE;
}

// mpirun may give it options of ssh, as -x; how many words they are.
static int count_ssh_options(char *const *words, int n)
{
    static const char with_value[] = "bcDEeFIiJLlmOopQRSWw";
    int at = 0;
    while (at < n && words[at][0] == '-') {
        bool has_value = words[at][1] != '\0' && words[at][2] == '\0' &&
                         strchr(with_value, words[at][1]) != NULL;
        at += has_value ? 2 : 1;
    }
    return MIN(at, n);
}

static int ask_for(const options_t *options, const char *host, const char *command)
{
    channel_t channel;
    int code = dial_launcher(options, &channel);
    if (code != 0) {
        return code;
    }
    channel_put(&channel, &(frame_t){.kind = FRAME_HELLO,
                                     .hello = {.version = hvd_version(),
                                               .host = host,
                                               .slot = SHELL_SLOT,
                                               .about = command}});
    code = hear(&channel);
    channel_close(&channel);
    return code;
}

int shell_main(const options_t *options)
{
    int first = count_ssh_options(options->command, options->n_command);
    buf_t command = {0};
    int code = EXIT_USAGE;
    if (options->n_command < first + 2) {
        say("--shell needs a host and a command");
        return EXIT_USAGE;
    }
    for (int i = first + 1; i < options->n_command; i++) { // as ssh: one text for the shell there
        buf_printf(&command, "%s%s", i > first + 1 ? " " : "", options->command[i]);
    }
    buf_append(&command, "", 1);
    if (command.failed) {
        code = EXIT_INTERNAL;
    } else if (command.len > sizeof((introduction_t *)0)->about) {
        say("--shell: the command has %zu bytes, more than can be carried (%zu)", command.len,
            sizeof((introduction_t *)0)->about);
    } else {
        code = ask_for(options, options->command[first], (const char *)command.data);
    }
    buf_free(&command);
    return code;
}
