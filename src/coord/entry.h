// SPDX-License-Identifier: Apache-2.0
//
// entry.h - entries: names and ids of tensors, and the round that is open on each.
//
// A round is one agreement on an entry: it begins with the first share, is complete when every
// branch with members has given its share (or has joined), and ends with a record. A branch is
// this rank itself, or everything below one child.
//
// Owned by entry.c, which opens and closes rounds; merge.c fills them, and what is marked
// "sequencer" is touched by sequence.c alone.
#ifndef HVD_COORD_ENTRY_H
#define HVD_COORD_ENTRY_H

#include "coord/sets.h"
#include "coord/store.h"

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

// --- Entries ------------------------------------------------------------------------------------

// A signature somebody submitted, and the lowest rank known to have done so.
typedef struct variant {
    kept_sig_t *sig;
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
    kept_sig_t *sig; // of id or old_id, else NULL
    sizes_t *sizes;  // of the last run under sig
    // The round:
    bool is_open;     // somebody has it
    bool is_complete; // sent up, or queued by the sequencer
    bool has_zeros;   // counts members that joined without submitting it
    bool is_picked;   // sequencer: in the batch being formed
    bool is_news;     // sequencer: the record must tell name and signature
    bool is_plain;    // sent up, and the line said no more than the id
    bool is_offered;  // sequencer: to the last branch; elsewhere: by rank 0 (offer.c)
    int n_have;       // parts that gave their share
    int n_folded;     // parts whose values lie added up in the first slot
    int n_variants;
    variant_t variants[2]; // [0]: of the lowest rank; [1]: of the lowest rank that differs
    uint64_t tag;          // this rank's submission; 0: none
    uint64_t since_ns;
    uint64_t asked_ns; // of the last question or report about it; 0: none
    uint32_t step;     // the last one it was part of
    uint8_t *payloads; // one slot a part and one more, payload_stride apart
    size_t payload_stride;
    uint8_t *offer; // what all others have given, added up; NULL: none, or of no bytes
    size_t offer_bytes;
    sizes_t *fresh;   // all members' sizes, being gathered, when some changed
    size_t run_bytes; // sequencer: what it adds to a batch
    chain_t open;     // coord->entries.open, by age
    chain_t queued;   // sequencer: rides or ready
    chain_t recent;   // sequencer: recent, if it has an id: least recently run first
    uint64_t have[];  // bit per part
} entry_t;

// What holds of every round that is open, and of every entry without one.
static inline bool round_is_sound(const entry_t *entry, int n_have_words)
{
    int n_have = 0;
    for (int i = 0; i < n_have_words; i++) {
        n_have += __builtin_popcountll(entry->have[i]);
    }
    bool is_queued = !chain_is_empty(&entry->queued);
    return n_have == entry->n_have && n_have <= entry->set->n_parts &&
           entry->is_open == !chain_is_empty(&entry->open) &&
           (!entry->is_complete || (entry->is_open && n_have > 0)) &&
           (!is_queued || entry->is_complete) && (entry->tag == 0 || entry->is_open) &&
           entry->n_variants >= (n_have > 0) && entry->n_pins >= 0 && entry->n_acks >= 0;
}

typedef struct id_slot {
    uint32_t id; // 0: empty
    entry_t *entry;
} id_slot_t;

typedef struct entry_table {
    id_slot_t *ids; // open addressing
    uint32_t n_slots, n_ids;
    uint32_t highest_id; // ever seen
    chain_t open;        // entries with an open round, oldest first
    int n_pending;       // submissions of this rank, and its join, that are not decided
    int n_have_words;    // of entry->have
} entry_table_t;

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
bool merge_has_share(const entry_t *entry, int part);
// The shares that are there, added up in their order, in the memory of the first.
const uint8_t *merge_fold(coord_t *coord, entry_t *entry);
void merge_add(coord_t *coord, const kept_sig_t *sig, void *total, const void *more);

// --- offer.c ------------------------------------------------------------------------------------

// Sequencer: if only the last branch is missing, and may be offered what is there.
void offer_to_last_branch(coord_t *coord, entry_t *entry);
// Sequencer: that branch has answered with a line that says no more than the id.
void offer_met_above(coord_t *coord, entry_t *entry);
void offer_met_below(coord_t *coord, entry_t *entry); // such a line was sent, and the offer is here
hvd_status_t offer_receive(coord_t *coord, uint32_t id, const void *values, size_t bytes,
                           err_t *err);
void offer_drop(coord_t *coord, entry_t *entry); // the round has ended

// --- mismatch.c ---------------------------------------------------------------------------------

hvd_status_t mismatch_of_variants(const entry_t *entry, err_t *err);
hvd_status_t mismatch_of_join(const coord_t *coord, const entry_t *entry, err_t *err);
hvd_status_t mismatch_of_scalars(const entry_t *entry, err_t *err); // HVD_OK: there are none

#endif
