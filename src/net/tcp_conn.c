// SPDX-License-Identifier: Apache-2.0
//
// tcp_conn.c - one connection, from its first packet to the proof of the secret.
//
//   CONNECTING -> GREETING -> READY
//   who came in by the door has been greeted there, and begins at READY
//
// Each state has a step in a table: it moves on as far as the socket allows and says whether the
// next step may try. epoll watches every socket once, edge-triggered, for everything; the flags
// readable and writable remember what it said, and whoever uses them takes them down.
// The connection owns its socket and its TLS state; the list or link that points to it owns it.
#define _GNU_SOURCE
#include "net/tcp.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

// --- Steps ---------------------------------------------------------------------------------------
// HVD_OK: the state has advanced; HVD_IN_PROGRESS: waits for the socket; else refused.

static hvd_status_t finish_connect(conn_t *conn, err_t *err)
{
    int code = 0;
    socklen_t code_bytes = sizeof code;
    if (!conn->writable) {
        return HVD_IN_PROGRESS;
    }
    getsockopt(conn->watch.fd, SOL_SOCKET, SO_ERROR, &code, &code_bytes);
    if (code != 0) {
        return fail_errno(err, code, "cannot connect");
    }
    conn->state = CONN_GREETING;
    return HVD_OK;
}

static void conn_ready(conn_t *conn, secure_t *secure, const hello_t *hello)
{
    conn->state = CONN_READY;
    conn->hello = *hello;
    conn->secure = secure;
    if (!hello->encrypted) {
        secure_free(secure);
        conn->secure = NULL;
    }
}

static hvd_status_t greet(conn_t *conn, err_t *err)
{
    hvd_status_t status = greeting_step(&conn->greeting, err);
    if (status == HVD_OK) {
        conn_ready(conn, conn->greeting.secure, &conn->greeting.hello);
        conn->greeting.secure = NULL;
    }
    return status;
}

static hvd_status_t (*const steps[CONN_READY])(conn_t *conn, err_t *err) = {
    [CONN_CONNECTING] = finish_connect,
    [CONN_GREETING] = greet,
};

static void conn_drive(conn_t *conn)
{
    hvd_status_t status = HVD_OK;
    err_t err = {0};
    while (status == HVD_OK && conn->state < CONN_READY) {
        status = steps[conn->state](conn, &err);
    }
    if (status == HVD_OK) {
        dial_won(conn);
    } else if (status != HVD_IN_PROGRESS) {
        dial_failed(conn, &err);
    }
}

bool conn_event(conn_t *conn, uint32_t events)
{
    const uint32_t ends = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
    bool readable = conn->readable || (events & (EPOLLIN | ends)) != 0;
    bool writable = conn->writable || (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
    bool hangup = conn->hangup || (events & ends) != 0;
    if ((events & (EPOLLIN | ends)) != 0 && conn->secure != NULL) {
        secure_has_more(conn->secure); // else what it gives from its own store would hide the edge
    }
    // Movers that tried without waiting for an edge have often used up what it tells.
    if (readable == conn->readable && writable == conn->writable && hangup == conn->hangup &&
        conn->state == CONN_READY) {
        return false;
    }
    conn->readable = readable;
    conn->writable = writable;
    conn->hangup = hangup;
    if (conn->state < CONN_READY) {
        conn_drive(conn);
    } else if (conn->state == CONN_READY && conn->link != NULL) {
        tcp_link_event(conn->link);
    }
    return true;
}

// --- Life ----------------------------------------------------------------------------------------

// Takes the descriptor over; on failure it is closed.
static conn_t *conn_new(domain_t *domain, int fd, err_t *err)
{
    conn_t *conn = calloc(1, sizeof *conn);
    if (conn == NULL) {
        fd_close(fd);
        fail(err, HVD_NO_MEMORY, "no memory for a connection");
        return NULL;
    }
    conn->watch = (watch_t){.kind = WATCH_CONN, .fd = fd};
    conn->knock_fd = -1;
    conn->domain = domain;
    conn->started_ns = clock_ns();
    if (tcp_watch(domain, &conn->watch, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, err) != HVD_OK) {
        fd_close(fd);
        free(conn);
        return NULL;
    }
    return conn;
}

conn_t *conn_accepted(domain_t *domain, const guest_t *guest, err_t *err)
{
    conn_t *conn = conn_new(domain, guest->fd, err);
    if (conn == NULL) {
        secure_free(guest->secure);
        return NULL;
    }
    struct sockaddr_storage name = {0};
    socklen_t name_bytes = sizeof name;
    getpeername(guest->fd, (struct sockaddr *)&name, &name_bytes);
    conn->remote = tcp_addr_of_socket(&name);
    conn->started_ns = guest->since_ns;
    conn->readable = conn->writable = true; // until somebody has tried
    conn_ready(conn, guest->secure, &guest->hello);
    return conn;
}

static hvd_status_t prepare_greeting(conn_t *conn, const tcp_link_t *link, const uint8_t *token,
                                     err_t *err)
{
    const net_job_t *job = conn->domain->job;
    conn->greeting = (greeting_t){
        .fd = conn->watch.fd,
        .keys = job->keys,
        .hello = {.role = HELLO_LINK,
                  .lane = (uint8_t)link->base.lane,
                  .encrypted = tcp_encrypts(conn->domain, link->base.peer, link->base.lane),
                  .from = (uint32_t)job->rank,
                  .to = (uint32_t)link->base.peer},
    };
    memcpy(conn->greeting.hello.nonce, token, TCP_TOKEN_BYTES);
    return greeting_prepare(&conn->greeting, TCP_TOKEN_BYTES, err);
}

conn_t *conn_dial(tcp_link_t *link, const tcp_addr_t *addr, const uint8_t token[TCP_TOKEN_BYTES],
                  err_t *err)
{
    struct sockaddr_storage name;
    socklen_t name_bytes = tcp_addr_to_socket(addr, &name);
    int fd = socket(addr->family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        fail_errno(err, errno, "cannot make a socket");
        return NULL;
    }
    tcp_set_options(link->domain, fd); // buffers must have their size before the first packet
    int code = connect(fd, (struct sockaddr *)&name, name_bytes) == 0 ? 0 : errno;
    if (code != 0 && code != EINPROGRESS) {
        close(fd);
        fail_errno(err, code, "cannot connect");
        return NULL;
    }
    conn_t *conn = conn_new(link->domain, fd, err);
    if (conn != NULL) {
        conn->link = link;
        conn->remote = *addr;
        if (prepare_greeting(conn, link, token, err) != HVD_OK) {
            conn_close(conn);
            return NULL;
        }
    }
    return conn;
}

void conn_close(conn_t *conn)
{
    domain_t *domain = conn->domain;
    tcp_stop_knocking(conn);
    if (conn->state == CONN_READY) {
        if (conn->secure != NULL) {
            secure_flush(conn->secure, NULL);
        }
        // Somebody else may still hold the descriptor: say the end, do not leave it to close().
        shutdown(conn->watch.fd, SHUT_WR);
    }
    secure_free(conn->secure);
    secure_free(conn->greeting.secure);
    conn->secure = conn->greeting.secure = NULL;
    tcp_unwatch(domain, &conn->watch);
    conn->state = CONN_CLOSED;
    conn->link = NULL;
    conn->next = domain->graveyard;
    domain->graveyard = conn;
}
