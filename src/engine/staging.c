// SPDX-License-Identifier: Apache-2.0
//
// staging.c - tensors in the memory of a GPU: brought to the host, run like any other, and brought
// back.
//
// hvd_submit() queues copies to pinned memory behind what the user's stream has to do, and returns.
// When they have arrived the request is handed to the engine, and not before: a rank that still
// computes counts as one that has not submitted. From there on its tensors are host memory, and
// every way serves them. When it is done the results are queued to be copied back, and the request
// is complete: launched. hvd_wait_on() orders a stream of the user's behind the copies, hvd_wait()
// waits until they have landed. Results whose size only the agreement tells stay in pinned memory
// until hvd_fetch() says where on the device they belong.
//
// Those that NCCL can serve (comms.c says which) are handed to the engine at once, with a mark of
// what their stream has queued: they stay where they are. If it turns out that some member of the
// process set has the tensor on the host, or no NCCL, all submit it again, the long way.
//
// Threads: a request is the device's (held_by_device) until its copies have arrived, which a thread
// of the driver's tells; then the engine's. If the device breaks before, nobody calls: housekeeping
// looks at it, and whoever claims the request first completes it.
#include "engine/staging.h"

#include "coll/reduce.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CLOSE_NS (10 * NS_PER_S)
#define ABORT_NS (6 * NS_PER_S)   // longer than NCCL is given to finish
#define LOOK_NS (100 * NS_PER_MS) // at the device, while copies are under way
#define TENSOR_ALIGN ((size_t)64)

#define SETTLE_SLICE_NS (20 * NS_PER_MS)
#define POLL_NS (200 * NS_PER_US) // for NCCL, while it is asked

struct staged {
    staging_t *staging;
    hvd_ctx_t *ctx;
    request_t *request;
    staged_t *next, **link; // among those held
    atomic_bool is_claimed; // by whoever ends its stay with the device
    bool is_launched;
    mark_t *ready;  // the user's stream has written the tensors
    mark_t *done;   // of what ran on the device; NULL: by the host
    block_t *block; // inputs, end to end; results, where they have the same size
    int n;
    device_copy_t *copies; // by tensor
    void **targets;        // by tensor: where the result belongs; NULL: hvd_fetch() will tell
    block_t **outputs;     // by tensor: results of another size
};

// --- Life ----------------------------------------------------------------------------------------

hvd_status_t staging_new(staging_t **staging_p, err_t *err)
{
    *staging_p = calloc(1, sizeof **staging_p);
    if (*staging_p == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    lock_init(&(*staging_p)->lock);
    (*staging_p)->last_launch = &(*staging_p)->launches;
    (*staging_p)->last_timed = &(*staging_p)->timed;
    return HVD_OK;
}

// Lets go of what has landed, from the oldest on.
static void sweep_launches(staging_t *staging)
{
    launch_t *launch;
    while ((launch = staging->launches) != NULL &&
           (atomic_load(&launch->done->is_spoiled) ||
            device_settle(staging->device, launch->done->event, 0, NULL) != HVD_TIMEOUT)) {
        staging->launches = launch->next;
        staging->last_launch = launch->next == NULL ? &staging->launches : staging->last_launch;
        device_unmark(staging->device, launch->begun);
        device_unmark(staging->device, launch->done);
        free(launch);
    }
}

void staging_cut(staging_t *staging)
{
    sweep_launches(staging);
    for (launch_t *launch = staging->launches; launch != NULL; launch = launch->next) {
        atomic_store(&launch->done->is_spoiled, true);
    }
    comms_end(staging, -1, false);
    sweep_launches(staging);
}

void staging_close(hvd_ctx_t *ctx, bool ended_well)
{
    staging_t *staging = ctx->staging;
    uint64_t deadline_ns = clock_ns() + CLOSE_NS;
    while (atomic_load(&staging->n_held) > 0 && clock_ns() < deadline_ns) {
        nanosleep(&(struct timespec){.tv_nsec = (long)NS_PER_MS}, NULL);
    }
    atomic_store(&staging->is_closed, true);
    for (const launch_t *launch = staging->launches; launch != NULL && ended_well;
         launch = launch->next) {
        ended_well =
            device_settle(staging->device, launch->done->event, deadline_ns, NULL) == HVD_OK;
    }
    while (ended_well && atomic_load(&staging->n_timed) > 0 && clock_ns() < deadline_ns) {
        times_sweep(ctx); // copies that are still under way are in the timeline, too
        nanosleep(&(struct timespec){.tv_nsec = (long)NS_PER_MS}, NULL);
    }
    if (ended_well) {
        sweep_launches(staging);
        comms_end(staging, -1, true);
    } else {
        staging_cut(staging);
    }
    if (!comms_have_ended(staging, clock_ns() + ABORT_NS)) {
        log_warn(&ctx->log, "device",
                 "NCCL has not ended its communicators within %d s: they are left behind",
                 (int)(ABORT_NS / NS_PER_S));
    }
}

void staging_free(staging_t *staging)
{
    if (staging != NULL && atomic_load(&staging->n_held) == 0 &&
        atomic_load(&staging->n_ending) == 0) {
        while (staging->comms != NULL) {
            set_comm_t *comm = staging->comms;
            staging->comms = comm->next;
            free(comm);
        }
        if (staging->device != NULL) {
            times_drop(staging);
            device_unmark(staging->device, staging->newest);
        }
        nccl_close(staging->nccl);
        device_close(staging->device);
        lock_free(&staging->lock);
        free(staging);
    }
}

// The device of this rank: that of its first tensor.
static hvd_status_t open_device(staging_t *staging, int ordinal, device_t **device_p, err_t *err)
{
    lock_take(&staging->lock);
    hvd_status_t status =
        staging->device == NULL ? device_open(ordinal, &staging->device, err) : HVD_OK;
    *device_p = staging->device;
    lock_release(&staging->lock);
    if (status == HVD_OK && device_ordinal(*device_p) != ordinal) {
        status = fail(err, HVD_UNSUPPORTED,
                      "a tensor is on GPU %d, but this rank has used GPU %d before: one rank uses "
                      "one GPU; call torch.cuda.set_device(hvd.local_rank()) first",
                      ordinal, device_ordinal(*device_p));
    }
    return status;
}

// --- To the host ---------------------------------------------------------------------------------

static size_t tensor_bytes(const request_t *request, int t)
{
    size_t bytes = hvd_dtype_bytes(request->signature.dtype);
    for (int d = 0; d < request->tensors[t].n_dims; d++) {
        bytes *= (size_t)request->tensors[t].shape[d];
    }
    return bytes;
}

static staged_t *staged_new(hvd_ctx_t *ctx, request_t *request)
{
    size_t n = (size_t)request->signature.n_tensors;
    size_t each = sizeof(device_copy_t) + sizeof(void *) + sizeof(block_t *);
    staged_t *staged = calloc(1, sizeof *staged + n * each);
    if (staged != NULL) {
        staged->staging = ctx->staging;
        staged->ctx = ctx;
        staged->request = request;
        staged->n = (int)n;
        atomic_store(&staged->is_claimed, true); // nothing is under way yet
        staged->copies = (device_copy_t *)(staged + 1);
        staged->targets = (void **)(staged->copies + n);
        staged->outputs = (block_t **)(staged->targets + n);
        for (size_t t = 0; t < n; t++) {
            staged->copies[t].device = (void *)(uintptr_t)request->tensors[t].input;
            staged->targets[t] = request->tensors[t].output;
        }
    }
    return staged;
}

// Points the request's tensors to memory of the host, and notes what is to be copied.
static hvd_status_t lay_out(staged_t *staged, device_t *device, err_t *err)
{
    request_t *request = staged->request;
    const signature_t *sig = &request->signature;
    bool same_size = op_infos[sig->op].layout == LAYOUT_WHOLE;
    bool brings = !(same_size && op_has(sig->op, OP_ROOTED)) || sig->root == staged->ctx->job.rank;
    size_t total = 0;
    for (int t = 0; t < staged->n; t++) {
        total += (tensor_bytes(request, t) + TENSOR_ALIGN - 1) & ~(TENSOR_ALIGN - 1);
    }
    hvd_status_t status = device_take(device, total, false, &staged->block, err);
    if (status != HVD_OK) {
        return status;
    }
    uint8_t *at = staged->block->data;
    for (int t = 0; t < staged->n; t++) {
        hvd_tensor_t *tensor = &request->tensors[t];
        size_t bytes = tensor_bytes(request, t);
        staged->copies[t] = (device_copy_t){
            .host = at, .device = brings ? staged->copies[t].device : NULL, .bytes = bytes};
        tensor->input = at;
        tensor->output = same_size ? at : NULL;
        at += (bytes + TENSOR_ALIGN - 1) & ~(TENSOR_ALIGN - 1);
    }
    return HVD_OK;
}

// The stay with the device is over: to the engine, or, if the job has ended meanwhile, to its end.
static void hand_over(staged_t *staged, const err_t *broken)
{
    hvd_ctx_t *ctx = staged->ctx;
    request_t *request = staged->request;
    err_t end = {.status = HVD_OK};
    if (broken != NULL) {
        end = *broken;
    }
    lock_take(&ctx->lock);
    if (end.status == HVD_OK) {
        check_running(ctx, &end);
    }
    if (end.status == HVD_OK) {
        request_make_room(ctx, request);
        atomic_store(&request->held_by_device, false);
        request_enqueue(ctx, request);
    } else {
        atomic_fetch_add_explicit(&ctx->requests.n_in_flight, 1, memory_order_relaxed);
    }
    lock_release(&ctx->lock);
    if (end.status != HVD_OK) {
        request_complete(ctx, request, end.status, end.text);
        requests_wake(ctx);
    }
    engine_notify(ctx);
}

static void hold(staged_t *staged)
{
    staging_t *staging = staged->staging;
    atomic_store(&staged->is_claimed, false);
    lock_take(&staging->lock);
    staged->next = staging->held;
    staged->link = &staging->held;
    if (staged->next != NULL) {
        staged->next->link = &staged->next;
    }
    staging->held = staged;
    atomic_fetch_add(&staging->n_held, 1);
    lock_release(&staging->lock);
}

// True for one caller only, who then ends its stay.
static bool claim(staged_t *staged)
{
    staging_t *staging = staged->staging;
    lock_take(&staging->lock);
    bool claimed = !atomic_exchange(&staged->is_claimed, true);
    if (claimed) {
        *staged->link = staged->next;
        if (staged->next != NULL) {
            staged->next->link = staged->link;
        }
    }
    lock_release(&staging->lock);
    return claimed;
}

// On a thread of the driver's, which must not use the device.
static void on_arrived(void *arg)
{
    staged_t *staged = arg;
    staging_t *staging = staged->staging;
    if (!atomic_load(&staging->is_closed) && claim(staged)) {
        hand_over(staged, NULL);
        atomic_fetch_sub(&staging->n_held, 1); // the last touch: the context may go now
    }
}

static device_work_t copies_of(const staged_t *staged, device_lane_t lane)
{
    const request_t *request = staged->request;
    device_work_t work = {
        .lane = lane, .op = request->signature.op, .n_fused = 1, .queued = ticks_now()};
    for (int t = 0; t < staged->n; t++) {
        work.bytes += staged->copies[t].device != NULL ? staged->copies[t].bytes : 0;
    }
    snprintf(work.name, sizeof work.name, "%s", request->name);
    return work;
}

static hvd_status_t go_by_host(staged_t *staged, err_t *err)
{
    hvd_ctx_t *ctx = staged->ctx;
    staging_t *staging = staged->staging;
    device_times_t times, *times_p = times_wanted(ctx, &times);
    hvd_status_t status = lay_out(staged, staging->device, err);
    if (status != HVD_OK) {
        return status;
    }
    device_work_t work = copies_of(staged, LANE_TO_HOST);
    hold(staged);
    status = device_fetch(staging->device, staged->ready, staged->copies, staged->n, on_arrived,
                          staged, times_p, err); // it may be over already
    if (status == HVD_OK && times_p != NULL) {
        times_note(ctx, &work, times);
    }
    if (status != HVD_OK && !claim(staged)) {
        return HVD_OK; // housekeeping has seen that the device is broken, and completed it
    }
    if (status != HVD_OK) {
        atomic_fetch_sub(&staging->n_held, 1);
    }
    return status;
}

hvd_status_t staging_begin(hvd_ctx_t *ctx, const hvd_request_t *asked, request_t *request,
                           err_t *err)
{
    device_t *device;
    hvd_status_t status = open_device(ctx->staging, asked->device, &device, err);
    if (status != HVD_OK) {
        return status;
    }
    staged_t *staged = staged_new(ctx, request);
    if (staged == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to submit '%s'", request->name);
    }
    request->staged = staged;
    status = device_mark(device, asked->stream, false, &staged->ready, err);
    if (status != HVD_OK) {
        return status;
    }
    request->signature.on_device = comms_may_take(ctx, request);
    if (!request->signature.on_device) {
        return go_by_host(staged, err);
    }
    hand_over(staged, NULL);
    return HVD_OK;
}

void staging_go_by_host(hvd_ctx_t *ctx, request_t *request)
{
    HELD(ctx);
    err_t err;
    atomic_fetch_sub_explicit(&ctx->requests.n_in_flight, 1, memory_order_relaxed);
    if (request->staged == NULL) { // on the host it was all the time
        lock_take(&ctx->lock);
        request_enqueue(ctx, request);
        lock_release(&ctx->lock);
        return;
    }
    request->signature.on_device = false;
    atomic_store(&request->held_by_device, true);
    hvd_status_t status = go_by_host(request->staged, &err);
    if (status != HVD_OK) {
        atomic_fetch_add_explicit(&ctx->requests.n_in_flight, 1, memory_order_relaxed);
        request_complete(ctx, request, status, err.text);
    }
}

// --- And back ------------------------------------------------------------------------------------

void *staging_output(request_t *request, int t, size_t bytes)
{
    staged_t *staged = request->staged;
    block_t **block = &staged->outputs[t];
    bool on_device = request->signature.on_device;
    return device_take(staged->staging->device, bytes, on_device, block, NULL) == HVD_OK
               ? (*block)->data
               : NULL;
}

const mark_t *staging_ready(const request_t *request)
{
    return request->staged->ready;
}

void staging_launched(request_t *request, mark_t *done)
{
    request->staged->done = mark_hold(done);
    request->staged->is_launched = true;
}

hvd_status_t staging_end(request_t *request, err_t *err)
{
    staged_t *staged = request->staged;
    if (request->signature.on_device) {
        return HVD_OK; // they are there, or will be
    }
    for (int t = 0; t < staged->n; t++) {
        staged->copies[t] = (device_copy_t){.host = request->tensors[t].output,
                                            .device = staged->targets[t],
                                            .bytes = tensor_bytes(request, t)};
    }
    device_times_t times, *times_p = times_wanted(staged->ctx, &times);
    device_work_t work = copies_of(staged, LANE_TO_DEVICE);
    hvd_status_t status = device_store(staged->staging->device, staged->copies, staged->n,
                                       staged->block, times_p, err);
    if (status == HVD_OK && times_p != NULL) {
        times_note(staged->ctx, &work, times);
    }
    staged->is_launched = status == HVD_OK;
    for (int t = 0; status == HVD_OK && t < staged->n; t++) {
        if (staged->outputs[t] != NULL && staged->targets[t] != NULL) {
            // Its own event: a block is used again when what reads it is over.
            status = device_store(staged->staging->device, NULL, 0, staged->outputs[t], NULL, err);
        }
    }
    return status;
}

// The last of what was queued for it.
static void *end_of(const staged_t *staged)
{
    return staged->done != NULL ? staged->done->event : staged->block->event;
}

// The job has ended before it was over: what it left there is worth nothing.
static bool is_spoiled(const staged_t *staged)
{
    return staged->done != NULL && atomic_load(&staged->done->is_spoiled);
}

// Waits for the event. HVD_PEER_LOST: the job has ended before; it may never happen then.
static hvd_status_t settle_event(device_t *device, void *event, const mark_t *mark,
                                 uint64_t deadline_ns)
{
    for (;;) {
        bool is_spoiled = mark != NULL && atomic_load(&mark->is_spoiled);
        uint64_t slice_ns = MIN(deadline_ns, clock_ns() + SETTLE_SLICE_NS);
        hvd_status_t status =
            is_spoiled ? HVD_PEER_LOST : device_settle(device, event, slice_ns, NULL);
        if (status != HVD_TIMEOUT || clock_ns() >= deadline_ns) {
            bool meanwhile = mark != NULL && atomic_load(&mark->is_spoiled);
            return meanwhile ? HVD_PEER_LOST : status;
        }
    }
}

hvd_status_t staging_settle(request_t *request, uint64_t deadline_ns)
{
    const staged_t *staged = request->staged;
    return staged->is_launched
               ? settle_event(staged->staging->device, end_of(staged), staged->done, deadline_ns)
               : HVD_OK;
}

void staging_release(request_t *request)
{
    staged_t *staged = request->staged;
    device_t *device = staged->staging->device;
    request->staged = NULL;
    if (!atomic_load(&staged->is_claimed)) {
        return; // the device never answered, and may still do
    }
    for (int t = 0; t < staged->n; t++) {
        device_give_back(device, staged->outputs[t]);
    }
    device_give_back(device, staged->block);
    device_unmark(device, staged->ready);
    device_unmark(device, staged->done);
    free(staged);
}

static device_t *opened_device(staging_t *staging)
{
    lock_take(&staging->lock);
    device_t *device = staging->device;
    lock_release(&staging->lock);
    return device;
}

uint64_t staging_next_look(const staging_t *staging)
{
    if (UNLIKELY(staging->asks_nccl)) {
        return clock_ns() + POLL_NS;
    }
    bool is_busy = staging->launches != NULL ||
                   atomic_load_explicit(&staging->n_timed, memory_order_relaxed) > 0 ||
                   atomic_load_explicit(&staging->n_held, memory_order_relaxed) > 0;
    return UNLIKELY(is_busy) ? clock_ns() + LOOK_NS : NEVER_NS;
}

// The oldest launch: has its collective begun? Until then the program's own kernels are at work.
static void watch_oldest(hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    launch_t *launch = ctx->staging->launches;
    uint64_t now_ns = clock_ns();
    if (launch == NULL || launch->begun_ns != 0) {
        return;
    }
    if (device_settle(ctx->staging->device, launch->begun->event, 0, NULL) == HVD_OK) {
        launch->begun_ns = now_ns;
        return;
    }
    double late_s = (double)(now_ns - launch->launched_ns) / (double)NS_PER_S;
    if (late_s > ctx->config.stall_check_time && !launch->is_late &&
        !ctx->config.stall_check_disable) {
        launch->is_late = true;
        log_warn(&ctx->log, "device",
                 "GPU %d has not computed its share of '%s' for %.0f s: the other ranks wait for "
                 "it in NCCL",
                 device_ordinal(ctx->staging->device), launch->name, late_s);
    }
}

bool staging_progress(const hvd_ctx_t *ctx, uint64_t now_ns, coord_progress_t *progress_p)
{
    HELD(ctx);
    const launch_t *launch = ctx->staging->launches;
    char who[PEER_TEXT_BYTES];
    if (LIKELY(launch == NULL)) {
        return false;
    }
    uint64_t still_ns = launch->begun_ns != 0 ? now_ns - MIN(launch->begun_ns, now_ns) : 0;
    *progress_p = (coord_progress_t){
        .is_running = true, .batch = launch->batch, .least_ns = still_ns, .longest_ns = still_ns};
    if (still_ns > 0) {
        snprintf(progress_p->text, sizeof progress_p->text,
                 "%s waits in '%.64s': NCCL has not finished it on GPU %d",
                 peer_name(&ctx->peers, ctx->job.rank, who), launch->name,
                 device_ordinal(ctx->staging->device));
    }
    return true;
}

void staging_watch(hvd_ctx_t *ctx)
{
    HELD(ctx);
    err_t err;
    staging_t *staging = ctx->staging;
    times_sweep(ctx);
    if (LIKELY(atomic_load_explicit(&staging->n_held, memory_order_relaxed) == 0 &&
               staging->launches == NULL)) {
        return;
    }
    device_t *device = opened_device(staging);
    if (device == NULL) {
        return;
    }
    sweep_launches(staging);
    watch_oldest(ctx);
    if (staging->launches != NULL && comms_health(staging, &err) != HVD_OK) {
        engine_suspect(ctx, &err); // whoever knows more of it, as of a rank that died, goes first
        return;
    }
    if (device_health(device, &err) == HVD_OK) {
        return;
    }
    engine_fail(ctx, &err, ctx->job.rank);
    for (;;) {
        lock_take(&staging->lock);
        staged_t *staged = staging->held;
        lock_release(&staging->lock);
        if (staged == NULL) {
            return;
        }
        if (claim(staged)) { // nobody but a call that has failed could be faster
            hand_over(staged, &err);
            atomic_fetch_sub(&staging->n_held, 1);
        }
    }
}

// --- The public functions ------------------------------------------------------------------------

hvd_status_t hvd_settle(hvd_ctx_t *ctx, int64_t timeout_ms)
{
    hvd_status_t status = check_context(ctx, NULL);
    if (status != HVD_OK) {
        return status;
    }
    staging_t *staging = ctx->staging;
    lock_take(&staging->lock);
    mark_t *newest = staging->newest != NULL ? mark_hold(staging->newest) : NULL;
    lock_release(&staging->lock);
    if (newest != NULL) { // one stream: what was launched before has landed before
        status = settle_event(staging->device, newest->event, newest, deadline_in_ms(timeout_ms));
        device_unmark(staging->device, newest);
    }
    return status;
}

hvd_status_t hvd_wait_on(hvd_ctx_t *ctx, hvd_handle_t handle, void *stream, int64_t timeout_ms)
{
    request_t *request;
    hvd_status_t status = request_of_handle(ctx, handle, &request);
    if (status != HVD_OK) {
        return status;
    }
    if (atomic_load_explicit(&request->state, memory_order_acquire) != REQUEST_DONE &&
        !engine_wait(ctx, &request->state, deadline_in_ms(timeout_ms))) {
        return HVD_TIMEOUT;
    }
    const staged_t *staged = request->staged;
    if (request->status != HVD_OK || staged == NULL || !staged->is_launched) {
        return request->status;
    }
    if (is_spoiled(staged)) {
        return HVD_PEER_LOST;
    }
    return device_order(staged->staging->device, stream, end_of(staged), NULL);
}

hvd_status_t hvd_fetch(hvd_ctx_t *ctx, hvd_handle_t handle, int tensor, void *to, void *stream)
{
    request_t *request;
    hvd_status_t status = request_of_handle(ctx, handle, &request);
    if (status != HVD_OK) {
        return status;
    }
    staged_t *staged = request->staged;
    if (atomic_load_explicit(&request->state, memory_order_acquire) != REQUEST_DONE ||
        staged == NULL || tensor < 0 || tensor >= staged->n) {
        return HVD_INVALID_ARGUMENT;
    }
    if (request->status != HVD_OK) {
        return request->status;
    }
    device_copy_t copy = {.host = request->tensors[tensor].output,
                          .device = to,
                          .bytes = tensor_bytes(request, tensor)};
    block_t *block = staged->outputs[tensor] != NULL ? staged->outputs[tensor] : staged->block;
    if (staged->done != NULL && copy.bytes > 0) {
        status = device_order(staged->staging->device, stream, staged->done->event, NULL);
        if (status != HVD_OK) {
            return status;
        }
    }
    return copy.bytes > 0 ? device_store_on(staged->staging->device, &copy, stream, block, NULL)
                          : HVD_OK;
}
