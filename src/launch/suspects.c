// SPDX-License-Identifier: Apache-2.0
//
// suspects.c - ranks of an elastic job that others have given up, while their agent says nothing.
//
// A rank that is stopped, or that the network has cut off, does not end: its agent may live and
// well, and a generation with it would never meet. But whoever leaves a generation says because of
// whom (FRAME_READY). The most accused goes first, and among equals the one with the highest rank,
// since rank 0 has the state of the job; what it and the others on its host say counts no more, as
// whoever is cut off accuses everybody else. Its agent is asked to end it: that it was halted is a
// failure like any other. If it was not, or nobody answers, then its host cannot be reached by the
// others, whatever the launcher hears of it.
//
// The session's thread.
#include "launch/elastic.h"

#include <signal.h>

#define ANSWER_MS 1000 // for an agent to tell of the end of a rank

static worker_t *alive_at(const session_t *session, int rank)
{
    for (int i = 0; i < session->n_workers; i++) {
        if (worker_is_alive(session->workers[i]) && session->workers[i]->place.rank == rank) {
            return session->workers[i];
        }
    }
    return NULL;
}

void suspects_note(session_t *session, worker_t *accuser, int rank)
{
    const worker_t *accused = rank >= 0 ? alive_at(session, rank) : NULL;
    accuser->accuses = accused != NULL && accused != accuser ? accused->id : -1;
}

static bool is_condemned(const worker_t *worker)
{
    return worker->condemned_until_ns != 0;
}

// Somebody on this host has been condemned, or has been found to be out of reach.
static bool is_suspect(const session_t *session, const host_t *host)
{
    for (int i = 0; i < session->n_workers; i++) {
        const worker_t *worker = session->workers[i];
        if (worker->link->host == host && is_condemned(worker) &&
            worker->condemned_in == session->generation) {
            return true;
        }
    }
    return false;
}

static int n_accusers(const session_t *session, const worker_t *accused)
{
    int n = 0;
    for (int i = 0; i < session->n_workers; i++) {
        const worker_t *worker = session->workers[i];
        n += worker_is_alive(worker) && worker->has_left == session->generation &&
             worker->accuses == accused->id && !is_suspect(session, worker->link->host);
    }
    return n;
}

static worker_t *most_accused(const session_t *session)
{
    worker_t *found = NULL;
    int most = 0;
    for (int i = 0; i < session->n_workers; i++) {
        worker_t *worker = session->workers[i];
        int n = worker_is_alive(worker) && !is_condemned(worker) ? n_accusers(session, worker) : 0;
        if (n > most || (n > 0 && n == most && worker->place.rank > found->place.rank)) {
            found = worker;
            most = n;
        }
    }
    return found;
}

bool suspects_settle(driver_t *driver, uint64_t now_ns)
{
    session_t *session = &driver->session;
    const rank_end_t lost = {.code = EXIT_UNREACHABLE, .blames = -1};
    bool is_settled = true;
    worker_t *worker;
    while ((worker = most_accused(session)) != NULL) {
        worker->condemned_until_ns = now_ns + ANSWER_MS * NS_PER_MS;
        worker->condemned_in = session->generation;
        command_stop_rank(worker->link, worker->id, SIGKILL);
    }
    for (int i = 0; i < session->n_workers; i++) {
        worker = session->workers[i];
        if (is_condemned(worker) && worker_is_alive(worker)) {
            is_settled = false;
            if (now_ns >= worker->condemned_until_ns) {
                session_end_worker(session, worker, &lost);
            }
        }
    }
    return is_settled;
}

bool suspects_has_cut(const worker_t *worker)
{
    return is_condemned(worker) && !worker->end.was_halted;
}
