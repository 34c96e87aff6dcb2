// SPDX-License-Identifier: Apache-2.0
//
// fuzz_control.c - a frame body of the agreement, from any neighbour.
//
// Reading n bytes takes memory in proportion to n, and what was read can be written and read again
// with the same meaning: the second writing equals the first.
#include "fuzz.h"
#include "wire/control.h"

// Beyond 8 bytes for each byte of the frame: what a buffer takes at first.
#define FIXED_BYTES (64 * KIB)

// Reads a body, and writes what it says to `out`. How many lines made sense.
static int copy_lines(const void *body, size_t bytes, buf_t *out)
{
    control_reader_t reader = {0};
    control_line_t line;
    int n_lines = 0;
    bool whole = true;
    control_open(&reader, body, bytes);
    while (whole && control_next(&reader, &line)) {
        buf_t written = {0};
        if (line.kind == RECORD_RUN) {
            control_put_batch(&written, line.batch, line.set, line.rides, line.n_items);
        } else {
            control_put(&written, &line);
        }
        for (int i = 0; whole && i < line.n_items && line.kind == RECORD_RUN; i++) {
            control_run_t run;
            if ((whole = control_next_run(&reader, &run))) {
                control_put_run(&written, &run);
            }
        }
        for (int i = 0; whole && i < line.n_items && line.kind == RECORD_INQUIRE; i++) {
            control_asked_t asked;
            if ((whole = control_next_asked(&reader, &asked))) {
                control_put_asked(&written, &asked);
            }
        }
        if (whole) {
            put_bytes(out, written.data, written.len);
            n_lines++;
        }
        buf_free(&written);
    }
    MUST(reader.words.cap <= 8 * bytes + FIXED_BYTES);
    control_reader_free(&reader);
    return n_lines;
}

// The same bytes as a stream that comes in pieces: a frame is whole exactly when its last byte is
// there, and is never longer than allowed.
static void cut_frames(const uint8_t *data, size_t bytes)
{
    size_t at = 0, body_bytes;
    err_t err;
    while (frame_read(data + at, bytes - at, &body_bytes, &err) == HVD_OK) {
        size_t whole = FRAME_HEADER_BYTES + body_bytes;
        MUST(body_bytes <= FRAME_MAX_BYTES && whole <= bytes - at);
        MUST(frame_read(data + at, whole - 1, &body_bytes, &err) == HVD_IN_PROGRESS);
        at += whole;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes > 0) {
        cut_frames(data, bytes);
    }
    buf_t once = {0}, twice = {0};
    int n_lines = copy_lines(data, bytes, &once);
    MUST(copy_lines(once.data, once.len, &twice) == n_lines);
    MUST(once.len == twice.len && (once.len == 0 || memcmp(once.data, twice.data, once.len) == 0));
    buf_free(&once);
    buf_free(&twice);
    return 0;
}
