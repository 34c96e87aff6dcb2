// SPDX-License-Identifier: Apache-2.0
//
// driver.c - finds the driver of a GPU at run time, and its functions.
//
// Nothing is linked: a library that the process has loaded is taken first, so that a framework and
// we use the same one. A maker is a row of names.
#define _GNU_SOURCE
#include "device/driver.h"

#include <dlfcn.h>
#include <stddef.h>

enum { N_FUNCTIONS = 29 };

typedef struct maker {
    const char *name;
    const char *libraries[3];
    const char *functions[N_FUNCTIONS]; // in the order of gpu_driver_t
} maker_t;

static const maker_t makers[] = {
    {.name = "CUDA",
     .libraries = {"libcuda.so.1"},
     .functions = {"cuInit",
                   "cuDevicePrimaryCtxRetain",
                   "cuDevicePrimaryCtxRelease_v2",
                   "cuCtxPushCurrent_v2",
                   "cuCtxPopCurrent_v2",
                   "cuStreamCreateWithPriority",
                   "cuStreamDestroy_v2",
                   "cuStreamWaitEvent",
                   "cuStreamIsCapturing",
                   "cuStreamQuery",
                   "cuEventCreate",
                   "cuEventDestroy_v2",
                   "cuEventRecord",
                   "cuEventQuery",
                   "cuEventElapsedTime",
                   "cuMemHostRegister_v2",
                   "cuMemHostUnregister",
                   "cuMemcpyHtoDAsync_v2",
                   "cuMemcpyDtoHAsync_v2",
                   "cuMemcpyDtoDAsync_v2",
                   "cuMemsetD8Async",
                   "cuMemAlloc_v2",
                   "cuMemFree_v2",
                   "cuLaunchHostFunc",
                   "cuDeviceGetCount",
                   "cuDeviceGetName",
                   "cuDeviceGetUuid_v2",
                   "cuDriverGetVersion",
                   "cuGetErrorString"}},
    {.name = "HIP",
     .libraries = {"libamdhip64.so.6", "libamdhip64.so.7", "libamdhip64.so.5"},
     .functions = {"hipInit",
                   "hipDevicePrimaryCtxRetain",
                   "hipDevicePrimaryCtxRelease",
                   "hipCtxPushCurrent",
                   "hipCtxPopCurrent",
                   "hipStreamCreateWithPriority",
                   "hipStreamDestroy",
                   "hipStreamWaitEvent",
                   "hipStreamIsCapturing",
                   "hipStreamQuery",
                   "hipEventCreateWithFlags",
                   "hipEventDestroy",
                   "hipEventRecord",
                   "hipEventQuery",
                   "hipEventElapsedTime",
                   "hipHostRegister",
                   "hipHostUnregister",
                   "hipMemcpyHtoDAsync",
                   "hipMemcpyDtoHAsync",
                   "hipMemcpyDtoDAsync",
                   "hipMemsetD8Async",
                   "hipMalloc",
                   "hipFree",
                   "hipLaunchHostFunc",
                   "hipGetDeviceCount",
                   "hipDeviceGetName",
                   "hipDeviceGetUuid",
                   "hipDriverGetVersion",
                   "hipDrvGetErrorString"}},
};
_Static_assert(offsetof(gpu_driver_t, error_text) - offsetof(gpu_driver_t, init) ==
                   (N_FUNCTIONS - 1) * sizeof(void *),
               "a name for each function");

static const maker_t *load(int flags, void **library_p)
{
    for (size_t i = 0; i < N_ELEMENTS(makers); i++) {
        for (size_t l = 0; l < N_ELEMENTS(makers[i].libraries); l++) {
            const char *name = makers[i].libraries[l];
            *library_p = name != NULL ? dlopen(name, RTLD_NOW | RTLD_LOCAL | flags) : NULL;
            if (*library_p != NULL) {
                return &makers[i];
            }
        }
    }
    return NULL;
}

hvd_status_t driver_find(gpu_driver_t *driver, err_t *err)
{
    const maker_t *maker = load(RTLD_NOLOAD, &driver->library);
    maker = maker != NULL ? maker : load(0, &driver->library);
    if (maker == NULL) {
        return fail(err, HVD_UNSUPPORTED,
                    "no GPU driver can be loaded (libcuda.so.1, libamdhip64.so): %s; install the "
                    "driver, or move the tensors to the CPU",
                    dlerror());
    }
    driver->name = maker->name;
    for (int i = 0; i < N_FUNCTIONS; i++) {
        void *function = dlsym(driver->library, maker->functions[i]);
        if (function == NULL) {
            return fail(err, HVD_UNSUPPORTED,
                        "the GPU driver (%s) has no %s; a newer driver is needed", maker->name,
                        maker->functions[i]);
        }
        memcpy((char *)driver + offsetof(gpu_driver_t, init) + (size_t)i * sizeof function,
               &function, sizeof function);
    }
    return HVD_OK;
}

hvd_status_t driver_open(gpu_driver_t *driver, err_t *err)
{
    hvd_status_t status = driver_find(driver, err);
    if (status != HVD_OK) {
        return status;
    }
    int code = driver->init(0);
    const char *why = "";
    if (code != 0 && driver->error_text(code, &why) != 0) {
        why = "unknown error";
    }
    return code == 0
               ? HVD_OK
               : fail(err, HVD_SYSTEM, "the GPU driver (%s) does not start: %s", driver->name, why);
}
