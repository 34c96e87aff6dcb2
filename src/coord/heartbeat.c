// SPDX-License-Identifier: Apache-2.0
//
// heartbeat.c - signs of life between neighbours of the tree.
//
// A process that is killed closes its sockets; one that is stopped, starved or cut off keeps them
// open and says nothing. So every rank tells each neighbour now and then that it lives, and what it
// was last asked to do. A neighbour that stays silent is reported, and later given up: the engine
// puts both into words (DECIDE_SILENT) and ends the job, which the tree spreads. Only neighbours
// watch each other, so a rank's cost does not grow with the job: a line of some 20 bytes per
// neighbour and interval, and nothing at all in between.
//
// A rank that was itself stopped finds that everybody else has been silent. It knows better from
// its own clock: heartbeats it should have sent long ago. The time by which it is late is nobody's
// silence; it says so, and the engine explains with it what the rank is told next: that the others
// have gone on without it. No more than that time is forgiven: a rank that is held up over and over
// gives up a silent neighbour all the same, after as many heartbeats as any other.
//
// No clock of its own and no I/O, like all of coord/. The holder of the engine calls.
#include "coord/internal.h"

#include <stdio.h>

#define MAX_UNSENT_BYTES (64 * KIB)  // a neighbour that reads nothing needs no more heartbeats
#define REMEMBERED_NS (5 * NS_PER_S) // how long an absence explains an end

static bool is_on(const coord_t *coord)
{
    return coord->params.heartbeat_ns > 0;
}

uint64_t heartbeat_next_ns(const coord_t *coord)
{
    bool alone = coord->n_parents + coord->n_children == 0;
    return !is_on(coord) || alone ? NEVER_NS : coord->heartbeat.due_ns;
}

void coord_set_activity(coord_t *coord, const coord_activity_t *activity)
{
    coord->heartbeat.activity = *activity;
}

void coord_activity_text(const coord_activity_t *activity, char *text, size_t bytes)
{
    unsigned long long number = activity->n_submitted;
    double seconds = (double)activity->quiet_ns / (double)NS_PER_S;

    if (number == 0) {
        snprintf(text, bytes, "it had submitted nothing");
    } else if (activity->n_in_flight == 0) {
        snprintf(text, bytes,
                 "it had nothing in flight, and the last done was '%s' (number %llu, %.1f s "
                 "before)",
                 activity->last, number, seconds);
    } else {
        snprintf(text, bytes,
                 "it waited for %u operation%s, the newest '%s' (number %llu, %.1f s before)",
                 activity->n_in_flight, plural(activity->n_in_flight), activity->last, number,
                 seconds);
    }
}

static void report(coord_t *coord, int rank, hvd_status_t status, uint64_t silent_ns,
                   const coord_activity_t *activity)
{
    verdict_t *verdict = decide_open(coord, DECIDE_SILENT, coord->sequencer.next_batch, 0);
    if (verdict != NULL) {
        verdict->decision.rank = rank;
        verdict->decision.status = status;
        verdict->decision.silent_ns = silent_ns;
        verdict->decision.activity = activity;
        decide_close(coord, verdict);
    }
}

static uint64_t late_by_ns(const coord_t *coord, uint64_t now_ns)
{
    return now_ns - MIN(coord->heartbeat.due_ns, now_ns);
}

// Heartbeats are due every heartbeat_ns. One that is this late was held up by more than a busy
// core.
static bool was_away(const coord_t *coord, uint64_t now_ns, uint64_t *away_ns_p)
{
    const coord_params_t *params = &coord->params;
    uint64_t late_ns = late_by_ns(coord, now_ns);
    *away_ns_p = late_ns + params->heartbeat_ns;
    return coord->heartbeat.due_ns > 0 && late_ns > params->heartbeat_warn_ns / 2;
}

static void send_heartbeat(coord_t *coord, int neighbour)
{
    const coord_activity_t *activity = &coord->heartbeat.activity;
    const outbox_t *box = &coord->outboxes[neighbour];
    control_line_t line = {
        .kind = LINE_HEARTBEAT,
        .n_submitted = activity->n_submitted,
        .n_in_flight = activity->n_in_flight,
        .quiet_ns = activity->quiet_ns,
        .name = {activity->last, strnlen(activity->last, sizeof activity->last)},
    };
    if (box->bytes.len - box->sent < MAX_UNSENT_BYTES) {
        control_put(outbox_line(coord, neighbour), &line);
        if (neighbour < coord->n_parents) {
            progress_tell(coord);
        }
    }
}

// Links are still being made when a rank starts; how long that may take is not for heartbeats to
// say.
static uint64_t patience_ns(const coord_t *coord, const neighbour_t *neighbour)
{
    const coord_params_t *params = &coord->params;
    return params->heartbeat_fail_ns + (neighbour->is_known ? 0 : params->heartbeat_first_ns);
}

static void check_neighbour(coord_t *coord, int i)
{
    const coord_params_t *params = &coord->params;
    neighbour_t *neighbour = &coord->neighbours[i];
    uint64_t silent_ns = coord->now_ns - neighbour->heard_ns;
    int rank = coord->outboxes[i].rank;
    if (params->heartbeat_fail_ns > 0 && silent_ns >= patience_ns(coord, neighbour)) {
        report(coord, rank, HVD_PEER_LOST, silent_ns, &neighbour->activity);
    } else if (neighbour->is_known && !neighbour->is_late &&
               silent_ns >= params->heartbeat_warn_ns) {
        neighbour->is_late = true;
        report(coord, rank, HVD_IN_PROGRESS, silent_ns, &neighbour->activity);
    }
}

void heartbeat_tick(coord_t *coord)
{
    int n = coord_n_neighbours(coord);
    uint64_t away_ns, forgiven_ns = coord->heartbeat.due_ns == 0 ? coord->now_ns : 0;
    if (coord->now_ns < heartbeat_next_ns(coord)) {
        return;
    }
    if (was_away(coord, coord->now_ns, &away_ns)) {
        forgiven_ns = late_by_ns(coord, coord->now_ns);
        coord->heartbeat.away_ns = away_ns;
        coord->heartbeat.back_ns = coord->now_ns;
        report(coord, coord->params.rank, HVD_IN_PROGRESS, away_ns, &coord->heartbeat.activity);
    }
    for (int i = 0; i < n; i++) {
        uint64_t *heard_ns = &coord->neighbours[i].heard_ns;
        *heard_ns = MIN(*heard_ns + forgiven_ns, coord->now_ns);
        send_heartbeat(coord, i);
        check_neighbour(coord, i);
    }
    progress_check(coord);
    coord->heartbeat.due_ns = coord->now_ns + coord->params.heartbeat_ns;
}

void heartbeat_heard(coord_t *coord, int i, const control_line_t *line)
{
    neighbour_t *neighbour = &coord->neighbours[i];
    coord_activity_t *activity = &neighbour->activity;
    size_t bytes = MIN(line->name.bytes, sizeof activity->last - 1);
    if (neighbour->is_late) {
        report(coord, coord->outboxes[i].rank, HVD_OK, coord->now_ns - neighbour->heard_ns,
               activity);
    }
    neighbour->heard_ns = coord->now_ns;
    neighbour->is_known = true;
    neighbour->is_late = false;
    neighbour->progress.is_running = false; // until it says so
    activity->n_submitted = line->n_submitted;
    activity->n_in_flight = line->n_in_flight;
    activity->quiet_ns = line->quiet_ns;
    memcpy(activity->last, line->name.at, bytes);
    activity->last[bytes] = '\0';
}

bool coord_hears_all(const coord_t *coord)
{
    bool all = true;
    for (int i = 0; is_on(coord) && i < coord_n_neighbours(coord); i++) {
        all &= coord->neighbours[i].is_known;
    }
    return all;
}

// Still overdue, or back since a moment ago.
uint64_t coord_absence_ns(const coord_t *coord, uint64_t now_ns)
{
    uint64_t away_ns;
    if (is_on(coord) && was_away(coord, now_ns, &away_ns)) {
        return away_ns;
    }
    bool is_recent =
        coord->heartbeat.away_ns > 0 && now_ns - coord->heartbeat.back_ns < REMEMBERED_NS;
    return is_recent ? coord->heartbeat.away_ns : 0;
}
