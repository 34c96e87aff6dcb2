// SPDX-License-Identifier: Apache-2.0
//
// device.h - the GPU of this rank: its memory copied to the host and back, in the order of streams.
//
// Owns: the driver library, found at run time (CUDA's, or AMD's), two streams for copies, one in
// and one out, blocks of pinned memory and of the device's own, and marks, which are kept and used
// again. Nothing here waits for the device but device_settle, which has a deadline, and memory that
// has to be taken anew. nccl.h is about collectives on it.
//
// Threads: every function may be called by any thread. Each makes the device's primary context
// current for itself, and leaves the thread as it was.
#ifndef HVD_DEVICE_H
#define HVD_DEVICE_H

#include "base/base.h"

typedef struct device device_t;

// Memory of the host that is pinned, or of the device. `event` is recorded behind the last copy
// that reads it: such a block is used again only when that copy is over.
typedef struct block {
    uint8_t *data;
    size_t bytes;
    void *event;
    bool is_read; // the event has been recorded since the block was taken
    bool on_device;
    struct block *next;
} block_t;

// A place in the work of a stream: behind all that was queued there before.
typedef struct mark {
    void *event;
    atomic_int n_holders;
    atomic_bool is_spoiled; // for whoever holds it: it will come, but not well
    bool has_time;          // device_when() tells it
    struct mark *since;     // its time is counted from this one, a moment of the host, too:
    uint64_t ticks;
    struct mark *next;
} mark_t;

// When what was queued between them has begun, and when it was over.
typedef struct device_times {
    mark_t *begun, *done;
} device_times_t;

// How many there are. Starts the driver: a process must not fork afterwards.
hvd_status_t device_count(int *n_p, err_t *err);
// Opens the driver that this process has loaded, or the system's, and the device of this number.
hvd_status_t device_open(int ordinal, device_t **device_p, err_t *err);
// Everything it has given out has come back. Safe on NULL.
void device_close(device_t *device);
int device_ordinal(const device_t *device);
const char *device_driver_name(const device_t *device); // "CUDA", "HIP"

void device_name(const device_t *device, char *name, size_t bytes); // as its maker calls it
// Of the GPU, whichever process asks. All zero: it has none.
void device_uuid(const device_t *device, uint8_t uuid[16]);

// At least so many bytes. Memory of the device that is taken again may still be written by what was
// queued in the stream it was used in: use it in that stream only.
hvd_status_t device_take(device_t *device, size_t bytes, bool on_device, block_t **block_p,
                         err_t *err);
void device_give_back(device_t *device, block_t *block); // safe on NULL

// For what `stream`, one of the user's, has queued so far. Refused while it is captured. It has one
// holder.
hvd_status_t device_mark(device_t *device, void *stream, bool has_time, mark_t **mark_p,
                         err_t *err);
mark_t *mark_hold(mark_t *mark);
void device_unmark(device_t *device, mark_t *mark); // one holder less; safe on NULL
// When a mark that has a time has happened: so long after that moment of the host, in ticks.
// HVD_IN_PROGRESS: it has not yet.
hvd_status_t device_when(device_t *device, const mark_t *mark, uint64_t *ticks_p,
                         uint64_t *after_ns_p, err_t *err);

typedef struct device_copy {
    void *host;
    void *device; // address in device memory; NULL: nothing to copy
    size_t bytes;
} device_copy_t;

// Copies to the host behind the mark, and calls arrived(arg) then, on a thread of the driver's,
// which may neither use the device nor block for long. Returns at once. It is not called if this
// fails, nor if the device breaks before. times_p: NULL, or where to put marks, which are the
// caller's if this succeeds.
hvd_status_t device_fetch(device_t *device, const mark_t *ready, const device_copy_t *copies, int n,
                          void (*arrived)(void *arg), void *arg, device_times_t *times_p,
                          err_t *err);
// Copies to the device in the stream `out`; the block's event is behind them. Returns at once.
hvd_status_t device_store(device_t *device, const device_copy_t *copies, int n, block_t *block,
                          device_times_t *times_p, err_t *err);
// The same in a stream of the user's, from either kind of block.
hvd_status_t device_store_on(device_t *device, const device_copy_t *copy, void *stream,
                             block_t *block, err_t *err);
// What is queued in `stream` from now on comes after the event, a block's or a mark's. Returns at
// once.
hvd_status_t device_order(device_t *device, void *stream, void *event, err_t *err);
// Waits until the event has happened. HVD_TIMEOUT: not yet; deadline 0 only looks.
hvd_status_t device_settle(device_t *device, void *event, uint64_t deadline_ns, err_t *err);
// HVD_OK, or how the device has broken.
hvd_status_t device_health(device_t *device, err_t *err);

#endif
