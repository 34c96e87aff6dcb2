// SPDX-License-Identifier: Apache-2.0
//
// sequence.h - what only rank 0 has: the log, the queues of complete rounds, who has an id.
//
// Owned by sequence.c. Its functions, but for those marked, run on rank 0 only and say so with
// SEQUENCER(coord).
#ifndef HVD_COORD_SEQUENCE_H
#define HVD_COORD_SEQUENCE_H

#include "coord/entry.h"

typedef struct sequencer {
    uint64_t next_batch; // number of the next record
    uint32_t next_id;
    int n_cached;
    chain_t rides, ready, recent;
    int n_queued; // entries in rides and ready
    size_t ready_bytes;
    uint64_t ready_since_ns;
    entry_t **picked;
    int n_picked, cap_picked;
    buf_t record; // the one being written
} sequencer_t;

void sequence_complete(coord_t *coord, entry_t *entry);
void sequence_touch(coord_t *coord, entry_t *entry);             // it has just run
void sequence_stop(coord_t *coord, const control_line_t *asked); // a LINE_STOP
void sequence_report(coord_t *coord, hvd_status_t status, const char *text);
// On every rank; elsewhere there is nothing to do.
uint64_t sequence_next_ns(const coord_t *coord);
void sequence_discard(coord_t *coord, entry_t *entry); // takes it from the queues

#endif
