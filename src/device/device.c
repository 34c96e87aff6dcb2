// SPDX-License-Identifier: Apache-2.0
//
// device.c - copies between a GPU and pinned memory of the host.
//
// Two streams of our own, so that copies in do not wait for copies out. The order of the user's
// stream is taken over by a mark: an event recorded there, waited for in `in`. Waits take an event
// as it is when they are queued, so a mark that nobody holds any more may be recorded anew at once.
// Copies out are followed by the event of the block they read.
//
// Pinned memory is taken in powers of two and kept: to pin it may wait for the whole device, so
// that happens in the first steps of a training and then no more. No lock is held meanwhile. It is
// ordinary memory that the driver is told of, not the driver's own: ranks of a host may read it
// from each other.
#define _GNU_SOURCE
#include "device/device.h"

#include "device/inside.h"

#include <stdlib.h>
#include <time.h>

#define LEAST_BLOCK_BYTES ((size_t)4096)
#define NON_BLOCKING 1u          // a stream that the default stream does not wait for
#define NO_TIMING 2u             // an event that only orders
#define NO_MEMORY 2              // the driver's number for it
#define PORTABLE 1u              // pinned for all contexts
#define MOMENT_NS (5 * NS_PER_S) // so long clocks do not drift apart by much
#define FIRST_NAP_NS 20000
#define LONGEST_NAP_NS 1000000

// --- Calls of the driver -------------------------------------------------------------------------

hvd_status_t device_refused(const device_t *device, int code, const char *what, err_t *err)
{
    const char *why = NULL;
    if (device->driver.error_text(code, &why) != 0 || why == NULL) {
        why = "unknown error";
    }
    return fail(err, HVD_SYSTEM,
                "%s failed on GPU %d (%s error %d: %s); if a kernel of the program did that, "
                "CUDA_LAUNCH_BLOCKING=1 shows which",
                what, device->ordinal, device->driver.name, code, why);
}

hvd_status_t device_enter(const device_t *device, err_t *err)
{
    int code = device->driver.push_context(device->context);
    return code == 0 ? HVD_OK : device_refused(device, code, "making its context current", err);
}

void device_leave(const device_t *device)
{
    void *context;
    device->driver.pop_context(&context);
}

// --- Life ----------------------------------------------------------------------------------------

static hvd_status_t make_streams(device_t *device, err_t *err)
{
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    CALL(device, "making a stream", stream_create(&device->in, NON_BLOCKING, 0));
    CALL(device, "making a stream", stream_create(&device->out, NON_BLOCKING, 0));
out:
    device_leave(device);
    return status;
}

hvd_status_t device_open(int ordinal, device_t **device_p, err_t *err)
{
    device_t *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to open GPU %d", ordinal);
    }
    lock_init(&device->in_lock);
    lock_init(&device->out_lock);
    lock_init(&device->pool_lock);
    device->ordinal = ordinal;
    hvd_status_t status = driver_open(&device->driver, err);
    if (status == HVD_OK) {
        int code = device->driver.retain_context(&device->context, ordinal);
        status =
            code != 0 ? device_refused(device, code, "opening", err) : make_streams(device, err);
    }
    if (status != HVD_OK) {
        device_close(device);
        return status;
    }
    *device_p = device;
    return HVD_OK;
}

static void free_data(device_t *device, const block_t *block)
{
    if (block->on_device) {
        device->driver.memory_free(block->data);
    } else {
        device->driver.host_unregister(block->data);
        free(block->data);
    }
}

void device_close(device_t *device)
{
    if (device == NULL) {
        return;
    }
    if (device->context != NULL && device_enter(device, NULL) == HVD_OK) {
        while (device->pool != NULL) {
            block_t *block = device->pool;
            device->pool = block->next;
            device->driver.event_destroy(block->event);
            free_data(device, block); // after all that is queued
            free(block);
        }
        device_unmark(device, device->moment);
        while (device->marks != NULL) {
            mark_t *mark = device->marks;
            device->marks = mark->next;
            device->driver.event_destroy(mark->event);
            free(mark);
        }
        if (device->out != NULL) {
            device->driver.stream_destroy(device->out);
        }
        if (device->clock != NULL) {
            device->driver.stream_destroy(device->clock);
        }
        if (device->in != NULL) {
            device->driver.stream_destroy(device->in);
        }
        device_leave(device);
        device->driver.release_context(device->ordinal);
    }
    lock_free(&device->in_lock);
    lock_free(&device->out_lock);
    lock_free(&device->pool_lock);
    free(device);
}

hvd_status_t device_count(int *n_p, err_t *err)
{
    gpu_driver_t driver;
    hvd_status_t status = driver_open(&driver, err);
    if (status == HVD_OK && driver.count(n_p) != 0) {
        status = fail(err, HVD_SYSTEM, "the GPU driver (%s) does not say how many GPUs there are",
                      driver.name);
    }
    return status;
}

int device_ordinal(const device_t *device)
{
    return device->ordinal;
}

const char *device_driver_name(const device_t *device)
{
    return device->driver.name;
}

void device_name(const device_t *device, char *name, size_t bytes)
{
    if (device->driver.name_of(name, (int)bytes, device->ordinal) != 0) {
        name[0] = '\0';
    }
}

void device_uuid(const device_t *device, uint8_t uuid[16])
{
    if (device->driver.uuid(uuid, device->ordinal) != 0) {
        memset(uuid, 0, 16);
    }
}

// --- Memory --------------------------------------------------------------------------------------

static block_t *take_from_pool(device_t *device, size_t bytes, bool on_device)
{
    lock_take(&device->pool_lock);
    block_t **link = &device->pool;
    while (*link != NULL &&
           ((*link)->bytes != bytes || (*link)->on_device != on_device ||
            ((*link)->is_read && device->driver.event_query((*link)->event) != 0))) {
        link = &(*link)->next;
    }
    block_t *block = *link;
    if (block != NULL) {
        *link = block->next;
    }
    lock_release(&device->pool_lock);
    return block;
}

static int pin(const device_t *device, size_t bytes, void **data_p)
{
    int code = posix_memalign(data_p, LEAST_BLOCK_BYTES, bytes) != 0
                   ? NO_MEMORY
                   : device->driver.host_register(*data_p, bytes, PORTABLE);
    if (code != 0) {
        free(*data_p);
    }
    return code;
}

static hvd_status_t no_memory(const device_t *device, size_t bytes, bool on_device, int code,
                              err_t *err)
{
    return on_device
               ? fail(err, HVD_NO_MEMORY,
                      "GPU %d does not have %zu bytes left for collectives (%s error %d); leave it "
                      "some, "
                      "as with torch.cuda.set_per_process_memory_fraction(0.95)",
                      device->ordinal, bytes, device->driver.name, code)
               : fail(err, HVD_NO_MEMORY,
                      "the driver has not given %zu bytes of pinned memory to copy from GPU %d "
                      "(error "
                      "%d); raise the limit of locked memory (ulimit -l), or use smaller tensors",
                      bytes, device->ordinal, code);
}

static hvd_status_t make_block(device_t *device, size_t bytes, bool on_device, block_t **block_p,
                               err_t *err)
{
    block_t *block = calloc(1, sizeof *block);
    if (block == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to copy from GPU %d", device->ordinal);
    }
    *block = (block_t){.bytes = bytes, .on_device = on_device};
    void *data = NULL;
    int code = on_device ? device->driver.memory_take(&data, bytes) : pin(device, bytes, &data);
    if (code != 0) {
        free(block);
        return no_memory(device, bytes, on_device, code, err);
    }
    block->data = data;
    code = device->driver.event_create(&block->event, NO_TIMING);
    if (code != 0) {
        free_data(device, block);
        free(block);
        return device_refused(device, code, "making an event", err);
    }
    *block_p = block;
    return HVD_OK;
}

hvd_status_t device_take(device_t *device, size_t bytes, bool on_device, block_t **block_p,
                         err_t *err)
{
    size_t whole = LEAST_BLOCK_BYTES;
    while (whole < bytes) {
        whole *= 2;
    }
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    block_t *block = take_from_pool(device, whole, on_device);
    status = block != NULL ? HVD_OK : make_block(device, whole, on_device, &block, err);
    device_leave(device);
    if (status == HVD_OK) {
        block->is_read = false;
        *block_p = block;
    }
    return status;
}

void device_give_back(device_t *device, block_t *block)
{
    if (block == NULL) {
        return;
    }
    lock_take(&device->pool_lock);
    block->next = device->pool;
    device->pool = block;
    lock_release(&device->pool_lock);
}

// --- Marks ---------------------------------------------------------------------------------------

static hvd_status_t check_capture(device_t *device, void *stream, err_t *err)
{
    hvd_status_t status = HVD_OK;
    int capturing;
    CALL(device, "looking at a stream", stream_is_capturing(stream, &capturing));
    if (capturing != 0) {
        status = fail(err, HVD_UNSUPPORTED,
                      "a collective cannot be captured into a CUDA graph: submit it outside of the "
                      "capture");
    }
out:
    return status;
}

// An event, its own or one that has served before.
static hvd_status_t take_mark(device_t *device, bool has_time, mark_t **mark_p, err_t *err)
{
    hvd_status_t status = HVD_OK;
    lock_take(&device->pool_lock);
    mark_t **link = &device->marks;
    while (*link != NULL && (*link)->has_time != has_time) {
        link = &(*link)->next;
    }
    mark_t *mark = *link;
    if (mark != NULL) {
        *link = mark->next;
    }
    lock_release(&device->pool_lock);
    if (mark == NULL) {
        mark = calloc(1, sizeof *mark);
        if (mark == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for an event of GPU %d", device->ordinal);
        }
        mark->has_time = has_time;
        CALL(device, "making an event", event_create(&mark->event, has_time ? 0 : NO_TIMING));
    }
    atomic_store(&mark->n_holders, 1);
    atomic_store(&mark->is_spoiled, false);
    *mark_p = mark;
    return HVD_OK;
out:
    free(mark);
    return status;
}

// What times are counted from: an event in a stream that has nothing else to do, and so happens at
// once. The device's clock and the host's drift apart, so it is made anew now and then.
static hvd_status_t hold_moment(device_t *device, mark_t **moment_p, err_t *err)
{
    hvd_status_t status = HVD_OK;
    mark_t *made = NULL, *before = NULL;
    lock_take(&device->pool_lock);
    bool is_fresh = device->moment != NULL && clock_ns() - device->moment_ns < MOMENT_NS;
    *moment_p = is_fresh ? mark_hold(device->moment) : NULL;
    lock_release(&device->pool_lock);
    if (is_fresh) {
        return HVD_OK;
    }
    TRY(take_mark(device, true, &made, err), out);
    lock_take(&device->pool_lock);
    int code =
        device->clock == NULL ? device->driver.stream_create(&device->clock, NON_BLOCKING, 0) : 0;
    made->ticks = ticks_now();
    code = code == 0 ? device->driver.event_record(made->event, device->clock) : code;
    if (code == 0) {
        before = device->moment;
        device->moment = mark_hold(made);
        device->moment_ns = clock_ns();
    }
    lock_release(&device->pool_lock);
    device_unmark(device, before);
    if (code != 0) {
        status = device_refused(device, code, "recording a moment", err);
        goto out;
    }
    *moment_p = made;
    made = NULL;
out:
    device_unmark(device, made);
    return status;
}

// In its context.
static hvd_status_t record(device_t *device, void *stream, bool has_time, mark_t **mark_p,
                           err_t *err)
{
    mark_t *mark = NULL;
    hvd_status_t status = take_mark(device, has_time, &mark, err);
    if (status == HVD_OK && has_time) {
        status = hold_moment(device, &mark->since, err);
    }
    if (status != HVD_OK) {
        goto out;
    }
    CALL(device, "recording an event", event_record(mark->event, stream));
    *mark_p = mark;
    mark = NULL;
out:
    device_unmark(device, mark);
    return status;
}

hvd_status_t device_mark(device_t *device, void *stream, bool has_time, mark_t **mark_p, err_t *err)
{
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    TRY(check_capture(device, stream, err), out);
    TRY(record(device, stream, has_time, mark_p, err), out);
out:
    device_leave(device);
    return status;
}

mark_t *mark_hold(mark_t *mark)
{
    atomic_fetch_add(&mark->n_holders, 1);
    return mark;
}

void device_unmark(device_t *device, mark_t *mark)
{
    if (mark == NULL || atomic_fetch_sub(&mark->n_holders, 1) > 1) {
        return;
    }
    mark_t *since = mark->since;
    mark->since = NULL;
    lock_take(&device->pool_lock);
    mark->next = device->marks;
    device->marks = mark;
    lock_release(&device->pool_lock);
    device_unmark(device, since); // which counts from none
}

hvd_status_t device_when(device_t *device, const mark_t *mark, uint64_t *ticks_p,
                         uint64_t *after_ns_p, err_t *err)
{
    float ms = 0;
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    int code = device->driver.event_elapsed(&ms, mark->since->event, mark->event);
    device_leave(device);
    if (code != 0) {
        return code == DRIVER_NOT_READY ? HVD_IN_PROGRESS
                                        : device_refused(device, code, "work on the device", err);
    }
    *ticks_p = mark->since->ticks;
    *after_ns_p = ms > 0 ? (uint64_t)((double)ms * 1e6) : 0;
    return HVD_OK;
}

// --- Copies --------------------------------------------------------------------------------------

hvd_status_t device_fetch(device_t *device, const mark_t *ready, const device_copy_t *copies, int n,
                          void (*arrived)(void *arg), void *arg, device_times_t *times_p,
                          err_t *err)
{
    device_times_t times = {NULL, NULL};
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    lock_take(&device->in_lock);
    CALL(device, "waiting for an event", stream_wait(device->in, ready->event, 0));
    if (times_p != NULL) {
        TRY(record(device, device->in, true, &times.begun, err), out);
    }
    for (int i = 0; i < n; i++) {
        if (copies[i].device != NULL && copies[i].bytes > 0) {
            CALL(device, "copying to the host",
                 copy_to_host(copies[i].host, copies[i].device, copies[i].bytes, device->in));
        }
    }
    if (times_p != NULL) {
        TRY(record(device, device->in, true, &times.done, err), out);
    }
    CALL(device, "queueing a call", call_host(device->in, arrived, arg));
    if (times_p != NULL) {
        *times_p = times;
        times = (device_times_t){NULL, NULL};
    }
out:
    lock_release(&device->in_lock);
    device_leave(device);
    device_unmark(device, times.begun);
    device_unmark(device, times.done);
    return status;
}

static int queue_copy(const device_t *device, const device_copy_t *copy, void *stream,
                      const block_t *block)
{
    return block->on_device
               ? device->driver.copy_on_device(copy->device, copy->host, copy->bytes, stream)
               : device->driver.copy_to_device(copy->device, copy->host, copy->bytes, stream);
}

static hvd_status_t queue_copies(device_t *device, const device_copy_t *copies, int n, void *stream,
                                 block_t *block, err_t *err)
{
    hvd_status_t status = HVD_OK;
    for (int i = 0; i < n; i++) {
        if (copies[i].device != NULL && copies[i].bytes > 0) {
            int code = queue_copy(device, &copies[i], stream, block);
            if (code != 0) {
                return device_refused(device, code, "copying to the device", err);
            }
        }
    }
    CALL(device, "recording an event", event_record(block->event, stream));
    block->is_read = true;
out:
    return status;
}

hvd_status_t device_store(device_t *device, const device_copy_t *copies, int n, block_t *block,
                          device_times_t *times_p, err_t *err)
{
    device_times_t times = {NULL, NULL};
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    lock_take(&device->out_lock);
    if (times_p != NULL) {
        TRY(record(device, device->out, true, &times.begun, err), out);
    }
    TRY(queue_copies(device, copies, n, device->out, block, err), out);
    if (times_p != NULL) {
        TRY(record(device, device->out, true, &times.done, err), out);
        *times_p = times;
        times = (device_times_t){NULL, NULL};
    }
out:
    lock_release(&device->out_lock);
    device_leave(device);
    device_unmark(device, times.begun);
    device_unmark(device, times.done);
    return status;
}

hvd_status_t device_store_on(device_t *device, const device_copy_t *copy, void *stream,
                             block_t *block, err_t *err)
{
    hvd_status_t status = device_enter(device, err);
    if (status == HVD_OK) {
        status = queue_copies(device, copy, 1, stream, block, err);
        device_leave(device);
    }
    return status;
}

hvd_status_t device_order(device_t *device, void *stream, void *event, err_t *err)
{
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    CALL(device, "waiting for an event", stream_wait(stream, event, 0));
out:
    device_leave(device);
    return status;
}

// A driver's own wait would have no deadline.
hvd_status_t device_settle(device_t *device, void *event, uint64_t deadline_ns, err_t *err)
{
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    long nap_ns = FIRST_NAP_NS;
    int code;
    while ((code = device->driver.event_query(event)) == DRIVER_NOT_READY &&
           clock_ns() < deadline_ns) {
        nanosleep(&(struct timespec){.tv_nsec = nap_ns}, NULL);
        nap_ns = MIN(2 * nap_ns, LONGEST_NAP_NS);
    }
    device_leave(device);
    return code == 0                  ? HVD_OK
           : code == DRIVER_NOT_READY ? HVD_TIMEOUT
                                      : device_refused(device, code, "work on the device", err);
}

hvd_status_t device_health(device_t *device, err_t *err)
{
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    int code = device->driver.stream_query(device->in);
    device_leave(device);
    return code == 0 || code == DRIVER_NOT_READY
               ? HVD_OK
               : device_refused(device, code, "a kernel or copy", err);
}
