// SPDX-License-Identifier: Apache-2.0
//
// device_tensors.h - tensors in the memory of a (simulated) GPU, for tests of the public API.
//
// The user's stream gets its values late: an operation that does not wait for it, or a stream that
// is not ordered behind the result, reads old ones.
#ifndef GPU_DEVICE_TENSORS_H
#define GPU_DEVICE_TENSORS_H

#include "api.h"
#include "cases.h"

#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#define OLD (-7.0f)
#define LONG_MS 60000

// What one tensor needs.
typedef struct tensor {
    uintptr_t device;
    float *host; // pinned
    size_t n;
} tensor_t;

// Ranks share the devices there are.
static int device_of(rank_t *r)
{
    int n;
    CHECK(r, cuInit(0) == 0 && cuDeviceGetCount(&n) == 0);
    return r->rank % n;
}

static void *use_device(rank_t *r)
{
    void *context, *stream;
    CHECK(r, cuDevicePrimaryCtxRetain(&context, device_of(r)) == 0);
    CHECK(r, cuCtxSetCurrent(context) == 0);
    CHECK(r, cuStreamCreate(&stream, 1) == 0);
    return stream;
}

static tensor_t tensor_new(rank_t *r, size_t n)
{
    tensor_t t = {.n = n};
    void *host;
    CHECK(r, cuMemAlloc_v2(&t.device, n * sizeof *t.host) == 0);
    CHECK(r, cuMemHostAlloc(&host, n * sizeof *t.host, 0) == 0);
    t.host = host;
    return t;
}

static void tensor_free(rank_t *r, tensor_t *t)
{
    CHECK(r, cuMemFree_v2(t->device) == 0 && cuMemFreeHost(t->host) == 0);
}

// Old values are there; the right ones are queued.
static void tensor_fill(rank_t *r, tensor_t *t, float value, void *stream)
{
    for (size_t i = 0; i < t->n; i++) {
        t->host[i] = OLD;
    }
    CHECK(r, cuMemcpyHtoD_v2(t->device, t->host, t->n * sizeof *t->host) == 0);
    for (size_t i = 0; i < t->n; i++) {
        t->host[i] = value + (float)(i % 10);
    }
    CHECK(r, cuMemcpyHtoDAsync_v2(t->device, t->host, t->n * sizeof *t->host, stream) == 0);
}

// In the order of the stream.
static void tensor_check(rank_t *r, tensor_t *t, size_t from, size_t n, float value, float step,
                         void *stream)
{
    CHECK(r, cuMemcpyDtoHAsync_v2(t->host, t->device, t->n * sizeof *t->host, stream) == 0);
    CHECK(r, cuStreamSynchronize(stream) == 0);
    for (size_t i = 0; i < n; i++) {
        float expected = value + step * (float)(i % 10);
        if (t->host[from + i] != expected) {
            check_failed(r, __FILE__, __LINE__, "element %zu: expected %g, got %g", from + i,
                         (double)expected, (double)t->host[from + i]);
        }
    }
}

static hvd_request_t request_of(rank_t *r, hvd_op_t op, const char *name, const hvd_tensor_t *t,
                                void *stream)
{
    return (hvd_request_t){.op = op,
                           .name = name,
                           .dtype = HVD_FLOAT32,
                           .reduce = HVD_SUM,
                           .tensors = t,
                           .n_tensors = 1,
                           .flags = HVD_ON_DEVICE,
                           .device = device_of(r),
                           .stream = stream};
}

static hvd_handle_t submit(rank_t *r, const hvd_request_t *request)
{
    hvd_handle_t handle;
    CHECK_OK(r, hvd_submit(r->ctx, request, &handle, r->text, sizeof r->text));
    return handle;
}

static inline void gate_wait(atomic_bool *is_open, int64_t most_ms)
{
    uint64_t deadline_ns = deadline_in_ms(most_ms);
    while (!atomic_load(is_open) && clock_ns() < deadline_ns) {
        usleep(1000);
    }
}

// Work of a stream that ends when the test says so, or after GATE_MS: by then whoever should not
// have waited for it has. For cuLaunchHostFunc.
#define GATE_MS 5000

static inline void gate_pass(void *is_open)
{
    gate_wait(is_open, GATE_MS);
}

#endif
