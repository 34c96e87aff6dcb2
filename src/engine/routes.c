// SPDX-License-Identifier: Apache-2.0
//
// routes.c - the ways a batch can take, a row each, and the choice between them.
//
//   alone      one member: copy and scale
//   stream     all members on this host: straight through shared memory, no packing
//   two-level  allreduce over hosts, every rank with a shard of its own (route_two_level.c)
//   plan       everything else: the plan of an algorithm, run over links (route_plan.c)
//   pieces     Adasum: one plan after the other
//   mpi        the user's MPI library does it, where asked to (HOROVOD_CPU_OPERATIONS)
//
// All members choose from what all of them know, and so alike.
#define _GNU_SOURCE
#include "engine/runner.h"

#include <sched.h>

#define TWO_LEVEL_LEAST_BYTES (32 * KIB)

// --- Choosing ------------------------------------------------------------------------------------

// The value of "op=value" in HOROVOD_ALGORITHM; its length in *bytes_p.
static const char *forced_algorithm(const char *algorithm, hvd_op_t op, size_t *bytes_p)
{
    const char *name = hvd_op_name(op);
    size_t name_bytes = strlen(name);
    const char *at = algorithm;
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

route_t route_choose(const route_case_t *given)
{
    const coll_args_t *a = given->args;
    bool whole = a->op == HVD_ALLREDUCE || a->op == HVD_BROADCAST;
    if (a->op == HVD_BARRIER || (whole && a->bytes == 0)) {
        return ROUTE_NOTHING; // agreeing to it was all there is to it
    }
    if (a->size == 1) {
        return ROUTE_ALONE;
    }
    if (a->op == HVD_ALLREDUCE && a->reduce == HVD_ADASUM) {
        return ROUTE_PIECES;
    }
    size_t bytes = 0;
    const char *forced = forced_algorithm(given->algorithm, a->op, &bytes);
    bool forced_two_level = is_word(forced, bytes, "two_level");
    if (forced != NULL && !forced_two_level && !is_word(forced, bytes, "stream")) {
        return ROUTE_PLAN;
    }
    if (given->mpi_takes_it) {
        return ROUTE_MPI;
    }
    if (given->one_host) {
        return given->has_stream ? ROUTE_STREAM : ROUTE_PLAN;
    }
    bool worth = a->bytes >= TWO_LEVEL_LEAST_BYTES || forced_two_level;
    // Between its levels a half type would be rounded once too often.
    worth &= !dtype_is_half(a->dtype) || a->reduce == HVD_MIN || a->reduce == HVD_MAX;
    return a->op == HVD_ALLREDUCE && given->two_levels && worth ? ROUTE_TWO_LEVEL : ROUTE_PLAN;
}

// Which members are on this host. True: all of them.
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
    bool several = false;
    route_case_t given = {
        .args = &r->args,
        .algorithm = ctx->config.algorithm,
        .one_host = split_by_hosts(ctx, r, set),
        .has_stream = r->stream != NULL,
        .mpi_takes_it = mpi_takes(ctx, r, set),
    };
    if (!given.one_host) {
        r->n_shards = shards_per_host(ctx, r, set, &several);
        given.two_levels = several && ctx->shm_on_all_hosts;
    }
    return route_choose(&given);
}

// --- Alone and streams ---------------------------------------------------------------------------

void move_alone(const batch_runner_t *r, const vec_t *in, const vec_t *out, double pre, double post)
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

static hvd_status_t alone_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    (void)ctx;
    (void)err;
    move_alone(r, &r->in, &r->out, r->pre, r->post);
    return HVD_OK;
}

hvd_status_t start_stream(batch_runner_t *r, const vec_t *in, const vec_t *out, double pre,
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

static hvd_status_t stream_route_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    (void)ctx;
    return start_stream(r, &r->in, &r->out, r->pre, r->post, err);
}

static hvd_status_t stream_route_progress(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p,
                                          err_t *err)
{
    (void)ctx;
    (void)err;
    return stream_progress(r->stream, moved_p);
}

static hvd_status_t plan_route_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    return plan_start(ctx, r, &r->in, &r->out, err);
}

static hvd_status_t plan_route_progress(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p,
                                        err_t *err)
{
    (void)ctx;
    return plan_progress(r, r->args.dtype, &r->out, moved_p, err);
}

// --- MPI -----------------------------------------------------------------------------------------

static hvd_status_t mpi_route_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
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
    hvd_status_t status = plan_arrange(r, &r->in, &r->out, dtype, &input, &r->mpi_out, err);
    return status == HVD_OK ? mpi_start(ctx->mpi, a, largest_buffer(r), input, r->mpi_out, err)
                            : status;
}

static hvd_status_t mpi_route_progress(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err)
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
        plan_unpack(r, &r->out, r->args.dtype, r->plan_out);
    }
    return HVD_OK;
}

// --- The table -----------------------------------------------------------------------------------

const route_ops_t routes[N_ROUTES] = {
    [ROUTE_NOTHING] = {"AGREED", NULL, NULL},
    [ROUTE_RIDING] = {"RIDING", NULL, NULL}, // inside the agreement's messages: batch.c
    [ROUTE_BOARD] = {"BOARD", NULL, NULL},   // without the engine: board.c
    [ROUTE_ALONE] = {"LOCAL", alone_start, NULL},
    [ROUTE_STREAM] = {"STREAM", stream_route_start, stream_route_progress},
    [ROUTE_PLAN] = {"PLAN", plan_route_start, plan_route_progress},
    [ROUTE_TWO_LEVEL] = {"TWO_LEVEL", two_level_start, two_level_progress},
    [ROUTE_PIECES] = {"PLAN", pieces_start, pieces_progress},
    [ROUTE_MPI] = {"MPI", mpi_route_start, mpi_route_progress},
};

hvd_status_t route_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    r->route = choose_route(ctx, r, r->batch->set);
    r->phase = PHASE_REDUCE_IN_HOST;
    r->sub_args = r->args;
    r->sub_ranks = r->batch->set->ranks;
    return routes[r->route].start != NULL ? routes[r->route].start(ctx, r, err) : HVD_OK;
}
