// SPDX-License-Identifier: Apache-2.0
//
// client.c - one connection of a browser: bytes in, an answer and pictures of the job out.
//
// Non-blocking, in the clear or under TLS. A picture is shared by all who get it; who is slow gets
// the next one when this one is through, and misses those between. The server's thread.
#define _GNU_SOURCE
#include "web/client.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

shot_t *shot_new(void)
{
    shot_t *shot = calloc(1, sizeof *shot);
    if (shot != NULL) {
        shot->n_users = 1;
    }
    return shot;
}

void shot_release(shot_t *shot)
{
    if (shot != NULL && --shot->n_users == 0) {
        buf_free(&shot->text);
        free(shot);
    }
}

web_client_t *client_new(int fd, SSL_CTX *tls, bool is_local)
{
    web_client_t *c = calloc(1, sizeof *c);
    SSL *ssl = c != NULL && tls != NULL ? SSL_new(tls) : NULL;
    if (c == NULL || (tls != NULL && (ssl == NULL || SSL_set_fd(ssl, fd) != 1))) {
        SSL_free(ssl);
        free(c);
        fd_close(fd);
        return NULL;
    }
    if (ssl != NULL) {
        SSL_set_accept_state(ssl);
    }
    c->fd = fd;
    c->tls = ssl;
    c->is_local = c->has_proved = is_local;
    c->since_ns = clock_ns();
    return c;
}

void client_free(web_client_t *c)
{
    SSL_free(c->tls);
    shot_release(c->shot);
    buf_free(&c->out);
    fd_close(c->fd);
    free(c);
}

// Bytes moved; 0: not now; negative: it is over.
static ssize_t result_of(web_client_t *c, int n)
{
    int error = n > 0 ? SSL_ERROR_NONE : SSL_get_error(c->tls, n);
    c->wants_read |= error == SSL_ERROR_WANT_READ;
    c->wants_write |= error == SSL_ERROR_WANT_WRITE;
    return n > 0 ? n : error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? 0 : -1;
}

static ssize_t plain_result(ssize_t n)
{
    bool not_now = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    return not_now ? 0 : n;
}

bool client_receive(web_client_t *c)
{
    ssize_t n = 1;
    while (n > 0 && c->n_in < sizeof c->in) {
        size_t room = sizeof c->in - c->n_in;
        if (c->tls != NULL) {
            n = result_of(c, SSL_read(c->tls, c->in + c->n_in, (int)room));
        } else {
            n = recv(c->fd, c->in + c->n_in, room, 0);
            n = n == 0 ? -1 : plain_result(n);
        }
        c->n_in += n > 0 ? (size_t)n : 0;
    }
    return n >= 0;
}

static ssize_t send_some(web_client_t *c, const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    return c->tls != NULL ? result_of(c, SSL_write(c->tls, data, (int)MIN(bytes, MIB)))
                          : plain_result(send(c->fd, data, bytes, MSG_NOSIGNAL));
}

bool client_has_output(const web_client_t *c)
{
    return c->n_out < c->out.len || c->shot != NULL;
}

bool client_send(web_client_t *c, bool *moved_p)
{
    ssize_t n = 1;
    while (n > 0 && c->n_out < c->out.len) {
        n = send_some(c, c->out.data + c->n_out, c->out.len - c->n_out);
        c->n_out += n > 0 ? (size_t)n : 0;
        *moved_p |= n > 0;
    }
    if (n >= 0 && c->n_out == c->out.len) {
        buf_clear(&c->out);
        c->n_out = 0;
    }
    while (n > 0 && c->shot != NULL) {
        n = send_some(c, c->shot->text.data + c->n_shot, c->shot->text.len - c->n_shot);
        c->n_shot += n > 0 ? (size_t)n : 0;
        *moved_p |= n > 0;
        if (c->n_shot == c->shot->text.len) {
            shot_release(c->shot);
            c->shot = NULL;
            c->n_shot = 0;
        }
    }
    return n >= 0;
}
