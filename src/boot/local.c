// SPDX-License-Identifier: Apache-2.0
//
// local.c - the ticket of a job that lives on one host, over a local socket.
//
// The name is abstract (it lives in the kernel, not in a folder): "hvd-<user>-<hash of the job>".
// Another user can take a name first, and so keep a job from starting, but can neither get a ticket
// nor give one: SO_PEERCRED is the kernel's word. A taker connects again and again until rank 0
// listens, and a giver waits for a name that is still held by the same job's last run.
#define _GNU_SOURCE
#include "boot/local.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define RETRY_US 20000
#define BACKLOG 1024

static socklen_t name_of(const char *job, struct sockaddr_un *name)
{
    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    // The first byte stays zero: that makes it abstract.
    int bytes = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "hvd-%u-%016llx",
                         (unsigned)geteuid(), (unsigned long long)hash_bytes(job, strlen(job), 0));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)bytes);
}

static bool is_same_user(int fd)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

static bool wait_readable(int fd, uint64_t deadline_ns)
{
    for (;;) {
        struct pollfd polled = {.fd = fd, .events = POLLIN};
        uint64_t now_ns = clock_ns();
        if (now_ns >= deadline_ns) {
            return false;
        }
        if (poll(&polled, 1, (int)MIN((deadline_ns - now_ns) / NS_PER_MS + 1, 1000)) > 0) {
            return true;
        }
    }
}

// --- Rank 0 --------------------------------------------------------------------------------------

static hvd_status_t listen_at(const char *job, uint64_t deadline_ns, int *fd_p, err_t *err)
{
    struct sockaddr_un name;
    socklen_t bytes = name_of(job, &name);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return fail_errno(err, errno, "cannot create a local socket");
    }
    while (bind(fd, (struct sockaddr *)&name, bytes) != 0) {
        int code = errno;
        if (code != EADDRINUSE || clock_ns() >= deadline_ns) {
            close(fd);
            return fail_errno(err, code,
                              "rank 0 cannot use the local socket @%s, where the ranks of this "
                              "host meet; is another job running with the same name or port? Set "
                              "HOROVOD_SECRET_FILE and HOROVOD_RENDEZVOUS_PORT to avoid this",
                              name.sun_path + 1);
        }
        usleep(RETRY_US);
    }
    if (listen(fd, BACKLOG) != 0) {
        int code = errno;
        close(fd);
        return fail_errno(err, code, "cannot listen on a local socket");
    }
    *fd_p = fd;
    return HVD_OK;
}

// Whether one that came was given the ticket: it is small, so the socket takes it whole.
static bool serve_next(int listener, const char *ticket)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    size_t bytes = strlen(ticket);
    bool given =
        is_same_user(fd) && send(fd, ticket, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
    close(fd);
    return given;
}

hvd_status_t local_give(const char *job, const char *ticket, int n_others, uint64_t deadline_ns,
                        err_t *err)
{
    int listener = -1, n_given = 0;
    hvd_status_t status = listen_at(job, deadline_ns, &listener, err);
    if (status != HVD_OK) {
        return status;
    }
    while (n_given < n_others) {
        if (!wait_readable(listener, deadline_ns)) {
            status = fail(err, HVD_TIMEOUT,
                          "only %d of %d ranks called init in time; let every rank call it, or "
                          "raise HOROVOD_START_TIMEOUT",
                          n_given + 1, n_others + 1);
            break;
        }
        n_given += serve_next(listener, ticket);
    }
    close(listener);
    return status;
}

// --- The others ----------------------------------------------------------------------------------

// A socket that rank 0 accepts, or -1 if it does not listen yet.
static int connect_once(const char *job)
{
    struct sockaddr_un name;
    socklen_t bytes = name_of(job, &name);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&name, bytes) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

// All there is until the end.
static bool read_ticket(int fd, uint64_t deadline_ns, char ticket[TICKET_BYTES])
{
    size_t len = 0;
    while (len < TICKET_BYTES - 1 && wait_readable(fd, deadline_ns)) {
        ssize_t n = read(fd, ticket + len, TICKET_BYTES - 1 - len);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            break;
        }
        len += n > 0 ? (size_t)n : 0;
    }
    ticket[len] = '\0';
    return len > 0;
}

hvd_status_t local_take(const char *job, uint64_t deadline_ns, char ticket[TICKET_BYTES],
                        err_t *err)
{
    bool taken = false;
    while (!taken) {
        int fd = connect_once(job);
        if (fd >= 0 && !is_same_user(fd)) {
            close(fd);
            return fail(err, HVD_UNAUTHENTICATED,
                        "another user's process answers in place of rank 0; find out who runs it, "
                        "or set HOROVOD_SECRET_FILE and HOROVOD_RENDEZVOUS_PORT");
        }
        if (fd >= 0) {
            taken = read_ticket(fd, deadline_ns, ticket);
            close(fd);
        }
        if (!taken && clock_ns() >= deadline_ns) {
            return fail(err, HVD_TIMEOUT,
                        "rank 0 did not call init on this host in time; let every rank call it, or "
                        "raise HOROVOD_START_TIMEOUT");
        }
        if (!taken) {
            usleep(RETRY_US);
        }
    }
    return HVD_OK;
}
