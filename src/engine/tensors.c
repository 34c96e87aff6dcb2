// SPDX-License-Identifier: Apache-2.0
//
// tensors.c - which memory a batch reads and writes.
//
// The tensors of all submissions in a batch are strung into two vectors of fragments (vec.h), what
// goes in and what comes out, in the order of the agreement; nothing is copied. Outputs whose size
// only the agreement told are allocated here. A row of string_by_op is all an operation needs.
#include "engine/runner.h"

#include <stdlib.h>

// --- Tensors -------------------------------------------------------------------------------------

void *allocate_output(request_t *request, int t)
{
    hvd_tensor_t *tensor = &request->tensors[t];
    if (tensor->output != NULL) {
        return tensor->output;
    }
    if (request->asked.alloc != NULL) {
        tensor->output = request->asked.alloc(request->asked.arg, t, tensor->n_dims, tensor->shape);
        return tensor->output;
    }
    size_t bytes = hvd_dtype_bytes(request->asked.dtype);
    for (int d = 0; d < tensor->n_dims; d++) {
        bytes *= (size_t)tensor->shape[d];
    }
    request->owned[t] = malloc(MAX(bytes, 1));
    tensor->output = request->owned[t];
    return tensor->output;
}

bool each_tensor(batch_runner_t *r, visit_fn visit, int member)
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

static bool add_bytes(batch_runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                      int member)
{
    (void)entry;
    (void)member;
    r->args.bytes += view->bytes;
    return true;
}

// --- Allreduce and broadcast ---------------------------------------------------------------------

// The same pieces in and out. A rank that has joined brings zeros.
static bool add_whole(batch_runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                      int member)
{
    (void)entry;
    (void)member;
    if (view->request == NULL) {
        uint8_t *zeros = r->zeros.data + r->in.bytes;
        return vec_add(&r->in, zeros, view->bytes) && vec_add(&r->out, zeros, view->bytes);
    }
    void *output = allocate_output(view->request, view->index);
    return (output != NULL || view->bytes == 0) && vec_add(&r->in, view->input, view->bytes) &&
           vec_add(&r->out, output, view->bytes);
}

static bool string_whole(batch_runner_t *r)
{
    r->args.bytes = 0;
    each_tensor(r, add_bytes, 0);
    void *zeros = runner_scratch(&r->zeros, r->batch->requests[0] == NULL ? r->args.bytes : 0);
    if (zeros == NULL) {
        return false;
    }
    memset(zeros, 0, r->zeros.len);
    return each_tensor(r, add_whole, 0);
}

// --- Allgather -----------------------------------------------------------------------------------

static int64_t rows_of_member(const decision_entry_t *entry, int member, int t)
{
    return entry->sizes[member * entry->signature->n_tensors + t];
}

static bool start_gathered(batch_runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                           int member)
{
    (void)member;
    int64_t rows = 0;
    for (int m = 0; m < r->args.size; m++) {
        int64_t own = rows_of_member(entry, m, view->index);
        r->blocks[m] += (size_t)own * view->row_bytes;
        rows += own;
    }
    *(int64_t *)(uintptr_t)&view->request->tensors[view->index].shape[0] = rows;
    size_t bytes = (size_t)rows_of_member(entry, r->args.member, view->index) * view->row_bytes;
    void *output = allocate_output(view->request, view->index);
    return (output != NULL || rows == 0) && vec_add(&r->in, view->input, bytes);
}

static bool add_gathered(batch_runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                         int member)
{
    int64_t before = 0;
    for (int m = 0; m < member; m++) {
        before += rows_of_member(entry, m, view->index);
    }
    size_t bytes = (size_t)rows_of_member(entry, member, view->index) * view->row_bytes;
    return vec_add(&r->out, view->output + (size_t)before * view->row_bytes, bytes);
}

static bool string_gathered(batch_runner_t *r)
{
    memset(r->blocks, 0, (size_t)r->args.size * sizeof *r->blocks);
    bool ok = each_tensor(r, start_gathered, 0);
    for (int m = 0; ok && m < r->args.size; m++) {
        ok = each_tensor(r, add_gathered, m);
    }
    r->args.blocks = r->blocks;
    return ok;
}

// --- Reducescatter -------------------------------------------------------------------------------

// Rows of a tensor that member m keeps: the first rows % n members have one more.
static int64_t scattered_rows(int64_t rows, int n, int m)
{
    return rows / n + (m < rows % n);
}

static bool start_scattered(batch_runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                            int member)
{
    (void)entry;
    (void)member;
    for (int m = 0; m < r->args.size; m++) {
        r->blocks[m] += (size_t)scattered_rows(view->rows, r->args.size, m) * view->row_bytes;
    }
    int64_t own = scattered_rows(view->rows, r->args.size, r->args.member);
    *(int64_t *)(uintptr_t)&view->request->tensors[view->index].shape[0] = own;
    void *output = allocate_output(view->request, view->index);
    size_t bytes = (size_t)own * view->row_bytes;
    return (output != NULL || bytes == 0) && vec_add(&r->out, output, bytes);
}

static bool add_scattered(batch_runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                          int member)
{
    (void)entry;
    int64_t before = 0;
    for (int m = 0; m < member; m++) {
        before += scattered_rows(view->rows, r->args.size, m);
    }
    size_t bytes = (size_t)scattered_rows(view->rows, r->args.size, member) * view->row_bytes;
    return vec_add(&r->in, view->input + (size_t)before * view->row_bytes, bytes);
}

static bool string_scattered(batch_runner_t *r)
{
    memset(r->blocks, 0, (size_t)r->args.size * sizeof *r->blocks);
    bool ok = each_tensor(r, start_scattered, 0);
    for (int m = 0; ok && m < r->args.size; m++) {
        ok = each_tensor(r, add_scattered, m);
    }
    r->args.blocks = r->blocks;
    return ok;
}

// --- Alltoall ------------------------------------------------------------------------------------

static bool add_exchanged(batch_runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                          int member)
{
    (void)member;
    request_t *request = view->request;
    int n = r->args.size;
    int me = r->args.member;
    request->received_splits = malloc((size_t)n * sizeof *request->received_splits);
    if (request->received_splits == NULL) {
        return false;
    }
    int64_t received = 0;
    size_t sent_bytes = 0;
    r->args.equal_blocks = true;
    for (int i = 1; i < n * n; i++) {
        r->args.equal_blocks &= entry->sizes[i] == entry->sizes[0];
    }
    for (int m = 0; m < n; m++) {
        int64_t rows = entry->sizes[m * n + me];
        r->send_bytes[m] = (size_t)entry->sizes[me * n + m] * view->row_bytes;
        r->recv_bytes[m] = (size_t)rows * view->row_bytes;
        request->received_splits[m] = (int32_t)rows;
        received += rows;
        sent_bytes += r->send_bytes[m];
    }
    *(int64_t *)(uintptr_t)&request->tensors[view->index].shape[0] = received;
    void *output = allocate_output(request, view->index);
    size_t bytes = (size_t)received * view->row_bytes;
    return (output != NULL || bytes == 0) && vec_add(&r->in, view->input, sent_bytes) &&
           vec_add(&r->out, output, bytes);
}

static bool string_exchanged(batch_runner_t *r)
{
    r->args.send_bytes = r->send_bytes;
    r->args.recv_bytes = r->recv_bytes;
    return each_tensor(r, add_exchanged, 0);
}

// --- By operation --------------------------------------------------------------------------------

static bool (*const string_by_op[HVD_N_OPS])(batch_runner_t *) = {
    [HVD_ALLREDUCE] = string_whole,         [HVD_BROADCAST] = string_whole,
    [HVD_ALLGATHER] = string_gathered,      [HVD_ALLTOALL] = string_exchanged,
    [HVD_REDUCESCATTER] = string_scattered,
};

bool string_tensors(batch_runner_t *r)
{
    vec_clear(&r->in);
    vec_clear(&r->out);
    return string_by_op[r->args.op](r);
}
