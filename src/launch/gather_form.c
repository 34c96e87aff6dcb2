// SPDX-License-Identifier: Apache-2.0
//
// gather_form.c - forms the generations of a job on agents that dial in.
//
// Every member has one rank. Those of the generation before keep their order and are told their new
// places, the others get their plans; each generation has a rendezvous server of its own.
#define _GNU_SOURCE
#include "launch/gather.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

void gather_give_up(gathering_t *g, const char *kind, int n, int wanted)
{
    gather_tell(g, "problem %s %d %d\n", kind, n, wanted);
    g->form_at_ns = g->give_up_at_ns = NEVER_NS;
    session_stop(&g->session, SIGTERM, LEAVE_MS);
}

// --- Generations ---------------------------------------------------------------------------------

// Slots for which somebody is there, or may still come.
static int n_possible(const gathering_t *g)
{
    int n = 0;
    for (int slot = 0; slot < g->n_max; slot++) {
        int n_failed = 0;
        bool is_there = false;
        for (int i = 0; i < g->n_arrivals; i++) {
            const arrival_t *a = g->arrivals[i];
            n_failed += a->slot == slot && a->has_failed && !a->is_spare;
            is_there |= a->slot == slot && is_alive(a);
        }
        n += is_there || n_failed < g->n_attempts;
    }
    return n;
}

// The host of slot 0 goes first, then the others by name, going round; ranks of a host by slot.
static int by_host(const void *left, const void *right, void *first)
{
    const arrival_t *a = *(arrival_t *const *)left, *b = *(arrival_t *const *)right;
    int names = strcmp(a->link->host->name, b->link->host->name);
    bool a_wraps = strcmp(a->link->host->name, first) < 0,
         b_wraps = strcmp(b->link->host->name, first) < 0;
    if (a_wraps != b_wraps) {
        return a_wraps ? 1 : -1;
    }
    return names != 0 ? names : a->slot - b->slot;
}

// Those of the generation before go first, by rank, since the others get the state of rank 0.
static int by_age(const void *left, const void *right)
{
    const arrival_t *a = *(arrival_t *const *)left, *b = *(arrival_t *const *)right;
    if (a->worker != NULL && b->worker != NULL) {
        return a->worker->place.rank - b->worker->place.rank;
    }
    if (a->worker != NULL || b->worker != NULL) {
        return a->worker != NULL ? -1 : 1;
    }
    return a->slot - b->slot;
}

static void put_in_order(arrival_t **members, int n, bool is_elastic)
{
    const char *first = NULL;
    for (int i = 0; i < n; i++) {
        first = members[i]->slot == 0 ? members[i]->link->host->name : first;
    }
    if (is_elastic || first == NULL) {
        qsort(members, (size_t)n, sizeof(arrival_t *), by_age);
    } else {
        qsort_r(members, (size_t)n, sizeof(arrival_t *), by_host, (void *)(uintptr_t)first);
    }
}

static bool is_placed(arrival_t *const *members, int n, const char *host)
{
    for (int i = 0; i < n; i++) {
        if (strcmp(members[i]->link->host->name, host) == 0) {
            return true;
        }
    }
    return false;
}

// Host by host, in the order the hosts come in.
hvd_status_t gather_place(arrival_t **members, int n, bool is_elastic, job_plan_t *plan_p,
                          err_t *err)
{
    put_in_order(members, n, is_elastic);
    host_t *hosts = calloc((size_t)n, sizeof *hosts);
    arrival_t **by_rank = calloc((size_t)n, sizeof(arrival_t *));
    hvd_status_t status = fail(err, HVD_NO_MEMORY, "no memory for %d ranks", n);
    int n_hosts = 0, n_ranks = 0;
    for (int i = 0; hosts != NULL && by_rank != NULL && i < n; i++) {
        if (is_placed(members, i, members[i]->link->host->name)) {
            continue;
        }
        hosts[n_hosts] = *members[i]->link->host;
        hosts[n_hosts].slots = 0;
        for (int k = i; k < n; k++) {
            if (strcmp(members[k]->link->host->name, members[i]->link->host->name) == 0) {
                by_rank[n_ranks++] = members[k];
                hosts[n_hosts].slots++;
            }
        }
        n_hosts++;
    }
    if (n_ranks == n) {
        status = job_plan_make(&(hosts_t){.list = hosts, .n = n_hosts}, n, plan_p, err);
        memcpy(members, by_rank, (size_t)n * sizeof(arrival_t *));
    }
    free(by_rank);
    free(hosts);
    return status;
}

// Everybody is told its place: who has a rank, and who gets one.
static hvd_status_t start(gathering_t *g, arrival_t **members, const job_plan_t *plan, err_t *err)
{
    session_t *session = &g->session;
    hvd_status_t status = session_meet(session, err);
    if (status != HVD_OK) {
        return status;
    }
    g->generation++;
    if (is_elastic(g)) {
        session->generation = g->generation;
        snprintf(session->info.id, sizeof session->info.id, "%s-%u", g->job_name, g->generation);
    }
    session->n_ranks = plan->n_ranks;
    gather_tell(g, "ranks %d\n", plan->n_ranks);
    for (int i = 0; i < plan->n_ranks; i++) {
        arrival_t *a = members[i];
        a->generation = g->generation;
        if (a->worker != NULL) {
            a->worker->place = plan->places[i];
            command_place(session, a->worker);
            continue;
        }
        a->worker = session_add_worker(session, a->link, &plan->places[i]);
        if (a->worker == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for rank %d", i);
        }
        command_plan(session, a->link);
    }
    return HVD_OK;
}

static void begin_generation(gathering_t *g)
{
    arrival_t **members = calloc((size_t)g->n_arrivals, sizeof(arrival_t *));
    job_plan_t plan = {0};
    err_t err = {0};
    int n = 0;
    for (int i = 0; members != NULL && i < g->n_arrivals; i++) {
        if (is_alive(g->arrivals[i])) {
            members[n++] = g->arrivals[i];
        }
    }
    hvd_status_t status = members != NULL ? HVD_OK : fail(&err, HVD_NO_MEMORY, "no memory");
    if (status == HVD_OK) {
        status = gather_place(members, n, is_elastic(g), &plan, &err);
    }
    if (status == HVD_OK) {
        status = start(g, members, &plan, &err);
    }
    if (status != HVD_OK) {
        session_fail(&g->session, EXIT_INTERNAL, "%s", err.text);
    }
    g->session.is_finishing |= !is_elastic(g);
    job_plan_free(&plan);
    free(members);
}

// If there are enough for it.
void gather_form(gathering_t *g)
{
    const options_t *options = g->session.options;
    int n = gather_count(g, is_alive), n_formed = (int)g->generation;
    bool is_limited = options->origins[OPTION_reset_limit] != BY_DEFAULT;
    g->form_at_ns = NEVER_NS;
    if (n_formed == 0 && n < g->n_begin) {
        return; // one was lost before it began
    }
    if (n_formed > 0 && gather_count(g, has_rank) == 0) {
        gather_give_up(g, "failed", n, g->n_min);
    } else if (is_limited && n_formed > options->reset_limit) {
        gather_give_up(g, "resets", (int)options->reset_limit, 0);
    } else if (n >= g->n_min) {
        g->give_up_at_ns = NEVER_NS;
        begin_generation(g);
    } else if (n_possible(g) < g->n_min) {
        gather_give_up(g, "exhausted", n, g->n_min);
    } else {
        g->give_up_at_ns =
            MIN(g->give_up_at_ns, deadline_in_ms((int64_t)options->elastic_timeout * 1000));
    }
}
