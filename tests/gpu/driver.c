// SPDX-License-Identifier: Apache-2.0
//
// driver.c - the simulated GPU behind CUDA's driver API (libcuda), as far as frameworks and the
// library under test call it.
//
// Names, arguments and numbers are those of the documented interface; what a function has to do is
// in the other files. A thread without a current context gets error 201, as from a real driver.
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uintptr_t pointer_t; // a CUdeviceptr

static int tags[SIM_DEVICES]; // a context is the address of its device's

static int device_of_context(const void *context)
{
    const int *tag = context;
    return tag >= tags && tag < tags + SIM_DEVICES ? (int)(tag - tags) : -1;
}

// The stream a handle means in this thread; NULL, and *code_p says why.
static sim_stream_t *stream_of(void *handle, int *code_p)
{
    int device = sim_current();
    if (device < 0) {
        *code_p = sim_mistake(SIM_INVALID_CONTEXT, "a stream is used without a current context");
        return NULL;
    }
    sim_stream_t *stream = sim_stream_of(handle, device);
    if (!sim_stream_exists(stream)) {
        *code_p = sim_mistake(SIM_INVALID_HANDLE, "a stream is used that was destroyed");
        return NULL;
    }
    return stream;
}

// --- Devices and contexts ------------------------------------------------------------------------

EXPORT int cuInit(unsigned flags)
{
    sim_setup();
    return flags != 0 ? SIM_INVALID_VALUE : sim.n_devices > 0 ? SIM_OK : SIM_NO_DEVICE;
}

EXPORT int cuDriverGetVersion(int *version_p)
{
    *version_p = 13020;
    return SIM_OK;
}

EXPORT int cuDeviceGetCount(int *n_p)
{
    sim_setup();
    *n_p = sim.n_devices;
    return SIM_OK;
}

EXPORT int cuDeviceGet(int *device_p, int ordinal)
{
    sim_setup();
    *device_p = ordinal;
    return ordinal >= 0 && ordinal < sim.n_devices ? SIM_OK : SIM_INVALID_DEVICE;
}

EXPORT int cuDeviceGetName(char *name, int bytes, int device)
{
    snprintf(name, (size_t)bytes, "Simulated GPU %d", device);
    return SIM_OK;
}

EXPORT int cuDeviceGetPCIBusId(char *text, int bytes, int device)
{
    snprintf(text, (size_t)bytes, "0000:%02x:00.0", device + 1);
    return SIM_OK;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char uuid[16], int device)
{
    memset(uuid, device + 1, 16);
    return SIM_OK;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes_p, int device)
{
    (void)device;
    *bytes_p = sim.memory_bytes;
    return SIM_OK;
}

// What PyTorch asks for: of compute capability 9.0, with 132 multiprocessors.
EXPORT int cuDeviceGetAttribute(int *value_p, int attribute, int device)
{
    static const struct {
        int attribute, value;
    } values[] = {{1, 1024}, {10, 32}, {16, 132}, {39, 2048}, {75, 9}, {76, 0}, {41, 1}};
    (void)device;
    *value_p = 0;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        *value_p = values[i].attribute == attribute ? values[i].value : *value_p;
    }
    return SIM_OK;
}

EXPORT int cuDeviceCanAccessPeer(int *can_p, int device, int other)
{
    (void)device;
    (void)other;
    *can_p = 0;
    return SIM_OK;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags_p, int *active_p)
{
    (void)device;
    *flags_p = 0;
    *active_p = 1;
    return SIM_OK;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context_p, int device)
{
    sim_setup();
    if (device < 0 || device >= sim.n_devices) {
        return SIM_INVALID_DEVICE;
    }
    *context_p = &tags[device];
    return SIM_OK;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    return device >= 0 && device < sim.n_devices ? SIM_OK : SIM_INVALID_DEVICE;
}

EXPORT int cuCtxGetCurrent(void **context_p)
{
    int device = sim_current();
    *context_p = device >= 0 ? &tags[device] : NULL;
    return SIM_OK;
}

EXPORT int cuCtxSetCurrent(void *context)
{
    int device = device_of_context(context);
    if (context != NULL && device < 0) {
        return SIM_INVALID_CONTEXT;
    }
    sim_set_current(device);
    return SIM_OK;
}

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    int device = device_of_context(context);
    return device >= 0 ? sim_push_current(device) : SIM_INVALID_CONTEXT;
}

EXPORT int cuCtxPopCurrent_v2(void **context_p)
{
    int device;
    int code = sim_pop_current(&device);
    if (code == SIM_OK && context_p != NULL) {
        *context_p = device >= 0 ? &tags[device] : NULL;
    }
    return code;
}

EXPORT int cuCtxGetDevice(int *device_p)
{
    *device_p = sim_current();
    return *device_p >= 0 ? SIM_OK : SIM_INVALID_CONTEXT;
}

EXPORT int cuCtxGetStreamPriorityRange(int *least_p, int *greatest_p)
{
    *least_p = 0;
    *greatest_p = -5;
    return SIM_OK;
}

EXPORT int cuCtxSynchronize(void)
{
    int device = sim_current();
    return device >= 0 ? sim_wait_device(device) : SIM_INVALID_CONTEXT;
}

EXPORT int cuGetErrorString(int code, const char **text_p)
{
    *text_p = sim_error_name(code);
    return SIM_OK;
}

EXPORT int cuGetErrorName(int code, const char **text_p)
{
    return cuGetErrorString(code, text_p);
}

// --- Memory --------------------------------------------------------------------------------------

EXPORT int cuMemAlloc_v2(pointer_t *memory_p, size_t bytes)
{
    void *memory;
    int device = sim_current();
    int code = device < 0 ? SIM_INVALID_CONTEXT : sim_malloc(device, bytes, &memory);
    if (code == SIM_OK) {
        *memory_p = (pointer_t)memory;
    }
    return code;
}

EXPORT int cuMemFree_v2(pointer_t memory)
{
    return sim_free((void *)memory);
}

EXPORT int cuMemHostAlloc(void **memory_p, size_t bytes, unsigned flags)
{
    (void)flags;
    return sim_current() < 0 ? SIM_INVALID_CONTEXT : sim_host_alloc(bytes, memory_p);
}

EXPORT int cuMemFreeHost(void *memory)
{
    return sim_host_free(memory);
}

EXPORT int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags)
{
    (void)flags;
    return sim_current() < 0              ? SIM_INVALID_CONTEXT
           : sim_call_fails("host_alloc") ? SIM_OUT_OF_MEMORY
                                          : sim_host_register(memory, bytes);
}

EXPORT int cuMemHostUnregister(void *memory)
{
    for (int device = 0; device < sim.n_devices; device++) {
        sim_wait_device(device);
    }
    return sim_host_unregister(memory);
}

EXPORT int cuMemGetInfo_v2(size_t *free_p, size_t *total_p)
{
    sim_memory_info(sim_current() < 0 ? 0 : sim_current(), free_p, total_p);
    return SIM_OK;
}

// CU_POINTER_ATTRIBUTE_CONTEXT 1, MEMORY_TYPE 2, DEVICE_ORDINAL 9.
EXPORT int cuPointerGetAttribute(void *value, int attribute, pointer_t pointer)
{
    int device = sim_device_of((void *)pointer);
    bool pinned = device < 0 && sim_is_pinned((void *)pointer);
    if (device < 0 && !pinned) {
        return SIM_INVALID_VALUE;
    }
    switch (attribute) {
    case 1:
        *(void **)value = &tags[pinned ? 0 : device];
        return SIM_OK;
    case 2:
        *(unsigned *)value = pinned ? 1 : 2;
        return SIM_OK;
    case 9:
        *(int *)value = pinned ? 0 : device;
        return SIM_OK;
    default:
        return SIM_NOT_SUPPORTED;
    }
}

static int copy(void *to, const void *from, size_t bytes, void *stream, bool blocks)
{
    int code;
    sim_stream_t *on = stream_of(stream, &code);
    return on != NULL ? sim_copy(to, from, bytes, on, blocks) : code;
}

EXPORT int cuMemcpyHtoDAsync_v2(pointer_t to, const void *from, size_t bytes, void *stream)
{
    return copy((void *)to, from, bytes, stream, false);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, pointer_t from, size_t bytes, void *stream)
{
    return copy(to, (void *)from, bytes, stream, false);
}

EXPORT int cuMemcpyDtoDAsync_v2(pointer_t to, pointer_t from, size_t bytes, void *stream)
{
    return copy((void *)to, (void *)from, bytes, stream, false);
}

EXPORT int cuMemcpyHtoD_v2(pointer_t to, const void *from, size_t bytes)
{
    return copy((void *)to, from, bytes, NULL, true);
}

EXPORT int cuMemcpyDtoH_v2(void *to, pointer_t from, size_t bytes)
{
    return copy(to, (void *)from, bytes, NULL, true);
}

EXPORT int cuMemsetD8Async(pointer_t to, unsigned char value, size_t bytes, void *stream)
{
    int code;
    sim_stream_t *on = stream_of(stream, &code);
    return on != NULL ? sim_set((void *)to, value, 1, bytes, on) : code;
}

EXPORT int cuMemsetD32Async(pointer_t to, unsigned value, size_t n, void *stream)
{
    int code;
    sim_stream_t *on = stream_of(stream, &code);
    return on != NULL ? sim_set((void *)to, (int)value, 4, n * 4, on) : code;
}

// --- Streams -------------------------------------------------------------------------------------

EXPORT int cuStreamCreateWithPriority(void **stream_p, unsigned flags, int priority)
{
    int device = sim_current();
    if (device < 0) {
        return SIM_INVALID_CONTEXT;
    }
    *stream_p = sim_stream_new(device, flags, priority);
    return SIM_OK;
}

EXPORT int cuStreamCreate(void **stream_p, unsigned flags)
{
    return cuStreamCreateWithPriority(stream_p, flags, 0);
}

EXPORT int cuStreamDestroy_v2(void *stream)
{
    int code;
    sim_stream_t *on = stream_of(stream, &code);
    if (on == NULL) {
        return code;
    }
    sim_stream_free(on);
    return SIM_OK;
}

#define STREAM_CALL(name, call)                                                                    \
    EXPORT int name(void *stream)                                                                  \
    {                                                                                              \
        int code;                                                                                  \
        sim_stream_t *on = stream_of(stream, &code);                                               \
        return on != NULL ? call(on) : code;                                                       \
    }
STREAM_CALL(cuStreamSynchronize, sim_wait_stream)
STREAM_CALL(cuStreamQuery, sim_query_stream)

EXPORT int cuStreamIsCapturing(void *stream, int *state_p)
{
    int code;
    const sim_stream_t *on = stream_of(stream, &code);
    if (on == NULL) {
        return code;
    }
    *state_p = sim_capture_state(on);
    return SIM_OK;
}

EXPORT int cuStreamBeginCapture_v2(void *stream, int mode)
{
    int code;
    sim_stream_t *on = stream_of(stream, &code);
    (void)mode;
    return on != NULL ? sim_capture_begin(on) : code;
}

EXPORT int cuStreamEndCapture(void *stream, void **graph_p)
{
    int code;
    sim_stream_t *on = stream_of(stream, &code);
    *graph_p = NULL; // nothing was kept
    return on != NULL ? sim_capture_end(on) : code;
}

typedef struct host_call {
    void (*call)(void *arg);
    void *arg;
} host_call_t;

static void run_host_call(void *arg)
{
    const host_call_t *host = arg;
    host->call(host->arg);
}

EXPORT int cuLaunchHostFunc(void *stream, void (*call)(void *arg), void *arg)
{
    int code;
    sim_stream_t *on = stream_of(stream, &code);
    if (on == NULL) {
        return code;
    }
    host_call_t *host = malloc(sizeof *host);
    *host = (host_call_t){call, arg};
    return sim_push(on, "host", run_host_call, host);
}

// --- Events --------------------------------------------------------------------------------------

EXPORT int cuEventCreate(void **event_p, unsigned flags)
{
    int device = sim_current();
    if (device < 0) {
        return SIM_INVALID_CONTEXT;
    }
    *event_p = sim_event_new(device, flags);
    return SIM_OK;
}

static int check_event(const sim_event_t *event)
{
    return sim_event_exists(event)
               ? SIM_OK
               : sim_mistake(SIM_INVALID_HANDLE, "an event is used that was destroyed");
}

EXPORT int cuEventDestroy_v2(void *event)
{
    int code = check_event(event);
    if (code == SIM_OK) {
        sim_event_free(event);
    }
    return code;
}

EXPORT int cuEventRecord(void *event, void *stream)
{
    int code = check_event(event);
    sim_stream_t *on = code == SIM_OK ? stream_of(stream, &code) : NULL;
    return on != NULL ? sim_record(event, on) : code;
}

EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    int code = check_event(event);
    sim_stream_t *on = code == SIM_OK ? stream_of(stream, &code) : NULL;
    (void)flags;
    return on != NULL ? sim_order(on, event) : code;
}

static int device_event(const void *context, const sim_event_t *event)
{
    int code = check_event(event);
    return code == SIM_OK && device_of_context(context) != event->device
               ? sim_mistake(SIM_INVALID_HANDLE, "an event is used with another device's context")
               : code;
}

EXPORT int cuCtxRecordEvent(void *context, void *event)
{
    int code = device_event(context, event);
    return code == SIM_OK ? sim_record_context(event) : code;
}

EXPORT int cuCtxWaitEvent(void *context, void *event)
{
    int code = device_event(context, event);
    return code == SIM_OK ? sim_order_context(event) : code;
}

EXPORT int cuEventQuery(void *event)
{
    int code = check_event(event);
    return code == SIM_OK ? sim_query_event(event) : code;
}

EXPORT int cuEventElapsedTime(float *ms_p, void *from, void *to)
{
    int code = check_event(from);
    code = code == SIM_OK ? check_event(to) : code;
    return code == SIM_OK ? sim_elapsed(ms_p, from, to) : code;
}

EXPORT int cuEventSynchronize(void *event)
{
    int code = check_event(event);
    return code == SIM_OK ? sim_wait_event(event) : code;
}

// --- NVML, which PyTorch looks for ---------------------------------------------------------------

EXPORT int nvmlInit_v2(void)
{
    return 0;
}

EXPORT int nvmlShutdown(void)
{
    return 0;
}
