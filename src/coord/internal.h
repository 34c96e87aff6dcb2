// SPDX-License-Identifier: Apache-2.0
//
// internal.h - what the files of coord/ share. Nobody else includes it.
//
//   store.c     memory: blocks that are kept for reuse, signatures and sizes with counted holders
//   sets.c      process sets and the part of each that lies below this node; who has joined
//   entry.c     names to entries, ids to entries, the life of an entry
//   merge.c     upward: shares of branches become a round; a full round becomes one line
//   mismatch.c  the sentences for rounds that cannot run
//   sequence.c  rank 0 only: full rounds become records of the log; fusion, ids, eviction
//   follow.c    frames: lines from children, records from the parent
//   decide.c    the queue of decisions, and the batches this rank is running
//   stall.c     what waits too long, and for whom
//   straggler.c    who comes last
//   coord.c     the functions of coord.h, and the bytes for neighbours
//
// A round is one agreement on an entry: it begins with the first share, is complete when every
// branch with members has given its share (or has joined), and ends with a record. A branch is
// this rank itself, or everything below one child.
#ifndef HVD_COORD_INTERNAL_H
#define HVD_COORD_INTERNAL_H

#include "coord/coord.h"
#include "wire/control.h"

#include <stddef.h>

// --- Lists --------------------------------------------------------------------------------------
// A ring with a head; an item that is in no list points to itself.

typedef struct chain {
    struct chain *prev, *next;
} chain_t;

static inline void chain_init(chain_t *item)
{
    item->prev = item->next = item;
}

static inline bool chain_is_empty(const chain_t *head)
{
    return head->next == head;
}

static inline void chain_append(chain_t *head, chain_t *item)
{
    item->prev = head->prev;
    item->next = head;
    head->prev->next = item;
    head->prev = item;
}

static inline void chain_remove(chain_t *item)
{
    item->prev->next = item->next;
    item->next->prev = item->prev;
    chain_init(item);
}

#define CHAIN_OWNER(item, type, member) ((type *)(void *)((char *)(item) - offsetof(type, member)))

// --- store.c ------------------------------------------------------------------------------------

#define N_BLOCK_SIZES 48

typedef struct store {
    void *free_blocks[N_BLOCK_SIZES]; // by power of two; the first word leads to the next
    size_t held_bytes;                // taken from the system
} store_t;

void *store_take(store_t *store, size_t bytes); // NULL: no memory. Not zeroed
void store_give(store_t *store, void *block, size_t bytes);
void store_free(store_t *store); // every block must have been given back

typedef struct sig {
    int n_holders;
    size_t block_bytes;
    size_t tensor_bytes;  // of all tensors; dimensions left out count as 1
    size_t payload_bytes; // of the accumulators, if it rides; else 0
    bool rides;           // the record brings the result: nothing is left to run
    bool fuses;
    signature_t view; // dims lead to the words below
    int64_t words[];
} sig_t;

typedef struct sizes {
    int n_holders;
    int n;
    size_t block_bytes;
    int64_t at[];
} sizes_t;

sig_t *sig_new(coord_t *coord, const signature_t *signature); // NULL: no memory
static inline sig_t *sig_hold(sig_t *sig)
{
    sig->n_holders++;
    return sig;
}
void sig_drop(coord_t *coord, sig_t *sig); // NULL is allowed
sizes_t *sizes_new(coord_t *coord, int n);
void sizes_drop(coord_t *coord, sizes_t *sizes); // NULL is allowed

// --- Process sets -------------------------------------------------------------------------------

// The members of a set that lie in one branch.
typedef struct part {
    int branch; // 0: this rank itself; i + 1: child i
    int n_members;
    int n_joined;
    int lowest;     // rank
    int *positions; // of its members in set->ranks, ascending
} part_t;

typedef struct set {
    int id;
    bool removed;
    int n_entries; // that exist, named or still being run; the last one frees a removed set
    int n_ranks;
    int *ranks; // ascending
    int self;   // position of this rank, or -1
    int n_parts;
    part_t *parts;      // branches with members, in order
    int *part_of;       // branch -> index of its part, or -1
    int n_parts_joined; // parts all of whose members have joined
    map_t names;        // name -> entry
    size_t name_bytes;  // of the keys, for coord_memory
} set_t;

// --- Entries ------------------------------------------------------------------------------------

// A signature somebody submitted, and the lowest rank known to have done so.
typedef struct variant {
    sig_t *sig;
    int rank;
} variant_t;

typedef struct entry {
    set_t *set;
    char *name; // terminated
    uint32_t name_bytes;
    uint64_t hash;
    uint32_t id;     // 0: none
    uint32_t old_id; // evicted, but children may still send lines under it; 0: none
    int n_acks;      // children that have not confirmed the eviction
    int n_pins;      // decisions that show it
    bool is_named;   // in set->names
    bool is_running; // this rank's submission is in a batch that is not done
    sig_t *sig;      // of id or old_id, else NULL
    sizes_t *sizes;  // of the last run under sig
    // The round:
    bool is_open;     // somebody has it
    bool is_complete; // sent up, or queued by the sequencer
    bool has_zeros;   // counts members that joined without submitting it
    bool is_picked;   // sequencer: in the batch being formed
    bool is_news;     // sequencer: the record must tell name and signature
    int n_have;       // parts that gave their share
    int n_variants;
    variant_t variants[2]; // [0]: of the lowest rank; [1]: of the lowest rank that differs
    uint64_t tag;          // this rank's submission; 0: none
    uint64_t since_ns;
    uint64_t asked_ns; // of the last question or report about it; 0: none
    uint32_t step;     // the last one it was part of
    uint8_t *payloads; // one slot a part and one more, payload_stride apart
    size_t payload_stride;
    sizes_t *fresh;   // all members' sizes, being gathered, when some changed
    size_t run_bytes; // sequencer: what it adds to a batch
    chain_t open;     // coord->open, by age
    chain_t queued;   // coord->rides or coord->ready
    chain_t recent;   // coord->recent, if it has an id: least recently run first
    uint64_t have[];  // bit per part
} entry_t;

typedef struct id_slot {
    uint32_t id; // 0: empty
    entry_t *entry;
} id_slot_t;

// --- Decisions ----------------------------------------------------------------------------------

typedef struct held {
    entry_t *entry;
    sig_t *sig;
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

// --- The rest -----------------------------------------------------------------------------------

typedef struct outbox {
    int rank;
    buf_t bytes;
    size_t sent;     // taken from the front
    size_t frame_at; // header of the open frame, if is_open
    bool is_open;
} outbox_t;

// What is known of the rank at the other end of an outbox.
typedef struct neighbour {
    uint64_t heard_ns;
    bool is_known; // has been heard at all
    bool is_late;  // its silence has been reported
    coord_activity_t activity;
    coord_progress_t progress; // of a child
} neighbour_t;

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
    uint64_t warn_ns; // sequencer: how long the entries waited at least
    char *said;       // what ranks that lack something last did, a line each; STALL_SAID_BYTES
    size_t said_bytes;
} inquiry_t;

typedef struct straggler_branch {
    int n_ranks;
    uint64_t n_last, late_ns;        // since the beginning
    uint64_t window_last, window_ns; // since the last verdict
} straggler_branch_t;

typedef struct stragglers {
    straggler_branch_t *branches; // this rank, then the children
    uint32_t step;                // names the one under way; entries remember theirs
    uint64_t n_steps;
    int worst; // of the step under way; -1: none
    uint64_t worst_ns;
    int window_steps;
    uint64_t window_since_ns;
    bool has_verdict;
    coord_straggler_t verdict;
} stragglers_t;

#define STALL_SAID_BYTES (4 * KIB)

// How often the job does the same thing again: what is learned from it is when to wonder.
typedef struct span {
    uint64_t longest_ns, second_ns; // of its steps, and the next after that
} span_t;

typedef struct rhythm {
    span_t span, before; // of steps: this one and the last whole one
    uint64_t noted_ns;
    int n_steps;   // in this span
    bool is_known; // enough of them have been seen
} rhythm_t;

struct coord {
    coord_params_t params;
    int n_children, n_parents; // n_parents: 1, or 0 on rank 0
    int *branch_of;            // rank -> branch, or -1 if it is not below
    outbox_t *outboxes;        // the parent's first
    neighbour_t *neighbours;   // in the same order
    int n_have_words;          // of entry->have
    store_t store;
    size_t fixed_bytes; // taken by coord_new, for coord_memory

    set_t **sets; // by id; NULL: free
    int n_set_slots;
    int *free_set_ids; // oldest first
    int n_free_set_ids, cap_free_set_ids;
    uint32_t n_set_ops; // names the next one

    id_slot_t *ids; // open addressing
    uint32_t n_id_slots, n_ids;
    uint32_t highest_id; // ever seen
    chain_t open;        // entries with an open round, oldest first
    int n_pending;

    uint8_t *has_joined; // per rank, of those in this subtree
    int n_joined;
    int last_joined;
    uint64_t join_tag; // this rank has joined; 0: it has not

    verdict_t *first, *last; // decisions not yet handed out
    verdict_t *shown;        // handed out last
    verdict_t *running;      // RUN handed out, not done
    verdict_t *spare;
    int n_running; // RUN not done, handed out or not

    // Rank 0 only.
    uint64_t next_batch;
    uint32_t next_id;
    int n_cached;
    chain_t rides, ready, recent;
    int n_queued; // entries in rides and ready
    size_t ready_bytes;
    uint64_t ready_since_ns;
    entry_t **picked;
    int n_picked, cap_picked;
    buf_t record;

    inquiry_t inquiry;
    uint32_t next_inquiry;
    uint64_t stall_checked_ns;
    rhythm_t rhythm;
    uint64_t early_ns; // when something was last asked about earlier than the knob says; 0: never

    coord_activity_t activity; // of this rank
    coord_progress_t progress; // likewise
    int n_stuck;               // heartbeats in a row that found the same batch without hope
    uint64_t stuck_batch;
    uint64_t heartbeat_due_ns;
    uint64_t away_ns, back_ns; // the last time this rank did not run: for how long, until when

    stragglers_t stragglers;
    coord_arrival_fn arrival; // NULL: nobody listens
    void *arrival_arg;

    control_reader_t reader;
    buf_t gathered; // int64_t: sizes on their way up
    uint64_t now_ns;
    uint64_t n_stale_lines;
    uint64_t n_known, n_new; // submissions
    bool no_memory;          // something could not be kept: the job must end
    bool has_asked_stop;     // this rank wants to stop
    bool has_sent_stop;      // a request to stop went up, whoever asked
    bool has_ended, end_shown;
    hvd_status_t end_status;
    char *end_text; // CONTROL_MAX_TEXT_BYTES
    decision_t end_decision;
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

// --- sets.c -------------------------------------------------------------------------------------

set_t *sets_find(const coord_t *coord, int id);
set_t *sets_find_ranks(const coord_t *coord, const int64_t *ranks, int n_ranks);
int sets_free_id(coord_t *coord); // the id the next set gets; taken by sets_register
hvd_status_t sets_register(coord_t *coord, int id, const int *ranks, int n_ranks, err_t *err);
void sets_remove(coord_t *coord, set_t *set); // its entries must be gone, or pinned
void sets_drop(coord_t *coord, set_t *set);   // after an entry went
void sets_free(coord_t *coord);
size_t sets_memory(const coord_t *coord);
bool sets_sort_ranks(int *ranks, int n_ranks, int size); // false: twice the same, or out of range
static inline part_t *set_part(const set_t *set, int branch)
{
    int index = set->part_of[branch];
    return index < 0 ? NULL : &set->parts[index];
}
int set_position(const set_t *set, int rank); // or -1

void joins_add(coord_t *coord, int rank); // counts it, and completes what waited for it only
void joins_clear(coord_t *coord);

// --- entry.c ------------------------------------------------------------------------------------

entry_t *entry_find(const set_t *set, const char *name, size_t name_bytes);
entry_t *entry_make(coord_t *coord, set_t *set, const char *name, size_t name_bytes); // or finds
entry_t *entry_of_id(const coord_t *coord, uint32_t id);
bool entry_set_id(coord_t *coord, entry_t *entry, uint32_t id); // forgets the old one
void entry_forget_id(coord_t *coord, entry_t *entry, uint32_t id);
void entry_retire_id(coord_t *coord, entry_t *entry); // evicted; children must confirm
void entry_open_round(coord_t *coord, entry_t *entry);
void entry_close_round(coord_t *coord, entry_t *entry); // and frees the entry if nothing needs it
void entry_settle(coord_t *coord, entry_t *entry);      // frees it if nothing needs it
void entry_forget(coord_t *coord, entry_t *entry);      // its set is gone

// --- merge.c ------------------------------------------------------------------------------------

// What a branch brings to a round.
typedef struct share {
    int n_variants;
    const signature_t *signatures[2]; // NULL: the entry's own
    int ranks[2];
    bool zeros;
    const int64_t *sizes; // of the branch's members, ascending; NULL: as last time
    int n_sizes;
    const void *payload;
    size_t payload_bytes;
} share_t;

hvd_status_t merge_share(coord_t *coord, entry_t *entry, int branch, const share_t *share,
                         err_t *err);
void merge_recheck(coord_t *coord, set_t *set); // more of its members have joined
// The result of a full round that rides, zeros of joined ranks included. Sequencer only.
const uint8_t *merge_result(coord_t *coord, entry_t *entry);

// --- mismatch.c ---------------------------------------------------------------------------------

hvd_status_t mismatch_of_variants(const entry_t *entry, err_t *err);
hvd_status_t mismatch_of_join(const coord_t *coord, const entry_t *entry, err_t *err);
hvd_status_t mismatch_of_scalars(const entry_t *entry, err_t *err); // HVD_OK: there are none

// --- sequence.c ---------------------------------------------------------------------------------

void sequence_complete(coord_t *coord, entry_t *entry);
void sequence_stop(coord_t *coord, int rank);
void sequence_report(coord_t *coord, const char *text);
uint64_t sequence_next_ns(const coord_t *coord);
void sequence_discard(coord_t *coord, entry_t *entry); // takes it from the queues

// --- follow.c -----------------------------------------------------------------------------------

// What a record does, on every rank alike.
hvd_status_t follow_set_added(coord_t *coord, int id, const int64_t *ranks, int n_ranks,
                              uint64_t batch, uint64_t tag, err_t *err);
void follow_error(coord_t *coord, entry_t *entry, uint64_t batch, hvd_status_t status,
                  const char *text, size_t text_bytes);
void follow_set_removed(coord_t *coord, set_t *set, uint64_t batch, uint64_t tag);
void follow_joined(coord_t *coord, uint64_t batch, int last);
void follow_end(coord_t *coord, hvd_status_t status, const char *text, size_t text_bytes);
void follow_shutdown(coord_t *coord, int rank);

// --- decide.c -----------------------------------------------------------------------------------

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

// --- stall.c ------------------------------------------------------------------------------------

void stall_tick(coord_t *coord);
void stall_note_step(coord_t *coord, uint64_t interval_ns); // a name comes again after this long
uint64_t stall_next_ns(const coord_t *coord);
hvd_status_t stall_question(coord_t *coord, const control_line_t *line, err_t *err);
hvd_status_t stall_inquire(coord_t *coord, const control_line_t *line, err_t *err);
hvd_status_t stall_answer(coord_t *coord, int child, const control_line_t *line, err_t *err);
void stall_free(coord_t *coord);

// --- heartbeat.c ---------------------------------------------------------------------------------

void heartbeat_tick(coord_t *coord);
uint64_t heartbeat_next_ns(const coord_t *coord);
void heartbeat_heard(coord_t *coord, int neighbour, const control_line_t *line);

// --- progress.c ----------------------------------------------------------------------------------

void progress_tell(coord_t *coord); // the parent, after a heartbeat
void progress_heard(coord_t *coord, int neighbour, const control_line_t *line);
void progress_check(coord_t *coord); // rank 0, with each heartbeat

// --- straggler.c ---------------------------------------------------------------------------------

bool straggler_init(coord_t *coord); // false: no memory
void straggler_free(coord_t *coord);
void straggler_note(coord_t *coord, entry_t *entry, int branch); // whose share completes the round
int branch_rank(const coord_t *coord, int branch);

// --- coord.c ------------------------------------------------------------------------------------

// A buffer to write one line for neighbour i into, inside its open frame.
buf_t *outbox_line(coord_t *coord, int neighbour);
static inline buf_t *line_to_parent(coord_t *coord)
{
    return outbox_line(coord, 0);
}
// The same bytes to every child, or to those with members of the set.
void outbox_to_children(coord_t *coord, const set_t *set, const void *line, size_t bytes);

#endif
