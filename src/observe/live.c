// SPDX-License-Identifier: Apache-2.0
//
// live.c - a Unix socket where a rank shows what it is doing, for hvd-info, curl and Prometheus.
//
//   <base>/<job>/rank-<N>.sock     base: HOROVOD_MONITOR_DIR, or /tmp/hvd-<uid>
//
// Who leaves last removes <job>, and /tmp/hvd-<uid> with the last job of the user; live_files.c
// knows what may be removed of those who could not.
// The directories belong to the user alone; that is all the protection there is, and all it takes:
// nothing can be changed through the socket. It speaks just enough HTTP: GET of a page, one answer,
// closed. At most LIVE_CLIENTS are served at a time, each for two seconds, and the others wait in
// the kernel's queue. Thread: the monitor thread.
#define _GNU_SOURCE
#include "observe/internal.h"

#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define REQUEST_BYTES 2048
#define PATIENCE_NS (2 * NS_PER_S)
#define JOB_BYTES 40
#define N_TRIES 8 // jobs of one name at a time

typedef struct client {
    int fd; // -1: none
    uint64_t deadline_ns;
    char request[REQUEST_BYTES];
    size_t n_read;
    buf_t answer;
    size_t n_sent;
} client_t;

struct live {
    observe_t *observe;
    int fd;
    char base[LIVE_PATH_BYTES];
    char dir[LIVE_PATH_BYTES];
    char path[LIVE_PATH_BYTES];
    client_t clients[LIVE_CLIENTS];
};

// --- Listening -----------------------------------------------------------------------------------

static void name_of_job(const observe_t *o, char name[JOB_BYTES])
{
    const char *given = o->job.config->job_id;
    if (given != NULL && given[0] != '\0') {
        size_t n = 0;
        for (; given[n] != '\0' && n + 1 < JOB_BYTES; n++) {
            bool plain = isalnum((unsigned char)given[n]) || (n > 0 && strchr("._-", given[n]));
            name[n] = plain ? given[n] : '_';
        }
        name[n] = '\0';
    } else if (o->job.keys != NULL) {
        const uint8_t *id = secure_keys_job(o->job.keys);
        snprintf(name, JOB_BYTES, "job-%02x%02x%02x%02x", id[0], id[1], id[2], id[3]);
    } else {
        snprintf(name, JOB_BYTES, "pid-%d", (int)getpid());
    }
}

static int listen_at(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    memcpy(address.sun_path, path, strlen(path) + 1);
    if (fd >= 0 &&
        (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 16) != 0)) {
        int code = errno;
        close(fd);
        errno = code;
        return -1;
    }
    return fd;
}

// Under a name nobody looks at until it listens.
static bool appear(live_t *live, const char *job, int turn)
{
    char hidden[LIVE_PATH_BYTES];
    int rank = live->observe->job.rank;
    char suffix[16] = "";
    if (turn > 0) {
        snprintf(suffix, sizeof suffix, "-%d", turn + 1);
    }
    int n = snprintf(live->dir, sizeof live->dir, "%s/%s%s", live->base, job, suffix);
    int m = snprintf(hidden, sizeof hidden, "%s/" LIVE_HIDDEN_NAME, live->dir, rank, (int)getpid());
    int k = snprintf(live->path, sizeof live->path, "%s/" LIVE_NAME, live->dir, rank);
    if (MAX(MAX(n, m), k) >= LIVE_PATH_BYTES) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (!live_own_dir(live->base) || !live_own_dir(live->dir) ||
        (live->fd = listen_at(hidden)) < 0) {
        return false;
    }
    live_remove_if_dead(live->path);
    bool done = link(hidden, live->path) == 0; // fails if a living rank has that name
    int code = errno;
    unlink(hidden);
    if (!done) {
        close(live->fd);
        live->fd = -1;
    } else {
        fd_not_for_children(live->fd);
    }
    errno = code;
    return done;
}

// Somebody who has named a directory wants to know, once on each host.
static void tell_why_not(const live_t *live)
{
    static const struct {
        int code;
        const char *why;
    } reasons[] = {
        {ENOTDIR, "it, and what is made in it, must be a directory of mode 0700 that belongs to "
                  "this user; set HOROVOD_MONITOR_DIR to another one"},
        {ENOENT, "it cannot be made: the directory above it is not there"},
        {ENAMETOOLONG, "it is too long: the path of a socket has at most 107 bytes"},
    };
    const char *why = strerror(errno), *given = live->observe->job.config->monitor_dir;
    bool is_given = given != NULL && given[0] != '\0';
    bool is_loud = (is_given || errno == ENOTDIR) && live->observe->job.local_rank == 0;
    for (size_t i = 0; i < N_ELEMENTS(reasons); i++) {
        why = reasons[i].code == errno ? reasons[i].why : why;
    }
    log_at(live->observe->job.log, is_loud ? LOG_WARN : LOG_INFO, "monitor",
           "no live state in '%s': %s", is_given ? given : live->base, why);
}

live_t *live_open(observe_t *o)
{
    char job[JOB_BYTES];
    live_t *live = calloc(1, sizeof *live);
    if (live == NULL || !o->job.config->monitor) {
        free(live);
        return NULL;
    }
    live->observe = o;
    live->fd = -1;
    for (int i = 0; i < LIVE_CLIENTS; i++) {
        live->clients[i].fd = -1;
    }
    name_of_job(o, job);
    live_base_dir(o->job.config->monitor_dir, live->base); // too long: nothing below it will fit
    // Again where somebody has just removed a directory that was left empty.
    for (int turn = 0, n = 0; live->fd < 0 && n < 2 * N_TRIES; n++) {
        if (!appear(live, job, turn) && errno == EEXIST) {
            turn++;
        } else if (live->fd < 0 && errno != ENOENT) {
            break;
        }
    }
    if (live->fd < 0) {
        tell_why_not(live);
        free(live);
        return NULL;
    }
    if (o->job.local_rank == 0) {
        live_clean(live->base, NULL);
    }
    return live;
}

static void drop(client_t *c)
{
    if (c->fd >= 0) {
        fd_close(c->fd);
        c->fd = -1;
    }
    c->n_read = c->n_sent = 0;
    buf_clear(&c->answer);
}

void live_close(live_t *live)
{
    if (live == NULL) {
        return;
    }
    for (int i = 0; i < LIVE_CLIENTS; i++) {
        drop(&live->clients[i]);
        buf_free(&live->clients[i].answer);
    }
    fd_close(live->fd);
    unlink(live->path);
    if (live->observe->job.ended->status != HVD_SHUTDOWN) {
        live_clean_job(live->dir); // who died could not tidy up
    }
    rmdir(live->dir); // unless somebody is left in it
    live_remove_base(live->base);
    free(live);
}

const char *live_path(const live_t *live)
{
    return live != NULL ? live->path : "";
}

// --- Serving -------------------------------------------------------------------------------------

static void page_metrics(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    (void)scratch;
    counters_page(o, out);
}

static void page_status(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    recorder_snapshot(o, scratch);
    snapshot_status(o, scratch, out);
}

static void page_recorder(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    recorder_snapshot(o, scratch);
    snapshot_page(o, scratch, out, NULL);
}

static const struct page {
    const char *path, *type;
    void (*print)(observe_t *o, snapshot_t *scratch, buf_t *out);
} pages[] = {
    {"/metrics", "text/plain; version=0.0.4", page_metrics},
    {"/status", "text/plain", page_status},
    {"/recorder", "text/plain", page_recorder},
};

static void answer(live_t *live, client_t *c, snapshot_t *scratch)
{
    buf_t body = {0};
    const char *result = "404 Not Found";
    const char *type = "text/plain";
    for (size_t i = 0; i < N_ELEMENTS(pages); i++) {
        size_t n = strlen(pages[i].path);
        bool asked = strncmp(c->request, "GET ", 4) == 0 &&
                     strncmp(c->request + 4, pages[i].path, n) == 0 &&
                     strchr(" ?\r\n", c->request[4 + n]) != NULL;
        if (asked) {
            result = "200 OK";
            type = pages[i].type;
            pages[i].print(live->observe, scratch, &body);
        }
    }
    if (result[0] != '2') {
        buf_printf(&body, "there are /metrics, /status and /recorder\n");
    }
    buf_printf(&c->answer, "HTTP/1.0 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", result,
               type, body.len);
    buf_append(&c->answer, body.data != NULL ? body.data : (const void *)"", body.len);
    buf_free(&body);
}

// An empty line ends the request: closing a socket with bytes unread would cut the answer off.
static bool is_whole(const client_t *c)
{
    return strstr(c->request, "\r\n\r\n") != NULL || strstr(c->request, "\n\n") != NULL;
}

// False: it is done with, or of no use.
static bool serve(live_t *live, client_t *c, snapshot_t *scratch)
{
    if (c->answer.len == 0) {
        ssize_t n = recv(c->fd, c->request + c->n_read, sizeof c->request - 1 - c->n_read, 0);
        if (n <= 0) {
            return n < 0 && (errno == EAGAIN || errno == EINTR);
        }
        c->n_read += (size_t)n;
        c->request[c->n_read] = '\0';
        if (!is_whole(c)) {
            return c->n_read < sizeof c->request - 1;
        }
        answer(live, c, scratch);
        if (c->answer.failed) {
            return false;
        }
    }
    ssize_t n = send(c->fd, c->answer.data + c->n_sent, c->answer.len - c->n_sent, MSG_NOSIGNAL);
    c->n_sent += n > 0 ? (size_t)n : 0;
    return c->n_sent < c->answer.len && (n >= 0 || errno == EAGAIN || errno == EINTR);
}

static client_t *free_client(live_t *live)
{
    for (int i = 0; i < LIVE_CLIENTS; i++) {
        if (live->clients[i].fd < 0) {
            return &live->clients[i];
        }
    }
    return NULL;
}

void live_serve(live_t *live, snapshot_t *scratch)
{
    client_t *c;
    while ((c = free_client(live)) != NULL &&
           (c->fd = accept4(live->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        fd_not_for_children(c->fd);
        c->deadline_ns = clock_ns() + PATIENCE_NS;
    }
    for (int i = 0; i < LIVE_CLIENTS; i++) {
        c = &live->clients[i];
        if (c->fd >= 0 && (!serve(live, c, scratch) || clock_ns() >= c->deadline_ns)) {
            drop(c);
        }
    }
}

int live_wants(const live_t *live, struct pollfd fds[1 + LIVE_CLIENTS])
{
    int n = 0;
    bool has_room = false;
    for (int i = 0; i < LIVE_CLIENTS; i++) {
        const client_t *c = &live->clients[i];
        has_room |= c->fd < 0;
        if (c->fd >= 0) {
            fds[n++] = (struct pollfd){.fd = c->fd, .events = c->answer.len > 0 ? POLLOUT : POLLIN};
        }
    }
    if (has_room) {
        fds[n++] = (struct pollfd){.fd = live->fd, .events = POLLIN};
    }
    return n;
}

uint64_t live_deadline_ns(const live_t *live)
{
    uint64_t first_ns = NEVER_NS;
    for (int i = 0; i < LIVE_CLIENTS; i++) {
        if (live->clients[i].fd >= 0) {
            first_ns = MIN(first_ns, live->clients[i].deadline_ns);
        }
    }
    return first_ns;
}
