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
// A job that does the same step again every 200 ms need not wait a minute to know that something is
// wrong: the first report of a stall comes after LEARNED_FACTOR times the 99th percentile of recent
// steps, once there have been LEARNED_STEPS of them. Recent are the last fifty to hundred, so it is
// the second longest of them: a single long step, for a checkpoint, changes nothing. A job that is
// slow by nature is left alone.
//
// Rounds are kept in order of age, so as long as nothing stalls the cost is one comparison per call
// of coord_next_tick. A branch that does not answer is taken to have nothing. The holder of the
// engine calls.
#include "coord/internal.h"

#include <stdio.h>

#define MAX_NAMES_PER_RANK 6
#define MAX_NAME_SHOWN 100
#define MAX_RANKS_SHOWN 64
#define LEARNED_FACTOR 5
#define LEARNED_LEAST_NS (3 * NS_PER_S)
#define LEARNED_STEPS 20
#define STEPS_PER_SPAN 50

static size_t bitmap_bytes(const coord_t *coord)
{
    return ((size_t)coord->params.size + 7) / 8;
}

static uint8_t *bitmap_of(const coord_t *coord, int asked)
{
    return coord->stall.inquiry.have + (size_t)asked * bitmap_bytes(coord);
}

static bool bit_is_set(const uint8_t *bitmap, int rank)
{
    return (bitmap[rank / 8] >> (rank % 8) & 1) != 0;
}

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

// How long an entry may wait before it is asked about for the first time.
static uint64_t first_warn_ns(const coord_t *coord)
{
    const rhythm_t *rhythm = &coord->stall.rhythm;
    uint64_t warn_ns = coord->params.stall_warn_ns;
    span_t recent = rhythm->before;
    note_in_span(&recent, rhythm->span.longest_ns);
    note_in_span(&recent, rhythm->span.second_ns);
    uint64_t learned_ns = MAX(LEARNED_LEAST_NS, LEARNED_FACTOR * recent.second_ns);
    bool was_early = coord->stall.early_ns != 0 && coord->now_ns - coord->stall.early_ns < warn_ns;

    return rhythm->is_known && !was_early ? MIN(warn_ns, learned_ns) : warn_ns;
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

static entry_t *entry_of_asked(const coord_t *coord, const asked_t *asked)
{
    const set_t *set = sets_find(coord, asked->set);
    return set != NULL ? entry_find(set, asked->name, asked->name_bytes) : NULL;
}

static void add_said(inquiry_t *inquiry, const char *text, size_t bytes)
{
    if (inquiry->said_bytes + bytes <= STALL_SAID_BYTES) { // else the list is long enough
        memcpy(inquiry->said + inquiry->said_bytes, text, bytes);
        inquiry->said_bytes += bytes;
    }
}

static void say_progress(inquiry_t *inquiry, int rank, const char *before,
                         const coord_activity_t *progress)
{
    char doing[192], line[256];
    coord_activity_text(progress, doing, sizeof doing);
    int bytes = snprintf(line, sizeof line, "\nrank %d: %s%s", rank, before, doing);
    add_said(inquiry, line, MIN((size_t)MAX(bytes, 0), sizeof line - 1));
}

// All entries are listed: waits for the children's answers, with this rank's own in place.
static bool open_inquiry(coord_t *coord)
{
    inquiry_t *inquiry = &coord->stall.inquiry;
    int rank = coord->params.rank;
    bool lacks_some = false;
    inquiry->have_bytes = MAX(bitmap_bytes(coord) * (size_t)inquiry->n_asked, 1);
    inquiry->have = store_take(&coord->store, inquiry->have_bytes);
    inquiry->answered = store_take(&coord->store, (size_t)coord->n_children + 1);
    inquiry->said = store_take(&coord->store, STALL_SAID_BYTES);
    if (inquiry->have == NULL || inquiry->answered == NULL || inquiry->said == NULL) {
        return false;
    }
    memset(inquiry->have, 0, inquiry->have_bytes);
    memset(inquiry->answered, 0, (size_t)coord->n_children + 1);
    for (int i = 0; i < inquiry->n_asked; i++) {
        const entry_t *entry = entry_of_asked(coord, &inquiry->asked[i]);
        const set_t *set = sets_find(coord, inquiry->asked[i].set);
        if (entry != NULL && entry->tag != 0) {
            bitmap_of(coord, i)[rank / 8] |= (uint8_t)(1 << (rank % 8));
        } else {
            lacks_some |= set != NULL && set->self >= 0 && coord->joins.tag == 0;
        }
    }
    if (lacks_some) {
        say_progress(inquiry, rank, "", &coord->heartbeat.activity);
    }
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
                           .payload_bytes = bitmap_bytes(coord) * (size_t)inquiry->n_asked,
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

// --- The report ---------------------------------------------------------------------------------

typedef struct report {
    char text[CONTROL_MAX_TEXT_BYTES];
    size_t len;
    int n_ranks, n_more;
    bool must_end; // some entry waits longer than the job may
} report_t;

static void report_add(report_t *report, const char *format, ...) PRINTF_LIKE(2, 3);
static void report_add(report_t *report, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int wanted =
        vsnprintf(report->text + report->len, sizeof report->text - report->len, format, args);
    va_end(args);
    report->len = MIN(report->len + (size_t)MAX(wanted, 0), sizeof report->text - 1);
}

// A name means something else in every process set; that of all ranks goes without saying.
static void report_name(report_t *report, const asked_t *asked)
{
    report_add(report, "%.*s", MAX_NAME_SHOWN, asked->name);
    if (asked->set > 0) {
        report_add(report, " of process set %d", asked->set);
    }
}

// Does the report have to say that this rank lacks this entry?
static bool is_missing(const coord_t *coord, int asked, const entry_t *entry, int rank)
{
    return entry != NULL && !bit_is_set(bitmap_of(coord, asked), rank) &&
           !coord->joins.has_joined[rank] && set_position(entry->set, rank) >= 0;
}

static void report_rank(const coord_t *coord, report_t *report, entry_t *const *entries, int rank)
{
    const inquiry_t *inquiry = &coord->stall.inquiry;
    int n_names = 0;
    for (int i = 0; i < inquiry->n_asked; i++) {
        if (!is_missing(coord, i, entries[i], rank)) {
            continue;
        }
        if (n_names == 0 && report->n_ranks++ >= MAX_RANKS_SHOWN) {
            report->n_more++;
            return;
        }
        if (n_names == 0) {
            report_add(report, "\n%d: [", rank);
        }
        if (n_names < MAX_NAMES_PER_RANK) {
            report_add(report, "%s", n_names > 0 ? ", " : "");
            report_name(report, &inquiry->asked[i]);
        }
        n_names++;
    }
    if (n_names > 0) {
        report_add(report, "%s]", n_names > MAX_NAMES_PER_RANK ? " ..." : "");
    }
}

// "0-3, 7": the ranks that have an entry.
static void report_ready(const coord_t *coord, report_t *report, int asked)
{
    const uint8_t *bitmap = bitmap_of(coord, asked);
    int size = coord->params.size, n_shown = 0;
    report_add(report, "\n[");
    report_name(report, &coord->stall.inquiry.asked[asked]);
    report_add(report, "]");
    for (int rank = 0; rank < size && n_shown < MAX_RANKS_SHOWN; rank++) {
        int last = rank;
        if (!bit_is_set(bitmap, rank)) {
            continue;
        }
        while (last + 1 < size && bit_is_set(bitmap, last + 1)) {
            last++;
        }
        report_add(report, last > rank ? "%s %d-%d" : "%s %d", n_shown > 0 ? "," : "", rank, last);
        n_shown++;
        rank = last;
    }
}

// What only the answers know: who has the entries, and what the others were doing.
static void report_doings(coord_t *coord, report_t *report, entry_t *const *entries)
{
    inquiry_t *inquiry = &coord->stall.inquiry;
    int n_names = 0;
    for (int child = 0; child < coord->n_children; child++) {
        int i = coord->n_parents + child;
        if (!inquiry->answered[child]) {
            say_progress(inquiry, coord->outboxes[i].rank, "does not answer; when last heard, ",
                         &coord->neighbours[i].activity);
        }
    }
    report_add(report, "\nReady ranks:");
    for (int i = 0; i < inquiry->n_asked && n_names < MAX_NAMES_PER_RANK; i++) {
        if (entries[i] != NULL) {
            report_ready(coord, report, i);
            n_names++;
        }
    }
    if (inquiry->said_bytes > 0) {
        report_add(report, "\nWhat the missing ranks last did:%.*s", (int)inquiry->said_bytes,
                   inquiry->said);
    }
}

// The user's part of "allreduce.loss" or "grouped_allreduce.loss"; NULL: no operation is in front.
static const char *name_behind_operation(const asked_t *asked)
{
    const char *dot = strchr(asked->name, '.');
    for (int op = 0; dot != NULL && op < HVD_N_OPS; op++) {
        const char *word = hvd_op_name((hvd_op_t)op);
        size_t bytes = strlen(word);
        if ((size_t)(dot - asked->name) >= bytes && memcmp(dot - bytes, word, bytes) == 0) {
            return dot;
        }
    }
    return NULL;
}

// "allreduce.loss" and "allgather.loss"?
static bool differ_in_operation(const asked_t *a, const asked_t *b)
{
    const char *name_a = name_behind_operation(a), *name_b = name_behind_operation(b);
    return a->set == b->set && name_a != NULL && name_b != NULL && strcmp(name_a, name_b) == 0;
}

static bool have_no_rank_in_common(const coord_t *coord, int a, int b)
{
    uint8_t common = 0;
    for (size_t i = 0; i < bitmap_bytes(coord); i++) {
        common |= bitmap_of(coord, a)[i] & bitmap_of(coord, b)[i];
    }
    return common == 0;
}

// Frameworks put the operation in front of the user's name: who gives one name to two operations
// waits under two names.
static void report_mixed_up(const coord_t *coord, report_t *report, entry_t *const *entries)
{
    const inquiry_t *inquiry = &coord->stall.inquiry;
    for (int a = 0; a < inquiry->n_asked; a++) {
        for (int b = a + 1; b < inquiry->n_asked; b++) {
            if (entries[a] != NULL && entries[b] != NULL &&
                differ_in_operation(&inquiry->asked[a], &inquiry->asked[b]) &&
                have_no_rank_in_common(coord, a, b)) {
                report_add(report,
                           "\n[%.*s] and [%.*s] differ only in the operation: ranks must call the "
                           "same operation with the same name.",
                           MAX_NAME_SHOWN, inquiry->asked[a].name, MAX_NAME_SHOWN,
                           inquiry->asked[b].name);
            }
        }
    }
}

static void write_report(coord_t *coord, report_t *report)
{
    const coord_params_t *params = &coord->params;
    entry_t *entries[CONTROL_MAX_ASKED];
    for (int i = 0; i < coord->stall.inquiry.n_asked; i++) {
        entry_t *entry = entry_of_asked(coord, &coord->stall.inquiry.asked[i]);
        bool still_waits = entry != NULL && entry->is_open && !entry->is_complete;
        entries[i] = still_waits ? entry : NULL;
        if (still_waits) {
            entry->asked_ns = coord->now_ns;
            report->must_end |= params->stall_fail_ns > 0 &&
                                coord->now_ns - entry->since_ns >= params->stall_fail_ns;
        }
    }
    report_add(report,
               "One or more tensors were submitted to be reduced, gathered or broadcasted by "
               "subset of ranks and are waiting for remainder of ranks for more than %g seconds. "
               "Look for ranks that take a different path through the program, wait for something "
               "else, or have stopped.\nMissing ranks:",
               (double)(coord->stall.inquiry.warn_ns / NS_PER_MS) / 1000);
    for (int rank = 0; rank < params->size; rank++) {
        report_rank(coord, report, entries, rank);
    }
    if (report->n_more > 0) {
        report_add(report, "\n... and %d more ranks", report->n_more);
    }
    if (report->n_ranks > 0) {
        report_doings(coord, report, entries);
        report_mixed_up(coord, report, entries);
    }
    if (coord->stall.inquiry.warn_ns < params->stall_warn_ns) {
        report_add(report,
                   "\nThis report comes early because the job's steps have been much shorter so "
                   "far; the next one comes after %g seconds (HOROVOD_STALL_CHECK_TIME_SECONDS).",
                   (double)params->stall_warn_ns / (double)NS_PER_S);
    }
    if (report->must_end) {
        report_add(report,
                   "\nThe job ends now: the longest allowed wait is %g seconds "
                   "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).",
                   (double)params->stall_fail_ns / (double)NS_PER_S);
    }
}

static void close_inquiry(coord_t *coord)
{
    SEQUENCER(coord);
    report_t report;
    report.len = 0;
    report.text[0] = '\0';
    report.n_ranks = report.n_more = 0;
    report.must_end = false;
    write_report(coord, &report);
    clear_inquiry(coord);
    // What was missing may have come while the ranks were asked.
    if (report.n_ranks == 0) {
        return;
    }
    if (report.must_end) {
        coord_abort(coord, HVD_STALLED, report.text);
    } else {
        sequence_report(coord, report.text);
    }
}

hvd_status_t stall_answer(coord_t *coord, int child, const control_line_t *line, err_t *err)
{
    inquiry_t *inquiry = &coord->stall.inquiry;
    // Too late, or for a question that was given up.
    if (!inquiry->is_open || line->inquiry != inquiry->number || inquiry->answered[child]) {
        return HVD_OK;
    }
    if (line->n_items != inquiry->n_asked ||
        line->payload_bytes != bitmap_bytes(coord) * (size_t)inquiry->n_asked) {
        return fail(err, HVD_PROTOCOL, "an answer about stalled tensors does not fit the question");
    }
    for (size_t i = 0; i < line->payload_bytes; i++) {
        inquiry->have[i] |= line->payload[i];
    }
    add_said(inquiry, line->text.at, line->text.bytes);
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
    return first_warn_ns(coord) / (is_sequencer(coord) ? 8 : 16);
}

uint64_t stall_next_ns(const coord_t *coord)
{
    uint64_t warn_ns = first_warn_ns(coord), next_ns = NEVER_NS;
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
        const entry_t *entry = entry_of_asked(coord, &coord->stall.inquiry.asked[i]);
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
    coord->stall.inquiry.warn_ns =
        is_early(coord) ? first_warn_ns(coord) : coord->params.stall_warn_ns;
    coord->stall.inquiry.deadline_ns = coord->now_ns + coord->stall.inquiry.warn_ns / 2;
    if (coord->stall.inquiry.warn_ns < coord->params.stall_warn_ns) {
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

void stall_tick(coord_t *coord)
{
    uint64_t warn_ns = first_warn_ns(coord);
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
    for (chain_t *item = coord->entries.open.next; item != &coord->entries.open;
         item = item->next) {
        entry_t *entry = CHAIN_OWNER(item, entry_t, open);
        if (coord->now_ns - entry->since_ns < warn_ns) {
            break;
        }
        if (entry->is_complete || !is_due(coord, entry)) {
            continue;
        }
        if (!is_sequencer(coord)) {
            // Once is enough: from then on the sequencer keeps the time.
            if (entry->asked_ns == 0) {
                tell_sequencer(coord, entry);
            }
        } else if (coord->stall.inquiry.n_asked < CONTROL_MAX_ASKED) {
            coord->no_memory |= !add_asked(coord, entry->set, entry->name, entry->name_bytes);
        }
    }
    if (is_sequencer(coord) && coord->stall.inquiry.n_asked > 0) {
        coord->stall.inquiry.number = coord->stall.next_inquiry++;
        start_inquiry(coord);
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
