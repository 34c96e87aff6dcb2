// SPDX-License-Identifier: Apache-2.0
//
// carry.c - agents that have dialled as hosts of another launcher: commands are carried to them.
//
// mpirun reaches hosts through a remote shell. Where nothing but dialled agents leads to a host,
// `horovodrun --shell HOST COMMAND` takes its place (shell_main): it dials the session that awaits
// the agents (--carry-commands), as they do, and asks for its command by a slot that no agent has.
// The session has the first agent of that host that is free run it, and passes on what it prints
// and how it ends. When all agents have come it says which host has which (`hosts A=0,2 B=1` on
// --events-fd; gather.c has the other events). It ends when it is told to. The session's thread.
#define _GNU_SOURCE
#include "launch/gather.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define LOOK_MS 1000
#define SHELL_SLOT (-1)

// --- The session's side --------------------------------------------------------------------------

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
        bool is_same = i > 0 && strcmp(members[i]->host.name, members[i - 1]->host.name) == 0;
        if (is_same) {
            buf_printf(&text, ",%d", members[i]->slot);
        } else {
            buf_printf(&text, " %s=%d", members[i]->host.name, members[i]->slot);
        }
    }
    if (!text.failed) {
        gather_tell(g, "hosts%.*s\n", (int)text.len, (const char *)text.data);
    }
    buf_free(&text);
    job_plan_free(&plan);
    free(members);
}

static void answer(const agent_link_t *shell, const frame_t *frame)
{
    agent_link_t *link = (agent_link_t *)(uintptr_t)shell;
    if (!link->channel.is_closed) { // else nobody asks any more
        channel_put(&link->channel, frame);
        channel_send(&link->channel);
    }
}

static void refuse(const agent_link_t *shell, const char *text)
{
    answer(shell,
           &(frame_t){.kind = FRAME_OUTPUT,
                      .output = {.stream = STREAM_STDERR,
                                 .data = {.data = (const uint8_t *)text, .len = strlen(text)}}});
    answer(shell, &(frame_t){.kind = FRAME_EXITED, .exited = {.code = EXIT_UNREACHABLE}});
}

// On the first agent of the host that has nothing to do.
static void carry(gathering_t *g, const arrival_t *shell, const char *command)
{
    session_t *session = &g->session;
    arrival_t *found = NULL;
    for (int i = 0; i < g->n_arrivals; i++) {
        arrival_t *a = g->arrivals[i];
        bool is_free =
            is_alive(a) && a->worker == NULL && strcmp(a->host.name, shell->host.name) == 0;
        found = is_free && (found == NULL || a->slot < found->slot) ? a : found;
    }
    if (found == NULL) {
        refuse(shell->link, "no agent is free on that host\n");
        return;
    }
    buf_clear(&session->command);
    buf_append(&session->command, "/bin/sh\0-c", sizeof "/bin/sh\0-c");
    buf_append(&session->command, command, strlen(command) + 1);
    found->shell = shell->link;
    found->worker = session_add_worker(session, found->link, &(rank_place_t){.rank = found->slot});
    if (found->worker == NULL || session->command.failed) {
        session_fail(session, EXIT_INTERNAL, "no memory for a command");
        return;
    }
    command_plan(session, found->link);
}

static void on_arrival(session_t *session, const channel_t *channel,
                       const introduction_t *introduction)
{
    gathering_t *g = gathering_of(session);
    arrival_t *a = gather_welcome(g, channel, introduction);
    if (a == NULL) {
        return;
    }
    if (a->slot == SHELL_SLOT) { // which no agent has, so it counts as none
        carry(g, a, introduction->about);
        return;
    }
    gather_tell(g, "agent %d %d %s\n", gather_count(g, is_alive), a->slot, introduction->about);
    if (!a->is_spare && gather_count(g, is_alive) == g->n_begin) {
        tell_hosts(g);
    }
}

static void on_output(session_t *session, const worker_t *worker, int stream, bytes_t data)
{
    const arrival_t *a = gather_arrival(gathering_of(session), worker->link);
    answer(a->shell, &(frame_t){.kind = FRAME_OUTPUT, .output = {.stream = stream, .data = data}});
}

static void on_exit_of(session_t *session, worker_t *worker)
{
    arrival_t *a = gather_arrival(gathering_of(session), worker->link);
    a->is_done = true;
    answer(a->shell, &(frame_t){.kind = FRAME_EXITED, .exited = {.code = worker->end.code}});
}

static void on_lost(session_t *session, agent_link_t *link, const char *how)
{
    gathering_t *g = gathering_of(session);
    arrival_t *a = gather_arrival(g, link);
    (void)how;
    if (!a->is_spare && !a->is_done && !session->is_stopping) {
        gather_tell(g, "failed -1 -1 %d\n", a->slot);
        session_stop(session, SIGTERM, LEAVE_MS);
    }
    a->has_failed = true;
    link_close(link);
}

static int conclude(session_t *session)
{
    (void)session;
    return EXIT_UNREACHABLE; // it was not told to end, and so has lost an agent
}

const session_policy_t carry_policy = {.hears_signals = true,
                                       .at_home = true,
                                       .look_ms = LOOK_MS,
                                       .grace_ms = LEAVE_MS,
                                       .on_arrival = on_arrival,
                                       .on_exit = on_exit_of,
                                       .on_output = on_output,
                                       .on_lost = on_lost,
                                       .conclude = conclude};

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

int shell_main(const options_t *options)
{
    channel_t channel;
    buf_t command = {0};
    int code;
    if (options->n_command < 2) {
        say("--shell needs a host and a command");
        return EXIT_USAGE;
    }
    if ((code = dial_launcher(options, &channel)) != 0) {
        return code;
    }
    for (int i = 1; i < options->n_command; i++) { // as ssh does: one text for the shell there
        buf_printf(&command, "%s%s", i > 1 ? " " : "", options->command[i]);
    }
    buf_append(&command, "", 1);
    code = EXIT_INTERNAL;
    if (!command.failed) {
        channel_put(&channel, &(frame_t){.kind = FRAME_HELLO,
                                         .hello = {.version = hvd_version(),
                                                   .host = options->command[0],
                                                   .slot = SHELL_SLOT,
                                                   .about = (const char *)command.data}});
        code = hear(&channel);
    }
    channel_close(&channel);
    buf_free(&command);
    return code;
}
