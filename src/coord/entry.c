// SPDX-License-Identifier: Apache-2.0
//
// entry.c - the table of entries: names to entries, ids to entries, and how long an entry lives.
//
// An entry exists while somebody needs it: it has an id, or a round is open, or a decision shows
// it, or children may still send lines under an id that was evicted. The last reason gone, its
// memory goes back to the store, so memory follows the names in use. Looking up a name costs one
// hash; an id, one or two words of a table that is at most half full. The holder of the engine owns
// all of it.
#include "coord/internal.h"

#include <stdlib.h>

#define SMALLEST_ID_SLOTS 64

// --- By name ------------------------------------------------------------------------------------

entry_t *entry_find(const set_t *set, const char *name, size_t name_bytes)
{
    return map_get(&set->names, hash_bytes(name, name_bytes, 0), name, name_bytes);
}

static size_t block_bytes_of(const coord_t *coord)
{
    return sizeof(entry_t) + (size_t)coord->entries.n_have_words * sizeof(uint64_t);
}

static entry_t *entry_new(coord_t *coord, set_t *set, const char *name, size_t name_bytes)
{
    entry_t *entry = store_take(&coord->store, block_bytes_of(coord));
    char *copy = store_take(&coord->store, name_bytes + 1);
    if (entry == NULL || copy == NULL) {
        store_give(&coord->store, entry, block_bytes_of(coord));
        store_give(&coord->store, copy, name_bytes + 1);
        return NULL;
    }
    memcpy(copy, name, name_bytes);
    copy[name_bytes] = '\0';
    memset(entry, 0, block_bytes_of(coord));
    entry->set = set;
    entry->name = copy;
    entry->name_bytes = (uint32_t)name_bytes;
    chain_init(&entry->open);
    chain_init(&entry->queued);
    chain_init(&entry->recent);
    set->n_entries++;
    return entry;
}

static void entry_free(coord_t *coord, entry_t *entry)
{
    set_t *set = entry->set;
    sig_drop(coord, entry->sig);
    sizes_drop(coord, entry->sizes);
    if (entry->is_named) {
        map_remove(&set->names, entry->hash, entry->name, entry->name_bytes);
        set->name_bytes -= entry->name_bytes + 1;
    }
    store_give(&coord->store, entry->name, entry->name_bytes + 1);
    store_give(&coord->store, entry, block_bytes_of(coord));
    set->n_entries--;
    sets_drop(coord, set);
}

entry_t *entry_make(coord_t *coord, set_t *set, const char *name, size_t name_bytes)
{
    uint64_t hash = hash_bytes(name, name_bytes, 0);
    entry_t *entry = map_get(&set->names, hash, name, name_bytes);
    if (entry != NULL) {
        return entry;
    }
    entry = entry_new(coord, set, name, name_bytes);
    if (entry == NULL) {
        return NULL;
    }
    entry->hash = hash;
    if (!map_put(&set->names, hash, name, name_bytes, entry)) {
        entry_free(coord, entry);
        return NULL;
    }
    entry->is_named = true;
    set->name_bytes += name_bytes + 1;
    return entry;
}

void entry_settle(coord_t *coord, entry_t *entry)
{
    if (entry->id == 0 && entry->old_id == 0 && !entry->is_open && entry->n_pins == 0) {
        entry_free(coord, entry);
    }
}

// --- By id --------------------------------------------------------------------------------------
// Linear probing. Ids are consecutive, so their low bits make a good hash.

static id_slot_t *id_slot(const coord_t *coord, uint32_t id)
{
    uint32_t mask = coord->entries.n_slots - 1;
    uint32_t i = id & mask;
    while (coord->entries.ids[i].id != 0 && coord->entries.ids[i].id != id) {
        i = (i + 1) & mask;
    }
    return &coord->entries.ids[i];
}

entry_t *entry_of_id(const coord_t *coord, uint32_t id)
{
    return coord->entries.n_ids == 0 || id == 0 ? NULL : id_slot(coord, id)->entry;
}

static bool ids_grow(coord_t *coord)
{
    uint32_t n_old = coord->entries.n_slots, n_new = MAX(SMALLEST_ID_SLOTS, n_old * 2);
    id_slot_t *old = coord->entries.ids, *slots = calloc(n_new, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    coord->entries.ids = slots;
    coord->entries.n_slots = n_new;
    for (uint32_t i = 0; i < n_old; i++) {
        if (old[i].id != 0) {
            *id_slot(coord, old[i].id) = old[i];
        }
    }
    free(old);
    return true;
}

// Removes the slot and moves back later ones that the hole would hide.
static void id_remove(coord_t *coord, id_slot_t *slot)
{
    uint32_t mask = coord->entries.n_slots - 1;
    uint32_t hole = (uint32_t)(slot - coord->entries.ids);
    for (uint32_t i = (hole + 1) & mask; coord->entries.ids[i].id != 0; i = (i + 1) & mask) {
        uint32_t from_home = (i - coord->entries.ids[i].id) & mask;
        if (from_home >= ((i - hole) & mask)) {
            coord->entries.ids[hole] = coord->entries.ids[i];
            hole = i;
        }
    }
    coord->entries.ids[hole] = (id_slot_t){0};
    coord->entries.n_ids--;
}

void entry_forget_id(coord_t *coord, entry_t *entry, uint32_t id)
{
    if (id == 0) {
        return;
    }
    id_slot_t *slot = id_slot(coord, id);
    if (slot->id == id) {
        id_remove(coord, slot);
    }
    if (entry->id == id) {
        entry->id = 0;
    }
    if (entry->old_id == id) {
        entry->old_id = 0;
        entry->n_acks = 0;
    }
}

bool entry_set_id(coord_t *coord, entry_t *entry, uint32_t id)
{
    // Every member submitted anew under the name, so no line can still be on its way under an
    // earlier id.
    entry_forget_id(coord, entry, entry->id);
    entry_forget_id(coord, entry, entry->old_id);
    if (id == 0) {
        return true;
    }
    if ((coord->entries.n_ids + 1) * 2 > coord->entries.n_slots && !ids_grow(coord)) {
        return false;
    }
    *id_slot(coord, id) = (id_slot_t){.id = id, .entry = entry};
    coord->entries.n_ids++;
    coord->entries.highest_id = MAX(coord->entries.highest_id, id);
    entry->id = id;
    return true;
}

static int n_children_with_members(const set_t *set)
{
    return set->n_parts - (set->part_of[0] >= 0 ? 1 : 0);
}

// The id is no longer used for lines of our own, but lines of children that have not yet seen the
// eviction still arrive under it: it stays known until each has confirmed. A child confirms in the
// same stream as its lines, so nothing is lost and nothing is counted twice.
void entry_retire_id(coord_t *coord, entry_t *entry)
{
    uint32_t id = entry->id;
    offer_drop(coord, entry);
    entry->id = 0;
    entry->old_id = id;
    entry->n_acks = n_children_with_members(entry->set);
    if (entry->n_acks == 0) {
        entry_forget_id(coord, entry, id);
    }
}

// --- Rounds -------------------------------------------------------------------------------------

void entry_open_round(coord_t *coord, entry_t *entry)
{
    if (!entry->is_open) {
        entry->is_open = true;
        if (entry->since_ns != 0) {
            stall_note_step(coord, coord->now_ns - entry->since_ns);
        }
        entry->since_ns = coord->now_ns;
        chain_append(&coord->entries.open, &entry->open);
    }
}

static void drop_round_data(coord_t *coord, entry_t *entry)
{
    for (int i = 0; i < entry->n_variants; i++) {
        sig_drop(coord, entry->variants[i].sig);
    }
    entry->n_variants = 0;
    if (entry->payloads != NULL) {
        store_give(&coord->store, entry->payloads,
                   entry->payload_stride * ((size_t)entry->set->n_parts + 1));
        entry->payloads = NULL;
        entry->payload_stride = 0;
    }
    if (entry->fresh != NULL) {
        sizes_drop(coord, entry->fresh);
        entry->fresh = NULL;
    }
}

void entry_close_round(coord_t *coord, entry_t *entry)
{
    SOUND_ROUND(coord, entry);
    offer_drop(coord, entry);
    if (entry->is_open) {
        drop_round_data(coord, entry);
        chain_remove(&entry->open);
        for (int i = 0; i < coord->entries.n_have_words; i++) {
            entry->have[i] = 0;
        }
        coord->entries.n_pending -= entry->tag != 0;
        entry->is_open = entry->is_complete = entry->has_zeros = entry->is_plain = false;
        entry->n_have = entry->n_folded = 0;
        entry->tag = 0;
        entry->asked_ns = 0;
    }
    entry_settle(coord, entry);
}

void entry_forget(coord_t *coord, entry_t *entry)
{
    sequence_discard(coord, entry);
    entry_forget_id(coord, entry, entry->id);
    entry_forget_id(coord, entry, entry->old_id);
    entry_close_round(coord, entry);
}
