// SPDX-License-Identifier: Apache-2.0
//
// tf_device.c - orders TensorFlow's streams and ours by events of the whole context.
//
// libhvd_tf.so is apart from the core, so it finds the few functions of the driver that it needs by
// itself. A wait takes an event as it stands when the wait is queued: one event serves all.
#include "bind/tf_device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#define MAX_DEVICES 64
#define NON_BLOCKING 1u // a stream that the default stream does not wait for
#define NO_TIMING 2u    // an event that only orders

static struct {
    int (*get_context)(void **context_p);
    int (*get_device)(int *device_p);
    int (*push_context)(void *context);
    int (*pop_context)(void **context_p);
    int (*stream_create)(void **stream_p, unsigned flags);
    int (*stream_wait)(void *stream, void *event, unsigned flags);
    int (*event_create)(void **event_p, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*context_record)(void *context, void *event);
    int (*context_wait)(void *context, void *event);
} cuda;

static const char *const names[] = {
    "cuCtxGetCurrent",  "cuCtxGetDevice",    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
    "cuStreamCreate",   "cuStreamWaitEvent", "cuEventCreate",       "cuEventRecord",
    "cuCtxRecordEvent", "cuCtxWaitEvent",
};
_Static_assert(sizeof cuda == sizeof names / sizeof names[0] * sizeof(void *),
               "a name for each function");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    void *stream;
    void *event;
} made[MAX_DEVICES]; // under lock

bool tf_device_load(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; driver != NULL && i < sizeof names / sizeof names[0]; i++) {
        void *function = dlsym(driver, names[i]);
        if (function == NULL) {
            dlclose(driver);
            return false;
        }
        memcpy((char *)&cuda + i * sizeof function, &function, sizeof function);
    }
    return driver != NULL;
}

bool tf_device_here(tf_device_t *here_p)
{
    *here_p = (tf_device_t){.ordinal = -1};
    if (cuda.get_context(&here_p->context) != 0 || here_p->context == NULL ||
        cuda.get_device(&here_p->ordinal) != 0 || here_p->ordinal < 0 ||
        here_p->ordinal >= MAX_DEVICES) {
        return false;
    }
    int i = here_p->ordinal;
    pthread_mutex_lock(&lock);
    bool ready =
        (made[i].stream != NULL || cuda.stream_create(&made[i].stream, NON_BLOCKING) == 0) &&
        (made[i].event != NULL || cuda.event_create(&made[i].event, NO_TIMING) == 0);
    here_p->stream = made[i].stream;
    pthread_mutex_unlock(&lock);
    return ready;
}

bool tf_device_follow(const tf_device_t *device)
{
    void *event = made[device->ordinal].event;
    void *before;
    if (cuda.push_context(device->context) != 0) {
        return false;
    }
    pthread_mutex_lock(&lock);
    bool ordered = cuda.context_record(device->context, event) == 0 &&
                   cuda.stream_wait(device->stream, event, 0) == 0;
    pthread_mutex_unlock(&lock);
    cuda.pop_context(&before);
    return ordered;
}

bool tf_device_lead(const tf_device_t *device)
{
    void *event = made[device->ordinal].event;
    void *before;
    if (cuda.push_context(device->context) != 0) {
        return false;
    }
    pthread_mutex_lock(&lock);
    bool ordered = cuda.event_record(event, device->stream) == 0 &&
                   cuda.context_wait(device->context, event) == 0;
    pthread_mutex_unlock(&lock);
    cuda.pop_context(&before);
    return ordered;
}
