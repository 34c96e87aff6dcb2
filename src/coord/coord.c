// SPDX-License-Identifier: Apache-2.0
//
// coord.c - the functions of coord.h: a coordinator's life, submissions, ends.
//
// A submission is checked, becomes the share of this rank's own branch, and takes the same way as
// what children send. The common one, a name with a known id and an unchanged signature, costs a
// hash, a comparison of the signature and a line of a few bytes. The holder of the engine calls;
// what is returned belongs to the coordinator.
#include "coord/internal.h"
#include "coord/testing.h"

#include <stdio.h>
#include <stdlib.h>

#define UNKNOWN_BRANCH (-2)

// --- Life ---------------------------------------------------------------------------------------

// For every rank: in which branch of this node it lies. Each rank's way up is walked to the first
// rank whose branch is known, and all ranks on the way learn it: linear in the number of ranks.
static hvd_status_t find_branches(coord_t *coord, const int *parent, err_t *err)
{
    int size = coord->params.size, self = coord->params.rank, n_children = 0;
    int *branch_of = coord->branch_of;
    for (int rank = 0; rank < size; rank++) {
        bool is_child = rank != 0 && parent[rank] == self;
        branch_of[rank] = rank == self ? 0 : is_child ? ++n_children : UNKNOWN_BRANCH;
        if (rank == 0 ? parent[0] != -1 : (parent[rank] < 0 || parent[rank] >= size)) {
            return fail(err, HVD_INVALID_ARGUMENT, "rank %d has parent %d in the tree of %d ranks",
                        rank, parent[rank], size);
        }
    }
    if (branch_of[0] == UNKNOWN_BRANCH) {
        branch_of[0] = -1;
    }
    for (int rank = 0; rank < size; rank++) {
        int at = rank, steps = 0;
        while (branch_of[at] == UNKNOWN_BRANCH) {
            at = parent[at];
            if (++steps > size) {
                return fail(err, HVD_INVALID_ARGUMENT, "the tree has a cycle above rank %d", rank);
            }
        }
        int branch = branch_of[at];
        for (int on_way = rank; branch_of[on_way] == UNKNOWN_BRANCH; on_way = parent[on_way]) {
            branch_of[on_way] = branch;
        }
    }
    coord->n_children = n_children;
    return HVD_OK;
}

static bool make_outboxes(coord_t *coord, const int *parent)
{
    int self = coord->params.rank, i = 0;
    size_t n = (size_t)(coord->n_children + coord->n_parents);
    coord->outboxes = calloc(MAX(n, 1), sizeof *coord->outboxes);
    coord->neighbours = calloc(MAX(n, 1), sizeof *coord->neighbours);
    if (coord->outboxes == NULL || coord->neighbours == NULL) {
        return false;
    }
    if (coord->n_parents > 0) {
        coord->outboxes[i++].rank = parent[self];
    }
    for (int rank = 1; rank < coord->params.size; rank++) {
        if (parent[rank] == self) {
            coord->outboxes[i++].rank = rank;
        }
    }
    coord->fixed_bytes += n * (sizeof *coord->outboxes + sizeof *coord->neighbours);
    return true;
}

static hvd_status_t make_global_set(coord_t *coord, err_t *err)
{
    size_t bytes = (size_t)coord->params.size * sizeof(int);
    int *all = store_take(&coord->store, bytes);
    if (all == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a job of %d ranks", coord->params.size);
    }
    for (int rank = 0; rank < coord->params.size; rank++) {
        all[rank] = rank;
    }
    hvd_status_t status = sets_register(coord, 0, all, coord->params.size, err);
    store_give(&coord->store, all, bytes);
    return status;
}

static hvd_status_t check_params(const coord_params_t *params, err_t *err)
{
    if (params->size < 1 || (size_t)params->size > CONTROL_MAX_RANKS || params->rank < 0 ||
        params->rank >= params->size) {
        return fail(err, HVD_INVALID_ARGUMENT, "there is no rank %d in a job of %d ranks",
                    params->rank, params->size);
    }
    if (params->stall_fail_ns > 0 && params->stall_fail_ns < params->stall_warn_ns) {
        log_warn(params->log, "coord",
                 "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is shorter than "
                 "HOROVOD_STALL_CHECK_TIME_SECONDS and is ignored");
    }
    return HVD_OK;
}

static void init_fields(coord_t *coord, const coord_params_t *params)
{
    coord->params = *params;
    coord->params.parent = NULL;
    coord->params.inline_bytes =
        params->reduce != NULL ? MIN(params->inline_bytes, CONTROL_MAX_PAYLOAD_BYTES) : 0;
    if (params->stall_fail_ns < params->stall_warn_ns) {
        coord->params.stall_fail_ns = 0;
    }
    coord->n_parents = params->rank != 0;
    coord->sequencer.next_id = 1;
    coord->sequencer.next_batch = COORD_NO_BATCH + 1;
    chain_init(&coord->entries.open);
    chain_init(&coord->sequencer.rides);
    chain_init(&coord->sequencer.ready);
    chain_init(&coord->sequencer.recent);
}

hvd_status_t coord_new(const coord_params_t *params, coord_t **coord_p, err_t *err)
{
    hvd_status_t status = check_params(params, err);
    if (status != HVD_OK) {
        return status;
    }
    size_t size = (size_t)params->size;
    coord_t *coord = calloc(1, sizeof *coord);
    if (coord == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the agreement");
    }
    init_fields(coord, params);
    coord->branch_of = calloc(size, sizeof(int));
    coord->joins.has_joined = calloc(size, 1);
    coord->ending.text = calloc(CONTROL_MAX_TEXT_BYTES, 1);
    coord->fixed_bytes = sizeof *coord + size * (sizeof(int) + 1) + CONTROL_MAX_TEXT_BYTES;
    if (coord->branch_of == NULL || coord->joins.has_joined == NULL || coord->ending.text == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory for a job of %d ranks", params->size);
        goto free_coord;
    }
    TRY(find_branches(coord, params->parent, err), free_coord);
    coord->entries.n_have_words = (coord->n_children + 1 + 63) / 64;
    if (!make_outboxes(coord, params->parent) || !straggler_init(coord)) {
        status = fail(err, HVD_NO_MEMORY, "no memory for %d neighbours", coord->n_children + 1);
        goto free_coord;
    }
    TRY(make_global_set(coord, err), free_coord);
    *coord_p = coord;
    return HVD_OK;
free_coord:
    coord_free(coord);
    return status;
}

static void free_entries(coord_t *coord)
{
    for (int id = 0; id < coord->sets.n_slots; id++) {
        set_t *set = coord->sets.at[id];
        for (size_t i = 0; set != NULL && i < set->names.n_slots;) {
            size_t n_before = set->names.n_used;
            if (set->names.slots[i].value != NULL) {
                entry_forget(coord, set->names.slots[i].value);
            }
            i += set->names.n_used == n_before;
        }
    }
}

void coord_free(coord_t *coord)
{
    if (coord == NULL) {
        return;
    }
    decide_free(coord);
    stall_free(coord);
    straggler_free(coord);
    free_entries(coord);
    sets_free(coord);
    for (int i = 0; coord->outboxes != NULL && i < coord_n_neighbours(coord); i++) {
        buf_free(&coord->outboxes[i].bytes);
    }
    control_reader_free(&coord->reader);
    buf_free(&coord->gathered);
    buf_free(&coord->sequencer.record);
    store_free(&coord->store);
    free(coord->outboxes);
    free(coord->neighbours);
    free(coord->entries.ids);
    free(coord->sequencer.picked);
    free(coord->ending.text);
    free(coord->joins.has_joined);
    free(coord->branch_of);
    free(coord);
}

// --- Submissions --------------------------------------------------------------------------------

static hvd_status_t check_open(const coord_t *coord, err_t *err)
{
    if (LIKELY(!coord->ending.has_ended && !coord->ending.has_asked_stop)) {
        return HVD_OK;
    }
    if (coord->ending.has_ended && coord->ending.status != HVD_SHUTDOWN) {
        return fail(err, coord->ending.status, "%s", coord->ending.text);
    }
    return fail(err, HVD_SHUTDOWN,
                "Horovod has been shut down. Nothing more can be submitted: call init again to "
                "start over.");
}

static hvd_status_t check_signature(const coord_t *coord, const set_t *set,
                                    const coord_request_t *request, err_t *err)
{
    const signature_t *asked = request->signature;
    if ((unsigned)asked->op >= N_OPS || (unsigned)asked->dtype >= HVD_N_DTYPES ||
        (unsigned)asked->reduce >= HVD_N_REDUCES || asked->root < 0 ||
        asked->root >= coord->params.size || asked->n_tensors < 0 || asked->n_dims_words < 0 ||
        (size_t)asked->n_dims_words > CONTROL_MAX_WORDS ||
        (!op_is_about_sets(asked->op) &&
         !control_words_are_shapes(asked->dims, asked->n_dims_words, asked->n_tensors))) {
        return fail(err, HVD_INVALID_ARGUMENT, "the request for tensor '%.100s' is not valid",
                    request->name);
    }
    if (request->name_bytes > CONTROL_MAX_NAME_BYTES) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the name '%.60s...' has %zu bytes; at most %zu are allowed", request->name,
                    request->name_bytes, CONTROL_MAX_NAME_BYTES);
    }
    if ((int64_t)signature_n_sizes(asked, set->n_ranks) * set->n_ranks >
        (int64_t)CONTROL_MAX_SIZES) {
        return fail(
            err, HVD_UNSUPPORTED,
            "%s of '%.100s' over %d ranks has too many sizes to agree on: split the group or the "
            "process set",
            hvd_op_name(asked->op), request->name, set->n_ranks);
    }
    return HVD_OK;
}

// What the request carries besides its signature.
static hvd_status_t check_data(const set_t *set, const coord_request_t *request,
                               size_t payload_bytes, err_t *err)
{
    int n_sizes = signature_n_sizes(request->signature, set->n_ranks);
    bool fits = request->n_sizes == n_sizes && (n_sizes == 0 || request->sizes != NULL) &&
                request->payload_bytes == payload_bytes &&
                (payload_bytes == 0 || request->payload != NULL) && request->tag != 0;
    for (int i = 0; fits && i < n_sizes; i++) {
        fits = request->sizes[i] >= 0;
    }
    return LIKELY(fits) ? HVD_OK
                        : fail(err, HVD_INVALID_ARGUMENT,
                               "tensor '%.100s' comes with %d sizes and %zu bytes of values "
                               "instead of %d and %zu",
                               request->name, request->n_sizes, request->payload_bytes, n_sizes,
                               payload_bytes);
}

static hvd_status_t check_member(const coord_t *coord, const set_t *set, err_t *err)
{
    if (set == NULL) {
        return fail(
            err, HVD_UNKNOWN_SET,
            "Process set provided does not exist, or has not been registered. Add it on all "
            "ranks first.");
    }
    if (set->self < 0) {
        return fail(
            err, HVD_NOT_MEMBER,
            "Rank %d is not a member of the provided process set. Call the operation only on "
            "its ranks.",
            coord->params.rank);
    }
    if (coord->joins.tag != 0) {
        return fail(err, HVD_JOINED,
                    "Rank %d has joined and cannot submit until all ranks have joined.",
                    coord->params.rank);
    }
    return HVD_OK;
}

static hvd_status_t fail_duplicate(const coord_t *coord, const entry_t *entry, err_t *err)
{
    return fail(
        err, HVD_DUPLICATE_NAME,
        "Tensor '%.100s' has the same name as another tensor that is currently being processed on "
        "rank %d. Give every tensor its own name, or wait for the earlier one first.",
        entry->name, coord->params.rank);
}

static hvd_status_t submit_join(coord_t *coord, const coord_request_t *request, err_t *err)
{
    control_line_t line = {.kind = LINE_JOIN, .rank = coord->params.rank};
    if (request->set != 0 || request->tag == 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "join works on all ranks only, not on process set %d", request->set);
    }
    if (coord->joins.tag != 0) {
        return fail(err, HVD_DUPLICATE_NAME, "rank %d has joined already", coord->params.rank);
    }
    coord->joins.tag = request->tag;
    coord->entries.n_pending++;
    joins_add(coord, coord->params.rank);
    // After the lines of what became complete by it: the sequencer counts on that order.
    if (!is_sequencer(coord)) {
        control_put(line_to_parent(coord), &line);
    }
    return HVD_OK;
}

static bool sizes_are_unchanged(const entry_t *entry, const coord_request_t *request)
{
    size_t at = (size_t)entry->set->self * (size_t)request->n_sizes;
    return entry->sizes != NULL && memcmp(&entry->sizes->at[at], request->sizes,
                                          (size_t)request->n_sizes * sizeof(int64_t)) == 0;
}

// The entry the request is about, made if the name is new. *is_known_p: it has run with this
// signature before, so its shape need not be told.
static hvd_status_t entry_for(coord_t *coord, set_t *set, const coord_request_t *request,
                              entry_t **entry_p, bool *is_known_p, err_t *err)
{
    entry_t *entry = entry_find(set, request->name, request->name_bytes);
    bool is_known = entry != NULL && entry->sig != NULL &&
                    signature_equal(&entry->sig->view, request->signature);
    size_t payload_bytes = is_known ? entry->sig->payload_bytes : 0;
    hvd_status_t status;
    if (!is_known) {
        TRY(check_signature(coord, set, request, err), done);
        signature_rides(request->signature, coord->params.inline_bytes, &payload_bytes);
    }
    TRY(check_data(set, request, payload_bytes, err), done);
    if (entry == NULL) {
        entry = entry_make(coord, set, request->name, request->name_bytes);
    }
    if (entry == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for tensor '%.100s'", request->name);
    }
    if (entry->tag != 0 || entry->is_running) {
        return fail_duplicate(coord, entry, err);
    }
    *entry_p = entry;
    *is_known_p = is_known;
done:
    return status;
}

hvd_status_t coord_submit(coord_t *coord, const coord_request_t *request, uint64_t now_ns,
                          err_t *err)
{
    SOUND(coord);
    hvd_status_t status;
    set_time(coord, now_ns);
    TRY(check_open(coord, err), done);
    if (request->signature->op == HVD_JOIN) {
        return submit_join(coord, request, err);
    }
    set_t *set = sets_find(coord, request->set);
    entry_t *entry = NULL;
    bool is_known = false;
    TRY(check_member(coord, set, err), done);
    TRY(entry_for(coord, set, request, &entry, &is_known, err), done);
    share_t share = {.n_variants = 1,
                     .signatures = {is_known ? NULL : request->signature},
                     .ranks = {coord->params.rank},
                     .payload = request->payload,
                     .payload_bytes = request->payload_bytes};
    if (request->n_sizes > 0 && !(is_known && sizes_are_unchanged(entry, request))) {
        share.sizes = request->sizes;
        share.n_sizes = request->n_sizes;
    }
    entry->tag = request->tag;
    coord->entries.n_pending++;
    coord->n_known += entry->id != 0 && is_known;
    coord->n_new += entry->id == 0 || !is_known;
    status = merge_share(coord, entry, 0, &share, err);
    if (UNLIKELY(status != HVD_OK)) {
        entry->tag = 0;
        coord->entries.n_pending--;
        coord->no_memory = true;
    }
done:
    return status;
}

// --- Process sets -------------------------------------------------------------------------------

// The n-th change of process sets a rank asks for is the n-th of every rank: all ask in one order.
static hvd_status_t submit_change(coord_t *coord, int op, const int64_t *words, int n_words,
                                  uint64_t tag, uint64_t now_ns, err_t *err)
{
    char name[48];
    int bytes = snprintf(name, sizeof name, "process set change %u", coord->sets.n_ops);
    signature_t signature = {
        .op = (hvd_op_t)op, .prescale = 1, .postscale = 1, .dims = words, .n_dims_words = n_words};
    coord_request_t request = {
        .name = name, .name_bytes = (size_t)bytes, .signature = &signature, .tag = tag};
    hvd_status_t status = coord_submit(coord, &request, now_ns, err);
    coord->sets.n_ops += status == HVD_OK;
    return status;
}

static hvd_status_t check_change(const coord_t *coord, err_t *err)
{
    hvd_status_t status = check_open(coord, err);
    if (status == HVD_OK && !coord->params.dynamic_sets) {
        status = fail(err, HVD_STATIC_SETS,
                      "Process sets may not change after init: pass them all to init, or set "
                      "HOROVOD_DYNAMIC_PROCESS_SETS=1.");
    }
    return status;
}

// Sorted ranks, and the same as words. Memory from the store: give back 3 * n_ranks ints.
static hvd_status_t sorted_ranks(coord_t *coord, const int *ranks, int n_ranks, int64_t **words_p,
                                 err_t *err)
{
    if (n_ranks < 1 || n_ranks > coord->params.size) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "a process set of %d ranks does not fit a job of %d ranks", n_ranks,
                    coord->params.size);
    }
    int64_t *words = store_take(&coord->store, (size_t)n_ranks * (sizeof(int64_t) + sizeof(int)));
    if (words == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a process set of %d ranks", n_ranks);
    }
    int *sorted = (int *)(void *)(words + n_ranks);
    memcpy(sorted, ranks, (size_t)n_ranks * sizeof(int));
    hvd_status_t status = HVD_OK;
    if (!sets_sort_ranks(sorted, n_ranks, coord->params.size)) {
        status = fail(err, HVD_INVALID_ARGUMENT,
                      "a process set needs ranks from 0 to %d, each at most once",
                      coord->params.size - 1);
    }
    for (int i = 0; i < n_ranks; i++) {
        words[i] = sorted[i];
    }
    if (status == HVD_OK && sets_find_ranks(coord, words, n_ranks) != NULL) {
        status = fail(err, HVD_EXISTING_SET, "A process set with the same ranks already exists.");
    }
    if (status != HVD_OK) {
        store_give(&coord->store, words, (size_t)n_ranks * (sizeof(int64_t) + sizeof(int)));
        return status;
    }
    *words_p = words;
    return HVD_OK;
}

static void give_sorted(coord_t *coord, int64_t *words, int n_ranks)
{
    store_give(&coord->store, words, (size_t)n_ranks * (sizeof(int64_t) + sizeof(int)));
}

hvd_status_t coord_add_set(coord_t *coord, const int *ranks, int n_ranks, uint64_t tag,
                           uint64_t now_ns, err_t *err)
{
    int64_t *words;
    hvd_status_t status;
    TRY(check_change(coord, err), done);
    TRY(sorted_ranks(coord, ranks, n_ranks, &words, err), done);
    status = submit_change(coord, OP_ADD_SET, words, n_ranks, tag, now_ns, err);
    give_sorted(coord, words, n_ranks);
done:
    return status;
}

hvd_status_t coord_remove_set(coord_t *coord, int set, uint64_t tag, uint64_t now_ns, err_t *err)
{
    int64_t word = set;
    hvd_status_t status;
    TRY(check_change(coord, err), done);
    if (set == 0) {
        return fail(err, HVD_INVALID_ARGUMENT, "the process set of all ranks cannot be removed");
    }
    if (sets_find(coord, set) == NULL) {
        return fail(err, HVD_UNKNOWN_SET,
                    "Process set provided does not exist, or has not been registered.");
    }
    status = submit_change(coord, OP_REMOVE_SET, &word, 1, tag, now_ns, err);
done:
    return status;
}

hvd_status_t coord_define_set(coord_t *coord, const int *ranks, int n_ranks, int *id_p, err_t *err)
{
    int64_t *words;
    int id = sets_free_id(coord);
    hvd_status_t status;
    TRY(sorted_ranks(coord, ranks, n_ranks, &words, err), done);
    status = sets_register(coord, id, (const int *)(const void *)(words + n_ranks), n_ranks, err);
    give_sorted(coord, words, n_ranks);
    if (status == HVD_OK) {
        *id_p = id;
    }
done:
    return status;
}

int coord_set_count(const coord_t *coord)
{
    int n = 0;
    for (int id = 0; id < coord->sets.n_slots; id++) {
        n += coord->sets.at[id] != NULL;
    }
    return n;
}

int coord_set_id(const coord_t *coord, int index)
{
    for (int id = 0; id < coord->sets.n_slots; id++) {
        if (coord->sets.at[id] != NULL && index-- == 0) {
            return id;
        }
    }
    return -1;
}

const int *coord_set_ranks(const coord_t *coord, int set, int *n_p)
{
    const set_t *found = sets_find(coord, set);
    if (found == NULL) {
        return NULL;
    }
    *n_p = found->n_ranks;
    return found->ranks;
}

// --- Time and ends ------------------------------------------------------------------------------

void coord_tick(coord_t *coord, uint64_t now_ns)
{
    SOUND(coord);
    set_time(coord, now_ns);
    if (coord->ending.has_ended) { // by what has come since the caller looked
        return;
    }
    stall_tick(coord);
    heartbeat_tick(coord);
}

uint64_t coord_next_tick(const coord_t *coord)
{
    if (coord->ending.has_ended) {
        return NEVER_NS;
    }
    return MIN(MIN(sequence_next_ns(coord), stall_next_ns(coord)), heartbeat_next_ns(coord));
}

void coord_shutdown(coord_t *coord, const char *reason, uint64_t now_ns)
{
    SOUND(coord);
    set_time(coord, now_ns);
    if (coord->ending.has_ended || coord->ending.has_asked_stop) {
        return;
    }
    control_line_t line = {.kind = LINE_STOP,
                           .rank = coord->params.rank,
                           .text = {reason, MIN(strlen(reason), CONTROL_MAX_REASON_BYTES)}};
    coord->ending.has_asked_stop = true;
    if (is_sequencer(coord)) {
        sequence_stop(coord, &line);
    } else if (!coord->ending.has_sent_stop) {
        coord->ending.has_sent_stop = true;
        control_put(line_to_parent(coord), &line);
    }
}

void coord_abort(coord_t *coord, hvd_status_t cause, int rank, const char *text)
{
    SOUND(coord);
    const char *sentence = text != NULL ? text : hvd_status_text(cause);
    size_t bytes = MIN(strlen(sentence), CONTROL_MAX_TEXT_BYTES - 1);
    control_line_t line = {.kind = LINE_ABORT,
                           .status = cause,
                           .rank = rank >= 0 ? rank : CONTROL_NO_RANK,
                           .text = {sentence, bytes}};
    if (coord->ending.has_ended) {
        return;
    }
    for (int i = 0; i < coord_n_neighbours(coord); i++) {
        control_put(outbox_line(coord, i), &line);
    }
    follow_end(coord, cause, rank, sentence, bytes);
}

hvd_status_t coord_has_ended(const coord_t *coord, err_t *end)
{
    end->status = HVD_OK;
    return coord->ending.has_ended ? fail(end, coord->ending.status, "%s", coord->ending.text)
                                   : HVD_OK;
}

int coord_end_rank(const coord_t *coord)
{
    return coord->ending.has_ended ? coord->ending.decision.rank : -1;
}

const char *coord_end_reason(const coord_t *coord)
{
    return coord->ending.reason;
}

// --- Queries ------------------------------------------------------------------------------------

int coord_pending(const coord_t *coord)
{
    return coord->entries.n_pending;
}

coord_counters_t coord_counters(const coord_t *coord)
{
    return (coord_counters_t){.n_stale_lines = coord->n_stale_lines,
                              .n_known = coord->n_known,
                              .n_new = coord->n_new,
                              .n_steps = coord->stragglers.n_steps};
}

void coord_on_arrival(coord_t *coord, coord_arrival_fn fn, void *arg)
{
    coord->arrival = fn;
    coord->arrival_arg = arg;
}

size_t coord_memory(const coord_t *coord)
{
    size_t bytes = coord->fixed_bytes + coord->store.held_bytes + sets_memory(coord) +
                   decide_memory(coord) + coord->reader.words.cap + coord->gathered.cap +
                   coord->sequencer.record.cap +
                   (size_t)coord->entries.n_slots * sizeof(id_slot_t) +
                   (size_t)coord->sequencer.cap_picked * sizeof(entry_t *);
    for (int i = 0; i < coord_n_neighbours(coord); i++) {
        bytes += coord->outboxes[i].bytes.cap;
    }
    return bytes;
}
