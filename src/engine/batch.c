// SPDX-License-Identifier: Apache-2.0
//
// batch.c - from a decision of coord to memory moved.
//
// A batch is one or more submissions of one kind, agreed to run together. Its tensors are strung
// into two vectors, what goes in and what comes out (vec.h), and one of six routes is taken:
//
//   alone      one member: copy and scale
//   stream     all members on this host: straight through shared memory, no packing
//   two-level  allreduce over hosts: reduce-scatter inside each host, allreduce of each shard
//              between hosts, allgather inside each host; every rank carries its own shard
//   plan       everything else: pack if there are several pieces, run the plan of an algorithm over
//              links, unpack
//   pieces     Adasum: one plan after the other, since each tensor is weighed by itself
//   mpi        the user's MPI library does it, where asked to (HOROVOD_CPU_OPERATIONS)
//
// Batches run one after the other, in the order of the log. Memory is kept from batch to batch.
// Threads: the holder of the engine.
#define _GNU_SOURCE
#include "engine/engine.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#define TWO_LEVEL_LEAST_BYTES (32 * KIB)
#define SHARD_ALIGN ((size_t)64)

typedef enum phase { PHASE_REDUCE_IN_HOST, PHASE_BETWEEN_HOSTS, PHASE_GATHER_IN_HOST } phase_t;

struct batch_runner {
    stream_t *stream; // NULL without shared memory
    atomic_uint_fast64_t *stream_clock;
    exec_t *exec;
    plan_t plan;

    // The batch being run.
    batch_t *batch;
    route_t route;
    phase_t phase;
    vec_t in, out, shard;
    coll_args_t args; // of the whole set
    double pre, post;
    bool moves_only;      // allgather, broadcast, alltoall: no arithmetic
    coll_args_t sub_args; // of the stream or plan under way
    const int *sub_ranks; // global ranks of its members
    bool widened;         // the plan runs on float32 although the tensors are half
    uint8_t *plan_out;    // contiguous output to unpack afterwards; NULL: none
    uint8_t *mpi_out;     // where MPI leaves its result
    vec_t piece_in, piece_out;
    size_t n_pieces, next_piece, piece_at;

    // By member, for the batch; by member of the group, for the phase.
    size_t *blocks, *send_bytes, *recv_bytes, *shard_bytes;
    int *host_of, *local_ranks, *cross_ranks;
    int n_local, local_member, n_shards, n_cross, cross_member;
    size_t *shard_at;

    buf_t packed, unpacked, tmp, acc, zeros;
    buf_t pieces; // bytes of each tensor, as size_t
};

// --- Life ----------------------------------------------------------------------------------------

hvd_status_t batch_runner_new(hvd_ctx_t *ctx, batch_runner_t **runner_p, err_t *err)
{
    batch_runner_t *r = calloc(1, sizeof *r);
    if (r == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to run batches");
    }
    *runner_p = r;
    size_t n = (size_t)ctx->job.size;
    r->stream_clock = &ctx->stream_clock;
    r->exec = exec_new();
    r->blocks = calloc(n, sizeof *r->blocks);
    r->send_bytes = calloc(n, sizeof *r->send_bytes);
    r->recv_bytes = calloc(n, sizeof *r->recv_bytes);
    r->shard_bytes = calloc(n, sizeof *r->shard_bytes);
    r->shard_at = calloc(n + 1, sizeof *r->shard_at);
    r->host_of = calloc(n, sizeof *r->host_of);
    r->local_ranks = calloc(n, sizeof *r->local_ranks);
    r->cross_ranks = calloc(n, sizeof *r->cross_ranks);
    if (!r->exec || !r->blocks || !r->send_bytes || !r->recv_bytes || !r->shard_bytes ||
        !r->shard_at || !r->host_of || !r->local_ranks || !r->cross_ranks) {
        return fail(err, HVD_NO_MEMORY, "no memory to run batches");
    }
    domain_t *shm = net_domain(ctx->net, &transport_shm);
    return shm_slot_bytes(shm) > 0 ? stream_new(shm, ctx->job.rank, ctx->job.size, &r->stream, err)
                                   : HVD_OK;
}

void batch_runner_free(batch_runner_t *r)
{
    if (r == NULL) {
        return;
    }
    stream_free(r->stream);
    exec_free(r->exec);
    plan_free(&r->plan);
    vec_free(&r->in);
    vec_free(&r->out);
    vec_free(&r->shard);
    vec_free(&r->piece_in);
    vec_free(&r->piece_out);
    free(r->blocks);
    free(r->send_bytes);
    free(r->recv_bytes);
    free(r->shard_bytes);
    free(r->shard_at);
    free(r->host_of);
    free(r->local_ranks);
    free(r->cross_ranks);
    buf_free(&r->packed);
    buf_free(&r->unpacked);
    buf_free(&r->tmp);
    buf_free(&r->acc);
    buf_free(&r->zeros);
    buf_free(&r->pieces);
    free(r);
}

// Memory of at least `bytes`, kept between batches.
static void *scratch(buf_t *buf, size_t bytes)
{
    buf_clear(buf);
    return buf_append(buf, NULL, MAX(bytes, 1));
}

// --- Riding along --------------------------------------------------------------------------------

static size_t elements_in(const int64_t *dims, int *at)
{
    int n_dims = (int)dims[(*at)++];
    size_t n = 1;
    for (int d = 0; d < n_dims; d++) {
        n *= (size_t)dims[(*at)++];
    }
    return n;
}

static void *allocate_output(request_t *request, int t)
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

static double average_factor(hvd_reduce_t reduce, int n_members)
{
    return reduce == HVD_AVERAGE ? 1.0 / n_members : 1.0;
}

bool riding_store(request_t *request, const void *result, int n_members)
{
    hvd_dtype_t dtype = request->asked.dtype;
    size_t acc_bytes = hvd_dtype_bytes(acc_dtype(dtype));
    double post = request->asked.postscale * average_factor(request->asked.reduce, n_members);
    const uint8_t *from = result;
    int at = 0;
    for (int t = 0; t < request->asked.n_tensors; t++) {
        size_t n = elements_in(request->dims, &at);
        void *output = allocate_output(request, t);
        if (output == NULL && n > 0) {
            return false;
        }
        acc_store(dtype, output, from, n, post);
        from += n * acc_bytes;
    }
    return true;
}

static void finish_riding(hvd_ctx_t *ctx, const decision_entry_t *entry, int n_members,
                          int n_fused, uint64_t ticks)
{
    if (entry->tag == 0) {
        return;
    }
    request_t *request = request_of_tag(entry->tag);
    record_agreed(request, ticks);
    record_started(request, ROUTE_RIDING, n_fused, ticks);
    bool stored = riding_store(request, entry->result, n_members);
    request_complete(ctx, request, stored ? HVD_OK : HVD_NO_MEMORY, NULL);
}

// --- The queue of batches ------------------------------------------------------------------------

static batch_t *batch_take(hvd_ctx_t *ctx, int n_entries)
{
    batch_t *b = ctx->free_batches;
    if (b != NULL) {
        ctx->free_batches = b->next;
    } else if ((b = calloc(1, sizeof *b)) == NULL) {
        return NULL;
    }
    if (b->cap_entries < n_entries) {
        decision_entry_t *entries = realloc(b->entries, (size_t)n_entries * sizeof *entries);
        b->entries = entries != NULL ? entries : b->entries;
        request_t **requests = realloc(b->requests, (size_t)n_entries * sizeof *requests);
        b->requests = requests != NULL ? requests : b->requests;
        if (entries == NULL || requests == NULL) {
            b->next = ctx->free_batches;
            ctx->free_batches = b;
            return NULL;
        }
        b->cap_entries = n_entries;
    }
    b->n_entries = 0;
    b->next = NULL;
    return b;
}

static void batch_put_back(hvd_ctx_t *ctx, batch_t *b)
{
    b->next = ctx->free_batches;
    ctx->free_batches = b;
}

void batch_add(hvd_ctx_t *ctx, const decision_t *decision)
{
    const process_set_t *set = set_find(ctx, decision->set);
    batch_t *b = batch_take(ctx, decision->n_entries);
    if (b == NULL) {
        err_t err;
        fail(&err, HVD_NO_MEMORY, "rank %d has no memory to run a batch", ctx->job.rank);
        engine_fail(ctx, &err);
        return;
    }
    uint64_t ticks = ticks_now();
    if (decision->n_entries > 0 && decision->entries[0].result != NULL) {
        record_cycle(ctx, ticks); // over as soon as it has begun
    }
    for (int i = 0; i < decision->n_entries; i++) {
        const decision_entry_t *entry = &decision->entries[i];
        if (entry->result != NULL) {
            finish_riding(ctx, entry, set->n, decision->n_entries, ticks);
            continue;
        }
        request_t *request = entry->tag != 0 ? request_of_tag(entry->tag) : NULL;
        if (request != NULL) {
            record_agreed(request, ticks);
        }
        b->entries[b->n_entries] = *entry;
        b->requests[b->n_entries++] = request;
    }
    if (b->n_entries == 0) {
        batch_put_back(ctx, b);
        return;
    }
    b->number = decision->batch;
    b->is_meeting = false;
    b->collective = b->number * (STREAMS_OF_BATCH + 1);
    b->set = set;
    ctx->moved_ns = ctx->running == NULL ? ctx->now_ns : ctx->moved_ns;
    *ctx->running_last = b;
    ctx->running_last = &b->next;
}

static coord_signature_t signature_of(const request_t *request)
{
    return (coord_signature_t){
        .op = request->asked.op,
        .dtype = request->asked.dtype,
        .reduce = request->asked.reduce,
        .prescale = request->asked.prescale,
        .postscale = request->asked.postscale,
        .n_tensors = request->asked.n_tensors,
        .dims = request->dims,
        .n_dims_words = request->n_dims_words,
    };
}

void batch_add_meeting(hvd_ctx_t *ctx, request_t *request)
{
    batch_t *b = batch_take(ctx, 1);
    if (b == NULL) {
        err_t err;
        fail(&err, HVD_NO_MEMORY, "rank %d has no memory to run a batch", ctx->job.rank);
        engine_fail(ctx, &err);
        return;
    }
    b->signature = signature_of(request);
    b->entries[0] = (decision_entry_t){
        .tag = tag_of(request), .name = request->asked.name, .signature = &b->signature};
    b->requests[0] = request;
    record_agreed(request, ticks_now());
    b->n_entries = 1;
    b->number = 0;
    b->is_meeting = true;
    b->collective = request->meeting;
    b->set = set_find(ctx, request->asked.process_set);
    b->next = ctx->running; // nothing of this rank is running: those behind wait for this one
    ctx->running = b;
    if (b->next == NULL) {
        ctx->running_last = &b->next;
    }
    atomic_store(&ctx->board_busy, false);
}

void batches_drop(hvd_ctx_t *ctx)
{
    while (ctx->running != NULL) {
        batch_t *b = ctx->running;
        ctx->running = b->next;
        batch_put_back(ctx, b);
    }
    ctx->running_last = &ctx->running;
    ctx->runner->batch = NULL;
}

// --- Stringing tensors together ------------------------------------------------------------------

typedef struct tensor_view {
    uint8_t *input, *output; // output NULL: not yet allocated
    request_t *request;      // NULL: this rank has joined
    int index;
    int64_t rows;
    size_t row_bytes; // of everything but the first dimension
    size_t bytes;     // rows * row_bytes; scalars have one row
} tensor_view_t;

// Calls visit for every tensor of the batch, in order.
static bool each_tensor(batch_runner_t *r,
                        bool (*visit)(batch_runner_t *, const decision_entry_t *, tensor_view_t *,
                                      int),
                        int member)
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

// Allreduce and broadcast: the same pieces in and out. A rank that has joined brings zeros.
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
    void *zeros = scratch(&r->zeros, r->batch->requests[0] == NULL ? r->args.bytes : 0);
    if (zeros == NULL) {
        return false;
    }
    memset(zeros, 0, r->zeros.len);
    return each_tensor(r, add_whole, 0);
}

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

static bool (*const string_by_op[HVD_N_OPS])(batch_runner_t *) = {
    [HVD_ALLREDUCE] = string_whole,         [HVD_BROADCAST] = string_whole,
    [HVD_ALLGATHER] = string_gathered,      [HVD_ALLTOALL] = string_exchanged,
    [HVD_REDUCESCATTER] = string_scattered,
};

// --- Choosing the route --------------------------------------------------------------------------

// The value of "op=value" in HOROVOD_ALGORITHM; its length in *bytes_p.
static const char *forced_algorithm(const hvd_ctx_t *ctx, hvd_op_t op, size_t *bytes_p)
{
    const char *name = hvd_op_name(op);
    size_t name_bytes = strlen(name);
    const char *at = ctx->config.algorithm;
    const char *found = NULL; // of several the last, as in coll_choose
    while (at != NULL && at[0] != '\0') {
        size_t bytes = strcspn(at, ",");
        if (bytes > name_bytes && strncmp(at, name, name_bytes) == 0 && at[name_bytes] == '=') {
            *bytes_p = bytes - name_bytes - 1;
            found = at + name_bytes + 1;
        }
        at += bytes + (at[bytes] == ',');
    }
    return found;
}

static bool is_word(const char *text, size_t bytes, const char *word)
{
    return text != NULL && strlen(word) == bytes && strncmp(text, word, bytes) == 0;
}

// Splits the set by hosts. Two-level needs a host with several members, and shared memory on each.
static bool split_by_hosts(hvd_ctx_t *ctx, batch_runner_t *r, const process_set_t *set)
{
    int my_host = ctx->host_of[ctx->job.rank];
    r->n_local = 0;
    for (int m = 0; m < set->n; m++) {
        r->host_of[m] = ctx->host_of[set->ranks[m]];
        if (r->host_of[m] == my_host) {
            r->local_member = m == set->member ? r->n_local : r->local_member;
            r->local_ranks[r->n_local++] = set->ranks[m];
        }
    }
    return r->n_local == set->n;
}

// Every host gives as many shards as the host with the fewest members can carry.
static int shards_per_host(const hvd_ctx_t *ctx, const batch_runner_t *r, const process_set_t *set,
                           bool *several_p)
{
    int least = set->n;
    *several_p = false;
    for (int host = 0; host < ctx->n_hosts; host++) {
        int n = 0;
        for (int m = 0; m < set->n; m++) {
            n += r->host_of[m] == host;
        }
        least = n > 0 ? MIN(least, n) : least;
        *several_p |= n > 1;
    }
    return least;
}

// Bytes of the largest buffer that any member has: what they all know.
static size_t largest_buffer(const batch_runner_t *r)
{
    const coll_args_t *a = &r->args;
    size_t total = a->bytes;

    if (a->op == HVD_ALLGATHER || a->op == HVD_REDUCESCATTER) {
        for (int m = 0; m < a->size; m++) {
            total += a->blocks[m];
        }
    }
    if (a->op == HVD_ALLTOALL) { // one tensor, whose rows are in the decision for all pairs
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

static bool mpi_takes(const hvd_ctx_t *ctx, const batch_runner_t *r, const process_set_t *set)
{
    return ctx->mpi != NULL && set->n == ctx->job.size && mpi_can_run(&r->args, largest_buffer(r));
}

static route_t choose_route(hvd_ctx_t *ctx, batch_runner_t *r, const process_set_t *set)
{
    const coll_args_t *a = &r->args;
    bool whole = a->op == HVD_ALLREDUCE || a->op == HVD_BROADCAST;
    if (whole && a->bytes == 0) {
        return ROUTE_NOTHING; // and all members know
    }
    if (set->n == 1) {
        return ROUTE_ALONE;
    }
    size_t bytes = 0;
    const char *forced = forced_algorithm(ctx, a->op, &bytes);
    bool one_host = split_by_hosts(ctx, r, set);
    if (a->op == HVD_ALLREDUCE && a->reduce == HVD_ADASUM) {
        return ROUTE_PIECES;
    }
    if (forced != NULL && !is_word(forced, bytes, "stream") &&
        !is_word(forced, bytes, "two_level")) {
        return ROUTE_PLAN;
    }
    if (mpi_takes(ctx, r, set)) {
        return ROUTE_MPI;
    }
    if (one_host) {
        return r->stream != NULL ? ROUTE_STREAM : ROUTE_PLAN;
    }
    bool several;
    r->n_shards = shards_per_host(ctx, r, set, &several);
    bool worth = a->bytes >= TWO_LEVEL_LEAST_BYTES || is_word(forced, bytes, "two_level");
    // Between its levels a half type would be rounded once too often.
    worth &= !dtype_is_half(a->dtype) || a->reduce == HVD_MIN || a->reduce == HVD_MAX;
    return a->op == HVD_ALLREDUCE && several && ctx->shm_on_all_hosts && worth ? ROUTE_TWO_LEVEL
                                                                               : ROUTE_PLAN;
}

// --- Streams -------------------------------------------------------------------------------------

static hvd_status_t start_stream(batch_runner_t *r, const vec_t *in, const vec_t *out, double pre,
                                 double post, err_t *err)
{
    stream_run_t run = {
        .args = r->sub_args,
        .ranks = r->sub_ranks,
        .in = in,
        .out = out,
        .prescale = pre,
        .postscale = post,
        .collective = r->batch->collective + (uint64_t)r->phase,
    };
    atomic_store(r->stream_clock, run.collective);
    return stream_start(r->stream, &run, err);
}

// --- Plans ---------------------------------------------------------------------------------------

static net_link_t *link_of_member(void *arg, int member, err_t *err)
{
    hvd_ctx_t *ctx = arg;
    return net_link(ctx->net, ctx->runner->sub_ranks[member], LANE_DATA, err);
}

// Copies the vector into contiguous memory, scaled and widened as the plan needs it.
static void pack(const batch_runner_t *r, const vec_t *from, hvd_dtype_t dtype, uint8_t *to)
{
    size_t element = hvd_dtype_bytes(dtype);
    size_t out_element = r->widened ? sizeof(float) : element;
    for (size_t done = 0; done < from->bytes;) {
        uint8_t *at;
        size_t bytes = vec_at(from, done, &at);
        size_t n = bytes / element;
        if (r->widened) {
            acc_load(dtype, to, at, n, r->pre);
        } else if (!r->moves_only && r->pre != 1.0) {
            reduce_scale(dtype, to, at, n, r->pre);
        } else {
            memcpy(to, at, bytes);
        }
        to += n * out_element;
        done += bytes;
    }
}

static void unpack(const batch_runner_t *r, const vec_t *to, hvd_dtype_t dtype, const uint8_t *from)
{
    size_t element = hvd_dtype_bytes(dtype);
    size_t in_element = r->widened ? sizeof(float) : element;
    for (size_t done = 0; done < to->bytes;) {
        uint8_t *at;
        size_t bytes = vec_at(to, done, &at);
        size_t n = bytes / element;
        if (r->widened) {
            acc_store(dtype, at, from, n, 1.0);
        } else {
            memcpy(at, from, bytes);
        }
        from += n * in_element;
        done += bytes;
    }
}

static uint8_t *start_of(const vec_t *v)
{
    return v->n > 0 ? v->fragments[0].at : NULL;
}

static bool overlap(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes)
{
    return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

// Contiguous memory for what is strung in `in` and `out`: packs where that must be, and notes in
// plan_out what is to be unpacked afterwards.
static hvd_status_t arrange(batch_runner_t *r, const vec_t *in, const vec_t *out, hvd_dtype_t dtype,
                            uint8_t **input_p, uint8_t **output_p, err_t *err)
{
    bool scale_first = !r->moves_only && r->pre != 1.0;
    bool must_pack = in->n > 1 || r->widened || scale_first;
    bool must_unpack = out->n > 1 || r->widened;
    size_t factor = r->widened ? 2 : 1;
    uint8_t *input = start_of(in);
    uint8_t *output = start_of(out);
    bool in_place = r->sub_args.op == HVD_ALLREDUCE || r->sub_args.op == HVD_BROADCAST;
    // Plans of other operations write results while they still read elsewhere in the input.
    must_unpack |= !in_place && !must_pack && overlap(input, in->bytes, output, out->bytes);
    if (must_pack) {
        // An operation in place may as well be packed where its result belongs.
        input = in_place && !must_unpack ? output : scratch(&r->packed, in->bytes * factor);
        if (input == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for a fusion buffer of %zu bytes",
                        in->bytes * factor);
        }
        pack(r, in, dtype, input);
    }
    r->plan_out = NULL;
    if (must_unpack) {
        output = in_place && must_pack ? input : scratch(&r->unpacked, out->bytes * factor);
        r->plan_out = output;
    } else if (in_place && must_pack) {
        output = input;
    }
    *input_p = input;
    *output_p = output;
    return HVD_OK;
}

// Runs sub_args over links, from `in` to `out`; packs first where the plan needs it.
static hvd_status_t start_plan(hvd_ctx_t *ctx, batch_runner_t *r, const vec_t *in, const vec_t *out,
                               err_t *err)
{
    coll_args_t *a = &r->sub_args;
    hvd_dtype_t dtype = a->dtype;
    bool adasum = !r->moves_only && a->reduce == HVD_ADASUM;
    r->widened = adasum && dtype_is_half(dtype);
    if (r->widened) {
        a->dtype = HVD_FLOAT32;
        a->bytes *= 2;
    }
    const algorithm_t *algorithm = coll_choose(a, ctx->config.algorithm, err);
    if (algorithm == NULL) {
        return err->status;
    }
    uint8_t *input, *output;
    hvd_status_t status = arrange(r, in, out, dtype, &input, &output, err);
    if (status != HVD_OK) {
        return status;
    }
    plan_clear(&r->plan);
    status = coll_plan(algorithm, a, &r->plan, err);
    if (status != HVD_OK) {
        return status;
    }
    void *tmp = scratch(&r->tmp, r->plan.tmp_bytes);
    void *acc = scratch(&r->acc, r->plan.acc_bytes);
    if (tmp == NULL || acc == NULL || (output == NULL && out->bytes > 0)) {
        return fail(err, HVD_NO_MEMORY, "no memory for %s of %zu bytes", algorithm->name,
                    out->bytes);
    }
    exec_run_t run = {
        .plan = &r->plan,
        .buffers = {[BUF_INPUT] = input, [BUF_OUTPUT] = output, [BUF_TMP] = tmp, [BUF_ACC] = acc},
        .dtype = a->dtype,
        .reduce = a->reduce,
        .prescale = 1.0, // pack() has applied it
        .postscale = r->post,
        .epoch = ctx->epoch,
        .batch = (uint32_t)r->batch->number,
        .segment_bytes = a->segment_bytes,
        .link_of = link_of_member,
        .arg = ctx,
    };
    return exec_start(r->exec, &run, err);
}

// --- MPI -----------------------------------------------------------------------------------------

static hvd_status_t start_mpi(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    coll_args_t *a = &r->sub_args;
    hvd_dtype_t dtype = a->dtype;
    uint8_t *input;

    r->widened = !r->moves_only && dtype_is_half(dtype);
    if (r->widened) {
        a->dtype = HVD_FLOAT32;
        a->bytes *= 2;
        for (int m = 0; a->op == HVD_REDUCESCATTER && m < a->size; m++) {
            r->blocks[m] *= 2;
        }
    }
    hvd_status_t status = arrange(r, &r->in, &r->out, dtype, &input, &r->mpi_out, err);
    return status == HVD_OK
               ? mpi_start(ctx->mpi, a, largest_buffer(r), input, r->mpi_out, err)
               : status;
}

static hvd_status_t progress_mpi(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err)
{
    hvd_status_t status = mpi_progress(ctx->mpi, err);

    if (status == HVD_IN_PROGRESS) {
        *moved_p = true; // MPI works only while it is asked
        sched_yield();
    }
    if (status != HVD_OK) {
        return status;
    }
    if (!r->moves_only && r->post != 1.0) {
        hvd_dtype_t dtype = r->sub_args.dtype;
        size_t n = r->out.bytes / hvd_dtype_bytes(r->args.dtype);
        reduce_scale(dtype, r->mpi_out, r->mpi_out, n, r->post);
    }
    if (r->plan_out != NULL) {
        unpack(r, &r->out, r->args.dtype, r->plan_out);
    }
    return HVD_OK;
}

// --- Pieces --------------------------------------------------------------------------------------

static bool note_piece(batch_runner_t *r, const decision_entry_t *entry, tensor_view_t *view,
                       int member)
{
    (void)entry;
    (void)member;
    r->n_pieces++;
    return buf_append(&r->pieces, &view->bytes, sizeof view->bytes) != NULL;
}

static bool slice(const vec_t *from, size_t at, size_t bytes, vec_t *to)
{
    vec_clear(to);
    for (size_t done = 0; done < bytes;) {
        uint8_t *memory;
        size_t n = MIN(vec_at(from, at + done, &memory), bytes - done);
        if (!vec_add(to, memory, n)) {
            return false;
        }
        done += n;
    }
    return true;
}

// HVD_IN_PROGRESS: the next tensor's plan runs; HVD_OK: there is none left.
static hvd_status_t start_next_piece(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    size_t bytes = 0;
    while (bytes == 0 && r->next_piece < r->n_pieces) {
        memcpy(&bytes, r->pieces.data + r->next_piece++ * sizeof bytes, sizeof bytes);
    }
    if (bytes == 0) {
        return HVD_OK;
    }
    if (!slice(&r->in, r->piece_at, bytes, &r->piece_in) ||
        !slice(&r->out, r->piece_at, bytes, &r->piece_out)) {
        return fail(err, HVD_NO_MEMORY, "no memory to run a tensor of %zu bytes", bytes);
    }
    r->piece_at += bytes;
    r->sub_args = r->args;
    r->sub_args.bytes = bytes;
    hvd_status_t status = start_plan(ctx, r, &r->piece_in, &r->piece_out, err);
    return status == HVD_OK ? HVD_IN_PROGRESS : status;
}

static hvd_status_t start_pieces(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    buf_clear(&r->pieces);
    r->n_pieces = r->next_piece = r->piece_at = 0;
    if (!each_tensor(r, note_piece, 0)) {
        return fail(err, HVD_NO_MEMORY, "no memory to run a batch");
    }
    hvd_status_t status = start_next_piece(ctx, r, err);
    return status == HVD_IN_PROGRESS ? HVD_OK : status;
}

// --- Alone ---------------------------------------------------------------------------------------

// One member: what goes in comes out, scaled as several would have scaled it.
static void move_alone(const batch_runner_t *r, const vec_t *in, const vec_t *out, double pre,
                       double post)
{
    size_t element = hvd_dtype_bytes(r->args.dtype);
    for (size_t done = 0; done < in->bytes;) {
        uint8_t *from;
        uint8_t *to;
        size_t n = vec_at(in, done, &from);
        n = MIN(vec_at(out, done, &to), n);
        if (!r->moves_only && (pre != 1.0 || post != 1.0)) {
            const void *inputs[] = {from};
            reduce_many(r->args.dtype, HVD_SUM, to, NULL, inputs, 1, n / element, pre, post);
        } else if (to != from) {
            memmove(to, from, n);
        }
        done += n;
    }
}

// --- Two levels ----------------------------------------------------------------------------------

static void cut_shards(batch_runner_t *r)
{
    for (int s = 0; s <= r->n_shards; s++) {
        r->shard_at[s] = s == r->n_shards ? r->args.bytes
                                          : r->args.bytes * (size_t)s / (size_t)r->n_shards /
                                                SHARD_ALIGN * SHARD_ALIGN;
    }
    for (int i = 0; i < r->n_local; i++) {
        r->shard_bytes[i] = i < r->n_shards ? r->shard_at[i + 1] - r->shard_at[i] : 0;
    }
}

// The ranks that carry the same shard, one on each host, in the order of the hosts' first members.
static void find_cross_ranks(const hvd_ctx_t *ctx, batch_runner_t *r, const process_set_t *set)
{
    r->n_cross = 0;
    for (int m = 0; m < set->n; m++) {
        int place = 0; // among the members of its host
        for (int before = 0; before < m; before++) {
            place += r->host_of[before] == r->host_of[m];
        }
        if (place == r->local_member) {
            r->cross_member = set->ranks[m] == ctx->job.rank ? r->n_cross : r->cross_member;
            r->cross_ranks[r->n_cross++] = set->ranks[m];
        }
    }
}

static hvd_status_t start_phase(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    coll_args_t *a = &r->sub_args;
    *a = r->args;
    r->sub_ranks = r->local_ranks;
    a->host_of = NULL;
    a->member = r->local_member;
    a->size = r->n_local;
    a->blocks = r->shard_bytes;
    if (r->phase != PHASE_BETWEEN_HOSTS) {
        bool reduces = r->phase == PHASE_REDUCE_IN_HOST;
        const vec_t *in = reduces ? &r->in : &r->shard;
        const vec_t *out = reduces ? &r->shard : &r->out;
        double pre = reduces ? r->pre : 1.0;
        if (r->n_local == 1) { // a host with one member carries the whole tensor by itself
            move_alone(r, in, out, pre, 1.0);
            return HVD_OK;
        }
        a->op = reduces ? HVD_REDUCESCATTER : HVD_ALLGATHER;
        a->scale_before = a->scale_after = false;
        return start_stream(r, in, out, pre, 1.0, err);
    }
    r->sub_ranks = r->cross_ranks;
    a->member = r->cross_member;
    a->size = r->n_cross;
    a->bytes = r->shard.bytes;
    a->scale_before = false;
    double pre = r->pre;
    r->pre = 1.0; // the stream inside the host has applied it
    hvd_status_t status = start_plan(ctx, r, &r->shard, &r->shard, err);
    r->pre = pre;
    return status;
}

static hvd_status_t start_two_level(hvd_ctx_t *ctx, batch_runner_t *r, const process_set_t *set,
                                    err_t *err)
{
    cut_shards(r);
    find_cross_ranks(ctx, r, set);
    size_t bytes = r->shard_bytes[r->local_member];
    uint8_t *at = NULL;
    if (r->out.n == 1) { // the shard's place in the output is as good as any
        at = r->local_member < r->n_shards ? r->out.fragments[0].at + r->shard_at[r->local_member]
                                           : NULL;
    } else if ((at = scratch(&r->packed, bytes)) == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a shard of %zu bytes", bytes);
    }
    vec_clear(&r->shard);
    if (!vec_add(&r->shard, at, bytes)) {
        return fail(err, HVD_NO_MEMORY, "no memory for a shard of %zu bytes", bytes);
    }
    r->phase = PHASE_REDUCE_IN_HOST;
    return start_phase(ctx, r, err);
}

// --- Running -------------------------------------------------------------------------------------

static void describe(hvd_ctx_t *ctx, batch_runner_t *r, const batch_t *b)
{
    const coord_signature_t *sig = b->entries[0].signature;
    bool average = sig->reduce == HVD_AVERAGE;
    r->moves_only = sig->op != HVD_ALLREDUCE && sig->op != HVD_REDUCESCATTER;
    r->pre = r->moves_only ? 1.0 : sig->prescale;
    r->post = r->moves_only ? 1.0 : sig->postscale * average_factor(sig->reduce, b->set->n);
    int root = 0;
    for (int m = 0; m < b->set->n; m++) {
        root = b->set->ranks[m] == sig->root ? m : root;
    }
    r->args = (coll_args_t){
        .op = sig->op,
        .dtype = sig->dtype,
        .reduce = average ? HVD_SUM : sig->reduce,
        .scale_after = r->post != 1.0,
        .member = b->set->member,
        .size = b->set->n,
        .root = root,
        .host_of = r->host_of,
        .segment_bytes = ctx->config.segment_bytes,
    };
}

static hvd_status_t start_batch(hvd_ctx_t *ctx, batch_runner_t *r, batch_t *b, err_t *err)
{
    r->batch = b;
    r->phase = PHASE_REDUCE_IN_HOST;
    describe(ctx, r, b);
    vec_clear(&r->in);
    vec_clear(&r->out);
    if (b->entries[0].signature->op == HVD_BARRIER) { // agreeing to it was all there is to it
        r->route = ROUTE_NOTHING;
        return HVD_OK;
    }
    if (!string_by_op[r->args.op](r)) {
        return fail(err, HVD_NO_MEMORY, "rank %d has no memory for the output of '%s'",
                    ctx->job.rank, b->entries[0].name);
    }
    r->route = choose_route(ctx, r, b->set);
    r->sub_args = r->args;
    r->sub_ranks = b->set->ranks;
    switch (r->route) {
    case ROUTE_STREAM:
        return start_stream(r, &r->in, &r->out, r->pre, r->post, err);
    case ROUTE_PLAN:
        return start_plan(ctx, r, &r->in, &r->out, err);
    case ROUTE_TWO_LEVEL:
        return start_two_level(ctx, r, b->set, err);
    case ROUTE_PIECES:
        return start_pieces(ctx, r, err);
    case ROUTE_MPI:
        return start_mpi(ctx, r, err);
    case ROUTE_ALONE:
        move_alone(r, &r->in, &r->out, r->pre, r->post);
        return HVD_OK;
    default:
        return HVD_OK;
    }
}

static hvd_status_t progress_plan(batch_runner_t *r, hvd_dtype_t dtype, const vec_t *out,
                                  bool *moved_p, err_t *err)
{
    hvd_status_t status = exec_progress(r->exec, err);
    *moved_p |= exec_moved(r->exec);
    if (status == HVD_OK && r->plan_out != NULL) {
        unpack(r, out, dtype, r->plan_out);
    }
    return status;
}

static hvd_status_t progress_two_level(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err)
{
    bool between = r->phase == PHASE_BETWEEN_HOSTS;
    bool carries = r->shard.bytes > 0;
    hvd_status_t status = HVD_OK;
    if (!between) {
        status = r->n_local > 1 ? stream_progress(r->stream, moved_p) : HVD_OK;
    } else if (carries) {
        status = progress_plan(r, r->args.dtype, &r->shard, moved_p, err);
    }
    if (status != HVD_OK || r->phase == PHASE_GATHER_IN_HOST) {
        return status;
    }
    r->phase++;
    if (r->phase == PHASE_BETWEEN_HOSTS && !carries) {
        return HVD_IN_PROGRESS;
    }
    status = start_phase(ctx, r, err);
    return status == HVD_OK ? HVD_IN_PROGRESS : status;
}

static hvd_status_t progress_pieces(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err)
{
    hvd_status_t status = progress_plan(r, r->args.dtype, &r->piece_out, moved_p, err);
    return status == HVD_OK ? start_next_piece(ctx, r, err) : status;
}

static hvd_status_t progress_batch(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err)
{
    switch (r->route) {
    case ROUTE_STREAM:
        return stream_progress(r->stream, moved_p);
    case ROUTE_PLAN:
        return progress_plan(r, r->args.dtype, &r->out, moved_p, err);
    case ROUTE_TWO_LEVEL:
        return progress_two_level(ctx, r, moved_p, err);
    case ROUTE_PIECES:
        return progress_pieces(ctx, r, moved_p, err);
    case ROUTE_MPI:
        return progress_mpi(ctx, r, moved_p, err);
    default:
        return HVD_OK;
    }
}

bool batch_describe(const hvd_ctx_t *ctx, char *text, size_t bytes)
{
    const batch_runner_t *r = ctx->runner;
    bool by_plan = r->route == ROUTE_PLAN || r->route == ROUTE_PIECES ||
                   (r->route == ROUTE_TWO_LEVEL && r->phase == PHASE_BETWEEN_HOSTS);

    if (r->batch == NULL || !by_plan) {
        return false;
    }
    exec_describe(r->exec, text, bytes);
    return text[0] != '\0';
}

static void finish_batch(hvd_ctx_t *ctx, batch_t *b)
{
    ctx->running = b->next;
    if (ctx->running == NULL) {
        ctx->running_last = &ctx->running;
    }
    ctx->runner->batch = NULL;
    counters_add_batch(ctx, b->n_entries);
    for (int i = 0; i < b->n_entries; i++) {
        if (b->requests[i] != NULL) {
            request_complete(ctx, b->requests[i], HVD_OK, NULL);
        }
    }
    if (!b->is_meeting) {
        coord_batch_done(ctx->coord, b->number, clock_ns());
    }
    batch_put_back(ctx, b);
}

static hvd_status_t start_recorded(hvd_ctx_t *ctx, batch_runner_t *r, batch_t *b, err_t *err)
{
    uint64_t ticks = ticks_now();
    record_cycle(ctx, ticks);
    hvd_status_t status = start_batch(ctx, r, b, err);
    for (int i = 0; i < b->n_entries; i++) {
        if (b->requests[i] != NULL) {
            record_started(b->requests[i], r->route, b->n_entries, ticks);
        }
    }
    return status;
}

bool batches_progress(hvd_ctx_t *ctx)
{
    bool moved = false;
    while (ctx->running != NULL && ctx->suspicion.status == HVD_OK) {
        batch_runner_t *r = ctx->runner;
        batch_t *b = ctx->running;
        err_t err;
        hvd_status_t status = HVD_OK;
        if (r->batch != b) {
            if (!b->is_meeting && atomic_load_explicit(&ctx->board_busy, memory_order_acquire)) {
                return moved; // see board_busy
            }
            status = start_recorded(ctx, r, b, &err);
            moved = true;
        }
        if (status == HVD_OK) {
            status = progress_batch(ctx, r, &moved, &err);
        }
        if (status == HVD_IN_PROGRESS) {
            return moved;
        }
        if (status == HVD_PEER_LOST) {
            engine_suspect(ctx, &err);
            return true;
        }
        if (status != HVD_OK) {
            batches_drop(ctx);
            engine_fail(ctx, &err);
            return true;
        }
        finish_batch(ctx, b);
        moved = true;
    }
    return moved;
}
