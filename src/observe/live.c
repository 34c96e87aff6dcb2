// SPDX-License-Identifier: Apache-2.0
//
// live.c - a Unix socket where a rank shows what it is doing, for hvd-info, curl and Prometheus.
//
//   hvd-<uid>/<job>/rank-<N>     an abstract name: no file, and gone with its process
//
// Everybody in the network namespace can take or reach such a name, so both sides ask the kernel
// whose process is at the other end (live_peer_is). A rank answers its own user and root; nothing
// can be changed through the socket. It speaks just enough HTTP: GET of a page, one answer, closed.
// At most LIVE_CLIENTS are served at a time, each for two seconds, and the others wait in the
// kernel's queue. Thread: the monitor thread.
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
#define JOB_BYTES 72   // with the rest of LIVE_NAME it fits
#define N_TRIES 8      // jobs of one name at a time
#define NUMBER_BYTES 4 // of what is behind the name then

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
    char name[LIVE_NAME_BYTES];
    client_t clients[LIVE_CLIENTS];
};

// --- Names ---------------------------------------------------------------------------------------

// A socket that is bound or connected to the name, as `join` does it, or -1 with errno.
static int open_socket(int (*join)(int, const struct sockaddr *, socklen_t), const char *name)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX}; // a NUL in front makes it abstract
    size_t bytes = strnlen(name, sizeof address.sun_path - 1);
    memcpy(address.sun_path + 1, name, bytes);
    socklen_t used = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + bytes);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && join(fd, (struct sockaddr *)&address, used) != 0) {
        int code = errno;
        close(fd);
        errno = code;
        return -1;
    }
    return fd;
}

int live_connect(const char *name)
{
    return open_socket(connect, name);
}

bool live_peer_is(int fd, unsigned uid, live_peer_t *peer_p)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
        return false;
    }
    *peer_p = (live_peer_t){.pid = (int)peer.pid, .uid = peer.uid};
    return peer.uid == uid || peer.uid == 0;
}

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

// --- Listening -----------------------------------------------------------------------------------

// At the first name that is free: a job of the same name has a number behind it.
static bool listen_at_name(live_t *live)
{
    char job[JOB_BYTES + NUMBER_BYTES];
    name_of_job(live->observe, job);
    size_t bytes = strlen(job);
    for (int n = 1; live->fd < 0 && n <= N_TRIES && (n == 1 || errno == EADDRINUSE); n++) {
        if (n > 1) {
            snprintf(job + bytes, NUMBER_BYTES, "-%d", n);
        }
        snprintf(live->name, sizeof live->name, LIVE_NAME, (unsigned)geteuid(), job,
                 live->observe->job.rank);
        live->fd = open_socket(bind, live->name);
    }
    fd_not_for_children(live->fd);
    return live->fd >= 0 && listen(live->fd, 16) == 0;
}

live_t *live_open(observe_t *o)
{
    live_t *live = o->job.config->monitor ? calloc(1, sizeof *live) : NULL;
    if (live == NULL) {
        return NULL;
    }
    live->observe = o;
    live->fd = -1;
    for (int i = 0; i < LIVE_CLIENTS; i++) {
        live->clients[i].fd = -1;
    }
    if (!listen_at_name(live)) {
        log_info(o->job.log, "monitor", "no live state at '%s': %s", live->name, strerror(errno));
        live_close(live);
        return NULL;
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
    if (live->fd >= 0) {
        shutdown(live->fd, SHUT_RDWR); // a child that was just forked may have it for a moment
        fd_close(live->fd);
    }
    free(live);
}

const char *live_name(const live_t *live)
{
    return live != NULL ? live->name : "";
}

// --- Serving -------------------------------------------------------------------------------------

static void page_metrics(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    (void)scratch;
    counters_page(o, METRICS_PROMETHEUS, out);
}

static void page_openmetrics(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    (void)scratch;
    counters_page(o, METRICS_OPEN, out);
}

static void page_status(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    recorder_snapshot(o, scratch);
    snapshot_status(o, scratch, MAX_FLIGHTS, out);
}

static void page_recorder(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    recorder_snapshot(o, scratch);
    snapshot_page(o, scratch, out, NULL);
}

static void page_where(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    recorder_snapshot(o, scratch);
    snapshot_where(o, scratch, out);
}

static void page_watch(observe_t *o, snapshot_t *scratch, buf_t *out)
{
    recorder_snapshot(o, scratch);
    watch_page(o, scratch, out);
}

static const struct page {
    const char *path, *type;
    void (*print)(observe_t *o, snapshot_t *scratch, buf_t *out);
} pages[] = {
    {"/metrics", "text/plain; version=0.0.4", page_metrics},
    {"/openmetrics", "application/openmetrics-text; version=1.0.0; charset=utf-8",
     page_openmetrics},
    {"/status", "text/plain", page_status},
    {"/recorder", "text/plain", page_recorder},
    {"/where", "text/plain", page_where},
    {"/watch", "text/plain", page_watch},
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
        buf_printf(&body, "try /metrics, /openmetrics, /status, /recorder or /where\n");
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

static void greet(const live_t *live, client_t *c)
{
    live_peer_t peer = {0};
    fd_not_for_children(c->fd);
    c->deadline_ns = clock_ns() + PATIENCE_NS;
    if (!live_peer_is(c->fd, geteuid(), &peer)) {
        log_info(live->observe->job.log, "monitor",
                 "refused a client of another user: process %d of user %u", peer.pid, peer.uid);
        drop(c);
    }
}

void live_serve(live_t *live, snapshot_t *scratch)
{
    client_t *c;
    while ((c = free_client(live)) != NULL &&
           (c->fd = accept4(live->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        greet(live, c);
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
