// SPDX-License-Identifier: Apache-2.0
//
// frame.c - what launcher and agent say to each other: frames on a non-blocking byte stream.
//
// A frame is its length (u32, what follows), its kind (u8) and its fields, little-endian. Which
// fields a kind has is a table: a row lists them in wire order, and one loop each reads and writes
// any frame, so the two cannot drift apart. A frame that is cut short, or longer than its fields,
// is refused; only a hello may have fewer or more behind its version, since another version may say
// more of itself. Lengths are limited before memory is taken; nothing is copied when reading.
//
// The stream is a socket to a process on this host, an ssh session or a secure channel to another:
// whoever can write to it may run what he likes as this user anyway, so it carries the job's
// secret. One thread; a channel belongs to its loop.
#define _GNU_SOURCE
#include "agent/frame.h"

#include <errno.h>
#include <stddef.h>
#include <unistd.h>

#define HEAD_BYTES 5
#define READ_BYTES (256 * KIB)
#define SEND_BYTES (256 * KIB) // at once: a reader that is fast enough must not keep us

typedef enum field_type {
    FIELD_NONE,
    FIELD_INT,   // int32_t
    FIELD_LONG,  // int64_t
    FIELD_FLAG,  // bool
    FIELD_TEXT,  // const char *
    FIELD_BYTES, // bytes_t
    FIELD_LIST,  // bytes_t: nothing, or texts that all end in '\0'
} field_type_t;

#define MAX_FIELDS 10
#define HAS(type, member) {FIELD_##type, offsetof(frame_t, member)}

static const struct {
    bool may_vary; // behind the first field: fewer or more, in another version
    struct {
        uint8_t type;
        uint16_t at;
    } fields[MAX_FIELDS + 1];
} kinds[FRAME_N_KINDS] = {
    [FRAME_HELLO] = {true,
                     {HAS(TEXT, hello.version), HAS(TEXT, hello.host), HAS(INT, hello.slot),
                      HAS(TEXT, hello.about)}},
    [FRAME_PLAN] = {false,
                    {HAS(BYTES, plan.secret), HAS(FLAG, plan.is_remote), HAS(INT, plan.silence_ms),
                     HAS(TEXT, plan.directory), HAS(LIST, plan.command), HAS(LIST, plan.env),
                     HAS(FLAG, plan.wants_results), HAS(FLAG, plan.is_elastic),
                     HAS(BYTES, plan.payload), HAS(BYTES, plan.ranks)}},
    [FRAME_STARTED] = {false, {HAS(INT, started.rank), HAS(INT, started.pid)}},
    [FRAME_OUTPUT] = {false,
                      {HAS(INT, output.rank), HAS(INT, output.stream), HAS(BYTES, output.data)}},
    [FRAME_RESULT] = {false, {HAS(INT, result.rank), HAS(BYTES, result.data)}},
    [FRAME_EXITED] = {false,
                      {HAS(INT, exited.rank), HAS(INT, exited.code), HAS(INT, exited.signo),
                       HAS(FLAG, exited.was_oom), HAS(FLAG, exited.was_halted),
                       HAS(INT, exited.blames), HAS(TEXT, exited.what)}},
    [FRAME_PROBLEM] = {false,
                       {HAS(INT, problem.rank), HAS(INT, problem.code), HAS(TEXT, problem.text)}},
    [FRAME_STOP] = {false, {HAS(INT, stop.rank), HAS(INT, stop.signo), HAS(INT, stop.grace_ms)}},
    [FRAME_WHERE] = {false, {HAS(INT, where.rank), HAS(TEXT, where.text)}},
    [FRAME_EXAMINE] = {false,
                       {HAS(TEXT, examine.addresses), HAS(INT, examine.port),
                        HAS(LONG, examine.time_s), HAS(TEXT, examine.directory),
                        HAS(LIST, examine.env), HAS(TEXT, examine.python),
                        HAS(TEXT, examine.script), HAS(FLAG, examine.is_module),
                        HAS(FLAG, examine.needs_horovod)}},
    [FRAME_FINDING] = {false,
                       {HAS(FLAG, finding.is_fault), HAS(TEXT, finding.what),
                        HAS(TEXT, finding.found), HAS(TEXT, finding.fix),
                        HAS(TEXT, finding.version)}},
    [FRAME_PING] = {false, {{FIELD_NONE, 0}}},
    [FRAME_DONE] = {false, {{FIELD_NONE, 0}}},
    [FRAME_PLACE] = {false, {HAS(INT, place.rank), HAS(LIST, place.env)}},
    [FRAME_NEWS] = {false, {HAS(INT, news.number), HAS(INT, news.what)}},
    [FRAME_READY] = {false,
                     {HAS(INT, ready.rank), HAS(INT, ready.generation), HAS(INT, ready.blames)}},
    [FRAME_WATCH] = {false, {HAS(INT, watch.period_ms)}},
    [FRAME_SNAPSHOT] = {false, {HAS(INT, snapshot.rank), HAS(TEXT, snapshot.text)}},
    [FRAME_END] = {false, {HAS(INT, end.code)}},
    [FRAME_LEAVING] = {false, {{FIELD_NONE, 0}}},
    [FRAME_WANTS] = {false, {HAS(INT, wants.rank), HAS(INT, wants.what)}},
};

// --- Fields --------------------------------------------------------------------------------------

static void put_counted(buf_t *out, const void *data, size_t bytes)
{
    out->failed |= bytes > FRAME_LIMIT;
    put_u32(out, (uint32_t)bytes);
    if (bytes > 0) {
        put_bytes(out, data, bytes);
    }
}

static void put_field(buf_t *out, field_type_t type, const void *field)
{
    const bytes_t *bytes = field;
    const char *text;
    switch (type) {
    case FIELD_INT:
        put_u32(out, (uint32_t)*(const int32_t *)field);
        break;
    case FIELD_LONG:
        put_u64(out, (uint64_t)*(const int64_t *)field);
        break;
    case FIELD_FLAG:
        put_u8(out, *(const bool *)field);
        break;
    case FIELD_TEXT:
        text = *(const char *const *)field;
        text = text != NULL ? text : "";
        put_counted(out, text, strlen(text) + 1);
        break;
    case FIELD_BYTES:
    case FIELD_LIST:
        put_counted(out, bytes->data, bytes->len);
        break;
    case FIELD_NONE:
        break;
    }
}

static void get_field(reader_t *in, field_type_t type, void *field)
{
    bytes_t bytes = {0};
    if (type == FIELD_INT) {
        *(int32_t *)field = (int32_t)get_u32(in);
    } else if (type == FIELD_LONG) {
        *(int64_t *)field = (int64_t)get_u64(in);
    } else if (type == FIELD_FLAG) {
        uint8_t flag = get_u8(in);
        in->bad |= flag > 1;
        *(bool *)field = flag == 1;
    } else {
        bytes.len = get_u32(in);
        bytes.data = get_bytes(in, bytes.len);
        const uint8_t *end = bytes.len > 0 && !in->bad ? &bytes.data[bytes.len - 1] : NULL;
        if (type == FIELD_TEXT) {
            in->bad |= end == NULL || memchr(bytes.data, '\0', bytes.len) != end;
            *(const char **)field = in->bad ? "" : (const char *)bytes.data;
        } else {
            in->bad |= type == FIELD_LIST && end != NULL && *end != '\0';
            *(bytes_t *)field = in->bad ? (bytes_t){0} : bytes;
        }
    }
}

// What a field of a hello is that another version does not have.
static void leave_out(field_type_t type, void *field)
{
    if (type == FIELD_TEXT) {
        *(const char **)field = "";
    }
}

// --- Frames --------------------------------------------------------------------------------------

bool frame_put(buf_t *out, const frame_t *frame)
{
    size_t begin = out->len;
    put_u32(out, 0);
    put_u8(out, (uint8_t)frame->kind);
    for (int i = 0; kinds[frame->kind].fields[i].type != FIELD_NONE; i++) {
        put_field(out, kinds[frame->kind].fields[i].type,
                  (const char *)frame + kinds[frame->kind].fields[i].at);
    }
    size_t bytes = out->len - begin - 4;
    if (out->failed || bytes > FRAME_LIMIT) {
        out->len = begin; // half a frame must not leave
        return false;
    }
    for (int i = 0; i < 4; i++) {
        out->data[begin + (size_t)i] = (uint8_t)(bytes >> (8 * i));
    }
    return true;
}

hvd_status_t frame_get(reader_t *in, frame_t *frame_p)
{
    reader_t reader = *in;
    size_t bytes = get_u32(&reader);
    frame_t frame = {.kind = (frame_kind_t)get_u8(&reader)};
    if (reader.bad) {
        return HVD_IN_PROGRESS;
    }
    if (bytes < 1 || bytes > FRAME_LIMIT || frame.kind == 0 || frame.kind >= FRAME_N_KINDS) {
        return HVD_PROTOCOL;
    }
    if (reader_left(&reader) < bytes - 1) {
        return HVD_IN_PROGRESS;
    }
    reader_t body = reader_of(reader.at, bytes - 1);
    bool may_vary = kinds[frame.kind].may_vary;
    for (int i = 0; kinds[frame.kind].fields[i].type != FIELD_NONE; i++) {
        field_type_t type = kinds[frame.kind].fields[i].type;
        void *field = (char *)&frame + kinds[frame.kind].fields[i].at;
        if (may_vary && i > 0 && reader_left(&body) == 0) {
            leave_out(type, field);
        } else {
            get_field(&body, type, field);
        }
    }
    if (body.bad || (!may_vary && reader_left(&body) > 0)) {
        return HVD_PROTOCOL;
    }
    in->at = reader.at + bytes - 1;
    *frame_p = frame;
    return HVD_OK;
}

// --- Channels ------------------------------------------------------------------------------------

void channel_open(channel_t *channel, int in_fd, int out_fd)
{
    *channel = (channel_t){.in_fd = in_fd, .out_fd = out_fd};
}

void channel_open_secure(channel_t *channel, int fd, hvd_channel_t *secure)
{
    *channel = (channel_t){.in_fd = fd, .out_fd = fd, .secure = secure};
}

void channel_close(channel_t *channel)
{
    hvd_channel_close(channel->secure);
    if (channel->in_fd >= 0) {
        fd_close(channel->in_fd);
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

void channel_put(channel_t *channel, const frame_t *frame)
{
    channel->is_closed |= !frame_put(&channel->out, frame);
}

bool channel_wants_write(const channel_t *channel)
{
    return !channel->is_closed &&
           (channel->out_sent < channel->out.len ||
            (channel->secure != NULL && hvd_channel_wants_write(channel->secure)));
}

bool channel_has_more(const channel_t *channel)
{
    return !channel->is_closed && channel->secure != NULL && channel_pending(channel->secure) > 0;
}

// Bytes moved; 0: not now; negative: the other side is gone.
static int64_t moved(ssize_t n)
{
    bool not_now = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    return not_now ? 0 : n;
}

void channel_send(channel_t *channel)
{
    int64_t n = 1;
    size_t end = MIN(channel->out.len, channel->out_sent + SEND_BYTES);
    while (n > 0 && channel_wants_write(channel)) {
        const uint8_t *data = channel->out.data + channel->out_sent;
        size_t bytes = end - channel->out_sent;
        n = channel->secure != NULL ? hvd_channel_send(channel->secure, data, bytes, NULL, 0)
                                    : moved(write(channel->out_fd, data, bytes));
        channel->is_closed |= n < 0;
        channel->out_sent += n > 0 ? (size_t)n : 0;
    }
    if (channel->out_sent == channel->out.len) {
        channel->out.len = channel->out_sent = 0;
    } else if (channel->out_sent > MAX(MIB, channel->out.len / 2)) { // fewer to move than were sent
        memmove(channel->out.data, channel->out.data + channel->out_sent,
                channel->out.len - channel->out_sent);
        channel->out.len -= channel->out_sent;
        channel->out_sent = 0;
    }
}

bool channel_receive(channel_t *channel)
{
    if (channel->in_used > 0) {
        memmove(channel->in.data, channel->in.data + channel->in_used,
                channel->in.len - channel->in_used);
        channel->in.len -= channel->in_used;
        channel->in_used = 0;
    }
    if (!buf_reserve(&channel->in, READ_BYTES)) {
        channel->is_closed = true;
        return false;
    }
    uint8_t *place = channel->in.data + channel->in.len;
    int64_t n;
    if (channel->secure != NULL) {
        n = hvd_channel_recv(channel->secure, place, READ_BYTES, NULL, 0);
    } else {
        n = read(channel->in_fd, place, READ_BYTES);
        n = n == 0 ? -1 : moved(n);
    }
    channel->in.len += n > 0 ? (size_t)n : 0;
    channel->is_closed |= n < 0;
    return n > 0;
}

bool channel_next(channel_t *channel, frame_t *frame_p)
{
    reader_t reader =
        reader_of(channel->in.data + channel->in_used, channel->in.len - channel->in_used);
    hvd_status_t status = frame_get(&reader, frame_p);
    if (status == HVD_OK) {
        channel->in_used = (size_t)(reader.at - channel->in.data);
    }
    channel->is_closed |= status == HVD_PROTOCOL;
    return status == HVD_OK;
}
