// SPDX-License-Identifier: Apache-2.0
//
// sequence.c - rank 0 only: complete rounds become records of the one log that all ranks follow.
//
// What cannot run becomes an error record at once. What rode along is over once the record is out,
// so it never waits. The rest queues in order of completion, and batches are formed when somebody
// asks for output, so that everything that came in one go is fused: while fewer than two batches
// run here a new one starts, made of the first entry in the queue and all compatible ones behind
// it up to the fusion threshold. Batches grow by themselves when the job is busy, and an idle job
// waits for nothing (unless a cycle time was set).
//
// Names get ids with their first batch; beyond the cache's capacity the id that was run longest ago
// is evicted by a record. Cost per entry: constant, plus a look at the incompatible entries it is
// fused across. Every record goes to the children that need it and is applied here by the same
// functions as everywhere else. The holder of the engine calls.
#include "coord/internal.h"

#include <stdlib.h>

#define MAX_BATCHES_RUNNING 2
#define MAX_RECORD_BYTES (8 * MIB) // batches are cut rather than becoming larger records

// --- Records ------------------------------------------------------------------------------------

// set NULL: to all children.
static void publish(coord_t *coord, const set_t *set)
{
    SEQUENCER(coord);
    coord->no_memory |= coord->sequencer.record.failed;
    if (!coord->sequencer.record.failed) {
        outbox_to_children(coord, set, coord->sequencer.record.data, coord->sequencer.record.len);
    }
    buf_clear(&coord->sequencer.record);
}

static void publish_line(coord_t *coord, const set_t *set, const control_line_t *line)
{
    control_put(&coord->sequencer.record, line);
    publish(coord, set);
}

static void publish_error(coord_t *coord, entry_t *entry, const err_t *err)
{
    control_line_t line = {
        .kind = RECORD_ERROR,
        .batch = coord->sequencer.next_batch++,
        .set = (uint32_t)entry->set->id,
        .name = {entry->name, entry->name_bytes},
        .status = err->status,
        .text = {err->text, strlen(err->text)},
    };
    publish_line(coord, entry->set, &line);
    follow_error(coord, entry, line.batch, line.status, line.text.at, line.text.bytes);
}

void sequence_report(coord_t *coord, hvd_status_t status, const char *text)
{
    SEQUENCER(coord);
    control_line_t line = {.kind = RECORD_REPORT,
                           .batch = coord->sequencer.next_batch++,
                           .status = status,
                           .text = {text, strlen(text)}};
    verdict_t *verdict = decide_open(coord, DECIDE_REPORT, line.batch, 0);
    publish_line(coord, NULL, &line);
    if (verdict != NULL) {
        verdict->decision.status = status;
        decide_text(verdict, text, line.text.bytes);
        decide_close(coord, verdict);
    }
}

// --- Complete rounds ----------------------------------------------------------------------------

// What the entry adds to the buffer of a batch. Of blocks: what all members bring together.
static size_t bytes_to_run(const entry_t *entry, const kept_sig_t *sig)
{
    const sizes_t *sizes = entry->fresh != NULL ? entry->fresh : entry->sizes;
    if (op_infos[sig->view.op].sizes != SIZES_PER_TENSOR || sizes == NULL) {
        return sig->tensor_bytes;
    }
    size_t bytes = 0;
    const int64_t *shape = sig->words;
    for (int tensor = 0; tensor < sig->view.n_tensors; tensor++, shape += 1 + shape[0]) {
        size_t row = hvd_dtype_bytes(sig->view.dtype), rows = 0;
        for (int d = 1; d < shape[0]; d++) {
            row *= (size_t)shape[1 + d];
        }
        for (int i = tensor; i < sizes->n; i += sig->view.n_tensors) {
            rows += (size_t)sizes->at[i];
        }
        bytes += rows * row;
    }
    return bytes;
}

void sequence_complete(coord_t *coord, entry_t *entry)
{
    SEQUENCER(coord);
    SOUND_ROUND(coord, entry);
    const kept_sig_t *sig = entry->variants[0].sig;
    err_t err;
    err.status = HVD_OK; // the text is long, and mostly not needed
    if (entry->n_variants > 1) {
        mismatch_of_variants(entry, &err);
    } else if (entry->has_zeros && !op_has(sig->view.op, OP_JOINS)) {
        mismatch_of_join(coord, entry, &err);
    } else if (op_has(sig->view.op, OP_NEEDS_ROWS)) {
        mismatch_of_scalars(entry, &err);
    }
    if (err.status != HVD_OK) {
        publish_error(coord, entry, &err);
        return;
    }
    coord->sequencer.n_queued++;
    if (sig->rides) {
        chain_append(&coord->sequencer.rides, &entry->queued);
    } else {
        if (chain_is_empty(&coord->sequencer.ready)) {
            coord->sequencer.ready_since_ns = coord->now_ns;
        }
        entry->run_bytes = bytes_to_run(entry, sig);
        coord->sequencer.ready_bytes += entry->run_bytes;
        chain_append(&coord->sequencer.ready, &entry->queued);
    }
}

static void unqueue(coord_t *coord, entry_t *entry)
{
    SOUND_ROUND(coord, entry);
    if (!chain_is_empty(&entry->queued)) {
        chain_remove(&entry->queued);
        coord->sequencer.n_queued--;
        coord->sequencer.ready_bytes -= entry->run_bytes;
        entry->run_bytes = 0;
    }
}

static void forget_cached(coord_t *coord, entry_t *entry)
{
    if (!chain_is_empty(&entry->recent)) {
        chain_remove(&entry->recent);
        coord->sequencer.n_cached--;
    }
}

void sequence_discard(coord_t *coord, entry_t *entry)
{
    unqueue(coord, entry);
    forget_cached(coord, entry);
}

// --- Ids ----------------------------------------------------------------------------------------

static void evict(coord_t *coord, entry_t *entry)
{
    SEQUENCER(coord);
    control_line_t line = {.kind = RECORD_EVICT, .id = entry->id};
    publish_line(coord, entry->set, &line);
    forget_cached(coord, entry);
    entry_retire_id(coord, entry);
    entry_settle(coord, entry);
}

// A seat in the cache: a free one, or that of the entry run longest ago. One of the batch being
// formed, or on offer, does not give up its seat; the newcomer then goes without an id.
static bool make_room(coord_t *coord)
{
    if (coord->sequencer.n_cached < coord->params.cache_capacity) {
        return true;
    }
    if (chain_is_empty(&coord->sequencer.recent)) {
        return false;
    }
    entry_t *oldest = CHAIN_OWNER(coord->sequencer.recent.next, entry_t, recent);
    if (oldest->is_picked || oldest->is_offered) {
        return false;
    }
    evict(coord, oldest);
    return true;
}

// Gives the entry the signature of the round, and an id for it if it has none.
static void identify(coord_t *coord, entry_t *entry)
{
    kept_sig_t *sig = entry->variants[0].sig;
    entry->is_news = entry->id == 0 || sig != entry->sig;
    if (!entry->is_news) {
        return;
    }
    forget_cached(coord, entry);
    if (sig != entry->sig) {
        sig_drop(coord, entry->sig);
        entry->sig = sig_hold(sig);
        sizes_drop(coord, entry->sizes);
        entry->sizes = NULL;
    }
    bool has_seat = coord->sequencer.next_id != UINT32_MAX && make_room(coord);
    if (!entry_set_id(coord, entry, has_seat ? coord->sequencer.next_id : 0)) {
        coord->no_memory = true;
    }
    if (entry->id != 0) {
        coord->sequencer.next_id++;
        coord->sequencer.n_cached++;
        chain_append(&coord->sequencer.recent, &entry->recent);
    }
}

void sequence_touch(coord_t *coord, entry_t *entry)
{
    SEQUENCER(coord);
    if (!chain_is_empty(&entry->recent)) {
        chain_remove(&entry->recent);
        chain_append(&coord->sequencer.recent, &entry->recent);
    }
}

static void identify_picked(coord_t *coord)
{
    for (int i = 0; i < coord->sequencer.n_picked; i++) {
        coord->sequencer.picked[i]->is_picked = true;
        sequence_touch(coord, coord->sequencer.picked[i]);
    }
    for (int i = 0; i < coord->sequencer.n_picked; i++) {
        identify(coord, coord->sequencer.picked[i]);
    }
}

// --- Batches ------------------------------------------------------------------------------------

static bool pick(coord_t *coord, entry_t *entry)
{
    SOUND_ROUND(coord, entry);
    if (coord->sequencer.n_picked == coord->sequencer.cap_picked) {
        int cap = MAX(16, coord->sequencer.cap_picked * 2);
        entry_t **picked = realloc(coord->sequencer.picked, (size_t)cap * sizeof *picked);
        if (picked == NULL) {
            coord->no_memory = true;
            return false;
        }
        coord->sequencer.picked = picked;
        coord->sequencer.cap_picked = cap;
    }
    coord->sequencer.picked[coord->sequencer.n_picked++] = entry;
    unqueue(coord, entry);
    return true;
}

static void put_run(coord_t *coord, const entry_t *entry, const uint8_t *result)
{
    control_run_t run;
    run.id = entry->id;
    run.named = entry->is_news;
    run.sizes = NULL;
    run.result = NULL;
    if (entry->is_news) {
        run.name = (control_text_t){entry->name, entry->name_bytes};
        run.signature = entry->sig->view;
    }
    // Otherwise they are as last time, which every node that is part of the round remembers.
    if (entry->fresh != NULL) {
        run.sizes = entry->sizes->at;
        run.n_sizes = entry->sizes->n;
    }
    if (entry->sig->payload_bytes > 0) {
        run.result = result;
        run.result_bytes = entry->sig->payload_bytes;
    }
    control_put_run(&coord->sequencer.record, &run);
}

static void take_fresh_sizes(coord_t *coord, entry_t *entry)
{
    if (entry->fresh != NULL) {
        sizes_drop(coord, entry->sizes);
        entry->sizes = entry->fresh;
        entry->sizes->n_holders++; // `fresh` stays until the round is closed
    }
}

// Writes the record of the picked entries and applies it here.
static void run_picked(coord_t *coord, bool rides)
{
    SEQUENCER(coord);
    const set_t *set = coord->sequencer.picked[0]->set;
    identify_picked(coord);
    uint64_t batch = coord->sequencer.next_batch++;
    control_put_batch(&coord->sequencer.record, batch, (uint32_t)set->id, rides,
                      coord->sequencer.n_picked);
    verdict_t *verdict = NULL;
    if (set->self >= 0) {
        verdict = decide_open(coord, DECIDE_RUN, batch, set->id);
    }
    if (verdict != NULL) {
        verdict->rides = rides;
    }
    for (int i = 0; i < coord->sequencer.n_picked; i++) {
        entry_t *entry = coord->sequencer.picked[i];
        const uint8_t *result = rides ? merge_result(coord, entry) : NULL;
        take_fresh_sizes(coord, entry);
        put_run(coord, entry, result);
        if (verdict != NULL) {
            decide_add(coord, verdict, entry, result, entry->sig->payload_bytes);
        }
    }
    publish(coord, set);
    if (verdict != NULL) {
        decide_close(coord, verdict);
    }
    for (int i = 0; i < coord->sequencer.n_picked; i++) {
        coord->sequencer.picked[i]->is_picked = false;
        entry_close_round(coord, coord->sequencer.picked[i]);
    }
    coord->sequencer.n_picked = 0;
}

// An upper bound of what the entry takes in a record.
static size_t record_bytes(const entry_t *entry)
{
    const kept_sig_t *sig = entry->variants[0].sig;
    bool is_news = entry->id == 0 || sig != entry->sig;
    size_t news = is_news ? entry->name_bytes + (size_t)sig->view.n_dims_words * 10 + 64 : 16;
    return news + (entry->fresh != NULL ? (size_t)entry->fresh->n * 10 : 0) + sig->payload_bytes;
}

static void flush_rides(coord_t *coord)
{
    while (!chain_is_empty(&coord->sequencer.rides) && !coord->no_memory) {
        const set_t *set = CHAIN_OWNER(coord->sequencer.rides.next, entry_t, queued)->set;
        size_t bytes = 0;
        while (!chain_is_empty(&coord->sequencer.rides) && bytes < MAX_RECORD_BYTES) {
            entry_t *entry = CHAIN_OWNER(coord->sequencer.rides.next, entry_t, queued);
            if (entry->set != set || !pick(coord, entry)) {
                break;
            }
            bytes += record_bytes(entry);
        }
        if (coord->sequencer.n_picked > 0) {
            run_picked(coord, true);
        }
    }
}

static bool may_fuse(const entry_t *a, const entry_t *b)
{
    const kept_sig_t *x = a->variants[0].sig, *y = b->variants[0].sig;
    return a->set == b->set && y->fuses && signature_fuses_with(&x->view, &y->view);
}

static bool is_about_sets(const entry_t *entry)
{
    return op_is_about_sets(entry->variants[0].sig->view.op);
}

static void run_with_compatible(coord_t *coord, entry_t *first)
{
    chain_t *item = first->queued.next;
    size_t total = first->run_bytes, bytes = record_bytes(first);
    bool fuses = first->variants[0].sig->fuses && coord->params.fusion_bytes > 0;
    if (!pick(coord, first)) {
        return;
    }
    while (fuses && item != &coord->sequencer.ready && bytes < MAX_RECORD_BYTES) {
        entry_t *entry = CHAIN_OWNER(item, entry_t, queued);
        item = item->next;
        if (is_about_sets(entry)) {
            break;
        }
        if (!may_fuse(first, entry)) {
            continue;
        }
        if (entry->run_bytes >
            coord->params.fusion_bytes - MIN(total, coord->params.fusion_bytes)) {
            break;
        }
        total += entry->run_bytes;
        bytes += record_bytes(entry);
        if (!pick(coord, entry)) {
            break;
        }
    }
    run_picked(coord, false);
}

// --- Process sets -------------------------------------------------------------------------------

static hvd_status_t add_set(coord_t *coord, entry_t *entry, control_line_t *line, err_t *err)
{
    const signature_t *asked = &entry->variants[0].sig->view;
    if (sets_find_ranks(coord, asked->dims, asked->n_dims_words) != NULL) {
        return fail(
            err, HVD_EXISTING_SET,
            "A process set with the same ranks already exists: use it instead of adding one.");
    }
    line->kind = RECORD_SET_ADD;
    line->set = (uint32_t)sets_free_id(coord);
    line->sizes = asked->dims;
    line->n_sizes = asked->n_dims_words;
    // Applied first: ranks that make no sense must not reach the log.
    return follow_set_added(coord, (int)line->set, line->sizes, line->n_sizes, line->batch,
                            entry->tag, err);
}

static hvd_status_t remove_set(coord_t *coord, entry_t *entry, control_line_t *line, err_t *err)
{
    int id = (int)entry->variants[0].sig->view.dims[0];
    set_t *set = sets_find(coord, id);
    if (set == NULL || id == 0) {
        return fail(err, HVD_UNKNOWN_SET, "Process set %d does not exist and cannot be removed.",
                    id);
    }
    line->kind = RECORD_SET_REMOVE;
    line->set = (uint32_t)id;
    follow_set_removed(coord, set, line->batch, entry->tag);
    return HVD_OK;
}

static void run_set_change(coord_t *coord, entry_t *entry)
{
    SEQUENCER(coord);
    bool adds = (int)entry->variants[0].sig->view.op == OP_ADD_SET;
    control_line_t line = {.batch = coord->sequencer.next_batch++,
                           .name = {entry->name, entry->name_bytes}};
    err_t err = {0};
    unqueue(coord, entry);
    if ((adds ? add_set : remove_set)(coord, entry, &line, &err) != HVD_OK) {
        publish_error(coord, entry, &err);
        return;
    }
    publish_line(coord, NULL, &line);
    entry_close_round(coord, entry);
}

// --- When ---------------------------------------------------------------------------------------

// Is it worth waiting for more tensors?
static bool must_wait(const coord_t *coord)
{
    const coord_params_t *params = &coord->params;
    return params->cycle_ns > 0 && coord->sequencer.ready_bytes < params->fusion_bytes &&
           coord->now_ns < coord->sequencer.ready_since_ns + params->cycle_ns;
}

// The first entry that may start: batches this rank is no member of do not count as running here,
// so they are not held up by those that are. Nothing overtakes a change of process sets.
static entry_t *first_startable(const coord_t *coord, bool ignore_limit)
{
    for (chain_t *item = coord->sequencer.ready.next; item != &coord->sequencer.ready;
         item = item->next) {
        entry_t *entry = CHAIN_OWNER(item, entry_t, queued);
        if (is_about_sets(entry)) {
            return item->prev == &coord->sequencer.ready ? entry : NULL;
        }
        if (ignore_limit || coord->decisions.n_running < MAX_BATCHES_RUNNING ||
            entry->set->self < 0) {
            return entry;
        }
    }
    return NULL;
}

static void flush_ready(coord_t *coord, bool ignore_limits)
{
    entry_t *entry;
    while (!coord->no_memory && (entry = first_startable(coord, ignore_limits)) != NULL) {
        if (is_about_sets(entry)) {
            run_set_change(coord, entry);
        } else if (!ignore_limits && must_wait(coord)) {
            return;
        } else {
            run_with_compatible(coord, entry);
        }
    }
}

static void form_batches(coord_t *coord)
{
    SEQUENCER(coord);
    flush_rides(coord);
    flush_ready(coord, false);
    // Whoever joined cannot submit: when all have, what is queued is all that is left.
    if (coord->joins.n == coord->params.size && coord->sequencer.n_queued == 0) {
        control_line_t line = {.kind = RECORD_JOINED,
                               .batch = coord->sequencer.next_batch++,
                               .rank = coord->joins.last};
        publish_line(coord, NULL, &line);
        follow_joined(coord, line.batch, line.rank);
    }
}

void coord_form_batches(coord_t *coord)
{
    SOUND(coord);
    bool has_work = coord->sequencer.n_queued > 0 || coord->joins.n == coord->params.size;
    if (UNLIKELY(has_work) && !coord->ending.has_ended) {
        form_batches(coord);
    }
    if (UNLIKELY(coord->no_memory)) {
        coord_abort(coord, HVD_NO_MEMORY, -1, "out of memory while agreeing what to run next");
    }
}

uint64_t sequence_next_ns(const coord_t *coord)
{
    if (!is_sequencer(coord) || chain_is_empty(&coord->sequencer.ready) || !must_wait(coord) ||
        first_startable(coord, false) == NULL) {
        return NEVER_NS;
    }
    return coord->sequencer.ready_since_ns + coord->params.cycle_ns;
}

// What every member had submitted before somebody asked to stop still runs.
void sequence_stop(coord_t *coord, const control_line_t *asked)
{
    SEQUENCER(coord);
    control_line_t line = {.kind = RECORD_SHUTDOWN, .rank = asked->rank, .text = asked->text};
    flush_rides(coord);
    flush_ready(coord, true);
    line.batch = coord->sequencer.next_batch++;
    publish_line(coord, NULL, &line);
    follow_shutdown(coord, &line);
}
