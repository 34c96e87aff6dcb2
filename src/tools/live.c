// SPDX-License-Identifier: Apache-2.0
//
// live.c - asks every rank of this host what it is doing, and puts the answers side by side.
//
// A rank knows what it waits with, not for whom. Whoever sees all ranks of a host can tell: the
// ranks that do not have the operation another one waits with are those it waits for. All ranks of
// a job are asked at once. One that does not answer within a second is shown as such, with what
// the process table says of it: it has been stopped, or is very busy.
#define _GNU_SOURCE
#include "tools/live.h"

#include "base/peer.h"
#include "observe/observe.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_RANKS_SHOWN 1024
#define ANSWER_BYTES (256 * KIB)
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
    int fd; // its answer comes there; -1: it has come, or will not
    buf_t text;
    bool answers;
    char state[16];
    char last[CELL_BYTES];
    char ended[CELL_BYTES];
    int n_in_flight, n_flights;
    seen_flight_t flights[MAX_FLIGHTS];
} seen_rank_t;

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

// False: nobody is there.
static bool ask(const char *path, seen_rank_t *r)
{
    static const char request[] = "GET /status HTTP/1.0\r\n\r\n";
    struct ucred owner;
    socklen_t bytes = sizeof owner;
    r->fd = live_connect(path);
    if (r->fd < 0) {
        return errno == EAGAIN; // so many wait there that it must be stuck
    }
    if (getsockopt(r->fd, SOL_SOCKET, SO_PEERCRED, &owner, &bytes) == 0) {
        r->pid = (int)owner.pid;
    }
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

static int by_rank(const void *a, const void *b)
{
    return ((const seen_rank_t *)a)->rank - ((const seen_rank_t *)b)->rank;
}

static int look_at_all(const char *dir, seen_rank_t *ranks)
{
    int n = 0;
    DIR *folder = opendir(dir);
    struct dirent *entry;
    while (folder != NULL && n < MAX_RANKS_SHOWN && (entry = readdir(folder)) != NULL) {
        char path[LIVE_PATH_BYTES + 256];
        seen_rank_t *r = &ranks[n];
        *r = (seen_rank_t){.last = "-"};
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        if (live_rank_of(entry->d_name, &r->rank) && ask(path, r)) {
            n++;
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    hear_all(ranks, n);
    qsort(ranks, (size_t)n, sizeof *ranks, by_rank);
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

static int print_job(const char *dir)
{
    static const live_row_t heads = {
        {"rank", "pid", "state", "since", "in flight", "waits for", "last finished"}};
    seen_rank_t *ranks = calloc(MAX_RANKS_SHOWN, sizeof *ranks);
    live_row_t *rows = calloc(MAX_RANKS_SHOWN + 1, sizeof *rows);
    int n = ranks != NULL && rows != NULL ? look_at_all(dir, ranks) : 0;
    if (n > 0) {
        rows[0] = heads;
        for (int i = 0; i < n; i++) {
            fill_row(ranks, n, &ranks[i], &rows[i + 1]);
        }
        printf("%s: %d rank%s on this host of %d\n", dir, n, n == 1 ? "" : "s",
               MAX(ranks[0].size, ranks[n - 1].size));
        print_rows(rows, n + 1);
    }
    free(ranks);
    free(rows);
    return n;
}

static int print_jobs(const char *base)
{
    int n = 0;
    live_clean(base, NULL);
    DIR *folder = opendir(base);
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char path[LIVE_PATH_BYTES + 256];
        snprintf(path, sizeof path, "%s/%s", base, entry->d_name);
        n += entry->d_name[0] != '.' ? print_job(path) : 0;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return n;
}

int print_live(const char *target)
{
    config_t config;
    log_t log = {.level = LOG_WARN, .rank = -1, .hide_time = true};
    err_t err;
    char base[LIVE_PATH_BYTES];
    if (config_load(&config, NULL, &log, &err) != HVD_OK) {
        fprintf(stderr, "hvd-info: %s\n", err.text);
        return 1;
    }
    bool fits = live_base_dir(config.monitor_dir, base);
    config_free(&config);
    if (!fits) {
        fprintf(stderr,
                "hvd-info: HOROVOD_MONITOR_DIR is too long: the path of a socket has at "
                "most %d bytes\n",
                LIVE_PATH_BYTES - 1);
        return 1;
    }
    int n = 0;
    if (target == NULL) {
        n = print_jobs(base);
    } else if (strchr(target, '/') != NULL) {
        live_clean_job(target);
        n = print_job(target);
        n = n > 0 ? n : print_jobs(target); // a directory of jobs will do as well
    } else {
        char path[LIVE_PATH_BYTES + 256];
        snprintf(path, sizeof path, "%s/%s", base, target);
        live_clean_job(path);
        n = print_job(path);
    }
    if (n == 0) {
        fprintf(stderr, "hvd-info: no rank of %s%s runs on this host (looked in %s)\n",
                target != NULL ? "job " : "any job", target != NULL ? target : "", base);
    }
    return n > 0 ? 0 : 1;
}
