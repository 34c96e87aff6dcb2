// SPDX-License-Identifier: Apache-2.0
//
// generation.c - forms the next generation of an elastic job.
//
// A generation is a set of ranks with a rendezvous server of its own. host_pool.c says how many
// ranks each host has, agents are brought up for new ones, and then everybody is told its place:
// new ranks by their plan, the others by FRAME_PLACE. The old server ends, which frees ranks that
// still wait there.
#define _GNU_SOURCE
#include "launch/elastic.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

// --- Who there is --------------------------------------------------------------------------------

static bool is_fresh(const agent_link_t *link)
{
    return !link->has_plan && link->phase != LINK_FAILED;
}

agent_link_t *generation_fresh_link(const session_t *session, const pool_host_t *host)
{
    for (int i = 0; i < session->n_links; i++) {
        if (session->links[i]->host == &host->host && is_fresh(session->links[i])) {
            return session->links[i];
        }
    }
    return NULL;
}

// Where agents dial, a host is there when its agent is.
static void note_absent(driver_t *driver)
{
    const session_t *session = &driver->session;
    for (int i = 0; i < driver->pool.n_hosts && session->awaited != NULL; i++) {
        pool_host_t *host = driver->pool.hosts[i];
        const agent_link_t *link = generation_fresh_link(session, host);
        bool has_come = link != NULL && link->phase == LINK_READY;
        host->is_full =
            !host->host.is_local && !has_come && !awaited_has(session->awaited, host->host.name);
        host->is_absent = host->is_full && host->n_alive == 0;
        host->is_leaving &= host->is_full || host->n_alive > 0; // another agent has come since
    }
}

void generation_count(driver_t *driver)
{
    const session_t *session = &driver->session;
    for (int i = 0; i < driver->pool.n_hosts; i++) {
        pool_host_t *host = driver->pool.hosts[i];
        host->n_alive = host->n_spare = host->n_coming = 0;
    }
    for (int i = 0; i < session->n_workers; i++) {
        const worker_t *worker = session->workers[i];
        pool_host_t *host = host_pool_find(&driver->pool, worker->link->host);
        bool is_alive = worker_is_alive(worker);
        host->n_alive += is_alive && worker->joined > 0;
        host->n_spare += is_alive && worker->joined == 0;
        host->n_coming += worker->is_coming && !worker->end.has_ended && !worker->is_leaving;
    }
    note_absent(driver);
}

// --- Agents and places ---------------------------------------------------------------------------

// Agents for all hosts that get more ranks than they have; false: not all are there yet.
static bool recruit(driver_t *driver)
{
    session_t *session = &driver->session;
    bool are_ready = true;
    for (int i = 0; i < driver->pool.n_order && !session->is_stopping; i++) {
        pool_host_t *host = driver->pool.order[i];
        if (host->quota <= host->n_alive + host->n_spare) {
            continue;
        }
        agent_link_t *link = generation_fresh_link(session, host);
        if (link == NULL && session_add_link(session, &host->host) == NULL) {
            elastic_give_up(driver, EXIT_INTERNAL, "no memory for host %s", host->host.name);
        }
        are_ready = are_ready && link != NULL && link->phase == LINK_READY;
    }
    return are_ready && !session->is_stopping;
}

static hvd_status_t next_rendezvous(driver_t *driver, err_t *err)
{
    session_t *session = &driver->session;
    hvd_status_t status = session_meet(session, err);
    if (status == HVD_OK) {
        session->generation++;
        snprintf(session->info.id, sizeof session->info.id, "%s-%u", driver->job_name,
                 session->generation);
    }
    return status;
}

// Ranks of the host in order: those that go on, then new ones. Those too many leave.
static bool fill_host(driver_t *driver, pool_host_t *host, const rank_place_t *places)
{
    session_t *session = &driver->session;
    agent_link_t *link = generation_fresh_link(session, host);
    int n_old = session->n_workers, n = 0;
    for (int i = 0; i < 2 * n_old; i++) { // first those that have the state of the job
        worker_t *worker = session->workers[i % n_old];
        bool is_turn = worker_has_state(worker) == (i < n_old) && worker_is_alive(worker);
        if (worker->link->host == &host->host && is_turn) {
            worker->is_leaving = n >= host->quota;
            worker->joined = worker->is_leaving ? worker->joined : session->generation;
            worker->place = worker->is_leaving ? worker->place : places[n++];
        }
    }
    for (; n < host->quota; n++) {
        worker_t *worker = session_add_worker(session, link, &places[n]);
        if (worker == NULL) {
            return false;
        }
        worker->joined = session->generation;
    }
    return true;
}

// First those that run, so that an agent that is sent its plan now is not told twice.
static void send_places(session_t *session)
{
    for (int i = 0; i < session->n_workers; i++) {
        worker_t *worker = session->workers[i];
        bool is_told = !worker->end.has_ended && !worker->is_coming;
        if (link_is_running(worker->link) && !worker->link->is_stopping && is_told) {
            command_place(session, worker);
        }
    }
    for (int i = 0; i < session->n_links; i++) {
        agent_link_t *link = session->links[i];
        if (is_fresh(link) && session_has_workers(session, link)) {
            command_plan(session, link);
        } else if (is_fresh(link)) { // the host has no need of it any more
            link->phase = LINK_FAILED;
            link_close(link);
        }
    }
}

// It has ranks in this generation, or starts some for a later one.
static bool has_use(const driver_t *driver, const host_t *host)
{
    const pool_host_t *known = host_pool_find(&driver->pool, host);
    return known->quota > 0 || (driver->pool.starts_none && known->n_coming > 0);
}

// Hosts that are gone, or have no place, keep nobody.
static void dismiss_hosts(driver_t *driver)
{
    session_t *session = &driver->session;
    for (int i = 0; i < session->n_workers; i++) {
        worker_t *worker = session->workers[i];
        bool has_place = has_use(driver, worker->link->host);
        worker->is_leaving |= !has_place && !worker->end.has_ended;
    }
    for (int i = 0; i < session->n_links; i++) {
        agent_link_t *link = session->links[i];
        if (!has_use(driver, link->host) && link->has_plan && !link->is_stopping) {
            session_stop_link(link, SIGTERM, GRACE_MS);
        }
    }
}

static bool fill_hosts(driver_t *driver, const job_plan_t *plan)
{
    int rank = 0;
    for (int i = 0; i < driver->pool.n_order; i++) {
        if (!fill_host(driver, driver->pool.order[i], &plan->places[rank])) {
            return false;
        }
        rank += driver->pool.order[i]->quota;
    }
    return true;
}

static hvd_status_t make_plan(const driver_t *driver, job_plan_t *plan_p, err_t *err)
{
    const host_pool_t *pool = &driver->pool;
    hosts_t hosts = {.list = calloc((size_t)pool->n_order + 1, sizeof(host_t)), .n = pool->n_order};
    if (hosts.list == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for %d hosts", pool->n_order);
    }
    for (int i = 0; i < pool->n_order; i++) {
        hosts.list[i] = pool->order[i]->host;
        hosts.list[i].slots = pool->order[i]->quota;
    }
    hvd_status_t status = job_plan_make(&hosts, 0, plan_p, err);
    free(hosts.list);
    return status;
}

static void publish(driver_t *driver)
{
    session_t *session = &driver->session;
    int64_t limit = session->options->reset_limit;
    job_plan_t plan = {0};
    err_t err = {0};
    hvd_status_t status;
    if (limit > 0 && (int64_t)session->generation > limit) {
        elastic_give_up(
            driver, 1,
            "Horovod was shutdown because number of resets during elastic job exceeded limit: "
            "%lld; raise --reset-limit if that is too few",
            (long long)limit);
        return;
    }
    TRY(make_plan(driver, &plan, &err), out);
    TRY(next_rendezvous(driver, &err), out);
    dismiss_hosts(driver);
    if (!fill_hosts(driver, &plan)) {
        status = fail(&err, HVD_NO_MEMORY, "no memory for %d ranks", plan.n_ranks);
        goto out;
    }
    session->n_ranks = plan.n_ranks;
    send_places(session);
    driver->cause = NULL;
    driver->news = 0;
    driver->form_at_ns = driver->give_up_at_ns = NEVER_NS;
    if (session->generation > 1 || session->options->verbose) {
        sink_say(session->sink, STREAM_STDERR, "%s: generation %u of the job has %d rank%s",
                 PROGRAM, session->generation, plan.n_ranks, plural(plan.n_ranks));
    }
out:
    job_plan_free(&plan);
    if (status != HVD_OK) {
        elastic_give_up(driver, EXIT_INTERNAL, "%s", err.text);
    }
}

// "; no agent has connected for a, b"
static const char *list_absent(const host_pool_t *pool, char *text, size_t bytes)
{
    size_t len = 0;
    text[0] = '\0';
    for (int i = 0; i < pool->n_hosts && len < bytes; i++) {
        if (pool->hosts[i]->is_there && pool->hosts[i]->is_absent) {
            len += (size_t)snprintf(text + len, bytes - len, "%s%s",
                                    len == 0 ? "; no agent has connected for " : ", ",
                                    pool->hosts[i]->host.name);
        }
    }
    return text;
}

void generation_form(driver_t *driver)
{
    const session_t *session = &driver->session;
    bool is_first = session->generation == 0;
    char absent[512];
    int needed = is_first ? (int)session->options->num_proc : driver->min_ranks;
    generation_count(driver);
    driver->pool.starts_none = !is_first && spares_are_wanted(session);
    int n_ranks = host_pool_share(&driver->pool, (int)session->options->max_num_proc, clock_ns());
    if (driver->pool.starts_none && n_ranks < needed) {
        driver->pool.starts_none = false;
        spares_admit(driver);
        n_ranks = host_pool_share(&driver->pool, (int)session->options->max_num_proc, clock_ns());
    }
    if (n_ranks < needed) {
        bool may_come = discovery_goes_on(driver->discovery) || host_pool_may_grow(&driver->pool);
        if (!may_come || clock_ns() >= driver->give_up_at_ns) {
            elastic_give_up(
                driver, EXIT_START_TIMEOUT,
                "the job needs %d slot%s but has %d%s%s; start more hosts, ask for fewer ranks "
                "(%s), or wait longer with --elastic-timeout",
                needed, plural(needed), n_ranks,
                may_come ? " after --elastic-timeout" : ", and no more are expected",
                list_absent(&driver->pool, absent, sizeof absent), is_first ? "-np" : "--min-np");
        }
        return;
    }
    if (recruit(driver)) {
        publish(driver);
    }
}

// --- News ----------------------------------------------------------------------------------------

void generation_tell(driver_t *driver, unsigned news)
{
    session_t *session = &driver->session;
    driver->news = news;
    driver->n_news++;
    for (int i = 0; i < session->n_links; i++) {
        if (link_is_running(session->links[i])) {
            command_news(session->links[i], driver->n_news, (int)news);
        }
    }
}

void generation_tell_news(driver_t *driver)
{
    generation_count(driver);
    driver->pool.starts_none = false;
    host_pool_share(&driver->pool, (int)driver->session.options->max_num_proc, clock_ns());
    unsigned news = host_pool_news(&driver->pool);
    if (news != 0 && news != driver->news) {
        generation_tell(driver, news);
    }
}
