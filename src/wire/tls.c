// SPDX-License-Identifier: Apache-2.0
//
// tls.c - TLS 1.3 proves the job's secret and makes the keys for what follows.
//
// While shaking hands, a BIO of ours sends and receives exactly what OpenSSL asks for, so that not
// one byte after the handshake is swallowed. When it ends, TLS's exporter gives a secret for each
// direction, the TLS state is freed, and records follow on the same socket (record.c, which says
// why, and why that is sound); or bare bytes, if the caller frees the object.
//
// Before the peer has proved the secret a connection holds the handshake's own memory only: a
// ClientHello that claims more than a real one needs is refused before OpenSSL makes room for it.
// OpenSSL is told not to clean up at exit: threads of the process may still be talking then.
#define _GNU_SOURCE
#include "wire/tls.h"

#include "wire/secret.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <stdlib.h>
#include <sys/socket.h>

#define CLIENT_HELLO_LIMIT 2048

static const unsigned char psk_identity[] = "hvd job secret";
static const char exporter_label[] = "EXPERIMENTAL hvd records";
static const unsigned char cipher_id[2] = {0x13, 0x01}; // TLS_AES_128_GCM_SHA256

// --- The BIO -------------------------------------------------------------------------------------

static int bio_write(BIO *bio, const char *data, int bytes)
{
    secure_t *s = BIO_get_data(bio);
    ssize_t n = 0;
    BIO_clear_retry_flags(bio);
    do {
        n = bytes > 0 ? send(s->fd, data, (size_t)bytes, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
    } while (n < 0 && errno == EINTR);
    if (n > 0) {
        return (int)n;
    }
    if (n == 0 || is_full(errno)) {
        BIO_set_retry_write(bio);
        return -1;
    }
    // A peer that refuses sends its reason and closes, perhaps while we write: let the read that
    // follows find the reason, or the end.
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
        n = secure_socket_recv(s, data, (size_t)bytes);
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
        ssize_t n = secure_socket_recv(s, s->client_head + s->client_head_len,
                                       CLIENT_HEAD_BYTES - s->client_head_len);
        if (n < 0) {
            return secure_fail_lost(s, "before it proved the job's secret", err);
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
        return secure_fail_lost(
            s,
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
    s->is_open = true;
out:
    wipe(secrets, sizeof secrets);
    return status;
}

hvd_status_t secure_handshake(secure_t *s, err_t *err)
{
    if (s->is_open) {
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
