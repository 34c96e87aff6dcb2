// SPDX-License-Identifier: Apache-2.0
//
// heartbeat.h - signs of life between neighbours, and the watchdog for lost data that rides on
// them.
//
// Owned by heartbeat.c and, where it says so, progress.c.
#ifndef HVD_COORD_HEARTBEAT_H
#define HVD_COORD_HEARTBEAT_H

#include "coord/coord.h"
#include "wire/control.h"

// What is known of the rank at the other end of an outbox.
typedef struct neighbour {
    uint64_t heard_ns;
    bool is_known; // has been heard at all
    bool is_late;  // its silence has been reported
    coord_activity_t activity;
    coord_progress_t progress; // of a child; progress.c
} neighbour_t;

typedef struct heartbeat {
    coord_activity_t activity; // of this rank
    uint64_t due_ns;
    uint64_t away_ns, back_ns; // the last time this rank did not run: for how long, until when
} heartbeat_t;

// progress.c
typedef struct watchdog {
    coord_progress_t progress; // of this rank
    int n_stuck;               // heartbeats in a row that found the same batch without hope
    uint64_t stuck_batch;
} watchdog_t;

// --- heartbeat.c ---------------------------------------------------------------------------------

void heartbeat_tick(coord_t *coord);
uint64_t heartbeat_next_ns(const coord_t *coord);
void heartbeat_heard(coord_t *coord, int neighbour, const control_line_t *line);

// --- progress.c ----------------------------------------------------------------------------------

void progress_tell(coord_t *coord); // the parent, after a heartbeat
void progress_heard(coord_t *coord, int neighbour, const control_line_t *line);
void progress_check(coord_t *coord); // rank 0, with each heartbeat

#endif
