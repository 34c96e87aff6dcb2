// SPDX-License-Identifier: Apache-2.0
//
// secure.h - a non-blocking socket that has proved the job's secret: TLS 1.3 with an external PSK
// (and an ephemeral X25519 exchange) by OpenSSL, then encrypted records (record.h) with its keys.
//
// The PSK of a connection is derived from the job's secret and the connection's 64-byte hello, so a
// changed or replayed hello fails the handshake. After it, a data link whose policy says so frees
// the object and uses the socket as it is: the peer is then known, the bytes are not protected.
// One thread at a time per object; several objects may share one secure_keys_t across threads.
// The object does not own the descriptor.
//
// Bytes that secure_send took may wait inside when the socket is full: secure_wants_write then says
// so, and secure_flush (or the next secure_send or secure_recv) goes on. Whoever sleeps on the
// socket must ask secure_wants_write which way to wait, and secure_pending whether to sleep at all.
#ifndef HVD_WIRE_SECURE_H
#define HVD_WIRE_SECURE_H

#include "wire/hello.h"

#include <sys/types.h>

typedef struct secure_keys secure_keys_t; // the job's secret and the TLS context made from it
typedef struct secure secure_t;

hvd_status_t secure_keys_new(const uint8_t secret[32], secure_keys_t **keys_p, err_t *err);
const uint8_t *secure_keys_job(const secure_keys_t *keys); // 16 bytes
// Wipes the secret. Every secure_t made from these keys must be gone.
void secure_keys_free(secure_keys_t *keys);

// fd: a connected non-blocking socket whose hello has already been exchanged.
hvd_status_t secure_new(secure_keys_t *keys, int fd, bool is_server,
                        const uint8_t hello[HELLO_BYTES], secure_t **secure_p, err_t *err);
// HVD_OK when done; HVD_IN_PROGRESS: call again when the socket is ready as secure_wants_write
// says; HVD_UNAUTHENTICATED: wrong secret; HVD_PEER_LOST: closed before the end.
hvd_status_t secure_handshake(secure_t *secure, err_t *err);
// Something waits for the socket to take bytes: poll it for writing (too).
bool secure_wants_write(const secure_t *secure);

// Bytes taken or received; 0: would block; HVD_PEER_LOST: closed by the peer, or another negative
// status with err set. A short send may be repeated with other data: what was taken is taken.
ssize_t secure_send(secure_t *secure, const void *data, size_t bytes, err_t *err);
// The same for a few bytes that may wait for the next secure_send, which follows at once.
ssize_t secure_send_later(secure_t *secure, const void *data, size_t bytes, err_t *err);
ssize_t secure_recv(secure_t *secure, void *data, size_t bytes, err_t *err);
// HVD_OK: everything taken has left; HVD_IN_PROGRESS: the socket is full.
hvd_status_t secure_flush(secure_t *secure, err_t *err);
// The same bytes without a copy, where they were decrypted; at *data_p until the next call other
// than secure_send or secure_flush. Returns as secure_recv does.
ssize_t secure_peek(secure_t *secure, const void **data_p, err_t *err);
void secure_consume(secure_t *secure, size_t bytes); // of what secure_peek last showed
// Bytes inside that can be had now: poll() will not show them. None after secure_recv gave 0.
size_t secure_pending(const secure_t *secure);
// Nothing can be had before the socket has more: it gave less than it was last asked for. Only
// then may one wait for an edge; false says no more than that asking again may be worth it.
bool secure_drained(const secure_t *secure);
// An edge: the socket has more than it was last asked for.
void secure_has_more(secure_t *secure);
// For tests: every record passes through fn just before it leaves, as if somebody on the way had
// it. fn may change the bytes and lower their number, which it returns.
typedef size_t (*wire_mangle_fn)(void *arg, uint8_t *bytes, size_t n_bytes);
void secure_mangle(secure_t *secure, wire_mangle_fn fn, void *arg);
// Goes on with another key in the sending direction, from the next byte. secure_send does it by
// itself before a key is worn.
hvd_status_t secure_rekey(secure_t *secure, err_t *err);
void secure_free(secure_t *secure); // safe on NULL

// What a listener does with a hello it will not go on with, before it closes the socket: the
// client's handshake then ends with HVD_UNAUTHENTICATED instead of a connection lost for no reason.
void secure_refuse(int fd);
// "10.0.0.7:4711" for the other end of a socket; for sentences.
void secure_peer_name(int fd, char *text, size_t bytes);

#endif
