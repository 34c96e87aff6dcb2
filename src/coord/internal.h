// SPDX-License-Identifier: Apache-2.0
//
// internal.h - a coordinator, part by part: who may touch what. Nobody outside coord/ includes it.
//
//   store.c         memory: blocks that are kept for reuse, signatures and sizes
//   sets.c          process sets and the part of each that lies below this node; who has joined
//   entry.c         names to entries, ids to entries, the life of an entry
//   merge.c         upward: shares of branches become a round; a full round becomes one line
//   offer.c         rank 0 and the last branch of a round meet half way
//   mismatch.c      the sentences for rounds that cannot run
//   sequence.c      rank 0 only: full rounds become records of the log; fusion, ids, eviction
//   follow.c        frames: lines from children, records from the parent
//   decide.c        the queue of decisions, and the batches this rank is running
//   stall.c         what waits too long, and for whom
//   heartbeat.c, progress.c   who is silent, and what has stopped moving
//   straggler.c     who comes last
//   outbox.c        the bytes for neighbours
//   coord.c         the functions of coord.h
//
// A part belongs to the file its header names, which alone writes it unless the header says
// otherwise; every file may read all of them.
#ifndef HVD_COORD_INTERNAL_H
#define HVD_COORD_INTERNAL_H

#include "coord/decide.h"
#include "coord/heartbeat.h"
#include "coord/outbox.h"
#include "coord/sequence.h"
#include "coord/stall.h"
#include "coord/straggler.h"

typedef struct ending {
    bool has_asked_stop; // this rank wants to stop
    bool has_sent_stop;  // a request to stop went up, whoever asked
    bool has_ended, is_shown;
    hvd_status_t status;
    char *text;                                // CONTROL_MAX_TEXT_BYTES
    char reason[CONTROL_MAX_REASON_BYTES + 1]; // of the rank that asked for the shutdown
    decision_t decision;
} ending_t;

struct coord {
    // Set when it starts.
    coord_params_t params;
    int n_children, n_parents; // n_parents: 1, or 0 on rank 0
    int *branch_of;            // rank -> branch, or -1 if it is not below
    size_t fixed_bytes;        // taken by coord_new, for coord_memory

    // Any file.
    store_t store;
    uint64_t now_ns;
    bool no_memory; // something could not be kept: the job must end

    outbox_t *outboxes;      // outbox.c: the parent's first
    neighbour_t *neighbours; // heartbeat.c, progress.c: in the same order
    set_table_t sets;
    joins_t joins;
    entry_table_t entries;
    decisions_t decisions;
    sequencer_t sequencer; // rank 0 only
    stall_t stall;
    heartbeat_t heartbeat;
    watchdog_t watchdog;
    stragglers_t stragglers;
    ending_t ending; // coord.c and follow.c

    // merge.c
    coord_arrival_fn arrival; // NULL: nobody listens
    void *arrival_arg;
    buf_t gathered;          // int64_t: sizes on their way up
    uint64_t n_known, n_new; // submissions: coord.c

    // follow.c
    control_reader_t reader;
    uint64_t n_stale_lines;
};

// Ages are differences of these, so a caller's stale idea of the time must not turn it back.
static inline void set_time(coord_t *coord, uint64_t now_ns)
{
    coord->now_ns = MAX(coord->now_ns, now_ns);
}

static inline bool is_sequencer(const coord_t *coord)
{
    return coord->n_parents == 0;
}

// What holds of a coordinator between two calls.
static inline bool coord_is_sound(const coord_t *coord)
{
    const sequencer_t *s = &coord->sequencer;
    bool has_queue = !chain_is_empty(&s->rides) || !chain_is_empty(&s->ready);
    return coord->entries.n_pending >= 0 && coord->decisions.n_running >= 0 &&
           coord->entries.n_ids * 2 <= coord->entries.n_slots && coord->joins.n >= 0 &&
           coord->joins.n <= coord->params.size && has_queue == (s->n_queued > 0) &&
           (!chain_is_empty(&s->ready) || s->ready_bytes == 0) && s->n_picked == 0 &&
           (is_sequencer(coord) || (!has_queue && s->n_cached == 0));
}

// Only rank 0 may be here.
#define SEQUENCER(coord) RULE("SEQUENCER", is_sequencer(coord))
#define SOUND(coord) RULE("SOUND", coord_is_sound(coord))
#define SOUND_ROUND(coord, entry)                                                                  \
    RULE("SOUND_ROUND", round_is_sound(entry, (coord)->entries.n_have_words))

// --- follow.c -----------------------------------------------------------------------------------

// What a record does, on every rank alike.
hvd_status_t follow_set_added(coord_t *coord, int id, const int64_t *ranks, int n_ranks,
                              uint64_t batch, uint64_t tag, err_t *err);
void follow_error(coord_t *coord, entry_t *entry, uint64_t batch, hvd_status_t status,
                  const char *text, size_t text_bytes);
void follow_set_removed(coord_t *coord, set_t *set, uint64_t batch, uint64_t tag);
void follow_joined(coord_t *coord, uint64_t batch, int last);
void follow_end(coord_t *coord, hvd_status_t status, int rank, const char *text, size_t text_bytes);
void follow_shutdown(coord_t *coord, const control_line_t *line);

#endif
