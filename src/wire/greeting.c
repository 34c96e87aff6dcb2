// SPDX-License-Identifier: Apache-2.0
//
// greeting.c - hello and handshake of one connection.
//
// The side that connected is through with the handshake before the other one is: its last words may
// come too late for that one. So it also waits for a byte that says that they have been heard; what
// ends before that byte can be tried again, since nothing has been sent on it. The other side asks
// once more whether this one is still welcome before it sends that byte: of two connections that
// were begun for one purpose, the first to be let in is the only one that gets it.
//
// Each step goes on as far as the socket allows. The descriptor is the caller's, and so is the
// secure_t that the hello has led to, whatever came of it. One thread at a time.
#include "wire/door.h"

#include <errno.h>

#define WELCOME 6

hvd_status_t greeting_prepare(greeting_t *g, size_t n_nonce_kept, err_t *err)
{
    hello_t *hello = &g->hello;
    hvd_status_t status =
        random_bytes(hello->nonce + n_nonce_kept, sizeof hello->nonce - n_nonce_kept, err);
    memcpy(hello->job, secure_keys_job(g->keys), sizeof hello->job);
    hello_encode(hello, g->bytes);
    return status;
}

static hvd_status_t move_hello(greeting_t *g, err_t *err)
{
    while (g->n_bytes < HELLO_BYTES) {
        uint8_t *at = g->bytes + g->n_bytes;
        size_t left = HELLO_BYTES - g->n_bytes;
        ssize_t n = g->is_server ? recv(g->fd, at, left, MSG_DONTWAIT)
                                 : send(g->fd, at, left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return HVD_IN_PROGRESS;
        }
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return n == 0 ? fail(err, HVD_PEER_LOST, "it left before it said hello")
                          : fail_errno(err, errno, "the connection was lost before the hello");
        }
        g->n_bytes += n > 0 ? (size_t)n : 0;
    }
    return HVD_OK;
}

static hvd_status_t ask_owner(const greeting_t *g, err_t *err)
{
    return g->admit != NULL ? g->admit(g->owner, &g->hello, err) : HVD_OK;
}

static hvd_status_t check_hello(greeting_t *g, err_t *err)
{
    hello_role_t role = g->hello.role;
    hvd_status_t status = hello_decode(g->bytes, &g->hello, err);
    if (status != HVD_OK) {
        return status;
    }
    if (g->hello.role != role ||
        memcmp(g->hello.job, secure_keys_job(g->keys), sizeof g->hello.job) != 0) {
        if (!g->is_silent) {
            secure_refuse(g->fd);
        }
        return fail(err, HVD_UNAUTHENTICATED, "it belongs to another job, or called a wrong port");
    }
    return ask_owner(g, err);
}

// The byte needs no proof: who forges it gains what cutting the connection gives.
static hvd_status_t confirm(greeting_t *g, err_t *err)
{
    hvd_status_t status = g->is_server ? ask_owner(g, err) : HVD_OK;
    uint8_t byte = WELCOME;
    if (status != HVD_OK) {
        return status;
    }
    ssize_t n = g->is_server ? send(g->fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL)
                             : recv(g->fd, &byte, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        return HVD_IN_PROGRESS;
    }
    if (n < 1) {
        return fail(err, HVD_PEER_LOST, "the other side left before it had let this one in");
    }
    return byte == WELCOME ? HVD_OK
                           : fail(err, HVD_PROTOCOL, "the handshake did not end as it should");
}

hvd_status_t greeting_step(greeting_t *g, err_t *err)
{
    hvd_status_t status = HVD_OK;
    if (g->secure == NULL) {
        TRY(move_hello(g, err), out);
        if (g->is_server) {
            TRY(check_hello(g, err), out);
        }
        TRY(secure_new(g->keys, g->fd, g->is_server, g->bytes, &g->secure, err), out);
    }
    if (!g->has_proved) {
        TRY(secure_handshake(g->secure, err), out);
        g->has_proved = true;
    }
    status = confirm(g, err);
out:
    return status;
}

bool greeting_wants_write(const greeting_t *g)
{
    if (g->has_proved) {
        return g->is_server;
    }
    return g->secure != NULL ? secure_wants_write(g->secure) : !g->is_server;
}
