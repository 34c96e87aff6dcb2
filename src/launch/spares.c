// SPDX-License-Identifier: Apache-2.0
//
// spares.c - ranks that are started while the others go on.
//
// After a failure the next generation usually waits for the rank that is started in place of the
// lost one, and so for its interpreter and its imports. Where the script wants to shrink
// (hvd.elastic.run(on_failure="shrink")), it is formed of those that are left. A spare is started
// with no place; when its init() waits for one, the others are told as of a host that has come, and
// leave at the end of a step for a generation that all of them are ready for.
//
// The session's thread.
#include "launch/elastic.h"

#include <signal.h>

bool spares_are_wanted(const session_t *session)
{
    for (int i = 0; i < session->n_workers; i++) {
        if (worker_has_state(session->workers[i]) &&
            (session->workers[i]->wants & WANTS_SHRINK) != 0) {
            return true;
        }
    }
    return false;
}

// As many as the host may have; the agent is there, or will be.
static void start_on(driver_t *driver, const pool_host_t *host)
{
    session_t *session = &driver->session;
    agent_link_t *link = generation_fresh_link(session, host);
    const rank_place_t none = {.rank = session->n_ranks};
    int n = host->quota - host->n_alive - host->n_spare - host->n_coming;
    if (n <= 0) {
        return;
    }
    if (link == NULL && session_add_link(session, &host->host) == NULL) {
        elastic_give_up(driver, EXIT_INTERNAL, "no memory for host %s", host->host.name);
    }
    if (link == NULL || link->phase != LINK_READY) {
        return;
    }
    for (; n > 0; n--) {
        worker_t *worker = session_add_worker(session, link, &none);
        if (worker == NULL) {
            elastic_give_up(driver, EXIT_INTERNAL, "no memory for a rank");
            return;
        }
        worker->is_coming = true;
    }
    command_plan(session, link);
}

void spares_tend(driver_t *driver)
{
    host_pool_t *pool = &driver->pool;
    unsigned news = 0;
    generation_count(driver);
    pool->starts_none = false;
    host_pool_share(pool, (int)driver->session.options->max_num_proc, clock_ns());
    for (int i = 0; i < pool->n_order && !driver->session.is_stopping; i++) {
        start_on(driver, pool->order[i]);
    }
    for (int i = 0; i < pool->n_hosts; i++) {
        news |= pool->hosts[i]->quota < pool->hosts[i]->n_alive ? NEWS_REMOVED : 0;
        news |= pool->hosts[i]->n_spare > 0 ? NEWS_ADDED : 0;
    }
    if (news != 0 && news != driver->news) {
        generation_tell(driver, news);
    }
}

void spares_admit(driver_t *driver)
{
    for (int i = 0; i < driver->session.n_workers; i++) {
        driver->session.workers[i]->is_coming = false;
    }
    generation_count(driver);
}

void spares_dismiss(driver_t *driver)
{
    for (int i = 0; i < driver->session.n_workers; i++) {
        worker_t *worker = driver->session.workers[i];
        if (worker->joined == 0 && !worker->end.has_ended && !worker->link->is_stopping) {
            worker->is_leaving = true;
            session_stop_link(worker->link, SIGTERM, GRACE_MS);
        }
    }
}
