// SPDX-License-Identifier: Apache-2.0
//
// nccl.h - collectives among the GPUs of several ranks, by NCCL (or RCCL, which has its names).
//
// Owns: the library, found at run time, the stream in which its collectives run on a device, and
// communicators. These are made and used without blocking: a call may come back with
// HVD_IN_PROGRESS, and comm_poll() tells when it has been carried out. Only comm_end() may block,
// and then for ever: it belongs on a thread of its own.
//
// Threads: one at a time for each nccl_t and all its communicators, but comm_end(), which may come
// from any thread at any time, once.
#ifndef HVD_DEVICE_NCCL_H
#define HVD_DEVICE_NCCL_H

#include "device/device.h"

typedef struct nccl nccl_t;
typedef struct comm comm_t;

#define NCCL_ID_BYTES 128

// The library that this process has loaded, else `path` ("": none), else the system's.
hvd_status_t nccl_open(device_t *device, const char *path, nccl_t **nccl_p, err_t *err);
void nccl_close(nccl_t *nccl);         // all communicators have ended; safe on NULL
int nccl_version(const nccl_t *nccl);  // 22703: 2.27.3
void *nccl_stream(const nccl_t *nccl); // in which everything below is queued
hvd_status_t nccl_make_id(nccl_t *nccl, uint8_t id[NCCL_ID_BYTES], err_t *err);

// What there is, without using it.
void nccl_probe(const char *path, hvd_gpu_t *gpu_p);
// Can it do this, whichever the ranks are? factor: of a sum, all that it is multiplied by.
bool nccl_takes(hvd_op_t op, hvd_dtype_t dtype, hvd_reduce_t reduce, double factor);

// Every member calls it, with the id that one of them has made.
hvd_status_t comm_start(nccl_t *nccl, const uint8_t id[NCCL_ID_BYTES], int member, int n_members,
                        comm_t **comm_p, err_t *err);
// HVD_OK: what was begun last has been carried out. HVD_IN_PROGRESS: ask again. Else it has failed.
hvd_status_t comm_poll(comm_t *comm, err_t *err);
// Finishes what is queued, or cuts it short. The communicator is gone.
void comm_end(comm_t *comm, bool ended_well);

typedef enum nccl_kind {
    NCCL_ALLREDUCE,     // n elements
    NCCL_REDUCE,        // n elements, to `peer`
    NCCL_REDUCESCATTER, // n elements for each member
    NCCL_ALLGATHER,     // n elements of each member
    NCCL_BROADCAST,     // n elements, of `peer`
    NCCL_SEND,          // n elements, to `peer`
    NCCL_RECV,          // n elements, from `peer`
} nccl_kind_t;

typedef struct nccl_call {
    nccl_kind_t kind;
    const void *in;
    void *out;
    size_t n;
    hvd_dtype_t dtype;   // HVD_UINT8: bytes of any type
    hvd_reduce_t reduce; // never HVD_AVERAGE
    double factor;       // of a sum: inputs are multiplied by it, in the tensors' type
    int peer;
} nccl_call_t;

// Queues them as one group; HVD_IN_PROGRESS as comm_poll(): until it is over nothing else may be
// queued in the stream.
hvd_status_t comm_run(comm_t *comm, const nccl_call_t *calls, size_t n, err_t *err);
// Copies n bytes on the device, in the stream; from NULL: zeros.
hvd_status_t nccl_copy(nccl_t *nccl, void *to, const void *from, size_t n, err_t *err);

#endif
