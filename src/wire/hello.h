// SPDX-License-Identifier: Apache-2.0
//
// hello.h - the first 64 bytes on every connection, sent by the side that connects.
//
// Nothing in it is secret and nothing in it is believed: it lets the listener drop foreign clients
// before any work is done, and says which link the TLS handshake that follows is for. The same
// bytes are bound into that handshake (see secure.h), so they cannot be changed on the way.
#ifndef HVD_WIRE_HELLO_H
#define HVD_WIRE_HELLO_H

#include "base/base.h"

#define HELLO_BYTES 64
#define WIRE_FORMAT 8 // goes up when the meaning of bytes changes
// Numbers of operations are on the wire: one more is another version.
#define WIRE_VERSION (WIRE_FORMAT << 8 | HVD_N_OPS)

typedef enum hello_role { HELLO_KV = 1, HELLO_LINK = 2, HELLO_CHANNEL = 4 } hello_role_t;

typedef struct hello {
    uint8_t job[16]; // public name of the job, derived from the secret
    hello_role_t role;
    uint8_t lane;      // HELLO_LINK: control or data
    uint8_t encrypted; // HELLO_LINK: what follows the handshake is encrypted
    uint32_t from, to; // ranks
    uint8_t nonce[16]; // chosen by the client; makes every handshake's context unique
} hello_t;

void hello_encode(const hello_t *hello, uint8_t bytes[HELLO_BYTES]);
// Refuses another magic, wire version, role or non-zero padding. The caller compares the job.
hvd_status_t hello_decode(const uint8_t bytes[HELLO_BYTES], hello_t *hello_p, err_t *err);

// The job's public name: a one-way function of the secret.
void hello_job(const uint8_t secret[32], uint8_t job[16]);

#endif
