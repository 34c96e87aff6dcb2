// SPDX-License-Identifier: Apache-2.0
//
// secure.c - bytes over a connection whose peer has proved the job's secret (tls.c): records
// (record.c, which says why and why that is sound).
//
// Sending: a record is sealed from the caller's memory into `out` and sent; what the socket does
// not take waits there. Receiving: recv() fills `in`, each call asking for the rest of a record and
// the header of the next, so that bulk data is never moved; a record is opened straight into the
// caller's memory if it fits there, else in its own place, where secure_peek shows it.
//
// Cost: AES-128-GCM, and the kernel's copy from or to a buffer that stays in the core's cache; one
// system call a record, or fewer while messages are small. Buffers grow to a record's size with
// use.
//
// Signals: sockets are written with MSG_NOSIGNAL; no disposition is touched.
#define _GNU_SOURCE
#include "wire/tls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

// The receiving buffer: at first for small messages, later for a record that comes after some.
#define FIRST_IN_BYTES (4 * KIB)
#define SLACK_BYTES (4 * KIB)
#define HELD_MAX_BYTES 128 // that secure_send_later keeps back, sealed

// --- The socket ----------------------------------------------------------------------------------

ssize_t secure_socket_recv(secure_t *s, void *data, size_t bytes)
{
    ssize_t n;
    do {
        n = recv(s->fd, data, bytes, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n > 0) {
        return n;
    }
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return 0;
    }
    if (n == 0) {
        s->eof = true;
    } else {
        s->socket_errno = errno;
    }
    return -1;
}

void secure_peer_name(int fd, char *text, size_t bytes)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_storage storage;
    } name;
    socklen_t name_bytes = sizeof name;
    char host[INET6_ADDRSTRLEN];

    if (getpeername(fd, &name.any, &name_bytes) != 0) {
        snprintf(text, bytes, "a peer that is gone");
    } else if (name.any.sa_family == AF_INET) {
        inet_ntop(AF_INET, &name.v4.sin_addr, host, sizeof host);
        snprintf(text, bytes, "%s:%u", host, ntohs(name.v4.sin_port));
    } else if (name.any.sa_family == AF_INET6) {
        inet_ntop(AF_INET6, &name.v6.sin6_addr, host, sizeof host);
        snprintf(text, bytes, "[%s]:%u", host, ntohs(name.v6.sin6_port));
    } else {
        snprintf(text, bytes, "a local socket");
    }
}

void secure_refuse(int fd)
{
    static const uint8_t alert[] = {
        SSL3_RT_ALERT, 3, 3, 0, 2, SSL3_AL_FATAL, SSL_AD_UNKNOWN_PSK_IDENTITY};
    // Best effort: a client that has gone meanwhile needs no answer.
    (void)send(fd, alert, sizeof alert, MSG_NOSIGNAL | MSG_DONTWAIT);
}

hvd_status_t secure_fail_lost(secure_t *s, const char *when, err_t *err)
{
    if (s->socket_errno != 0) {
        char why[128];
        const char *reason = strerror_r(s->socket_errno, why, sizeof why);
        return fail(err, HVD_PEER_LOST, "lost the connection to %s %s: %s", s->peer, when, reason);
    }
    return fail(err, HVD_PEER_LOST, "%s closed the connection %s", s->peer, when);
}

// --- Sending -------------------------------------------------------------------------------------

bool secure_wants_write(const secure_t *s)
{
    return s->wants_write || s->out_at < s->out.len;
}

static const char in_a_job[] = "in the middle of a job";

hvd_status_t secure_flush(secure_t *s, err_t *err)
{
    while (s->out_at < s->out.len) {
        ssize_t n = send(s->fd, s->out.data + s->out_at, s->out.len - s->out_at,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && !is_full(errno)) {
            s->socket_errno = errno;
            return secure_fail_lost(s, in_a_job, err);
        }
        s->out_at += n > 0 ? (size_t)n : 0;
        if (s->out_at < s->out.len) {
            return HVD_IN_PROGRESS; // it took less than offered
        }
    }
    s->out_at = 0;
    buf_clear(&s->out);
    return HVD_OK;
}

// Seals one record behind what waits.
static hvd_status_t append_record(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    size_t whole = record_bytes(bytes);
    uint8_t *record = buf_append(&s->out, NULL, whole);
    if (record == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for encrypted data");
    }
    hvd_status_t status = record_seal(&s->sealing, data, bytes, record, err);
    if (status != HVD_OK) {
        s->out.len -= whole; // half a record must never leave
    } else if (UNLIKELY(s->mangle != NULL)) {
        s->out.len -= whole - s->mangle(s->mangle_arg, record, whole);
    }
    return status;
}

void secure_mangle(secure_t *s, wire_mangle_fn fn, void *arg)
{
    s->mangle = fn;
    s->mangle_arg = arg;
}

hvd_status_t secure_rekey(secure_t *s, err_t *err)
{
    return s->is_open ? append_record(s, NULL, 0, err) : HVD_OK;
}

static hvd_status_t seal(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    if (UNLIKELY(record_key_is_worn(&s->sealing))) {
        hvd_status_t status = secure_rekey(s, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    return append_record(s, data, bytes, err);
}

ssize_t secure_send(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    size_t taken = 0;
    hvd_status_t status = HVD_OK;
    if (!s->is_open) {
        return 0;
    }
    if (s->out.len > HELD_MAX_BYTES) {
        TRY(secure_flush(s, err), out);
    }
    while (taken < bytes) {
        size_t n = MIN(bytes - taken, RECORD_MAX_BYTES);
        TRY(seal(s, (const uint8_t *)data + taken, n, err), out);
        taken += n;
        TRY(secure_flush(s, err), out);
    }
out:
    return status < 0 ? (ssize_t)status : (ssize_t)taken;
}

ssize_t secure_send_later(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    if (!s->is_open || s->out.len > 0 || bytes > HELD_MAX_BYTES / 2) {
        return secure_send(s, data, bytes, err);
    }
    hvd_status_t status = seal(s, data, bytes, err);
    return status < 0 ? (ssize_t)status : (ssize_t)bytes;
}

// --- Receiving -----------------------------------------------------------------------------------

static hvd_status_t fail_record(secure_t *s, const char *what, err_t *err)
{
    s->broken = true;
    return fail(err, HVD_PROTOCOL,
                "what came from %s %s: it was changed, repeated or lost on the way; if it happens "
                "again, look for a faulty or hostile device between the hosts",
                s->peer, what);
}

// Room for a piece of `bytes` at in_at. What has been opened there must have been consumed.
static bool make_room(secure_t *s, size_t bytes)
{
    size_t have = s->in.len - s->in_at;
    if (have == 0 || s->in_at + bytes > s->in.cap) {
        if (have > 0) {
            memmove(s->in.data, s->in.data + s->in_at, have);
        }
        s->in_at = 0;
        s->in.len = have;
    }
    return s->in_at + bytes <= s->in.cap ||
           buf_reserve(&s->in, MAX(bytes + SLACK_BYTES, FIRST_IN_BYTES) - have);
}

// Makes `wanted` bytes lie at in_at: HVD_OK when they do. Takes up to `most` if there is room.
static hvd_status_t gather(secure_t *s, size_t wanted, size_t most, err_t *err)
{
    if (s->in.len - s->in_at >= wanted) {
        return HVD_OK;
    }
    if (!make_room(s, wanted)) {
        s->in.failed = false;
        return fail(err, HVD_NO_MEMORY, "no memory for encrypted data");
    }
    while (s->in.len - s->in_at < wanted && s->may_ask) {
        size_t have = s->in.len - s->in_at;
        size_t asked = MIN(most - have, s->in.cap - s->in.len);
        ssize_t n = secure_socket_recv(s, s->in.data + s->in.len, asked);
        if (n < 0) {
            return secure_fail_lost(s, in_a_job, err);
        }
        s->in.len += (size_t)n;
        s->drained = (size_t)n < asked;
        s->may_ask = !s->drained;
    }
    return s->in.len - s->in_at >= wanted ? HVD_OK : HVD_IN_PROGRESS;
}

// Opens the next record: into `to` if it has room, else in place. *bytes_p gets the bytes at `to`.
static hvd_status_t open_next(secure_t *s, uint8_t *to, size_t room, size_t *bytes_p, err_t *err)
{
    hvd_status_t status;
    if (s->broken) {
        return fail_record(s, "did not decrypt", err);
    }
    TRY(gather(s, RECORD_HEADER_BYTES, SIZE_MAX, err), out);
    size_t bytes = record_plain_bytes(s->in.data + s->in_at);
    if (bytes > RECORD_MAX_BYTES) {
        return fail_record(s, "is not a record of this connection", err);
    }
    size_t whole = record_bytes(bytes);
    TRY(gather(s, whole, whole + RECORD_HEADER_BYTES, err), out);
    uint8_t *record = s->in.data + s->in_at;
    bool fits = bytes <= room;
    uint8_t *plain = fits ? to : record + RECORD_HEADER_BYTES;
    if (record_open(&s->opening, record, bytes, plain) != HVD_OK) {
        return fail_record(s, "does not decrypt", err);
    }
    if (!fits) {
        s->plain_at = s->in_at + RECORD_HEADER_BYTES;
        s->plain_end = s->plain_at + bytes;
    }
    s->in_at += whole;
    *bytes_p = fits ? bytes : 0;
out:
    return status;
}

static size_t take_plain(secure_t *s, void *data, size_t bytes)
{
    size_t n = MIN(bytes, s->plain_end - s->plain_at);
    memcpy(data, s->in.data + s->plain_at, n);
    s->plain_at += n;
    return n;
}

// Both sides may be sending more than the sockets hold: what waits must move even while we read.
// If it cannot any more, what the peer sent before is still worth reading.
static void begin_receiving(secure_t *s)
{
    s->may_ask = true;
    if (UNLIKELY(s->out_at < s->out.len)) {
        secure_flush(s, NULL);
        s->socket_errno = 0;
    }
}

ssize_t secure_recv(secure_t *s, void *data, size_t bytes, err_t *err)
{
    uint8_t *to = data;
    size_t taken = 0;
    hvd_status_t status = HVD_OK;
    if (!s->is_open) {
        return 0;
    }
    begin_receiving(s);
    while (taken < bytes && status == HVD_OK) {
        size_t n = 0;
        if (s->plain_at < s->plain_end) {
            n = take_plain(s, to + taken, bytes - taken);
        } else {
            status = open_next(s, to + taken, bytes - taken, &n, err);
        }
        taken += n;
    }
    // An error after data shows again at the next call.
    return status < 0 && taken == 0 ? (ssize_t)status : (ssize_t)taken;
}

ssize_t secure_peek(secure_t *s, const void **data_p, err_t *err)
{
    hvd_status_t status = HVD_OK;
    size_t none;
    if (!s->is_open) {
        return 0;
    }
    begin_receiving(s);
    while (s->plain_at == s->plain_end && status == HVD_OK) {
        status = open_next(s, NULL, 0, &none, err);
    }
    if (status < 0) {
        return status;
    }
    *data_p = s->in.data + s->plain_at;
    return (ssize_t)(s->plain_end - s->plain_at);
}

void secure_consume(secure_t *s, size_t bytes)
{
    s->plain_at += bytes;
}

size_t secure_pending(const secure_t *s)
{
    size_t have = s->in.len - s->in_at;
    if (s->plain_at < s->plain_end) {
        return s->plain_end - s->plain_at;
    }
    if (have < RECORD_HEADER_BYTES) {
        return 0;
    }
    size_t bytes = record_plain_bytes(s->in.data + s->in_at);
    return bytes > RECORD_MAX_BYTES || have >= record_bytes(bytes) ? have : 0;
}

bool secure_drained(const secure_t *s)
{
    return s->drained && secure_pending(s) == 0;
}

void secure_has_more(secure_t *s)
{
    s->drained = false;
}

void secure_free(secure_t *s)
{
    if (s == NULL) {
        return;
    }
    SSL_free(s->tls);
    record_key_clear(&s->sealing);
    record_key_clear(&s->opening);
    buf_free(&s->out);
    buf_free(&s->in);
    wipe(s, sizeof *s);
    free(s);
}
