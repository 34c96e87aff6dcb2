// SPDX-License-Identifier: Apache-2.0
//
// frame.h - frames between the launcher and the agents of its hosts (frame.c).
//
// A channel belongs to one thread.
#ifndef HVD_LAUNCH_FRAME_H
#define HVD_LAUNCH_FRAME_H

#include "base/base.h"
#include "wire/codec.h"

enum frame_type {
    FRAME_HELLO = 1, // agent: version
    FRAME_PLAN,      // launcher: what to start
    FRAME_STARTED,   // agent: rank, pid
    FRAME_OUTPUT,    // agent: rank, stream, bytes
    FRAME_RESULT,    // agent: rank, bytes of its result file
    FRAME_EXITED,    // agent: rank, code, signal, was it out of memory, was it halted
    FRAME_PROBLEM,   // agent: rank or -1, exit code, sentence
    FRAME_STOP,      // launcher: signal, grace in ms
    FRAME_EXAMINE,   // launcher: the doctor asks; addresses and port to try
    FRAME_FINDING,   // agent: one line of the doctor's report
    FRAME_PING,      // both, when there is nothing else to say
    FRAME_DONE,      // agent: nothing of the job is left on this host
    FRAME_PLACE,     // launcher, elastic: rank, its environment in the next generation
    FRAME_NEWS,      // launcher, elastic: number, whether hosts were added or removed
    FRAME_READY,     // agent, elastic: rank, the generation it has left
};

#define FRAME_LIMIT ((size_t)1 << 30)
#define OUTPUT_CHUNK ((size_t)64 * 1024)

typedef struct frame {
    uint8_t type;
    const uint8_t *data; // in the channel's input, until the next channel_receive
    size_t bytes;
} frame_t;

// A non-blocking byte stream with frames on it. fd in may equal fd out.
typedef struct channel {
    int in_fd, out_fd;
    buf_t in, out;
    size_t in_used, out_sent;
    bool is_closed; // the other side is gone
} channel_t;

void channel_open(channel_t *channel, int in_fd, int out_fd);
void channel_close(channel_t *channel);               // closes the descriptors
size_t frame_begin(channel_t *channel, uint8_t type); // append to channel->out, then
void frame_end(channel_t *channel, size_t begin);
bool channel_wants_write(const channel_t *channel);
void channel_send(channel_t *channel);    // what can be written now
void channel_receive(channel_t *channel); // what can be read now
// false: no whole frame is there. A malformed frame sets is_closed.
bool channel_next(channel_t *channel, frame_t *frame_p);
void put_text(buf_t *buf, const char *text);
// Points into the frame and ends in '\0' there; "" (and bad) if it does not.
const char *get_text(reader_t *reader);

#endif
