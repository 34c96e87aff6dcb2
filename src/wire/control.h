// SPDX-License-Identifier: Apache-2.0
//
// control.h - the lines inside a frame of the agreement: bytes to structures and back.
//
// A frame body is a sequence of lines. Lines that go up the tree say what is ready in a subtree;
// lines that go down are records of the job's log. A line starts with one byte: the kind in the
// low five bits, three flags above it. Numbers are varints, so the common line, "ready: id 7",
// takes two bytes.
//
// The reader trusts nobody: every count is checked against its limit and against the bytes that are
// left before memory is taken, so reading a frame of n bytes takes at most 8n bytes. What a line
// means, and whether this neighbour may say it now, is for coord/ to judge. Pure functions of their
// arguments; whoever owns the reader or the buffer calls them, one thread at a time.
#ifndef HVD_WIRE_CONTROL_H
#define HVD_WIRE_CONTROL_H

#include "wire/codec.h"

#define CONTROL_MAX_NAME_BYTES (64 * KIB - 1)
#define CONTROL_MAX_WORDS ((size_t)1 << 18) // of the shapes of one request
#define CONTROL_MAX_SIZES ((size_t)1 << 22) // per-rank sizes of one request, all members
#define CONTROL_MAX_PAYLOAD_BYTES (MIB)     // accumulators that ride along
#define CONTROL_MAX_TEXT_BYTES (16 * KIB)
#define CONTROL_MAX_RANKS ((size_t)1 << 20)
#define CONTROL_NO_RANK ((int)CONTROL_MAX_RANKS)
#define CONTROL_MAX_REASON_BYTES ((size_t)300) // why a rank leaves
#define CONTROL_MAX_ASKED 32                   // entries in one question about a stall
#define CONTROL_MAX_RUN ((size_t)1 << 20)      // entries of one batch

typedef enum control_kind {
    // Up: from a node, about its whole subtree.
    LINE_READY = 1, // id
    LINE_NEW,       // set, name, signature
    LINE_CONFLICT,  // set, name, two signatures that differ
    LINE_JOIN,      // rank
    LINE_EVICTED,   // id: nothing more will come under it from here
    LINE_STALLED,   // set, name, age: incomplete here for long
    LINE_ANSWER,    // inquiry, bitmaps of the ranks that have each entry asked about, how many can
                    // only wait, what the others last did
    LINE_STOP,      // rank that asks for shutdown, the error that made it
    // Down: records of the log.
    RECORD_RUN,        // batch, set, entries
    RECORD_ERROR,      // batch, set, name, status, text
    RECORD_EVICT,      // id
    RECORD_JOINED,     // batch, rank that joined last
    RECORD_SET_ADD,    // batch, set, name of the entry that asked, ranks
    RECORD_SET_REMOVE, // batch, set, name of the entry that asked
    RECORD_INQUIRE,    // inquiry, entries asked about
    RECORD_REPORT,     // batch, status: HVD_STALLED, HVD_TIMEOUT if short, text
    RECORD_SHUTDOWN,   // batch, rank that asked, the error that made it
    // Both ways.
    LINE_ABORT,     // status, rank that is the cause or CONTROL_NO_RANK, text
    LINE_HEARTBEAT, // what the sender has submitted, has in flight, how long ago, the last name
    // Up, after a heartbeat.
    LINE_PROGRESS, // the oldest batch that runs below, and for how long nothing of it moved
    // Down, outside the log.
    RECORD_OFFER, // id, what all other branches have given to its round
    CONTROL_N_KINDS
} control_kind_t;

typedef struct control_text {
    const char *at; // not terminated
    size_t bytes;
} control_text_t;

// One line. Which fields mean something follows from the kind. When read, the others are zero in
// the first half, and undefined in the second. Pointers lead into the frame or into the reader and
// live until its next call.
typedef struct control_line {
    control_kind_t kind;
    bool zeros;     // READY, NEW, CONFLICT: members that joined without submitting are counted
    bool rides;     // RUN: every entry brings its result
    uint32_t id;    // READY, EVICTED, EVICT, OFFER
    uint64_t batch; // records, PROGRESS
    uint32_t set;
    int rank; // JOIN, STOP, JOINED, SHUTDOWN, ABORT
    hvd_status_t status;
    int n_items;            // RUN, INQUIRE: how many items follow; ANSWER: how many bitmaps
    const uint8_t *payload; // READY, NEW, OFFER: accumulators. ANSWER: the bitmaps
    size_t payload_bytes;
    const int64_t *sizes; // NULL: none, or as last time. SET_ADD: ranks
    int n_sizes;
    int n_variants; // NEW: 1, CONFLICT: 2, READY: 0
    // The second half.
    int example_ranks[2]; // a rank that submitted each variant; READY: [0], -1 if every member did
    uint64_t age_ns;      // STALLED
    uint32_t inquiry;     // INQUIRE, ANSWER: which
    uint32_t n_blocked;   // ANSWER
    // HEARTBEAT: operations submitted and not yet done, and for how long nothing was submitted.
    uint64_t n_submitted;
    uint32_t n_in_flight;
    uint64_t quiet_ns;
    // PROGRESS: since something of the batch moved, on the rank where that was last and where
    // first.
    uint64_t least_ns, longest_ns;
    control_text_t name, text;
    signature_t variants[2];
} control_line_t;

// One entry of RECORD_RUN.
typedef struct control_run {
    uint32_t id; // 0: not remembered
    bool named;  // name and signature are given: the id is new
    int n_sizes;
    const int64_t *sizes;
    const uint8_t *result; // NULL: none
    size_t result_bytes;
    control_text_t name;   // only if named
    signature_t signature; // only if named
} control_run_t;

// One entry of RECORD_INQUIRE.
typedef struct control_asked {
    uint32_t set;
    control_text_t name;
} control_asked_t;

// --- Frames -------------------------------------------------------------------------------------
// What neighbours of the tree send each other: the length of a body, u32 little-endian, and the
// body. A frame without a body is a farewell: nothing comes after it.

#define FRAME_HEADER_BYTES 4
#define FRAME_MAX_BYTES ((size_t)64 << 20) // of a body

// The body of the frame that begins at `data`; the whole frame takes FRAME_HEADER_BYTES more.
// HVD_IN_PROGRESS: it has not come whole.
hvd_status_t frame_read(const uint8_t *data, size_t bytes, size_t *body_bytes_p, err_t *err);
void frame_write_header(uint8_t header[FRAME_HEADER_BYTES], size_t body_bytes);

// --- Lines --------------------------------------------------------------------------------------

// Do the words hold exactly n_tensors shapes? A first dimension may be -1: left out.
bool control_words_are_shapes(const int64_t *words, int n_words, int n_tensors);

// --- Reading ------------------------------------------------------------------------------------

typedef struct control_reader {
    reader_t in;
    const uint8_t *line_at; // where the last line begins, to pass it on as it is
    buf_t words;            // int64_t: shapes and sizes of the last line or item
} control_reader_t;

// Keeps the memory of earlier frames. control_reader_free() at the end.
void control_open(control_reader_t *reader, const void *body, size_t bytes);
void control_reader_free(control_reader_t *reader);
// The next line; false at the end, or when the rest is not a line (control_bad tells).
bool control_next(control_reader_t *reader, control_line_t *line_p);
// The items after RECORD_RUN and RECORD_INQUIRE; to be called exactly n_items times.
bool control_next_run(control_reader_t *reader, control_run_t *run_p);
bool control_next_asked(control_reader_t *reader, control_asked_t *asked_p);
static inline bool control_bad(const control_reader_t *reader)
{
    return reader->in.bad || reader->words.failed;
}

// --- Writing ------------------------------------------------------------------------------------
// Lines are written from the same structure they are read into, kind by kind; a failed allocation
// shows in out->failed.

void control_put(buf_t *out, const control_line_t *line);
// The commonest two: LINE_READY without sizes, nobody joined (payload may be NULL), and RECORD_RUN.
void control_put_ready(buf_t *out, uint32_t id, const void *payload, size_t payload_bytes);
void control_put_batch(buf_t *out, uint64_t batch, uint32_t set, bool rides, int n_items);
void control_put_run(buf_t *out, const control_run_t *run);
void control_put_asked(buf_t *out, const control_asked_t *asked);

#endif
