// SPDX-License-Identifier: Apache-2.0
//
// session.c - one loop over agents, signals and the clock, for jobs of every kind.
//
// Agents are brought up on all hosts at once, at most MAX_CONNECTING at a time; what happens when
// they are there, when ranks end and when agents are lost is the policy's to say (session.h); what
// they report goes to ranks.c. Stopping is SIGTERM, GRACE_MS, SIGKILL, by the agents; a second
// SIGINT or SIGTERM skips the grace. Rendezvous, output and the job page have threads of their own.
#define _GNU_SOURCE
#include "launch/session.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_CONNECTING 64
#define PING_MS 5000
#define FULL_MS 5   // until the next look whether the sink has room
#define N_OWN_FDS 3 // polled besides those of links: signals, agents that dial, life

// --- Beginning -----------------------------------------------------------------------------------

// Whoever sends one of these means that the job is to end; each would end us without a word.
static const int stop_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD, 0};

hvd_status_t session_init(session_t *session, const options_t *options,
                          const session_policy_t *policy, err_t *err)
{
    *session = (session_t){.options = options,
                           .policy = policy,
                           .signal_fd = -1,
                           .child_code = -1,
                           .stop_at_ns = NEVER_NS,
                           .fold_at_ns = NEVER_NS,
                           .late_at_ns = NEVER_NS,
                           .silence_ns = (uint64_t)(options->peer_timeout * 1e9),
                           .style = {.is_off = options->plain_output,
                                     .timestamp = options->prefix_timestamp,
                                     .color = options_want_color(options)}};
    if (policy->hears_signals) {
        session->signal_fd = signals_open(SIG_BLOCK, stop_signals);
    }
    prctl(PR_SET_DUMPABLE, 0); // secrets are in this memory
    session->sink = sink_start();
    if (session->sink == NULL) {
        return fail(err, HVD_NO_MEMORY, "cannot start a thread for output");
    }
    return options->await_agents >= 0 ? awaited_open(options, &session->awaited, err) : HVD_OK;
}

hvd_status_t session_prepare(session_t *session, bool is_local, int n_files, err_t *err)
{
    const char *files = session->options->output_filename;
    uint8_t id[4];
    hvd_status_t status;
    if (files[0] != '\0') {
        session->problem_code = EXIT_OUTPUT;
        TRY(output_files_open(files, n_files, &session->files, err), out);
        session->problem_code = 0;
    }
    TRY(random_bytes(session->secret, sizeof session->secret, err), out);
    TRY(random_bytes(id, sizeof id, err), out);
    snprintf(session->info.id, sizeof session->info.id, "%02x%02x%02x%02x", id[0], id[1], id[2],
             id[3]);
    TRY(job_addresses(session->options, is_local, session->policy->is_elastic,
                      &session->info.addresses, err),
        out);
    TRY(commands_prepare(session, err), out);
    TRY(watch_open(session, err), out);
out:
    return status;
}

// At loopback, at the one address that was asked for, or everywhere.
hvd_status_t session_meet(session_t *session, err_t *err)
{
    const char *addresses = session->info.addresses, *bind = "*";
    hvd_rendezvous_t *server = NULL;
    if (strcmp(addresses, "127.0.0.1") == 0) {
        bind = NULL;
    } else if (options_await_at_one(session->options) ||
               (session->options->network_interfaces[0] != '\0' &&
                strchr(addresses, ',') == NULL)) {
        bind = addresses;
    }
    hvd_status_t status =
        hvd_rendezvous_start(bind, 0, session->secret, &server, err->text, sizeof err->text);
    if (status == HVD_OK) {
        if (session->server != NULL) {
            hvd_rendezvous_stop(session->server);
        }
        session->server = server;
        session->info.port = hvd_rendezvous_port(server);
    }
    err->status = status;
    return status;
}

agent_link_t *session_add_link(session_t *session, const host_t *host)
{
    agent_link_t *link = link_new(host, session->options);
    if (link != NULL) {
        link->is_patient = session->policy->is_patient;
    }
    if (link != NULL && session_append(&session->links, &session->n_links, link)) {
        return link;
    }
    link_free(link);
    return NULL;
}

hvd_status_t session_add_hosts(session_t *session, const hosts_t *hosts, int n, err_t *err)
{
    for (int i = 0; i < n; i++) {
        if (session_add_link(session, &hosts->list[i]) == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for %d hosts", n);
        }
    }
    return HVD_OK;
}

agent_link_t *session_admit(session_t *session, const channel_t *channel,
                            const introduction_t *introduction)
{
    host_t host = {.name = strdup(introduction->host), .slots = 1};
    agent_link_t *link = host.name != NULL ? session_add_link(session, &host) : NULL;
    if (link == NULL) {
        channel_t unused = *channel;
        free(host.name);
        channel_close(&unused);
        return NULL;
    }
    link->own = host;
    link->host = &link->own;
    link_welcome(link, channel, introduction);
    return link;
}

// --- Stopping ------------------------------------------------------------------------------------

static int grace_ms(const session_t *session)
{
    return session->policy->grace_ms > 0 ? session->policy->grace_ms : GRACE_MS;
}

static bool hands_over(session_t *session)
{
    return session->signo == SIGTERM && session->policy->hands_over != NULL &&
           session->policy->hands_over(session);
}

static void on_signals(session_t *session)
{
    struct signalfd_siginfo info;
    char name[16];
    while (read(session->signal_fd, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGCHLD) {
            continue; // only a reason to look: hear_child
        }
        bool is_second = session->signo != 0;
        session->signo = is_second ? session->signo : (int)info.ssi_signo;
        if (session->options->events_fd < 0) { // else who sent it knows, and says what there is to
            sink_say(session->sink, STREAM_STDERR, "%s: got %s: %s", PROGRAM,
                     signal_name((int)info.ssi_signo, name),
                     is_second ? "killing the ranks"
                               : "stopping the ranks; send it again to kill them");
            session_ask_where(session);
        }
        if (is_second || !hands_over(session)) {
            session_stop(session, is_second ? SIGKILL : SIGTERM, is_second ? 0 : grace_ms(session));
        }
    }
}

void session_lose(session_t *session, agent_link_t *link, const char *how)
{
    link->phase = LINK_FAILED;
    session->policy->on_lost(session, link, how);
}

// --- The loop ------------------------------------------------------------------------------------

// An agent that was coming may have come, or never will.
static void look_at(session_t *session, agent_link_t *link)
{
    if (link->phase == LINK_READY) {
        session->policy->on_ready(session, link);
    } else if (link->phase == LINK_FAILED) {
        session->policy->on_lost(session, link, NULL);
    }
}

static void welcome(session_t *session, agent_link_t *link)
{
    introduction_t introduction;
    channel_t channel;
    if (link->phase == LINK_AWAITED &&
        awaited_take(session->awaited, link->host->name, &channel, &introduction)) {
        if (session->options->verbose) {
            sink_say(session->sink, STREAM_STDERR, "The agent of host %s has connected. %s",
                     link->host->name, introduction.about);
        }
        link_welcome(link, &channel, &introduction);
        look_at(session, link);
    }
}

static void take_arrivals(session_t *session)
{
    introduction_t introduction;
    channel_t channel;
    if (session->policy->on_arrival == NULL) {
        return;
    }
    bool is_open = !session->is_stopping && !session->is_finishing;
    for (int i = 0; i < session->n_links && is_open; i++) { // those awaited by name go first
        welcome(session, session->links[i]);
    }
    while (awaited_take(session->awaited, NULL, &channel, &introduction)) {
        session->policy->on_arrival(session, &channel, &introduction);
    }
}

static void start_links(session_t *session)
{
    int n_connecting = 0;
    uint64_t now_ns = clock_ns();
    for (int i = 0; i < session->n_links; i++) {
        n_connecting += session->links[i]->phase == LINK_CONNECTING;
    }
    for (int i = 0; i < session->n_links && !session->is_stopping && !session->is_finishing; i++) {
        agent_link_t *link = session->links[i];
        if (link_is_coming(link) && now_ns >= link->deadline_ns) {
            link_expire(link, session->options);
            look_at(session, link);
        } else if (link->phase == LINK_WAITING && link->retry_at_ns <= now_ns &&
                   n_connecting < MAX_CONNECTING) {
            n_connecting++;
            link_start(link, session->options, session->sink);
            look_at(session, link);
        }
        welcome(session, link);
    }
}

static void hear_link(session_t *session, agent_link_t *link)
{
    frame_t frame;
    if (link->phase == LINK_CONNECTING) {
        link_hear_hello(link, session->options, session->sink);
        look_at(session, link);
    } else if (link->phase == LINK_READY) {
        link->heard_ns = channel_receive(&link->channel) ? clock_ns() : link->heard_ns;
    }
    while (link->phase == LINK_READY && channel_next(&link->channel, &frame)) {
        session_hear(session, link, &frame);
    }
    if (link->channel.is_closed && link->phase == LINK_READY) {
        link_read_errors(link, session->options->verbose, session->sink);
        session_lose(session, link, "the connection is closed");
    }
}

// What poll() said of its socket and of what its ssh prints.
static void serve_link(session_t *session, agent_link_t *link, const struct pollfd polled[2],
                       bool reads)
{
    if (polled[1].revents != 0) {
        link_read_errors(link, session->options->verbose, session->sink);
    }
    if (polled[0].revents & POLLOUT) {
        channel_send(&link->channel);
    }
    if (((polled[0].revents & ~POLLOUT) != 0 || channel_has_more(&link->channel)) &&
        (reads || link->phase == LINK_CONNECTING)) {
        hear_link(session, link);
    }
}

// Often enough to be heard in time.
static uint64_t ping_ns(const session_t *session)
{
    return MIN(PING_MS * NS_PER_MS, (uint64_t)(session->options->peer_timeout * 1e9 / 4));
}

// What it sent before the last look has been read: time that we were busy since is not its silence.
static void look_after(session_t *session, agent_link_t *link, bool pings, uint64_t now_ns)
{
    if (pings) {
        command_ping(link);
    }
    if (!link->host->is_local && session->looked_ns > link->heard_ns &&
        session->looked_ns - link->heard_ns > session->silence_ns) {
        session_lose(session, link, "no sign of life for --gloo-timeout-seconds");
    } else if (now_ns >= session->late_at_ns) {
        session_lose(session, link, "it did not end");
    }
}

// Who was not read may have spoken.
static void on_time(session_t *session, bool was_reading)
{
    uint64_t now_ns = clock_ns();
    if (now_ns >= session->stop_at_ns) {
        session_stop(session, SIGTERM, grace_ms(session));
    }
    if (now_ns >= session->fold_at_ns) {
        fold_release(session, now_ns);
    }
    if (sink_is_broken(session->sink) && !session->is_stopping) {
        session->signo = SIGPIPE; // who reads our output has gone
        session_stop(session, SIGTERM, grace_ms(session));
    }
    bool pings = now_ns >= session->ping_at_ns;
    session->ping_at_ns = pings ? now_ns + ping_ns(session) : session->ping_at_ns;
    if (pings && session->awaited != NULL) {
        awaited_ping(session->awaited);
        awaited_progress(session->awaited);
    }
    for (int i = 0; i < session->n_links; i++) {
        agent_link_t *link = session->links[i];
        if (link->phase == LINK_READY) {
            link->heard_ns = was_reading ? link->heard_ns : now_ns;
            look_after(session, link, pings, now_ns);
        }
    }
}

static int next_wait_ms(const session_t *session, bool reads, uint64_t policy_ns)
{
    uint64_t now_ns = clock_ns();
    uint64_t next_ns =
        MIN(MIN(session->stop_at_ns, session->late_at_ns), MIN(session->ping_at_ns, policy_ns));
    next_ns = MIN(next_ns, MIN(session->fold_at_ns, watch_next_ns(session)));
    for (int i = 0; i < session->n_links; i++) {
        const agent_link_t *link = session->links[i];
        if (reads && link->phase == LINK_READY && channel_has_more(&link->channel)) {
            return 0;
        }
        if (link->phase == LINK_WAITING && link->retry_at_ns > now_ns) {
            next_ns = MIN(next_ns, link->retry_at_ns);
        }
        next_ns = link_is_coming(link) ? MIN(next_ns, link->deadline_ns) : next_ns;
    }
    uint64_t most_ms = reads ? (uint64_t)session->policy->look_ms : FULL_MS;
    return next_ns <= now_ns ? 0 : (int)MIN((next_ns - now_ns) / NS_PER_MS + 1, most_ms);
}

static bool watch_links(session_t *session, bool reads)
{
    size_t n = (size_t)session->n_links;
    struct pollfd *polled = realloc(session->polled, (2 * n + N_OWN_FDS) * sizeof *polled);
    if (polled == NULL) {
        return false;
    }
    session->polled = polled;
    for (size_t i = 0; i < n; i++) {
        const agent_link_t *link = session->links[i];
        bool is_on = link->phase == LINK_CONNECTING || link->phase == LINK_READY;
        bool hears = reads || link->phase == LINK_CONNECTING;
        bool writes = is_on && channel_wants_write(&link->channel);
        polled[2 * i] =
            (struct pollfd){.fd = is_on && (hears || writes) ? link->channel.in_fd : -1,
                            .events = (short)((hears ? POLLIN : 0) | (writes ? POLLOUT : 0))};
        polled[2 * i + 1] =
            (struct pollfd){.fd = is_on ? link->process.fds[STREAM_STDERR] : -1, .events = POLLIN};
    }
    polled[2 * n] = (struct pollfd){.fd = session->signal_fd, .events = POLLIN};
    polled[2 * n + 1] = (struct pollfd){
        .fd = session->awaited != NULL ? awaited_fd(session->awaited) : -1, .events = POLLIN};
    polled[2 * n + 2] = (struct pollfd){
        .fd = session->is_stopping ? -1 : (int)session->options->life_fd, .events = POLLIN};
    return true;
}

static void poll_once(session_t *session, uint64_t policy_ns)
{
    int n = session->n_links;
    bool reads = !sink_is_full(session->sink);
    if (!watch_links(session, reads)) {
        session_fail(session, EXIT_INTERNAL, "no memory for %d hosts", n);
        session_stop(session, SIGKILL, 0);
        return;
    }
    struct pollfd *polled = session->polled;
    session->looked_ns = clock_ns();
    if (poll(polled, 2 * (nfds_t)n + N_OWN_FDS, next_wait_ms(session, reads, policy_ns)) >= 0) {
        for (int i = 0; i < n; i++) {
            serve_link(session, session->links[i], &polled[2 * i], reads);
        }
        if (polled[2 * n].revents != 0) {
            on_signals(session);
        }
        if (polled[2 * n + 1].revents != 0) {
            awaited_progress(session->awaited);
            take_arrivals(session);
        }
        if (polled[2 * n + 2].revents != 0) { // who started this launcher is gone
            session->signo = SIGHUP;
            session_stop(session, SIGTERM, grace_ms(session));
        }
    }
    mpi_hear_child(session);
    on_time(session, reads);
}

static bool is_over(const session_t *session)
{
    int n_running = session->child > 0;
    for (int i = 0; i < session->n_links; i++) {
        n_running += link_is_running(session->links[i]);
    }
    return (session->is_stopping || session->is_finishing) && n_running == 0;
}

void session_loop(session_t *session)
{
    session->ping_at_ns = clock_ns() + ping_ns(session);
    while (!is_over(session)) {
        uint64_t policy_ns = session->policy->on_time != NULL
                                 ? session->policy->on_time(session, clock_ns())
                                 : NEVER_NS;
        start_links(session);
        watch_tick(session);
        if (!is_over(session)) {
            poll_once(session, policy_ns);
        }
    }
}

// --- The end -------------------------------------------------------------------------------------

static int conclude(session_t *session)
{
    if (session->signo != 0) {
        return EXIT_BY_SIGNAL + session->signo;
    }
    if (session->problem_code != 0) {
        sink_say(session->sink, STREAM_STDERR, "%s: the job failed: %s", PROGRAM, session->problem);
        return session->problem_code;
    }
    return session->policy->conclude(session);
}

int session_run(session_t *session)
{
    session_loop(session);
    for (int i = 0; i < session->n_workers; i++) {
        session_flush(session, session->workers[i]);
    }
    return watch_over(session, conclude(session));
}

void session_close(session_t *session)
{
    wipe(session->secret, sizeof session->secret);
    watch_close(session);
    for (int i = 0; i < session->n_links; i++) {
        link_free(session->links[i]);
    }
    awaited_close(session->awaited);
    for (int i = 0; i < session->n_workers; i++) {
        session_free_worker(session->workers[i]);
    }
    carry_free(session);
    mpi_free(session);
    if (session->server != NULL) {
        hvd_rendezvous_stop(session->server);
    }
    output_files_close(&session->files);
    buf_free(&session->lines);
    buf_free(&session->command);
    buf_free(&session->env);
    buf_free(&session->payload);
    free(session->directory);
    free(session->info.addresses);
    free(session->links);
    free(session->workers);
    free(session->polled);
    if (session->signal_fd >= 0) {
        close(session->signal_fd);
    }
    sink_stop(session->sink);
    *session = (session_t){.signal_fd = -1};
}

int session_refuse(session_t *session, const err_t *err)
{
    int code = session->problem_code != 0            ? session->problem_code
               : err->status == HVD_INVALID_ARGUMENT ? EXIT_USAGE
                                                     : EXIT_INTERNAL;
    say("%s", err->text);
    session_close(session);
    return code;
}
