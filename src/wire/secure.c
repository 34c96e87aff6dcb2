// SPDX-License-Identifier: Apache-2.0
//
// secure.c - TLS 1.3 proves the job's secret and makes the keys; then our own records carry bytes.
//
// While shaking hands, a BIO of ours sends and receives exactly what OpenSSL asks for, so that not
// one byte after the handshake is swallowed. When it ends, TLS's exporter gives a secret for each
// direction, the TLS state is freed, and either records (record.c, which says why and why that is
// sound) or, after secure_plain, bare bytes follow on the same socket.
//
// Sending: a record is sealed from the caller's memory into `out` and sent; what the socket does
// not take waits there. Receiving: recv() fills `in`, each call asking for the rest of a record and
// the header of the next, so that bulk data is never moved; a record is opened straight into the
// caller's memory if it fits there, else in its own place, where secure_peek shows it.
//
// Cost: AES-128-GCM, and the kernel's copy from or to a buffer that stays in the core's cache; one
// system call a record, or fewer while messages are small. Buffers grow to a record's size with
// use. Before the peer has proved the secret a connection holds the handshake's own memory only: a
// ClientHello that claims more than a real one needs is refused before OpenSSL makes room for it.
//
// Signals: sockets are written with MSG_NOSIGNAL; no disposition is touched. OpenSSL is told not to
// clean up at exit: threads of the process may still be talking then.
#define _GNU_SOURCE
#include "wire/secure.h"

#include "wire/record.h"
#include "wire/secret.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

#define PSK_BYTES 32
// The receiving buffer: at first for small messages, later for a record that comes after some.
#define FIRST_IN_BYTES (4 * KIB)
#define SLACK_BYTES (4 * KIB)
#define HELD_MAX_BYTES 128 // that secure_send_later keeps back, sealed
// Record header and handshake header of a ClientHello, and the longest one we believe in.
#define CLIENT_HEAD_BYTES 9
#define CLIENT_HELLO_LIMIT 2048

static const unsigned char psk_identity[] = "hvd job secret";
static const char exporter_label[] = "EXPERIMENTAL hvd records";
static const unsigned char cipher_id[2] = {0x13, 0x01}; // TLS_AES_128_GCM_SHA256

struct secure_keys {
    uint8_t *secret; // 32 bytes in a page of their own
    uint8_t job[16];
    SSL_CTX *tls;
    BIO_METHOD *bio_method;
};

typedef enum phase { SHAKING, ENCRYPTED, PLAIN } phase_t;

struct secure {
    phase_t phase;
    int fd;
    char peer[64];    // its address, for sentences: a socket that was reset no longer knows
    SSL *tls;         // NULL after the handshake
    bool wants_write; // SHAKING: which way the handshake waits
    bool is_server;
    bool eof;               // the peer closed
    int socket_errno;       // why the socket failed, or 0
    uint8_t psk[PSK_BYTES]; // wiped when the handshake ends
    uint8_t client_head[CLIENT_HEAD_BYTES];
    size_t client_head_len, client_head_at;

    record_key_t sealing, opening;
    buf_t out; // sealed, not sent
    size_t out_at;
    buf_t in; // received: up to in_at opened, the rest not
    size_t in_at;
    size_t plain_at, plain_end; // of `in`: opened in place, not consumed
    bool may_ask;               // in this call: the socket has not yet given less than asked
    bool drained;               // it had less than asked, when last asked
    bool broken;                // a record did not open: nothing more will
    wire_mangle_fn mangle;      // for tests; else NULL
    void *mangle_arg;
};

// --- The socket ----------------------------------------------------------------------------------

// Bytes sent, 0 if the socket is full, -1 if it is broken (socket_errno says how).
static ssize_t socket_send(secure_t *s, const void *data, size_t bytes)
{
    ssize_t n;
    do {
        n = send(s->fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) {
        return 0;
    }
    if (n < 0) {
        s->socket_errno = errno;
    }
    return n;
}

// Bytes received, 0 if none are there, -1 if the peer closed or the socket is broken.
static ssize_t socket_recv(secure_t *s, void *data, size_t bytes)
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

static hvd_status_t fail_lost(secure_t *s, const char *when, err_t *err)
{
    if (s->socket_errno != 0) {
        char why[128];
        const char *reason = strerror_r(s->socket_errno, why, sizeof why);
        return fail(err, HVD_PEER_LOST, "lost the connection to %s %s: %s", s->peer, when, reason);
    }
    return fail(err, HVD_PEER_LOST, "%s closed the connection %s", s->peer, when);
}

// --- The BIO -------------------------------------------------------------------------------------

static int bio_write(BIO *bio, const char *data, int bytes)
{
    secure_t *s = BIO_get_data(bio);
    ssize_t n = bytes > 0 ? socket_send(s, data, (size_t)bytes) : 0;
    BIO_clear_retry_flags(bio);
    if (n > 0) {
        return (int)n;
    }
    if (n == 0) {
        BIO_set_retry_write(bio);
        return -1;
    }
    // A peer that refuses sends its reason and closes, perhaps while we write: let the read that
    // follows find the reason, or the end.
    s->socket_errno = 0;
    return bytes;
}

static int bio_read(BIO *bio, char *data, int bytes)
{
    secure_t *s = BIO_get_data(bio);
    size_t n_ahead = s->client_head_len - s->client_head_at;
    ssize_t n = 0;
    BIO_clear_retry_flags(bio);
    if (bytes > 0 && n_ahead > 0) {
        n = (ssize_t)MIN(n_ahead, (size_t)bytes);
        memcpy(data, s->client_head + s->client_head_at, (size_t)n);
        s->client_head_at += (size_t)n;
    } else if (bytes > 0) {
        n = socket_recv(s, data, (size_t)bytes);
    }
    if (n == 0) {
        BIO_set_retry_read(bio);
    }
    return n > 0 ? (int)n : -1;
}

static long bio_ctrl(BIO *bio, int command, long number, void *pointer)
{
    (void)bio;
    (void)number;
    (void)pointer;
    return command == BIO_CTRL_FLUSH ? 1 : 0;
}

// --- Keys ----------------------------------------------------------------------------------------

static SSL_SESSION *psk_session(SSL *tls)
{
    secure_t *s = SSL_get_app_data(tls);
    const SSL_CIPHER *cipher = SSL_CIPHER_find(tls, cipher_id);
    SSL_SESSION *session = SSL_SESSION_new();
    if (session == NULL || cipher == NULL ||
        !SSL_SESSION_set1_master_key(session, s->psk, PSK_BYTES) ||
        !SSL_SESSION_set_cipher(session, cipher) ||
        !SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION)) {
        SSL_SESSION_free(session);
        return NULL;
    }
    return session;
}

// The client's side: offer the one key there is.
static int psk_offer(SSL *tls, const EVP_MD *digest, const unsigned char **identity_p,
                     size_t *bytes_p, SSL_SESSION **session_p)
{
    (void)digest;
    *session_p = psk_session(tls);
    *identity_p = psk_identity;
    *bytes_p = sizeof psk_identity - 1;
    return *session_p != NULL;
}

// The server's side: an identity that is not ours ends the handshake, with nothing to fall back to.
static int psk_accept(SSL *tls, const unsigned char *identity, size_t bytes,
                      SSL_SESSION **session_p)
{
    *session_p = NULL;
    if (bytes == sizeof psk_identity - 1 && memcmp(identity, psk_identity, bytes) == 0) {
        *session_p = psk_session(tls);
    }
    return *session_p != NULL;
}

static BIO_METHOD *bio_method_new(void)
{
    // The type number is not from BIO_get_new_index: a process has only some hundred of those.
    BIO_METHOD *method = BIO_meth_new(BIO_TYPE_SOURCE_SINK, "hvd socket");
    if (method != NULL) {
        BIO_meth_set_write(method, bio_write);
        BIO_meth_set_read(method, bio_read);
        BIO_meth_set_ctrl(method, bio_ctrl);
    }
    return method;
}

static bool configure(SSL_CTX *tls)
{
    SSL_CTX_set_options(tls, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET);
    SSL_CTX_clear_options(tls, SSL_OP_ENABLE_MIDDLEBOX_COMPAT | SSL_OP_ALLOW_NO_DHE_KEX);
    SSL_CTX_set_session_cache_mode(tls, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_psk_use_session_callback(tls, psk_offer);
    SSL_CTX_set_psk_find_session_callback(tls, psk_accept);
    SSL_CTX_set_read_ahead(tls, 0);
    return SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION) &&
           SSL_CTX_set_max_proto_version(tls, TLS1_3_VERSION) &&
           SSL_CTX_set_ciphersuites(tls, "TLS_AES_128_GCM_SHA256") &&
           SSL_CTX_set1_groups_list(tls, "X25519") && SSL_CTX_set_num_tickets(tls, 0);
}

// The first reason in OpenSSL's queue of this thread, which is left empty.
static const char *take_reason(void)
{
    const char *reason = ERR_reason_error_string(ERR_get_error());
    ERR_clear_error();
    return reason != NULL ? reason : "no reason given";
}

hvd_status_t secure_keys_new(const uint8_t secret[32], secure_keys_t **keys_p, err_t *err)
{
    static const uint8_t no_job[16];
    OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, NULL);
    OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, NULL);
    ERR_clear_error();
    secure_keys_t *keys = calloc(1, sizeof *keys);
    if (keys == NULL || (keys->secret = secret_new(SECRET_BYTES)) == NULL) {
        free(keys);
        return fail(err, HVD_NO_MEMORY, "no memory for the job's keys");
    }
    memcpy(keys->secret, secret, SECRET_BYTES);
    hello_job(secret, keys->job);
    keys->tls = SSL_CTX_new(TLS_method());
    keys->bio_method = bio_method_new();
    if (keys->tls == NULL || keys->bio_method == NULL || !configure(keys->tls) ||
        memcmp(keys->job, no_job, sizeof no_job) == 0) {
        secure_keys_free(keys);
        return fail(err, HVD_SYSTEM,
                    "OpenSSL cannot do TLS 1.3 with AES-128-GCM, SHA-256 and X25519 "
                    "here: %s; check the system's openssl.cnf",
                    take_reason());
    }
    *keys_p = keys;
    return HVD_OK;
}

const uint8_t *secure_keys_job(const secure_keys_t *keys)
{
    return keys->job;
}

void secure_keys_free(secure_keys_t *keys)
{
    if (keys == NULL) {
        return;
    }
    SSL_CTX_free(keys->tls);
    BIO_meth_free(keys->bio_method);
    secret_free(keys->secret, SECRET_BYTES);
    free(keys);
}

// --- Handshake -----------------------------------------------------------------------------------

static bool derive_psk(const secure_keys_t *keys, const uint8_t hello[HELLO_BYTES],
                       uint8_t psk[PSK_BYTES])
{
    static const char label[] = "hvd psk";
    uint8_t context[sizeof label - 1 + HELLO_BYTES];
    memcpy(context, label, sizeof label - 1);
    memcpy(context + sizeof label - 1, hello, HELLO_BYTES);
    return HMAC(EVP_sha256(), keys->secret, SECRET_BYTES, context, sizeof context, psk, NULL) !=
           NULL;
}

static bool attach_tls(secure_t *s, secure_keys_t *keys)
{
    s->tls = SSL_new(keys->tls);
    BIO *bio = BIO_new(keys->bio_method);
    if (s->tls == NULL || bio == NULL) {
        BIO_free(bio);
        return false;
    }
    BIO_set_data(bio, s);
    BIO_set_init(bio, 1);
    SSL_set_bio(s->tls, bio, bio);
    SSL_set_app_data(s->tls, s);
    if (s->is_server) {
        // Strangers may stop half-way: hold no empty record buffers for them.
        SSL_set_mode(s->tls, SSL_MODE_RELEASE_BUFFERS);
        SSL_set_accept_state(s->tls);
    } else {
        // No authority is trusted, so a server that offers a certificate instead of the PSK fails.
        SSL_set_verify(s->tls, SSL_VERIFY_PEER, NULL);
        SSL_set_connect_state(s->tls);
    }
    return true;
}

hvd_status_t secure_new(secure_keys_t *keys, int fd, bool is_server,
                        const uint8_t hello[HELLO_BYTES], secure_t **secure_p, err_t *err)
{
    secure_t *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a connection");
    }
    ERR_clear_error();
    s->fd = fd;
    secure_peer_name(fd, s->peer, sizeof s->peer);
    s->is_server = is_server;
    if (!derive_psk(keys, hello, s->psk) || !attach_tls(s, keys)) {
        secure_free(s);
        return fail(err, HVD_NO_MEMORY, "OpenSSL cannot set up a connection: %s", take_reason());
    }
    *secure_p = s;
    return HVD_OK;
}

// As server: the first 9 bytes must announce a ClientHello in one record, of a believable size.
static hvd_status_t read_client_head(secure_t *s, err_t *err)
{
    while (s->client_head_len < CLIENT_HEAD_BYTES) {
        ssize_t n = socket_recv(s, s->client_head + s->client_head_len,
                                CLIENT_HEAD_BYTES - s->client_head_len);
        if (n < 0) {
            return fail_lost(s, "before it proved the job's secret", err);
        }
        if (n == 0) {
            s->wants_write = false;
            return HVD_IN_PROGRESS;
        }
        s->client_head_len += (size_t)n;
    }
    const uint8_t *head = s->client_head;
    unsigned record_bytes = (unsigned)head[3] << 8 | head[4];
    unsigned message_bytes = (unsigned)head[6] << 16 | (unsigned)head[7] << 8 | head[8];
    if (head[0] != SSL3_RT_HANDSHAKE || head[1] != 3 || head[2] != 1 ||
        head[5] != SSL3_MT_CLIENT_HELLO || record_bytes > CLIENT_HELLO_LIMIT ||
        message_bytes + 4 != record_bytes) {
        return fail(err, HVD_UNAUTHENTICATED,
                    "a client did not begin the TLS handshake that proves the "
                    "job's secret");
    }
    return HVD_OK;
}

static hvd_status_t fail_handshake(secure_t *s, err_t *err)
{
    if (s->eof || s->socket_errno != 0) {
        ERR_clear_error();
        return fail_lost(s,
                         "before the job's secret was proved: its process ended, or it belongs to "
                         "another job",
                         err);
    }
    return fail(
        err, HVD_UNAUTHENTICATED,
        "%s and this rank do not have the same job secret (TLS: %s); "
        "check that HOROVOD_SECRET_FILE holds the same 64 digits on every host and that the "
        "address and port belong to this job",
        s->peer, take_reason());
}

// The handshake is over: TLS leaves its keys, and goes.
static hvd_status_t begin_records(secure_t *s, err_t *err)
{
    uint8_t secrets[2][RECORD_SECRET_BYTES]; // client's and server's direction
    hvd_status_t status = HVD_OK;
    if (!SSL_export_keying_material(s->tls, secrets[0], sizeof secrets, exporter_label,
                                    sizeof exporter_label - 1, NULL, 0, 0)) {
        return fail(err, HVD_SYSTEM, "OpenSSL cannot export keys: %s", take_reason());
    }
    TRY(record_key_init(&s->sealing, true, secrets[s->is_server], err), out);
    TRY(record_key_init(&s->opening, false, secrets[!s->is_server], err), out);
    SSL_free(s->tls);
    s->tls = NULL;
    wipe(s->psk, sizeof s->psk);
    s->wants_write = false;
    s->phase = ENCRYPTED;
out:
    wipe(secrets, sizeof secrets);
    return status;
}

hvd_status_t secure_handshake(secure_t *s, err_t *err)
{
    if (s->phase != SHAKING) {
        return HVD_OK;
    }
    if (s->is_server && s->client_head_len < CLIENT_HEAD_BYTES) {
        hvd_status_t status = read_client_head(s, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    ERR_clear_error();
    int result = SSL_do_handshake(s->tls);
    if (result != 1) {
        int reason = SSL_get_error(s->tls, result);
        if (reason == SSL_ERROR_WANT_READ || reason == SSL_ERROR_WANT_WRITE) {
            s->wants_write = reason == SSL_ERROR_WANT_WRITE;
            return HVD_IN_PROGRESS;
        }
        return fail_handshake(s, err);
    }
    if (!SSL_session_reused(s->tls)) {
        return fail(err, HVD_UNAUTHENTICATED, "a peer finished TLS without the job's secret");
    }
    return begin_records(s, err);
}

bool secure_wants_write(const secure_t *s)
{
    return s->wants_write || s->out_at < s->out.len;
}

void secure_plain(secure_t *s)
{
    record_key_clear(&s->sealing);
    record_key_clear(&s->opening);
    s->phase = PLAIN;
}

bool secure_is_plain(const secure_t *s)
{
    return s->phase == PLAIN;
}

// --- Sending -------------------------------------------------------------------------------------

static const char in_a_job[] = "in the middle of a job";

hvd_status_t secure_flush(secure_t *s, err_t *err)
{
    if (s->out_at < s->out.len) {
        ssize_t n = socket_send(s, s->out.data + s->out_at, s->out.len - s->out_at);
        if (n < 0) {
            return fail_lost(s, in_a_job, err);
        }
        s->out_at += (size_t)n;
        if (s->out_at < s->out.len) {
            return HVD_IN_PROGRESS; // it took less than offered: it is full
        }
    }
    s->out_at = 0;
    buf_clear(&s->out);
    return HVD_OK;
}

// Seals one record behind what waits.
static hvd_status_t append_record(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    uint8_t *record = buf_append(&s->out, NULL, bytes + RECORD_EXTRA_BYTES);
    if (record == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for encrypted data");
    }
    hvd_status_t status = record_seal(&s->sealing, data, bytes, record, err);
    if (status != HVD_OK) {
        s->out.len -= bytes + RECORD_EXTRA_BYTES; // half a record must never leave
    } else if (UNLIKELY(s->mangle != NULL)) {
        size_t left = s->mangle(s->mangle_arg, record, bytes + RECORD_EXTRA_BYTES);
        s->out.len -= bytes + RECORD_EXTRA_BYTES - left;
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
    return s->phase == ENCRYPTED ? append_record(s, NULL, 0, err) : HVD_OK;
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

static ssize_t send_plain(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    ssize_t n = socket_send(s, data, bytes);
    return n >= 0 ? n : (ssize_t)fail_lost(s, in_a_job, err);
}

ssize_t secure_send(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    size_t taken = 0;
    hvd_status_t status = HVD_OK;
    if (s->phase != ENCRYPTED) {
        return s->phase == PLAIN && bytes > 0 ? send_plain(s, data, bytes, err) : 0;
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
    if (s->phase != ENCRYPTED || s->out.len > 0 || bytes > HELD_MAX_BYTES / 2) {
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
        ssize_t n = socket_recv(s, s->in.data + s->in.len, asked);
        if (n < 0) {
            return fail_lost(s, in_a_job, err);
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
    size_t whole = bytes + RECORD_EXTRA_BYTES;
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

static ssize_t recv_plain(secure_t *s, void *data, size_t bytes, err_t *err)
{
    ssize_t n = socket_recv(s, data, bytes);
    return n >= 0 ? n : (ssize_t)fail_lost(s, in_a_job, err);
}

ssize_t secure_recv(secure_t *s, void *data, size_t bytes, err_t *err)
{
    uint8_t *to = data;
    size_t taken = 0;
    hvd_status_t status = HVD_OK;
    if (s->phase != ENCRYPTED) {
        return s->phase == PLAIN && bytes > 0 ? recv_plain(s, data, bytes, err) : 0;
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
    if (s->phase != ENCRYPTED) {
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
    return bytes > RECORD_MAX_BYTES || have >= bytes + RECORD_EXTRA_BYTES ? have : 0;
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
