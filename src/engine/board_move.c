// SPDX-License-Identifier: Apache-2.0
//
// board_move.c - operations on the board that move blocks: allgather, broadcast, alltoall, and the
// reducescatter, which adds up blocks that have been moved.
//
// A contribution begins with where its rank stands and the sizes that members tell each other; the
// data of a short one follow, in an alltoall without the block that stays. If everyone has brought
// data, each rank takes what it gets out of the contributions, and its own from its tensor. If
// somebody's did not fit, all of them have learned the sizes and the number of a stream, which the
// engine then runs at once (board.c says why that is safe). A group brings no data: its blocks do
// not lie in memory in the order of members.
// Threads: as board.c says; board_move belongs to the holder of board_lock.
#include "engine/run.h"

// What a contribution begins with; the sizes follow, then the data.
typedef struct brought {
    uint64_t clock; // the last stream of this rank
    uint64_t has_data;
} brought_t;

static size_t head_bytes(const request_t *r)
{
    return sizeof(brought_t) + (size_t)r->n_sizes * sizeof *r->sizes;
}

static bool exchanges(const request_t *r)
{
    return op_infos[r->signature.op].layout == LAYOUT_EXCHANGED;
}

// Of one tensor, whose first dimension members tell.
static size_t row_bytes(const signature_t *s)
{
    size_t bytes = hvd_dtype_bytes(s->dtype);
    for (int d = 1; d < (int)s->dims[0]; d++) {
        bytes *= (size_t)s->dims[1 + d];
    }
    return bytes;
}

// Bytes in the input of a member before the block for `to`.
static size_t bytes_before(const int64_t *splits, int to, size_t row)
{
    int64_t rows = 0;
    for (int m = 0; m < to; m++) {
        rows += splits[m];
    }
    return (size_t)rows * row;
}

// What this rank has to bring of its tensor.
static size_t data_bytes(const request_t *r)
{
    bool is_idle =
        op_has(r->signature.op, OP_ROOTED) && r->board.ranks[r->board.member] != r->signature.root;
    if (exchanges(r)) {
        size_t row = row_bytes(&r->signature);
        return bytes_before(r->sizes, r->n_sizes, row) - (size_t)r->sizes[r->board.member] * row;
    }
    return is_idle ? 0 : r->trace.bytes;
}

bool board_may_move(const request_t *r, int n_members)
{
    const int64_t *dims = r->signature.dims;
    bool has_rows = true; // else the agreement has something to say about it
    for (int t = 0; t < r->signature.n_tensors; t++) {
        has_rows &= dims[0] > 0;
        dims += 1 + dims[0];
    }
    return r->n_sizes * n_members <= BOARD_SIZES &&
           (has_rows || !op_has(r->signature.op, OP_NEEDS_ROWS));
}

size_t board_move_bytes(const request_t *r)
{
    return head_bytes(r) + data_bytes(r);
}

void board_bring(const request_t *r, uint64_t clock, size_t room, uint8_t *to)
{
    bool fits = r->signature.n_tensors == 1 && board_move_bytes(r) <= room;
    brought_t head = {.clock = clock, .has_data = fits};
    memcpy(to, &head, sizeof head);
    memcpy(to + sizeof head, r->sizes, (size_t)r->n_sizes * sizeof *r->sizes);
    size_t bytes = fits ? data_bytes(r) : 0;
    size_t first = bytes; // before what stays here
    size_t stays = 0;
    if (bytes > 0 && exchanges(r)) {
        size_t row = row_bytes(&r->signature);
        first = bytes_before(r->sizes, r->board.member, row);
        stays = (size_t)r->sizes[r->board.member] * row;
    }
    if (bytes > 0) {
        const uint8_t *input = r->tensors[0].input;
        memcpy(to + head_bytes(r), input, first);
        memcpy(to + head_bytes(r) + first, input + first + stays, bytes - first);
    }
}

bool board_all_brought(request_t *r, const uint8_t *const *contributions)
{
    bool all = true;
    for (int m = 0; m < r->board.n_members; m++) {
        brought_t head;
        memcpy(&head, contributions[m], sizeof head);
        memcpy(r->board.sizes + m * r->n_sizes, contributions[m] + sizeof head,
               (size_t)r->n_sizes * sizeof *r->sizes);
        all &= head.has_data != 0;
    }
    return all;
}

// --- Taking what this rank gets ------------------------------------------------------------------

// Blocks of all members, one after the other. Its own comes from its tensor, and first: the others
// may go where that lies.
static void take_blocks(const runner_t *r, const size_t *bytes, size_t own_at,
                        const uint8_t *const *blocks)
{
    size_t at[BOARD_MEMBERS], end = 0;
    int me = r->task.args.member;
    for (int m = 0; m < r->task.args.size; m++) {
        at[m] = end;
        end += bytes[m];
    }
    vec_copy(&r->out, at[me], &r->in, own_at, bytes[me], false);
    for (int m = 0; m < r->task.args.size; m++) {
        if (m != me) {
            vec_scatter(&r->out, at[m], blocks[m], bytes[m]);
        }
    }
}

static void take_exchanged(const runner_t *r, const uint8_t *const *data)
{
    const decision_entry_t *entry = &r->batch->entries[0];
    const uint8_t *blocks[BOARD_MEMBERS];
    size_t row = row_bytes(entry->signature);
    int n = r->task.args.size, me = r->task.args.member;
    for (int m = 0; m < n; m++) {
        const int64_t *splits = entry->sizes + m * n;
        size_t stays = m < me ? (size_t)splits[m] * row : 0; // was not brought
        blocks[m] = data[m] + bytes_before(splits, me, row) - stays;
    }
    size_t own_at = bytes_before(entry->sizes + me * n, me, row);
    take_blocks(r, r->recv_bytes, own_at, blocks);
}

static void take_scattered(const runner_t *r, const uint8_t *const *data)
{
    const coll_args_t *a = &r->task.args;
    const void *inputs[BOARD_MEMBERS];
    size_t before = 0;
    for (int m = 0; m < a->member; m++) {
        before += r->blocks[m];
    }
    for (int m = 0; m < a->size; m++) {
        inputs[m] = data[m] + before;
    }
    if (r->out.n > 0) { // one tensor, so one piece
        reduce_many(a->dtype, a->reduce, r->out.fragments[0].at, NULL, inputs, a->size,
                    r->blocks[a->member] / hvd_dtype_bytes(a->dtype), r->task.prescale,
                    r->task.finish);
    }
}

bool board_move(hvd_ctx_t *ctx, runner_t *r, request_t *request,
                const uint8_t *const *contributions)
{
    const board_try_t *t = &request->board;
    process_set_t set = {
        .n = t->n_members, .member = t->member, .ranks = (int *)(uintptr_t)t->ranks};
    decision_entry_t entry = {
        .name = request->name, .signature = &request->signature, .sizes = t->sizes};
    batch_t batch = {.n_entries = 1, .entries = &entry, .requests = &request, .set = &set};
    const uint8_t *data[BOARD_MEMBERS];
    for (int m = 0; m < t->n_members; m++) {
        data[m] = contributions[m] + head_bytes(request);
    }
    r->batch = &batch;
    r->task = run_task_of(ctx, r, &batch);
    bool strung = string_tensors(r);
    if (strung) {
        switch (op_infos[request->signature.op].layout) {
        case LAYOUT_GATHERED:
            take_blocks(r, r->blocks, 0, data);
            break;
        case LAYOUT_EXCHANGED:
            take_exchanged(r, data);
            break;
        case LAYOUT_SCATTERED:
            take_scattered(r, data);
            break;
        default: // broadcast
            if (r->task.args.member == r->task.args.root) {
                vec_copy(&r->out, 0, &r->in, 0, r->out.bytes, false);
            } else {
                vec_scatter(&r->out, 0, data[r->task.args.root], r->out.bytes);
            }
            break;
        }
    }
    r->batch = NULL;
    return strung;
}
