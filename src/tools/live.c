// SPDX-License-Identifier: Apache-2.0
//
// live.c - asks every rank of this host what it is doing, and puts the answers side by side.
//
// A rank knows what it waits with, not for whom. Whoever sees all ranks of a host can tell: the
// ranks that do not have the operation another one waits with are those it waits for. All ranks of
// a job are asked at once. One that does not answer within a second is shown as such, with what
// the process table says of it: it has been stopped, or is very busy.
#include "tools/live.h"

#include "base/peer.h"
#include "observe/observe.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_RANKS_SHOWN 1024
#define ANSWER_MS 1000
#define CELL_BYTES 160
#define N_COLUMNS 7

typedef struct seen_flight {
    char state[16], op[16], name[128];
    double age_s;
    int set;
} seen_flight_t;

typedef struct seen_rank {
    int rank, size, pid;
    bool answers;
    char state[16];
    char last[CELL_BYTES];
    char ended[CELL_BYTES];
    int n_in_flight, n_flights;
    seen_flight_t flights[MAX_FLIGHTS];
} seen_rank_t;

// --- Finding -------------------------------------------------------------------------------------

// By the job's name alone, with its user, or by the name of one of its ranks.
static bool is_wanted(const live_rank_t *f, const char *target)
{
    size_t n = strlen(f->job);
    if (target == NULL || strcmp(strchr(f->job, '/') + 1, target) == 0) {
        return true;
    }
    target += target[0] == '@';
    return strncmp(f->job, target, n) == 0 && (target[n] == '\0' || target[n] == '/');
}

static int by_job_and_rank(const void *a, const void *b)
{
    const live_rank_t *x = a, *y = b;
    int order = strcmp(x->job, y->job);
    return order != 0 ? order : x->rank - y->rank;
}

// In the order of jobs and ranks. Negative: the list cannot be read.
static int find_ranks(const char *target, live_rank_t *found)
{
    int n_found = live_find(found, MAX_RANKS_SHOWN), n = 0;
    for (int i = 0; i < n_found; i++) {
        found[n] = found[i];
        n += is_wanted(&found[n], target);
    }
    if (n > 0) {
        qsort(found, (size_t)n, sizeof *found, by_job_and_rank);
    }
    return MIN(n, n_found);
}

// --- Asking --------------------------------------------------------------------------------------

static void read_flight(seen_rank_t *r, char *value)
{
    if (r->n_flights == MAX_FLIGHTS) {
        return;
    }
    seen_flight_t *f = &r->flights[r->n_flights];
    if (sscanf(value, "%15[^\t]\t%lf\t%15[^\t]\t%d\t%127[^\n]", f->state, &f->age_s, f->op, &f->set,
               f->name) == 5) {
        r->n_flights++;
    }
}

static void read_last(seen_rank_t *r, const char *value)
{
    double age_s;
    char op[16];
    char name[100];
    if (sscanf(value, "%lf\t%15[^\t]\t%99[^\n]", &age_s, op, name) == 3) {
        snprintf(r->last, sizeof r->last, "%s '%s', %.1f s ago", op, name, age_s);
    }
}

static void read_status(seen_rank_t *r, char *text)
{
    char *save = NULL;
    for (char *line = strtok_r(text, "\r\n", &save); line != NULL;
         line = strtok_r(NULL, "\r\n", &save)) {
        char *value = strchr(line, '\t');
        if (value == NULL) {
            continue;
        }
        *value++ = '\0';
        if (strcmp(line, "size") == 0) {
            r->size = (int)strtol(value, NULL, 10);
        } else if (strcmp(line, "pid") == 0) {
            r->pid = (int)strtol(value, NULL, 10);
        } else if (strcmp(line, "in_flight") == 0) {
            r->n_in_flight = (int)strtol(value, NULL, 10);
        } else if (strcmp(line, "state") == 0) {
            snprintf(r->state, sizeof r->state, "%s", value);
        } else if (strcmp(line, "ended") == 0) {
            snprintf(r->ended, sizeof r->ended, "%s", value);
        } else if (strcmp(line, "finished") == 0) {
            read_last(r, value);
        } else if (strcmp(line, "flight") == 0) {
            read_flight(r, value);
        }
    }
}

static int ask_all(live_rank_t *found, int n_found, seen_rank_t *ranks)
{
    live_question_t question = {.page = "/status", .wait_ms = ANSWER_MS};
    int n = live_ask(found, n_found, &question);
    for (int i = 0; i < n; i++) {
        ranks[i] = (seen_rank_t){.rank = found[i].rank,
                                 .pid = found[i].pid,
                                 .answers = found[i].answer != NULL,
                                 .last = "-"};
        if (found[i].answer != NULL) {
            read_status(&ranks[i], found[i].answer);
        }
    }
    live_forget(found, n);
    return n;
}

// --- Who waits for whom --------------------------------------------------------------------------

static bool has_flight(const seen_rank_t *r, const seen_flight_t *wanted)
{
    for (int i = 0; i < r->n_flights; i++) {
        if (r->flights[i].set == wanted->set && strcmp(r->flights[i].name, wanted->name) == 0) {
            return true;
        }
    }
    return r->n_in_flight > r->n_flights; // more than it told: it may well
}

static void waits_for(const seen_rank_t *ranks, int n, const seen_rank_t *r, char *text)
{
    const seen_flight_t *oldest = &r->flights[0];
    size_t len = 0;
    snprintf(text, CELL_BYTES, "-");
    if (!r->answers || r->n_flights == 0 || strcmp(oldest->state, "waiting") != 0) {
        return;
    }
    if (oldest->set != 0) {
        snprintf(text, CELL_BYTES, "other members of process set %d", oldest->set);
        return;
    }
    char names[CELL_BYTES - 8];
    int n_named = 0;
    for (int i = 0; i < n && len + 24 < sizeof names; i++) {
        if (!has_flight(&ranks[i], oldest)) {
            len += (size_t)snprintf(names + len, sizeof names - len, "%s%d", len > 0 ? ", " : "",
                                    ranks[i].rank);
            n_named++;
        }
    }
    if (n_named > 0) {
        snprintf(text, CELL_BYTES, "rank%s %s", plural(n_named), names);
    } else {
        snprintf(text, CELL_BYTES, n < r->size ? "ranks elsewhere" : "-");
    }
}

// --- The table -----------------------------------------------------------------------------------

typedef struct live_row {
    char cells[N_COLUMNS][CELL_BYTES];
} live_row_t;

static void fill_row(const seen_rank_t *ranks, int n, const seen_rank_t *r, live_row_t *row)
{
    const seen_flight_t *oldest = r->n_flights > 0 ? &r->flights[0] : NULL;
    const char *state = !r->answers ? "no answer" : r->state;
    snprintf(row->cells[0], CELL_BYTES, "%d", r->rank);
    snprintf(row->cells[1], CELL_BYTES, "%d", r->pid);
    snprintf(row->cells[2], CELL_BYTES, "%s", state);
    snprintf(row->cells[3], CELL_BYTES, "-");
    snprintf(row->cells[4], CELL_BYTES, "-");
    if (!r->answers && r->pid > 0) {
        snprintf(row->cells[4], CELL_BYTES, "%s", process_state(r->pid));
    } else if (r->ended[0] != '\0') {
        snprintf(row->cells[4], CELL_BYTES, "%.100s", r->ended);
    } else if (oldest != NULL) {
        char more[32] = "";
        if (r->n_in_flight > 1) {
            snprintf(more, sizeof more, " and %d more", r->n_in_flight - 1);
        }
        snprintf(row->cells[3], CELL_BYTES, "%.1f s", oldest->age_s);
        snprintf(row->cells[4], CELL_BYTES, "%s '%.100s'%s", oldest->op, oldest->name, more);
    }
    waits_for(ranks, n, r, row->cells[5]);
    snprintf(row->cells[6], CELL_BYTES, "%s", r->last);
}

static void print_rows(const live_row_t *rows, int n)
{
    int width[N_COLUMNS] = {0};
    for (int i = 0; i < n; i++) {
        for (int c = 0; c < N_COLUMNS; c++) {
            width[c] = MAX(width[c], (int)strlen(rows[i].cells[c]));
        }
    }
    for (int i = 0; i < n; i++) {
        for (int c = 0; c < N_COLUMNS - 1; c++) {
            printf("  %-*s", width[c], rows[i].cells[c]);
        }
        printf("  %s\n", rows[i].cells[N_COLUMNS - 1]);
    }
}

static int print_job(live_rank_t *found, int n_found)
{
    static const live_row_t heads = {
        {"rank", "pid", "state", "since", "in flight", "waits for", "last finished"}};
    seen_rank_t *ranks = calloc((size_t)n_found, sizeof *ranks);
    live_row_t *rows = calloc((size_t)n_found + 1, sizeof *rows);
    int n = ranks != NULL && rows != NULL ? ask_all(found, n_found, ranks) : 0;
    if (n > 0) {
        rows[0] = heads;
        for (int i = 0; i < n; i++) {
            fill_row(ranks, n, &ranks[i], &rows[i + 1]);
        }
        printf("%s: %d rank%s on this host of %d\n", found->job, n, n == 1 ? "" : "s",
               MAX(ranks[0].size, ranks[n - 1].size));
        print_rows(rows, n + 1);
    }
    free(ranks);
    free(rows);
    return n;
}

int print_live(const char *target)
{
    static live_rank_t found[MAX_RANKS_SHOWN];
    int n_found = find_ranks(target, found), n_shown = 0;
    for (int i = 0, n; i < n_found; i += n) {
        for (n = 1; i + n < n_found && strcmp(found[i].job, found[i + n].job) == 0; n++) {
        }
        n_shown += print_job(&found[i], n);
    }
    if (n_found < 0) {
        fprintf(stderr, "hvd-info: cannot read /proc/net/unix: %s\n", strerror(errno));
    } else if (n_shown == 0) {
        fprintf(stderr,
                "hvd-info: no rank of %s%s runs on this host, as this user and in this network "
                "namespace\n",
                target != NULL ? "job " : "any job", target != NULL ? target : "");
    }
    return n_shown > 0 ? 0 : 1;
}
