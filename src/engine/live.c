// SPDX-License-Identifier: Apache-2.0
//
// live.c - a Unix socket where a rank shows what it is doing, for hvd-info, curl and Prometheus.
//
//   <base>/<job>/rank-<N>.sock     base: HOROVOD_MONITOR_DIR, or /tmp/hvd-<uid>
//
// Who leaves last removes <job>, and /tmp/hvd-<uid> with the last job of the user.
// The directories belong to the user alone; that is all the protection there is, and all it takes:
// nothing can be changed through the socket. It speaks just enough HTTP: GET of a page, one answer,
// closed. At most LIVE_CLIENTS are served at a time, each for two seconds, and the others wait in
// the kernel's queue. A socket gets its name when it already listens, so one that refuses belongs
// to a process that is gone, and whoever finds it may remove it: the next job that starts,
// hvd-info, and a rank that leaves a failed job. That rank may come before the kernel has closed
// the socket of one that was killed: the process that listens is asked for, too.
// Threads: the monitor thread; the last three functions of engine.h any.
#define _GNU_SOURCE
#include "engine/engine.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
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
    hvd_ctx_t *ctx;
    int fd;
    char dir[LIVE_PATH_BYTES];
    char path[LIVE_PATH_BYTES];
    client_t clients[LIVE_CLIENTS];
};

// --- Files ---------------------------------------------------------------------------------------

static bool is_base_given(const config_t *config)
{
    return config->monitor_dir != NULL && config->monitor_dir[0] != '\0';
}

void live_base_dir(const config_t *config, char path[LIVE_PATH_BYTES])
{
    if (is_base_given(config)) {
        snprintf(path, LIVE_PATH_BYTES, "%s", config->monitor_dir);
    } else {
        snprintf(path, LIVE_PATH_BYTES, "/tmp/hvd-%u", (unsigned)getuid());
    }
}

int live_connect(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        int code = errno;
        close(fd);
        errno = code;
        return -1;
    }
    return fd;
}

bool live_remove_if_dead(const char *path)
{
    struct ucred listener;
    socklen_t bytes = sizeof listener;
    int fd = live_connect(path);
    bool is_dead = fd < 0 && errno == ECONNREFUSED;
    if (fd >= 0) {
        is_dead = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &listener, &bytes) == 0 &&
                  process_is_ending((int)listener.pid);
        close(fd);
    }
    return is_dead && unlink(path) == 0;
}

static void clean_job(const char *dir)
{
    DIR *folder = opendir(dir);
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char path[LIVE_PATH_BYTES + sizeof entry->d_name + 1];
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        if (strncmp(entry->d_name, "rank-", 5) == 0) {
            live_remove_if_dead(path);
        }
    }
    if (folder != NULL) {
        closedir(folder);
        rmdir(dir); // unless somebody is left in it
    }
}

static void clean_all(const char *base)
{
    DIR *folder = opendir(base);
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char path[LIVE_PATH_BYTES];
        int n = snprintf(path, sizeof path, "%s/%s", base, entry->d_name);
        if (entry->d_name[0] != '.' && n < (int)sizeof path) {
            clean_job(path);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

// Ours and nobody else's, made if it is not there.
static bool own_dir(const hvd_ctx_t *ctx, const char *path)
{
    struct stat seen;
    if ((mkdir(path, 0700) != 0 && errno != EEXIST) || lstat(path, &seen) != 0) {
        return false; // ENOENT: somebody removed it, or the one above, since it was empty
    }
    if (!S_ISDIR(seen.st_mode) || seen.st_uid != geteuid() ||
        (seen.st_mode & 077) != 0) {
        log_warn(&ctx->log, "monitor",
                 "no live state: '%s' must be a directory of mode 0700 that belongs to user %u; "
                 "set HOROVOD_MONITOR_DIR to another one",
                 path, (unsigned)geteuid());
        errno = EPERM;
        return false;
    }
    return true;
}

static void name_of_job(const hvd_ctx_t *ctx, char name[JOB_BYTES])
{
    const char *given = ctx->config.job_id;
    if (given != NULL && given[0] != '\0') {
        size_t n = 0;
        for (; given[n] != '\0' && n + 1 < JOB_BYTES; n++) {
            bool plain = isalnum((unsigned char)given[n]) || (n > 0 && strchr("._-", given[n]));
            name[n] = plain ? given[n] : '_';
        }
        name[n] = '\0';
    } else if (ctx->keys != NULL) {
        const uint8_t *id = secure_keys_job(ctx->keys);
        snprintf(name, JOB_BYTES, "job-%02x%02x%02x%02x", id[0], id[1], id[2], id[3]);
    } else {
        snprintf(name, JOB_BYTES, "pid-%d", (int)getpid());
    }
}

// --- Listening -----------------------------------------------------------------------------------

static int listen_at(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    memcpy(address.sun_path, path, strlen(path) + 1);
    if (fd >= 0 && (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 ||
                    listen(fd, 16) != 0)) {
        int code = errno;
        close(fd);
        errno = code;
        return -1;
    }
    return fd;
}

// Under a name nobody looks at until it listens.
static bool appear(live_t *live, const char *base, const char *job, int turn)
{
    char hidden[LIVE_PATH_BYTES];
    int rank = live->ctx->job.rank;
    char suffix[16] = "";
    if (turn > 0) {
        snprintf(suffix, sizeof suffix, "-%d", turn + 1);
    }
    int n = snprintf(live->dir, sizeof live->dir, "%s/%s%s", base, job, suffix);
    int m = snprintf(hidden, sizeof hidden, "%s/.%d-%d", live->dir, rank, (int)getpid());
    int k = snprintf(live->path, sizeof live->path, "%s/rank-%d.sock", live->dir, rank);
    if (MAX(MAX(n, m), k) >= LIVE_PATH_BYTES) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (!own_dir(live->ctx, base) || !own_dir(live->ctx, live->dir) ||
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

live_t *live_open(hvd_ctx_t *ctx)
{
    char base[LIVE_PATH_BYTES];
    char job[JOB_BYTES];
    live_t *live = calloc(1, sizeof *live);
    if (live == NULL || !ctx->config.monitor) {
        free(live);
        return NULL;
    }
    live->ctx = ctx;
    live->fd = -1;
    for (int i = 0; i < LIVE_CLIENTS; i++) {
        live->clients[i].fd = -1;
    }
    live_base_dir(&ctx->config, base);
    name_of_job(ctx, job);
    // Again where somebody has just removed a directory that was left empty.
    for (int turn = 0, n = 0; live->fd < 0 && n < 2 * N_TRIES; n++) {
        if (!appear(live, base, job, turn) && errno == EEXIST) {
            turn++;
        } else if (live->fd < 0 && errno != ENOENT) {
            break;
        }
    }
    if (live->fd < 0) {
        log_info(&ctx->log, "monitor", "no live state at '%s': %s", live->path, strerror(errno));
        free(live);
        return NULL;
    }
    if (ctx->job.local_rank == 0) {
        clean_all(base);
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
    bool failed = live->ctx->ended.status != HVD_SHUTDOWN;
    if (failed) {
        clean_job(live->dir); // who died could not tidy up
    } else {
        rmdir(live->dir);
    }
    if (!is_base_given(&live->ctx->config)) {
        char base[LIVE_PATH_BYTES];
        live_base_dir(&live->ctx->config, base);
        rmdir(base);
    }
    free(live);
}

const char *live_path(const live_t *live)
{
    return live != NULL ? live->path : "";
}

// --- Serving -------------------------------------------------------------------------------------

static void page_metrics(hvd_ctx_t *ctx, snapshot_t *scratch, buf_t *out)
{
    (void)scratch;
    counters_page(ctx, out);
}

static void page_status(hvd_ctx_t *ctx, snapshot_t *scratch, buf_t *out)
{
    recorder_snapshot(ctx, scratch);
    snapshot_status(ctx, scratch, out);
}

static void page_recorder(hvd_ctx_t *ctx, snapshot_t *scratch, buf_t *out)
{
    recorder_snapshot(ctx, scratch);
    snapshot_page(ctx, scratch, out);
}

static const struct page {
    const char *path, *type;
    void (*print)(hvd_ctx_t *ctx, snapshot_t *scratch, buf_t *out);
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
            pages[i].print(live->ctx, scratch, &body);
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
