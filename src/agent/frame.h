// SPDX-License-Identifier: Apache-2.0
//
// frame.h - frames between the launcher and the agents of its hosts (frame.c).
//
// Who says what, with which fields, is the table in frame.c; frame_put and frame_get are the only
// writer and reader. A channel belongs to one thread.
#ifndef HVD_AGENT_FRAME_H
#define HVD_AGENT_FRAME_H

#include "boot/boot.h"
#include "wire/codec.h"

typedef enum frame_kind {
    FRAME_HELLO = 1, // agent: version, and who it is if it was not called
    FRAME_PLAN,      // launcher: what to start
    FRAME_STARTED,   // agent: a rank runs
    FRAME_OUTPUT,    // agent: what a rank printed
    FRAME_RESULT,    // agent: a piece of a rank's result file
    FRAME_EXITED,    // agent: how a rank ended
    FRAME_PROBLEM,   // agent: of a rank, or of the host (rank -1)
    FRAME_STOP,      // launcher
    FRAME_WHERE,     // launcher: ranks are about to be stopped, where are they? agent: one is here
    FRAME_EXAMINE,   // launcher: the doctor asks; addresses and port to try
    FRAME_FINDING,   // agent: one line of the doctor's report
    FRAME_PING,      // both, when there is nothing else to say
    FRAME_DONE,      // agent: nothing of the job is left on this host
    FRAME_PLACE,     // launcher: a rank and its environment: in a plan, or in the next generation
    FRAME_NEWS,      // launcher, elastic: hosts were added or removed
    FRAME_READY,     // agent: a rank has left a generation; 0: it has begun
    FRAME_WATCH,     // launcher: from now on, how ranks do
    FRAME_SNAPSHOT,  // agent: how one does
    FRAME_END,       // launcher, to an agent that stays: everything is over, with this exit code
    FRAME_LEAVING,   // agent, elastic: its host is about to go
    FRAME_WANTS,     // agent, elastic: how a rank wants to be treated
    FRAME_N_KINDS
} frame_kind_t;

#define FRAME_LIMIT ((size_t)1 << 30)
enum {
    WANTS_WARNING = 1, // it writes a checkpoint if it is told of the end
    WANTS_SHRINK = 2,  // after a failure, to go on without waiting for others
};

#define BLAME_BYTES 512 // what a rank did that others gave up for

typedef struct bytes {
    const uint8_t *data;
    size_t len;
} bytes_t;

// What the doctor has found on a host.
typedef struct finding {
    bool is_fault;
    const char *what, *found, *fix;
    const char *version; // has to be the same on all hosts; "": of nothing that has one
} finding_t;

// What a frame says. Texts and bytes of one that was read point into what it was read from; texts
// end in '\0' there. `rank` is the id of a rank, which in an elastic job stays the same.
typedef struct frame {
    frame_kind_t kind;
    union {
        struct {
            const char *version;
            const char *host;  // as the launcher calls it; "" unless the agent dials
            int32_t slot;      // among agents of that name
            const char *about; // for people
        } hello;
        struct {
            bytes_t secret;
            bool is_remote;
            int32_t silence_ms; // after which the launcher counts as gone; 0: never
            const char *directory;
            bytes_t command, env; // lists: each word, each NAME=value, with its '\0'
            bool wants_results, is_elastic;
            bytes_t payload;
            bytes_t ranks; // frames of kind FRAME_PLACE
        } plan;
        struct {
            int32_t rank, pid;
        } started;
        struct {
            int32_t rank, stream;
            bytes_t data;
        } output;
        struct {
            int32_t rank;
            bytes_t data;
        } result;
        struct {
            int32_t rank, code, signo;
            bool was_oom, was_halted; // halted: as by SIGSTOP, when it was to end
            int32_t blames;           // the rank that made it give up, itself perhaps; -1: none
            const char *what;         // that one did; "": it was lost
        } exited;
        struct {
            int32_t rank, code;
            const char *text;
        } problem;
        struct {
            int32_t rank; // -1: all, and then everything ends
            int32_t signo, grace_ms;
        } stop;
        struct {
            int32_t rank;     // as the program knows it; -1 from the launcher
            const char *text; // "" likewise
        } where;
        struct {
            const char *addresses;
            int32_t port;
            int64_t time_s;        // the launcher's
            const char *directory; // of the ranks, and their environment
            bytes_t env;           // a list
            const char *python;    // the command's; "": the first in PATH
            const char *script;    // that it runs, or the module; "": none that is known
            bool is_module;
            bool needs_horovod; // in that Python
        } examine;
        finding_t finding;
        struct {
            int32_t rank;
            bytes_t env; // a list, as above
        } place;
        struct {
            int32_t number, what;
        } news;
        struct {
            int32_t rank, generation;
            int32_t blames; // the rank of that generation that is lost to it; -1: none
        } ready;
        struct {
            int32_t period_ms; // 0: no more
        } watch;
        struct {
            int32_t rank;
            const char *text; // its page /watch, and what the host says of its process
        } snapshot;
        struct {
            int32_t code;
        } end;
        struct {
            int32_t rank;
            int32_t what; // WANTS_..., added up
        } wants;
    };
} frame_t;

// Appends the frame; false, with nothing appended: no memory, or longer than FRAME_LIMIT.
bool frame_put(buf_t *out, const frame_t *frame);
// HVD_OK: a whole frame was read; HVD_IN_PROGRESS: more of it is to come; HVD_PROTOCOL: nobody
// sends this.
hvd_status_t frame_get(reader_t *in, frame_t *frame_p);

// --- A non-blocking byte stream with frames on it. fd in may equal fd out. -----------------------

typedef struct channel {
    int in_fd, out_fd;
    buf_t in, out;
    size_t in_used, out_sent;
    hvd_channel_t *secure; // NULL: the bytes are as they are
    bool is_closed;        // the other side is gone
} channel_t;

void channel_open(channel_t *channel, int in_fd, int out_fd);
// A socket whose other end has proved the secret. Takes both over.
void channel_open_secure(channel_t *channel, int fd, hvd_channel_t *secure);
void channel_close(channel_t *channel); // closes the descriptors
void channel_put(channel_t *channel, const frame_t *frame);
bool channel_wants_write(const channel_t *channel);
bool channel_has_more(const channel_t *channel); // to receive, which poll() does not show
// What can be moved now, a piece at most: who has more, or whom others may want meanwhile, comes
// back. channel_receive: something has come.
void channel_send(channel_t *channel);
bool channel_receive(channel_t *channel);
// false: no whole frame is there; a malformed one sets is_closed. Until the next channel_receive.
bool channel_next(channel_t *channel, frame_t *frame_p);

#endif
