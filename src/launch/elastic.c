// SPDX-License-Identifier: Apache-2.0
//
// elastic.c - a job whose ranks may fail, come and go: a session with many generations.
//
// When a rank fails, or one has left because hosts changed (FRAME_READY), the next generation is
// formed (generation.c). A rank that failed is started again on its host, unless that happens too
// often there; hosts that are lost are barred. Once a rank has ended well the job only waits for
// the others. docs/elastic.md has the whole story.
//
// The session's thread; discovery has one of its own.
#include "launch/elastic.h"

#include <signal.h>
#include <stdlib.h>

#define LEFT_MS 1000 // after some have left: whose end made them leave is about to be reported
#define LOOK_MS 200  // whether discovery has news
#define FORM_MS 20   // between attempts to form a generation

static driver_t *driver_of(session_t *session)
{
    return (driver_t *)session;
}

static int n_alive(const driver_t *driver)
{
    int n = 0;
    for (int i = 0; i < driver->session.n_workers; i++) {
        n += worker_has_state(driver->session.workers[i]);
    }
    return n;
}

static void take_hosts(driver_t *driver)
{
    hosts_t found;
    if (discovery_take(driver->discovery, &found)) {
        if (!host_pool_update(&driver->pool, &found)) {
            elastic_give_up(driver, EXIT_INTERNAL, "no memory for hosts");
        }
        hosts_free(&found);
    }
}

// --- Ending, and going on ------------------------------------------------------------------------

void elastic_give_up(driver_t *driver, int code, const char *format, ...)
{
    char text[HVD_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    session_fail(&driver->session, code, "%s", text);
    session_stop(&driver->session, SIGTERM, GRACE_MS);
}

static void form_in_ms(driver_t *driver, int ms)
{
    int64_t timeout_ms = driver->session.options->elastic_timeout * 1000;
    driver->form_at_ns = MIN(driver->form_at_ns, deadline_in_ms(ms));
    driver->give_up_at_ns = MIN(driver->give_up_at_ns, deadline_in_ms(timeout_ms));
}

// The host is not used any more, and what runs there is stopped.
static void bar_host(driver_t *driver, const host_t *host)
{
    session_t *session = &driver->session;
    uint32_t random = 0;
    err_t err;
    random_bytes(&random, sizeof random, &err);
    host_pool_bar(&driver->pool, host_pool_find(&driver->pool, host), clock_ns(), random);
    for (int i = 0; i < session->n_workers; i++) {
        worker_t *worker = session->workers[i];
        worker->is_leaving |= worker->link->host == host && !worker->end.has_ended;
    }
    for (int i = 0; i < session->n_links; i++) {
        if (session->links[i]->host == host && session->links[i]->has_plan) {
            session_stop_link(session->links[i], SIGTERM, GRACE_MS);
        }
    }
}

// What becomes of the host of a rank that failed, and what is said about it.
static void judge_host(driver_t *driver, const worker_t *worker, char *text, size_t bytes)
{
    const host_t *host = worker->link->host;
    pool_host_t *known = host_pool_find(&driver->pool, host);
    if (known->is_leaving) {
        snprintf(text, bytes, "host %s is about to go", host->name);
    } else if (driver->pool.max_restarts == 0 || worker->link->phase == LINK_FAILED ||
               suspects_has_cut(worker)) {
        bar_host(driver, host);
        snprintf(text, bytes, "excluding host %s", host->name);
    } else if (host_pool_restart(&driver->pool, known, clock_ns())) {
        snprintf(text, bytes, "starting it again on host %s (%d of --elastic-restarts %d)",
                 host->name, known->n_restarts, driver->pool.max_restarts);
    } else {
        snprintf(text, bytes,
                 "not starting it again: host %s had more failures than --elastic-restarts %d",
                 host->name, driver->pool.max_restarts);
    }
}

static void on_failure(driver_t *driver, worker_t *worker)
{
    session_t *session = &driver->session;
    char text[HVD_TEXT_BYTES] = "";
    if (session->options->verbose) {
        sink_say(session->sink, STREAM_STDERR, "Process %d exit with status code %d.",
                 worker->place.rank, worker->end.code);
    }
    driver->cause = driver->cause != NULL ? driver->cause : worker;
    if (suspects_has_cut(worker)) {
        sink_say(session->sink, STREAM_STDERR,
                 "%s: the other ranks cannot reach rank %d on host %s, or hear nothing from it",
                 PROGRAM, worker->place.rank, worker->link->host->name);
    }
    if (!session->is_finishing) {
        judge_host(driver, worker, text, sizeof text);
    }
    if (session->is_finishing || n_alive(driver) == 0) { // nobody has the state any more
        session_stop(session, SIGTERM, GRACE_MS);
        return;
    }
    sink_say(session->sink, STREAM_STDERR, "%s: rank %d failed; %s, continuing with %d rank%s",
             PROGRAM, worker->place.rank, text, n_alive(driver), plural(n_alive(driver)));
    form_in_ms(driver, MOMENT_MS);
}

// One that was to join later: nobody misses it.
static void on_failure_of_spare(driver_t *driver, const worker_t *worker)
{
    char text[HVD_TEXT_BYTES] = "";
    if (!driver->session.is_finishing) {
        judge_host(driver, worker, text, sizeof text);
        sink_say(driver->session.sink, STREAM_STDERR,
                 "%s: a rank that was to join ended with exit code %d; %s", PROGRAM,
                 worker->end.code, text);
    }
}

static void on_exit_of(session_t *session, worker_t *worker)
{
    session_flush(session, worker); // another may have its rank soon
    if (worker->end.was_stopped) {
        return;
    }
    if (worker->joined == 0) {
        on_failure_of_spare(driver_of(session), worker);
    } else if (worker->end.code != 0) {
        on_failure(driver_of(session), worker);
    } else {
        session->is_finishing = true; // the others are about to end too
    }
}

// --- What agents report --------------------------------------------------------------------------

// Hellos of all that are needed complete a generation: looked at in on_time.
static void on_ready(session_t *session, agent_link_t *link)
{
    (void)session;
    (void)link;
}

static void on_lost(session_t *session, agent_link_t *link, const char *how)
{
    const rank_end_t end = {.code = EXIT_UNREACHABLE, .blames = -1};
    if (how == NULL) {
        sink_say(session->sink, STREAM_STDERR, "%s: %s; excluding host %s", PROGRAM, link->problem,
                 link->host->name);
    } else {
        sink_say(session->sink, STREAM_STDERR, "%s: lost the agent on host %s: %s", PROGRAM,
                 link->host->name, how);
    }
    if (!link->has_plan) {
        bar_host(driver_of(session), link->host);
    }
    for (int i = 0; i < session->n_workers; i++) {
        if (session->workers[i]->link == link) {
            session_end_worker(session, session->workers[i], &end);
        }
    }
    link_close(link);
}

static bool all_have_left(const session_t *session)
{
    for (int i = 0; i < session->n_workers; i++) {
        if (worker_has_state(session->workers[i]) &&
            session->workers[i]->has_left != session->generation) {
            return false;
        }
    }
    return true;
}

// A rank has left a generation, or says what it can do; a host is about to go.
static void on_frame(session_t *session, agent_link_t *link, const frame_t *frame)
{
    int id = frame->kind == FRAME_READY   ? frame->ready.rank
             : frame->kind == FRAME_WANTS ? frame->wants.rank
                                          : -1;
    if (frame->kind == FRAME_LEAVING) {
        handover_host(driver_of(session), link->host);
    }
    if (id < 0 || id >= session->n_workers || session->workers[id]->link != link) {
        return;
    }
    worker_t *worker = session->workers[id];
    if (frame->kind == FRAME_WANTS) {
        worker->wants = frame->wants.what;
        return;
    }
    if (worker->joined == 0) { // it waits for a place
        worker->is_coming = false;
        return;
    }
    worker->has_left = (uint32_t)frame->ready.generation;
    suspects_note(session, worker, frame->ready.blames);
    if (worker->has_left != session->generation || !worker_is_alive(worker)) {
        return; // it will find its next place, or has none
    }
    if (session->is_finishing) {
        session_stop(session, SIGTERM, GRACE_MS); // some have ended well, and no others come
    } else {
        form_in_ms(driver_of(session), all_have_left(session) ? 0 : LEFT_MS);
    }
}

static uint64_t on_time(session_t *session, uint64_t now_ns)
{
    driver_t *driver = driver_of(session);
    if (session->is_stopping || session->is_finishing) {
        spares_dismiss(driver);
        return NEVER_NS;
    }
    take_hosts(driver);
    if (now_ns >= driver->form_at_ns) {
        if (suspects_settle(driver, now_ns)) {
            generation_form(driver);
        }
        return driver->form_at_ns == NEVER_NS ? NEVER_NS : now_ns + FORM_MS * NS_PER_MS;
    }
    if (spares_are_wanted(session)) {
        spares_tend(driver);
    } else {
        generation_tell_news(driver);
    }
    return driver->form_at_ns;
}

// The ranks of the last generation say what became of it.
static int conclude(session_t *session)
{
    const worker_t *cause = driver_of(session)->cause;
    if (cause == NULL) {
        return 0;
    }
    rank_end_t *ends = session_ends(session);
    if (ends != NULL) {
        ends[cause->place.rank] = cause->end;
    }
    int code = session_report(session, ends, cause);
    free(ends);
    return code;
}

// --- Beginning and end ---------------------------------------------------------------------------

static const session_policy_t policy = {.is_elastic = true,
                                        .hears_signals = true,
                                        .look_ms = LOOK_MS,
                                        .on_ready = on_ready,
                                        .on_exit = on_exit_of,
                                        .on_lost = on_lost,
                                        .on_frame = on_frame,
                                        .on_time = on_time,
                                        .hands_over = handover_job,
                                        .conclude = conclude};

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
    if (!discovery_goes_on(driver->discovery) && driver->pool.n_hosts < 2 &&
        driver->pool.max_restarts == 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "an elastic job on a single host has nowhere to go when a rank fails; leave "
                    "out --elastic-restarts 0, name at least two hosts with -H, or give "
                    "--host-discovery-script");
    }
    return HVD_OK;
}

static hvd_status_t prepare(driver_t *driver, const options_t *options, err_t *err)
{
    hvd_status_t status;
    TRY(check_options(options, &driver->min_ranks, err), out);
    TRY(host_pool_read_cooldown(&driver->pool, options->blacklist_cooldown_range, err), out);
    driver->pool.max_restarts = (int)options->elastic_restarts;
    TRY(session_init(&driver->session, options, &policy, err), out);
    TRY(discovery_start(options, &driver->discovery, err), out);
    take_hosts(driver);
    TRY(check_hosts(driver, err), out);
    TRY(session_prepare(&driver->session, false, (int)options->max_num_proc, err), out);
    snprintf(driver->job_name, sizeof driver->job_name, "%.8s", driver->session.info.id);
out:
    return status;
}

int elastic_run(const options_t *options)
{
    driver_t driver = {
        .session = {.signal_fd = -1}, .form_at_ns = NEVER_NS, .give_up_at_ns = NEVER_NS};
    err_t err = {0};
    int code;
    if (prepare(&driver, options, &err) == HVD_OK) {
        form_in_ms(&driver, 0);
        code = session_run(&driver.session);
        discovery_stop(driver.discovery);
        session_close(&driver.session);
    } else {
        discovery_stop(driver.discovery);
        code = session_refuse(&driver.session, &err);
    }
    host_pool_free(&driver.pool);
    return code;
}
