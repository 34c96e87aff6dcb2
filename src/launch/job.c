// SPDX-License-Identifier: Apache-2.0
//
// job.c - a job from its plan to its exit code: one loop over agents and signals.
//
// Agents are brought up on all hosts (link.c); only when every one has said hello do they get the
// plan, so no rank starts in vain. Then the loop passes output on, notes how ranks end, and when
// one fails waits a moment for others to report, names the cause and has everything stopped:
// SIGTERM, GRACE_MS, SIGKILL, by the agents. A second SIGINT or SIGTERM skips the grace. An agent
// that is gone takes its ranks with it and fails the job. The rendezvous server runs in a thread of
// the library, output leaves through the sink's thread; everything else is this thread's.
#define _GNU_SOURCE
#include "launch/ending.h"
#include "launch/launch.h"
#include "launch/link.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define GRACE_MS 5000
#define MOMENT_MS 250 // between the first failure and the order to stop
#define PING_MS 5000
#define LATE_MS 10000 // for agents to finish after ranks must be dead
#define MAX_WAIT_MS 1000

typedef struct job {
    const options_t *options;
    hosts_t hosts;
    job_plan_t plan;
    job_info_t info;
    hvd_rendezvous_t *server;
    uint8_t secret[SECRET_BYTES];
    agent_link_t *links;
    sink_t *sink;
    prefix_style_t style;
    output_files_t files;
    splitter_t *splitters; // rank * N_STREAMS + stream
    rank_end_t *ends;
    int *result_fds;
    buf_t lines;
    int signal_fd;
    int signo;        // that asked us to end
    int problem_code; // of a host or an agent; 0: none
    char problem[HVD_TEXT_BYTES + 300];
    bool is_stopping;
    uint64_t stop_at_ns, late_at_ns, ping_at_ns;
} job_t;

// --- Before the ranks ----------------------------------------------------------------------------

static bool all_local(const job_t *job)
{
    for (int i = 0; i < job->plan.n_hosts; i++) {
        if (!job->hosts.list[i].is_local) {
            return false;
        }
    }
    return true;
}

static hvd_status_t find_addresses(job_t *job, err_t *err)
{
    const char *nics = job->options->network_interfaces;
    buf_t list = {0};
    if (all_local(job) && nics[0] == '\0') {
        job->info.addresses = strdup("127.0.0.1");
    } else {
        hvd_status_t status = own_addresses(nics, &list, err);
        if (status != HVD_OK) {
            buf_free(&list);
            return status;
        }
        job->info.addresses = (char *)list.data;
    }
    return job->info.addresses == NULL ? fail(err, HVD_NO_MEMORY, "no memory for addresses")
                                       : HVD_OK;
}

// At loopback, at the one address that was asked for, or everywhere.
static hvd_status_t start_rendezvous(job_t *job, err_t *err)
{
    const char *bind = "*";
    uint8_t id[4];
    hvd_status_t status;
    TRY(random_bytes(job->secret, sizeof job->secret, err), out);
    TRY(random_bytes(id, sizeof id, err), out);
    snprintf(job->info.id, sizeof job->info.id, "%02x%02x%02x%02x", id[0], id[1], id[2], id[3]);
    TRY(find_addresses(job, err), out);
    if (strcmp(job->info.addresses, "127.0.0.1") == 0) {
        bind = NULL;
    } else if (job->options->network_interfaces[0] != '\0' &&
               strchr(job->info.addresses, ',') == NULL) {
        bind = job->info.addresses;
    }
    TRY(hvd_rendezvous_start(bind, 0, job->secret, &job->server, err->text, sizeof err->text), out);
    job->info.port = hvd_rendezvous_port(job->server);
out:
    return status;
}

static hvd_status_t make_state(job_t *job, err_t *err)
{
    size_t n = (size_t)job->plan.n_ranks;
    hvd_status_t status = HVD_OK;
    job->links = links_new(&job->hosts, job->plan.n_hosts);
    job->splitters = calloc(n * N_STREAMS, sizeof *job->splitters);
    job->ends = calloc(n, sizeof *job->ends);
    job->result_fds = malloc(n * sizeof *job->result_fds);
    if (job->links == NULL || job->splitters == NULL || job->ends == NULL ||
        job->result_fds == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for %zu ranks", n);
    }
    for (size_t i = 0; i < n; i++) {
        job->result_fds[i] = -1;
    }
    if (job->options->output_filename[0] != '\0') {
        status =
            output_files_open(job->options->output_filename, job->plan.n_ranks, &job->files, err);
        job->problem_code = status != HVD_OK ? EXIT_OUTPUT : 0;
    }
    return status;
}

// --- The plan, to every agent --------------------------------------------------------------------

static void send_plan(job_t *job, int host, const orders_t *orders)
{
    agent_link_t *link = &job->links[host];
    buf_t own = {0};
    uint32_t n_ranks = 0;
    for (int i = 0; i < job->plan.n_ranks; i++) {
        n_ranks += job->plan.places[i].host == host;
    }
    size_t begin = order_plan_begin(link, orders, job->secret, n_ranks);
    for (int i = 0; i < job->plan.n_ranks; i++) {
        if (job->plan.places[i].host == host) {
            buf_clear(&own);
            job_plan_environment(&job->plan, &job->plan.places[i], link->host->name, &own);
            order_plan_rank(link, i, &own);
        }
    }
    buf_free(&own);
    order_end(link, begin);
}

static hvd_status_t send_plans(job_t *job, err_t *err)
{
    orders_t orders = {0};
    hvd_status_t status = orders_make(job->options, &job->info, &orders, err);
    for (int i = 0; status == HVD_OK && i < job->plan.n_hosts; i++) {
        send_plan(job, i, &orders);
    }
    wipe(job->secret, sizeof job->secret);
    orders_free(&orders);
    return status;
}

// --- Stopping ------------------------------------------------------------------------------------

static void stop_all(job_t *job, int signo, int grace_ms)
{
    for (int i = 0; i < job->plan.n_hosts; i++) {
        if (job->links[i].phase == LINK_READY) {
            order_stop(&job->links[i], signo, grace_ms);
        }
    }
    job->is_stopping = true;
    job->stop_at_ns = NEVER_NS;
    job->late_at_ns = deadline_in_ms(grace_ms + LATE_MS);
}

// Soon: others may have something to say about the same failure.
static void stop_soon(job_t *job)
{
    if (!job->is_stopping && job->stop_at_ns == NEVER_NS) {
        job->stop_at_ns = deadline_in_ms(MOMENT_MS);
    }
}

static void note_problem(job_t *job, int code, const char *format, ...) PRINTF_LIKE(3, 4);

static void note_problem(job_t *job, int code, const char *format, ...)
{
    va_list args;
    if (job->problem_code == 0) {
        va_start(args, format);
        vsnprintf(job->problem, sizeof job->problem, format, args);
        va_end(args);
        job->problem_code = code;
    }
    stop_soon(job);
}

static void on_signals(job_t *job)
{
    struct signalfd_siginfo info;
    char name[16];
    while (read(job->signal_fd, &info, sizeof info) == sizeof info) {
        bool is_second = job->signo != 0;
        job->signo = is_second ? job->signo : (int)info.ssi_signo;
        sink_say(job->sink, STREAM_STDERR, "%s: got %s, %s", PROGRAM,
                 signal_name((int)info.ssi_signo, name),
                 is_second ? "killing the ranks" : "stopping the ranks; a second one kills them");
        stop_all(job, is_second ? SIGKILL : SIGTERM, is_second ? 0 : GRACE_MS);
    }
}

// --- What agents report --------------------------------------------------------------------------

static bool is_rank(const job_t *job, const agent_link_t *link, uint32_t rank)
{
    return rank < (uint32_t)job->plan.n_ranks && &job->links[job->plan.places[rank].host] == link;
}

static void on_output(job_t *job, int rank, int stream, const uint8_t *data, size_t bytes)
{
    char prefix[96], text[5120];
    output_files_write(&job->files, rank, stream, data, bytes);
    prefix_make(&job->style, rank, stream, prefix, sizeof prefix);
    buf_clear(&job->lines);
    splitter_feed(&job->splitters[rank * N_STREAMS + stream], prefix, data, bytes, &job->lines);
    sink_write(job->sink, stream, job->lines.data, job->lines.len);
    const char *warning = output_files_warning(&job->files, text, sizeof text);
    if (warning != NULL) {
        sink_say(job->sink, STREAM_STDERR, "%s", warning);
    }
}

static void on_result(job_t *job, int rank, const uint8_t *data, size_t bytes)
{
    err_t err;
    if (result_write(job->options->results, rank, &job->result_fds[rank], data, bytes, &err) !=
        HVD_OK) {
        note_problem(job, EXIT_OUTPUT, "%s", err.text);
    }
}

static void on_exit_of(job_t *job, int rank, reader_t *reader)
{
    rank_end_t *end = &job->ends[rank];
    end->code = (int)get_u32(reader);
    end->signo = (int)get_u32(reader);
    end->was_oom = get_u8(reader);
    end->was_halted = get_u8(reader);
    end->was_stopped = job->is_stopping;
    end->time_ns = clock_ns();
    end->has_ended = true;
    if (end->code != 0 && !job->is_stopping) {
        bool is_first = job->stop_at_ns == NEVER_NS;
        sink_say(job->sink, STREAM_STDERR, "Process %d exit with status code %d.", rank, end->code);
        if (is_first && job->plan.n_ranks > 1) {
            sink_say(job->sink, STREAM_STDERR,
                     "Terminating remaining workers after failure of Process %d.", rank);
        }
        stop_soon(job);
    }
}

static void on_frame(job_t *job, agent_link_t *link, const frame_t *frame)
{
    reader_t reader = reader_of(frame->data, frame->bytes);
    uint32_t rank;
    link->heard_ns = clock_ns();
    switch (frame->type) {
    case FRAME_STARTED:
        if (is_rank(job, link, rank = get_u32(&reader))) {
            job->ends[rank].pid = (pid_t)get_u32(&reader);
        }
        break;
    case FRAME_OUTPUT:
        if (is_rank(job, link, rank = get_u32(&reader))) {
            int stream = get_u8(&reader) & 1;
            on_output(job, (int)rank, stream, reader.at, reader_left(&reader));
        }
        break;
    case FRAME_RESULT:
        if (is_rank(job, link, rank = get_u32(&reader)) && job->options->results[0] != '\0') {
            on_result(job, (int)rank, reader.at, reader_left(&reader));
        }
        break;
    case FRAME_EXITED:
        if (is_rank(job, link, rank = get_u32(&reader))) {
            on_exit_of(job, (int)rank, &reader);
        }
        break;
    case FRAME_PROBLEM: {
        rank = get_u32(&reader);
        int code = (int)get_u32(&reader);
        const char *text = get_text(&reader);
        if (is_rank(job, link, rank)) {
            note_problem(job, code, "rank %u on host %s: %s", rank, link->host->name, text);
        } else {
            note_problem(job, code, "host %s: %s", link->host->name, text);
        }
        break;
    }
    case FRAME_DONE:
        link->phase = LINK_DONE;
        break;
    default:
        break;
    }
}

// --- The loop ------------------------------------------------------------------------------------

static bool is_running(const job_t *job)
{
    for (int i = 0; i < job->plan.n_hosts; i++) {
        if (job->links[i].phase == LINK_READY) {
            return true;
        }
    }
    return false;
}

static void lose_host(job_t *job, agent_link_t *link, const char *how)
{
    note_problem(
        job, EXIT_UNREACHABLE,
        "lost the agent on host %s: %s; its ranks end by themselves. Is the host up, was a "
        "process killed there, was the network cut? %.200s",
        link->host->name, how, link->said);
    link->phase = LINK_FAILED;
}

static void serve_link(job_t *job, agent_link_t *link)
{
    frame_t frame;
    channel_receive(&link->channel);
    while (channel_next(&link->channel, &frame)) {
        on_frame(job, link, &frame);
    }
    if (link->channel.is_closed && link->phase == LINK_READY) {
        link_read_errors(link, job->options->verbose, job->sink);
        lose_host(job, link, "the connection is closed");
    }
}

// Often enough to be heard in time.
static uint64_t ping_ns(const job_t *job)
{
    return MIN(PING_MS * NS_PER_MS, (uint64_t)(job->options->peer_timeout * 1e9 / 4));
}

static void on_time(job_t *job, bool was_reading)
{
    uint64_t now_ns = clock_ns(), silence_ns = (uint64_t)(job->options->peer_timeout * 1e9);
    if (now_ns >= job->stop_at_ns) {
        stop_all(job, SIGTERM, GRACE_MS);
    }
    if (sink_is_broken(job->sink) && !job->is_stopping) {
        job->signo = SIGPIPE; // who reads our output has gone
        stop_all(job, SIGTERM, GRACE_MS);
    }
    bool pings = now_ns >= job->ping_at_ns;
    job->ping_at_ns = pings ? now_ns + ping_ns(job) : job->ping_at_ns;
    for (int i = 0; i < job->plan.n_hosts; i++) {
        agent_link_t *link = &job->links[i];
        if (link->phase != LINK_READY) {
            continue;
        }
        if (pings) {
            order_ping(link);
        }
        link->heard_ns = was_reading ? link->heard_ns : now_ns;
        if (!link->host->is_local && now_ns - link->heard_ns > silence_ns) {
            lose_host(job, link, "it has been silent for --gloo-timeout-seconds");
        } else if (now_ns >= job->late_at_ns) {
            lose_host(job, link, "it did not end");
        }
    }
}

static int next_wait_ms(const job_t *job, bool reads)
{
    uint64_t now_ns = clock_ns();
    uint64_t next_ns = MIN(job->stop_at_ns, MIN(job->late_at_ns, job->ping_at_ns));
    int most_ms = reads ? MAX_WAIT_MS : 5; // look again soon whether the sink has room
    return next_ns <= now_ns ? 0 : (int)MIN((next_ns - now_ns) / NS_PER_MS + 1, (uint64_t)most_ms);
}

static void poll_once(job_t *job, struct pollfd *polled)
{
    int n = job->plan.n_hosts;
    bool reads = !sink_is_full(job->sink);
    for (int i = 0; i < n; i++) {
        agent_link_t *link = &job->links[i];
        bool is_on = link->phase == LINK_READY;
        short writes = channel_wants_write(&link->channel) ? POLLOUT : 0;
        polled[2 * i] = (struct pollfd){.fd = is_on && (reads || writes) ? link->channel.in_fd : -1,
                                        .events = (short)((reads ? POLLIN : 0) | writes)};
        polled[2 * i + 1] =
            (struct pollfd){.fd = is_on ? link->process.fds[STREAM_STDERR] : -1, .events = POLLIN};
    }
    polled[2 * n] = (struct pollfd){.fd = job->signal_fd, .events = POLLIN};
    if (poll(polled, 2 * (nfds_t)n + 1, next_wait_ms(job, reads)) > 0) {
        for (int i = 0; i < n; i++) {
            if (polled[2 * i + 1].revents != 0) {
                link_read_errors(&job->links[i], job->options->verbose, job->sink);
            }
            if (polled[2 * i].revents & POLLOUT) {
                channel_send(&job->links[i].channel);
            }
            if (reads && (polled[2 * i].revents & ~POLLOUT) != 0) {
                serve_link(job, &job->links[i]);
            }
        }
        if (polled[2 * n].revents != 0) {
            on_signals(job);
        }
    }
    on_time(job, reads);
}

static void run_loop(job_t *job)
{
    struct pollfd *polled = calloc(2 * (size_t)job->plan.n_hosts + 1, sizeof *polled);
    job->ping_at_ns = clock_ns() + ping_ns(job);
    while (polled != NULL && is_running(job)) {
        poll_once(job, polled);
    }
    if (polled == NULL) {
        note_problem(job, EXIT_INTERNAL, "no memory for %d hosts", job->plan.n_hosts);
    }
    free(polled);
}

// --- The end -------------------------------------------------------------------------------------

static void flush_lines(job_t *job)
{
    char prefix[96];
    for (int i = 0; i < job->plan.n_ranks * N_STREAMS; i++) {
        prefix_make(&job->style, i / N_STREAMS, i % N_STREAMS, prefix, sizeof prefix);
        buf_clear(&job->lines);
        splitter_finish(&job->splitters[i], prefix, &job->lines);
        sink_write(job->sink, i % N_STREAMS, job->lines.data, job->lines.len);
    }
}

// Says what there is to say; the exit code.
static int conclude(job_t *job)
{
    int cause = ending_cause(job->ends, job->plan.n_ranks);
    if (job->signo != 0) {
        return EXIT_BY_SIGNAL + job->signo;
    }
    if (job->problem_code != 0) {
        sink_say(job->sink, STREAM_STDERR, "%s: the job failed: %s", PROGRAM, job->problem);
        return job->problem_code;
    }
    if (cause < 0) {
        return 0;
    }
    const splitter_t *tail = &job->splitters[cause * N_STREAMS + STREAM_STDERR];
    int blamed = ending_blamed(job->ends, job->plan.n_ranks, cause, tail);
    const host_t *host = &job->hosts.list[job->plan.places[blamed].host];
    note_first_failure(job->options->results, cause, job->ends[cause].code);
    buf_clear(&job->lines);
    ending_report(job->ends, job->plan.n_ranks, blamed, cause, host->name, tail, &job->lines);
    sink_write(job->sink, STREAM_STDERR, job->lines.data, job->lines.len);
    return job->ends[cause].code;
}

static void free_job(job_t *job)
{
    wipe(job->secret, sizeof job->secret);
    links_free(job->links, job->plan.n_hosts);
    if (job->server != NULL) {
        hvd_rendezvous_stop(job->server);
    }
    for (int i = 0; i < job->plan.n_ranks; i++) {
        for (int s = 0; job->splitters != NULL && s < N_STREAMS; s++) {
            splitter_free(&job->splitters[i * N_STREAMS + s]);
        }
        if (job->result_fds != NULL && job->result_fds[i] >= 0) {
            close(job->result_fds[i]);
        }
    }
    output_files_close(&job->files);
    buf_free(&job->lines);
    free(job->splitters);
    free(job->ends);
    free(job->result_fds);
    free(job->info.addresses);
    job_plan_free(&job->plan);
    hosts_free(&job->hosts);
    if (job->signal_fd >= 0) {
        close(job->signal_fd);
    }
}

static void tell_hosts(job_t *job)
{
    if (!job->options->verbose) {
        return;
    }
    sink_say(job->sink, STREAM_STDERR, "Filtering local host names.");
    for (int i = 0; i < job->plan.n_hosts; i++) {
        if (!job->hosts.list[i].is_local) {
            sink_say(job->sink, STREAM_STDERR, "Remote host found: %s", job->hosts.list[i].name);
        }
    }
    sink_say(job->sink, STREAM_STDERR, "%s",
             all_local(job) ? "All hosts are local, finding the interfaces with address 127.0.0.1"
                            : "Checking ssh on all remote hosts.");
}

// Agents on all hosts; false: not all came.
static bool gather(job_t *job)
{
    int64_t timeout_ms = (int64_t)(job->options->start_timeout * 1000);
    tell_hosts(job);
    links_gather(job->links, job->plan.n_hosts, job->options, deadline_in_ms(timeout_ms),
                 job->signal_fd, true, job->sink);
    for (int i = 0; i < job->plan.n_hosts; i++) {
        if (job->links[i].phase == LINK_FAILED) {
            note_problem(job, job->links[i].is_late ? EXIT_START_TIMEOUT : EXIT_UNREACHABLE, "%s",
                         job->links[i].problem);
        }
    }
    if (job->problem_code == 0) {
        on_signals(job);
    }
    if (job->options->verbose && job->problem_code == 0 && !all_local(job)) {
        sink_say(job->sink, STREAM_STDERR, "SSH was successful into all the remote hosts.");
    }
    return job->problem_code == 0 && job->signo == 0;
}

int job_run(const options_t *options)
{
    job_t job = {
        .options = options, .signal_fd = -1, .stop_at_ns = NEVER_NS, .late_at_ns = NEVER_NS};
    err_t err = {0};
    hvd_status_t status;
    TRY(hosts_choose(options, &job.hosts, &err), refuse);
    TRY(job_plan_make(&job.hosts, (int)options->num_proc, &job.plan, &err), refuse);
    hosts_find_local(&job.hosts);
    prctl(PR_SET_DUMPABLE, 0); // the secret is in this memory
    job.style = (prefix_style_t){.timestamp = options->prefix_timestamp,
                                 .color = options_want_color(options)};
    job.signal_fd = signals_open(SIG_BLOCK, (const int[]){SIGINT, SIGTERM, SIGHUP, 0});
    TRY(make_state(&job, &err), refuse);
    TRY(start_rendezvous(&job, &err), refuse);
    job.sink = sink_start();
    if (job.sink == NULL) {
        status = fail(&err, HVD_NO_MEMORY, "cannot start a thread for output");
        goto refuse;
    }
    if (gather(&job)) {
        if (send_plans(&job, &err) != HVD_OK) {
            note_problem(&job, EXIT_INTERNAL, "%s", err.text);
        }
        run_loop(&job);
        flush_lines(&job);
    }
    int code = conclude(&job);
    sink_t *sink = job.sink;
    free_job(&job);
    sink_stop(sink);
    return code;
refuse:
    say("%s", err.text);
    int refusal = job.problem_code != 0                ? job.problem_code
                  : err.status == HVD_INVALID_ARGUMENT ? EXIT_USAGE
                                                       : EXIT_INTERNAL;
    free_job(&job);
    return refusal;
}
