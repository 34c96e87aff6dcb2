// SPDX-License-Identifier: Apache-2.0
//
// handover.c - the end of a host, or of an elastic job, that is told of in advance.
//
// Schedulers send SIGTERM a while before they take a host back: a pod that is drained, a machine of
// the spot market, a job at its time limit. An agent that gets it only passes it on. The host then
// counts as one that was removed: its ranks leave at the end of a step, with everything they did,
// and others take their places. It is used again once its agent dials anew, or discovery has missed
// it.
//
// Where the job itself is to end, or nobody would have its state without that host, ranks that keep
// checkpoints are told: they write what they have at the end of a step, and end.
//
// The session's thread.
#include "launch/elastic.h"

#include <signal.h>

static int n_alive(const session_t *session, const host_t *elsewhere_than)
{
    int n = 0;
    for (int i = 0; i < session->n_workers; i++) {
        const worker_t *worker = session->workers[i];
        n += worker_is_alive(worker) && worker->link->host != elsewhere_than;
    }
    return n;
}

static bool keeps_checkpoints(const session_t *session)
{
    for (int i = 0; i < session->n_workers; i++) {
        if (worker_is_alive(session->workers[i]) &&
            (session->workers[i]->wants & WANTS_WARNING) != 0) {
            return true;
        }
    }
    return false;
}

bool handover_job(session_t *session)
{
    driver_t *driver = (driver_t *)session;
    int64_t seconds = session->options->handover_timeout;
    bool can = seconds > 0 && !session->is_stopping && !session->is_finishing &&
               driver->form_at_ns == NEVER_NS && keeps_checkpoints(session);
    if (can) {
        sink_say(session->sink, STREAM_STDERR,
                 "%s: the ranks write a checkpoint at the end of their step, and end within %lld s "
                 "(--handover-timeout)",
                 PROGRAM, (long long)seconds);
        session->is_finishing = true; // no others come
        session->stop_at_ns = deadline_in_ms((int)seconds * 1000);
        generation_tell(driver, NEWS_ENDING);
    }
    return can;
}

void handover_host(driver_t *driver, const host_t *host)
{
    session_t *session = &driver->session;
    pool_host_t *known = host_pool_find(&driver->pool, host);
    if (known->is_leaving || session->is_stopping || session->is_finishing) {
        return;
    }
    sink_say(session->sink, STREAM_STDERR, "%s: host %s is about to go: its agent got SIGTERM",
             PROGRAM, host->name);
    if (n_alive(session, host) > 0) {
        known->is_leaving = true; // its ranks hear of it by generation_tell_news
    } else if (handover_job(session)) {
        session->signo = SIGTERM;
    } else {
        session_fail(session, EXIT_BY_SIGNAL + SIGTERM,
                     "host %s is to be left, and no other host has the state of the job; "
                     "hvd.elastic.run(checkpoint=...) would keep it",
                     host->name);
    }
}
