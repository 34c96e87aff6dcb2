// SPDX-License-Identifier: Apache-2.0
//
// follow.c - frames: lines from children are merged, records from the parent are applied.
//
// A table says for each kind of line from which side it may come and who handles it. Records are
// passed on to the children as the bytes they came in, before this rank acts on its decisions, so
// a slow rank does not hold up those below it. Everything a neighbour can get wrong ends in
// HVD_PROTOCOL with a sentence; nothing it sends makes this rank write outside its memory. Lines
// that are late (for a process set that was removed meanwhile) are counted and dropped.
//
// The functions without a line among their arguments are what a record does on every rank; the
// sequencer calls them too. The holder of the engine calls.
#include "coord/internal.h"

#include <stdio.h>

// --- What records do ----------------------------------------------------------------------------

void follow_error(coord_t *coord, entry_t *entry, uint64_t batch, hvd_status_t status,
                  const char *text, size_t text_bytes)
{
    if (entry->tag != 0) {
        decide_fail(coord, entry->tag, batch, status, text, text_bytes);
    }
    entry_close_round(coord, entry);
}

hvd_status_t follow_set_added(coord_t *coord, int id, const int64_t *ranks, int n_ranks,
                              uint64_t batch, uint64_t tag, err_t *err)
{
    int *copy = store_take(&coord->store, (size_t)n_ranks * sizeof(int));
    hvd_status_t status =
        n_ranks > 0 ? HVD_OK : fail(err, HVD_PROTOCOL, "process set %d names no ranks", id);
    if (copy == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a process set of %d ranks", n_ranks);
    }
    for (int i = 0; i < n_ranks && status == HVD_OK; i++) {
        copy[i] = (int)ranks[i];
        if (ranks[i] < 0 || ranks[i] >= coord->params.size) {
            status = fail(err, HVD_PROTOCOL,
                          "process set %d names rank %lld, but the job has only ranks 0 to %d", id,
                          (long long)ranks[i], coord->params.size - 1);
        } else if (i > 0 && ranks[i] <= ranks[i - 1]) {
            status = fail(err, HVD_PROTOCOL, "process set %d does not list its ranks in order", id);
        }
    }
    if (status == HVD_OK) {
        status = sets_register(coord, id, copy, n_ranks, err);
    }
    store_give(&coord->store, copy, (size_t)n_ranks * sizeof(int));
    verdict_t *verdict = NULL;
    if (status == HVD_OK) {
        verdict = decide_open(coord, DECIDE_SET_ADDED, batch, id);
    }
    if (verdict != NULL) {
        verdict->decision.tag = tag;
        decide_close(coord, verdict);
    }
    return status;
}

// Forgets every entry of the set; submissions that waited in it fail.
static void clear_set(coord_t *coord, set_t *set, uint64_t batch)
{
    char text[256];
    for (size_t i = 0; i < set->names.n_slots;) {
        entry_t *entry = set->names.slots[i].value;
        size_t n_before = set->names.n_used;
        if (entry != NULL) {
            if (entry->tag != 0) {
                int bytes = snprintf(text, sizeof text,
                                     "Process set %d was removed while tensor '%.100s' waited for "
                                     "other ranks. Remove a process set only after its last "
                                     "operation has finished.",
                                     set->id, entry->name);
                decide_fail(coord, entry->tag, batch, HVD_UNKNOWN_SET, text, (size_t)bytes);
            }
            entry_forget(coord, entry);
        }
        // A slot that was emptied may have been filled from behind: look at it again.
        i += set->names.n_used == n_before;
    }
}

void follow_set_removed(coord_t *coord, set_t *set, uint64_t batch, uint64_t tag)
{
    int id = set->id;
    clear_set(coord, set, batch);
    sets_remove(coord, set);
    verdict_t *verdict = decide_open(coord, DECIDE_SET_REMOVED, batch, id);
    if (verdict != NULL) {
        verdict->decision.tag = tag;
        decide_close(coord, verdict);
    }
}

void follow_joined(coord_t *coord, uint64_t batch, int last)
{
    verdict_t *verdict = decide_open(coord, DECIDE_JOINED, batch, 0);
    if (verdict != NULL) {
        verdict->decision.tag = coord->joins.tag;
        verdict->decision.last_joined = last;
        decide_close(coord, verdict);
    }
    coord->entries.n_pending -= coord->joins.tag != 0;
    joins_clear(coord);
}

void follow_end(coord_t *coord, hvd_status_t status, int rank, const char *text, size_t text_bytes)
{
    if (text_bytes == 0 || text[0] == '\0') { // whoever ended the job has to say why, and may not
        text = hvd_status_text(status);
        text_bytes = strlen(text);
    }
    size_t kept = MIN(text_bytes, CONTROL_MAX_TEXT_BYTES - 1);
    memcpy(coord->ending.text, text, kept);
    coord->ending.text[kept] = '\0';
    coord->ending.has_ended = true;
    coord->ending.status = status;
    coord->ending.decision = (decision_t){.kind = DECIDE_ENDED,
                                          .batch = coord->sequencer.next_batch,
                                          .status = status,
                                          .text = coord->ending.text,
                                          .rank = rank};
    while (!chain_is_empty(&coord->entries.open)) {
        entry_t *entry = CHAIN_OWNER(coord->entries.open.next, entry_t, open);
        if (entry->tag != 0) {
            decide_fail(coord, entry->tag, coord->sequencer.next_batch, status, coord->ending.text,
                        kept);
        }
        sequence_discard(coord, entry);
        entry_close_round(coord, entry);
    }
    if (coord->joins.tag != 0) {
        decide_fail(coord, coord->joins.tag, coord->sequencer.next_batch, status,
                    coord->ending.text, kept);
        coord->joins.tag = 0;
        coord->entries.n_pending--;
    }
}

// The line is a LINE_STOP or a RECORD_SHUTDOWN. Reasons are for people: nothing is decided by them.
void follow_shutdown(coord_t *coord, const control_line_t *line)
{
    char text[256];
    size_t reason_bytes = MIN(line->text.bytes, CONTROL_MAX_REASON_BYTES);
    int bytes = snprintf(text, sizeof text,
                         "Horovod has been shut down. Rank %d asked all ranks to stop, so what was "
                         "still waiting cannot finish. If this was not intended, look for an "
                         "error in the output of that rank.",
                         line->rank);
    memcpy(coord->ending.reason, line->text.at, reason_bytes);
    coord->ending.reason[reason_bytes] = '\0';
    follow_end(coord, HVD_SHUTDOWN, line->rank, text, (size_t)bytes);
}

// --- Lines from children ------------------------------------------------------------------------

typedef hvd_status_t (*handler_fn)(coord_t *coord, int branch, const control_line_t *line,
                                   err_t *err);

static share_t share_of_line(const control_line_t *line)
{
    return (share_t){.n_variants = 1,
                     .zeros = line->zeros,
                     .sizes = line->sizes,
                     .n_sizes = line->n_sizes,
                     .payload = line->payload,
                     .payload_bytes = line->payload_bytes};
}

static hvd_status_t on_ready(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    entry_t *entry = entry_of_id(coord, line->id);
    if (entry == NULL) {
        coord->n_stale_lines++;
        return line->id != 0 && line->id <= coord->entries.highest_id
                   ? HVD_OK
                   : fail(err, HVD_PROTOCOL, "tensor id %u was never assigned", line->id);
    }
    share_t share = share_of_line(line);
    const part_t *part = set_part(entry->set, branch);
    share.ranks[0] = line->zeros || part == NULL ? line->example_ranks[0] : part->lowest;
    if (share.ranks[0] >= coord->params.size) {
        return fail(err, HVD_PROTOCOL,
                    "tensor '%s' is said to come from rank %d, which does not exist", entry->name,
                    share.ranks[0]);
    }
    return merge_share(coord, entry, branch, &share, err);
}

// Can this signature stand in this set, whoever sent it? Its structure was checked on reading.
static bool signature_fits(const set_t *set, const signature_t *signature)
{
    switch ((int)signature->op) {
    case OP_ADD_SET:
        return set->id == 0 && signature->n_dims_words > 0;
    case OP_REMOVE_SET:
        return set->id == 0 && signature->n_dims_words == 1 && signature->dims[0] >= 0 &&
               signature->dims[0] <= INT32_MAX;
    default:
        return (int64_t)signature_n_sizes(signature, set->n_ranks) * set->n_ranks <=
               (int64_t)CONTROL_MAX_SIZES;
    }
}

// NEW and CONFLICT.
static hvd_status_t on_new(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    set_t *set = sets_find(coord, (int)MIN(line->set, (uint32_t)INT32_MAX));
    if (set == NULL) {
        coord->n_stale_lines++;
        return line->set < (uint32_t)coord->sets.n_slots
                   ? HVD_OK
                   : fail(err, HVD_PROTOCOL, "process set %u never existed", line->set);
    }
    share_t share = share_of_line(line);
    share.n_variants = line->n_variants;
    for (int i = 0; i < line->n_variants; i++) {
        if (!signature_fits(set, &line->variants[i]) ||
            line->example_ranks[i] >= coord->params.size) {
            return fail(err, HVD_PROTOCOL, "tensor '%.*s' has a malformed signature",
                        (int)MIN(line->name.bytes, (size_t)100), line->name.at);
        }
        share.signatures[i] = &line->variants[i];
        share.ranks[i] = line->example_ranks[i];
    }
    entry_t *entry = entry_make(coord, set, line->name.at, line->name.bytes);
    if (entry == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for one more tensor name");
    }
    return merge_share(coord, entry, branch, &share, err);
}

static hvd_status_t on_join(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    if (line->rank >= coord->params.size || coord->branch_of[line->rank] != branch ||
        coord->joins.has_joined[line->rank]) {
        return fail(err, HVD_PROTOCOL,
                    "rank %d cannot join: it does not exist, is elsewhere in the tree, or has "
                    "joined already",
                    line->rank);
    }
    joins_add(coord, line->rank);
    if (!is_sequencer(coord)) {
        control_put(line_to_parent(coord), line);
    }
    return HVD_OK;
}

static hvd_status_t on_evicted(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    entry_t *entry = entry_of_id(coord, line->id);
    (void)branch;
    (void)err;
    // Nobody waits for it any more if the name has run under another id meanwhile, or its process
    // set is gone.
    if (entry == NULL || entry->old_id != line->id || --entry->n_acks > 0) {
        return HVD_OK;
    }
    entry_forget_id(coord, entry, line->id);
    entry_settle(coord, entry);
    if (!is_sequencer(coord)) {
        control_put(line_to_parent(coord), line);
    }
    return HVD_OK;
}

static hvd_status_t on_stalled(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)branch;
    return stall_question(coord, line, err);
}

static hvd_status_t on_answer(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    return stall_answer(coord, branch - 1, line, err);
}

static hvd_status_t on_stop(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)branch;
    if (line->rank >= coord->params.size) {
        return fail(err, HVD_PROTOCOL, "the job is to be stopped by rank %d, which does not exist",
                    line->rank);
    }
    if (is_sequencer(coord)) {
        sequence_stop(coord, line);
    } else if (!coord->ending.has_sent_stop) {
        coord->ending.has_sent_stop = true;
        control_put(line_to_parent(coord), line);
    }
    return HVD_OK;
}

// --- Records from the parent --------------------------------------------------------------------

// The bytes of the record just read, to the children; set NULL: to all of them.
static void pass_on(coord_t *coord, const set_t *set)
{
    const control_reader_t *reader = &coord->reader;
    outbox_to_children(coord, set, reader->line_at, (size_t)(reader->in.at - reader->line_at));
}

// The entry a RUN speaks of, with the signature and id it gives.
static entry_t *entry_of_run(coord_t *coord, set_t *set, const control_run_t *run, err_t *err)
{
    if (!run->named) {
        entry_t *known = entry_of_id(coord, run->id);
        if (known == NULL || known->id != run->id || known->set != set) {
            fail(err, HVD_PROTOCOL, "a batch runs tensor id %u, which this rank does not know",
                 run->id);
            return NULL;
        }
        return known;
    }
    entry_t *entry = entry_make(coord, set, run->name.at, run->name.bytes);
    if (entry == NULL) {
        fail(err, HVD_NO_MEMORY, "no memory for one more tensor name");
        return NULL;
    }
    entry_t *holder = entry_of_id(coord, run->id);
    if (op_is_about_sets(run->signature.op) || !signature_fits(set, &run->signature) ||
        (holder != NULL && holder != entry)) {
        fail(err, HVD_PROTOCOL,
             "a batch runs tensor '%s' under an invalid id or with an invalid signature",
             entry->name);
        return NULL;
    }
    if (entry->sig == NULL || !signature_equal(&entry->sig->view, &run->signature)) {
        bool is_known = entry->n_variants > 0 &&
                        signature_equal(&entry->variants[0].sig->view, &run->signature);
        kept_sig_t *sig =
            is_known ? sig_hold(entry->variants[0].sig) : sig_new(coord, &run->signature);
        if (sig == NULL) {
            fail(err, HVD_NO_MEMORY, "no memory for the shape of tensor '%s'", entry->name);
            return NULL;
        }
        sig_drop(coord, entry->sig);
        entry->sig = sig;
        sizes_drop(coord, entry->sizes);
        entry->sizes = NULL;
    }
    if (!entry_set_id(coord, entry, run->id)) {
        fail(err, HVD_NO_MEMORY, "no memory for one more tensor id");
        return NULL;
    }
    return entry;
}

static hvd_status_t take_sizes(coord_t *coord, entry_t *entry, const control_run_t *run, err_t *err)
{
    if (op_infos[entry->sig->view.op].sizes == SIZES_NONE) {
        return HVD_OK;
    }
    int n = signature_n_sizes(&entry->sig->view, entry->set->n_ranks) * entry->set->n_ranks;
    if (run->sizes == NULL ? entry->sizes == NULL : run->n_sizes != n) {
        return fail(err, HVD_PROTOCOL, "a batch has %d sizes instead of %d for tensor '%s'",
                    run->n_sizes, n, entry->name);
    }
    if (run->sizes != NULL) {
        sizes_t *sizes = sizes_new(coord, n);
        if (sizes == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for the sizes of tensor '%s'", entry->name);
        }
        memcpy(sizes->at, run->sizes, (size_t)n * sizeof(int64_t));
        sizes_drop(coord, entry->sizes);
        entry->sizes = sizes;
    }
    return HVD_OK;
}

// Applies one entry of a batch; verdict is NULL if this rank is no member.
static hvd_status_t follow_run(coord_t *coord, set_t *set, bool rides, verdict_t *verdict,
                               err_t *err)
{
    control_run_t run;
    hvd_status_t status = HVD_OK;
    if (!control_next_run(&coord->reader, &run)) {
        return fail(err, HVD_PROTOCOL, "a batch is cut short");
    }
    entry_t *entry = entry_of_run(coord, set, &run, err);
    if (entry == NULL) {
        return err != NULL ? err->status : HVD_PROTOCOL;
    }
    if (entry->sig->rides != rides || run.result_bytes != entry->sig->payload_bytes) {
        return fail(err, HVD_PROTOCOL,
                    "a batch brings %zu bytes as the result of tensor '%s' instead of %zu: check "
                    "that HOROVOD_INLINE_BYTES is the same on all ranks",
                    run.result_bytes, entry->name, entry->sig->payload_bytes);
    }
    if (set->self >= 0 && entry->tag == 0 && coord->joins.tag == 0) {
        return fail(err, HVD_PROTOCOL, "a batch runs tensor '%s', which rank %d has not submitted",
                    entry->name, coord->params.rank);
    }
    TRY(take_sizes(coord, entry, &run, err), done);
    if (verdict != NULL) {
        const void *result = run.result != NULL ? run.result : (const uint8_t *)"";
        decide_add(coord, verdict, entry, result, run.result_bytes);
    }
    entry_close_round(coord, entry);
done:
    return status;
}

static hvd_status_t on_run(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    set_t *set = sets_find(coord, (int)MIN(line->set, (uint32_t)INT32_MAX));
    verdict_t *verdict = NULL;
    hvd_status_t status = HVD_OK;
    (void)branch;
    if (set == NULL || line->n_items == 0) {
        return fail(err, HVD_PROTOCOL,
                    "a batch of %d tensors names process set %u: it has no tensors, or the set "
                    "does not exist",
                    line->n_items, line->set);
    }
    if (set->self >= 0) {
        verdict = decide_open(coord, DECIDE_RUN, line->batch, set->id);
        if (verdict == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for a batch of %d tensors", line->n_items);
        }
        verdict->rides = line->rides;
    }
    for (int i = 0; i < line->n_items && status == HVD_OK; i++) {
        status = follow_run(coord, set, line->rides, verdict, err);
    }
    if (status != HVD_OK) {
        if (verdict != NULL) {
            decide_discard(coord, verdict);
        }
        return status;
    }
    pass_on(coord, set);
    if (verdict != NULL) {
        decide_close(coord, verdict);
    }
    return HVD_OK;
}

static hvd_status_t on_offer(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)branch;
    return offer_receive(coord, line->id, line->payload, line->payload_bytes, err);
}

static hvd_status_t on_error(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    set_t *set = sets_find(coord, (int)MIN(line->set, (uint32_t)INT32_MAX));
    (void)branch;
    if (set == NULL) {
        return fail(err, HVD_PROTOCOL, "an error concerns process set %u, which does not exist",
                    line->set);
    }
    pass_on(coord, set);
    entry_t *entry = entry_find(set, line->name.at, line->name.bytes);
    if (entry != NULL) {
        follow_error(coord, entry, line->batch, line->status, line->text.at, line->text.bytes);
    }
    return HVD_OK;
}

static hvd_status_t on_evict(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    entry_t *entry = entry_of_id(coord, line->id);
    (void)branch;
    if (entry == NULL || entry->id != line->id) {
        return fail(err, HVD_PROTOCOL, "tensor id %u is to be retired, but it is not known",
                    line->id);
    }
    pass_on(coord, entry->set);
    entry_retire_id(coord, entry);
    if (entry->old_id == 0) {
        control_line_t answer = {.kind = LINE_EVICTED, .id = line->id};
        control_put(line_to_parent(coord), &answer);
    }
    entry_settle(coord, entry);
    return HVD_OK;
}

static hvd_status_t on_joined(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)branch;
    if (coord->joins.tag == 0 || line->rank >= coord->params.size) {
        return fail(err, HVD_PROTOCOL, "not all ranks have joined: rank %d has not",
                    coord->params.rank);
    }
    pass_on(coord, NULL);
    follow_joined(coord, line->batch, line->rank);
    return HVD_OK;
}

// The entry that asked for a change of process sets; every rank has it open.
static entry_t *entry_of_change(coord_t *coord, const control_line_t *line)
{
    return entry_find(coord->sets.at[0], line->name.at, line->name.bytes);
}

static hvd_status_t on_set_add(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    entry_t *entry = entry_of_change(coord, line);
    hvd_status_t status;
    (void)branch;
    if (entry == NULL || line->set > INT32_MAX) {
        return fail(err, HVD_PROTOCOL, "process set %u was added without being asked for",
                    line->set);
    }
    TRY(follow_set_added(coord, (int)line->set, line->sizes, line->n_sizes, line->batch, entry->tag,
                         err),
        done);
    pass_on(coord, NULL);
    entry_close_round(coord, entry);
done:
    return status;
}

static hvd_status_t on_set_remove(coord_t *coord, int branch, const control_line_t *line,
                                  err_t *err)
{
    entry_t *entry = entry_of_change(coord, line);
    set_t *set = sets_find(coord, (int)MIN(line->set, (uint32_t)INT32_MAX));
    (void)branch;
    if (entry == NULL || set == NULL || set->id == 0) {
        return fail(err, HVD_PROTOCOL, "process set %u was removed without being asked for",
                    line->set);
    }
    pass_on(coord, NULL);
    follow_set_removed(coord, set, line->batch, entry->tag);
    entry_close_round(coord, entry);
    return HVD_OK;
}

static hvd_status_t on_inquire(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)branch;
    hvd_status_t status = stall_inquire(coord, line, err);
    if (status == HVD_OK) {
        pass_on(coord, NULL);
    }
    return status;
}

static hvd_status_t on_report(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    verdict_t *verdict = decide_open(coord, DECIDE_REPORT, line->batch, 0);
    (void)branch;
    if (verdict == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a report");
    }
    pass_on(coord, NULL);
    verdict->decision.status = line->status;
    decide_text(verdict, line->text.at, line->text.bytes);
    decide_close(coord, verdict);
    return HVD_OK;
}

static hvd_status_t on_shutdown(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)branch;
    if (line->rank >= coord->params.size) {
        return fail(err, HVD_PROTOCOL, "the job is stopped by rank %d, which does not exist",
                    line->rank);
    }
    pass_on(coord, NULL);
    follow_shutdown(coord, line);
    return HVD_OK;
}

// From either side: told to everybody else.
static hvd_status_t on_abort(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)err;
    for (int i = 0; i < coord_n_neighbours(coord); i++) {
        bool is_sender =
            branch < 0 ? i == 0 && coord->n_parents > 0 : i == coord->n_parents + branch - 1;
        if (!is_sender) {
            control_put(outbox_line(coord, i), line);
        }
    }
    int rank = line->rank < coord->params.size ? line->rank : -1;
    follow_end(coord, line->status, rank, line->text.at, line->text.bytes);
    return HVD_OK;
}

static hvd_status_t on_heartbeat(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)err;
    heartbeat_heard(coord, branch < 0 ? 0 : coord->n_parents + branch - 1, line);
    return HVD_OK;
}

static hvd_status_t on_progress(coord_t *coord, int branch, const control_line_t *line, err_t *err)
{
    (void)err;
    progress_heard(coord, coord->n_parents + branch - 1, line);
    return HVD_OK;
}

// --- Frames -------------------------------------------------------------------------------------

static const struct {
    handler_fn from_child, from_parent;
} handlers[CONTROL_N_KINDS] = {
    [LINE_READY] = {.from_child = on_ready},
    [LINE_NEW] = {.from_child = on_new},
    [LINE_CONFLICT] = {.from_child = on_new},
    [LINE_JOIN] = {.from_child = on_join},
    [LINE_EVICTED] = {.from_child = on_evicted},
    [LINE_STALLED] = {.from_child = on_stalled},
    [LINE_ANSWER] = {.from_child = on_answer},
    [LINE_STOP] = {.from_child = on_stop},
    [RECORD_RUN] = {.from_parent = on_run},
    [RECORD_ERROR] = {.from_parent = on_error},
    [RECORD_EVICT] = {.from_parent = on_evict},
    [RECORD_JOINED] = {.from_parent = on_joined},
    [RECORD_SET_ADD] = {.from_parent = on_set_add},
    [RECORD_SET_REMOVE] = {.from_parent = on_set_remove},
    [RECORD_INQUIRE] = {.from_parent = on_inquire},
    [RECORD_REPORT] = {.from_parent = on_report},
    [RECORD_SHUTDOWN] = {.from_parent = on_shutdown},
    [LINE_ABORT] = {.from_child = on_abort, .from_parent = on_abort},
    [LINE_HEARTBEAT] = {.from_child = on_heartbeat, .from_parent = on_heartbeat},
    [LINE_PROGRESS] = {.from_child = on_progress},
    [RECORD_OFFER] = {.from_parent = on_offer},
};

// The branch a neighbour stands for; -1: the parent; -2: no neighbour.
static int branch_of_neighbour(const coord_t *coord, int from)
{
    if (coord->n_parents > 0 && coord->outboxes[0].rank == from) {
        return -1;
    }
    int branch = from >= 0 && from < coord->params.size ? coord->branch_of[from] : -1;
    bool is_child = branch > 0 && coord->outboxes[coord->n_parents + branch - 1].rank == from;
    return is_child ? branch : -2;
}

hvd_status_t coord_receive(coord_t *coord, int from, const void *body, size_t bytes,
                           uint64_t now_ns, err_t *err)
{
    SOUND(coord);
    int branch = branch_of_neighbour(coord, from);
    control_line_t line;
    hvd_status_t status = HVD_OK;
    if (branch == -2) {
        return fail(err, HVD_PROTOCOL, "rank %d is not a neighbour of rank %d in the tree", from,
                    coord->params.rank);
    }
    set_time(coord, now_ns);
    control_open(&coord->reader, body, bytes);
    while (!coord->ending.has_ended && control_next(&coord->reader, &line)) {
        handler_fn handler =
            branch < 0 ? handlers[line.kind].from_parent : handlers[line.kind].from_child;
        if (handler == NULL) {
            return fail(err, HVD_PROTOCOL,
                        "rank %d sent a line of kind %d, which only travels the other way", from,
                        line.kind);
        }
        TRY(handler(coord, branch, &line, err), bad);
    }
    if (!control_bad(&coord->reader) || coord->ending.has_ended) {
        return HVD_OK;
    }
    return coord->reader.words.failed
               ? fail(err, HVD_NO_MEMORY, "no memory to read a frame of %zu bytes", bytes)
               : fail(err, HVD_PROTOCOL, "rank %d sent a malformed frame of %zu bytes", from,
                      bytes);
bad:
    // Which neighbour it was is known only here.
    if (err != NULL && status == HVD_PROTOCOL) {
        return fail(err, status, "rank %d sent a malformed message: %s", from, err->text);
    }
    return status;
}
