// SPDX-License-Identifier: Apache-2.0
//
// way_plan.c - everything else: the plan of an algorithm, run over links.
//
// Plans want contiguous memory: what is strung of several pieces, must be scaled first or is a half
// type that Adasum weighs in float32 is packed, and unpacked afterwards; everything else is used
// where it lies. A plan that adds up in accumulators applies the first factor itself.
#include "engine/run.h"

// --- Packing -------------------------------------------------------------------------------------

// Copies the vector into contiguous memory, scaled and widened as the plan needs it.
static void pack(const plan_state_t *p, const vec_t *from, double factor, uint8_t *to)
{
    size_t element = hvd_dtype_bytes(p->dtype);
    size_t out_element = p->widened ? sizeof(float) : element;
    for (size_t done = 0; done < from->bytes;) {
        uint8_t *at;
        size_t bytes = vec_at(from, done, &at);
        size_t n = bytes / element;
        if (p->widened) {
            acc_load(p->dtype, to, at, n, factor);
        } else if (factor != 1.0) {
            reduce_scale(p->dtype, to, at, n, factor);
        } else {
            memcpy(to, at, bytes);
        }
        to += n * out_element;
        done += bytes;
    }
}

void plan_unpack(const plan_state_t *p)
{
    const uint8_t *from = p->unpack_from;
    size_t element = hvd_dtype_bytes(p->dtype);
    size_t in_element = p->widened ? sizeof(float) : element;
    for (size_t done = 0; from != NULL && done < p->out->bytes;) {
        uint8_t *at;
        size_t bytes = vec_at(p->out, done, &at);
        size_t n = bytes / element;
        if (p->widened) {
            acc_store(p->dtype, at, from, n, p->finish);
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

hvd_status_t plan_arrange(plan_state_t *p, const coll_task_t *task, double factor,
                          uint8_t **input_p, uint8_t **output_p, err_t *err)
{
    const vec_t *in = task->in, *out = task->out;
    bool must_pack = in->n > 1 || p->widened || factor != 1.0;
    bool must_unpack = out->n > 1 || p->widened;
    size_t wider = p->widened ? 2 : 1;
    uint8_t *input = start_of(in);
    uint8_t *output = start_of(out);
    bool in_place = op_infos[task->args.op].layout == LAYOUT_WHOLE;
    // Plans of other operations write results while they still read elsewhere in the input.
    must_unpack |= !in_place && !must_pack && overlap(input, in->bytes, output, out->bytes);
    if (must_pack) {
        // An operation in place may as well be packed where its result belongs.
        input = in_place && !must_unpack ? output : scratch(&p->packed, in->bytes * wider);
        if (input == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for a fusion buffer of %zu bytes",
                        in->bytes * wider);
        }
        pack(p, in, factor, input);
    }
    p->unpack_from = NULL;
    if (must_unpack) {
        output = in_place && must_pack ? input : scratch(&p->unpacked, out->bytes * wider);
        p->unpack_from = output;
    } else if (in_place && must_pack) {
        output = input;
    }
    p->out = out;
    p->finish = task->finish;
    *input_p = input;
    *output_p = output;
    return HVD_OK;
}

// --- The way -------------------------------------------------------------------------------------

bool way_plan_takes(const way_case_t *given)
{
    (void)given;
    return true;
}

static net_link_t *link_of_member(void *arg, int member, err_t *err)
{
    const plan_state_t *p = arg;
    return net_link(p->net, p->ranks[member], LANE_DATA, err);
}

// The algorithm for this task, with its arguments: what the plan works on may be wider than the
// tensors. NULL: none, with the reason in err.
static const algorithm_t *choose(const hvd_ctx_t *ctx, plan_state_t *p, coll_args_t *a, err_t *err)
{
    p->dtype = a->dtype;
    p->widened = a->reduce == HVD_ADASUM && dtype_is_half(a->dtype);
    if (p->widened) {
        a->dtype = HVD_FLOAT32;
        a->bytes *= 2;
        a->scale_after = false; // plan_unpack does it
    }
    return coll_choose(a, ctx->config.algorithm, err);
}

hvd_status_t way_plan_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    plan_state_t *p = &r->plan;
    coll_args_t a = task->args;
    uint8_t *input, *output;
    hvd_status_t status;
    const algorithm_t *algorithm = choose(ctx, p, &a, err);
    if (algorithm == NULL) {
        return err->status;
    }
    bool scales = op_has(a.op, OP_REDUCES) && (algorithm->flags & NEEDS_NO_PRESCALE) == 0;
    TRY(plan_arrange(p, task, scales ? 1.0 : task->prescale, &input, &output, err), done);
    TRY(coll_plan(algorithm, &a, &p->plan, err), done);
    void *tmp = scratch(&p->tmp, p->plan.tmp_bytes);
    void *acc = scratch(&p->acc, p->plan.acc_bytes);
    if (tmp == NULL || acc == NULL || (output == NULL && task->out->bytes > 0)) {
        return fail(err, HVD_NO_MEMORY, "no memory for %s of %zu bytes", hvd_op_name(a.op),
                    task->out->bytes);
    }
    p->ranks = task->ranks;
    exec_run_t run = {
        .plan = &p->plan,
        .buffers = {[BUF_INPUT] = input, [BUF_OUTPUT] = output, [BUF_TMP] = tmp, [BUF_ACC] = acc},
        .dtype = a.dtype,
        .reduce = a.reduce,
        .prescale = scales ? task->prescale : 1.0,
        .finish = task->finish,
        .batch = task->number,
        .segment_bytes = a.segment_bytes,
        .link_of = link_of_member,
        .arg = p,
    };
    status = exec_start(p->exec, &run, err);
done:
    return status;
}

hvd_status_t way_plan_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
{
    plan_state_t *p = &r->plan;
    (void)ctx;
    hvd_status_t status = exec_progress(p->exec, err);
    *moved_p |= exec_moved(p->exec);
    if (status == HVD_OK) {
        plan_unpack(p);
    }
    return status;
}
