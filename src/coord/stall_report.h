// SPDX-License-Identifier: Apache-2.0
//
// stall_report.h - what is said of a stall.
//
// stall.c asks and decides when; stall_report.c has the words. The holder of the engine calls.
#ifndef HVD_COORD_STALL_REPORT_H
#define HVD_COORD_STALL_REPORT_H

#include "coord/internal.h"

typedef enum report_kind {
    REPORT_FULL,     // who misses what, for whom others have waited for the time of the knob
    REPORT_HINT,     // a line: the job is out of its rhythm
    REPORT_DEADLOCK, // no rank can go on; nothing if one can
} report_kind_t;

typedef struct report {
    char text[CONTROL_MAX_TEXT_BYTES];
    size_t len;
    int n_ranks, n_more;
    bool must_end; // some entry waits longer than the job may
    int rank;      // for that one, perhaps among others; -1: it need not end
} report_t;

// From the answers of the open inquiry. False: there is nothing to say any more.
bool stall_write(coord_t *coord, report_kind_t kind, report_t *report);

// What ranks say of themselves, a line each.
void stall_add_said(inquiry_t *inquiry, const char *text, size_t bytes);
void stall_say(inquiry_t *inquiry, int rank, const char *before, const coord_activity_t *progress);

static inline size_t asked_bitmap_bytes(const coord_t *coord)
{
    return ((size_t)coord->params.size + 7) / 8;
}

static inline uint8_t *asked_bitmap_of(const coord_t *coord, int asked)
{
    return coord->stall.inquiry.have + (size_t)asked * asked_bitmap_bytes(coord);
}

static inline entry_t *asked_entry(const coord_t *coord, const asked_t *asked)
{
    const set_t *set = sets_find(coord, asked->set);
    return set != NULL ? entry_find(set, asked->name, asked->name_bytes) : NULL;
}

#endif
