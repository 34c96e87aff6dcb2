// SPDX-License-Identifier: Apache-2.0
//
// fold.c - the same traceback from several ranks is printed once: [0-3]<stderr>:.
//
// An error on all ranks, or on all but the one that caused it, prints the same lines from each. So
// what a rank writes to stderr from the first line of a traceback on is held back for a moment, and
// blocks that are equal by then are printed once, under the numbers of all their ranks. Whatever
// else ranks print is nobody's business: it goes out at once, line by line. This is about how
// things look; nothing is decided by it.
// One thread, the session's.
#include "launch/session.h"

#include <stdlib.h>

#define FOLD_NS NS_PER_S
#define MAX_HELD_BYTES (256 * KIB)

static const char *const openings[] = {
    "Traceback (most recent call last):",
    "User function raise error: Traceback (most recent call last):", // of horovod.run
    "horovod.common.exceptions.HorovodInternalError:",
};

static bool opens_block(const uint8_t *line, size_t bytes)
{
    for (size_t i = 0; i < N_ELEMENTS(openings); i++) {
        size_t length = strlen(openings[i]);
        if (bytes >= length && memcmp(line, openings[i], length) == 0) {
            return true;
        }
    }
    return false;
}

static size_t line_bytes(const uint8_t *line, size_t bytes)
{
    const uint8_t *end = memchr(line, '\n', bytes);
    return end != NULL ? (size_t)(end - line) + 1 : bytes;
}

// Where the first block begins; `bytes`: there is none.
static size_t find_block(const uint8_t *data, size_t bytes, bool is_line_begun)
{
    size_t at = is_line_begun ? line_bytes(data, bytes) : 0;
    while (at < bytes && !opens_block(data + at, bytes - at)) {
        at += line_bytes(data + at, bytes - at);
    }
    return at;
}

// A block is its first line, all lines that are indented or empty or say how exceptions follow from
// each other, the line that names the exception, and what belongs to that: indented lines again.
static size_t block_bytes(const uint8_t *data, size_t bytes)
{
    bool has_name = opens_block(data, bytes) && data[0] == 'h';
    size_t at = line_bytes(data, bytes);
    while (at < bytes) {
        bool is_inner = data[at] == ' ' || data[at] == '\n' || data[at] == '\t';
        bool is_next = opens_block(data + at, bytes - at) ||
                       (bytes - at > 4 &&
                        (memcmp(data + at, "The ", 4) == 0 || memcmp(data + at, "Duri", 4) == 0));
        if (has_name && !is_inner && !is_next) {
            break;
        }
        has_name |= !is_inner && !is_next;
        has_name &= !is_next;
        at += line_bytes(data + at, bytes - at);
    }
    return at;
}

size_t fold_hold(session_t *session, worker_t *worker, bytes_t data)
{
    held_output_t *held = &worker->held;
    size_t n_free = 0;
    if (held->bytes.len == 0) {
        n_free = find_block(data.data, data.len, held->is_line_begun);
        held->is_line_begun = data.len > 0 && data.data[data.len - 1] != '\n';
        held->until_ns = clock_ns() + FOLD_NS;
    }
    if (n_free < data.len) {
        buf_append(&held->bytes, data.data + n_free, data.len - n_free);
        session->fold_at_ns = MIN(session->fold_at_ns, held->until_ns);
    }
    return n_free;
}

static void let_out(session_t *session, worker_t *worker, const char *prefix, size_t bytes,
                    buf_t *lines)
{
    held_output_t *held = &worker->held;
    splitter_t *splitter = &worker->splitters[STREAM_STDERR];
    char own[96];
    prefix_make(&session->style, worker->place.rank, STREAM_STDERR, own, sizeof own);
    splitter_feed(splitter, prefix != NULL ? prefix : own, held->bytes.data, bytes, lines);
    held->is_line_begun = held->bytes.data[held->bytes.len - 1] != '\n';
}

// Prints what a rank holds, with all ranks that hold the same block.
static void release(session_t *session, worker_t *first)
{
    size_t bytes = block_bytes(first->held.bytes.data, first->held.bytes.len);
    int *ranks = calloc((size_t)session->n_workers, sizeof *ranks), n = 0;
    buf_t unused = {0};
    char prefix[160];
    for (int i = 0; ranks != NULL && i < session->n_workers; i++) {
        const buf_t *other = &session->workers[i]->held.bytes;
        bool is_same = other->len >= bytes && block_bytes(other->data, other->len) == bytes &&
                       memcmp(other->data, first->held.bytes.data, bytes) == 0;
        if (is_same && bytes > 0) {
            ranks[n++] = session->workers[i]->place.rank;
        }
        session->workers[i]->held.is_folded = is_same && bytes > 0;
    }
    prefix_make_for(&session->style, ranks, n, STREAM_STDERR, prefix, sizeof prefix);
    let_out(session, first, n > 1 ? prefix : NULL, bytes, &session->lines);
    for (int i = 0; i < session->n_workers; i++) {
        worker_t *worker = session->workers[i];
        if (worker != first && worker->held.is_folded) {
            let_out(session, worker, NULL, bytes, &unused); // for its tail
        }
        if (worker == first || worker->held.is_folded) {
            buf_t rest = worker->held.bytes;
            worker->held.bytes = (buf_t){0};
            worker->held.is_folded = false;
            session_print(session, worker, STREAM_STDERR,
                          (bytes_t){.data = rest.data + bytes, .len = rest.len - bytes});
            buf_free(&rest);
        }
    }
    buf_free(&unused);
    free(ranks);
}

void fold_release(session_t *session, uint64_t now_ns)
{
    uint64_t next_ns = NEVER_NS;
    for (int i = 0; i < session->n_workers; i++) {
        worker_t *worker = session->workers[i];
        if (worker->held.bytes.len == 0) {
            continue;
        }
        if (now_ns >= worker->held.until_ns || worker->held.bytes.len > MAX_HELD_BYTES) {
            release(session, worker);
        } else {
            next_ns = MIN(next_ns, worker->held.until_ns);
        }
    }
    session->fold_at_ns = next_ns;
}
