// SPDX-License-Identifier: Apache-2.0
//
// inside.h - what the files of device/ share: a device, and calls of its driver.
//
// Private to device/.
#ifndef HVD_DEVICE_INSIDE_H
#define HVD_DEVICE_INSIDE_H

#include "device/device.h"
#include "device/driver.h"

struct device {
    gpu_driver_t driver;
    int ordinal;
    void *context; // the primary one, that frameworks use
    void *in, *out;
    void *ready;     // recorded in the user's stream, waited for in `in`
    lock_t in_lock;  // what a fetch queues stays together
    lock_t out_lock; // the same for a store
    lock_t pool_lock;
    block_t *pool;  // not in use; some may still be read
    mark_t *marks;  // not in use
    void *clock;    // a stream for moments; NULL: no time has been asked for
    mark_t *moment; // the last of them, which times are counted from; under pool_lock
    uint64_t moment_ns;
};

// Makes the device's context current; leave() undoes it.
hvd_status_t device_enter(const device_t *device, err_t *err);
void device_leave(const device_t *device);
// The sentence for a call of the driver that returned `code`.
hvd_status_t device_refused(const device_t *device, int code, const char *what, err_t *err);

// For functions with a `status`, an `err` and a label `out`.
#define CALL(device, what, call)                                                                   \
    do {                                                                                           \
        int code = (device)->driver.call;                                                          \
        if (UNLIKELY(code != 0)) {                                                                 \
            status = device_refused(device, code, what, err);                                      \
            goto out;                                                                              \
        }                                                                                          \
    } while (0)

#endif
