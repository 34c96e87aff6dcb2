// SPDX-License-Identifier: Apache-2.0
//
// channel.c - a socket between a launcher and one of its agents: hello, handshake, then bytes.
//
// A greeting (wire/door.h, role HELLO_CHANNEL), and then secure.c. Frames are the caller's: this
// carries a stream.
//
// Threads: one at a time for each channel; nothing is shared between channels. The channel owns its
// copy of the secret (inside secure_keys_t) and never the descriptor.
#define _GNU_SOURCE
#include "boot/boot.h"
#include "wire/door.h"

#include <stdlib.h>

struct hvd_channel {
    bool is_open; // the peer has proved the secret
    greeting_t greeting;
};

hvd_status_t hvd_channel_open(int fd, bool is_server, const uint8_t secret[32],
                              hvd_channel_t **channel_p, char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status;
    hvd_channel_t *channel = calloc(1, sizeof *channel);
    if (channel == NULL) {
        return err_export(&err, HVD_NO_MEMORY, text, text_bytes);
    }
    channel->greeting = (greeting_t){
        .fd = fd, .is_server = is_server, .hello = {.role = HELLO_CHANNEL, .encrypted = 1}};
    TRY(secure_keys_new(secret, &channel->greeting.keys, &err), undo);
    if (!is_server) {
        TRY(greeting_prepare(&channel->greeting, 0, &err), undo);
    }
    *channel_p = channel;
    return HVD_OK;
undo:
    hvd_channel_close(channel);
    return err_export(&err, status, text, text_bytes);
}

hvd_channel_t *channel_of_guest(const guest_t *guest)
{
    hvd_channel_t *channel = calloc(1, sizeof *channel);
    if (channel == NULL) {
        secure_free(guest->secure);
        return NULL;
    }
    channel->greeting = (greeting_t){.fd = guest->fd, .is_server = true, .secure = guest->secure};
    channel->is_open = true;
    return channel;
}

hvd_status_t hvd_channel_shake(hvd_channel_t *channel, char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status = channel->is_open ? HVD_OK : greeting_step(&channel->greeting, &err);
    channel->is_open = status == HVD_OK;
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
    ssize_t n = bytes > 0 ? secure_send(channel->greeting.secure, data, bytes, &err)
                          : MIN(secure_flush(channel->greeting.secure, &err), 0);
    return n < 0 ? err_export(&err, (hvd_status_t)n, text, text_bytes) : n;
}

int64_t hvd_channel_recv(hvd_channel_t *channel, void *data, size_t bytes, char *text,
                         size_t text_bytes)
{
    err_t err = {0};
    if (!channel->is_open) {
        return refuse_early(text, text_bytes);
    }
    ssize_t n = secure_recv(channel->greeting.secure, data, bytes, &err);
    return n < 0 ? err_export(&err, (hvd_status_t)n, text, text_bytes) : n;
}

size_t channel_pending(const hvd_channel_t *channel)
{
    return secure_pending(channel->greeting.secure);
}

bool hvd_channel_wants_write(const hvd_channel_t *channel)
{
    return greeting_wants_write(&channel->greeting);
}

void hvd_channel_close(hvd_channel_t *channel)
{
    if (channel != NULL) {
        secure_free(channel->greeting.secure);
        secure_keys_free(channel->greeting.keys);
        free(channel);
    }
}
