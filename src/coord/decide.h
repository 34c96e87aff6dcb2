// SPDX-License-Identifier: Apache-2.0
//
// decide.h - the queue of decisions, and the batches this rank is running.
//
// Owned by decide.c; whoever applies a record opens a verdict, fills and closes it.
#ifndef HVD_COORD_DECIDE_H
#define HVD_COORD_DECIDE_H

#include "coord/entry.h"

typedef struct held {
    entry_t *entry;
    kept_sig_t *sig;
    sizes_t *sizes;
    size_t result_at;
} held_t;

typedef struct verdict {
    struct verdict *next;
    decision_t decision;
    decision_entry_t *entries;
    held_t *held;
    int cap;
    bool rides;
    buf_t bytes; // results, or the text
} verdict_t;

typedef struct decisions {
    verdict_t *first, *last; // not yet handed out
    verdict_t *shown;        // handed out last
    verdict_t *running;      // RUN handed out, not done
    verdict_t *spare;
    int n_running; // RUN not done, handed out or not
} decisions_t;

verdict_t *decide_open(coord_t *coord, decision_kind_t kind, uint64_t batch, int set);
// Adds an entry with the state its round has just reached, and takes over the submission.
void decide_add(coord_t *coord, verdict_t *verdict, entry_t *entry, const void *result,
                size_t bytes);
void decide_text(verdict_t *verdict, const char *text, size_t bytes);
void decide_close(coord_t *coord, verdict_t *verdict);
void decide_discard(coord_t *coord, verdict_t *verdict); // instead of decide_close
void decide_fail(coord_t *coord, uint64_t tag, uint64_t batch, hvd_status_t status,
                 const char *text, size_t text_bytes);
void decide_free(coord_t *coord);
size_t decide_memory(const coord_t *coord);

#endif
