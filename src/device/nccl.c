// SPDX-License-Identifier: Apache-2.0
//
// nccl.c - see nccl.h: NCCL found at run time, and its functions behind our words.
//
// Nothing is linked. The library that a framework has loaded is taken first: two of them in one
// process would each keep memory of the device. Communicators are made non-blocking, which NCCL can
// since 2.14, so that a rank that is lost while one is made, or connected, does not take this one
// with it; older libraries are refused.
//
// A factor is applied by NCCL's own "multiply, then sum", whose factor has the type of the tensors:
// where it would be rounded to a half type, nccl_takes() says no. ncclAvg rounds 1/n likewise and
// is not used.
#define _GNU_SOURCE
#include "device/nccl.h"

#include "base/base.h"
#include "device/inside.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define OLDEST_VERSION 21400 // communicators that do not block
#define IN_PROGRESS 7        // NCCL's number for it
#define NON_BLOCKING 1u      // a stream that the default stream does not wait for
#define HIGHEST_PRIORITY (-5)
#define FACTOR_OF_HOST 1 // where the factor is: in memory of the host, read at once
#define CONFIG_MAGIC 0xcafebeefu

// As of 2.14; later libraries take the fields that are missing to be as they were then.
typedef struct nccl_config {
    size_t bytes;
    unsigned magic, version;
    int blocking;
} nccl_config_t;

typedef struct unique_id {
    uint8_t bytes[NCCL_ID_BYTES];
} unique_id_t;

typedef struct functions {
    int (*get_version)(int *version_p);
    int (*get_unique_id)(unique_id_t *id);
    int (*comm_init)(void **comm_p, int n, unique_id_t id, int rank, nccl_config_t *config);
    int (*comm_finalize)(void *comm);
    int (*comm_destroy)(void *comm);
    int (*comm_abort)(void *comm);
    int (*comm_async_error)(void *comm, int *result_p);
    const char *(*error_string)(int result);
    const char *(*last_error)(void *comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*all_reduce)(const void *in, void *out, size_t n, int type, int op, void *comm,
                      void *stream);
    int (*reduce)(const void *in, void *out, size_t n, int type, int op, int root, void *comm,
                  void *stream);
    int (*reduce_scatter)(const void *in, void *out, size_t n, int type, int op, void *comm,
                          void *stream);
    int (*all_gather)(const void *in, void *out, size_t n, int type, void *comm, void *stream);
    int (*broadcast)(const void *in, void *out, size_t n, int type, int root, void *comm,
                     void *stream);
    int (*send)(const void *in, size_t n, int type, int peer, void *comm, void *stream);
    int (*recv)(void *out, size_t n, int type, int peer, void *comm, void *stream);
    int (*make_factor)(int *op_p, void *factor, int type, int residence, void *comm);
    int (*drop_op)(int op, void *comm);
} functions_t;

static const char *const function_names[] = {
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommGetAsyncError",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclAllReduce",
    "ncclReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclBroadcast",
    "ncclSend",
    "ncclRecv",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
};
_Static_assert(sizeof(functions_t) == sizeof function_names, "a name for each function");

struct nccl {
    device_t *device;
    void *library;
    functions_t call;
    int version;
    void *stream;
};

struct comm {
    nccl_t *nccl;
    void *handle;
};

// --- The library ---------------------------------------------------------------------------------

// NCCL's for CUDA, RCCL's for AMD: whichever belongs to the driver.
static void *load(const char *driver, const char *path, const char **name_p)
{
    bool is_cuda = strcmp(driver, "HIP") != 0;
    const char *name = *name_p = is_cuda ? "libnccl.so.2" : "librccl.so.1";
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == NULL && path[0] != '\0') {
        *name_p = path;
        return dlopen(path, RTLD_NOW | RTLD_LOCAL); // asked for by name: no other will do
    }
    return library != NULL ? library : dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

static hvd_status_t find_functions(nccl_t *nccl, const char *name, err_t *err)
{
    for (size_t i = 0; i < N_ELEMENTS(function_names); i++) {
        void *function = dlsym(nccl->library, function_names[i]);
        if (function == NULL) {
            return fail(err, HVD_UNSUPPORTED, "%s has no %s: NCCL 2.14 or newer is needed", name,
                        function_names[i]);
        }
        memcpy((char *)&nccl->call + i * sizeof function, &function, sizeof function);
    }
    int code = nccl->call.get_version(&nccl->version);
    if (code != 0) {
        return fail(err, HVD_UNSUPPORTED, "%s does not say which version it is (error %d)", name,
                    code);
    }
    return nccl->version >= OLDEST_VERSION
               ? HVD_OK
               : fail(err, HVD_UNSUPPORTED, "%s is NCCL %d.%d; 2.14 or newer is needed", name,
                      nccl->version / 10000, nccl->version / 100 % 100);
}

void nccl_probe(const char *path, hvd_gpu_t *gpu_p)
{
    const char *name;
    gpu_driver_t driver = {0};
    nccl_t nccl = {0};
    err_t err = {.status = HVD_OK};
    *gpu_p = (hvd_gpu_t){0};
    if (driver_find(&driver, NULL) == HVD_OK) {
        snprintf(gpu_p->driver, sizeof gpu_p->driver, "%s", driver.name);
        driver.version(&gpu_p->driver_version);
    }
    nccl.library = load(gpu_p->driver, path, &name);
    if (nccl.library == NULL) {
        fail(&err, HVD_UNSUPPORTED, "%s cannot be loaded", name);
    } else if (find_functions(&nccl, name, &err) == HVD_OK) {
        gpu_p->nccl_version = nccl.version;
    }
    snprintf(gpu_p->why_not, sizeof gpu_p->why_not, "%s", err.status != HVD_OK ? err.text : "");
}

static hvd_status_t make_stream(nccl_t *nccl, err_t *err)
{
    const device_t *device = nccl->device;
    hvd_status_t status = device_enter(device, err);
    if (status != HVD_OK) {
        return status;
    }
    CALL(device, "making a stream", stream_create(&nccl->stream, NON_BLOCKING, HIGHEST_PRIORITY));
out:
    device_leave(device);
    return status;
}

hvd_status_t nccl_open(device_t *device, const char *path, nccl_t **nccl_p, err_t *err)
{
    const char *name;
    nccl_t *nccl = calloc(1, sizeof *nccl);
    if (nccl == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for NCCL");
    }
    nccl->device = device;
    nccl->library = load(device_driver_name(device), path, &name);
    hvd_status_t status = nccl->library != NULL
                              ? find_functions(nccl, name, err)
                              : fail(err, HVD_UNSUPPORTED, "%s cannot be loaded", name);
    if (status == HVD_OK) {
        status = make_stream(nccl, err);
    }
    if (status != HVD_OK) {
        nccl_close(nccl);
        return status;
    }
    *nccl_p = nccl;
    return HVD_OK;
}

// The library itself is never unloaded.
void nccl_close(nccl_t *nccl)
{
    if (nccl != NULL && nccl->stream != NULL && device_enter(nccl->device, NULL) == HVD_OK) {
        nccl->device->driver.stream_destroy(nccl->stream);
        device_leave(nccl->device);
    }
    free(nccl);
}

int nccl_version(const nccl_t *nccl)
{
    return nccl->version;
}

void *nccl_stream(const nccl_t *nccl)
{
    return nccl->stream;
}

static hvd_status_t refused(const nccl_t *nccl, void *handle, int code, const char *what,
                            err_t *err)
{
    const char *last = handle != NULL ? nccl->call.last_error(handle) : NULL;
    bool says_more = last != NULL && last[0] != '\0';
    return fail(err, HVD_PEER_LOST,
                "%s failed on GPU %d (NCCL error %d: %s%s%.200s); NCCL_DEBUG=WARN "
                "makes NCCL say more",
                what, device_ordinal(nccl->device), code, nccl->call.error_string(code),
                says_more ? "; " : "", says_more ? last : "");
}

hvd_status_t nccl_make_id(nccl_t *nccl, uint8_t id[NCCL_ID_BYTES], err_t *err)
{
    unique_id_t made;
    hvd_status_t status = device_enter(nccl->device, err);
    if (status != HVD_OK) {
        return status;
    }
    int code = nccl->call.get_unique_id(&made);
    device_leave(nccl->device);
    if (code != 0) {
        return refused(nccl, NULL, code, "ncclGetUniqueId", err);
    }
    memcpy(id, made.bytes, NCCL_ID_BYTES);
    return HVD_OK;
}

// --- Types ---------------------------------------------------------------------------------------

#define NOT_KNOWN (-1)

static int type_of(hvd_dtype_t dtype)
{
    static const int types[HVD_N_DTYPES] = {
        [HVD_UINT8] = 1,   [HVD_INT8] = 0,     [HVD_UINT16] = NOT_KNOWN, [HVD_INT16] = NOT_KNOWN,
        [HVD_INT32] = 2,   [HVD_INT64] = 4,    [HVD_FLOAT16] = 6,        [HVD_FLOAT32] = 7,
        [HVD_FLOAT64] = 8, [HVD_BFLOAT16] = 9, [HVD_BOOL] = NOT_KNOWN,
    };
    return types[dtype];
}

static int op_of(hvd_reduce_t reduce)
{
    static const int ops[HVD_N_REDUCES] = {
        [HVD_AVERAGE] = NOT_KNOWN,
        [HVD_SUM] = 0,
        [HVD_ADASUM] = NOT_KNOWN,
        [HVD_MIN] = 3,
        [HVD_MAX] = 2,
        [HVD_PRODUCT] = 1,
    };
    return ops[reduce];
}

// The factor in the tensors' type. False: it is another number there.
static bool encode_factor(hvd_dtype_t dtype, double factor, uint8_t to[8])
{
    float narrow = (float)factor;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    int exponent = (int)(bits >> 23 & 255) - 127;
    uint32_t fraction = bits & 0x7fffff;
    bool is_narrow = (double)narrow == factor && exponent > -127 && exponent < 128;
    uint16_t half;
    switch (dtype) {
    case HVD_FLOAT64:
        memcpy(to, &factor, sizeof factor);
        return true;
    case HVD_FLOAT32: // rounded as every number of that type is
        memcpy(to, &narrow, sizeof narrow);
        return true;
    case HVD_BFLOAT16:
        half = (uint16_t)(bits >> 16);
        memcpy(to, &half, sizeof half);
        return is_narrow && (bits & 0xffff) == 0;
    case HVD_FLOAT16:
        half = (uint16_t)((bits >> 16 & 0x8000) | (uint32_t)(exponent + 15) << 10 | fraction >> 13);
        memcpy(to, &half, sizeof half);
        return is_narrow && (fraction & 0x1fff) == 0 && exponent >= -14 && exponent <= 15;
    default:
        return false;
    }
}

bool nccl_takes(hvd_op_t op, hvd_dtype_t dtype, hvd_reduce_t reduce, double factor)
{
    uint8_t encoded[8];
    switch (op) {
    case HVD_ALLGATHER:
    case HVD_BROADCAST:
    case HVD_ALLTOALL:
        return true; // bytes
    case HVD_ALLREDUCE:
    case HVD_REDUCESCATTER:
        return type_of(dtype) != NOT_KNOWN && op_of(reduce) != NOT_KNOWN &&
               (factor == 1.0 || (reduce == HVD_SUM && encode_factor(dtype, factor, encoded)));
    default:
        return false;
    }
}

// --- Communicators -------------------------------------------------------------------------------

hvd_status_t comm_start(nccl_t *nccl, const uint8_t id[NCCL_ID_BYTES], int member, int n_members,
                        comm_t **comm_p, err_t *err)
{
    unique_id_t made;
    nccl_config_t config = {
        .bytes = sizeof config, .magic = CONFIG_MAGIC, .version = OLDEST_VERSION, .blocking = 0};
    comm_t *comm = calloc(1, sizeof *comm);
    if (comm == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a communicator of NCCL");
    }
    memcpy(made.bytes, id, NCCL_ID_BYTES);
    comm->nccl = nccl;
    hvd_status_t status = device_enter(nccl->device, err);
    if (status == HVD_OK) {
        int code = nccl->call.comm_init(&comm->handle, n_members, made, member, &config);
        device_leave(nccl->device);
        if (code != 0 && code != IN_PROGRESS) {
            status = refused(nccl, NULL, code, "ncclCommInitRankConfig", err);
        }
    }
    if (status != HVD_OK) {
        free(comm);
        return status;
    }
    *comm_p = comm;
    return HVD_OK;
}

hvd_status_t comm_poll(comm_t *comm, err_t *err)
{
    const nccl_t *nccl = comm->nccl;
    int result = 0;
    int code = nccl->call.comm_async_error(comm->handle, &result);
    code = code != 0 ? code : result;
    return code == 0             ? HVD_OK
           : code == IN_PROGRESS ? HVD_IN_PROGRESS
                                 : refused(nccl, comm->handle, code, "a collective of NCCL", err);
}

#define FINISH_NS (5 * NS_PER_S)
#define END_NAP_NS 1000000

void comm_end(comm_t *comm, bool ended_well)
{
    const nccl_t *nccl = comm->nccl;
    if (device_enter(nccl->device, NULL) != HVD_OK) {
        return; // the driver is gone, as at the end of a process
    }
    int result = ended_well ? nccl->call.comm_finalize(comm->handle) : IN_PROGRESS;
    if (ended_well && (result == 0 || result == IN_PROGRESS)) {
        uint64_t deadline_ns = clock_ns() + FINISH_NS;
        while (nccl->call.comm_async_error(comm->handle, &result) == 0 && result == IN_PROGRESS &&
               clock_ns() < deadline_ns) {
            nanosleep(&(struct timespec){.tv_nsec = END_NAP_NS}, NULL);
        }
        nccl->call.comm_destroy(comm->handle);
    } else {
        nccl->call.comm_abort(comm->handle);
    }
    device_leave(nccl->device);
    free(comm);
}

// --- Collectives ---------------------------------------------------------------------------------

static int queue_one(comm_t *comm, const nccl_call_t *c, int op)
{
    const functions_t *call = &comm->nccl->call;
    void *handle = comm->handle, *stream = comm->nccl->stream;
    int type = type_of(c->dtype);
    switch (c->kind) {
    case NCCL_ALLREDUCE:
        return call->all_reduce(c->in, c->out, c->n, type, op, handle, stream);
    case NCCL_REDUCE:
        return call->reduce(c->in, c->out, c->n, type, op, c->peer, handle, stream);
    case NCCL_REDUCESCATTER:
        return call->reduce_scatter(c->in, c->out, c->n, type, op, handle, stream);
    case NCCL_ALLGATHER:
        return call->all_gather(c->in, c->out, c->n, type, handle, stream);
    case NCCL_BROADCAST:
        return call->broadcast(c->in, c->out, c->n, type, c->peer, handle, stream);
    case NCCL_SEND:
        return call->send(c->in, c->n, type, c->peer, handle, stream);
    default:
        return call->recv(c->out, c->n, type, c->peer, handle, stream);
    }
}

static bool reduces(const nccl_call_t *c)
{
    return c->kind <= NCCL_REDUCESCATTER;
}

static int queue_all(comm_t *comm, const nccl_call_t *calls, size_t n)
{
    const functions_t *call = &comm->nccl->call;
    uint8_t factor[8];
    bool has_factor = n > 0 && reduces(&calls[0]) && calls[0].factor != 1.0;
    int op = n > 0 && reduces(&calls[0]) ? op_of(calls[0].reduce) : 0;
    int code = 0;
    if (has_factor) {
        encode_factor(calls[0].dtype, calls[0].factor, factor);
        code =
            call->make_factor(&op, factor, type_of(calls[0].dtype), FACTOR_OF_HOST, comm->handle);
        if (code != 0) {
            return code;
        }
    }
    code = call->group_start();
    if (code == 0) {
        for (size_t i = 0; i < n && (code == 0 || code == IN_PROGRESS); i++) {
            code = queue_one(comm, &calls[i], op);
        }
        int ended = call->group_end();
        code = code != 0 && code != IN_PROGRESS ? code : ended;
    }
    if (has_factor) {
        call->drop_op(op, comm->handle); // what is queued keeps it
    }
    return code;
}

hvd_status_t comm_run(comm_t *comm, const nccl_call_t *calls, size_t n, err_t *err)
{
    const nccl_t *nccl = comm->nccl;
    hvd_status_t status = device_enter(nccl->device, err);
    if (status != HVD_OK) {
        return status;
    }
    int code = queue_all(comm, calls, n);
    device_leave(nccl->device);
    return code == 0             ? HVD_OK
           : code == IN_PROGRESS ? HVD_IN_PROGRESS
                                 : refused(nccl, comm->handle, code, "a collective of NCCL", err);
}

hvd_status_t nccl_copy(nccl_t *nccl, void *to, const void *from, size_t n, err_t *err)
{
    const device_t *device = nccl->device;
    hvd_status_t status = n > 0 ? device_enter(device, err) : HVD_OK;
    if (status != HVD_OK || n == 0) {
        return status;
    }
    if (from != NULL) {
        CALL(device, "copying on the device",
             copy_on_device(to, (void *)(uintptr_t)from, n, nccl->stream));
    } else {
        CALL(device, "filling with zeros", set_bytes(to, 0, n, nccl->stream));
    }
out:
    device_leave(device);
    return status;
}
