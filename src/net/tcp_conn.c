// SPDX-License-Identifier: Apache-2.0
//
// tcp_conn.c - one connection, from its first packet to the proof of the secret.
//
//   CONNECTING -> HELLO -> SHAKING -> READY
//   an accepted socket begins at HELLO
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

#define NEWCOMER_NS (2 * NS_PER_S) // from being accepted to the proof of the secret

static void conn_drive(conn_t *conn);

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
    conn->state = CONN_HELLO;
    return HVD_OK;
}

static hvd_status_t begin_tls(conn_t *conn, err_t *err)
{
    hvd_status_t status = secure_new(conn->domain->job->keys, conn->watch.fd, conn->is_server,
                                     conn->hello_bytes, &conn->secure, err);
    if (status == HVD_OK) {
        conn->state = CONN_SHAKING;
    }
    return status;
}

static hvd_status_t admit(conn_t *conn, err_t *err)
{
    hvd_status_t status = hello_decode(conn->hello_bytes, &conn->hello, err);
    if (status == HVD_OK) {
        status = tcp_admit(conn->domain, &conn->hello, err);
    }
    return status == HVD_OK ? begin_tls(conn, err) : status;
}

// The client sends its hello, the server receives it; either may take several calls.
static hvd_status_t move_hello(conn_t *conn, err_t *err)
{
    uint8_t *at = conn->hello_bytes + conn->n_hello_bytes;
    size_t left = HELLO_BYTES - conn->n_hello_bytes;
    ssize_t n = conn->is_server ? recv(conn->watch.fd, at, left, MSG_DONTWAIT)
                                : send(conn->watch.fd, at, left, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return HVD_IN_PROGRESS;
    }
    if (n < 0 && errno != EINTR) {
        return fail_errno(err, errno, "lost before the greeting");
    }
    if (n == 0) {
        return fail(err, HVD_PEER_LOST, "closed before the greeting");
    }
    conn->n_hello_bytes += n > 0 ? (size_t)n : 0;
    if (conn->n_hello_bytes < HELLO_BYTES) {
        return HVD_OK; // once more
    }
    return conn->is_server ? admit(conn, err) : begin_tls(conn, err);
}

static hvd_status_t shake(conn_t *conn, err_t *err)
{
    hvd_status_t status = secure_handshake(conn->secure, err);
    if (status != HVD_OK) {
        return status;
    }
    conn->state = CONN_READY;
    if (!conn->hello.encrypted) {
        secure_plain(conn->secure);
        secure_free(conn->secure);
        conn->secure = NULL;
    }
    return HVD_OK;
}

static hvd_status_t (*const steps[CONN_READY])(conn_t *conn, err_t *err) = {
    [CONN_CONNECTING] = finish_connect,
    [CONN_HELLO] = move_hello,
    [CONN_SHAKING] = shake,
};

static void conn_drive(conn_t *conn)
{
    hvd_status_t status = HVD_OK;
    err_t err = {0};
    while (status == HVD_OK && conn->state < CONN_READY) {
        status = steps[conn->state](conn, &err);
    }
    if (status == HVD_OK) {
        (conn->is_server ? tcp_established : dial_won)(conn);
    } else if (status != HVD_IN_PROGRESS) {
        (conn->is_server ? tcp_turned_away : dial_failed)(conn, &err);
    }
}

// A peer believes in its link once it has sent the last bytes of the handshake. They may have come
// while this process was held up: they are read before the connection is cut.
void conn_expire(conn_t *conn)
{
    err_t err;
    conn_drive(conn);
    if (conn->state < CONN_READY) {
        fail(&err, HVD_UNAUTHENTICATED, "it did not prove the job's secret in time");
        tcp_turned_away(conn, &err);
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
static conn_t *conn_new(domain_t *domain, int fd, const tcp_addr_t *remote, err_t *err)
{
    conn_t *conn = calloc(1, sizeof *conn);
    if (conn == NULL) {
        close(fd);
        fail(err, HVD_NO_MEMORY, "no memory for a connection");
        return NULL;
    }
    conn->watch = (watch_t){.kind = WATCH_CONN, .fd = fd};
    conn->domain = domain;
    conn->remote = *remote;
    conn->started_ns = clock_ns();
    if (tcp_watch(domain, &conn->watch, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, err) != HVD_OK) {
        close(fd);
        free(conn);
        return NULL;
    }
    return conn;
}

conn_t *conn_accepted(domain_t *domain, int fd, const tcp_addr_t *remote, err_t *err)
{
    tcp_set_options(domain, fd);
    conn_t *conn = conn_new(domain, fd, remote, err);
    if (conn != NULL) {
        conn->is_server = true;
        conn->state = CONN_HELLO;
        conn->deadline_ns = conn->started_ns + NEWCOMER_NS;
    }
    return conn;
}

static hvd_status_t write_hello(conn_t *conn, tcp_link_t *link, const uint8_t *token, err_t *err)
{
    const net_job_t *job = conn->domain->job;
    hello_t *hello = &conn->hello;
    *hello = (hello_t){
        .role = HELLO_LINK,
        .lane = (uint8_t)link->base.lane,
        .encrypted = tcp_encrypts(conn->domain, link->base.peer, link->base.lane),
        .from = (uint32_t)job->rank,
        .to = (uint32_t)link->base.peer,
        .epoch = job->epoch,
    };
    memcpy(hello->job, secure_keys_job(job->keys), sizeof hello->job);
    memcpy(hello->nonce, token, TCP_TOKEN_BYTES);
    hvd_status_t status =
        random_bytes(hello->nonce + TCP_TOKEN_BYTES, sizeof hello->nonce - TCP_TOKEN_BYTES, err);
    hello_encode(hello, conn->hello_bytes);
    return status;
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
    conn_t *conn = conn_new(link->domain, fd, addr, err);
    if (conn != NULL) {
        conn->link = link;
        if (write_hello(conn, link, token, err) != HVD_OK) {
            conn_close(conn);
            return NULL;
        }
    }
    return conn;
}

void conn_close(conn_t *conn)
{
    domain_t *domain = conn->domain;
    if (conn->state == CONN_READY) {
        if (conn->secure != NULL) {
            secure_flush(conn->secure, NULL);
        }
        // Somebody else may still hold the descriptor: say the end, do not leave it to close().
        shutdown(conn->watch.fd, SHUT_WR);
    }
    secure_free(conn->secure);
    conn->secure = NULL;
    tcp_unwatch(domain, &conn->watch);
    conn->state = CONN_CLOSED;
    conn->link = NULL;
    conn->prev = NULL;
    conn->next = domain->graveyard;
    domain->graveyard = conn;
}
