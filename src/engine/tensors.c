// SPDX-License-Identifier: Apache-2.0
//
// tensors.c - which memory a batch reads and writes.
//
// The tensors of all submissions in a batch are strung into two vectors of fragments (vec.h), what
// goes in and what comes out, in the order of the agreement; nothing is copied. Outputs whose size
// only the agreement told are allocated here. How is a matter of the
// operation's layout (ops.def), so most operations need nothing here.
#include "engine/run.h"

#include <stdlib.h>

// --- Tensors -------------------------------------------------------------------------------------

void tensor_set_rows(request_t *request, int t, int64_t rows)
{
    *(int64_t *)(uintptr_t)&request->tensors[t].shape[0] = rows;
}

bool each_tensor(runner_t *r, visit_fn visit, int member)
{
    batch_t *b = r->batch;
    for (int e = 0; e < b->n_entries; e++) {
        const decision_entry_t *entry = &b->entries[e];
        const int64_t *dims = entry->signature->dims;
        int at = 0;
        for (int t = 0; t < entry->signature->n_tensors; t++) {
            int n_dims = (int)dims[at++];
            tensor_view_t view = {.request = b->requests[e], .index = t, .rows = 1};
            view.row_bytes = hvd_dtype_bytes(entry->signature->dtype);
            for (int d = 0; d < n_dims; d++) {
                int64_t size = dims[at++];
                if (d == 0) {
                    view.rows = size;
                } else {
                    view.row_bytes *= (size_t)size;
                }
            }
            view.bytes = view.rows >= 0 ? (size_t)view.rows * view.row_bytes : 0;
            if (view.request != NULL) {
                view.input = (uint8_t *)(uintptr_t)view.request->tensors[t].input;
                view.output = view.request->tensors[t].output;
            }
            if (!visit(r, entry, &view, member)) {
                return false;
            }
        }
    }
    return true;
}

static bool add_bytes(runner_t *r, const decision_entry_t *entry, tensor_view_t *view, int member)
{
    (void)entry;
    (void)member;
    r->task.args.bytes += view->bytes;
    return true;
}

// --- Allreduce and broadcast ---------------------------------------------------------------------

// The same pieces in and out. A rank that has joined brings zeros.
static bool add_whole(runner_t *r, const decision_entry_t *entry, tensor_view_t *view, int member)
{
    (void)entry;
    (void)member;
    if (view->request == NULL) {
        uint8_t *zeros = r->zeros.data + r->in.bytes;
        return vec_add(&r->in, zeros, view->bytes) && vec_add(&r->out, zeros, view->bytes);
    }
    void *output = request_output(view->request, view->index);
    return (output != NULL || view->bytes == 0) && vec_add(&r->in, view->input, view->bytes) &&
           vec_add(&r->out, output, view->bytes);
}

static bool string_whole(runner_t *r)
{
    if (r->batch->requests[0] == NULL) {
        r->task.args.bytes = 0;
        each_tensor(r, add_bytes, 0);
        void *zeros = scratch(&r->zeros, r->task.args.bytes);
        if (zeros == NULL) {
            return false;
        }
        memset(zeros, 0, r->zeros.len);
    }
    if (!each_tensor(r, add_whole, 0)) {
        return false;
    }
    r->task.args.bytes = r->in.bytes;
    return true;
}

// --- Allgather -----------------------------------------------------------------------------------

static int64_t rows_of_member(const decision_entry_t *entry, int member, int t)
{
    return entry->sizes[member * entry->signature->n_tensors + t];
}

// All members get all blocks, or the root alone does.
static bool gathers_here(const runner_t *r)
{
    const coll_args_t *a = &r->task.args;
    return !op_has(a->op, OP_ROOTED) || a->member == a->root;
}

static bool start_gathered(runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                           int member)
{
    (void)member;
    int64_t rows = 0;
    for (int m = 0; m < r->task.args.size; m++) {
        int64_t own = rows_of_member(entry, m, view->index);
        r->blocks[m] += (size_t)own * view->row_bytes;
        rows += own;
    }
    rows = gathers_here(r) ? rows : 0;
    tensor_set_rows(view->request, view->index, rows);
    size_t bytes =
        (size_t)rows_of_member(entry, r->task.args.member, view->index) * view->row_bytes;
    void *output = request_output(view->request, view->index);
    return (output != NULL || rows == 0) && vec_add(&r->in, view->input, bytes);
}

static bool add_gathered(runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                         int member)
{
    int64_t before = 0;
    for (int m = 0; m < member; m++) {
        before += rows_of_member(entry, m, view->index);
    }
    size_t bytes = (size_t)rows_of_member(entry, member, view->index) * view->row_bytes;
    return vec_add(&r->out, view->output + (size_t)before * view->row_bytes, bytes);
}

static bool string_gathered(runner_t *r)
{
    memset(r->blocks, 0, (size_t)r->task.args.size * sizeof *r->blocks);
    bool ok = each_tensor(r, start_gathered, 0);
    for (int m = 0; ok && gathers_here(r) && m < r->task.args.size; m++) {
        ok = each_tensor(r, add_gathered, m);
    }
    r->task.args.blocks = r->blocks;
    return ok;
}

// --- Reducescatter -------------------------------------------------------------------------------

// The first rows % n members have one more.
int64_t scattered_rows(int64_t rows, int n, int m)
{
    return rows / n + (m < rows % n);
}

int64_t scattered_before(int64_t rows, int n, int m)
{
    return rows / n * m + MIN(m, rows % n);
}

static bool start_scattered(runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                            int member)
{
    (void)entry;
    (void)member;
    for (int m = 0; m < r->task.args.size; m++) {
        r->blocks[m] += (size_t)scattered_rows(view->rows, r->task.args.size, m) * view->row_bytes;
    }
    int64_t own = scattered_rows(view->rows, r->task.args.size, r->task.args.member);
    tensor_set_rows(view->request, view->index, own);
    void *output = request_output(view->request, view->index);
    size_t bytes = (size_t)own * view->row_bytes;
    return (output != NULL || bytes == 0) && vec_add(&r->out, output, bytes);
}

static bool add_scattered(runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                          int member)
{
    (void)entry;
    int64_t before = scattered_before(view->rows, r->task.args.size, member);
    size_t bytes = (size_t)scattered_rows(view->rows, r->task.args.size, member) * view->row_bytes;
    return vec_add(&r->in, view->input + (size_t)before * view->row_bytes, bytes);
}

static bool string_scattered(runner_t *r)
{
    memset(r->blocks, 0, (size_t)r->task.args.size * sizeof *r->blocks);
    bool ok = each_tensor(r, start_scattered, 0);
    for (int m = 0; ok && m < r->task.args.size; m++) {
        ok = each_tensor(r, add_scattered, m);
    }
    r->task.args.blocks = r->blocks;
    return ok;
}

// --- Alltoall ------------------------------------------------------------------------------------

static bool add_exchanged(runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                          int member)
{
    (void)member;
    request_t *request = view->request;
    int n = r->task.args.size;
    int me = r->task.args.member;
    request->received_splits = malloc((size_t)n * sizeof *request->received_splits);
    if (request->received_splits == NULL) {
        return false;
    }
    int64_t received = 0;
    size_t sent_bytes = 0;
    r->task.args.equal_blocks = true;
    for (int i = 1; i < n * n; i++) {
        r->task.args.equal_blocks &= entry->sizes[i] == entry->sizes[0];
    }
    for (int m = 0; m < n; m++) {
        int64_t rows = entry->sizes[m * n + me];
        r->send_bytes[m] = (size_t)entry->sizes[me * n + m] * view->row_bytes;
        r->recv_bytes[m] = (size_t)rows * view->row_bytes;
        request->received_splits[m] = (int32_t)rows;
        received += rows;
        sent_bytes += r->send_bytes[m];
    }
    tensor_set_rows(request, view->index, received);
    void *output = request_output(request, view->index);
    size_t bytes = (size_t)received * view->row_bytes;
    return (output != NULL || bytes == 0) && vec_add(&r->in, view->input, sent_bytes) &&
           vec_add(&r->out, output, bytes);
}

static bool string_exchanged(runner_t *r)
{
    r->task.args.send_bytes = r->send_bytes;
    r->task.args.recv_bytes = r->recv_bytes;
    return each_tensor(r, add_exchanged, 0);
}

// --- By layout -----------------------------------------------------------------------------------

static bool string_nothing(runner_t *r)
{
    r->task.args.bytes = 0;
    return true;
}

bool string_tensors(runner_t *r)
{
    static bool (*const string_by_layout[N_OP_LAYOUTS])(runner_t *) = {
        [LAYOUT_NOTHING] = string_nothing,     [LAYOUT_WHOLE] = string_whole,
        [LAYOUT_GATHERED] = string_gathered,   [LAYOUT_SCATTERED] = string_scattered,
        [LAYOUT_EXCHANGED] = string_exchanged,
    };
    vec_clear(&r->in);
    vec_clear(&r->out);
    return string_by_layout[op_infos[r->task.args.op].layout](r);
}

size_t largest_buffer(const runner_t *r)
{
    const coll_args_t *a = &r->task.args;
    size_t total = a->bytes;
    for (int m = 0; a->blocks != NULL && m < a->size; m++) {
        total += a->blocks[m];
    }
    if (a->send_bytes != NULL) { // one tensor, whose rows are in the decision for all pairs
        const decision_entry_t *entry = &r->batch->entries[0];
        size_t row_bytes = hvd_dtype_bytes(a->dtype);
        for (int d = 1; d < (int)entry->signature->dims[0]; d++) {
            row_bytes *= (size_t)entry->signature->dims[1 + d];
        }
        for (int i = 0; i < a->size * a->size; i++) {
            total += (size_t)entry->sizes[i] * row_bytes;
        }
    }
    return total;
}
