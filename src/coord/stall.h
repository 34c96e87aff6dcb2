// SPDX-License-Identifier: Apache-2.0
//
// stall.h - what waits too long, and for whom.
//
// Owned by stall.c.
#ifndef HVD_COORD_STALL_H
#define HVD_COORD_STALL_H

#include "coord/coord.h"
#include "wire/control.h"

typedef struct asked {
    int set; // -1: none here
    char *name;
    size_t name_bytes;
} asked_t;

// A question about stalled entries that travels down and is answered upward.
typedef struct inquiry {
    bool is_open;
    uint32_t number;
    int n_asked;
    asked_t asked[CONTROL_MAX_ASKED];
    uint8_t *have; // n_asked bitmaps of all ranks
    size_t have_bytes;
    uint8_t *answered; // per child
    int n_missing;     // children that have not answered
    uint64_t deadline_ns;
    uint64_t warn_ns;   // sequencer: how long the entries waited at least
    bool is_probe;      // sequencer: reported only if no rank can go on
    uint64_t batch;     // sequencer: the next one when it began
    uint32_t n_blocked; // ranks that can only wait
    char *said;         // what ranks that lack something last did, a line each; STALL_SAID_BYTES
    size_t said_bytes;
} inquiry_t;

#define STALL_SAID_BYTES (4 * KIB)

// How often the job does the same thing again, which tells when a stall is suspected.
typedef struct span {
    uint64_t longest_ns, second_ns; // of its steps, and the next after that
} span_t;

typedef struct rhythm {
    span_t span, before; // of steps: this one and the last whole one
    uint64_t noted_ns;
    int n_steps;   // in this span
    bool is_known; // enough of them have been seen
} rhythm_t;

typedef struct stall {
    inquiry_t inquiry;
    uint32_t next_inquiry;
    uint64_t checked_ns;
    rhythm_t rhythm;
    uint64_t probed_ns;     // when ranks were last asked whether they can go on
    uint64_t verdict_batch; // none can, and that has been told: the next batch then, plus 1
    uint64_t early_ns; // when something was last asked about earlier than the knob says; 0: never
} stall_t;

void stall_tick(coord_t *coord);
void stall_note_step(coord_t *coord, uint64_t interval_ns); // a name comes again after this long
uint64_t stall_next_ns(const coord_t *coord);
hvd_status_t stall_question(coord_t *coord, const control_line_t *line, err_t *err);
hvd_status_t stall_inquire(coord_t *coord, const control_line_t *line, err_t *err);
hvd_status_t stall_answer(coord_t *coord, int child, const control_line_t *line, err_t *err);
void stall_free(coord_t *coord);

#endif
