// SPDX-License-Identifier: Apache-2.0
//
// fuzz_secure.c - the secure channel with a hostile other end.
//
// The first byte chooses what the input is: bytes to a server or client that shakes hands, bytes to
// an open channel, or changes to what an honest peer sends. Without the secret no handshake ends
// well, and an open channel gives nothing but a prefix of what its peer sent.
#define _GNU_SOURCE
#include "fuzz.h"
#include "wire/secure.h"

#include <sys/socket.h>
#include <unistd.h>

#define MAX_ROUNDS 64
#define MESSAGE_BYTES 2000

typedef struct ends {
    secure_t *server, *client;
    int fds[2];
} ends_t;

// One set of keys for all inputs: making them costs more than everything else here.
static secure_keys_t *keys(void)
{
    static secure_keys_t *made;
    static const uint8_t secret[32] = "known to the two honest ends";
    if (made == NULL) {
        MUST(secure_keys_new(secret, &made, NULL) == HVD_OK);
    }
    return made;
}

static void open_ends(ends_t *ends)
{
    uint8_t hello[HELLO_BYTES];
    hello_t fields = {.role = HELLO_LINK, .to = 1};
    memcpy(fields.job, secure_keys_job(keys()), sizeof fields.job);
    hello_encode(&fields, hello);
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends->fds) == 0);
    MUST(secure_new(keys(), ends->fds[0], true, hello, &ends->server, NULL) == HVD_OK);
    MUST(secure_new(keys(), ends->fds[1], false, hello, &ends->client, NULL) == HVD_OK);
}

static void close_ends(ends_t *ends)
{
    secure_free(ends->server);
    secure_free(ends->client);
    close(ends->fds[0]);
    close(ends->fds[1]);
}

static void shake(ends_t *ends)
{
    hvd_status_t server = HVD_IN_PROGRESS, client = HVD_IN_PROGRESS;
    err_t err;
    for (int i = 0; i < MAX_ROUNDS && (server != HVD_OK || client != HVD_OK); i++) {
        client = secure_handshake(ends->client, &err);
        server = secure_handshake(ends->server, &err);
    }
    MUST(server == HVD_OK && client == HVD_OK);
}

// Gives the rest of the input to the other end of fd, in pieces, and steps after each.
static void shake_with_stranger(input_t *in, ends_t *ends, bool as_server)
{
    secure_t *victim = as_server ? ends->server : ends->client;
    int stranger = ends->fds[as_server ? 1 : 0];
    hvd_status_t status = HVD_IN_PROGRESS;
    err_t err;
    for (int i = 0; i < MAX_ROUNDS && status == HVD_IN_PROGRESS; i++) {
        size_t bytes = 1 + take_u16(in);
        uint8_t *piece = take_copy(in, &bytes);
        if (bytes == 0) {
            shutdown(stranger, SHUT_WR);
        } else if (send(stranger, piece, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
            i = MAX_ROUNDS;
        }
        free(piece);
        status = secure_handshake(victim, &err);
        MUST(status != HVD_OK);
        MUST(status == HVD_IN_PROGRESS || err.text[0] != '\0');
    }
}

// What arrives of `sent`; it must be a prefix.
static void receive(secure_t *from, const uint8_t *sent, size_t sent_bytes, unsigned sizes)
{
    uint8_t data[MESSAGE_BYTES + 1];
    size_t got = 0;
    err_t err;
    for (int i = 0; i < MAX_ROUNDS; i++) {
        const void *seen = data;
        size_t room = 1 + (sizes >> (i % 8)) % MESSAGE_BYTES;
        bool peeks = (sizes >> (i % 16) & 1) != 0;
        ssize_t n = peeks ? secure_peek(from, &seen, &err) : secure_recv(from, data, room, &err);
        if (n < 0) {
            MUST(err.text[0] != '\0');
            return;
        }
        MUST(got + (size_t)n <= sent_bytes && (n == 0 || memcmp(sent + got, seen, (size_t)n) == 0));
        if (peeks) {
            secure_consume(from, (size_t)n);
        }
        got += (size_t)n;
    }
}

static void inject(input_t *in, ends_t *ends)
{
    unsigned sizes = take_u16(in);
    size_t bytes = in->left;
    shake(ends);
    if (bytes > 0) {
        MUST(send(ends->fds[1], in->at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) > 0);
    }
    receive(ends->server, NULL, 0, sizes);
}

// The honest client's bytes pass through our hands.
static void tamper(input_t *in, ends_t *ends)
{
    uint8_t sent[MESSAGE_BYTES] = {0}, wire[2 * MESSAGE_BYTES];
    unsigned sizes = take_u16(in);
    size_t at = 0;
    shake(ends);
    while (at < sizeof sent) {
        size_t asked = 32 + take_u8(in) * 4u; // not too small: the socket holds only so many
        size_t bytes = MIN(asked, sizeof sent - at);
        MUST(secure_send(ends->client, sent + at, bytes, NULL) == (ssize_t)bytes);
        at += bytes;
        if ((bytes & 7) == 0) {
            MUST(secure_rekey(ends->client, NULL) == HVD_OK);
        }
    }
    MUST(secure_flush(ends->client, NULL) == HVD_OK);
    ssize_t n = recv(ends->fds[0], wire, sizeof wire, MSG_DONTWAIT);
    MUST(n > 0);
    for (int i = 0; i < 4 && in->left > 0; i++) {
        size_t place = take_u16(in) % (size_t)n;
        wire[place] ^= take_u8(in);
    }
    size_t from = take_u16(in) % (size_t)n;
    MUST(send(ends->fds[1], wire + from, (size_t)n - from, MSG_NOSIGNAL | MSG_DONTWAIT) > 0);
    receive(ends->server, sent, sizeof sent, sizes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    input_t in = {data, bytes};
    ends_t ends = {0};
    open_ends(&ends);
    switch (take_u8(&in) % 4) {
    case 0:
        shake_with_stranger(&in, &ends, true);
        break;
    case 1:
        shake_with_stranger(&in, &ends, false);
        break;
    case 2:
        inject(&in, &ends);
        break;
    default:
        tamper(&in, &ends);
        break;
    }
    close_ends(&ends);
    return 0;
}
