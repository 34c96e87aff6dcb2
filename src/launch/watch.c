// SPDX-License-Identifier: Apache-2.0
//
// watch.c - what a session shows of itself: the job page, the status line on a terminal, a report.
//
// It keeps the model (web/web.h) and the server. Twice a second the places and ends of ranks are
// told to the model; what ranks tell of themselves their agents send, and only while somebody
// looks, or a page or a report was asked for. The server always listens at a Unix socket for this
// user, so --top can look at any job. One thread, the session's; the server has its own.
#define _GNU_SOURCE
#include "launch/session.h"
#include "web/web.h"
#include "wire/secret.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define TICK_NS (500 * NS_PER_MS)
#define PERIOD_MS 1000       // of the agents
#define LARGE_PERIOD_MS 2000 // in a job with more than LARGE ranks
#define LARGE 256

struct job_watch {
    model_t *model;
    web_t *web;
    bool always, is_on; // agents are to tell; they have been told to
    bool has_line;      // the status line is wanted
    bool has_problem;   // it was told
    uint64_t next_ns;
    char local[64], token[WEB_TOKEN_BYTES];
};

// --- Beginning -----------------------------------------------------------------------------------

static hvd_status_t find_token(const options_t *options, char token[WEB_TOKEN_BYTES], err_t *err)
{
    const char *path = options->dashboard_token_file;
    if (path[0] == '\0') {
        return secret_make_token(token, WEB_TOKEN_BYTES, err);
    }
    hvd_status_t status = secret_read_token(path, "--dashboard-token-file", SECRET_FOR_GROUP,
                                            clock_ns() + NS_PER_S, token, WEB_TOKEN_BYTES, err);
    if (status != HVD_OK) {
        return status;
    }
    size_t n = strspn(token, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_");
    token[n] = '\0';
    return n >= 16 ? HVD_OK
                   : fail(err, HVD_INVALID_ARGUMENT,
                          "no token in %s (--dashboard-token-file): it must begin with 16 to 32 "
                          "letters and digits",
                          path);
}

static void tell_address(const session_t *session, const job_watch_t *watch)
{
    const options_t *options = session->options;
    bool is_secure = options->dashboard_certificate[0] != '\0';
    const char *address =
        options->dashboard_host[0] != '\0' ? options->dashboard_host : options->dashboard_address;
    bool is_v6 = strchr(address, ':') != NULL;
    sink_say(session->sink, STREAM_STDERR, "%s: the job page is at %s://%s%s%s:%d/?token=%s",
             PROGRAM, is_secure ? "https" : "http", is_v6 ? "[" : "", address, is_v6 ? "]" : "",
             web_port(watch->web),
             options->dashboard_token_file[0] != '\0' ? "(that of the file)" : watch->token);
}

static hvd_status_t open_page(session_t *session, job_watch_t *watch, err_t *err)
{
    const options_t *options = session->options;
    web_rules_t rules = {.model = watch->model,
                         .port = (int)MAX(options->dashboard, 0),
                         .certificate = options->dashboard_certificate,
                         .host = options->dashboard_host,
                         .token = watch->token,
                         .local = watch->local};
    hvd_status_t status = HVD_OK;
    if (options->dashboard >= 0) {
        rules.address = options->dashboard_address;
        status = find_token(options, watch->token, err);
    }
    status = status == HVD_OK ? web_open(&rules, &watch->web, err) : status;
    if (status == HVD_OK && options->dashboard >= 0) {
        tell_address(session, watch);
    }
    return status;
}

hvd_status_t watch_open(session_t *session, err_t *err)
{
    const options_t *options = session->options;
    const char *terminal = environment("TERM");
    job_watch_t *watch = calloc(1, sizeof *watch);
    if (watch != NULL) {
        char *title[] = {(char *)options->title};
        bool has_title = options->title[0] != '\0';
        watch->model =
            model_new(has_title ? title : options->command, has_title ? 1 : options->n_command);
    }
    if (watch == NULL || watch->model == NULL) {
        free(watch);
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    session->watch = watch;
    watch->has_line = !options->no_progress && isatty(STDERR_FILENO) && terminal != NULL &&
                      strcmp(terminal, "dumb") != 0;
    watch->always = options->dashboard >= 0 || options->report[0] != '\0' || watch->has_line;
    snprintf(watch->local, sizeof watch->local, WATCH_NAME, (unsigned)geteuid(), (int)getpid());
    return open_page(session, watch, err);
}

// --- What agents tell ----------------------------------------------------------------------------

void watch_hear(session_t *session, const worker_t *worker, const char *page)
{
    if (session->watch != NULL) {
        model_snapshot(session->watch->model, worker->id, page);
    }
}

void watch_output(session_t *session, const worker_t *worker, bytes_t data)
{
    const job_watch_t *watch = session->watch;
    if (watch != NULL && watch->always) {
        model_output(watch->model, worker->id, data.data, data.len);
    }
}

void watch_failure(session_t *session, bytes_t block)
{
    if (session->watch != NULL) {
        model_failure(session->watch->model, block.data, block.len);
    }
}

void watch_end(session_t *session, const worker_t *worker)
{
    const rank_end_t *end = &worker->end;
    char name[16], how[64];
    if (session->watch == NULL) {
        return;
    }
    model_end(session->watch->model, worker->id, end->code, end->signo);
    if (end->code != 0 && !end->was_stopped) {
        snprintf(how, sizeof how, end->signo != 0 ? "killed by %s" : "exit code %s",
                 end->signo != 0 ? signal_name(end->signo, name) : "");
        if (end->signo == 0) {
            snprintf(how, sizeof how, "exit code %d", end->code);
        }
        model_event(session->watch->model, 'f', "rank %d on host %s: %s%s%s%s", worker->place.rank,
                    worker->link->host->name, how, end->was_oom ? ": out of memory" : "",
                    end->what[0] != '\0' ? "; it " : "", end->what);
    }
}

// --- In time -------------------------------------------------------------------------------------

// Of an elastic job: its host was taken away, or has another agent by now.
static bool has_left(const session_t *session, const agent_link_t *link)
{
    return session->generation > 0 && (link->phase == LINK_DONE || link->phase == LINK_FAILED);
}

static void tell_hosts(const session_t *session, const job_watch_t *watch)
{
    int n_ready = 0, n_hosts = 0;
    const char *missing = "";
    for (int i = 0; i < session->n_links; i++) {
        const agent_link_t *link = session->links[i];
        bool is_ready = link->phase == LINK_READY || link->phase == LINK_DONE;
        if (has_left(session, link)) {
            continue;
        }
        n_hosts++;
        n_ready += is_ready;
        missing = link_is_coming(link) && missing[0] == '\0' ? link->host->name : missing;
    }
    if (n_hosts > 0) { // else the job is over, and was on those that are known
        model_hosts(watch->model, n_ready, n_hosts, missing);
    }
}

static void tell_places(const session_t *session, const job_watch_t *watch)
{
    model_generation(watch->model, session->generation, session->n_ranks);
    for (int i = 0; i < session->n_workers; i++) {
        const worker_t *worker = session->workers[i];
        bool is_old = session->generation > 0 && worker->end.has_ended;
        if (worker->is_leaving || is_old) {
            model_gone(watch->model, worker->id);
        } else {
            model_place(watch->model, worker->id, worker->place.rank, worker->link->host->name,
                        worker->end.pid);
        }
    }
}

static void command_watching(session_t *session, job_watch_t *watch)
{
    bool wanted = watch->always || (watch->web != NULL && web_is_watched(watch->web));
    int period_ms = session->n_ranks > LARGE ? LARGE_PERIOD_MS : PERIOD_MS;
    for (int i = 0; i < session->n_links; i++) {
        agent_link_t *link = session->links[i];
        if (link->phase == LINK_READY && link->has_plan && !link->is_stopping &&
            link->is_watched != wanted) {
            command_watch(link, wanted ? period_ms : 0);
            link->is_watched = wanted;
        }
    }
}

static void show_line(session_t *session, const job_watch_t *watch)
{
    char text[160] = "", progress[120];
    model_t *model = watch->model; // besides the sums, read as it lies: only this thread writes it
    lock_take(&model->lock);
    model_sums_t sums = model_sums(model);
    lock_release(&model->lock);
    model_progress(model, progress, sizeof progress);
    if (session->is_stopping || sums.n_there == 0) {
        text[0] = '\0';
    } else if (model->missing[0] != '\0') {
        snprintf(text, sizeof text, "%d of %d hosts ready, waiting for host %s", model->n_ready,
                 model->n_hosts, model->missing);
    } else if (sums.n_started < sums.n_there && strcmp(model->state, "over") != 0) {
        snprintf(text, sizeof text, "%d of %d ranks ready", sums.n_started, sums.n_there);
    } else if (progress[0] != '\0') {
        snprintf(text, sizeof text, "%s", progress);
    }
    sink_status(session->sink, text);
}

uint64_t watch_next_ns(const session_t *session)
{
    return session->watch != NULL ? session->watch->next_ns : NEVER_NS;
}

void watch_tick(session_t *session)
{
    job_watch_t *watch = session->watch;
    uint64_t now_ns = clock_ns();
    if (watch == NULL || now_ns < watch->next_ns) {
        return;
    }
    watch->next_ns = now_ns + TICK_NS;
    tell_hosts(session, watch);
    tell_places(session, watch);
    if (session->problem_code != 0 && !watch->has_problem) {
        watch->has_problem = true;
        model_event(watch->model, 'f', "%s", session->problem);
        model_failure(watch->model, session->problem, strlen(session->problem));
    }
    command_watching(session, watch);
    if (watch->has_line) {
        show_line(session, watch);
    }
}

// --- The end -------------------------------------------------------------------------------------

static void write_report(session_t *session, const job_watch_t *watch)
{
    const char *path = session->options->report;
    buf_t data = {0};
    page_t page = {0};
    model_frozen_json(watch->model, &data);
    bool is_made = !data.failed && page_make(&data, &page);
    int fd = is_made ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
    bool is_written =
        file != NULL && fwrite(page.html.data, 1, page.html.len, file) == page.html.len;
    is_written &= file != NULL && fclose(file) == 0;
    if (is_written) {
        sink_say(session->sink, STREAM_STDERR, "%s: the report is in %s", PROGRAM, path);
    } else {
        sink_say(session->sink, STREAM_STDERR, "%s: warning: cannot write the report to %s: %s",
                 PROGRAM, path, strerror(is_made ? errno : ENOMEM));
    }
    page_free(&page);
    buf_free(&data);
}

int watch_over(session_t *session, int code)
{
    job_watch_t *watch = session->watch;
    if (watch == NULL) {
        return code;
    }
    watch->next_ns = 0;
    watch_tick(session);
    sink_status(session->sink, "");
    model_over(watch->model, code);
    if (session->options->report[0] != '\0') {
        write_report(session, watch);
    }
    return code;
}

void watch_close(session_t *session)
{
    job_watch_t *watch = session->watch;
    if (watch != NULL) {
        web_close(watch->web);
        model_free(watch->model);
        wipe(watch->token, sizeof watch->token);
        free(watch);
        session->watch = NULL;
    }
}
