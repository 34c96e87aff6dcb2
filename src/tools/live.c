// SPDX-License-Identifier: Apache-2.0
//
// live.c - asks every rank of this host what it is doing, and puts the answers side by side.
//
// A rank knows what it waits with, not for whom. Whoever sees all ranks of a host can tell: the
// ranks that do not have the operation another one waits with are those it waits for. All ranks of
// a job are asked at once. One that does not answer within a second is shown as such, with what
// the process table says of it: it has been stopped, or is very busy.
//
// Sockets are found in the kernel's list of names. Anybody can take such a name, so a rank is
// believed only if its process belongs to the user whom the name tells, or to root.
#define _GNU_SOURCE
#include "tools/live.h"

#include "base/peer.h"
#include "observe/observe.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_RANKS_SHOWN 1024
#define ANSWER_BYTES (256 * KIB)
#define ANSWER_MS 1000
#define CELL_BYTES 160
#define N_COLUMNS 7
#define JOB_BYTES 128        // of "hvd-<user>/<job>"
#define IS_LISTENING 0x10000 // among the flags of a socket in /proc/net/unix

typedef struct seen_flight {
    char state[16], op[16], name[128];
    double age_s;
    int set;
} seen_flight_t;

typedef struct seen_rank {
    int rank, size, pid;
    int fd; // its answer comes there; -1: it has come, or will not
    buf_t text;
    bool answers;
    char state[16];
    char last[CELL_BYTES];
    char ended[CELL_BYTES];
    int n_in_flight, n_flights;
    seen_flight_t flights[MAX_FLIGHTS];
} seen_rank_t;

// --- Finding -------------------------------------------------------------------------------------

typedef struct found {
    char name[LIVE_NAME_BYTES];
    char job[JOB_BYTES];
    unsigned uid;
    int rank;
} found_t;

// A line of the kernel's list, if it is of a rank that listens. Exactly: what is read must give the
// same name again.
static bool read_name(const char *line, found_t *f)
{
    unsigned flags;
    int at = 0;
    char job[JOB_BYTES - 32];
    if (sscanf(line, "%*s %*s %*s %x %*s %*s %*s @%n", &flags, &at) != 1 || at == 0 ||
        (flags & IS_LISTENING) == 0 ||
        sscanf(line + at, "hvd-%u/%95[^/\n]/rank-%d", &f->uid, job, &f->rank) != 3) {
        return false;
    }
    snprintf(f->name, sizeof f->name, LIVE_NAME, f->uid, job, f->rank);
    snprintf(f->job, sizeof f->job, "hvd-%u/%s", f->uid, job);
    return f->rank >= 0 && strncmp(f->name, line + at, strcspn(line + at, "\n")) == 0 &&
           strlen(f->name) == strcspn(line + at, "\n");
}

// By the job's name alone, with its user, or by the name of one of its ranks.
static bool is_wanted(const found_t *f, const char *target)
{
    size_t n = strlen(f->job);
    if (geteuid() != 0 && geteuid() != f->uid) {
        return false; // it would not answer
    }
    if (target == NULL || strcmp(strchr(f->job, '/') + 1, target) == 0) {
        return true;
    }
    target += target[0] == '@';
    return strncmp(f->job, target, n) == 0 && (target[n] == '\0' || target[n] == '/');
}

static int by_job_and_rank(const void *a, const void *b)
{
    const found_t *x = a, *y = b;
    int order = strcmp(x->job, y->job);
    return order != 0 ? order : x->rank - y->rank;
}

// In the order of jobs and ranks. Negative: the list cannot be read.
static int find_ranks(const char *target, found_t *found)
{
    char line[512];
    int n = 0;
    FILE *list = fopen("/proc/net/unix", "re");
    if (list == NULL) {
        return -1;
    }
    while (n < MAX_RANKS_SHOWN && fgets(line, sizeof line, list) != NULL) {
        n += read_name(line, &found[n]) && is_wanted(&found[n], target);
    }
    fclose(list);
    qsort(found, (size_t)n, sizeof *found, by_job_and_rank);
    return n;
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
    char *body = strstr(text, "\r\n\r\n");
    for (char *line = body != NULL ? strtok_r(body, "\r\n", &save) : NULL; line != NULL;
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

// False: nobody is there, or somebody who is not what the name says.
static bool ask(const found_t *found, seen_rank_t *r)
{
    static const char request[] = "GET /status HTTP/1.0\r\n\r\n";
    live_peer_t peer;
    r->fd = live_connect(found->name);
    if (r->fd < 0) {
        return errno == EAGAIN; // so many wait there that it must be stuck
    }
    if (!live_peer_is(r->fd, found->uid, &peer)) {
        close(r->fd);
        return false;
    }
    r->pid = peer.pid;
    if (send(r->fd, request, strlen(request), MSG_NOSIGNAL) != (ssize_t)strlen(request)) {
        close(r->fd);
        r->fd = -1;
    }
    return true;
}

// A part of its answer has come, or the end of it.
static void hear(seen_rank_t *r)
{
    char part[16 * KIB];
    ssize_t n = recv(r->fd, part, sizeof part, 0);
    if (n > 0 && r->text.len < ANSWER_BYTES) {
        buf_append(&r->text, part, (size_t)n);
        return;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    close(r->fd);
    r->fd = -1;
    buf_append(&r->text, "", 1);
    r->answers =
        n == 0 && !r->text.failed && strncmp((char *)r->text.data, "HTTP/1.0 200", 12) == 0;
    if (r->answers) {
        read_status(r, (char *)r->text.data);
    }
}

static void hear_all(seen_rank_t *ranks, int n)
{
    struct pollfd polled[MAX_RANKS_SHOWN];
    uint64_t deadline_ns = deadline_in_ms(ANSWER_MS), now_ns;
    int n_open = n;
    while (n_open > 0 && (now_ns = clock_ns()) < deadline_ns) {
        n_open = 0;
        for (int i = 0; i < n; i++) {
            polled[i] = (struct pollfd){.fd = ranks[i].fd, .events = POLLIN};
            n_open += ranks[i].fd >= 0;
        }
        int wait_ms = n_open > 0 ? (int)((deadline_ns - now_ns) / NS_PER_MS) + 1 : 0;
        int n_heard = poll(polled, (nfds_t)n, wait_ms);
        for (int i = 0; i < n && n_heard > 0; i++) {
            if (polled[i].revents != 0) {
                hear(&ranks[i]);
            }
        }
    }
    for (int i = 0; i < n; i++) {
        if (ranks[i].fd >= 0) {
            close(ranks[i].fd);
        }
        buf_free(&ranks[i].text);
    }
}

static int ask_all(const found_t *found, int n_found, seen_rank_t *ranks)
{
    int n = 0;
    for (int i = 0; i < n_found; i++) {
        ranks[n] = (seen_rank_t){.rank = found[i].rank, .last = "-"};
        n += ask(&found[i], &ranks[n]);
    }
    hear_all(ranks, n);
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
    for (int i = 0; i < n && len + 32 < CELL_BYTES; i++) {
        if (!has_flight(&ranks[i], oldest)) {
            len += (size_t)snprintf(text + len, CELL_BYTES - len, "%s%d", len > 0 ? ", " : "rank ",
                                    ranks[i].rank);
        }
    }
    if (len == 0) {
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

static int print_job(const found_t *found, int n_found)
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
    static found_t found[MAX_RANKS_SHOWN];
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
