// SPDX-License-Identifier: Apache-2.0
//
// way_pieces.c - Adasum: one plan after the other.
//
// Each tensor of a batch is weighed by itself, so they cannot be added up as one long vector.
#include "engine/run.h"

bool way_pieces_takes(const way_case_t *given)
{
    return given->args->reduce == HVD_ADASUM;
}

static bool note_piece(runner_t *r, const decision_entry_t *entry, tensor_view_t *view, int member)
{
    (void)entry;
    (void)member;
    r->pieces.n++;
    return buf_append(&r->pieces.bytes, &view->bytes, sizeof view->bytes) != NULL;
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
static hvd_status_t start_next(hvd_ctx_t *ctx, runner_t *r, err_t *err) REQUIRES(ctx->baton)
{
    piece_state_t *p = &r->pieces;
    size_t bytes = 0;
    while (bytes == 0 && p->next < p->n) {
        memcpy(&bytes, p->bytes.data + p->next++ * sizeof bytes, sizeof bytes);
    }
    if (bytes == 0) {
        return HVD_OK;
    }
    if (!slice(&r->in, p->at, bytes, &p->in) || !slice(&r->out, p->at, bytes, &p->out)) {
        return fail(err, HVD_NO_MEMORY, "no memory to run a tensor of %zu bytes", bytes);
    }
    p->at += bytes;
    coll_task_t piece = r->task;
    piece.args.bytes = bytes;
    piece.in = &p->in;
    piece.out = &p->out;
    hvd_status_t status = way_plan_start(ctx, r, &piece, err);
    return status == HVD_OK ? HVD_IN_PROGRESS : status;
}

hvd_status_t way_pieces_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    piece_state_t *p = &r->pieces;
    (void)task;
    buf_clear(&p->bytes);
    p->n = p->next = p->at = 0;
    if (!each_tensor(r, note_piece, 0)) {
        return fail(err, HVD_NO_MEMORY, "no memory to run a batch");
    }
    hvd_status_t status = start_next(ctx, r, err);
    return status == HVD_IN_PROGRESS ? HVD_OK : status;
}

hvd_status_t way_pieces_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
{
    hvd_status_t status = way_plan_progress(ctx, r, moved_p, err);
    return status == HVD_OK ? start_next(ctx, r, err) : status;
}
