// SPDX-License-Identifier: Apache-2.0
//
// offer.c - two halves of a job meet half way: small operations without a record of the log.
//
// What rides goes up with a line and comes down with a record, so the far half of a job waits for
// a round trip. Of a name that has run before, rank 0 need not wait: when only the last branch
// of a round is missing, it offers that branch the shares of all others, added up. Whoever has the
// offer and has sent a line that says no more than the id has all there is: it adds its own share
// and goes on, and rank 0 does the same when that line arrives. No record is written. Between two
// hosts, that meet in lockstep, an allreduce then takes the time of one message.
//
// Why both sides decide alike: lines and offers travel in order. An offer stands until its round
// ends; it is made only for a live id, and an id that is on offer is not evicted. So the round ends
// by it exactly if the last branch answers with such a line (is_plain) and not with a new
// signature, zeros of joined ranks or nothing at all; both sides know that, and in every other case
// the record that rank 0 then writes ends the round. Nothing that rides uses what other batches
// use, so its place among them does not matter.
//
// Same bits: rank 0 adds up in the order of branches; the last one adds itself to the sum of those
// before it, which is the same.
// Cost: one copy of the values more on each side. The holder of the engine calls.
#include "coord/internal.h"

// Two hosts of eight ranks. Branches without an offer get a record for each name, not for a batch.
#define MAX_PARTS 9

void offer_drop(coord_t *coord, entry_t *entry)
{
    if (entry->offer != NULL) {
        store_give(&coord->store, entry->offer, entry->offer_bytes);
        entry->offer = NULL;
    }
    entry->is_offered = false;
}

void offer_to_last_branch(coord_t *coord, entry_t *entry)
{
    SEQUENCER(coord);
    const set_t *set = entry->set;
    const kept_sig_t *sig = entry->variants[0].sig;
    int last = set->n_parts - 1;
    if (entry->is_offered || entry->n_have != last || merge_has_share(entry, last) ||
        entry->id == 0 || sig != entry->sig || entry->n_variants != 1 || !sig->rides ||
        set->n_parts > MAX_PARTS || entry->has_zeros || coord->joins.n > 0) {
        return;
    }
    control_line_t line = {.kind = RECORD_OFFER,
                           .id = entry->id,
                           .payload = sig->payload_bytes > 0 ? merge_fold(coord, entry) : NULL,
                           .payload_bytes = sig->payload_bytes};
    control_put(outbox_line(coord, set->parts[last].branch - 1), &line);
    entry->is_offered = true;
}

// The record of an agreement that is not in the log, for whoever is below and has no offer.
static void tell_children(coord_t *coord, const entry_t *entry, const uint8_t *result)
{
    const set_t *set = entry->set;
    const part_t *last = is_sequencer(coord) ? &set->parts[set->n_parts - 1] : NULL;
    control_run_t run = {.id = entry->id,
                         .result = entry->sig->payload_bytes > 0 ? result : NULL,
                         .result_bytes = entry->sig->payload_bytes};
    for (const part_t *part = set->parts; part < set->parts + set->n_parts; part++) {
        if (part->branch > 0 && part != last) {
            buf_t *out = outbox_line(coord, coord->n_parents + part->branch - 1);
            control_put_batch(out, COORD_NO_BATCH, (uint32_t)set->id, true, 1);
            control_put_run(out, &run);
        }
    }
}

static void run_met(coord_t *coord, entry_t *entry, const uint8_t *result)
{
    tell_children(coord, entry, result);
    if (entry->set->self >= 0) {
        verdict_t *verdict = decide_open(coord, DECIDE_RUN, COORD_NO_BATCH, entry->set->id);
        if (verdict != NULL) {
            verdict->rides = true;
            decide_add(coord, verdict, entry, result, entry->sig->payload_bytes);
            decide_close(coord, verdict);
        }
    }
    entry_close_round(coord, entry);
}

void offer_met_above(coord_t *coord, entry_t *entry)
{
    SEQUENCER(coord);
    sequence_touch(coord, entry);
    run_met(coord, entry, merge_result(coord, entry));
}

void offer_met_below(coord_t *coord, entry_t *entry)
{
    const kept_sig_t *sig = entry->sig;
    if (sig->payload_bytes > 0) {
        merge_add(coord, sig, entry->offer, merge_fold(coord, entry));
    }
    run_met(coord, entry, sig->payload_bytes > 0 ? entry->offer : (const uint8_t *)"");
}

hvd_status_t offer_receive(coord_t *coord, uint32_t id, const void *values, size_t bytes,
                           err_t *err)
{
    entry_t *entry = entry_of_id(coord, id);
    if (entry == NULL || entry->id != id || entry->is_offered || !entry->sig->rides ||
        entry->sig->payload_bytes != bytes) {
        return fail(err, HVD_PROTOCOL,
                    "an offer of %zu bytes for tensor id %u does not fit what is known of it",
                    bytes, id);
    }
    if (bytes > 0) {
        entry->offer = store_take(&coord->store, bytes);
        if (entry->offer == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for the values of tensor '%s'", entry->name);
        }
        memcpy(entry->offer, values, bytes);
        entry->offer_bytes = bytes;
    }
    entry->is_offered = true;
    if (entry->is_plain) {
        offer_met_below(coord, entry);
    }
    return HVD_OK;
}
