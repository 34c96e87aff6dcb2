// SPDX-License-Identifier: Apache-2.0
//
// pulse.c - signs of life between neighbours of the tree.
//
// A process that is killed closes its sockets; one that is stopped, starved or cut off keeps them
// open and says nothing. So every rank tells each neighbour now and then that it lives, and what it
// was last asked to do. A neighbour that stays silent is reported, and later given up: the engine
// puts both into words (DECIDE_SILENT) and ends the job, which the tree spreads. Only neighbours
// watch each other, so a rank's cost does not grow with the job: a line of some 20 bytes per
// neighbour and interval, and nothing at all in between.
//
// A rank that was itself stopped finds that everybody else has been silent. It knows better from
// its own clock: pulses it should have sent long ago. It then blames nobody and says so, and the
// engine explains with it what the rank is told next: that the others have gone on without it.
//
// No clock of its own and no I/O, like all of coord/. The holder of the engine calls.
#include "coord/internal.h"

#include <stdio.h>

#define MAX_UNSENT_BYTES (64 * KIB)  // a neighbour that reads nothing needs no more pulses
#define REMEMBERED_NS (5 * NS_PER_S) // how long an absence explains an end

static bool is_on(const coord_t *coord)
{
    return coord->params.pulse_ns > 0;
}

uint64_t pulse_next_ns(const coord_t *coord)
{
    bool alone = coord->n_parents + coord->n_children == 0;
    return !is_on(coord) || alone ? NEVER_NS : coord->pulse_due_ns;
}

void coord_set_progress(coord_t *coord, const coord_progress_t *progress)
{
    coord->progress = *progress;
}

void coord_progress_text(const coord_progress_t *progress, char *text, size_t bytes)
{
    const char *plural = progress->n_in_flight == 1 ? "" : "s";
    unsigned long long number = progress->n_submitted;
    double seconds = (double)progress->quiet_ns / (double)NS_PER_S;

    if (number == 0) {
        snprintf(text, bytes, "it had submitted nothing");
    } else if (progress->n_in_flight == 0) {
        snprintf(text, bytes,
                 "it had nothing in flight, and the last done was '%s' (number %llu, %.1f s "
                 "before)",
                 progress->last, number, seconds);
    } else {
        snprintf(text, bytes,
                 "it waited for %u operation%s, the newest '%s' (number %llu, %.1f s before)",
                 progress->n_in_flight, plural, progress->last, number, seconds);
    }
}

static void report(coord_t *coord, int rank, hvd_status_t status, uint64_t silent_ns,
                   const coord_progress_t *progress)
{
    verdict_t *verdict = decide_open(coord, DECIDE_SILENT, coord->next_batch, 0);
    if (verdict != NULL) {
        verdict->decision.rank = rank;
        verdict->decision.status = status;
        verdict->decision.silent_ns = silent_ns;
        verdict->decision.progress = progress;
        decide_close(coord, verdict);
    }
}

// Pulses are due every pulse_ns. One that is this late was held up by more than a busy core.
static bool was_away(const coord_t *coord, uint64_t now_ns, uint64_t *away_ns_p)
{
    const coord_params_t *params = &coord->params;
    uint64_t late_ns = now_ns - MIN(coord->pulse_due_ns, now_ns);
    *away_ns_p = late_ns + params->pulse_ns;
    return coord->pulse_due_ns > 0 && late_ns > params->pulse_warn_ns / 2;
}

static void send_pulse(coord_t *coord, int neighbour)
{
    const coord_progress_t *progress = &coord->progress;
    const outbox_t *box = &coord->outboxes[neighbour];
    control_line_t line = {
        .kind = LINE_PULSE,
        .batch = progress->n_submitted,
        .id = progress->n_in_flight,
        .age_ns = progress->quiet_ns,
        .name = {progress->last, strnlen(progress->last, sizeof progress->last)},
    };
    if (box->bytes.len - box->sent < MAX_UNSENT_BYTES) {
        control_put(outbox_line(coord, neighbour), &line);
        if (neighbour < coord->n_parents) {
            still_tell(coord);
        }
    }
}

// Links are still being made when a rank starts; how long that may take is not for pulses to say.
static uint64_t patience_ns(const coord_t *coord, const neighbour_t *neighbour)
{
    const coord_params_t *params = &coord->params;
    return params->pulse_fail_ns + (neighbour->is_known ? 0 : params->pulse_first_ns);
}

static void watch(coord_t *coord, int i)
{
    const coord_params_t *params = &coord->params;
    neighbour_t *neighbour = &coord->neighbours[i];
    uint64_t silent_ns = coord->now_ns - neighbour->heard_ns;
    int rank = coord->outboxes[i].rank;
    if (params->pulse_fail_ns > 0 && silent_ns >= patience_ns(coord, neighbour)) {
        report(coord, rank, HVD_PEER_LOST, silent_ns, &neighbour->progress);
    } else if (neighbour->is_known && !neighbour->is_late && silent_ns >= params->pulse_warn_ns) {
        neighbour->is_late = true;
        report(coord, rank, HVD_IN_PROGRESS, silent_ns, &neighbour->progress);
    }
}

void pulse_tick(coord_t *coord)
{
    int n = coord_n_neighbours(coord);
    uint64_t away_ns;
    if (coord->now_ns < pulse_next_ns(coord)) {
        return;
    }
    if (was_away(coord, coord->now_ns, &away_ns)) {
        coord->away_ns = away_ns;
        coord->back_ns = coord->now_ns;
        report(coord, coord->params.rank, HVD_IN_PROGRESS, away_ns, &coord->progress);
    }
    for (int i = 0; i < n; i++) {
        bool is_first = coord->pulse_due_ns == 0 || coord->back_ns == coord->now_ns;
        if (is_first) {
            coord->neighbours[i].heard_ns = coord->now_ns;
        }
        send_pulse(coord, i);
        watch(coord, i);
    }
    still_check(coord);
    coord->pulse_due_ns = coord->now_ns + coord->params.pulse_ns;
}

void pulse_heard(coord_t *coord, int i, const control_line_t *line)
{
    neighbour_t *neighbour = &coord->neighbours[i];
    coord_progress_t *progress = &neighbour->progress;
    size_t bytes = MIN(line->name.bytes, sizeof progress->last - 1);
    if (neighbour->is_late) {
        report(coord, coord->outboxes[i].rank, HVD_OK, coord->now_ns - neighbour->heard_ns,
               progress);
    }
    neighbour->heard_ns = coord->now_ns;
    neighbour->is_known = true;
    neighbour->is_late = false;
    neighbour->still.is_running = false; // until it says so
    progress->n_submitted = line->batch;
    progress->n_in_flight = line->id;
    progress->quiet_ns = line->age_ns;
    memcpy(progress->last, line->name.at, bytes);
    progress->last[bytes] = '\0';
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
    bool is_recent = coord->away_ns > 0 && now_ns - coord->back_ns < REMEMBERED_NS;
    return is_recent ? coord->away_ns : 0;
}
