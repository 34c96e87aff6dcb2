// SPDX-License-Identifier: Apache-2.0
//
// outbox.c - bytes for the neighbours in the tree.
//
// Lines for a neighbour are collected in one frame until the engine asks for bytes; what it could
// not send stays in front of the next frame. Cost of a line: its bytes. The holder of the engine
// calls.
#include "coord/internal.h"

#define MAX_OPEN_FRAME_BYTES (256 * KIB) // a longer frame is closed before the next line
#define COMPACT_BYTES (64 * KIB)         // sent bytes in front of an outbox worth reclaiming

int coord_n_neighbours(const coord_t *coord)
{
    return coord->n_parents + coord->n_children;
}

int coord_neighbour(const coord_t *coord, int i)
{
    return coord->outboxes[i].rank;
}

int branch_rank(const coord_t *coord, int branch)
{
    return branch == 0 ? coord->params.rank : coord->outboxes[coord->n_parents + branch - 1].rank;
}

static void close_frame(outbox_t *box)
{
    frame_write_header(box->bytes.data + box->frame_at,
                       box->bytes.len - box->frame_at - FRAME_HEADER_BYTES);
    box->is_open = false;
}

static void open_frame(outbox_t *box)
{
    if (box->sent > COMPACT_BYTES && box->sent > box->bytes.len / 2) {
        box->bytes.len -= box->sent;
        memmove(box->bytes.data, box->bytes.data + box->sent, box->bytes.len);
        box->sent = 0;
    }
    box->frame_at = box->bytes.len;
    box->is_open = buf_append(&box->bytes, NULL, FRAME_HEADER_BYTES) != NULL;
}

buf_t *outbox_line(coord_t *coord, int neighbour)
{
    outbox_t *box = &coord->outboxes[neighbour];
    if (box->is_open && box->bytes.len - box->frame_at > MAX_OPEN_FRAME_BYTES) {
        close_frame(box);
    }
    if (!box->is_open) {
        open_frame(box);
    }
    return &box->bytes;
}

void outbox_to_children(coord_t *coord, const set_t *set, const void *line, size_t bytes)
{
    for (int i = 0; i < coord->n_children; i++) {
        if (set == NULL || set->part_of[i + 1] >= 0) {
            put_bytes(outbox_line(coord, coord->n_parents + i), line, bytes);
        }
    }
}

size_t coord_outgoing(coord_t *coord, int i, const void **bytes_p)
{
    outbox_t *box = &coord->outboxes[i];
    if (UNLIKELY(box->bytes.failed)) {
        // A line is cut in the middle: nothing more may go out, and the job must end.
        coord->no_memory = true;
        return 0;
    }
    if (box->is_open) {
        close_frame(box);
    }
    *bytes_p = box->bytes.data != NULL ? box->bytes.data + box->sent : NULL;
    return box->bytes.len - box->sent;
}

void coord_sent(coord_t *coord, int i, size_t bytes)
{
    outbox_t *box = &coord->outboxes[i];
    INVARIANT(box->sent <= box->bytes.len && bytes <= box->bytes.len - box->sent);
    box->sent += MIN(bytes, box->bytes.len - box->sent);
    if (box->sent == box->bytes.len) {
        box->bytes.len = 0;
        box->sent = 0;
    }
}
