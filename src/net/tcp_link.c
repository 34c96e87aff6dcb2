// SPDX-License-Identifier: Apache-2.0
//
// tcp_link.c - a link over TCP: moving bytes, and noticing the end.
//
// Three tables of movers: of a link that is on its way, which move nothing; of an encrypted one; of
// a plain one. The last two use the caller's memory directly, up to CALL_BYTES a call. peek shows
// decrypted bytes where they lie; without encryption it reads into a staging buffer that exists
// only on links that are peeked at.
//
// Whether a mover asks the socket at all: always when epoll's flag is up. When it is down, sending
// waits for it, and so does receiving unless the round is a direct one (see tcp_progress): while
// few links are asked, asking the socket is quicker than asking epoll first.
//
// A flag goes down when the socket says "not now" or moves less than asked: more will then raise a
// new edge. One exception: the end of a connection is an edge that comes only once, perhaps with
// the last data; so when a hangup was seen, reading goes on until the end itself shows.
//
// The end is reported to the domain only when everything received before it has been read: a peer's
// last words count. Sends may fail before that.
// Thread: the holder of the engine. The link owns its connection and staging buffer.
#include "net/tcp.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static const link_ops_t opening_ops, secure_ops, plain_ops;

#define CALL_BYTES MIB
#define STAGE_BYTES (260 * KIB) // a segment and the headers around it

// --- The end -------------------------------------------------------------------------------------

// Keeps the first sentence. `code` is an errno, or 0 for an orderly close.
static hvd_status_t fail_socket(tcp_link_t *link, int code)
{
    const peers_t *peers = link->domain->job->peers;
    char name[TCP_ADDR_TEXT], who[PEER_TEXT_BYTES], fate[PEER_TEXT_BYTES];
    err_t *err = &link->base.err;
    if (err->status != HVD_OK) {
        return err->status;
    }
    tcp_addr_text(&link->conn->remote, name);
    peer_name(peers, link->base.peer, who);
    peer_state(peers, link->base.peer, fate);
    if (code == 0) {
        return fail(err, HVD_PEER_LOST, "connection closed by %s at %s: %s", who, name,
                    fate[0] != '\0' ? fate : "its process ended");
    }
    if (code == ECONNRESET || code == EPIPE) {
        return fail(err, HVD_PEER_LOST, "connection reset by %s at %s: %s", who, name,
                    fate[0] != '\0' ? fate
                                    : "its process ended or was killed, or a firewall "
                                      "cut the connection");
    }
    if (code == ETIMEDOUT) {
        return fail(err, HVD_PEER_LOST,
                    "%s at %s has not answered for %.1f s: its host or the network is down "
                    "(HOROVOD_GLOO_TIMEOUT_SECONDS)",
                    who, name, link->domain->job->config->peer_timeout);
    }
    fail_errno(err, code, "lost the connection to %s at %s", who, name);
    return err->status = HVD_PEER_LOST;
}

static hvd_status_t fail_secure(tcp_link_t *link, hvd_status_t status, const err_t *found)
{
    const peers_t *peers = link->domain->job->peers;
    char who[PEER_TEXT_BYTES], fate[PEER_TEXT_BYTES] = "";
    err_t *err = &link->base.err;
    if (err->status != HVD_OK) {
        return err->status;
    }
    peer_name(peers, link->base.peer, who);
    if (status == HVD_PEER_LOST && peer_state(peers, link->base.peer, fate)[0] == '\0') {
        snprintf(fate, sizeof fate, "its process ended or was killed, or lost its network");
    }
    return fail(err, status, "%s: %s%s%.600s", who, fate, fate[0] != '\0' ? "; " : "", found->text);
}

static void tell_domain(tcp_link_t *link)
{
    domain_t *domain = link->domain;
    lane_t lane = link->base.lane;
    if (domain->broken[lane].status == HVD_OK) {
        domain->broken[lane] = link->base.err;
        domain->broken_peers[lane] = link->base.peer;
    }
    log_debug(domain->job->log, "tcp", "%s", link->base.err.text);
}

// Nothing more will be read.
static hvd_status_t end_reading(tcp_link_t *link)
{
    link->conn->readable = false;
    link->ended = true;
    tell_domain(link);
    return link->base.err.status;
}

// --- May the socket be asked ---------------------------------------------------------------------

static bool may_ask(tcp_link_t *link)
{
    domain_t *domain = link->domain;
    if (link->ended) {
        return link->conn->readable;
    }
    if (link->asked_in != domain->round) {
        link->asked_in = domain->round;
        domain->n_asked++;
    }
    return link->conn->readable || domain->direct;
}

static bool may_send(tcp_link_t *link, size_t bytes)
{
    link->domain->waits |= !link->conn->writable;
    return link->conn->writable && bytes > 0 && link->base.err.status == HVD_OK;
}

// The answer of a mover that may not ask.
static ssize_t not_now(const tcp_link_t *link)
{
    return link->ended ? (ssize_t)link->base.err.status : 0;
}

static void lower_if_drained(conn_t *conn)
{
    conn->readable = conn->hangup || !secure_drained(conn->secure);
}

// After secure_recv or secure_peek, which gave n.
static ssize_t after_secure(tcp_link_t *link, ssize_t n, const err_t *err)
{
    if (UNLIKELY(n < 0)) {
        fail_secure(link, (hvd_status_t)n, err);
        return end_reading(link);
    }
    lower_if_drained(link->conn);
    return n;
}

// --- Encrypted -----------------------------------------------------------------------------------

static ssize_t recv_secure(net_link_t *base, void *data, size_t bytes)
{
    tcp_link_t *link = (tcp_link_t *)base;
    err_t err;
    if (bytes == 0 || !may_ask(link)) {
        return bytes == 0 ? 0 : not_now(link);
    }
    bytes = MIN(bytes, CALL_BYTES);
    return after_secure(link, secure_recv(link->conn->secure, data, bytes, &err), &err);
}

static ssize_t peek_secure(net_link_t *base, const void **data_p)
{
    tcp_link_t *link = (tcp_link_t *)base;
    err_t err;
    if (!may_ask(link)) {
        return not_now(link);
    }
    return after_secure(link, secure_peek(link->conn->secure, data_p, &err), &err);
}

static void consume_secure(net_link_t *base, size_t bytes)
{
    tcp_link_t *link = (tcp_link_t *)base;
    secure_consume(link->conn->secure, bytes);
    lower_if_drained(link->conn);
}

static ssize_t send_secure(net_link_t *base, const void *data, size_t bytes)
{
    tcp_link_t *link = (tcp_link_t *)base;
    conn_t *conn = link->conn;
    err_t err;
    if (!may_send(link, bytes)) {
        return base->err.status;
    }
    bytes = MIN(bytes, CALL_BYTES);
    ssize_t n = base->more ? secure_send_later(conn->secure, data, bytes, &err)
                           : secure_send(conn->secure, data, bytes, &err);
    if (n < 0) {
        return fail_secure(link, (hvd_status_t)n, &err);
    }
    conn->writable = base->more || !secure_wants_write(conn->secure);
    link->domain->waits |= !conn->writable;
    return n;
}

// --- Plain ---------------------------------------------------------------------------------------

static ssize_t recv_plain(net_link_t *base, void *data, size_t bytes)
{
    tcp_link_t *link = (tcp_link_t *)base;
    conn_t *conn = link->conn;
    size_t n_staged = link->stage_len - link->stage_at;
    if (n_staged > 0) {
        size_t n = MIN(bytes, n_staged);
        memcpy(data, link->stage + link->stage_at, n);
        link->stage_at += n;
        return (ssize_t)n;
    }
    if (bytes == 0 || !may_ask(link)) {
        return bytes == 0 ? 0 : not_now(link); // a socket asked for nothing seems to have ended
    }
    bytes = MIN(bytes, CALL_BYTES);
    ssize_t n = recv(conn->watch.fd, data, bytes, MSG_DONTWAIT);
    if (LIKELY(n > 0)) {
        conn->readable = (size_t)n == bytes || conn->hangup;
        return n;
    }
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        conn->readable = errno == EINTR;
        return 0;
    }
    fail_socket(link, n == 0 ? 0 : errno);
    return end_reading(link);
}

static ssize_t peek_plain(net_link_t *base, const void **data_p)
{
    tcp_link_t *link = (tcp_link_t *)base;
    if (link->stage == NULL && (link->stage = malloc(STAGE_BYTES)) == NULL) {
        return fail(&base->err, HVD_NO_MEMORY, "no memory to receive from rank %d", base->peer);
    }
    if (link->stage_at == link->stage_len) {
        ssize_t n = recv_plain(base, link->stage, STAGE_BYTES);
        if (n <= 0) {
            return n;
        }
        link->stage_at = 0;
        link->stage_len = (size_t)n;
    }
    *data_p = link->stage + link->stage_at;
    return (ssize_t)(link->stage_len - link->stage_at);
}

static void consume_plain(net_link_t *base, size_t bytes)
{
    tcp_link_t *link = (tcp_link_t *)base;
    INVARIANT(link->stage_at <= link->stage_len && bytes <= link->stage_len - link->stage_at);
    link->stage_at += bytes;
}

// Of n bytes that were sent, those held back come first. How many of the others there were.
static ssize_t take_held(tcp_link_t *link, size_t n)
{
    size_t n_gone = MIN(n, link->n_held);
    link->n_held -= n_gone;
    memmove(link->held, link->held + n_gone, link->n_held);
    return (ssize_t)(n - n_gone);
}

// A header is held back until its payload comes, and both leave in one call.
static ssize_t send_plain(net_link_t *base, const void *data, size_t bytes)
{
    tcp_link_t *link = (tcp_link_t *)base;
    conn_t *conn = link->conn;
    if (!may_send(link, bytes)) {
        return base->err.status;
    }
    if (base->more && bytes <= sizeof link->held - link->n_held) {
        memcpy(link->held + link->n_held, data, bytes);
        link->n_held += bytes;
        return (ssize_t)bytes;
    }
    bytes = MIN(bytes, CALL_BYTES);
    struct iovec pieces[] = {{link->held, link->n_held}, {(void *)data, bytes}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = N_ELEMENTS(pieces)};
    ssize_t n = sendmsg(conn->watch.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (LIKELY(n >= 0)) {
        conn->writable = (size_t)n == link->n_held + bytes;
        n = take_held(link, (size_t)n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
        conn->writable = errno == EINTR;
        n = 0;
    } else {
        return fail_socket(link, errno);
    }
    link->domain->waits |= !conn->writable;
    return n;
}

// --- Events --------------------------------------------------------------------------------------

void tcp_link_event(tcp_link_t *link)
{
    conn_t *conn = link->conn;
    if (conn->secure != NULL && conn->writable && secure_wants_write(conn->secure)) {
        conn->writable = secure_flush(conn->secure, NULL) != HVD_IN_PROGRESS;
    }
    // Nobody may be reading this link now. If the end is all there is to read, find it; it may come
    // after a piece of a record.
    for (int i = 0; i < 2 && conn->hangup && !link->ended; i++) {
        const void *data;
        if (link->base.ops->peek(&link->base, &data) > 0) {
            break;
        }
    }
}

// A process of this host that ended before it had connected closes nothing here.
static void note_absent(tcp_link_t *link)
{
    const peers_t *peers = link->domain->job->peers;
    char who[PEER_TEXT_BYTES], fate[PEER_TEXT_BYTES];
    err_t err;
    peer_name(peers, link->base.peer, who);
    peer_state(peers, link->base.peer, fate);
    fail(&err, HVD_PEER_LOST, "%s: %s, before it was connected to rank %d", who,
         fate[0] != '\0' ? fate : "its process has ended", link->domain->job->rank);
    tcp_link_fail(link, &err);
}

void tcp_link_tick(tcp_link_t *link, uint64_t now_ns)
{
    double seconds = link->domain->job->config->peer_timeout;
    int peer = link->base.peer;
    err_t err;
    if (peer_is_gone(link->domain->job->peers, peer)) {
        note_absent(link);
        return;
    }
    if (now_ns < link->deadline_ns) {
        if (link->dial != NULL) {
            dial_tick(link, now_ns);
        }
        return;
    }
    if (link->dial == NULL) {
        fail(&err, HVD_PEER_LOST,
             "rank %d did not connect to rank %d within %.1f s; is it running, and can it reach "
             "this host? (HOROVOD_GLOO_IFACE, HOROVOD_GLOO_TIMEOUT_SECONDS)",
             peer, link->domain->job->rank, seconds);
    } else {
        char tried[720];
        dial_explain(link, tried, sizeof tried);
        fail(&err, HVD_PEER_LOST,
             "rank %d could not be reached within %.1f s at any of its addresses (%s); is it "
             "running, or does a firewall or HOROVOD_GLOO_IFACE keep the hosts apart?",
             peer, seconds, tried);
    }
    tcp_link_fail(link, &err);
}

void tcp_link_ready(tcp_link_t *link, conn_t *conn)
{
    char name[TCP_ADDR_TEXT];
    tcp_opening_remove(link);
    conn->link = link;
    link->conn = conn;
    link->base.ops = conn->secure != NULL ? &secure_ops : &plain_ops;
    if (conn->secure != NULL && link->mangle != NULL) {
        secure_mangle(conn->secure, link->mangle, link->mangle_arg);
    }
    tcp_addr_text(&conn->remote, name);
    log_debug(link->domain->job->log, "tcp",
              "link to rank %d lane %d at %s %s after %" PRIu64 " us", link->base.peer,
              (int)link->base.lane, name, conn->secure != NULL ? "encrypted" : "plain",
              (clock_ns() - conn->started_ns) / NS_PER_US);
    if (conn->hangup) {
        tcp_link_event(link);
    }
}

void tcp_link_fail(tcp_link_t *link, const err_t *err)
{
    tcp_opening_remove(link);
    dial_free(link);
    link->base.err = *err;
    tell_domain(link);
}

void tcp_link_cut(tcp_link_t *link, const err_t *err)
{
    link->base.err = *err;
    end_reading(link);
}

// --- Life ----------------------------------------------------------------------------------------

static void tcp_link_close(net_link_t *base)
{
    tcp_link_t *link = (tcp_link_t *)base;
    tcp_opening_remove(link);
    dial_free(link);
    if (link->conn != NULL) {
        conn_close(link->conn);
    }
    tcp_seat_free(link);
    free(link->stage);
    free(link);
}

// It may not be connected yet, but what it will be is known.
static bool tcp_on_wire(net_link_t *base, wire_mangle_fn fn, void *arg)
{
    tcp_link_t *link = (tcp_link_t *)base;
    link->mangle = fn;
    link->mangle_arg = arg;
    if (link->conn != NULL && link->conn->secure != NULL) {
        secure_mangle(link->conn->secure, fn, arg);
    }
    return tcp_encrypts(link->domain, base->peer, base->lane);
}

static const link_ops_t secure_ops = {
    .send = send_secure,
    .recv = recv_secure,
    .peek = peek_secure,
    .consume = consume_secure,
    .close = tcp_link_close,
    .on_wire = tcp_on_wire,
};

static const link_ops_t plain_ops = {
    .send = send_plain,
    .recv = recv_plain,
    .peek = peek_plain,
    .consume = consume_plain,
    .close = tcp_link_close,
    .on_wire = tcp_on_wire,
};

// A link that is on its way, or never came: HVD_OK, that is 0 bytes, or what went wrong.
static ssize_t send_nothing(net_link_t *base, const void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
    return base->err.status;
}

static ssize_t recv_nothing(net_link_t *base, void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
    return base->err.status;
}

static ssize_t peek_nothing(net_link_t *base, const void **data_p)
{
    (void)data_p;
    return base->err.status;
}

static const link_ops_t opening_ops = {
    .send = send_nothing,
    .recv = recv_nothing,
    .peek = peek_nothing,
    .close = tcp_link_close,
    .on_wire = tcp_on_wire,
};

hvd_status_t tcp_link_new(domain_t *domain, int peer, lane_t lane, tcp_link_t **link_p, err_t *err)
{
    tcp_link_t *link = calloc(1, sizeof *link);
    if (link == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a link to rank %d", peer);
    }
    link->base = (net_link_t){
        .ops = &opening_ops, .transport = transport_tcp.name, .peer = peer, .lane = lane};
    link->domain = domain;
    *link_p = link;
    return HVD_OK;
}
