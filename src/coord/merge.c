// SPDX-License-Identifier: Apache-2.0
//
// merge.c - readiness on its way up: shares of branches become rounds, full rounds become lines.
//
// A round is full when every branch that holds members has given its share, or has nobody left who
// has not joined; then one line goes to the parent (or, on rank 0, to the sequencer), whatever the
// number of ranks below. Equal signatures merge into one; of different ones two are kept, the one
// of the lowest rank and the one of the lowest rank that differs from it, which is independent of
// the order of arrival. Contributions that ride along wait in slots and are reduced in the order
// of branches once all are there: the same tree always gives the same bits.
//
// Cost of a share: a few comparisons, and a copy of what it carries. A node with one branch passes
// payload and sizes on without storing them. The holder of the engine calls.
#include "coord/internal.h"

#define PAYLOAD_ALIGNMENT 16

bool merge_has_share(const entry_t *entry, int part)
{
    return (entry->have[(unsigned)part / 64] >> ((unsigned)part % 64) & 1) != 0;
}

// With one branch there is nothing to merge: what comes in goes out. The sequencer has to keep it.
static bool passes_through(const coord_t *coord, const set_t *set)
{
    return set->n_parts == 1 && !is_sequencer(coord);
}

// Whoever is next to rank 0 may get an offer, and then needs its own values again.
static bool keeps_payload(const coord_t *coord, const set_t *set)
{
    return !passes_through(coord, set) || coord->outboxes[0].rank == 0;
}

// --- Signatures ---------------------------------------------------------------------------------

// The entry's own copy of a signature, held once more. Within an entry, equal signatures are one
// object, so they are compared by address afterwards.
static kept_sig_t *intern(coord_t *coord, const entry_t *entry, const signature_t *signature)
{
    if (signature == NULL ||
        (entry->sig != NULL && signature_equal(&entry->sig->view, signature))) {
        return sig_hold(entry->sig);
    }
    for (int i = 0; i < entry->n_variants; i++) {
        if (signature_equal(&entry->variants[i].sig->view, signature)) {
            return sig_hold(entry->variants[i].sig);
        }
    }
    return sig_new(coord, signature);
}

// Takes over the caller's hold on sig.
static void add_variant(coord_t *coord, entry_t *entry, kept_sig_t *sig, int rank)
{
    variant_t *lowest = &entry->variants[0], *other = &entry->variants[1];
    for (int i = 0; i < entry->n_variants; i++) {
        if (entry->variants[i].sig == sig && entry->variants[i].rank <= rank) {
            sig_drop(coord, sig);
            return;
        }
    }
    if (entry->n_variants == 0) {
        *lowest = (variant_t){sig, rank};
        entry->n_variants = 1;
    } else if (lowest->sig == sig) {
        lowest->rank = rank;
        sig_drop(coord, sig);
    } else if (rank < lowest->rank) {
        if (entry->n_variants == 2) {
            sig_drop(coord, other->sig);
        }
        *other = *lowest;
        *lowest = (variant_t){sig, rank};
        entry->n_variants = 2;
    } else if (entry->n_variants == 1 || rank < other->rank) {
        if (entry->n_variants == 2) {
            sig_drop(coord, other->sig);
        }
        *other = (variant_t){sig, rank};
        entry->n_variants = 2;
    } else {
        sig_drop(coord, sig);
    }
}

// --- Payloads -----------------------------------------------------------------------------------

static void *payload_slot(const entry_t *entry, int part)
{
    return entry->payloads + (size_t)part * entry->payload_stride;
}

static hvd_status_t keep_payload(coord_t *coord, entry_t *entry, int part, const share_t *share,
                                 err_t *err)
{
    if (entry->payloads == NULL) {
        size_t stride =
            (share->payload_bytes + PAYLOAD_ALIGNMENT - 1) & ~(size_t)(PAYLOAD_ALIGNMENT - 1);
        // One slot more than parts: zeros, should somebody have joined.
        entry->payloads = store_take(&coord->store, stride * ((size_t)entry->set->n_parts + 1));
        if (entry->payloads == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for the values of tensor '%s'", entry->name);
        }
        entry->payload_stride = stride;
    }
    memcpy(payload_slot(entry, part), share->payload, share->payload_bytes);
    return HVD_OK;
}

// Average travels as a sum; the engine divides at the end. What only moves is added to zeros.
static hvd_reduce_t payload_op(const kept_sig_t *sig)
{
    bool is_sum = sig->view.reduce == HVD_AVERAGE || !op_has(sig->view.op, OP_REDUCES);
    return is_sum ? HVD_SUM : sig->view.reduce;
}

void merge_add(coord_t *coord, const kept_sig_t *sig, void *total, const void *more)
{
    hvd_dtype_t dtype = riding_dtype(&sig->view);
    coord->params.reduce(dtype, payload_op(sig), total, total, more,
                         sig->payload_bytes / hvd_dtype_bytes(dtype));
}

const uint8_t *merge_fold(coord_t *coord, entry_t *entry)
{
    uint8_t *total = NULL;
    int n_folded = 0;
    for (int part = 0; part < entry->set->n_parts; part++) {
        if (!merge_has_share(entry, part)) {
            continue;
        }
        if (total == NULL) {
            total = payload_slot(entry, part);
        } else if (part >= entry->n_folded) {
            merge_add(coord, entry->variants[0].sig, total, payload_slot(entry, part));
        }
        n_folded = part + 1;
    }
    entry->n_folded = n_folded;
    return total;
}

// Ranks that joined contribute zeros, which matters to everything but sums; once is enough.
static void fold_zeros(coord_t *coord, entry_t *entry, const kept_sig_t *sig, uint8_t *total)
{
    void *zeros = payload_slot(entry, entry->set->n_parts);
    if (payload_op(sig) != HVD_SUM) {
        memset(zeros, 0, sig->payload_bytes);
        merge_add(coord, sig, total, zeros);
    }
}

const uint8_t *merge_result(coord_t *coord, entry_t *entry)
{
    SEQUENCER(coord);
    const kept_sig_t *sig = entry->variants[0].sig;
    if (sig->payload_bytes == 0) {
        return (const uint8_t *)"";
    }
    uint8_t *total = (uint8_t *)merge_fold(coord, entry);
    if (entry->has_zeros) {
        fold_zeros(coord, entry, sig, total);
    }
    return total;
}

// --- Sizes --------------------------------------------------------------------------------------

// Sizes of all members under construction: the last ones, over which changed ones are written.
static hvd_status_t keep_sizes(coord_t *coord, entry_t *entry, const part_t *part,
                               const kept_sig_t *sig, const share_t *share, err_t *err)
{
    const set_t *set = entry->set;
    int per_member = signature_n_sizes(&sig->view, set->n_ranks);
    if (entry->fresh == NULL) {
        entry->fresh = sizes_new(coord, per_member * set->n_ranks);
        if (entry->fresh == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for the sizes of tensor '%s'", entry->name);
        }
        if (sig == entry->sig && entry->sizes != NULL) {
            memcpy(entry->fresh->at, entry->sizes->at, (size_t)entry->fresh->n * sizeof(int64_t));
        }
    }
    for (int i = 0; i < part->n_members; i++) {
        memcpy(&entry->fresh->at[part->positions[i] * per_member], &share->sizes[i * per_member],
               (size_t)per_member * sizeof(int64_t));
    }
    return HVD_OK;
}

// The sizes of all members below this node, ascending, taken out of those of all members.
static const int64_t *gather_sizes(coord_t *coord, const entry_t *entry, const sizes_t *all,
                                   int *n_p)
{
    const set_t *set = entry->set;
    size_t per_member = (size_t)all->n / (size_t)set->n_ranks;
    buf_t *out = &coord->gathered;
    buf_clear(out);
    for (int i = 0; i < set->n_ranks; i++) {
        if (coord->branch_of[set->ranks[i]] >= 0) {
            buf_append(out, &all->at[(size_t)i * per_member], per_member * sizeof(int64_t));
        }
    }
    coord->no_memory |= out->failed;
    *n_p = (int)(out->len / sizeof(int64_t));
    return (const int64_t *)(const void *)out->data;
}

// --- The line -----------------------------------------------------------------------------------

static void put_sizes(coord_t *coord, const entry_t *entry, const share_t *share, bool must_give,
                      control_line_t *line)
{
    if (share != NULL && share->sizes != NULL && passes_through(coord, entry->set)) {
        line->sizes = share->sizes;
        line->n_sizes = share->n_sizes;
    } else if (entry->fresh != NULL) {
        line->sizes = gather_sizes(coord, entry, entry->fresh, &line->n_sizes);
    } else if (must_give) {
        line->sizes = gather_sizes(coord, entry, entry->sizes, &line->n_sizes);
    }
}

static const uint8_t *payload_for_line(coord_t *coord, entry_t *entry, const share_t *share,
                                       const kept_sig_t *sig)
{
    if (sig->payload_bytes == 0) {
        return NULL;
    }
    bool direct = share != NULL && passes_through(coord, entry->set);
    return direct ? share->payload : merge_fold(coord, entry);
}

// Everything that LINE_READY with an id does not say.
static void send_long_line(coord_t *coord, entry_t *entry, const share_t *share, bool known)
{
    const kept_sig_t *sig = entry->variants[0].sig;
    control_line_t line = {.zeros = entry->has_zeros};
    if (known) {
        line.kind = LINE_READY;
        line.id = entry->id;
        line.example_ranks[0] = entry->variants[0].rank;
    } else {
        line.kind = entry->n_variants == 1 ? LINE_NEW : LINE_CONFLICT;
        line.set = (uint32_t)entry->set->id;
        line.name = (control_text_t){entry->name, entry->name_bytes};
        line.n_variants = entry->n_variants;
        for (int i = 0; i < entry->n_variants; i++) {
            line.variants[i] = entry->variants[i].sig->view;
            line.example_ranks[i] = entry->variants[i].rank;
        }
    }
    if (entry->n_variants == 1) {
        if (op_infos[sig->view.op].sizes != SIZES_NONE && !entry->has_zeros) {
            put_sizes(coord, entry, share, !known, &line);
        }
        line.payload = payload_for_line(coord, entry, share, sig);
        line.payload_bytes = sig->payload_bytes;
    }
    control_put(line_to_parent(coord), &line);
}

static bool is_full(const entry_t *entry)
{
    const set_t *set = entry->set;
    if (entry->n_have == set->n_parts) {
        return true;
    }
    if (set->n_parts_joined == 0) {
        return false;
    }
    for (int i = 0; i < set->n_parts; i++) {
        if (!merge_has_share(entry, i) && set->parts[i].n_joined < set->parts[i].n_members) {
            return false;
        }
    }
    return true;
}

// It came as a line that says no more than the id, and values.
static bool is_plain(const share_t *share)
{
    return share != NULL && share->signatures[0] == NULL && !share->zeros && share->sizes == NULL;
}

// share: the last one that came, if this round was completed by one.
static void complete(coord_t *coord, entry_t *entry, const share_t *share)
{
    const kept_sig_t *sig = entry->variants[0].sig;
    bool known = entry->id != 0 && sig == entry->sig && entry->n_variants == 1;
    entry->is_complete = true;
    entry->has_zeros |= entry->n_have < entry->set->n_parts;
    if (is_sequencer(coord)) {
        if (entry->is_offered && is_plain(share)) {
            offer_met_above(coord, entry);
        } else {
            sequence_complete(coord, entry);
        }
    } else if (LIKELY(known && !entry->has_zeros && op_infos[sig->view.op].sizes == SIZES_NONE)) {
        control_put_ready(line_to_parent(coord), entry->id,
                          payload_for_line(coord, entry, share, sig), sig->payload_bytes);
        entry->is_plain = true;
        if (entry->is_offered) {
            offer_met_below(coord, entry);
        }
    } else {
        send_long_line(coord, entry, share, known);
    }
}

// --- Shares -------------------------------------------------------------------------------------

static hvd_status_t check_sizes(const entry_t *entry, const part_t *part, const kept_sig_t *sig,
                                const share_t *share, err_t *err)
{
    int per_member = signature_n_sizes(&sig->view, entry->set->n_ranks);
    bool fits = share->sizes == NULL ? sig == entry->sig && entry->sizes != NULL
                                     : share->n_sizes == per_member * part->n_members;
    if (!fits) {
        return fail(err, HVD_PROTOCOL, "sizes of tensor '%s' do not fit: %d came for %d ranks",
                    entry->name, share->n_sizes, part->n_members);
    }
    return HVD_OK;
}

static hvd_status_t keep_data(coord_t *coord, entry_t *entry, int part, const share_t *share,
                              err_t *err)
{
    const kept_sig_t *sig = entry->variants[0].sig;
    const part_t *place = &entry->set->parts[part];
    hvd_status_t status = HVD_OK;
    if (sig->payload_bytes != share->payload_bytes) {
        return fail(err, HVD_PROTOCOL,
                    "%zu bytes of values came with tensor '%s' instead of %zu: "
                    "check that HOROVOD_INLINE_BYTES is the same on all ranks",
                    share->payload_bytes, entry->name, sig->payload_bytes);
    }
    if (op_infos[sig->view.op].sizes != SIZES_NONE && !share->zeros) {
        TRY(check_sizes(entry, place, sig, share, err), done);
    }
    if (sig->payload_bytes > 0 && keeps_payload(coord, entry->set)) {
        TRY(keep_payload(coord, entry, part, share, err), done);
    }
    if (op_infos[sig->view.op].sizes != SIZES_NONE && !share->zeros && share->sizes != NULL &&
        !passes_through(coord, entry->set)) {
        TRY(keep_sizes(coord, entry, place, sig, share, err), done);
    }
done:
    return status;
}

static hvd_status_t add_signatures(coord_t *coord, entry_t *entry, const share_t *share, err_t *err)
{
    if (LIKELY(share->signatures[0] == NULL && entry->n_variants == 0)) {
        entry->variants[0] = (variant_t){sig_hold(entry->sig), share->ranks[0]};
        entry->n_variants = 1;
        return HVD_OK;
    }
    for (int i = 0; i < share->n_variants; i++) {
        kept_sig_t *sig = intern(coord, entry, share->signatures[i]);
        if (sig == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for the shape of tensor '%s'", entry->name);
        }
        add_variant(coord, entry, sig, share->ranks[i]);
    }
    return HVD_OK;
}

hvd_status_t merge_share(coord_t *coord, entry_t *entry, int branch, const share_t *share,
                         err_t *err)
{
    int part = entry->set->part_of[branch];
    hvd_status_t status;
    if (part < 0 || merge_has_share(entry, part)) {
        return fail(err, HVD_PROTOCOL, "tensor '%s' was announced %s", entry->name,
                    part < 0 ? "by ranks outside its process set" : "twice by the same ranks");
    }
    entry_open_round(coord, entry);
    TRY(add_signatures(coord, entry, share, err), done);
    if (entry->n_variants == 1) {
        TRY(keep_data(coord, entry, part, share, err), done);
    }
    entry->have[(unsigned)part / 64] |= (uint64_t)1 << ((unsigned)part % 64);
    entry->n_have++;
    entry->has_zeros |= share->zeros;
    SOUND_ROUND(coord, entry);
    if (UNLIKELY(coord->arrival != NULL)) {
        coord->arrival(coord->arrival_arg, entry->name, branch_rank(coord, branch));
    }
    if (is_full(entry)) {
        if (entry->set->n_parts > 1) {
            straggler_note(coord, entry, branch);
        }
        complete(coord, entry, share);
    } else if (is_sequencer(coord)) {
        offer_to_last_branch(coord, entry);
    }
done:
    return status;
}

void merge_recheck(coord_t *coord, set_t *set)
{
    for (chain_t *item = coord->entries.open.next, *next; item != &coord->entries.open;
         item = next) {
        entry_t *entry = CHAIN_OWNER(item, entry_t, open);
        next = item->next;
        if (entry->set == set && !entry->is_complete && entry->n_have > 0 && is_full(entry)) {
            complete(coord, entry, NULL);
        }
    }
}
