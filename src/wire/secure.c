// SPDX-License-Identifier: Apache-2.0
//
// secure.c - TLS 1.3 with the job's secret, over our own BIO.
//
// OpenSSL does the protocol; this file feeds it. The BIO has two manners:
//
// - While shaking hands it sends and receives exactly what OpenSSL asks for, so that not one byte
//   after the handshake is swallowed and secure_plain can go on with the bare socket.
// - Afterwards it works in batches. Records are gathered in `out` and leave with one send() for up
//   to GATHER_BYTES; received bytes come in with one recv() of up to READ_AHEAD_BYTES into `in`.
//   OpenSSL's own read-ahead is not used: it moves the rest of its buffer for every record.
//
// Cost: AES-128-GCM plus one copy of each byte on the sending side and two on the receiving one;
// a syscall per 16 KiB only while messages are that small. Buffers grow with use, up to
// GATHER_BYTES and READ_AHEAD_BYTES. Before the peer has proved the secret a connection holds the
// handshake's own memory only: a ClientHello that claims more than a real one needs is refused
// before OpenSSL makes room for it.
//
// Signals: sockets are written with MSG_NOSIGNAL; no disposition is touched. OpenSSL is told not to
// clean up at exit: threads of the process may still be talking then.
#define _GNU_SOURCE
#include "wire/secure.h"

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
#define RECORD_BYTES ((size_t)SSL3_RT_MAX_PLAIN_LENGTH)
#define GATHER_BYTES (64 * KIB)
#define READ_AHEAD_BYTES (64 * KIB)
#define READ_AHEAD_START (16 * KIB)
// Record header and handshake header of a ClientHello, and the longest one we believe in.
#define CLIENT_HEAD_BYTES 9
#define CLIENT_HELLO_LIMIT 2048
// AES-GCM wears out near 2^24.5 full records (RFC 8446, 5.5): change the key well before.
#define RECORDS_PER_KEY ((uint64_t)1 << 22)

static const unsigned char psk_identity[] = "hvd job secret";
static const unsigned char cipher_id[2] = {0x13, 0x01}; // TLS_AES_128_GCM_SHA256

struct secure_keys {
    uint8_t secret[32];
    uint8_t job[16];
    SSL_CTX *tls;
    BIO_METHOD *bio_method;
};

typedef enum phase { SHAKING, ENCRYPTED, PLAIN } phase_t;

struct secure {
    phase_t phase;
    int fd;
    SSL *tls;         // NULL in PLAIN
    bool wants_write; // SHAKING: which way the handshake waits
    bool is_server;
    bool gathering;   // more records follow in this call: keep them
    bool eof;         // the peer closed
    int socket_errno; // why the socket failed, or 0
    uint64_t n_records;
    uint8_t psk[PSK_BYTES]; // wiped when the handshake ends
    uint8_t client_head[CLIENT_HEAD_BYTES];
    size_t client_head_len, client_head_at;
    buf_t out; // encrypted, taken, not sent
    size_t out_at;
    buf_t in; // received, not decrypted
    size_t in_at;
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
    char peer[64];
    secure_peer_name(s->fd, peer, sizeof peer);
    if (s->socket_errno != 0) {
        char why[128];
        const char *reason = strerror_r(s->socket_errno, why, sizeof why);
        return fail(err, HVD_PEER_LOST, "lost the connection to %s %s: %s", peer, when, reason);
    }
    return fail(err, HVD_PEER_LOST, "%s closed the connection %s", peer, when);
}

// --- The BIO -------------------------------------------------------------------------------------

static int bio_write_shaking(secure_t *s, BIO *bio, const char *data, int bytes)
{
    ssize_t n = socket_send(s, data, (size_t)bytes);
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

static int bio_write(BIO *bio, const char *data, int bytes)
{
    secure_t *s = BIO_get_data(bio);
    size_t sent = 0;

    BIO_clear_retry_flags(bio);
    if (bytes <= 0) {
        return 0;
    }
    if (s->phase == SHAKING) {
        return bio_write_shaking(s, bio, data, bytes);
    }
    if (!s->gathering && s->out_at == s->out.len) {
        ssize_t n = socket_send(s, data, (size_t)bytes);
        if (n < 0) {
            return -1;
        }
        sent = (size_t)n;
    }
    if (sent < (size_t)bytes && buf_append(&s->out, data + sent, (size_t)bytes - sent) == NULL) {
        s->socket_errno = ENOMEM;
        return -1;
    }
    return bytes;
}

// Moves up to `bytes` of what lies ready to data.
static int take_ready(const uint8_t *ready, size_t *at_p, size_t len, char *data, int bytes)
{
    size_t n = MIN(len - *at_p, (size_t)bytes);
    memcpy(data, ready + *at_p, n);
    *at_p += n;
    return (int)n;
}

// Fills `in` with what the socket has. A full buffer doubles for the next time.
static ssize_t read_ahead(secure_t *s)
{
    if (s->in.len == s->in.cap || s->in.cap == 0) {
        size_t want = MIN(MAX(2 * s->in.cap, READ_AHEAD_START), READ_AHEAD_BYTES);
        buf_clear(&s->in);
        if (s->in.cap < want && !buf_reserve(&s->in, want)) {
            s->socket_errno = ENOMEM;
            return -1;
        }
    }
    ssize_t n = socket_recv(s, s->in.data, s->in.cap);
    s->in_at = 0;
    s->in.len = n > 0 ? (size_t)n : 0;
    return n;
}

static int bio_read(BIO *bio, char *data, int bytes)
{
    secure_t *s = BIO_get_data(bio);
    ssize_t n;

    BIO_clear_retry_flags(bio);
    if (bytes <= 0) {
        return 0;
    }
    if (s->phase == SHAKING) {
        if (s->client_head_at < s->client_head_len) {
            return take_ready(s->client_head, &s->client_head_at, s->client_head_len, data, bytes);
        }
        n = socket_recv(s, data, (size_t)bytes);
    } else {
        n = s->in_at < s->in.len ? 1 : read_ahead(s);
        if (n > 0) {
            return take_ready(s->in.data, &s->in_at, s->in.len, data, bytes);
        }
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
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
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
    if (keys == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the job's keys");
    }
    memcpy(keys->secret, secret, sizeof keys->secret);
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
    wipe(keys, sizeof *keys);
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
    return HMAC(EVP_sha256(), keys->secret, sizeof keys->secret, context, sizeof context, psk,
                NULL) != NULL;
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
    if (head[0] != SSL3_RT_HANDSHAKE || head[1] != 3 || head[5] != SSL3_MT_CLIENT_HELLO ||
        record_bytes > CLIENT_HELLO_LIMIT || message_bytes + 4 != record_bytes) {
        return fail(err, HVD_UNAUTHENTICATED,
                    "a client did not begin the TLS handshake that proves the "
                    "job's secret");
    }
    return HVD_OK;
}

static hvd_status_t fail_handshake(secure_t *s, err_t *err)
{
    char peer[64];
    if (s->eof || s->socket_errno != 0) {
        ERR_clear_error();
        return fail_lost(s,
                         "before the job's secret was proved: its process ended, or it belongs to "
                         "another job",
                         err);
    }
    secure_peer_name(s->fd, peer, sizeof peer);
    return fail(
        err, HVD_UNAUTHENTICATED,
        "%s and this rank do not have the same job secret (TLS: %s); "
        "check that HOROVOD_SECRET_FILE holds the same 64 digits on every host and that the "
        "address and port belong to this job",
        peer, take_reason());
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
    SSL_clear_mode(s->tls, SSL_MODE_RELEASE_BUFFERS);
    wipe(s->psk, sizeof s->psk);
    s->wants_write = false;
    s->phase = ENCRYPTED;
    return HVD_OK;
}

bool secure_wants_write(const secure_t *s)
{
    return s->wants_write || s->out_at < s->out.len;
}

void secure_plain(secure_t *s)
{
    SSL_free(s->tls);
    s->tls = NULL;
    s->phase = PLAIN;
}

bool secure_is_plain(const secure_t *s)
{
    return s->phase == PLAIN;
}

// --- Bytes ---------------------------------------------------------------------------------------

// After a failed SSL_read or SSL_write that does not wait for the socket.
static hvd_status_t fail_stream(secure_t *s, int reason, err_t *err)
{
    char peer[64];
    if (s->socket_errno == ENOMEM) {
        ERR_clear_error();
        return fail(err, HVD_NO_MEMORY, "no memory for encrypted data");
    }
    if (s->eof || s->socket_errno != 0 || reason == SSL_ERROR_ZERO_RETURN) {
        ERR_clear_error();
        return fail_lost(s, "in the middle of a job", err);
    }
    secure_peer_name(s->fd, peer, sizeof peer);
    return fail(err, HVD_PROTOCOL,
                "what came from %s does not decrypt (TLS: %s); it was changed on the way", peer,
                take_reason());
}

hvd_status_t secure_flush(secure_t *s, err_t *err)
{
    while (s->out_at < s->out.len) {
        ssize_t n = socket_send(s, s->out.data + s->out_at, s->out.len - s->out_at);
        if (n < 0) {
            return fail_lost(s, "in the middle of a job", err);
        }
        if (n == 0) {
            return HVD_IN_PROGRESS;
        }
        s->out_at += (size_t)n;
    }
    s->out_at = 0;
    buf_clear(&s->out);
    return HVD_OK;
}

hvd_status_t secure_rekey(secure_t *s, err_t *err)
{
    s->n_records = 0;
    if (s->phase == ENCRYPTED && !SSL_key_update(s->tls, SSL_KEY_UPDATE_NOT_REQUESTED)) {
        return fail(err, HVD_PROTOCOL, "OpenSSL cannot change a connection's key: %s",
                    take_reason());
    }
    return HVD_OK;
}

// Encrypts up to GATHER_BYTES and sends them. Bytes taken, or a negative status. The BIO always
// has room for what is offered here, so SSL_write never has to be repeated.
static ssize_t send_batch(secure_t *s, const uint8_t *data, size_t bytes, err_t *err)
{
    size_t taken = 0;
    size_t limit = MIN(bytes, GATHER_BYTES);

    while (taken < limit) {
        size_t record = MIN(limit - taken, RECORD_BYTES), written = 0;
        s->gathering = taken + record < limit;
        if (++s->n_records > RECORDS_PER_KEY && secure_rekey(s, err) != HVD_OK) {
            return HVD_PROTOCOL;
        }
        int result = SSL_write_ex(s->tls, data + taken, record, &written);
        if (result != 1) {
            return fail_stream(s, SSL_get_error(s->tls, result), err);
        }
        taken += written;
    }
    hvd_status_t status = secure_flush(s, err);
    return status < 0 ? (ssize_t)status : (ssize_t)taken;
}

static ssize_t send_plain(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    ssize_t n = socket_send(s, data, bytes);
    return n >= 0 ? n : (ssize_t)fail_lost(s, "in the middle of a job", err);
}

ssize_t secure_send(secure_t *s, const void *data, size_t bytes, err_t *err)
{
    size_t taken = 0;

    if (s->phase != ENCRYPTED) {
        return s->phase == PLAIN && bytes > 0 ? send_plain(s, data, bytes, err) : 0;
    }
    ERR_clear_error();
    hvd_status_t status = secure_flush(s, err);
    while (status == HVD_OK && taken < bytes) {
        ssize_t n = send_batch(s, (const uint8_t *)data + taken, bytes - taken, err);
        if (n < 0) {
            return n;
        }
        taken += (size_t)n;
        status = secure_wants_write(s) ? HVD_IN_PROGRESS : HVD_OK;
    }
    return status < 0 ? (ssize_t)status : (ssize_t)taken;
}

static ssize_t recv_plain(secure_t *s, void *data, size_t bytes, err_t *err)
{
    ssize_t n = socket_recv(s, data, bytes);
    return n >= 0 ? n : (ssize_t)fail_lost(s, "in the middle of a job", err);
}

ssize_t secure_recv(secure_t *s, void *data, size_t bytes, err_t *err)
{
    size_t taken = 0;

    if (s->phase != ENCRYPTED) {
        return s->phase == PLAIN && bytes > 0 ? recv_plain(s, data, bytes, err) : 0;
    }
    ERR_clear_error();
    // Both sides may be sending more than the sockets hold: what waits must move even while we
    // read. If it cannot any more, what the peer sent before is still worth reading.
    if (s->out_at < s->out.len) {
        secure_flush(s, NULL);
        s->socket_errno = 0;
    }
    while (taken < bytes) {
        size_t n = 0;
        int result = SSL_read_ex(s->tls, (uint8_t *)data + taken, bytes - taken, &n);
        if (result != 1) {
            int reason = SSL_get_error(s->tls, result);
            if (reason == SSL_ERROR_WANT_READ || taken > 0) {
                break; // an error after data shows again at the next call
            }
            return fail_stream(s, reason, err);
        }
        taken += n;
    }
    return (ssize_t)taken;
}

size_t secure_pending(const secure_t *s)
{
    return s->phase == ENCRYPTED ? (size_t)SSL_pending(s->tls) + s->in.len - s->in_at : 0;
}

void secure_free(secure_t *s)
{
    if (s == NULL) {
        return;
    }
    SSL_free(s->tls);
    buf_free(&s->out);
    buf_free(&s->in);
    wipe(s, sizeof *s);
    free(s);
}
