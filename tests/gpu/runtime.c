// SPDX-License-Identifier: Apache-2.0
//
// runtime.c - the simulated GPU behind CUDA's runtime API (libcudart), for frameworks.
//
// Structs whose layout differs between versions of CUDA are written by offset: a row for each major
// version, chosen when this is compiled (GPUSIM_CUDA). There are no kernels: a program that
// launches one gets error 801, and a line tells its name. Tests give frameworks their arithmetic in
// another way (fallback.py).
#define _GNU_SOURCE
#include "sim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef GPUSIM_CUDA
#define GPUSIM_CUDA 13
#endif

typedef struct dim3 {
    unsigned x, y, z;
} dim3_t;

static __thread int last_error;

static int note(int code)
{
    last_error = code != SIM_OK && code != SIM_NOT_READY ? code : last_error;
    return code;
}

static int device_now(void)
{
    sim_setup();
    if (sim_current() < 0) {
        sim_set_current(0);
    }
    return sim_current();
}

static sim_stream_t *stream_of(void *handle)
{
    return sim_stream_of(handle, device_now());
}

// --- Devices -------------------------------------------------------------------------------------

EXPORT int cudaGetDeviceCount(int *n_p)
{
    sim_setup();
    *n_p = sim.n_devices;
    return sim.n_devices > 0 ? SIM_OK : note(SIM_NO_DEVICE);
}

EXPORT int cudaGetDevice(int *device_p)
{
    *device_p = device_now();
    return SIM_OK;
}

EXPORT int cudaSetDevice(int device)
{
    sim_setup();
    if (device < 0 || device >= sim.n_devices) {
        return note(SIM_INVALID_DEVICE);
    }
    sim_set_current(device);
    return SIM_OK;
}

EXPORT int cudaDriverGetVersion(int *version_p)
{
    *version_p = 13020;
    return SIM_OK;
}

EXPORT int cudaRuntimeGetVersion(int *version_p)
{
    *version_p = GPUSIM_CUDA == 12 ? 12040 : 13020;
    return SIM_OK;
}

typedef struct layout {
    size_t bytes, multiprocessors, bus, l2, threads_per_multiprocessor, shared_per_multiprocessor,
        shared_optin;
} layout_t;

// cudaDeviceProp of CUDA 12 and 13; fields before 360 are the same in both.
static const layout_t layouts[] = {[12] = {1032, 388, 584, 616, 624, 640, 696},
                                   [13] = {1008, 384, 568, 596, 604, 624, 672}};
static const layout_t *const layout = &layouts[GPUSIM_CUDA];

static void put(void *struct_p, size_t offset, int value)
{
    memcpy((char *)struct_p + offset, &value, sizeof value);
}

EXPORT int cudaGetDeviceProperties(void *properties, int device)
{
    size_t memory = sim.memory_bytes, shared = 49152;
    memset(properties, 0, layout->bytes);
    snprintf(properties, 256, "Simulated GPU %d", device);
    memset((char *)properties + 256, device + 1, 16);
    memcpy((char *)properties + 288, &memory, sizeof memory);
    memcpy((char *)properties + 296, &shared, sizeof shared);
    put(properties, 304, 65536); // registers of a block
    put(properties, 308, 32);    // threads of a warp
    put(properties, 320, 1024);  // of a block
    put(properties, 324, 1024);
    put(properties, 328, 1024);
    put(properties, 332, 64);
    put(properties, 336, 0x7fffffff); // blocks
    put(properties, 340, 65535);
    put(properties, 344, 65535);
    put(properties, 360, 9); // compute capability
    put(properties, layout->multiprocessors, 132);
    put(properties, layout->bus, device + 1);
    put(properties, layout->l2, 50 << 20);
    put(properties, layout->threads_per_multiprocessor, 2048);
    put(properties, layout->shared_per_multiprocessor, 233472);
    put(properties, layout->shared_optin, 232448);
    return SIM_OK;
}

EXPORT int cudaGetDeviceProperties_v2(void *properties, int device)
{
    return cudaGetDeviceProperties(properties, device);
}

int cuDeviceGetAttribute(int *value_p, int attribute, int device);
EXPORT int cudaDeviceGetAttribute(int *value_p, int attribute, int device)
{
    return cuDeviceGetAttribute(value_p, attribute, device);
}

int cuDeviceGetPCIBusId(char *text, int bytes, int device);
EXPORT int cudaDeviceGetPCIBusId(char *text, int bytes, int device)
{
    return cuDeviceGetPCIBusId(text, bytes, device);
}

EXPORT int cudaDeviceGetStreamPriorityRange(int *least_p, int *greatest_p)
{
    *least_p = 0;
    *greatest_p = -5;
    return SIM_OK;
}

EXPORT int cudaDeviceCanAccessPeer(int *can_p, int device, int other)
{
    (void)device;
    (void)other;
    *can_p = 0;
    return SIM_OK;
}

EXPORT int cudaDeviceEnablePeerAccess(int device, unsigned flags)
{
    (void)device;
    (void)flags;
    return SIM_OK;
}

EXPORT int cudaDeviceSynchronize(void)
{
    return note(sim_wait_device(device_now()));
}

EXPORT const char *cudaGetErrorString(int code)
{
    return sim_error_name(code);
}

EXPORT const char *cudaGetErrorName(int code)
{
    return sim_error_name(code);
}

EXPORT int cudaGetLastError(void)
{
    int code = last_error;
    last_error = SIM_OK;
    return code;
}

EXPORT int cudaPeekAtLastError(void)
{
    return last_error;
}

EXPORT int cudaProfilerStart(void)
{
    return SIM_OK;
}

EXPORT int cudaProfilerStop(void)
{
    return SIM_OK;
}

// --- Memory --------------------------------------------------------------------------------------

EXPORT int cudaMalloc(void **memory_p, size_t bytes)
{
    return note(sim_malloc(device_now(), bytes, memory_p));
}

EXPORT int cudaMallocAsync(void **memory_p, size_t bytes, void *stream)
{
    (void)stream;
    return cudaMalloc(memory_p, bytes);
}

EXPORT int cudaFree(void *memory)
{
    return note(sim_free(memory));
}

EXPORT int cudaFreeAsync(void *memory, void *stream)
{
    (void)stream;
    return cudaFree(memory);
}

EXPORT int cudaHostAlloc(void **memory_p, size_t bytes, unsigned flags)
{
    (void)flags;
    device_now();
    return note(sim_host_alloc(bytes, memory_p));
}

EXPORT int cudaMallocHost(void **memory_p, size_t bytes)
{
    return cudaHostAlloc(memory_p, bytes, 0);
}

EXPORT int cudaFreeHost(void *memory)
{
    return note(sim_host_free(memory));
}

EXPORT int cudaHostRegister(void *memory, size_t bytes, unsigned flags)
{
    (void)flags;
    return note(sim_host_register(memory, bytes));
}

EXPORT int cudaHostUnregister(void *memory)
{
    return note(sim_host_unregister(memory));
}

EXPORT int cudaMemGetInfo(size_t *free_p, size_t *total_p)
{
    sim_memory_info(device_now(), free_p, total_p);
    return SIM_OK;
}

// cudaPointerAttributes begins alike in all versions, and is longer since CUDA 13.
typedef struct attributes {
    int type, device; // type 0: not known here, 1: host, 2: device
    void *device_pointer, *host_pointer;
} attributes_t;

EXPORT int cudaPointerGetAttributes(void *attributes_p, const void *pointer)
{
    int device = sim_device_of(pointer);
    bool pinned = device < 0 && sim_is_pinned(pointer);
    void *address = (void *)(uintptr_t)pointer;
    attributes_t attributes = {.type = device >= 0 ? 2
                                       : pinned    ? 1
                                                   : 0,
                               .device = device >= 0 ? device
                                         : pinned    ? 0
                                                     : -2,
                               .device_pointer = device >= 0 || pinned ? address : NULL,
                               .host_pointer = pinned ? address : NULL};
    memset(attributes_p, 0, GPUSIM_CUDA == 12 ? 24 : 88);
    memcpy(attributes_p, &attributes, sizeof attributes);
    return SIM_OK;
}

EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream)
{
    (void)kind;
    return note(sim_copy(to, from, bytes, stream_of(stream), false));
}

EXPORT int cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
    (void)kind;
    return note(sim_copy(to, from, bytes, stream_of(NULL), true));
}

EXPORT int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                               size_t bytes, void *stream)
{
    (void)to_device;
    (void)from_device;
    return cudaMemcpyAsync(to, from, bytes, 0, stream);
}

EXPORT int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream)
{
    return note(sim_set(to, value, 1, bytes, stream_of(stream)));
}

EXPORT int cudaMemset(void *to, int value, size_t bytes)
{
    return cudaMemsetAsync(to, value, bytes, NULL);
}

EXPORT int cudaGetSymbolAddress(void **address_p, const void *symbol)
{
    (void)symbol;
    return cudaMalloc(address_p, 512);
}

// --- Streams and events --------------------------------------------------------------------------

EXPORT int cudaStreamCreateWithPriority(void **stream_p, unsigned flags, int priority)
{
    *stream_p = sim_stream_new(device_now(), flags, priority);
    return SIM_OK;
}

EXPORT int cudaStreamCreateWithFlags(void **stream_p, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream_p, flags, 0);
}

EXPORT int cudaStreamCreate(void **stream_p)
{
    return cudaStreamCreateWithPriority(stream_p, 0, 0);
}

EXPORT int cudaStreamDestroy(void *stream)
{
    sim_stream_free(stream_of(stream));
    return SIM_OK;
}

EXPORT int cudaStreamGetPriority(void *stream, int *priority_p)
{
    *priority_p = sim_stream_priority(stream_of(stream));
    return SIM_OK;
}

EXPORT int cudaStreamQuery(void *stream)
{
    return note(sim_query_stream(stream_of(stream)));
}

EXPORT int cudaStreamSynchronize(void *stream)
{
    return note(sim_wait_stream(stream_of(stream)));
}

EXPORT int cudaStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    (void)flags;
    return note(sim_order(stream_of(stream), event));
}

EXPORT int cudaStreamIsCapturing(void *stream, int *state_p)
{
    *state_p = sim_capture_state(stream_of(stream));
    return SIM_OK;
}

static int tell_capture(void *stream, int *state_p, unsigned long long *id_p)
{
    *state_p = sim_capture_state(stream_of(stream));
    if (id_p != NULL) {
        *id_p = *state_p != CAPTURE_NONE;
    }
    return SIM_OK;
}

EXPORT int cudaStreamGetCaptureInfo(void *stream, int *state_p, unsigned long long *id_p,
                                    void **graph_p, void *nodes_p, void *edges_p, size_t *n_p)
{
    (void)graph_p;
    (void)nodes_p;
    (void)edges_p;
    (void)n_p;
    return tell_capture(stream, state_p, id_p);
}

EXPORT int cudaStreamGetCaptureInfo_v2(void *stream, int *state_p, unsigned long long *id_p,
                                       void **graph_p, void *nodes_p, size_t *n_p)
{
    (void)graph_p;
    (void)nodes_p;
    (void)n_p;
    return tell_capture(stream, state_p, id_p);
}

EXPORT int cudaStreamBeginCapture(void *stream, int mode)
{
    (void)mode;
    return note(sim_capture_begin(stream_of(stream)));
}

EXPORT int cudaStreamEndCapture(void *stream, void **graph_p)
{
    *graph_p = NULL;
    return note(sim_capture_end(stream_of(stream)));
}

EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    (void)mode;
    return SIM_OK;
}

EXPORT int cudaEventCreateWithFlags(void **event_p, unsigned flags)
{
    *event_p = sim_event_new(device_now(), flags);
    return SIM_OK;
}

EXPORT int cudaEventCreate(void **event_p)
{
    return cudaEventCreateWithFlags(event_p, 0);
}

EXPORT int cudaEventDestroy(void *event)
{
    sim_event_free(event);
    return SIM_OK;
}

EXPORT int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags)
{
    (void)flags;
    return note(sim_record(event, stream_of(stream)));
}

EXPORT int cudaEventRecord(void *event, void *stream)
{
    return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORT int cudaEventQuery(void *event)
{
    return note(sim_query_event(event));
}

EXPORT int cudaEventSynchronize(void *event)
{
    return note(sim_wait_event(event));
}

EXPORT int cudaEventElapsedTime(float *ms_p, void *from, void *to)
{
    return note(sim_elapsed(ms_p, from, to));
}

int cuLaunchHostFunc(void *stream, void (*call)(void *arg), void *arg);
EXPORT int cudaLaunchHostFunc(void *stream, void (*call)(void *arg), void *arg)
{
    device_now();
    return note(cuLaunchHostFunc(stream, call, arg));
}

// --- Kernels, of which there are none ------------------------------------------------------------

typedef struct kernel {
    const void *host;
    const char *name;
} kernel_t;

static struct {
    kernel_t *known;
    size_t n, cap, n_sorted;
} kernels;

EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle[1];
    (void)binary;
    return handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

EXPORT void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

EXPORT char __cudaInitModule(void **handle)
{
    (void)handle;
    return 0;
}

EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext,
                              size_t bytes, int constant, int global)
{
    (void)handle, (void)host, (void)device, (void)name;
    (void)ext, (void)bytes, (void)constant, (void)global;
}

EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                                   int limit, void *a, void *b, void *c, void *d, int *e)
{
    (void)handle, (void)device, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)e;
    if (kernels.n == kernels.cap) {
        kernels.cap = kernels.cap > 0 ? kernels.cap * 2 : 65536;
        kernels.known = realloc(kernels.known, kernels.cap * sizeof *kernels.known);
    }
    kernels.known[kernels.n++] = (kernel_t){host, name};
}

static int by_host(const void *a, const void *b)
{
    const kernel_t *x = a, *y = b;
    return x->host < y->host ? -1 : x->host > y->host;
}

static int refuse_kernel(const void *host)
{
    if (kernels.n_sorted != kernels.n) {
        qsort(kernels.known, kernels.n, sizeof *kernels.known, by_host);
        kernels.n_sorted = kernels.n;
    }
    kernel_t key = {.host = host};
    const kernel_t *found =
        kernels.n > 0 ? bsearch(&key, kernels.known, kernels.n, sizeof key, by_host) : NULL;
    fprintf(stderr, "gpusim: there is no kernel %s\n", found != NULL ? found->name : "?");
    return note(SIM_NOT_SUPPORTED);
}

static __thread struct {
    dim3_t grid, block;
    size_t shared;
    void *stream;
} configuration;

EXPORT unsigned __cudaPushCallConfiguration(dim3_t grid, dim3_t block, size_t shared, void *stream)
{
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

EXPORT int __cudaPopCallConfiguration(dim3_t *grid_p, dim3_t *block_p, size_t *shared_p,
                                      void **stream_p)
{
    *grid_p = configuration.grid;
    *block_p = configuration.block;
    *shared_p = configuration.shared;
    *stream_p = configuration.stream;
    return SIM_OK;
}

EXPORT int __cudaGetKernel(const void **kernel_p, const void *host)
{
    *kernel_p = host;
    return SIM_OK;
}

EXPORT int __cudaLaunchKernel(const void *kernel, dim3_t grid, dim3_t block, void **args,
                              size_t shared, void *stream)
{
    (void)grid, (void)block, (void)args, (void)shared, (void)stream;
    return refuse_kernel(kernel);
}

EXPORT int cudaLaunchKernel(const void *host, dim3_t grid, dim3_t block, void **args, size_t shared,
                            void *stream)
{
    (void)grid, (void)block, (void)args, (void)shared, (void)stream;
    return refuse_kernel(host);
}

EXPORT int cudaLaunchKernelExC(const void *config, const void *host, void **args)
{
    (void)config, (void)args;
    return refuse_kernel(host);
}

#define FUNC_ATTRIBUTES_BYTES 144

EXPORT int cudaFuncGetAttributes(void *attributes, const void *host)
{
    (void)host;
    memset(attributes, 0, FUNC_ATTRIBUTES_BYTES);
    put(attributes, 24, 1024); // threads of a block
    return SIM_OK;
}

EXPORT int cudaFuncSetAttribute(const void *host, int attribute, int value)
{
    (void)host, (void)attribute, (void)value;
    return SIM_OK;
}

EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n_p, const void *host, int threads,
                                                         size_t shared)
{
    (void)host, (void)threads, (void)shared;
    *n_p = 2;
    return SIM_OK;
}

EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n_p, const void *host,
                                                                  int threads, size_t shared,
                                                                  unsigned flags)
{
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n_p, host, threads, shared);
}

static int refuse_call(void)
{
    fprintf(stderr, "gpusim: a driver function was called that is not simulated\n");
    return SIM_NOT_SUPPORTED;
}

EXPORT int cudaGetDriverEntryPointByVersion(const char *symbol, void **function_p, unsigned version,
                                            unsigned long long flags, int *found_p)
{
    (void)version, (void)flags;
    void *function = dlsym(RTLD_DEFAULT, symbol);
    int (*refuse)(void) = refuse_call;
    if (function == NULL) {
        memcpy(&function, &refuse, sizeof function);
    }
    *function_p = function;
    if (found_p != NULL) {
        *found_p = 0;
    }
    return SIM_OK;
}

EXPORT int cudaGetDriverEntryPoint(const char *symbol, void **function_p, unsigned long long flags,
                                   int *found_p)
{
    return cudaGetDriverEntryPointByVersion(symbol, function_p, 0, flags, found_p);
}
