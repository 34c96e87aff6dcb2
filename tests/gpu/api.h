// SPDX-License-Identifier: Apache-2.0
//
// api.h - the functions of the simulated GPU that C tests call, declared as the documented
// interfaces of CUDA's driver and of NCCL have them.
//
// Handles are plain pointers here, and device memory is a number, as in the driver's own.
#ifndef GPU_API_H
#define GPU_API_H

#include <stddef.h>
#include <stdint.h>

int cuInit(unsigned flags);
int cuDeviceGetCount(int *n_p);
int cuDevicePrimaryCtxRetain(void **context_p, int device);
int cuCtxSetCurrent(void *context);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context_p);
int cuCtxSynchronize(void);
int cuCtxRecordEvent(void *context, void *event);
int cuCtxWaitEvent(void *context, void *event);
int cuMemAlloc_v2(uintptr_t *memory_p, size_t bytes);
int cuMemFree_v2(uintptr_t memory);
int cuMemHostAlloc(void **memory_p, size_t bytes, unsigned flags);
int cuMemFreeHost(void *memory);
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *stream);
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *stream);
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void *stream);
int cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t bytes);
int cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t bytes);
int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t bytes, void *stream);
int cuStreamCreate(void **stream_p, unsigned flags);
int cuStreamDestroy_v2(void *stream);
int cuStreamSynchronize(void *stream);
int cuStreamQuery(void *stream);
int cuStreamWaitEvent(void *stream, void *event, unsigned flags);
int cuStreamIsCapturing(void *stream, int *state_p);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph_p);
int cuLaunchHostFunc(void *stream, void (*call)(void *arg), void *arg);
int cuEventCreate(void **event_p, unsigned flags);
int cuEventDestroy_v2(void *event);
int cuEventRecord(void *event, void *stream);
int cuEventQuery(void *event);
int cuEventSynchronize(void *event);

typedef struct nccl_id {
    char bytes[128];
} nccl_id_t;

typedef struct nccl_config {
    size_t bytes;
    unsigned magic, version;
    int blocking;
} nccl_config_t;

int ncclGetUniqueId(nccl_id_t *id);
int ncclCommInitRank(void **comm_p, int n, nccl_id_t id, int rank);
int ncclCommInitRankConfig(void **comm_p, int n, nccl_id_t id, int rank, nccl_config_t *config);
int ncclCommGetAsyncError(void *comm, int *result_p);
int ncclCommAbort(void *comm);
int ncclCommDestroy(void *comm);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *in, void *out, size_t n, int dtype, int op, void *comm, void *stream);
int ncclBroadcast(const void *in, void *out, size_t n, int dtype, int root, void *comm,
                  void *stream);
int ncclAllGather(const void *in, void *out, size_t n, int dtype, void *comm, void *stream);
int ncclReduceScatter(const void *in, void *out, size_t n, int dtype, int op, void *comm,
                      void *stream);
int ncclSend(const void *in, size_t n, int dtype, int peer, void *comm, void *stream);
int ncclRecv(void *out, size_t n, int dtype, int peer, void *comm, void *stream);
int ncclRedOpCreatePreMulSum(int *op_p, const void *factor, int dtype, int residence, void *comm);

int gpusim_mistakes(void);
int gpusim_timed_events(void); // that were made so that their time can be asked for
const char *gpusim_last_mistake(void);

#endif
