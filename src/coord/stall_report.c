// SPDX-License-Identifier: Apache-2.0
//
// stall_report.c - what is said of a stall: who misses what, and where the ranks are.
//
// The verdict comes first, then a line for each rank, then what to look for and whether the job
// will end. Pure but for the answers it reads. The holder of the engine calls.
#include "coord/stall_report.h"

#include <stdio.h>

#define MAX_NAMES_PER_RANK 6
#define MAX_NAME_SHOWN 100
#define MAX_RANKS_SHOWN 64

static bool bit_is_set(const uint8_t *bitmap, int rank)
{
    return (bitmap[rank / 8] >> (rank % 8) & 1) != 0;
}

void stall_add_said(inquiry_t *inquiry, const char *text, size_t bytes)
{
    if (inquiry->said_bytes + bytes <= STALL_SAID_BYTES) { // else the list is long enough
        memcpy(inquiry->said + inquiry->said_bytes, text, bytes);
        inquiry->said_bytes += bytes;
    }
}

void stall_say(inquiry_t *inquiry, int rank, const char *before, const coord_activity_t *progress)
{
    char doing[256], line[320];
    if (progress->is_blocked) {
        snprintf(doing, sizeof doing, "it waits in '%s'%s%s%s for %.1f s", progress->blocked_in,
                 progress->where[0] != '\0' ? " (" : "", progress->where,
                 progress->where[0] != '\0' ? ")" : "",
                 (double)progress->quiet_ns / (double)NS_PER_S);
    } else {
        coord_activity_text(progress, doing, sizeof doing);
    }
    int bytes = snprintf(line, sizeof line, "\nrank %d: %s%s", rank, before, doing);
    stall_add_said(inquiry, line, MIN((size_t)MAX(bytes, 0), sizeof line - 1));
}

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
    return entry != NULL && !bit_is_set(asked_bitmap_of(coord, asked), rank) &&
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

typedef bool (*is_listed_fn)(const coord_t *coord, int asked, int rank);

// "0-3, 7"
static void report_ranks(const coord_t *coord, report_t *report, is_listed_fn is_listed, int asked,
                         int from)
{
    int size = coord->params.size, n_shown = 0;
    for (int rank = from; rank < size && n_shown < MAX_RANKS_SHOWN; rank++) {
        int last = rank;
        if (!is_listed(coord, asked, rank)) {
            continue;
        }
        while (last + 1 < size && is_listed(coord, asked, last + 1)) {
            last++;
        }
        report_add(report, last > rank ? "%s %d-%d" : "%s %d", n_shown > 0 ? "," : "", rank, last);
        n_shown++;
        rank = last;
    }
}

static bool has_it(const coord_t *coord, int asked, int rank)
{
    return bit_is_set(asked_bitmap_of(coord, asked), rank);
}

// The ranks that have an entry.
static void report_ready(const coord_t *coord, report_t *report, int asked)
{
    report_add(report, "\n[");
    report_name(report, &coord->stall.inquiry.asked[asked]);
    report_add(report, "]");
    report_ranks(coord, report, has_it, asked, 0);
}

// What only the answers know: who has the entries, and what the others were doing.
static void report_doings(coord_t *coord, report_t *report, entry_t *const *entries)
{
    inquiry_t *inquiry = &coord->stall.inquiry;
    int n_names = 0;
    for (int child = 0; child < coord->n_children; child++) {
        int i = coord->n_parents + child;
        if (!inquiry->answered[child]) {
            stall_say(inquiry, coord->outboxes[i].rank, "does not answer; when last heard, ",
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
    for (size_t i = 0; i < asked_bitmap_bytes(coord); i++) {
        common |= asked_bitmap_of(coord, a)[i] & asked_bitmap_of(coord, b)[i];
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

// Will the job end, and when?
static void report_end(const coord_t *coord, report_t *report)
{
    double limit_s = (double)coord->params.stall_fail_ns / (double)NS_PER_S;
    if (limit_s > 0) {
        report_add(report,
                   "\nThe job ends when the wait has lasted %g seconds "
                   "(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).",
                   limit_s);
    } else {
        report_add(report, "\nThe job does not end by itself; with "
                           "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS it would.");
    }
}

// --- The end -------------------------------------------------------------------------------------

static bool has_answered(const coord_t *coord, int rank)
{
    int branch = coord->branch_of[rank];
    return branch == 0 || (branch > 0 && coord->stall.inquiry.answered[branch - 1]);
}

static bool lacks_it(const coord_t *coord, int asked, int rank)
{
    return is_missing(coord, asked, asked_entry(coord, &coord->stall.inquiry.asked[asked]), rank);
}

// Not only because it does not answer: that one may have it, and lack a core.
static bool surely_lacks_it(const coord_t *coord, int asked, int rank)
{
    return has_answered(coord, rank) && lacks_it(coord, asked, rank);
}

static int n_that(const coord_t *coord, is_listed_fn is_listed, int asked)
{
    int n = 0;
    for (int rank = 0; rank < coord->params.size; rank++) {
        n += is_listed(coord, asked, rank);
    }
    return n;
}

// The tensor that has waited longest, and longer than the job may; -1: none.
static int find_overdue(const coord_t *coord, entry_t *const *entries)
{
    uint64_t limit_ns = coord->params.stall_fail_ns;
    int found = -1;
    for (int i = 0; i < coord->stall.inquiry.n_asked; i++) {
        const entry_t *entry = entries[i];
        bool is_late = entry != NULL && coord->now_ns - entry->since_ns >= limit_ns &&
                       n_that(coord, lacks_it, i) > 0;
        if (is_late && (found < 0 || entry->since_ns < entries[found]->since_ns)) {
            found = i;
        }
    }
    return limit_ns > 0 ? found : -1;
}

static void report_waiting(const coord_t *coord, report_t *report, int asked)
{
    report_add(report, n_that(coord, has_it, asked) == 1 ? ", while rank" : ", while ranks");
    report_ranks(coord, report, has_it, asked, 0);
    report_add(report, " waited");
}

// Whom the job ends for, and at what, in a line that also stands by itself: errors and the launcher
// show it without the rest.
static void write_end(const coord_t *coord, report_t *report, int asked)
{
    is_listed_fn is_listed = n_that(coord, surely_lacks_it, asked) > 0 ? surely_lacks_it : lacks_it;
    int n = n_that(coord, is_listed, asked), rank = 0;
    while (!is_listed(coord, asked, rank)) {
        rank++;
    }
    report->rank = rank;
    report_add(report, "Rank %d did not submit '", rank);
    report_name(report, &coord->stall.inquiry.asked[asked]);
    report_add(report, "' within %g seconds (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)",
               (double)coord->params.stall_fail_ns / (double)NS_PER_S);
    if (n > 1) {
        report_add(report, n == 2 ? ", nor did rank" : ", nor did ranks");
        report_ranks(coord, report, is_listed, asked, rank + 1);
    }
    report_waiting(coord, report, asked);
    report_add(report, ".\n");
}

// What was asked about and still waits; NULL for the others.
static void find_entries(const coord_t *coord, entry_t *entries[CONTROL_MAX_ASKED])
{
    for (int i = 0; i < coord->stall.inquiry.n_asked; i++) {
        entry_t *entry = asked_entry(coord, &coord->stall.inquiry.asked[i]);
        bool still_waits = entry != NULL && entry->is_open && !entry->is_complete;
        entries[i] = still_waits ? entry : NULL;
    }
}

static void write_report(coord_t *coord, report_t *report)
{
    const coord_params_t *params = &coord->params;
    entry_t *entries[CONTROL_MAX_ASKED];
    find_entries(coord, entries);
    for (int i = 0; i < coord->stall.inquiry.n_asked; i++) {
        if (entries[i] != NULL) {
            entries[i]->asked_ns = coord->now_ns;
        }
    }
    int overdue = find_overdue(coord, entries);
    report->must_end = overdue >= 0;
    if (overdue >= 0) {
        write_end(coord, report, overdue);
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
    if (overdue < 0) {
        report_end(coord, report);
    }
}

// Every rank, when asked, could only wait, and nothing was agreed meanwhile.
static bool is_deadlock(const coord_t *coord)
{
    const inquiry_t *inquiry = &coord->stall.inquiry;
    return inquiry->n_missing == 0 && (int)inquiry->n_blocked == coord->params.size &&
           inquiry->batch == coord->sequencer.next_batch;
}

static void write_verdict(coord_t *coord, report_t *report)
{
    const inquiry_t *inquiry = &coord->stall.inquiry;
    entry_t *entries[CONTROL_MAX_ASKED];
    find_entries(coord, entries);
    report_add(report,
               "Deadlock: every rank waits for an operation that another rank has not "
               "submitted, so none of them can go on.%.*s",
               (int)inquiry->said_bytes, inquiry->said);
    report_mixed_up(coord, report, entries);
    report_add(report, "\nAll ranks must submit the same operations, and wait for them in the same "
                       "order: look for a branch that depends on the rank.");
    report_end(coord, report);
}

// In one line: it may be nothing.
static void write_hint(coord_t *coord, report_t *report)
{
    const inquiry_t *inquiry = &coord->stall.inquiry;
    int n_missing = 0, last = -1, asked = 0;
    for (; asked + 1 < inquiry->n_asked && asked_entry(coord, &inquiry->asked[asked]) == NULL;) {
        asked++;
    }
    const entry_t *entry = asked_entry(coord, &inquiry->asked[asked]);
    for (int rank = 0; rank < coord->params.size; rank++) {
        bool lacks = is_missing(coord, asked, entry, rank);
        last = lacks ? rank : last;
        n_missing += lacks;
    }
    report->n_ranks = n_missing;
    report_add(report, "Rank %d%s not submitted '%.*s' for %.0f s, and the others wait for it",
               last, n_missing > 1 ? " and others have" : " has", MAX_NAME_SHOWN,
               inquiry->asked[asked].name,
               entry != NULL ? (double)(coord->now_ns - entry->since_ns) / (double)NS_PER_S : 0.0);
    report_add(
        report,
        ", far longer than usual: it may be busy, or hang. A report with stacks follows after "
        "%g s (HOROVOD_STALL_CHECK_TIME_SECONDS).",
        (double)coord->params.stall_warn_ns / (double)NS_PER_S);
}

bool stall_write(coord_t *coord, report_kind_t kind, report_t *report)
{
    report->len = 0;
    report->text[0] = '\0';
    report->n_ranks = report->n_more = 0;
    report->must_end = false;
    report->rank = -1;
    if (kind == REPORT_DEADLOCK) {
        bool is_told = is_deadlock(coord);
        if (is_told) {
            write_verdict(coord, report);
        }
        return is_told;
    }
    write_report(coord, report);
    bool is_told = report->n_ranks > 0; // what was missing may have come meanwhile
    if (is_told && kind == REPORT_HINT && !report->must_end) {
        report->len = 0;
        write_hint(coord, report);
    }
    return is_told;
}
