// SPDX-License-Identifier: Apache-2.0
//
// channel.c - a socket between a launcher and one of its agents: hello, handshake, then bytes.
//
// The side that connected sends the 64-byte hello (role HELLO_CHANNEL); the other one checks that
// it names this job before it spends anything on a handshake. Then secure.c does the rest. Frames
// are the caller's: this carries a stream.
//
// Threads: one at a time for each channel; nothing is shared between channels. The channel owns its
// copy of the secret (inside secure_keys_t) and never the descriptor.
#define _GNU_SOURCE
#include "boot/boot.h"
#include "wire/secure.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

struct hvd_channel {
    int fd;
    bool is_server;
    bool is_open; // the peer has proved the secret
    uint8_t hello[HELLO_BYTES];
    size_t hello_len; // received, or sent
    secure_keys_t *keys;
    secure_t *secure; // once the hello is there
};

static hvd_status_t make_hello(hvd_channel_t *channel, err_t *err)
{
    hello_t hello = {.role = HELLO_CHANNEL, .encrypted = 1};
    hvd_status_t status = random_bytes(hello.nonce, sizeof hello.nonce, err);
    if (status == HVD_OK) {
        memcpy(hello.job, secure_keys_job(channel->keys), sizeof hello.job);
        hello_encode(&hello, channel->hello);
    }
    return status;
}

hvd_status_t hvd_channel_open(int fd, bool is_server, const uint8_t secret[32],
                              hvd_channel_t **channel_p, char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status;
    hvd_channel_t *channel = calloc(1, sizeof *channel);
    if (channel == NULL) {
        return err_export(&err, HVD_NO_MEMORY, text, text_bytes);
    }
    channel->fd = fd;
    channel->is_server = is_server;
    TRY(secure_keys_new(secret, &channel->keys, &err), undo);
    if (!is_server) {
        TRY(make_hello(channel, &err), undo);
    }
    *channel_p = channel;
    return HVD_OK;
undo:
    hvd_channel_close(channel);
    return err_export(&err, status, text, text_bytes);
}

// Moves what is left of the hello, out or in. HVD_OK when all of it has gone or come.
static hvd_status_t move_hello(hvd_channel_t *channel, err_t *err)
{
    while (channel->hello_len < HELLO_BYTES) {
        uint8_t *at = channel->hello + channel->hello_len;
        size_t left = HELLO_BYTES - channel->hello_len;
        ssize_t n = channel->is_server ? recv(channel->fd, at, left, MSG_DONTWAIT)
                                       : send(channel->fd, at, left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return HVD_IN_PROGRESS;
        }
        if (n <= 0) {
            char peer[64];
            secure_peer_name(channel->fd, peer, sizeof peer);
            return fail(err, HVD_PEER_LOST, "%s left before it said hello", peer);
        }
        channel->hello_len += (size_t)n;
    }
    return HVD_OK;
}

static hvd_status_t check_hello(const hvd_channel_t *channel, err_t *err)
{
    hello_t hello;
    hvd_status_t status = hello_decode(channel->hello, &hello, err);
    if (status != HVD_OK) {
        return status;
    }
    if (hello.role != HELLO_CHANNEL ||
        memcmp(hello.job, secure_keys_job(channel->keys), sizeof hello.job) != 0) {
        secure_refuse(channel->fd);
        return fail(err, HVD_UNAUTHENTICATED, "a caller belongs to another job, or is no agent");
    }
    return HVD_OK;
}

static hvd_status_t shake(hvd_channel_t *channel, err_t *err)
{
    hvd_status_t status = HVD_OK;
    if (channel->secure == NULL) {
        TRY(move_hello(channel, err), out);
        if (channel->is_server) {
            TRY(check_hello(channel, err), out);
        }
        TRY(secure_new(channel->keys, channel->fd, channel->is_server, channel->hello,
                       &channel->secure, err),
            out);
    }
    TRY(secure_handshake(channel->secure, err), out);
    channel->is_open = true;
out:
    return status;
}

hvd_status_t hvd_channel_shake(hvd_channel_t *channel, char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status = channel->is_open ? HVD_OK : shake(channel, &err);
    return status < 0 ? err_export(&err, status, text, text_bytes) : status;
}

static int64_t refuse_early(char *text, size_t text_bytes)
{
    err_t err;
    fail(&err, HVD_INVALID_ARGUMENT, "the channel's peer has not proved the job's secret yet");
    return err_export(&err, HVD_INVALID_ARGUMENT, text, text_bytes);
}

int64_t hvd_channel_send(hvd_channel_t *channel, const void *data, size_t bytes, char *text,
                         size_t text_bytes)
{
    err_t err = {0};
    if (!channel->is_open) {
        return refuse_early(text, text_bytes);
    }
    ssize_t n = bytes > 0 ? secure_send(channel->secure, data, bytes, &err)
                          : MIN(secure_flush(channel->secure, &err), 0);
    return n < 0 ? err_export(&err, (hvd_status_t)n, text, text_bytes) : n;
}

int64_t hvd_channel_recv(hvd_channel_t *channel, void *data, size_t bytes, char *text,
                         size_t text_bytes)
{
    err_t err = {0};
    if (!channel->is_open) {
        return refuse_early(text, text_bytes);
    }
    ssize_t n = secure_recv(channel->secure, data, bytes, &err);
    return n < 0 ? err_export(&err, (hvd_status_t)n, text, text_bytes) : n;
}

bool hvd_channel_wants_write(const hvd_channel_t *channel)
{
    if (channel->secure == NULL) {
        return !channel->is_server;
    }
    return secure_wants_write(channel->secure);
}

void hvd_channel_close(hvd_channel_t *channel)
{
    if (channel != NULL) {
        secure_free(channel->secure);
        secure_keys_free(channel->keys);
        free(channel);
    }
}
