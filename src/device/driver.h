// SPDX-License-Identifier: Apache-2.0
//
// driver.h - the functions of a GPU's driver, under one set of names for all makers.
//
// A row of driver.c has the names that a maker gives them; they take the same arguments
// everywhere. Private to device/.
#ifndef HVD_DEVICE_DRIVER_H
#define HVD_DEVICE_DRIVER_H

#include "base/base.h"

#define DRIVER_NOT_READY 600 // the same number in all of them, as 0 is success

typedef struct driver {
    const char *name; // of the maker's interface
    void *library;

    int (*init)(unsigned flags);
    int (*retain_context)(void **context_p, int device);
    int (*release_context)(int device);
    int (*push_context)(void *context);
    int (*pop_context)(void **context_p);
    int (*stream_create)(void **stream_p, unsigned flags, int priority);
    int (*stream_destroy)(void *stream);
    int (*stream_wait)(void *stream, void *event, unsigned flags);
    int (*stream_is_capturing)(void *stream, int *state_p);
    int (*stream_query)(void *stream);
    int (*event_create)(void **event_p, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_elapsed)(float *ms_p, void *from, void *to);
    int (*host_register)(void *memory, size_t bytes, unsigned flags);
    int (*host_unregister)(void *memory);
    int (*copy_to_device)(void *device, const void *host, size_t bytes, void *stream);
    int (*copy_to_host)(void *host, void *device, size_t bytes, void *stream);
    int (*copy_on_device)(void *to, void *from, size_t bytes, void *stream);
    int (*set_bytes)(void *memory, unsigned char value, size_t bytes, void *stream);
    int (*memory_take)(void **memory_p, size_t bytes);
    int (*memory_free)(void *memory);
    int (*call_host)(void *stream, void (*call)(void *arg), void *arg);
    int (*count)(int *n_p);
    int (*name_of)(char *name, int bytes, int device);
    int (*uuid)(uint8_t uuid[16], int device);
    int (*version)(int *version_p); // 13020: CUDA 13.2
    int (*error_text)(int code, const char **text_p);
} gpu_driver_t;

// Finds it, and starts nothing.
hvd_status_t driver_find(gpu_driver_t *driver, err_t *err);
// The driver of this process: what a framework has loaded, else what the system has. It is never
// unloaded.
hvd_status_t driver_open(gpu_driver_t *driver, err_t *err);

#endif
