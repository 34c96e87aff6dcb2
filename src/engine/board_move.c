// SPDX-License-Identifier: Apache-2.0
//
// board_move.c - operations on the board that move blocks: allgather, broadcast, alltoall, and the
// reducescatter, which adds up blocks that have been moved.
//
// A contribution begins with where its rank stands and the sizes that members tell each other; the
// data of a short one follow. If everyone has brought data, each rank takes what it gets out of the
// contributions. If somebody's did not fit, all of them have learned the sizes and the number of a
// stream, which the engine then runs at once (board.c says why that is safe). A group brings no
// data: its blocks do not lie in memory in the order of members.
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

// What this rank has to bring of its tensor.
static size_t data_bytes(const request_t *r)
{
    bool is_idle =
        op_has(r->signature.op, OP_ROOTED) && r->board.ranks[r->board.member] != r->signature.root;
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
    if (fits && data_bytes(r) > 0) {
        memcpy(to + head_bytes(r), r->tensors[0].input, data_bytes(r));
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

static void take_gathered(const runner_t *r, const uint8_t *const *data)
{
    size_t at = 0;
    for (int m = 0; m < r->task.args.size; m++) {
        vec_scatter(&r->out, at, data[m], r->blocks[m]);
        at += r->blocks[m];
    }
}

static void take_exchanged(const runner_t *r, const uint8_t *const *data)
{
    const decision_entry_t *entry = &r->batch->entries[0];
    int n = r->task.args.size;
    int me = r->task.args.member;
    size_t row_bytes = hvd_dtype_bytes(r->task.args.dtype);
    for (int d = 1; d < (int)entry->signature->dims[0]; d++) {
        row_bytes *= (size_t)entry->signature->dims[1 + d];
    }
    size_t at = 0;
    for (int m = 0; m < n; m++) {
        int64_t rows_before = 0; // for members before this one, in the input of m
        for (int k = 0; k < me; k++) {
            rows_before += entry->sizes[m * n + k];
        }
        vec_scatter(&r->out, at, data[m] + (size_t)rows_before * row_bytes, r->recv_bytes[m]);
        at += r->recv_bytes[m];
    }
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
            take_gathered(r, data);
            break;
        case LAYOUT_EXCHANGED:
            take_exchanged(r, data);
            break;
        case LAYOUT_SCATTERED:
            take_scattered(r, data);
            break;
        default: // broadcast
            vec_scatter(&r->out, 0, data[r->task.args.root], r->out.bytes);
            break;
        }
    }
    r->batch = NULL;
    return strung;
}
