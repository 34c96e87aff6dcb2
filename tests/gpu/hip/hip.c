// SPDX-License-Identifier: Apache-2.0
//
// hip.c - the simulated GPU under the names of AMD's driver, as far as src/device/driver.c calls
// them.
//
// It stands in for libamdhip64 (tests/gpu/lib-hip) and hands each call on to the simulation, which
// the test program has loaded: so a name of HIP's row that stands in the wrong place fails.
#include "../api.h"
#include "../sim.h"

// Those that tests do not call, and api.h so does not declare.
int cuDevicePrimaryCtxRelease_v2(int device);
int cuStreamCreateWithPriority(void **stream_p, unsigned flags, int priority);
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags);
int cuMemHostUnregister(void *memory);
int cuDeviceGetName(char *name, int bytes, int device);
int cuDeviceGetUuid_v2(unsigned char uuid[16], int device);
int cuDriverGetVersion(int *version_p);
int cuEventElapsedTime(float *ms_p, void *from, void *to);
int cuGetErrorString(int code, const char **text_p);

#define SAME(hip, parameters, cuda, arguments)                                                     \
    EXPORT int hip parameters                                                                      \
    {                                                                                              \
        return cuda arguments;                                                                     \
    }

SAME(hipInit, (unsigned flags), cuInit, (flags))
SAME(hipDriverGetVersion, (int *version_p), cuDriverGetVersion, (version_p))
SAME(hipGetDeviceCount, (int *n_p), cuDeviceGetCount, (n_p))
SAME(hipDeviceGetName, (char *name, int bytes, int device), cuDeviceGetName, (name, bytes, device))
SAME(hipDeviceGetUuid, (unsigned char uuid[16], int device), cuDeviceGetUuid_v2, (uuid, device))
SAME(hipDrvGetErrorString, (int code, const char **text_p), cuGetErrorString, (code, text_p))

SAME(hipDevicePrimaryCtxRetain, (void **context_p, int device), cuDevicePrimaryCtxRetain,
     (context_p, device))
SAME(hipDevicePrimaryCtxRelease, (int device), cuDevicePrimaryCtxRelease_v2, (device))
SAME(hipCtxPushCurrent, (void *context), cuCtxPushCurrent_v2, (context))
SAME(hipCtxPopCurrent, (void **context_p), cuCtxPopCurrent_v2, (context_p))

SAME(hipStreamCreateWithPriority, (void **stream_p, unsigned flags, int priority),
     cuStreamCreateWithPriority, (stream_p, flags, priority))
SAME(hipStreamDestroy, (void *stream), cuStreamDestroy_v2, (stream))
SAME(hipStreamWaitEvent, (void *stream, void *event, unsigned flags), cuStreamWaitEvent,
     (stream, event, flags))
SAME(hipStreamIsCapturing, (void *stream, int *state_p), cuStreamIsCapturing, (stream, state_p))
SAME(hipStreamQuery, (void *stream), cuStreamQuery, (stream))
SAME(hipLaunchHostFunc, (void *stream, void (*call)(void *arg), void *arg), cuLaunchHostFunc,
     (stream, call, arg))

SAME(hipEventCreateWithFlags, (void **event_p, unsigned flags), cuEventCreate, (event_p, flags))
SAME(hipEventDestroy, (void *event), cuEventDestroy_v2, (event))
SAME(hipEventRecord, (void *event, void *stream), cuEventRecord, (event, stream))
SAME(hipEventElapsedTime, (float *ms_p, void *from, void *to), cuEventElapsedTime, (ms_p, from, to))
SAME(hipEventQuery, (void *event), cuEventQuery, (event))

SAME(hipHostRegister, (void *memory, size_t bytes, unsigned flags), cuMemHostRegister_v2,
     (memory, bytes, flags))
SAME(hipHostUnregister, (void *memory), cuMemHostUnregister, (memory))
SAME(hipMalloc, (uintptr_t *memory_p, size_t bytes), cuMemAlloc_v2, (memory_p, bytes))
SAME(hipFree, (uintptr_t memory), cuMemFree_v2, (memory))
SAME(hipMemsetD8Async, (uintptr_t to, unsigned char value, size_t bytes, void *stream),
     cuMemsetD8Async, (to, value, bytes, stream))
SAME(hipMemcpyHtoDAsync, (uintptr_t to, const void *from, size_t bytes, void *stream),
     cuMemcpyHtoDAsync_v2, (to, from, bytes, stream))
SAME(hipMemcpyDtoHAsync, (void *to, uintptr_t from, size_t bytes, void *stream),
     cuMemcpyDtoHAsync_v2, (to, from, bytes, stream))
SAME(hipMemcpyDtoDAsync, (uintptr_t to, uintptr_t from, size_t bytes, void *stream),
     cuMemcpyDtoDAsync_v2, (to, from, bytes, stream))
