// SPDX-License-Identifier: Apache-2.0
//
// generation.c - forms the next generation of an elastic job.
//
// A generation is a set of ranks with a rendezvous server of its own. crew.c says how many ranks
// each host has, agents are brought up for new ones (a squad: one agent and the ranks it started),
// and then everybody is told its place: new ranks by their plan, the others by FRAME_PLACE. The old
// server ends, which frees ranks that still wait there.
#define _GNU_SOURCE
#include "launch/elastic.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

// --- Who there is --------------------------------------------------------------------------------

static void count_alive(driver_t *driver)
{
    for (int i = 0; i < driver->crew.n_hosts; i++) {
        driver->crew.hosts[i]->n_alive = 0;
    }
    for (int i = 0; i < driver->n_workers; i++) {
        driver->workers[i]->squad->host->n_alive += worker_is_alive(driver->workers[i]);
    }
}

// --- Agents and places ---------------------------------------------------------------------------

static squad_t *fresh_squad(const driver_t *driver, const crew_host_t *host)
{
    for (int i = 0; i < driver->n_squads; i++) {
        squad_t *squad = driver->squads[i];
        if (squad->host == host && !squad->has_plan && squad->link->phase != LINK_FAILED) {
            return squad;
        }
    }
    return NULL;
}

static void add_squad(driver_t *driver, crew_host_t *host)
{
    squad_t *squad = calloc(1, sizeof *squad);
    squad_t **squads = realloc(driver->squads, ((size_t)driver->n_squads + 1) * sizeof(squad_t *));
    const hosts_t one = {.list = &host->host, .n = 1};
    driver->squads = squads != NULL ? squads : driver->squads;
    if (squad != NULL) {
        squad->link = links_new(&one, 1);
    }
    if (squads == NULL || squad == NULL || squad->link == NULL) {
        free(squad);
        elastic_give_up(driver, EXIT_INTERNAL, "no memory for host %s", host->host.name);
        return;
    }
    squad->host = host;
    squad->deadline_ns = deadline_in_ms((int64_t)(driver->options->start_timeout * 1000));
    squads[driver->n_squads++] = squad;
}

static worker_t *add_worker(driver_t *driver, squad_t *squad)
{
    worker_t *worker = calloc(1, sizeof *worker);
    worker_t **workers =
        realloc(driver->workers, ((size_t)driver->n_workers + 1) * sizeof(worker_t *));
    driver->workers = workers != NULL ? workers : driver->workers;
    if (worker == NULL || workers == NULL) {
        free(worker);
        return NULL;
    }
    worker->id = driver->n_workers;
    worker->squad = squad;
    worker->result_fd = -1;
    workers[driver->n_workers++] = worker;
    return worker;
}

// Agents for all hosts that get more ranks than they have; false: not all are there yet.
static bool recruit(driver_t *driver)
{
    bool are_ready = true;
    for (int i = 0; i < driver->crew.n_order && !driver->is_stopping; i++) {
        crew_host_t *host = driver->crew.order[i];
        if (host->quota <= host->n_alive) {
            continue;
        }
        squad_t *squad = fresh_squad(driver, host);
        if (squad == NULL) {
            add_squad(driver, host);
        }
        are_ready = are_ready && squad != NULL && squad->link->phase == LINK_READY;
    }
    return are_ready && !driver->is_stopping;
}

static hvd_status_t next_rendezvous(driver_t *driver, err_t *err)
{
    hvd_rendezvous_t *server = NULL;
    const char *bind = strcmp(driver->info.addresses, "127.0.0.1") == 0 ? NULL : "*";
    hvd_status_t status =
        hvd_rendezvous_start(bind, 0, driver->secret, &server, err->text, sizeof err->text);
    if (status == HVD_OK) {
        if (driver->server != NULL) {
            hvd_rendezvous_stop(driver->server);
        }
        driver->server = server;
        driver->info.port = hvd_rendezvous_port(server);
        driver->generation++;
        snprintf(driver->info.id, sizeof driver->info.id, "%s-%u", driver->job_name,
                 driver->generation);
    }
    return status;
}

// What a rank is told about a generation. Where the launcher is does not change.
static void put_place(const driver_t *driver, const job_plan_t *plan, const worker_t *worker,
                      buf_t *list)
{
    buf_clear(list);
    if (worker->is_leaving) {
        environ_put(list, "HOROVOD_RANK=-1");
    } else {
        job_plan_environment(plan, &worker->place, worker->squad->host->host.name, list);
    }
    environ_put(list, "HOROVOD_RENDEZVOUS_PORT=%d", driver->info.port);
    environ_put(list, "HOROVOD_GLOO_RENDEZVOUS_PORT=%d", driver->info.port);
    environ_put(list, "HOROVOD_JOB_ID=%s", driver->info.id);
    environ_put(list, "HOROVOD_ELASTIC_WORKER=%d", worker->id);
    environ_put(list, "HOROVOD_ELASTIC_GENERATION=%u", driver->generation);
}

// Ranks of the host in order: those that go on, then new ones. Those too many leave.
static bool fill_host(driver_t *driver, crew_host_t *host, const rank_place_t *places)
{
    squad_t *squad = fresh_squad(driver, host);
    int n_old = driver->n_workers, n = 0;
    for (int i = 0; i < n_old; i++) {
        worker_t *worker = driver->workers[i];
        if (worker->squad->host == host && worker_is_alive(worker)) {
            worker->is_leaving = n >= host->quota;
            worker->place = worker->is_leaving ? worker->place : places[n++];
        }
    }
    for (; n < host->quota; n++) {
        worker_t *worker = add_worker(driver, squad);
        if (worker == NULL) {
            return false;
        }
        worker->place = places[n];
    }
    return true;
}

static void send_new(driver_t *driver, const job_plan_t *plan, squad_t *squad, buf_t *list)
{
    uint32_t n = 0;
    for (int i = 0; i < driver->n_workers; i++) {
        n += driver->workers[i]->squad == squad;
    }
    if (n == 0) { // the host has no need of it any more
        squad->link->phase = LINK_FAILED;
        link_close(squad->link);
        return;
    }
    size_t begin = order_plan_begin(squad->link, &driver->orders, driver->secret, n);
    for (int i = 0; i < driver->n_workers; i++) {
        if (driver->workers[i]->squad == squad) {
            put_place(driver, plan, driver->workers[i], list);
            order_plan_rank(squad->link, i, list);
        }
    }
    order_end(squad->link, begin);
    squad->has_plan = true;
    squad->link->heard_ns = clock_ns();
}

// First those that run, so that a squad that is sent its plan now is not told twice.
static void send_places(driver_t *driver, const job_plan_t *plan)
{
    buf_t list = {0};
    for (int i = 0; i < driver->n_workers; i++) {
        worker_t *worker = driver->workers[i];
        if (squad_is_running(worker->squad) && !worker->squad->is_stopping &&
            !worker->end.has_ended) {
            put_place(driver, plan, worker, &list);
            order_place(worker->squad->link, worker->id, &list);
        }
    }
    for (int i = 0; i < driver->n_squads; i++) {
        squad_t *squad = driver->squads[i];
        if (!squad->has_plan && squad->link->phase != LINK_FAILED) {
            send_new(driver, plan, squad, &list);
        }
    }
    buf_free(&list);
}

// Hosts that are gone, or have no place, keep nobody.
static void dismiss_hosts(driver_t *driver)
{
    for (int i = 0; i < driver->crew.n_hosts; i++) {
        crew_host_t *host = driver->crew.hosts[i];
        for (int k = 0; host->quota == 0 && k < driver->n_workers; k++) {
            worker_t *worker = driver->workers[k];
            worker->is_leaving |= worker->squad->host == host && !worker->end.has_ended;
        }
        for (int k = 0; host->quota == 0 && k < driver->n_squads; k++) {
            if (driver->squads[k]->host == host && driver->squads[k]->has_plan &&
                !driver->squads[k]->is_stopping) {
                elastic_stop_squad(driver->squads[k], SIGTERM, GRACE_MS);
            }
        }
    }
}

static bool fill_hosts(driver_t *driver, const job_plan_t *plan)
{
    int rank = 0;
    for (int i = 0; i < driver->crew.n_order; i++) {
        if (!fill_host(driver, driver->crew.order[i], &plan->places[rank])) {
            return false;
        }
        rank += driver->crew.order[i]->quota;
    }
    return true;
}

static hvd_status_t make_plan(const driver_t *driver, job_plan_t *plan_p, err_t *err)
{
    const crew_t *crew = &driver->crew;
    hosts_t hosts = {.list = calloc((size_t)crew->n_order + 1, sizeof(host_t)), .n = crew->n_order};
    if (hosts.list == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for %d hosts", crew->n_order);
    }
    for (int i = 0; i < crew->n_order; i++) {
        hosts.list[i] = crew->order[i]->host;
        hosts.list[i].slots = crew->order[i]->quota;
    }
    hvd_status_t status = job_plan_make(&hosts, 0, plan_p, err);
    free(hosts.list);
    return status;
}

static void publish(driver_t *driver)
{
    job_plan_t plan = {0};
    err_t err = {0};
    hvd_status_t status;
    if (driver->options->reset_limit > 0 &&
        (int64_t)driver->generation > driver->options->reset_limit) {
        elastic_give_up(
            driver, 1,
            "Horovod was shutdown because number of resets during elastic job exceeded limit: "
            "%lld; raise --reset-limit if that is too few",
            (long long)driver->options->reset_limit);
        return;
    }
    TRY(make_plan(driver, &plan, &err), out);
    TRY(next_rendezvous(driver, &err), out);
    dismiss_hosts(driver);
    if (!fill_hosts(driver, &plan)) {
        status = fail(&err, HVD_NO_MEMORY, "no memory for %d ranks", plan.n_ranks);
        goto out;
    }
    send_places(driver, &plan);
    driver->n_ranks = plan.n_ranks;
    driver->cause = NULL;
    driver->news = 0;
    driver->form_at_ns = driver->give_up_at_ns = NEVER_NS;
    if (driver->generation > 1 || driver->options->verbose) {
        sink_say(driver->sink, STREAM_STDERR, "%s: generation %u of the job has %d ranks", PROGRAM,
                 driver->generation, plan.n_ranks);
    }
out:
    job_plan_free(&plan);
    if (status != HVD_OK) {
        elastic_give_up(driver, EXIT_INTERNAL, "%s", err.text);
    }
}

void generation_form(driver_t *driver)
{
    int needed = driver->generation == 0 ? (int)driver->options->num_proc : driver->min_ranks;
    count_alive(driver);
    int n_ranks = crew_share(&driver->crew, (int)driver->options->max_num_proc, clock_ns());

    if (n_ranks < needed) {
        bool may_come = discovery_goes_on(driver->discovery) || crew_may_grow(&driver->crew);
        if (!may_come || clock_ns() >= driver->give_up_at_ns) {
            elastic_give_up(
                driver, EXIT_START_TIMEOUT,
                "the job needs %d slots but has %d%s; start more hosts, ask for fewer ranks "
                "(%s), or wait longer with --elastic-timeout",
                needed, n_ranks, may_come ? " after --elastic-timeout" : ", and no more will come",
                driver->generation == 0 ? "-np" : "--min-np");
        }
        return;
    }
    if (recruit(driver)) {
        publish(driver);
    }
}

// --- News ----------------------------------------------------------------------------------------

void generation_tell_news(driver_t *driver)
{
    count_alive(driver);
    crew_share(&driver->crew, (int)driver->options->max_num_proc, clock_ns());
    unsigned news = crew_news(&driver->crew);

    if (news != 0 && news != driver->news) {
        driver->news = news;
        driver->n_news++;
        for (int i = 0; i < driver->n_squads; i++) {
            if (squad_is_running(driver->squads[i])) {
                order_news(driver->squads[i]->link, driver->n_news, news);
            }
        }
    }
}
