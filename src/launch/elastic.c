// SPDX-License-Identifier: Apache-2.0
//
// elastic.c - a job whose ranks may fail, come and go: generations of one job.
//
// When a rank fails, or one has left because hosts changed (FRAME_READY), the next generation is
// formed (generation.c). Hosts whose ranks fail are barred. Once a rank has ended well the job only
// waits for the others. docs/elastic.md has the whole story.
//
// One thread, one loop; discovery, output and the rendezvous have threads of their own.
#define _GNU_SOURCE
#include "launch/elastic.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define MOMENT_MS 250 // between a failure and what follows: others may fail for the same reason
#define LEFT_MS 1000  // after some have left: whose end made them leave is about to be reported
#define PING_MS 5000
#define LATE_MS 10000 // for agents to finish after ranks must be dead
#define WAIT_MS 200
#define CONNECT_WAIT_MS 20

// --- Who there is --------------------------------------------------------------------------------

static int n_alive(const driver_t *driver)
{
    int n = 0;
    for (int i = 0; i < driver->n_workers; i++) {
        n += worker_is_alive(driver->workers[i]);
    }
    return n;
}

static int n_squads_left(const driver_t *driver)
{
    int n = 0;
    for (int i = 0; i < driver->n_squads; i++) {
        n += squad_is_running(driver->squads[i]);
    }
    return n;
}

static worker_t *worker_of(driver_t *driver, const squad_t *squad, uint32_t id)
{
    bool is_right = id < (uint32_t)driver->n_workers && driver->workers[id]->squad == squad;
    return is_right ? driver->workers[id] : NULL;
}

// --- Ending --------------------------------------------------------------------------------------

void elastic_stop_squad(squad_t *squad, int signo, int grace_ms)
{
    if (squad_is_running(squad)) {
        order_stop(squad->link, signo, grace_ms);
    }
    squad->is_stopping = true;
}

static void stop_all(driver_t *driver, int signo, int grace_ms)
{
    for (int i = 0; i < driver->n_squads; i++) {
        elastic_stop_squad(driver->squads[i], signo, grace_ms);
    }
    driver->is_stopping = true;
    driver->form_at_ns = NEVER_NS;
    driver->late_at_ns = deadline_in_ms(grace_ms + LATE_MS);
}

void elastic_give_up(driver_t *driver, int code, const char *format, ...)
{
    va_list args;
    if (driver->problem_code == 0) {
        va_start(args, format);
        vsnprintf(driver->problem, sizeof driver->problem, format, args);
        va_end(args);
        driver->problem_code = code;
    }
    stop_all(driver, SIGTERM, GRACE_MS);
}

static void form_in_ms(driver_t *driver, int ms)
{
    if (!driver->is_stopping && !driver->is_finishing) {
        driver->form_at_ns = MIN(driver->form_at_ns, deadline_in_ms(ms));
        driver->give_up_at_ns =
            MIN(driver->give_up_at_ns, deadline_in_ms(driver->options->elastic_timeout * 1000));
    }
}

// The host is not used any more, and what runs there is stopped.
static void bar_host(driver_t *driver, crew_host_t *host)
{
    uint32_t random = 0;
    err_t err;
    random_bytes(&random, sizeof random, &err);
    crew_bar(&driver->crew, host, clock_ns(), random);
    for (int i = 0; i < driver->n_workers; i++) {
        worker_t *worker = driver->workers[i];
        worker->is_leaving |= worker->squad->host == host && !worker->end.has_ended;
    }
    for (int i = 0; i < driver->n_squads; i++) {
        if (driver->squads[i]->host == host && driver->squads[i]->has_plan) {
            elastic_stop_squad(driver->squads[i], SIGTERM, GRACE_MS);
        }
    }
}

static void on_failure(driver_t *driver, worker_t *worker)
{
    crew_host_t *host = worker->squad->host;
    sink_say(driver->sink, STREAM_STDERR, "Process %d exit with status code %d.",
             worker->place.rank, worker->end.code);
    driver->cause = driver->cause != NULL ? driver->cause : worker;
    if (driver->is_finishing || driver->is_stopping) {
        stop_all(driver, SIGTERM, GRACE_MS);
        return;
    }
    bar_host(driver, host);
    if (n_alive(driver) == 0) {
        stop_all(driver, SIGTERM, GRACE_MS); // nobody has the state any more
        return;
    }
    sink_say(driver->sink, STREAM_STDERR,
             "%s: host %s is left out after the failure of rank %d; %d ranks go on", PROGRAM,
             host->host.name, worker->place.rank, n_alive(driver));
    form_in_ms(driver, MOMENT_MS);
}

static void end_worker(driver_t *driver, worker_t *worker, int code, int signo, bool was_oom)
{
    char prefix[96];
    worker->end.code = code;
    worker->end.signo = signo;
    worker->end.was_oom = was_oom;
    worker->end.was_stopped = worker->is_leaving || driver->is_stopping;
    worker->end.time_ns = clock_ns();
    worker->end.has_ended = true;
    for (int stream = 0; stream < N_STREAMS; stream++) {
        prefix_make(&driver->style, worker->place.rank, stream, prefix, sizeof prefix);
        buf_clear(&driver->lines);
        splitter_finish(&worker->splitters[stream], prefix, &driver->lines);
        sink_write(driver->sink, stream, driver->lines.data, driver->lines.len);
    }
    if (worker->end.was_stopped) {
        return;
    }
    if (code != 0) {
        on_failure(driver, worker);
    } else {
        driver->is_finishing = true; // the others are about to end too
        driver->form_at_ns = NEVER_NS;
    }
}

static void lose_squad(driver_t *driver, squad_t *squad, const char *how)
{
    squad->link->phase = LINK_FAILED;
    sink_say(driver->sink, STREAM_STDERR, "%s: lost the agent on host %s: %s", PROGRAM,
             squad->host->host.name, how);
    for (int i = 0; i < driver->n_workers; i++) {
        if (driver->workers[i]->squad == squad && !driver->workers[i]->end.has_ended) {
            end_worker(driver, driver->workers[i], EXIT_UNREACHABLE, 0, false);
        }
    }
    link_close(squad->link);
}

static void take_hosts(driver_t *driver)
{
    hosts_t found;
    if (discovery_take(driver->discovery, &found)) {
        if (!crew_update(&driver->crew, &found)) {
            elastic_give_up(driver, EXIT_INTERNAL, "no memory for hosts");
        }
        hosts_free(&found);
    }
}

// --- What agents report --------------------------------------------------------------------------

static void on_output(driver_t *driver, worker_t *worker, int stream, const uint8_t *data,
                      size_t bytes)
{
    char prefix[96], text[5120];
    output_files_write(&driver->files, worker->place.rank, stream, data, bytes);
    prefix_make(&driver->style, worker->place.rank, stream, prefix, sizeof prefix);
    buf_clear(&driver->lines);
    splitter_feed(&worker->splitters[stream], prefix, data, bytes, &driver->lines);
    sink_write(driver->sink, stream, driver->lines.data, driver->lines.len);
    const char *warning = output_files_warning(&driver->files, text, sizeof text);
    if (warning != NULL) {
        sink_say(driver->sink, STREAM_STDERR, "%s", warning);
    }
}

static void on_result(driver_t *driver, worker_t *worker, const uint8_t *data, size_t bytes)
{
    err_t err;
    if (!worker->is_leaving && // else another has its rank now
        result_write(driver->options->results, worker->place.rank, &worker->result_fd, data, bytes,
                     &err) != HVD_OK) {
        elastic_give_up(driver, EXIT_OUTPUT, "%s", err.text);
    }
}

static bool all_have_left(const driver_t *driver)
{
    for (int i = 0; i < driver->n_workers; i++) {
        if (worker_is_alive(driver->workers[i]) &&
            driver->workers[i]->has_left != driver->generation) {
            return false;
        }
    }
    return true;
}

static void on_ready(driver_t *driver, worker_t *worker, uint32_t generation)
{
    worker->has_left = generation;
    if (generation != driver->generation || !worker_is_alive(worker)) {
        return; // it will find its next place, or has none
    }
    if (driver->is_finishing) {
        stop_all(driver, SIGTERM, GRACE_MS); // some have ended well, and no others come
    } else {
        form_in_ms(driver, all_have_left(driver) ? 0 : LEFT_MS);
    }
}

static void on_problem(driver_t *driver, squad_t *squad, reader_t *reader)
{
    worker_t *worker = worker_of(driver, squad, get_u32(reader));
    int code = (int)get_u32(reader);
    const char *text = get_text(reader);
    sink_say(driver->sink, STREAM_STDERR, "%s: host %s: %s", PROGRAM, squad->host->host.name, text);
    if (worker != NULL && !worker->end.has_ended) {
        end_worker(driver, worker, code, 0, false);
    } else if (worker == NULL && !squad->is_stopping && !driver->is_stopping) {
        lose_squad(driver, squad, text);
    }
}

static void on_frame(driver_t *driver, squad_t *squad, const frame_t *frame)
{
    reader_t reader = reader_of(frame->data, frame->bytes);
    bool has_worker = frame->type == FRAME_STARTED || frame->type == FRAME_OUTPUT ||
                      frame->type == FRAME_RESULT || frame->type == FRAME_EXITED ||
                      frame->type == FRAME_READY;
    worker_t *worker = has_worker ? worker_of(driver, squad, get_u32(&reader)) : NULL;
    squad->link->heard_ns = clock_ns();
    if (frame->type == FRAME_DONE) {
        squad->link->phase = LINK_DONE;
    } else if (frame->type == FRAME_PROBLEM) {
        on_problem(driver, squad, &reader);
    } else if (worker == NULL || worker->end.has_ended) {
        return;
    } else if (frame->type == FRAME_STARTED) {
        worker->end.pid = (pid_t)get_u32(&reader);
    } else if (frame->type == FRAME_OUTPUT) {
        int stream = get_u8(&reader) & 1;
        on_output(driver, worker, stream, reader.at, reader_left(&reader));
    } else if (frame->type == FRAME_RESULT && driver->options->results[0] != '\0') {
        on_result(driver, worker, reader.at, reader_left(&reader));
    } else if (frame->type == FRAME_EXITED) {
        int code = (int)get_u32(&reader), signo = (int)get_u32(&reader);
        end_worker(driver, worker, code, signo, get_u8(&reader));
    } else if (frame->type == FRAME_READY) {
        on_ready(driver, worker, get_u32(&reader));
    }
}

// --- The loop ------------------------------------------------------------------------------------

static void serve_squad(driver_t *driver, squad_t *squad)
{
    frame_t frame;
    channel_receive(&squad->link->channel);
    while (squad->link->phase == LINK_READY && channel_next(&squad->link->channel, &frame)) {
        on_frame(driver, squad, &frame);
    }
    if (squad->link->channel.is_closed && squad->link->phase == LINK_READY) {
        link_read_errors(squad->link, driver->options->verbose, driver->sink);
        lose_squad(driver, squad, "the connection is closed");
    }
}

static void on_signals(driver_t *driver)
{
    struct signalfd_siginfo info;
    char name[16];
    while (read(driver->signal_fd, &info, sizeof info) == sizeof info) {
        bool is_second = driver->signo != 0;
        driver->signo = is_second ? driver->signo : (int)info.ssi_signo;
        sink_say(driver->sink, STREAM_STDERR, "%s: got %s, %s", PROGRAM,
                 signal_name((int)info.ssi_signo, name),
                 is_second ? "killing the ranks" : "stopping the ranks; a second one kills them");
        stop_all(driver, is_second ? SIGKILL : SIGTERM, is_second ? 0 : GRACE_MS);
    }
}

// true: some agent is still to come.
static bool bring_up(driver_t *driver)
{
    bool is_busy = false;
    for (int i = 0; i < driver->n_squads; i++) {
        squad_t *squad = driver->squads[i];
        if (squad->has_plan || squad->link->phase == LINK_FAILED) {
            continue;
        }
        bool is_done =
            links_advance(squad->link, 1, driver->options, squad->deadline_ns, driver->sink);
        is_busy |= !is_done;
        if (squad->link->phase == LINK_FAILED) {
            sink_say(driver->sink, STREAM_STDERR, "%s: %s; host %s is left out", PROGRAM,
                     squad->link->problem, squad->host->host.name);
            bar_host(driver, squad->host);
        }
    }
    return is_busy;
}

static void look_after(driver_t *driver, squad_t *squad, bool pings, bool was_reading)
{
    uint64_t now_ns = clock_ns();
    uint64_t silence_ns = (uint64_t)(driver->options->peer_timeout * 1e9);
    if (pings) {
        order_ping(squad->link);
    }
    squad->link->heard_ns = was_reading ? squad->link->heard_ns : now_ns;
    if (!squad->host->host.is_local && now_ns - squad->link->heard_ns > silence_ns) {
        lose_squad(driver, squad, "it has been silent for --gloo-timeout-seconds");
    } else if (now_ns >= driver->late_at_ns) {
        lose_squad(driver, squad, "it did not end");
    }
}

static void on_time(driver_t *driver, bool was_reading)
{
    uint64_t now_ns = clock_ns();
    uint64_t ping_ns =
        MIN(PING_MS * NS_PER_MS, (uint64_t)(driver->options->peer_timeout * 1e9 / 4));
    bool pings = now_ns >= driver->ping_at_ns;
    driver->ping_at_ns = pings ? now_ns + ping_ns : driver->ping_at_ns;
    for (int i = 0; i < driver->n_squads; i++) {
        if (squad_is_running(driver->squads[i])) {
            look_after(driver, driver->squads[i], pings, was_reading);
        }
    }
    if (sink_is_broken(driver->sink) && !driver->is_stopping) {
        driver->signo = SIGPIPE;
        stop_all(driver, SIGTERM, GRACE_MS);
    }
    if (driver->is_stopping || driver->is_finishing) {
        return;
    }
    take_hosts(driver);
    if (now_ns >= driver->form_at_ns) {
        generation_form(driver);
    } else if (driver->form_at_ns == NEVER_NS) {
        generation_tell_news(driver);
    }
}

static void poll_once(driver_t *driver, struct pollfd *polled, int wait_ms)
{
    int n = driver->n_squads;
    bool reads = !sink_is_full(driver->sink);
    for (int i = 0; i < n; i++) {
        agent_link_t *link = driver->squads[i]->link;
        bool is_on = squad_is_running(driver->squads[i]);
        short writes = is_on && channel_wants_write(&link->channel) ? POLLOUT : 0;
        polled[2 * i] = (struct pollfd){.fd = is_on && (reads || writes) ? link->channel.in_fd : -1,
                                        .events = (short)((reads ? POLLIN : 0) | writes)};
        polled[2 * i + 1] =
            (struct pollfd){.fd = is_on ? link->process.fds[STREAM_STDERR] : -1, .events = POLLIN};
    }
    polled[2 * n] = (struct pollfd){.fd = driver->signal_fd, .events = POLLIN};
    if (poll(polled, 2 * (nfds_t)n + 1, reads ? wait_ms : MIN(wait_ms, 5)) > 0) {
        for (int i = 0; i < n; i++) {
            squad_t *squad = driver->squads[i];
            if (polled[2 * i + 1].revents != 0) {
                link_read_errors(squad->link, driver->options->verbose, driver->sink);
            }
            if (polled[2 * i].revents & POLLOUT) {
                channel_send(&squad->link->channel);
            }
            if (reads && (polled[2 * i].revents & ~POLLOUT) != 0) {
                serve_squad(driver, squad);
            }
        }
        if (polled[2 * n].revents != 0) {
            on_signals(driver);
        }
    }
    on_time(driver, reads);
}

static bool is_over(const driver_t *driver)
{
    return (driver->is_stopping || driver->is_finishing) && n_squads_left(driver) == 0;
}

static void run_loop(driver_t *driver)
{
    struct pollfd *polled = NULL;
    form_in_ms(driver, 0);
    while (!is_over(driver)) {
        bool is_busy = bring_up(driver);
        bool is_forming = driver->form_at_ns != NEVER_NS;
        struct pollfd *larger =
            realloc(polled, (2 * (size_t)driver->n_squads + 1) * sizeof *polled);
        if (larger == NULL) {
            elastic_give_up(driver, EXIT_INTERNAL, "no memory for %d hosts", driver->n_squads);
            break;
        }
        polled = larger;
        poll_once(driver, polled, is_busy || is_forming ? CONNECT_WAIT_MS : WAIT_MS);
    }
    free(polled);
}

// --- Beginning and end ---------------------------------------------------------------------------

static hvd_status_t check_options(const options_t *options, int *min_ranks_p, err_t *err)
{
    int64_t np = options->num_proc, max = options->max_num_proc;
    int64_t min = options->min_num_proc > 0 ? options->min_num_proc : np;
    if (np == 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the number of ranks to start with is missing; give -np, as in: %s -np 2 "
                    "--min-np 1 --host-discovery-script ./hosts.sh python train.py",
                    PROGRAM);
    }
    if (min > np || (max > 0 && max < np)) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "-np %lld must be between --min-np %lld and --max-np %lld", (long long)np,
                    (long long)min, (long long)max);
    }
    if (options->controller == CONTROLLER_MPI || options->controller == CONTROLLER_JSRUN) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "%s itself starts elastic jobs; leave out --mpi and --jsrun", PROGRAM);
    }
    if (options->output_filename[0] != '\0' && max == 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "--output-filename needs --max-np in an elastic job, to know how many files "
                    "there may be");
    }
    *min_ranks_p = (int)min;
    return HVD_OK;
}

static hvd_status_t check_hosts(const driver_t *driver, err_t *err)
{
    if (!discovery_goes_on(driver->discovery) && driver->crew.n_hosts < 2) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "an elastic job on a single host has nowhere to go when that host fails; name "
                    "at least two with -H, or give --host-discovery-script");
    }
    return HVD_OK;
}

static hvd_status_t name_job(driver_t *driver, err_t *err)
{
    const char *nics = driver->options->network_interfaces;
    uint8_t id[4];
    buf_t list = {0};
    hvd_status_t status;
    TRY(random_bytes(driver->secret, sizeof driver->secret, err), out);
    TRY(random_bytes(id, sizeof id, err), out);
    snprintf(driver->job_name, sizeof driver->job_name, "%02x%02x%02x%02x", id[0], id[1], id[2],
             id[3]);
    snprintf(driver->info.id, sizeof driver->info.id, "%s", driver->job_name); // of no generation
    // Hosts may come from anywhere; a machine without a network has only itself.
    if (own_addresses(nics, &list, err) == HVD_OK) {
        driver->info.addresses = (char *)list.data;
    } else if (nics[0] == '\0') {
        buf_free(&list);
        driver->info.addresses = strdup("127.0.0.1");
    } else {
        buf_free(&list);
        return err->status;
    }
    status = driver->info.addresses != NULL ? HVD_OK : fail(err, HVD_NO_MEMORY, "no memory");
out:
    return status;
}

static hvd_status_t prepare(driver_t *driver, err_t *err)
{
    const options_t *options = driver->options;
    hvd_status_t status;
    TRY(check_options(options, &driver->min_ranks, err), out);
    TRY(crew_read_cooldown(&driver->crew, options->blacklist_cooldown_range, err), out);
    driver->signal_fd = signals_open(SIG_BLOCK, (const int[]){SIGINT, SIGTERM, SIGHUP, 0});
    prctl(PR_SET_DUMPABLE, 0); // the secret is in this memory
    TRY(discovery_start(options, &driver->discovery, err), out);
    take_hosts(driver);
    TRY(check_hosts(driver, err), out);
    TRY(name_job(driver, err), out);
    TRY(orders_make(options, &driver->info, &driver->orders, err), out);
    driver->orders.is_elastic = true;
    environ_put(&driver->orders.env, "HOROVOD_ELASTIC=1");
    // Who has left a generation waits for the others as long as for hosts.
    environ_put(&driver->orders.env, "HOROVOD_START_TIMEOUT=%lld",
                (long long)MAX(options->elastic_timeout, (int64_t)options->start_timeout));
    environ_put(&driver->orders.env, "HOROVOD_ELASTIC_TIMEOUT=%lld",
                (long long)options->elastic_timeout);
    if (options->output_filename[0] != '\0') {
        status = output_files_open(options->output_filename, (int)options->max_num_proc,
                                   &driver->files, err);
        driver->problem_code = status != HVD_OK ? EXIT_OUTPUT : 0;
        if (status != HVD_OK) {
            goto out;
        }
    }
    driver->sink = sink_start();
    status = driver->sink != NULL ? HVD_OK
                                  : fail(err, HVD_NO_MEMORY, "cannot start a thread for output");
out:
    return status;
}

// The block that names the cause, from the ranks of the last generation.
static int report_cause(driver_t *driver)
{
    const worker_t *cause = driver->cause;
    rank_end_t *ends = calloc((size_t)driver->n_ranks, sizeof *ends);
    for (int i = 0; ends != NULL && i < driver->n_workers; i++) {
        const worker_t *worker = driver->workers[i];
        if (worker->place.rank < driver->n_ranks && worker->end.has_ended) {
            ends[worker->place.rank] = worker->end;
        }
    }
    if (ends != NULL) {
        ends[cause->place.rank] = cause->end;
        buf_clear(&driver->lines);
        ending_report(ends, driver->n_ranks, cause->place.rank, cause->place.rank,
                      cause->squad->host->host.name, &cause->splitters[STREAM_STDERR],
                      &driver->lines);
        sink_write(driver->sink, STREAM_STDERR, driver->lines.data, driver->lines.len);
    }
    free(ends);
    note_first_failure(driver->options->results, cause->place.rank, cause->end.code);
    return cause->end.code;
}

static int conclude(driver_t *driver)
{
    if (driver->signo != 0) {
        return EXIT_BY_SIGNAL + driver->signo;
    }
    if (driver->problem_code != 0) {
        sink_say(driver->sink, STREAM_STDERR, "%s: the job failed: %s", PROGRAM, driver->problem);
        return driver->problem_code;
    }
    return driver->cause != NULL ? report_cause(driver) : 0;
}

static void free_driver(driver_t *driver)
{
    discovery_stop(driver->discovery);
    for (int i = 0; i < driver->n_squads; i++) {
        links_free(driver->squads[i]->link, 1);
        free(driver->squads[i]);
    }
    for (int i = 0; i < driver->n_workers; i++) {
        for (int stream = 0; stream < N_STREAMS; stream++) {
            splitter_free(&driver->workers[i]->splitters[stream]);
        }
        if (driver->workers[i]->result_fd >= 0) {
            close(driver->workers[i]->result_fd);
        }
        free(driver->workers[i]);
    }
    if (driver->server != NULL) {
        hvd_rendezvous_stop(driver->server);
    }
    wipe(driver->secret, sizeof driver->secret);
    free(driver->squads);
    free(driver->workers);
    free(driver->info.addresses);
    orders_free(&driver->orders);
    output_files_close(&driver->files);
    buf_free(&driver->lines);
    crew_free(&driver->crew);
    if (driver->signal_fd >= 0) {
        close(driver->signal_fd);
    }
}

int elastic_run(const options_t *options)
{
    driver_t driver = {.options = options,
                       .signal_fd = -1,
                       .form_at_ns = NEVER_NS,
                       .give_up_at_ns = NEVER_NS,
                       .late_at_ns = NEVER_NS};
    err_t err = {0};
    int code;
    if (prepare(&driver, &err) != HVD_OK) {
        say("%s", err.text);
        code = driver.problem_code != 0             ? driver.problem_code
               : err.status == HVD_INVALID_ARGUMENT ? EXIT_USAGE
                                                    : EXIT_INTERNAL;
    } else {
        driver.style = (prefix_style_t){.timestamp = options->prefix_timestamp,
                                        .color = options_want_color(options)};
        driver.ping_at_ns = clock_ns();
        run_loop(&driver);
        code = conclude(&driver);
    }
    sink_t *sink = driver.sink;
    free_driver(&driver);
    if (sink != NULL) {
        sink_stop(sink);
    }
    return code;
}
