// SPDX-License-Identifier: Apache-2.0
//
// progress.c - notices data that has gone missing while everybody is alive.
//
// A batch that has been agreed needs no program any more: engines carry it out by themselves. So if
// nothing of it moves on any rank that runs it, while all of them are heard, nothing ever will:
// bytes were lost on the way, or a rank has lost count. No socket closes then and no heartbeat
// stops, and every rank for itself has reason to wait, since others may still be at work on its
// behalf.
//
// Therefore each heartbeat to the parent tells of the subtree: which batch is the oldest that runs,
// and how long ago something of it last moved, on the rank where that is shortest ago. Ranks run
// batches in the order of the log, so only those that run the oldest count: the others wait for
// them. Rank 0 sees the whole job, and gives up when that time exceeds what a rank may be silent. A
// child that is not heard any more is taken for one that moves: its silence is another matter.
//
// Cost: some 10 bytes a heartbeat while something runs. No clock and no I/O; the holder of the
// engine calls.
#include "coord/internal.h"

#include <stdio.h>

#define CERTAIN_HEARTBEATS 2 // in a row: what children said is up to a heartbeat old
#define FRESH_HEARTBEATS 3   // a child heard within so many is there

void coord_set_progress(coord_t *coord, const coord_progress_t *progress)
{
    coord->watchdog.progress = *progress;
}

static void merge(coord_progress_t *all, const coord_progress_t *one)
{
    if (!one->is_running || (all->is_running && all->batch < one->batch)) {
        return;
    }
    if (!all->is_running || one->batch < all->batch) {
        *all = *one;
        return;
    }
    all->least_ns = MIN(all->least_ns, one->least_ns);
    if (one->text[0] != '\0' && (all->text[0] == '\0' || one->longest_ns > all->longest_ns)) {
        all->longest_ns = one->longest_ns;
        memcpy(all->text, one->text, sizeof all->text);
    }
}

// Of this rank and all below it.
static coord_progress_t gather(const coord_t *coord)
{
    static const coord_progress_t unknown = {.is_running = true};
    coord_progress_t all = coord->watchdog.progress;
    for (int i = coord->n_parents; i < coord->n_parents + coord->n_children; i++) {
        const neighbour_t *child = &coord->neighbours[i];
        uint64_t silent_ns = coord->now_ns - MIN(child->heard_ns, coord->now_ns);
        bool is_fresh =
            child->is_known && silent_ns <= FRESH_HEARTBEATS * coord->params.heartbeat_ns;
        merge(&all, is_fresh ? &child->progress : &unknown);
    }
    return all;
}

void progress_tell(coord_t *coord)
{
    coord_progress_t all;
    if (coord->n_parents == 0 || !(all = gather(coord)).is_running) {
        return;
    }
    bool explains = all.longest_ns >= coord->params.heartbeat_warn_ns;
    control_line_t line = {
        .kind = LINE_PROGRESS,
        .batch = all.batch,
        .least_ns = all.least_ns,
        .longest_ns = all.longest_ns,
        .text = {all.text, explains ? strnlen(all.text, sizeof all.text) : 0},
    };
    control_put(line_to_parent(coord), &line);
}

void progress_heard(coord_t *coord, int neighbour, const control_line_t *line)
{
    coord_progress_t *progress = &coord->neighbours[neighbour].progress;
    size_t bytes = MIN(line->text.bytes, sizeof progress->text - 1);
    progress->is_running = true;
    progress->batch = line->batch;
    progress->least_ns = line->least_ns;
    progress->longest_ns = line->longest_ns;
    memcpy(progress->text, line->text.at, bytes);
    progress->text[bytes] = '\0';
}

void progress_check(coord_t *coord)
{
    uint64_t limit_ns = coord->params.heartbeat_fail_ns;
    if (coord->n_parents > 0 || limit_ns == 0) {
        return;
    }
    coord_progress_t all = gather(coord);
    bool is_stuck = all.is_running && all.least_ns >= limit_ns;
    bool is_same =
        is_stuck && coord->watchdog.n_stuck > 0 && coord->watchdog.stuck_batch == all.batch;
    coord->watchdog.n_stuck = is_stuck ? (is_same ? coord->watchdog.n_stuck : 0) + 1 : 0;
    coord->watchdog.stuck_batch = all.batch;
    if (coord->watchdog.n_stuck != CERTAIN_HEARTBEATS) {
        return;
    }
    verdict_t *verdict = decide_open(coord, DECIDE_STUCK, all.batch, 0);
    if (verdict != NULL) {
        verdict->decision.silent_ns = all.least_ns;
        decide_text(verdict, all.text, strlen(all.text));
        decide_close(coord, verdict);
    }
}
