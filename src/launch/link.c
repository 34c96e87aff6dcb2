// SPDX-License-Identifier: Apache-2.0
//
// link.c - brings up the agent of a host, and explains why one does not come.
//
// On this machine the agent is a child, elsewhere the far end of ssh or of a process that has
// dialled an agent that waits (relay.c); all talk over a socket and complain on a pipe. Or the
// agent itself dials (await.c), over a secure channel. An attempt that fails for a reason that may
// pass (a host that is still booting, a name that is not in DNS yet) is repeated after a second. An
// agent that says hello with another version is refused: its frames could mean something else.
#define _GNU_SOURCE
#include "launch/link.h"
#include "launch/launch.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define RETRY_MS 1000
#define TOLD_ATTEMPT 2 // that fails: what is patiently tried again is told to the user
#define END_MS 8000    // for a process that has no reason to stay

static const struct {
    const char *name;
    bool is_patient; // worth all our time: the host is starting up as we do
    const char *silence, *advice;
} reaches[] = {
    [REACH_FORK] = {"agent", false, "no answer from the agent",
                    "is this host overloaded? Try a larger --start-timeout"},
    [REACH_SSH] = {"ssh", false, "no answer from the agent over ssh",
                   "is it down, or slow? Try ssh by hand, or a larger --start-timeout"},
    [REACH_PORT] = {"agent port", true, "no answer from the agent",
                    "is it down, or slow? Try a larger --start-timeout"},
    [REACH_AWAITED] = {"agent", true, "no agent of that name has connected",
                       "does " PROGRAM " --agent --dial run there, with this --agent-name and the "
                       "same --secret-file, and can it reach this host? Or try a larger "
                       "--start-timeout"},
};

reach_t link_reach(const host_t *host, const options_t *options)
{
    return host->is_local               ? REACH_FORK
           : options->await_agents >= 0 ? REACH_AWAITED
           : options->agent_port > 0    ? REACH_PORT
                                        : REACH_SSH;
}

const char *reach_name(reach_t reach)
{
    return reaches[reach].name;
}

bool link_is_coming(const agent_link_t *link)
{
    return link->phase == LINK_WAITING || link->phase == LINK_AWAITED ||
           link->phase == LINK_CONNECTING;
}

bool link_is_running(const agent_link_t *link)
{
    return link->has_plan && link->phase == LINK_READY;
}

agent_link_t *link_new(const host_t *host, const options_t *options)
{
    agent_link_t *link = calloc(1, sizeof *link);
    if (link != NULL) {
        link->host = host;
        link->deadline_ns = deadline_in_ms((int64_t)(options->start_timeout * 1000));
        link->process.fds[STREAM_STDERR] = -1;
        link->exit_code = -1;
        channel_open(&link->channel, -1, -1);
    }
    return link;
}

static void fail_link(agent_link_t *link, const char *format, ...) PRINTF_LIKE(2, 3);

static void fail_link(agent_link_t *link, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(link->problem, sizeof link->problem, format, args);
    va_end(args);
    link->phase = LINK_FAILED;
    link_close(link);
}

static void tell_command(char *const *command, sink_t *sink)
{
    buf_t text = {0};
    for (; *command != NULL; command++) {
        quote_word(*command, &text);
        buf_append(&text, command[1] != NULL ? " " : "", 1);
    }
    if (!text.failed) {
        sink_say(sink, STREAM_STDERR, "Launching horovod task function: %s",
                 (const char *)text.data);
    }
    buf_free(&text);
}

void link_start(agent_link_t *link, const options_t *options, sink_t *sink)
{
    char path[4096];
    char *local[] = {path, "--agent", NULL};
    err_t err = {0};
    int socket;
    if (link_reach(link->host, options) == REACH_AWAITED) {
        link->started_ns = clock_ns();
        link->phase = LINK_AWAITED;
        return;
    }
    if (!own_path(path, sizeof path)) {
        fail_link(link, "cannot find out where this program is: /proc is not mounted");
        return;
    }
    char **remote = link->host->is_local ? NULL : remote_command(options, link->host, path);
    if (!link->host->is_local && remote == NULL) {
        fail_link(link, "--ssh-command is \"%.200s\", which is not a command",
                  options->ssh_command);
        return;
    }
    char **command = remote != NULL ? remote : local;
    if (options->verbose) {
        tell_command(command, sink);
    }
    link->attempts++;
    link->started_ns = clock_ns();
    if (spawn_helper(command, &link->process, &socket, &err) != HVD_OK) {
        fail_link(link, "%s", err.text);
    } else {
        link->has_process = true;
        link->phase = LINK_CONNECTING;
        channel_open(&link->channel, socket, socket);
    }
    free_words(remote);
}

// --- What comes ----------------------------------------------------------------------------------

void link_read_errors(agent_link_t *link, bool is_verbose, sink_t *sink)
{
    char text[1024];
    ssize_t n = 0;
    while (link->process.fds[STREAM_STDERR] >= 0 &&
           (n = read(link->process.fds[STREAM_STDERR], text, sizeof text)) > 0) {
        size_t have = strlen(link->said), more = MIN((size_t)n, sizeof link->said - 1);
        size_t keep = MIN(have, sizeof link->said - 1 - more);
        memmove(link->said, link->said + have - keep, keep);
        memcpy(link->said + keep, text + (size_t)n - more, more);
        link->said[keep + more] = '\0';
        if (is_verbose) {
            sink_write(sink, STREAM_STDERR, text, (size_t)n);
        }
    }
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        if (link->process.fds[STREAM_STDERR] >= 0) {
            close(link->process.fds[STREAM_STDERR]);
        }
        link->process.fds[STREAM_STDERR] = -1;
    }
}

static void refuse_stranger(agent_link_t *link)
{
    fail_link(link,
              "the answer from host %s does not come from the agent; does the shell there print "
              "something before it runs a command? Try: ssh %s true",
              link->host->name, link->host->target);
}

static void check_version(agent_link_t *link, const char *version)
{
    if (strcmp(version, hvd_version()) != 0) {
        fail_link(link,
                  "version mismatch: host %s has version %.32s, the launcher has %s; install the "
                  "same version on all hosts",
                  link->host->name, version, hvd_version());
    } else {
        link->heard_ns = clock_ns();
        link->phase = LINK_READY;
    }
}

void link_welcome(agent_link_t *link, const channel_t *channel, const introduction_t *introduction)
{
    link->channel = *channel;
    link->slot = introduction->slot;
    snprintf(link->about, sizeof link->about, "%.63s", introduction->about);
    check_version(link, introduction->version);
}

static bool is_noise(const char *line)
{
    static const char *const noise[] = {"Warning: Permanently added", "Pseudo-terminal will not",
                                        "Killed by signal", "debug1:"};
    bool is_so = line[strspn(line, " ")] == '\0';
    for (size_t i = 0; i < N_ELEMENTS(noise); i++) {
        is_so |= strncmp(line, noise[i], strlen(noise[i])) == 0;
    }
    return is_so;
}

const char *link_last_words(agent_link_t *link)
{
    char *text = link->said, *newline;
    for (char *at = text; *at != '\0'; at++) {
        *at = *at == '\r' || *at == '\t' ? ' ' : *at;
    }
    while ((newline = strrchr(text, '\n')) != NULL && is_noise(newline + 1)) {
        *newline = '\0'; // those before it are as old as it is
    }
    for (size_t n = strlen(text); n > 0 && text[n - 1] == ' '; n--) {
        text[n - 1] = '\0';
    }
    const char *line = newline != NULL ? newline + 1 : text;
    return is_noise(line) ? "" : line;
}

const char *link_reason(agent_link_t *link, const options_t *options)
{
    const char *words = link_last_words(link);
    if (words[0] == '\0' && link->exit_code < 0) {
        return "";
    }
    remote_fault_t fault =
        remote_explain(link_reach(link->host, options) == REACH_PORT, link->said, link->exit_code);
    return fault.is_known || words[0] == '\0' ? fault.what : words;
}

// Its wait status, once it has ended, by force if it takes too long.
static int reap_within(pid_t pid, int timeout_ms)
{
    uint64_t deadline_ns = deadline_in_ms(timeout_ms);
    int status = 0;
    pid_t ended;
    while ((ended = waitpid(pid, &status, WNOHANG)) == 0 || (ended < 0 && errno == EINTR)) {
        if (clock_ns() >= deadline_ns) {
            kill_group(pid, SIGKILL);
        }
        usleep(1000);
    }
    return status;
}

// The process is gone before its hello.
static void on_gone(agent_link_t *link, const options_t *options, sink_t *sink)
{
    int status = reap_within(link->process.pid, END_MS);
    link_read_errors(link, options->verbose, sink);
    link->has_process = false;
    link->exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    reach_t reach = link_reach(link->host, options);
    remote_fault_t fault = remote_explain(reach == REACH_PORT, link->said, link->exit_code);
    bool is_patient = link->is_patient || reaches[reach].is_patient;
    bool may_pass =
        fault.lasts == FAULT_PASSES || (link->is_patient && fault.lasts == FAULT_STARTS);
    if (may_pass && (link->attempts < options->ssh_attempts || is_patient)) {
        link_close(link);
        link->phase = LINK_WAITING;
        link->retry_at_ns = deadline_in_ms(RETRY_MS);
        if (reaches[reach].is_patient && link->attempts == TOLD_ATTEMPT) {
            sink_say(sink, STREAM_STDERR,
                     "%s: host %s: %s; trying again until --start-timeout (%g s). To fix it: %s",
                     PROGRAM, link->host->name, fault.what, options->start_timeout, fault.fix);
        }
        return;
    }
    fail_link(link, "%s not successful for host %s: %s (%.300s); %s", reach_name(reach),
              link->host->name, fault.what, link_last_words(link), fault.fix);
}

void link_hear_hello(agent_link_t *link, const options_t *options, sink_t *sink)
{
    frame_t frame;
    channel_receive(&link->channel);
    if (channel_next(&link->channel, &frame)) {
        if (frame.kind == FRAME_HELLO) {
            snprintf(link->about, sizeof link->about, "%.63s", frame.hello.about);
            check_version(link, frame.hello.version);
        } else {
            refuse_stranger(link);
        }
    } else if (link->channel.is_closed && link->channel.in.len > 0) {
        refuse_stranger(link);
    } else if (link->channel.is_closed) {
        on_gone(link, options, sink);
    }
}

void link_expire(agent_link_t *link, const options_t *options)
{
    reach_t reach = link_reach(link->host, options);
    bool has_reason = link->said[0] != '\0';
    remote_fault_t fault = remote_explain(reach == REACH_PORT, link->said, link->exit_code);
    link->is_late = true;
    fail_link(link,
              "host %s did not answer within %g s (--start-timeout), attempt %d: %s %.200s; %s",
              link->host->name, options->start_timeout, link->attempts,
              has_reason ? fault.what : reaches[reach].silence, link_last_words(link),
              has_reason ? fault.fix : reaches[reach].advice);
}

// --- The end -------------------------------------------------------------------------------------

void link_close(agent_link_t *link)
{
    channel_close(&link->channel);
    if (link->process.fds[STREAM_STDERR] >= 0) {
        close(link->process.fds[STREAM_STDERR]);
        link->process.fds[STREAM_STDERR] = -1;
    }
    if (link->has_process) {
        // An agent that has lost its channel cleans up and ends by itself; ssh is only a pipe.
        if (!link->host->is_local) {
            kill_group(link->process.pid, SIGTERM); // with what it may have started, as a proxy
        }
        reap_within(link->process.pid, END_MS);
        link->has_process = false;
    }
}

void link_free(agent_link_t *link)
{
    if (link != NULL) {
        link_close(link);
        free(link->own.name);
    }
    free(link);
}
