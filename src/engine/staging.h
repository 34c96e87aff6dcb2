// SPDX-License-Identifier: Apache-2.0
//
// staging.h - tensors of a GPU: what the engine does with them at both ends (staging.c), and the
// communicators of NCCL (comms.c), which spare some of them the way through the host.
//
// Private to engine/.
#ifndef HVD_ENGINE_STAGING_H
#define HVD_ENGINE_STAGING_H

#include "device/nccl.h"
#include "engine/engine.h"

// What has been queued on the device as one, until it has landed.
typedef struct launch {
    mark_t *begun, *done; // all that it waits for has happened; it is over
    uint64_t batch;
    uint64_t launched_ns;
    uint64_t launched; // the same in ticks
    uint64_t begun_ns; // as far as housekeeping has seen; 0: not yet
    bool is_late;      // that its tensors are not there has been told
    char name[64];     // of its first operation
    struct launch *next;
} launch_t;

typedef enum nccl_choice { CHOICE_OPEN, CHOICE_NCCL, CHOICE_HOST } nccl_choice_t;

// A process set, and whether its members can use NCCL.
typedef struct set_comm {
    int set;
    atomic_int choice; // nccl_choice_t; read by threads that submit
    comm_t *comm;      // NULL until all have agreed
    struct set_comm *next;
} set_comm_t;

// Outlives the context if the device never answers: what it still may call must find it.
struct staging {
    lock_t lock;
    device_t *device; // NULL: no tensor of one has come
    staged_t *held;   // whose copies have not arrived
    atomic_int n_held;
    atomic_bool is_closed;
    set_comm_t *comms; // under lock; changed by the holder of the engine
    mark_t *newest;    // of what was launched by NCCL; under lock

    // The holder of the engine.
    nccl_t *nccl;
    launch_t *launches, **last_launch; // oldest first
    bool asks_nccl;                    // something is in progress: look again soon
    atomic_int n_ending;               // threads that end communicators

    // staging_times.c: what the timeline is to be told of; under lock.
    struct timed *timed, **last_timed; // oldest first
    atomic_int n_timed;
};

hvd_status_t staging_new(staging_t **staging_p, err_t *err);
void staging_close(hvd_ctx_t *ctx, bool ended_well); // waits, not for ever, for what is under way
void staging_free(staging_t *staging);               // all requests have gone
void staging_cut(staging_t *staging); // the job has failed: nothing on the device will land well
// Of a request that is held_by_device: it becomes the engine's, at once or when its copies have
// arrived. Not if this fails.
hvd_status_t staging_begin(hvd_ctx_t *ctx, const hvd_request_t *asked, request_t *request,
                           err_t *err) EXCLUDES(ctx->lock);
// One that was submitted on_device is submitted again, through the host.
void staging_go_by_host(hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->baton)
    EXCLUDES(ctx->lock);
void *staging_output(request_t *request, int t, size_t bytes); // NULL: no memory
hvd_status_t staging_end(request_t *request, err_t *err);      // its results go to the device
const mark_t *staging_ready(const request_t *request);         // its tensors are there
void staging_launched(request_t *request, mark_t *done);       // its results will be there
hvd_status_t staging_settle(request_t *request, uint64_t deadline_ns); // and have landed there
void staging_release(request_t *request);
uint64_t staging_next_look(const staging_t *staging); // NEVER_NS: nothing is under way
void staging_watch(hvd_ctx_t *ctx) REQUIRES(ctx->baton) EXCLUDES(ctx->lock); // is it broken?
// What the device has not finished, as failure_text.c tells it. False: nothing.
bool staging_progress(const hvd_ctx_t *ctx, uint64_t now_ns, coord_progress_t *progress_p)
    REQUIRES(ctx->baton);
// submit.c: for what rides along, if it does: tensors that stay with the device do not.
void request_make_room(const hvd_ctx_t *ctx, request_t *request) REQUIRES(ctx->lock);

// --- staging_times.c: when the device has done what was queued, for timelines --------------------

// NULL: nobody wants to know; else `times`, which is to be filled.
device_times_t *times_wanted(const hvd_ctx_t *ctx, device_times_t *times);
// Takes the marks. `work` has all but these times.
void times_note(hvd_ctx_t *ctx, const device_work_t *work, device_times_t times);
// Tells the timeline what has landed since.
void times_sweep(hvd_ctx_t *ctx) EXCLUDES(ctx->lock);
void times_drop(staging_t *staging);

enum { GPU_OPERATIONS_AUTO, GPU_OPERATIONS_HOST, GPU_OPERATIONS_NCCL }; // HOROVOD_GPU_OPERATIONS

// --- comms.c -------------------------------------------------------------------------------------

// May this request run in the memory of GPUs, as far as this rank knows?
bool comms_may_take(hvd_ctx_t *ctx, const request_t *request);
set_comm_t *comms_of_set(staging_t *staging, int set); // made if need be; NULL: no memory
// Communicators end, of one set (or -1: all), on a thread of their own.
void comms_end(staging_t *staging, int set, bool ended_well);
// Have those threads come back?
bool comms_have_ended(staging_t *staging, uint64_t deadline_ns);
// A communicator that has failed: HVD_OK if there is none.
hvd_status_t comms_health(staging_t *staging, err_t *err);

#endif
