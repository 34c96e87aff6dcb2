// SPDX-License-Identifier: Apache-2.0
//
// frame.c - what launcher and agent say to each other: frames on a non-blocking byte stream.
//
// A frame is its length (u32, what follows), its type (u8) and its data, little-endian. The stream
// is a socket to a process on this host or an ssh session to another: whoever can write to it may
// run what he likes as this user anyway, so it carries the job's secret. Lengths are limited before
// memory is taken. One thread; a channel belongs to its loop.
#define _GNU_SOURCE
#include "launch/frame.h"

#include <errno.h>
#include <unistd.h>

#define HEAD_BYTES 5
#define READ_BYTES (256 * KIB)

void channel_open(channel_t *channel, int in_fd, int out_fd)
{
    *channel = (channel_t){.in_fd = in_fd, .out_fd = out_fd};
}

void channel_close(channel_t *channel)
{
    if (channel->in_fd >= 0) {
        close(channel->in_fd);
    }
    if (channel->out_fd >= 0 && channel->out_fd != channel->in_fd) {
        close(channel->out_fd);
    }
    if (channel->out.data != NULL) {
        wipe(channel->out.data, channel->out.cap); // the plan, with the secret, was in it
    }
    if (channel->in.data != NULL) {
        wipe(channel->in.data, channel->in.cap);
    }
    buf_free(&channel->in);
    buf_free(&channel->out);
    *channel = (channel_t){.in_fd = -1, .out_fd = -1, .is_closed = true};
}

size_t frame_begin(channel_t *channel, uint8_t type)
{
    size_t begin = channel->out.len;
    put_u32(&channel->out, 0);
    put_u8(&channel->out, type);
    return begin;
}

void frame_end(channel_t *channel, size_t begin)
{
    size_t bytes = channel->out.len - begin - 4;
    if (channel->out.failed || bytes > FRAME_LIMIT) {
        channel->is_closed = true; // half a frame must not leave
        return;
    }
    for (int i = 0; i < 4; i++) {
        channel->out.data[begin + (size_t)i] = (uint8_t)(bytes >> (8 * i));
    }
}

bool channel_wants_write(const channel_t *channel)
{
    return !channel->is_closed && channel->out_sent < channel->out.len;
}

void channel_send(channel_t *channel)
{
    while (channel_wants_write(channel)) {
        ssize_t n = write(channel->out_fd, channel->out.data + channel->out_sent,
                          channel->out.len - channel->out_sent);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            channel->is_closed |= errno != EAGAIN && errno != EWOULDBLOCK;
            break;
        }
        channel->out_sent += (size_t)n;
    }
    if (channel->out_sent == channel->out.len) {
        channel->out.len = channel->out_sent = 0;
    } else if (channel->out_sent > MIB) {
        memmove(channel->out.data, channel->out.data + channel->out_sent,
                channel->out.len - channel->out_sent);
        channel->out.len -= channel->out_sent;
        channel->out_sent = 0;
    }
}

void channel_receive(channel_t *channel)
{
    if (channel->in_used > 0) {
        memmove(channel->in.data, channel->in.data + channel->in_used,
                channel->in.len - channel->in_used);
        channel->in.len -= channel->in_used;
        channel->in_used = 0;
    }
    if (!buf_reserve(&channel->in, READ_BYTES)) {
        channel->is_closed = true;
        return;
    }
    ssize_t n = read(channel->in_fd, channel->in.data + channel->in.len, READ_BYTES);
    if (n > 0) {
        channel->in.len += (size_t)n;
    } else if (n == 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) {
        channel->is_closed = true;
    }
}

bool channel_next(channel_t *channel, frame_t *frame_p)
{
    reader_t reader =
        reader_of(channel->in.data + channel->in_used, channel->in.len - channel->in_used);
    size_t bytes = get_u32(&reader);
    uint8_t type = get_u8(&reader);
    if (reader.bad) {
        return false;
    }
    if (bytes < 1 || bytes > FRAME_LIMIT) {
        channel->is_closed = true;
        return false;
    }
    if (reader_left(&reader) < bytes - 1) {
        return false;
    }
    *frame_p = (frame_t){.type = type, .data = reader.at, .bytes = bytes - 1};
    channel->in_used += HEAD_BYTES + bytes - 1;
    return true;
}

void put_text(buf_t *buf, const char *text)
{
    size_t bytes = strlen(text) + 1;
    put_u32(buf, (uint32_t)bytes);
    put_bytes(buf, text, bytes);
}

const char *get_text(reader_t *reader)
{
    size_t bytes = get_u32(reader);
    const uint8_t *text = get_bytes(reader, bytes);
    if (text == NULL || bytes == 0 || text[bytes - 1] != '\0') {
        reader->bad = true;
        return "";
    }
    return (const char *)text;
}
