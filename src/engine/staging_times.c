// SPDX-License-Identifier: Apache-2.0
//
// staging_times.c - when the device has done what was queued there, for timelines.
//
// Only while a timeline is written: marks around the work then have times, which are the device's
// own, so that it does not matter when housekeeping looks. What has landed is told to the timeline
// in the order in which it was queued in its stream.
//
// Threads: work is noted by whoever queues it, and swept by the holder of the engine.
#include "engine/staging.h"

#include <stdlib.h>

typedef struct timed {
    device_work_t work;
    device_times_t times;
    struct timed *next;
} timed_t;

device_times_t *times_wanted(const hvd_ctx_t *ctx, device_times_t *times)
{
    return observe_has_timeline(ctx->observe) ? times : NULL;
}

void times_note(hvd_ctx_t *ctx, const device_work_t *work, device_times_t times)
{
    staging_t *staging = ctx->staging;
    timed_t *timed = malloc(sizeof *timed);
    if (timed == NULL) {
        device_unmark(staging->device, times.begun);
        device_unmark(staging->device, times.done);
        return;
    }
    *timed = (timed_t){.work = *work, .times = times};
    lock_take(&staging->lock);
    *staging->last_timed = timed;
    staging->last_timed = &timed->next;
    atomic_fetch_add(&staging->n_timed, 1);
    lock_release(&staging->lock);
}

static void forget(staging_t *staging, timed_t *timed)
{
    device_unmark(staging->device, timed->times.begun);
    device_unmark(staging->device, timed->times.done);
    free(timed);
    atomic_fetch_sub(&staging->n_timed, 1);
}

static timed_t *take_all(staging_t *staging)
{
    lock_take(&staging->lock);
    timed_t *all = staging->timed;
    staging->timed = NULL;
    staging->last_timed = &staging->timed;
    lock_release(&staging->lock);
    return all;
}

// Those that are left go in front of what has come meanwhile.
static void put_back(staging_t *staging, timed_t *first, timed_t **last)
{
    if (first == NULL) {
        return;
    }
    lock_take(&staging->lock);
    *last = staging->timed;
    staging->last_timed = staging->timed == NULL ? last : staging->last_timed;
    staging->timed = first;
    lock_release(&staging->lock);
}

static hvd_status_t when(staging_t *staging, const mark_t *mark, device_moment_t *moment_p)
{
    return device_when(staging->device, mark, &moment_p->ticks, &moment_p->after_ns, NULL);
}

void times_sweep(hvd_ctx_t *ctx)
{
    staging_t *staging = ctx->staging;
    bool is_behind[N_DEVICE_LANES] = {false}; // of one that has not landed
    if (LIKELY(atomic_load_explicit(&staging->n_timed, memory_order_relaxed) == 0)) {
        return;
    }
    timed_t *left = NULL, **last_left = &left;
    for (timed_t *timed = take_all(staging), *next; timed != NULL; timed = next) {
        device_work_t *work = &timed->work;
        next = timed->next;
        hvd_status_t status =
            is_behind[work->lane] ? HVD_IN_PROGRESS : when(staging, timed->times.done, &work->done);
        if (status == HVD_OK) {
            status = when(staging, timed->times.begun, &work->begun);
        }
        if (status == HVD_IN_PROGRESS) {
            is_behind[work->lane] = true;
            *last_left = timed;
            last_left = &timed->next;
            timed->next = NULL;
            continue;
        }
        if (status == HVD_OK) { // else the device is broken
            observe_device(ctx->observe, work);
        }
        forget(staging, timed);
    }
    put_back(staging, left, last_left);
}

void times_drop(staging_t *staging)
{
    for (timed_t *timed = take_all(staging), *next; timed != NULL; timed = next) {
        next = timed->next;
        forget(staging, timed);
    }
}
