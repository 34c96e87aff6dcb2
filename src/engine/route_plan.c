// SPDX-License-Identifier: Apache-2.0
//
// route_plan.c - runs the plan of an algorithm over links.
//
// Plans want contiguous memory: what is strung of several pieces, must be scaled first or is a half
// type that Adasum weighs in float32 is packed, and unpacked afterwards; everything else is used
// where it lies. Pieces are for Adasum: one plan after the other, since each tensor is weighed by
// itself.
#include "engine/runner.h"

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

void plan_unpack(const batch_runner_t *r, const vec_t *to, hvd_dtype_t dtype, const uint8_t *from)
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

hvd_status_t plan_arrange(batch_runner_t *r, const vec_t *in, const vec_t *out, hvd_dtype_t dtype,
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
        input = in_place && !must_unpack ? output : runner_scratch(&r->packed, in->bytes * factor);
        if (input == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for a fusion buffer of %zu bytes",
                        in->bytes * factor);
        }
        pack(r, in, dtype, input);
    }
    r->plan_out = NULL;
    if (must_unpack) {
        output = in_place && must_pack ? input : runner_scratch(&r->unpacked, out->bytes * factor);
        r->plan_out = output;
    } else if (in_place && must_pack) {
        output = input;
    }
    *input_p = input;
    *output_p = output;
    return HVD_OK;
}

hvd_status_t plan_start(hvd_ctx_t *ctx, batch_runner_t *r, const vec_t *in, const vec_t *out,
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
    hvd_status_t status = plan_arrange(r, in, out, dtype, &input, &output, err);
    if (status != HVD_OK) {
        return status;
    }
    plan_clear(&r->plan);
    status = coll_plan(algorithm, a, &r->plan, err);
    if (status != HVD_OK) {
        return status;
    }
    void *tmp = runner_scratch(&r->tmp, r->plan.tmp_bytes);
    void *acc = runner_scratch(&r->acc, r->plan.acc_bytes);
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

hvd_status_t plan_progress(batch_runner_t *r, hvd_dtype_t dtype, const vec_t *out, bool *moved_p,
                           err_t *err)
{
    hvd_status_t status = exec_progress(r->exec, err);
    *moved_p |= exec_moved(r->exec);
    if (status == HVD_OK && r->plan_out != NULL) {
        plan_unpack(r, out, dtype, r->plan_out);
    }
    return status;
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
    hvd_status_t status = plan_start(ctx, r, &r->piece_in, &r->piece_out, err);
    return status == HVD_OK ? HVD_IN_PROGRESS : status;
}

hvd_status_t pieces_start(hvd_ctx_t *ctx, batch_runner_t *r, err_t *err)
{
    buf_clear(&r->pieces);
    r->n_pieces = r->next_piece = r->piece_at = 0;
    if (!each_tensor(r, note_piece, 0)) {
        return fail(err, HVD_NO_MEMORY, "no memory to run a batch");
    }
    hvd_status_t status = start_next_piece(ctx, r, err);
    return status == HVD_IN_PROGRESS ? HVD_OK : status;
}

hvd_status_t pieces_progress(hvd_ctx_t *ctx, batch_runner_t *r, bool *moved_p, err_t *err)
{
    hvd_status_t status = plan_progress(r, r->args.dtype, &r->piece_out, moved_p, err);
    return status == HVD_OK ? start_next_piece(ctx, r, err) : status;
}
