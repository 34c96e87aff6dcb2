// SPDX-License-Identifier: Apache-2.0
//
// fuzz_frame.c - frames between the launcher and its agents, from either side.
//
// What was read points into the bytes it was read from, and can be written and read again with the
// same meaning: the second writing equals the first. A plan has frames in it, which are read too.
#include "agent/frame.h"
#include "fuzz.h"

static void check_inside(bytes_t bytes, const uint8_t *data, const uint8_t *end)
{
    MUST(bytes.len == 0 || (bytes.data >= data && bytes.data + bytes.len <= end));
}

// Reads frames until one is no frame; writes them to `out`. How many there were.
static int copy_frames(const uint8_t *data, size_t bytes, buf_t *out)
{
    reader_t reader = reader_of(data, bytes);
    frame_t frame;
    int n = 0;
    for (; frame_get(&reader, &frame) == HVD_OK; n++) {
        if (frame.kind == FRAME_PLAN) {
            buf_t ranks = {0};
            check_inside(frame.plan.env, data, data + bytes);
            check_inside(frame.plan.ranks, data, data + bytes);
            MUST(frame.plan.command.len == 0 ||
                 frame.plan.command.data[frame.plan.command.len - 1] == '\0');
            copy_frames(frame.plan.ranks.data, frame.plan.ranks.len, &ranks);
            buf_free(&ranks);
        } else if (frame.kind == FRAME_OUTPUT) {
            check_inside(frame.output.data, data, data + bytes);
        } else if (frame.kind == FRAME_FINDING) {
            MUST(strlen(frame.finding.fix) < bytes);
        }
        MUST(frame_put(out, &frame));
    }
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    buf_t once = {0}, twice = {0};
    int n_frames = copy_frames(data, bytes, &once);
    MUST(copy_frames(once.data, once.len, &twice) == n_frames);
    MUST(once.len == twice.len && (once.len == 0 || memcmp(once.data, twice.data, once.len) == 0));
    buf_free(&once);
    buf_free(&twice);
    return 0;
}
