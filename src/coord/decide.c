// SPDX-License-Identifier: Apache-2.0
//
// decide.c - decisions: filled while records are applied, handed out in the order of the log.
//
// A verdict is a decision with the memory it shows. It pins its entries and holds their signatures
// and sizes, so that a later round of the same name cannot change what is being run. Verdicts
// are reused; as many exist as were ever waiting or running at once. Cost per entry: a few
// stores. The holder of the engine calls.
#include "coord/internal.h"

#include <stdlib.h>

#define RESULT_ALIGNMENT 16

// --- Filling ------------------------------------------------------------------------------------

verdict_t *decide_open(coord_t *coord, decision_kind_t kind, uint64_t batch, int set)
{
    verdict_t *verdict = coord->decisions.spare;
    if (verdict != NULL) {
        coord->decisions.spare = verdict->next;
    } else {
        verdict = calloc(1, sizeof *verdict);
        if (verdict == NULL) {
            coord->no_memory = true;
            return NULL;
        }
    }
    verdict->next = NULL;
    verdict->rides = false;
    verdict->decision = (decision_t){.kind = kind, .batch = batch, .set = set, .text = ""};
    buf_clear(&verdict->bytes);
    return verdict;
}

static bool verdict_grow(verdict_t *verdict)
{
    int cap = MAX(4, verdict->cap * 2);
    decision_entry_t *entries = realloc(verdict->entries, (size_t)cap * sizeof *entries);
    if (entries == NULL) {
        return false;
    }
    verdict->entries = entries;
    held_t *held = realloc(verdict->held, (size_t)cap * sizeof *held);
    if (held == NULL) {
        return false;
    }
    verdict->held = held;
    verdict->cap = cap;
    return true;
}

// Results lie in a buffer that moves while it grows: places now, addresses in decide_close.
static size_t keep_result(coord_t *coord, verdict_t *verdict, const void *result, size_t bytes)
{
    buf_t *kept = &verdict->bytes;
    size_t at = (kept->len + RESULT_ALIGNMENT - 1) & ~(size_t)(RESULT_ALIGNMENT - 1);
    if (UNLIKELY(!buf_reserve(kept, bytes + RESULT_ALIGNMENT))) {
        coord->no_memory = true;
        return 0;
    }
    memcpy(kept->data + at, result, bytes);
    kept->len = at + bytes;
    return at;
}

void decide_add(coord_t *coord, verdict_t *verdict, entry_t *entry, const void *result,
                size_t bytes)
{
    int i = verdict->decision.n_entries;
    if (i == verdict->cap && !verdict_grow(verdict)) {
        coord->no_memory = true;
        return;
    }
    held_t *held = &verdict->held[i];
    *held = (held_t){.entry = entry, .sig = sig_hold(entry->sig), .sizes = entry->sizes};
    verdict->entries[i] = (decision_entry_t){
        .tag = entry->tag,
        .name = entry->name,
        .signature = &entry->sig->view,
        .result_bytes = bytes,
    };
    if (held->sizes != NULL) {
        held->sizes->n_holders++;
        verdict->entries[i].sizes = held->sizes->at;
        verdict->entries[i].n_sizes = held->sizes->n;
    }
    if (verdict->rides) {
        held->result_at = keep_result(coord, verdict, result, bytes);
    } else {
        entry->is_running |= entry->tag != 0;
    }
    entry->n_pins++;
    verdict->decision.n_entries++;
}

void decide_text(verdict_t *verdict, const char *text, size_t bytes)
{
    buf_append(&verdict->bytes, text, bytes);
    buf_append(&verdict->bytes, "", 1);
    verdict->decision.text = verdict->bytes.failed ? "" : (const char *)verdict->bytes.data;
}

void decide_close(coord_t *coord, verdict_t *verdict)
{
    decision_t *decision = &verdict->decision;
    if (decision->kind == DECIDE_RUN) {
        decision->entries = verdict->entries;
        for (int i = 0; verdict->rides && i < decision->n_entries; i++) {
            verdict->entries[i].result = verdict->bytes.data + verdict->held[i].result_at;
        }
        coord->decisions.n_running += !verdict->rides;
    }
    if (coord->decisions.first == NULL) {
        coord->decisions.first = verdict;
    } else {
        coord->decisions.last->next = verdict;
    }
    coord->decisions.last = verdict;
}

void decide_fail(coord_t *coord, uint64_t tag, uint64_t batch, hvd_status_t status,
                 const char *text, size_t text_bytes)
{
    verdict_t *verdict = decide_open(coord, DECIDE_FAIL, batch, 0);
    if (verdict != NULL) {
        verdict->decision.tag = tag;
        verdict->decision.status = status;
        decide_text(verdict, text, text_bytes);
        decide_close(coord, verdict);
    }
}

// --- Letting go ---------------------------------------------------------------------------------

void decide_discard(coord_t *coord, verdict_t *verdict)
{
    for (int i = 0; i < verdict->decision.n_entries; i++) {
        held_t *held = &verdict->held[i];
        if (!verdict->rides && verdict->entries[i].tag != 0) {
            held->entry->is_running = false;
        }
        sig_drop(coord, held->sig);
        sizes_drop(coord, held->sizes);
        if (--held->entry->n_pins == 0) {
            entry_settle(coord, held->entry);
        }
    }
    verdict->decision.n_entries = 0;
    verdict->next = coord->decisions.spare;
    coord->decisions.spare = verdict;
}

void coord_batch_done(coord_t *coord, uint64_t batch, uint64_t now_ns)
{
    SOUND(coord);
    set_time(coord, now_ns);
    for (verdict_t **at = &coord->decisions.running; *at != NULL; at = &(*at)->next) {
        verdict_t *verdict = *at;
        if (verdict->decision.batch == batch) {
            *at = verdict->next;
            coord->decisions.n_running--;
            decide_discard(coord, verdict);
            return;
        }
    }
}

// --- Handing out --------------------------------------------------------------------------------

static void append_running(coord_t *coord, verdict_t *verdict)
{
    verdict_t **at = &coord->decisions.running;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = verdict;
}

const decision_t *coord_next(coord_t *coord)
{
    SOUND(coord);
    if (coord->decisions.shown != NULL) {
        decide_discard(coord, coord->decisions.shown);
        coord->decisions.shown = NULL;
    }
    verdict_t *verdict = coord->decisions.first;
    if (verdict != NULL) {
        coord->decisions.first = verdict->next;
        verdict->next = NULL;
        if (verdict->decision.kind == DECIDE_RUN && !verdict->rides) {
            append_running(coord, verdict);
        } else {
            coord->decisions.shown = verdict;
        }
        return &verdict->decision;
    }
    if (coord->ending.has_ended && !coord->ending.is_shown) {
        coord->ending.is_shown = true;
        return &coord->ending.decision;
    }
    return NULL;
}

static void discard_all(coord_t *coord, verdict_t *list)
{
    while (list != NULL) {
        verdict_t *verdict = list;
        list = list->next;
        decide_discard(coord, verdict);
    }
}

void decide_free(coord_t *coord)
{
    discard_all(coord, coord->decisions.first);
    discard_all(coord, coord->decisions.running);
    if (coord->decisions.shown != NULL) {
        decide_discard(coord, coord->decisions.shown);
    }
    while (coord->decisions.spare != NULL) {
        verdict_t *verdict = coord->decisions.spare;
        coord->decisions.spare = verdict->next;
        free(verdict->entries);
        free(verdict->held);
        buf_free(&verdict->bytes);
        free(verdict);
    }
}

static size_t list_bytes(const verdict_t *verdict)
{
    size_t bytes = 0;
    for (; verdict != NULL; verdict = verdict->next) {
        bytes += sizeof *verdict + verdict->bytes.cap +
                 (size_t)verdict->cap * (sizeof(decision_entry_t) + sizeof(held_t));
    }
    return bytes;
}

size_t decide_memory(const coord_t *coord)
{
    return list_bytes(coord->decisions.first) + list_bytes(coord->decisions.running) +
           list_bytes(coord->decisions.shown) + list_bytes(coord->decisions.spare);
}
