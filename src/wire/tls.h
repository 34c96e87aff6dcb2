// SPDX-License-Identifier: Apache-2.0
//
// tls.h - the inside of a secure_t.
//
// For tls.c, which shakes hands, and secure.c, which does the rest; see secure.h.
#ifndef HVD_WIRE_TLS_H
#define HVD_WIRE_TLS_H

#include "wire/record.h"
#include "wire/secure.h"

#include <openssl/ssl.h>

#include <errno.h>

#define PSK_BYTES 32
// Record header and handshake header of a ClientHello, and the longest one we believe in.
#define CLIENT_HEAD_BYTES 9

struct secure_keys {
    uint8_t *secret; // 32 bytes in a page of their own
    uint8_t job[16];
    SSL_CTX *tls;
    BIO_METHOD *bio_method;
};

struct secure {
    bool is_open; // the handshake has ended
    int fd;
    char peer[64];    // its address, for sentences: a socket that was reset no longer knows
    SSL *tls;         // NULL after the handshake
    bool wants_write; // until it is open: which way the handshake waits
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

// Why a socket took nothing, when it is in order.
static inline bool is_full(int code)
{
    return code == EAGAIN || code == EWOULDBLOCK || code == ENOBUFS;
}

// Bytes received, 0 if none are there, -1 if the peer closed or the socket is broken.
ssize_t secure_socket_recv(secure_t *s, void *data, size_t bytes);
hvd_status_t secure_fail_lost(secure_t *s, const char *when, err_t *err);

#endif
