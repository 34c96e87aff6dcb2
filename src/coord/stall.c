// SPDX-License-Identifier: Apache-2.0
//
// stall.c - what waits too long, and for whom.
//
// The node that holds an incomplete entry for longer than the warning time says so, once, up to
// the sequencer. The sequencer asks all ranks about up to 32 such entries at a time; answers come
// back as bitmaps of the ranks that have each entry, merged on the way up; the report names the
// rest, with what each of those ranks last did, and goes to all ranks. While an entry stays
// incomplete it is reported again once per warning time, and past the second limit the job ends
// with the same information.
//
// Sometimes more is known. When every rank sits in a wait for something that another has not
// submitted, none can ever go on: so a few seconds after an entry was opened the sequencer asks,
// and says so at once if that is the answer. Otherwise it says nothing, and asks again later.
//
// And a job that does the same step again every 200 ms need not wait a minute to know that
// something may be wrong: one line comes after LEARNED_FACTOR times the 99th percentile of recent
// steps, but not within LEARNED_LEAST_NS, nor within LONGEST_FACTOR times the longest, once there
// have been LEARNED_STEPS of them: ranks pause for a checkpoint at the end of an epoch, and that is
// none of our business. Recent are the last fifty to hundred, so the 99th percentile is the second
// longest. A job that is slow by nature is left alone. Operations that need no agreement
// (engine/board.c) are not seen here: of those the engine tells (coord_activity_t).
//
// Rounds are kept in order of age, so as long as nothing stalls the cost is one comparison per call
// of coord_next_tick. A branch that does not answer is taken to have nothing. The holder of the
// engine calls.
#include "coord/internal.h"
#include "coord/stall_report.h"

#define LEARNED_FACTOR 20
#define LONGEST_FACTOR 3
#define LEARNED_LEAST_NS (10 * NS_PER_S)
#define PROBE_NS (3 * NS_PER_S) // age of an entry when ranks are asked whether they can go on
#define LEARNED_STEPS 20
#define STEPS_PER_SPAN 50

// --- When a stall is suspected ------------------------------------------------------------------

static void note_in_span(span_t *span, uint64_t interval_ns)
{
    span->second_ns = MAX(span->second_ns, MIN(span->longest_ns, interval_ns));
    span->longest_ns = MAX(span->longest_ns, interval_ns);
}

// Many names come again in one step; one of them stands for it.
void stall_note_step(coord_t *coord, uint64_t interval_ns)
{
    rhythm_t *rhythm = &coord->stall.rhythm;
    if (coord->now_ns - rhythm->noted_ns < interval_ns / 2) {
        return;
    }
    rhythm->noted_ns = coord->now_ns;
    note_in_span(&rhythm->span, interval_ns);
    rhythm->n_steps++;
    rhythm->is_known |= rhythm->n_steps >= LEARNED_STEPS;
    if (rhythm->n_steps == STEPS_PER_SPAN) {
        rhythm->before = rhythm->span;
        rhythm->span = (span_t){0};
        rhythm->n_steps = 0;
    }
}

static void note_span(span_t *span, uint64_t longest_ns, uint64_t second_ns)
{
    note_in_span(span, longest_ns);
    note_in_span(span, second_ns);
}

// How long an entry may wait before it is asked about for the first time.
static uint64_t first_warn_ns(const coord_t *coord)
{
    const rhythm_t *rhythm = &coord->stall.rhythm;
    const coord_activity_t *own = &coord->heartbeat.activity;
    uint64_t warn_ns = coord->params.stall_warn_ns;
    bool is_known = rhythm->is_known || own->n_steps >= LEARNED_STEPS;
    span_t recent = rhythm->before;
    note_span(&recent, rhythm->span.longest_ns, rhythm->span.second_ns);
    note_span(&recent, own->longest_step_ns, own->second_step_ns);
    uint64_t learned_ns = MAX(LEARNED_LEAST_NS, MAX(LEARNED_FACTOR * recent.second_ns,
                                                    LONGEST_FACTOR * recent.longest_ns));
    bool was_early = coord->stall.early_ns != 0 && coord->now_ns - coord->stall.early_ns < warn_ns;

    return is_known && !was_early ? MIN(warn_ns, learned_ns) : warn_ns;
}

// How long before anything is done about it.
static uint64_t look_ns(const coord_t *coord)
{
    return MIN(first_warn_ns(coord), PROBE_NS);
}

// --- The question -------------------------------------------------------------------------------

static void clear_inquiry(coord_t *coord)
{
    inquiry_t *inquiry = &coord->stall.inquiry;
    for (int i = 0; i < inquiry->n_asked; i++) {
        store_give(&coord->store, inquiry->asked[i].name, inquiry->asked[i].name_bytes + 1);
    }
    store_give(&coord->store, inquiry->have, inquiry->have_bytes);
    store_give(&coord->store, inquiry->answered, (size_t)coord->n_children + 1);
    store_give(&coord->store, inquiry->said, STALL_SAID_BYTES);
    *inquiry = (inquiry_t){0};
}

void stall_free(coord_t *coord)
{
    clear_inquiry(coord);
}

static bool add_asked(coord_t *coord, const set_t *set, const char *name, size_t name_bytes)
{
    inquiry_t *inquiry = &coord->stall.inquiry;
    char *copy = store_take(&coord->store, name_bytes + 1);
    if (copy == NULL) {
        return false;
    }
    memcpy(copy, name, name_bytes);
    copy[name_bytes] = '\0';
    inquiry->asked[inquiry->n_asked++] =
        (asked_t){.set = set != NULL ? set->id : -1, .name = copy, .name_bytes = name_bytes};
    return true;
}

// All entries are listed: waits for the children's answers, with this rank's own in place.
static bool open_inquiry(coord_t *coord)
{
    inquiry_t *inquiry = &coord->stall.inquiry;
    int rank = coord->params.rank;
    bool lacks_some = false;
    inquiry->have_bytes = MAX(asked_bitmap_bytes(coord) * (size_t)inquiry->n_asked, 1);
    inquiry->have = store_take(&coord->store, inquiry->have_bytes);
    inquiry->answered = store_take(&coord->store, (size_t)coord->n_children + 1);
    inquiry->said = store_take(&coord->store, STALL_SAID_BYTES);
    if (inquiry->have == NULL || inquiry->answered == NULL || inquiry->said == NULL) {
        return false;
    }
    memset(inquiry->have, 0, inquiry->have_bytes);
    memset(inquiry->answered, 0, (size_t)coord->n_children + 1);
    for (int i = 0; i < inquiry->n_asked; i++) {
        const entry_t *entry = asked_entry(coord, &inquiry->asked[i]);
        const set_t *set = sets_find(coord, inquiry->asked[i].set);
        if (entry != NULL && entry->tag != 0) {
            asked_bitmap_of(coord, i)[rank / 8] |= (uint8_t)(1 << (rank % 8));
        } else {
            lacks_some |= set != NULL && set->self >= 0 && coord->joins.tag == 0;
        }
    }
    if (lacks_some) {
        stall_say(inquiry, rank, "", &coord->heartbeat.activity);
    }
    inquiry->n_blocked = coord->heartbeat.activity.is_blocked;
    inquiry->n_missing = coord->n_children;
    inquiry->is_open = true;
    return true;
}

static void send_answer(coord_t *coord)
{
    const inquiry_t *inquiry = &coord->stall.inquiry;
    control_line_t line = {.kind = LINE_ANSWER,
                           .inquiry = inquiry->number,
                           .n_items = inquiry->n_asked,
                           .payload = inquiry->have,
                           .payload_bytes = asked_bitmap_bytes(coord) * (size_t)inquiry->n_asked,
                           .n_blocked = inquiry->n_blocked,
                           .text = {inquiry->said, inquiry->said_bytes}};
    control_put(line_to_parent(coord), &line);
    clear_inquiry(coord);
}

hvd_status_t stall_inquire(coord_t *coord, const control_line_t *line, err_t *err)
{
    clear_inquiry(coord);
    coord->stall.inquiry.number = line->inquiry;
    for (int i = 0; i < line->n_items; i++) {
        control_asked_t asked;
        if (!control_next_asked(&coord->reader, &asked)) {
            return fail(err, HVD_PROTOCOL, "a question about stalled tensors is cut short");
        }
        const set_t *set = sets_find(coord, (int)MIN(asked.set, (uint32_t)INT32_MAX));
        if (!add_asked(coord, set, asked.name.at, asked.name.bytes)) {
            return fail(err, HVD_NO_MEMORY, "no memory for a question about stalled tensors");
        }
    }
    if (!open_inquiry(coord)) {
        return fail(err, HVD_NO_MEMORY, "no memory for a question about stalled tensors");
    }
    if (coord->stall.inquiry.n_missing == 0) {
        send_answer(coord);
    }
    return HVD_OK;
}

static bool inquiry_is_early(const coord_t *coord)
{
    return coord->stall.inquiry.warn_ns < coord->params.stall_warn_ns;
}

static void close_inquiry(coord_t *coord)
{
    SEQUENCER(coord);
    bool is_early = inquiry_is_early(coord), is_probe = coord->stall.inquiry.is_probe;
    report_t report;
    report_kind_t kind = is_probe ? REPORT_DEADLOCK : is_early ? REPORT_HINT : REPORT_FULL;
    bool is_told = stall_write(coord, kind, &report);
    bool is_known = is_probe || coord->stall.verdict_batch == coord->sequencer.next_batch + 1;
    clear_inquiry(coord);
    if (!is_told) {
        return;
    }
    if (report.must_end) {
        coord_abort(coord, HVD_STALLED, report.rank, report.text);
        return;
    }
    sequence_report(coord, kind == REPORT_FULL ? HVD_STALLED : HVD_TIMEOUT, report.text);
    coord->stall.verdict_batch = is_known ? coord->sequencer.next_batch + 1 : 0;
}

hvd_status_t stall_answer(coord_t *coord, int child, const control_line_t *line, err_t *err)
{
    inquiry_t *inquiry = &coord->stall.inquiry;
    // Too late, or for a question that was given up.
    if (!inquiry->is_open || line->inquiry != inquiry->number || inquiry->answered[child]) {
        return HVD_OK;
    }
    if (line->n_items != inquiry->n_asked ||
        line->payload_bytes != asked_bitmap_bytes(coord) * (size_t)inquiry->n_asked) {
        return fail(err, HVD_PROTOCOL, "an answer about stalled tensors does not fit the question");
    }
    for (size_t i = 0; i < line->payload_bytes; i++) {
        inquiry->have[i] |= line->payload[i];
    }
    stall_add_said(inquiry, line->text.at, line->text.bytes);
    inquiry->n_blocked += MIN(line->n_blocked, (uint32_t)coord->params.size);
    inquiry->answered[child] = 1;
    if (--inquiry->n_missing > 0) {
        return HVD_OK;
    }
    if (is_sequencer(coord)) {
        close_inquiry(coord);
    } else {
        send_answer(coord);
    }
    return HVD_OK;
}

// --- The clock ----------------------------------------------------------------------------------

// Ticks come a little late, so that tensors submitted together are reported together; later on the
// sequencer, so that what other nodes have to say has arrived.
static uint64_t slack_ns(const coord_t *coord)
{
    return look_ns(coord) / (is_sequencer(coord) ? 8 : 16);
}

uint64_t stall_next_ns(const coord_t *coord)
{
    uint64_t warn_ns = look_ns(coord), next_ns = NEVER_NS;
    if (warn_ns == 0 || coord->ending.has_ended || chain_is_empty(&coord->entries.open)) {
        return NEVER_NS;
    }
    const entry_t *oldest = CHAIN_OWNER(coord->entries.open.next, entry_t, open);
    next_ns =
        MAX(oldest->since_ns + warn_ns + slack_ns(coord), coord->stall.checked_ns + warn_ns / 8);
    if (is_sequencer(coord) && coord->stall.inquiry.is_open) {
        next_ns = MIN(next_ns, coord->stall.inquiry.deadline_ns);
    }
    return next_ns;
}

static void tell_sequencer(coord_t *coord, entry_t *entry)
{
    control_line_t line = {.kind = LINE_STALLED,
                           .set = (uint32_t)entry->set->id,
                           .name = {entry->name, entry->name_bytes},
                           .age_ns = coord->now_ns - entry->since_ns};
    control_put(line_to_parent(coord), &line);
    entry->asked_ns = coord->now_ns;
}

static bool is_due(const coord_t *coord, const entry_t *entry)
{
    const coord_params_t *params = &coord->params;
    uint64_t age_ns = coord->now_ns - entry->since_ns;
    bool is_last = params->stall_fail_ns > 0 && age_ns >= params->stall_fail_ns;
    return entry->asked_ns == 0 || is_last ||
           coord->now_ns - entry->asked_ns >= params->stall_warn_ns;
}

// Are the entries asked about only because the job is out of its rhythm?
static bool is_early(const coord_t *coord)
{
    for (int i = 0; i < coord->stall.inquiry.n_asked; i++) {
        const entry_t *entry = asked_entry(coord, &coord->stall.inquiry.asked[i]);
        if (entry != NULL && coord->now_ns - entry->since_ns >= coord->params.stall_warn_ns) {
            return false;
        }
    }
    return true;
}

static void start_inquiry(coord_t *coord)
{
    SEQUENCER(coord);
    control_line_t line = {.kind = RECORD_INQUIRE, .inquiry = coord->stall.inquiry.number};
    line.n_items = coord->stall.inquiry.n_asked;
    if (!open_inquiry(coord)) {
        coord->no_memory = true;
        return;
    }
    inquiry_t *inquiry = &coord->stall.inquiry;
    inquiry->warn_ns = inquiry->is_probe ? PROBE_NS
                       : is_early(coord) ? first_warn_ns(coord)
                                         : coord->params.stall_warn_ns;
    inquiry->deadline_ns = coord->now_ns + inquiry->warn_ns / 2;
    inquiry->batch = coord->sequencer.next_batch;
    if (!inquiry->is_probe && inquiry_is_early(coord)) {
        coord->stall.early_ns = coord->now_ns;
    }
    buf_clear(&coord->sequencer.record);
    control_put(&coord->sequencer.record, &line);
    for (int i = 0; i < coord->stall.inquiry.n_asked; i++) {
        const asked_t *asked = &coord->stall.inquiry.asked[i];
        control_asked_t item = {.set = (uint32_t)asked->set,
                                .name = {asked->name, asked->name_bytes}};
        control_put_asked(&coord->sequencer.record, &item);
    }
    coord->no_memory |= coord->sequencer.record.failed;
    outbox_to_children(coord, NULL, coord->sequencer.record.data, coord->sequencer.record.len);
    buf_clear(&coord->sequencer.record);
    if (coord->stall.inquiry.n_missing == 0) {
        close_inquiry(coord);
    }
}

// Lists the entries that are due; for a probe, all if one has waited for its time.
static void gather_asked(coord_t *coord, uint64_t age_ns, bool is_probe)
{
    SEQUENCER(coord);
    inquiry_t *inquiry = &coord->stall.inquiry;
    for (chain_t *item = coord->entries.open.next; item != &coord->entries.open;
         item = item->next) {
        entry_t *entry = CHAIN_OWNER(item, entry_t, open);
        if (coord->now_ns - entry->since_ns < age_ns && !(is_probe && inquiry->n_asked > 0)) {
            break;
        }
        if (!entry->is_complete && (is_probe || is_due(coord, entry)) &&
            inquiry->n_asked < CONTROL_MAX_ASKED) {
            coord->no_memory |= !add_asked(coord, entry->set, entry->name, entry->name_bytes);
        }
    }
    inquiry->is_probe = is_probe;
}

static void ask_ranks(coord_t *coord)
{
    SEQUENCER(coord);
    bool is_told = coord->stall.verdict_batch == coord->sequencer.next_batch + 1;
    bool may_probe = !is_told && coord->now_ns - coord->stall.probed_ns >= PROBE_NS;
    gather_asked(coord, first_warn_ns(coord), false);
    if (coord->stall.inquiry.n_asked == 0 && may_probe) {
        gather_asked(coord, PROBE_NS, true);
        coord->stall.probed_ns = coord->now_ns;
    }
    if (coord->stall.inquiry.n_asked > 0) {
        coord->stall.inquiry.number = coord->stall.next_inquiry++;
        start_inquiry(coord);
    }
}

void stall_tick(coord_t *coord)
{
    if (coord->now_ns < stall_next_ns(coord)) {
        return;
    }
    coord->stall.checked_ns = coord->now_ns;
    if (coord->stall.inquiry.is_open && is_sequencer(coord)) {
        if (coord->now_ns >= coord->stall.inquiry.deadline_ns) {
            close_inquiry(coord);
        }
        return;
    }
    if (is_sequencer(coord)) {
        ask_ranks(coord);
        return;
    }
    for (chain_t *item = coord->entries.open.next; item != &coord->entries.open;
         item = item->next) {
        entry_t *entry = CHAIN_OWNER(item, entry_t, open);
        if (coord->now_ns - entry->since_ns < look_ns(coord)) {
            break;
        }
        // Once is enough: from then on the sequencer keeps the time.
        if (!entry->is_complete && entry->asked_ns == 0) {
            tell_sequencer(coord, entry);
        }
    }
}

// A node below holds an incomplete round. The sequencer opens the round too, so that it can keep
// its time, even if no branch has given its share.
hvd_status_t stall_question(coord_t *coord, const control_line_t *line, err_t *err)
{
    if (!is_sequencer(coord)) {
        control_put(line_to_parent(coord), line);
        return HVD_OK;
    }
    set_t *set = sets_find(coord, (int)MIN(line->set, (uint32_t)INT32_MAX));
    if (set == NULL || coord->params.stall_warn_ns == 0) {
        return HVD_OK;
    }
    entry_t *entry = entry_make(coord, set, line->name.at, line->name.bytes);
    if (entry == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for one more tensor name");
    }
    entry_open_round(coord, entry);
    uint64_t since_ns = coord->now_ns - MIN(line->age_ns, coord->now_ns);
    if (since_ns >= entry->since_ns) {
        return HVD_OK;
    }
    entry->since_ns = since_ns;
    chain_t *before = entry->open.prev;
    chain_remove(&entry->open);
    while (before != &coord->entries.open &&
           CHAIN_OWNER(before, entry_t, open)->since_ns > since_ns) {
        before = before->prev;
    }
    chain_append(before->next, &entry->open); // in front of the first younger one
    return HVD_OK;
}
