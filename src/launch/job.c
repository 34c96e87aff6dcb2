// SPDX-License-Identifier: Apache-2.0
//
// job.c - a job of fixed size: a session with one generation of ranks.
//
// Only when the agents of all hosts have said hello do they get the plan, so no rank starts in
// vain. When a rank fails, others get a moment to report, then everything is stopped and the cause
// is named. An agent that is gone takes its ranks with it and fails the job.
#include "launch/session.h"

#include <signal.h>
#include <stdlib.h>

#define LOOK_MS 1000

static bool all_local(const session_t *session)
{
    for (int i = 0; i < session->n_links; i++) {
        if (!session->links[i]->host->is_local) {
            return false;
        }
    }
    return true;
}

static void tell_hosts(session_t *session)
{
    sink_say(session->sink, STREAM_STDERR, "Filtering local host names.");
    for (int i = 0; i < session->n_links; i++) {
        if (!session->links[i]->host->is_local) {
            sink_say(session->sink, STREAM_STDERR, "Remote host found: %s",
                     session->links[i]->host->name);
        }
    }
    sink_say(session->sink, STREAM_STDERR, "%s",
             all_local(session)
                 ? "All hosts are local, finding the interfaces with address 127.0.0.1"
             : session->awaited != NULL ? "Awaiting the agents of all remote hosts."
                                        : "Checking ssh on all remote hosts.");
}

// --- What happens --------------------------------------------------------------------------------

static void on_ready(session_t *session, agent_link_t *link)
{
    (void)link;
    for (int i = 0; i < session->n_links; i++) {
        if (session->links[i]->phase != LINK_READY) {
            return;
        }
    }
    if (session->options->verbose && !all_local(session) && session->awaited == NULL) {
        sink_say(session->sink, STREAM_STDERR, "SSH was successful into all the remote hosts.");
    }
    for (int i = 0; i < session->n_links; i++) {
        if (session_has_workers(session, session->links[i])) { // else a host that only waits
            command_plan(session, session->links[i]);
        }
    }
    wipe(session->secret, sizeof session->secret);
    session->is_finishing = true;
}

static void on_exit_of(session_t *session, worker_t *worker)
{
    int rank = worker->place.rank, code = worker->end.code;
    if (code == 0 || session->is_stopping) {
        return;
    }
    if (session->options->verbose) { // the closing block says which failure counts
        sink_say(session->sink, STREAM_STDERR, "Process %d exit with status code %d.", rank, code);
    }
    if (session->options->verbose && session->failed_ns == 0 && session->n_ranks > 1) {
        sink_say(session->sink, STREAM_STDERR,
                 "Terminating remaining workers after failure of Process %d.", rank);
    }
    session_stop_soon(session);
}

// ". Nor did b, c": all have the same deadline, and one of them is the first to miss it.
static const char *list_missing(const session_t *session, char *text, size_t bytes)
{
    size_t len = 0;
    text[0] = '\0';
    for (int i = 0; i < session->n_links && len < bytes; i++) {
        if (link_is_coming(session->links[i])) {
            len += (size_t)snprintf(text + len, bytes - len, "%s%s", len == 0 ? ". Nor did " : ", ",
                                    session->links[i]->host->name);
        }
    }
    return text;
}

static void on_lost(session_t *session, agent_link_t *link, const char *how)
{
    if (how == NULL) {
        char others[512];
        session_fail(session, link->is_late ? EXIT_START_TIMEOUT : EXIT_UNREACHABLE, "%s%s",
                     link->problem,
                     link->is_late ? list_missing(session, others, sizeof others) : "");
        session_stop(session, SIGTERM, 0); // nothing runs yet
        return;
    }
    session_fail(session, EXIT_UNREACHABLE,
                 "lost the agent on host %s: %s; its ranks stop on their own. Is the host up, was "
                 "a process killed there, was the network cut? %.200s",
                 link->host->name, how, link->said);
}

static void on_problem(session_t *session, agent_link_t *link, worker_t *worker, int code,
                       const char *text)
{
    if (worker != NULL) {
        session_fail(session, code, "rank %d on host %s: %s", worker->place.rank, link->host->name,
                     text);
    } else {
        session_fail(session, code, "host %s: %s", link->host->name, text);
    }
}

static int conclude(session_t *session)
{
    rank_end_t *ends = session_ends(session);
    int rank = ends != NULL ? ending_cause(ends, session->n_ranks) : -1;
    int code = rank >= 0 ? session_report(session, ends, session_worker_at(session, rank)) : 0;
    code = ends == NULL ? EXIT_INTERNAL : code;
    free(ends);
    return code;
}

// --- All together --------------------------------------------------------------------------------

const session_policy_t job_policy = {.hears_signals = true,
                                     .look_ms = LOOK_MS,
                                     .on_ready = on_ready,
                                     .on_exit = on_exit_of,
                                     .on_lost = on_lost,
                                     .on_problem = on_problem,
                                     .conclude = conclude};

static hvd_status_t add_ranks(session_t *session, const hosts_t *hosts, const job_plan_t *plan,
                              err_t *err)
{
    bool has_memory = session_add_hosts(session, hosts, plan->n_hosts, err) == HVD_OK;
    for (int i = 0; i < plan->n_ranks && has_memory; i++) {
        const rank_place_t *place = &plan->places[i];
        has_memory = session_add_worker(session, session->links[place->host], place) != NULL;
    }
    session->n_ranks = plan->n_ranks;
    return has_memory ? HVD_OK : fail(err, HVD_NO_MEMORY, "no memory for %d ranks", plan->n_ranks);
}

int job_run(const options_t *options)
{
    session_t session = {.signal_fd = -1};
    hosts_t hosts = {0};
    job_plan_t plan = {0};
    err_t err = {0};
    int code;
    hvd_status_t status;
    TRY(hosts_choose(options, &hosts, &err), out);
    TRY(job_plan_make(&hosts, (int)options->num_proc, &plan, &err), out);
    hosts_find_local(options, &hosts);
    TRY(session_init(&session, options, &job_policy, &err), out);
    TRY(add_ranks(&session, &hosts, &plan, &err), out);
    TRY(session_prepare(&session, all_local(&session), plan.n_ranks, &err), out);
    TRY(session_meet(&session, &err), out);
    if (options->verbose) {
        tell_hosts(&session);
    }
out:
    if (status == HVD_OK) {
        code = session_run(&session);
        session_close(&session);
    } else {
        code = session_refuse(&session, &err);
    }
    job_plan_free(&plan);
    hosts_free(&hosts);
    return code;
}
