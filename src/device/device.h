// SPDX-License-Identifier: Apache-2.0
//
// device.h - the GPU of this rank: its memory copied to the host and back, in the order of streams.
//
// Owns: the driver library, found at run time (CUDA's, or AMD's), two streams for copies, one in
// and one out, and blocks of pinned memory, kept from copy to copy. Nothing here waits for the
// device but device_settle, which has a deadline, and pinned memory that has to be taken anew.
//
// Threads: every function may be called by any thread. Each makes the device's primary context
// current for itself, and leaves the thread as it was.
#ifndef HVD_DEVICE_H
#define HVD_DEVICE_H

#include "base/base.h"

typedef struct device device_t;

// Pinned memory. `event` is recorded behind the last copy that reads it: such a block is used again
// only when that copy is over.
typedef struct pinned {
    uint8_t *data;
    size_t bytes;
    void *event;
    bool is_read; // the event has been recorded since the block was taken
    struct pinned *next;
} pinned_t;

// Opens the driver that this process has loaded, or the system's, and the device of this number.
hvd_status_t device_open(int ordinal, device_t **device_p, err_t *err);
// Everything it has given out has come back. Safe on NULL.
void device_close(device_t *device);
int device_ordinal(const device_t *device);
const char *device_driver_name(const device_t *device); // "CUDA", "HIP"

// At least so many bytes.
hvd_status_t device_take(device_t *device, size_t bytes, pinned_t **block_p, err_t *err);
void device_give_back(device_t *device, pinned_t *block); // safe on NULL

typedef struct device_copy {
    void *host;
    void *device; // address in device memory; NULL: nothing to copy
    size_t bytes;
} device_copy_t;

// Copies to the host what `stream`, one of the user's, has queued so far, and calls arrived(arg)
// then, on a thread of the driver's, which may neither use the device nor block for long. Returns
// at once. It is not called if this fails, nor if the device breaks before.
hvd_status_t device_fetch(device_t *device, void *stream, const device_copy_t *copies, int n,
                          void (*arrived)(void *arg), void *arg, err_t *err);
// Copies to the device in the stream `out`; the block's event is behind them. Returns at once.
hvd_status_t device_store(device_t *device, const device_copy_t *copies, int n, pinned_t *block,
                          err_t *err);
// The same in a stream of the user's.
hvd_status_t device_store_on(device_t *device, const device_copy_t *copy, void *stream,
                             pinned_t *block, err_t *err);
// What is queued in `stream` from now on comes after the block's event. Returns at once.
hvd_status_t device_order(device_t *device, void *stream, const pinned_t *block, err_t *err);
// Waits until the block's event has happened. HVD_TIMEOUT: not yet.
hvd_status_t device_settle(device_t *device, const pinned_t *block, uint64_t deadline_ns,
                           err_t *err);
// HVD_OK, or how the device has broken.
hvd_status_t device_health(device_t *device, err_t *err);

#endif
