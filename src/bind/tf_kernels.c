// SPDX-License-Identifier: Apache-2.0
//
// tf_kernels.c - runs Horovod's operations inside TensorFlow.
//
// A collective is an asynchronous kernel: it submits to the engine and returns; the engine's thread
// completes it. No TensorFlow thread waits for another rank, so ranks may start collectives in any
// order with any number of threads. Results are written where TensorFlow wants them: over the input
// if nobody else needs it, else into memory it allocates. The C API does not reach variables; a
// broadcast in place is given what was read from one, which is the variable's own memory.
//
// A kernel belongs to a node and may run many times, also at once; it is read only. What belongs to
// one run is a job: one allocation, made in compute, freed by whoever completes it.
//
// The one mutable thing is the context that kernels submit to: TensorFlow creates them, so there
// is no other way to hand it over. It is read under a lock, so it can be taken away.
#define _GNU_SOURCE // dladdr
#include "bind/tf_bind.h"
#include "bind/tf_device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// --- The context ---------------------------------------------------------------------------------

static struct {
    pthread_rwlock_t lock;
    hvd_ctx_t *ctx;
} attached = {.lock = PTHREAD_RWLOCK_INITIALIZER};

void hvd_tf_attach(hvd_ctx_t *ctx)
{
    pthread_rwlock_wrlock(&attached.lock);
    attached.ctx = ctx;
    pthread_rwlock_unlock(&attached.lock);
}

// --- Errors --------------------------------------------------------------------------------------

// Whatever has no row is TF_UNKNOWN: the job cannot go on like this, elastic training may.
static int code_of(hvd_status_t status)
{
    static const struct {
        hvd_status_t status;
        int code;
    } rows[] = {
        {HVD_INVALID_ARGUMENT, TF_INVALID_ARGUMENT},
        {HVD_DUPLICATE_NAME, TF_INVALID_ARGUMENT},
        {HVD_UNKNOWN_SET, TF_INVALID_ARGUMENT},
        {HVD_NOT_MEMBER, TF_INVALID_ARGUMENT},
        {HVD_MISMATCH, TF_FAILED_PRECONDITION},
        {HVD_JOINED, TF_FAILED_PRECONDITION},
        {HVD_NOT_INITIALIZED, TF_FAILED_PRECONDITION},
        {HVD_FORKED, TF_FAILED_PRECONDITION},
        {HVD_UNSUPPORTED, TF_ABORTED},
        {HVD_NO_MEMORY, TF_RESOURCE_EXHAUSTED},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].status == status) {
            return rows[i].code;
        }
    }
    return TF_UNKNOWN;
}

static void fail_context(TF_OpKernelContext *context, int code, const char *text)
{
    TF_Status *status = tf_api.NewStatus();
    tf_api.SetStatus(status, code, text);
    tf_api.OpKernelContext_Failure(context, status);
    tf_api.DeleteStatus(status);
}

// In a graph TensorFlow tells the node only, whose name is the user's, so the sentence names the
// operation. The payload is for programs: it has the status of the library, and elastic.run knows
// by it whose failure this is.
static void fail_collective(TF_OpKernelContext *context, const tf_collective_t *row,
                            hvd_status_t status, const char *text)
{
    char named[HVD_TEXT_BYTES + 64];
    TF_Status *failure = tf_api.NewStatus();
    int code = code_of(status);
    snprintf(named, sizeof named, "%s: %s", row->name, text);
    tf_api.SetStatus(failure, code, code == TF_UNKNOWN ? named : text);
    tf_api.SetPayload(failure, "horovod.status", hvd_status_name(status));
    tf_api.OpKernelContext_Failure(context, failure);
    tf_api.DeleteStatus(failure);
}

// --- Kernels -------------------------------------------------------------------------------------

typedef struct collective_kernel {
    const tf_collective_t *row;
    hvd_request_t request; // everything that is the same in each run
    int tf_dtype;
    char *name; // or series; what the request points to
} collective_kernel_t;

static const struct {
    int tf;
    hvd_dtype_t hvd;
} dtypes[] = {
    {TF_UINT8, HVD_UINT8},  {TF_INT8, HVD_INT8},         {TF_UINT16, HVD_UINT16},
    {TF_INT16, HVD_INT16},  {TF_INT32, HVD_INT32},       {TF_INT64, HVD_INT64},
    {TF_HALF, HVD_FLOAT16}, {TF_FLOAT, HVD_FLOAT32},     {TF_DOUBLE, HVD_FLOAT64},
    {TF_BOOL, HVD_BOOL},    {TF_BFLOAT16, HVD_BFLOAT16},
};

static hvd_dtype_t dtype_from_tf(int tf_dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (dtypes[i].tf == tf_dtype) {
            return dtypes[i].hvd;
        }
    }
    return HVD_N_DTYPES; // hvd_submit() refuses it
}

static char *text_attribute(TF_OpKernelConstruction *construction, const char *name,
                            TF_Status *status)
{
    int32_t n_list = 0;
    int32_t n_bytes = 0;
    tf_api.OpKernelConstruction_GetAttrSize(construction, name, &n_list, &n_bytes, status);
    char *text = calloc(1, (n_bytes > 0 ? (size_t)n_bytes : 0) + 1);
    if (text != NULL && n_bytes > 0) {
        tf_api.OpKernelConstruction_GetAttrString(construction, name, text, (size_t)n_bytes,
                                                  status);
    }
    return text;
}

// "<operation>.<name>": an allreduce and an allgather of one tensor do not get in each other's way.
static char *full_name(const tf_collective_t *row, const char *name, size_t len)
{
    const char *group = row->grouped ? "grouped_" : "";
    const char *op = hvd_op_name(row->op);
    size_t bytes = strlen(group) + strlen(op) + 1 + len + 1;
    char *full = malloc(bytes);
    if (full != NULL) {
        snprintf(full, bytes, "%s%s.%.*s", group, op, (int)len, name);
    }
    return full;
}

// Either a name or, for what is counted, the series; NULL: the one of the main thread.
static void read_name(TF_OpKernelConstruction *construction, collective_kernel_t *kernel,
                      TF_Status *status)
{
    unsigned char by_order = 0;
    unsigned char ignore_scope = 0;
    tf_api.OpKernelConstruction_GetAttrBool(construction, "by_order", &by_order, status);
    tf_api.OpKernelConstruction_GetAttrBool(construction, "ignore_name_scope", &ignore_scope,
                                            status);
    char *given = text_attribute(construction, "tensor_name", status);
    if (given == NULL || by_order) {
        kernel->name = given;
        kernel->request.series = given != NULL && given[0] != '\0' ? given : NULL;
        return;
    }
    tf_text_t name = {given, strlen(given)};
    if (name.len == 0) {
        name = tf_api.OpKernelConstruction_GetName(construction);
    }
    for (size_t i = name.len; ignore_scope && i > 0; i--) {
        if (name.data[i - 1] == '/') {
            name = (tf_text_t){name.data + i, name.len - i};
            break;
        }
    }
    kernel->name = full_name(kernel->row, name.data, name.len);
    kernel->request.name = kernel->name;
    free(given);
}

// An attribute of TensorFlow is a float32 at most; a factor for float64 also comes as the bits of a
// double, 0 if the float32 says it all.
static double factor_of(TF_OpKernelConstruction *construction, const char *attribute,
                        const char *bits_attribute, TF_Status *status)
{
    float rounded = 1;
    int64_t bits = 0;
    double exact;
    tf_api.OpKernelConstruction_GetAttrFloat(construction, attribute, &rounded, status);
    tf_api.OpKernelConstruction_GetAttrInt64(construction, bits_attribute, &bits, status);
    memcpy(&exact, &bits, sizeof exact);
    return bits == 0 ? (double)rounded : exact;
}

static void read_reduction(TF_OpKernelConstruction *construction, hvd_request_t *request,
                           TF_Status *status)
{
    int32_t reduce = 0;
    tf_api.OpKernelConstruction_GetAttrInt32(construction, "reduce_op", &reduce, status);
    request->reduce = (hvd_reduce_t)reduce;
    request_set_scales(request, factor_of(construction, "prescale_factor", "prescale_bits", status),
                       factor_of(construction, "postscale_factor", "postscale_bits", status));
}

void *tf_collective_create(TF_OpKernelConstruction *construction, const tf_collective_t *row)
{
    TF_Status *status = tf_api.NewStatus();
    collective_kernel_t *kernel = calloc(1, sizeof *kernel);
    if (kernel == NULL) {
        tf_api.SetStatus(status, TF_RESOURCE_EXHAUSTED, "no memory for a Horovod kernel");
    } else {
        int32_t process_set = 0;
        int32_t root = 0;
        kernel->row = row;
        read_name(construction, kernel, status);
        tf_api.OpKernelConstruction_GetAttrInt32(construction, "process_set_id", &process_set,
                                                 status);
        if (row->output != OUTPUT_NONE) {
            tf_api.OpKernelConstruction_GetAttrType(construction, "T", &kernel->tf_dtype, status);
            kernel->request.dtype = dtype_from_tf(kernel->tf_dtype);
        }
        if (row->reduces) {
            read_reduction(construction, &kernel->request, status);
        }
        if (row->op == HVD_BROADCAST) {
            tf_api.OpKernelConstruction_GetAttrInt32(construction, "root_rank", &root, status);
        }
        kernel->request.op = row->op;
        kernel->request.process_set = process_set;
        kernel->request.root = root;
    }
    if (tf_api.GetCode(status) != TF_OK) {
        tf_api.OpKernelConstruction_Failure(construction, status);
    }
    tf_api.DeleteStatus(status);
    return kernel;
}

void tf_collective_delete(void *kernel)
{
    collective_kernel_t *collective = kernel;
    if (collective != NULL) {
        free(collective->name);
        free(collective);
    }
}

// --- One run of a collective ---------------------------------------------------------------------

typedef struct tf_run {
    const collective_kernel_t *kernel;
    TF_OpKernelContext *context;
    hvd_ctx_t *ctx;
    tf_done_t done;
    TF_Status *status; // of calls to TensorFlow
    int n;
    hvd_tensor_t *tensors; // these four have n elements and lie behind the job
    TF_Tensor **inputs;    // NULL where the output took its buffer over
    TF_Tensor **outputs;
    int64_t (*shapes)[HVD_MAX_DIMS];
    TF_Tensor *splits;
    tf_device_t device;
} tf_run_t;

static tf_run_t *job_new(const collective_kernel_t *kernel, TF_OpKernelContext *context)
{
    const tf_collective_t *row = kernel->row;
    int n = row->output == OUTPUT_NONE ? 0 : row->grouped ? tf_api.NumInputs(context) : 1;
    size_t each = sizeof(hvd_tensor_t) + 2 * sizeof(TF_Tensor *) + HVD_MAX_DIMS * sizeof(int64_t);
    tf_run_t *job = calloc(1, sizeof *job + (size_t)n * each);
    if (job == NULL) {
        return NULL;
    }
    job->kernel = kernel;
    job->context = context;
    job->status = tf_api.NewStatus();
    job->n = n;
    job->tensors = (hvd_tensor_t *)(job + 1);
    job->inputs = (TF_Tensor **)(job->tensors + n);
    job->outputs = job->inputs + n;
    job->shapes = (int64_t (*)[HVD_MAX_DIMS])(job->outputs + n);
    return job;
}

static void job_free(tf_run_t *job)
{
    for (int i = 0; i < job->n; i++) {
        if (job->inputs[i] != NULL) {
            tf_api.DeleteTensor(job->inputs[i]);
        }
        if (job->outputs[i] != NULL) {
            tf_api.DeleteTensor(job->outputs[i]);
        }
    }
    if (job->splits != NULL) {
        tf_api.DeleteTensor(job->splits);
    }
    tf_api.DeleteStatus(job->status);
    free(job);
}

static bool went_well(tf_run_t *job)
{
    if (tf_api.GetCode(job->status) == TF_OK) {
        return true;
    }
    tf_api.OpKernelContext_Failure(job->context, job->status);
    return false;
}

// TensorFlow has no memory for a tensor without elements; Horovod takes NULL for "not given".
static void *data_of(const TF_Tensor *tensor)
{
    static char nothing[1];
    void *data = tf_api.TensorData(tensor);
    return data != NULL ? data : nothing;
}

// The buffer can only be taken over while nobody holds the input, not even we: it is held again
// afterwards, if it was not taken.
static bool prepare_output(tf_run_t *job, int i)
{
    hvd_tensor_t *tensor = &job->tensors[i];
    int forwarded = -1;
    tf_api.DeleteTensor(job->inputs[i]);
    job->inputs[i] = NULL;
    job->outputs[i] = tf_api.ForwardInputOrAllocateOutput(job->context, &i, 1, i, tensor->shape,
                                                          tensor->n_dims, &forwarded, job->status);
    if (!went_well(job)) {
        return false;
    }
    tensor->output = data_of(job->outputs[i]);
    tensor->input = tensor->output;
    if (forwarded != i) {
        tf_api.GetInput(job->context, i, &job->inputs[i], job->status);
        if (!went_well(job)) {
            return false;
        }
        tensor->input = data_of(job->inputs[i]);
    }
    return true;
}

// Passes the input on as the output and writes into it.
static bool prepare_in_place(tf_run_t *job, int i)
{
    job->tensors[i].output = data_of(job->inputs[i]);
    tf_api.SetOutput(job->context, i, job->inputs[i], job->status);
    return went_well(job);
}

static bool prepare_tensor(tf_run_t *job, int i)
{
    static bool (*const prepare_by_output[])(tf_run_t *, int) = {
        [OUTPUT_LIKE_INPUT] = prepare_output,
        [OUTPUT_IS_INPUT] = prepare_in_place,
        [OUTPUT_ALLOCATED] = NULL, // when the shape is known
        [OUTPUT_NONE] = NULL,
    };
    hvd_tensor_t *tensor = &job->tensors[i];
    tf_api.GetInput(job->context, i, &job->inputs[i], job->status);
    if (!went_well(job)) {
        return false;
    }
    tensor->n_dims = tf_api.NumDims(job->inputs[i]);
    if (tensor->n_dims > HVD_MAX_DIMS) {
        fail_context(job->context, TF_INVALID_ARGUMENT,
                     "Horovod takes tensors of up to 16 dimensions");
        return false;
    }
    for (int d = 0; d < tensor->n_dims; d++) {
        job->shapes[i][d] = tf_api.Dim(job->inputs[i], d);
    }
    tensor->shape = job->shapes[i];
    tensor->input = data_of(job->inputs[i]);
    bool (*prepare_more)(tf_run_t *, int) = prepare_by_output[job->kernel->row->output];
    return prepare_more == NULL || prepare_more(job, i);
}

static bool prepare_splits(tf_run_t *job, hvd_request_t *request)
{
    tf_api.GetInput(job->context, 1, &job->splits, job->status);
    if (!went_well(job)) {
        return false;
    }
    if (tf_api.NumDims(job->splits) != 1) {
        fail_context(job->context, TF_INVALID_ARGUMENT, "alltoall expects a 1D splits tensor");
        return false;
    }
    request->n_splits = (int)tf_api.Dim(job->splits, 0);
    request->splits = request->n_splits > 0 ? tf_api.TensorData(job->splits) : NULL;
    return true;
}

// The engine's thread asks for memory once the ranks have agreed how much there will be.
static void *allocate_output(void *arg, int i, int n_dims, const int64_t *shape)
{
    tf_run_t *job = arg;
    size_t bytes = hvd_dtype_bytes(job->kernel->request.dtype);
    for (int d = 0; d < n_dims; d++) {
        bytes *= (size_t)shape[d];
    }
    job->outputs[i] = tf_api.AllocateOutput(job->context, i, job->kernel->tf_dtype, shape, n_dims,
                                            bytes, job->status);
    return job->outputs[i] != NULL ? data_of(job->outputs[i]) : NULL;
}

// What the library keeps on the device, since only the agreement knew its size, goes to where
// TensorFlow wants it, once whoever had that memory before is done with it.
static hvd_status_t fetch_outputs(tf_run_t *job, hvd_handle_t handle)
{
    for (int i = 0; i < job->n; i++) {
        void *data;
        hvd_status_t status = hvd_output(job->ctx, handle, i, &data, job->shapes[i]);
        if (status != HVD_OK) {
            return status;
        }
        if (allocate_output(job, i, job->tensors[i].n_dims, job->shapes[i]) == NULL) {
            return HVD_NO_MEMORY;
        }
    }
    if (!tf_device_follow(&job->device)) {
        return HVD_SYSTEM;
    }
    for (int i = 0; i < job->n; i++) {
        hvd_status_t status =
            hvd_fetch(job->ctx, handle, i, data_of(job->outputs[i]), job->device.stream);
        if (status != HVD_OK) {
            return status;
        }
    }
    return HVD_OK;
}

// All is queued on the device: TensorFlow's streams go on behind it.
static hvd_status_t lead_device(tf_run_t *job, hvd_handle_t handle)
{
    hvd_status_t status = job->kernel->row->output == OUTPUT_ALLOCATED
                              ? fetch_outputs(job, handle)
                              : hvd_wait_on(job->ctx, handle, job->device.stream, 0);
    return status == HVD_OK && !tf_device_lead(&job->device) ? HVD_SYSTEM : status;
}

static void put_integers(tf_run_t *job, int output, const int32_t *values, int n_dims, int64_t n)
{
    size_t bytes = (size_t)n * sizeof *values;
    TF_Tensor *tensor =
        tf_api.AllocateOutput(job->context, output, TF_INT32, &n, n_dims, bytes, job->status);
    if (went_well(job)) {
        memcpy(data_of(tensor), values, bytes);
        tf_api.DeleteTensor(tensor);
    }
}

// Tells TensorFlow what became of it and lets go of everything but `done`.
static void settle(tf_run_t *job, hvd_handle_t handle, hvd_status_t status)
{
    hvd_result_t result = {0};
    hvd_result(job->ctx, handle, &result);
    if (status == HVD_OK && job->device.context != NULL) {
        status = lead_device(job, handle);
    }
    if (status != HVD_OK) {
        fail_collective(job->context, job->kernel->row, status,
                        result.text != NULL ? result.text : hvd_status_text(status));
    } else if (job->kernel->row->op == HVD_ALLTOALL) {
        put_integers(job, 1, result.received_splits, 1, result.n_splits);
    } else if (job->kernel->row->op == HVD_JOIN) {
        int32_t last = result.last_joined;
        put_integers(job, 0, &last, 0, 1);
    }
    hvd_release(job->ctx, handle);
    job_free(job);
}

static void on_done(void *arg, hvd_handle_t handle, hvd_status_t status)
{
    tf_run_t *job = arg;
    tf_done_t done = job->done;
    settle(job, handle, status);
    tf_api.RunAsyncOpKernelDoneCallback(&done);
    done.manager(&done, &done, 3); // destroys what it captured
}

// dladdr() searches TensorFlow's whole symbol table, so the pair of functions that has passed is
// remembered; there is one such pair in a TensorFlow.
static bool looks_right(const tf_done_t *done)
{
    static _Atomic(void *) passed[2];
    void *functions[2];
    Dl_info found[2];
    memcpy(&functions[0], &done->manager, sizeof functions[0]);
    memcpy(&functions[1], &done->invoker, sizeof functions[1]);
    if (functions[0] != NULL && functions[0] == atomic_load(&passed[0]) &&
        functions[1] == atomic_load(&passed[1])) {
        return true;
    }
    for (int i = 0; i < 2; i++) {
        if (functions[i] == NULL || dladdr(functions[i], &found[i]) == 0) {
            return false;
        }
    }
    if (found[0].dli_fbase != found[1].dli_fbase) {
        return false;
    }
    atomic_store(&passed[0], functions[0]);
    atomic_store(&passed[1], functions[1]);
    return true;
}

// `done` is a std::function that dies when compute returns. It is moved out of the caller's frame:
// its 32 bytes are copied and the original is left empty. That is libstdc++'s layout; if the two
// pointers are not functions of one library it is not what it seems, and the kernel waits instead.
static bool take_done(tf_done_t *done, tf_done_t *taken_p)
{
    if (!looks_right(done)) {
        return false;
    }
    memcpy(taken_p, done, sizeof *taken_p);
    done->manager = NULL;
    return true;
}

// Submits under the lock, so that the context cannot go away meanwhile. From here on the job may be
// completed, and gone, at any moment; unless `done` is taken out of the request because there are
// no other ranks. What waits for nobody is not worth waking another thread.
static bool submit(tf_run_t *job, hvd_request_t *request, hvd_handle_t *handle_p)
{
    char text[HVD_TEXT_BYTES];
    TF_OpKernelContext *context = job->context;
    const tf_collective_t *row = job->kernel->row;
    pthread_rwlock_rdlock(&attached.lock);
    job->ctx = attached.ctx;
    if (attached.ctx != NULL && hvd_size(attached.ctx) == 1 && job->device.context == NULL) {
        request->done = NULL;
        request->flags |= HVD_WAITS;
    }
    hvd_status_t status = hvd_submit(attached.ctx, request, handle_p, text, sizeof text);
    pthread_rwlock_unlock(&attached.lock);
    if (status != HVD_OK) {
        fail_collective(context, row, status, text);
    }
    return status == HVD_OK;
}

static bool prepare(tf_run_t *job, hvd_request_t *request)
{
    *request = job->kernel->request;
    request->tensors = job->tensors;
    request->n_tensors = job->n;
    request->alloc = allocate_output;
    request->arg = job;
    for (int i = 0; i < job->n; i++) {
        if (!prepare_tensor(job, i)) {
            return false;
        }
    }
    return request->op != HVD_ALLTOALL || prepare_splits(job, request);
}

// All memory has been taken: what is queued on the device so far comes before the collective.
static bool prepare_device(tf_run_t *job, hvd_request_t *request)
{
    if (!tf_device_here(&job->device) || !tf_device_follow(&job->device)) {
        fail_context(job->context, TF_ABORTED,
                     "Horovod cannot order its work behind TensorFlow's on this GPU: the driver "
                     "refuses a stream or an event; call it in tf.device('/CPU:0') instead");
        return false;
    }
    request->flags |= HVD_ON_DEVICE;
    request->device = job->device.ordinal;
    request->stream = job->device.stream;
    request->alloc = NULL;
    return true;
}

static void compute(void *kernel, TF_OpKernelContext *context, tf_done_t *done, bool on_device)
{
    tf_run_t *job = job_new(kernel, context);
    if (job == NULL) {
        fail_context(context, TF_RESOURCE_EXHAUSTED, "no memory for a Horovod operation");
        tf_api.RunAsyncOpKernelDoneCallback(done);
        return;
    }
    hvd_request_t request;
    hvd_handle_t handle = 0;
    bool ready = prepare(job, &request) && (!on_device || prepare_device(job, &request));
    tf_done_t taken;
    bool asynchronous = ready && take_done(done, &taken);
    if (asynchronous) {
        job->done = taken;
        request.done = on_done;
    }
    bool submitted = ready && submit(job, &request, &handle);
    if (submitted && request.done != NULL) {
        return;
    }
    if (submitted) {
        settle(job, handle, hvd_wait(job->ctx, handle, HVD_FOREVER));
    } else {
        job_free(job);
    }
    if (asynchronous) { // give it back
        memcpy(done, &taken, sizeof *done);
    }
    tf_api.RunAsyncOpKernelDoneCallback(done);
}

void tf_collective_compute(void *kernel, TF_OpKernelContext *context, tf_done_t *done)
{
    compute(kernel, context, done, false);
}

void tf_collective_compute_on_device(void *kernel, TF_OpKernelContext *context, tf_done_t *done)
{
    compute(kernel, context, done, true);
}

// --- Questions -----------------------------------------------------------------------------------

typedef struct question_kernel {
    const tf_question_t *row;
    int32_t process_set;
} question_kernel_t;

void *tf_question_create(TF_OpKernelConstruction *construction, const tf_question_t *row)
{
    TF_Status *status = tf_api.NewStatus();
    question_kernel_t *kernel = calloc(1, sizeof *kernel);
    if (kernel == NULL) {
        tf_api.SetStatus(status, TF_RESOURCE_EXHAUSTED, "no memory for a Horovod kernel");
    } else {
        kernel->row = row;
        if (row->about_set) {
            tf_api.OpKernelConstruction_GetAttrInt32(construction, "process_set_id",
                                                     &kernel->process_set, status);
        }
    }
    if (tf_api.GetCode(status) != TF_OK) {
        tf_api.OpKernelConstruction_Failure(construction, status);
    }
    tf_api.DeleteStatus(status);
    return kernel;
}

void tf_question_compute(void *kernel, TF_OpKernelContext *context)
{
    const question_kernel_t *question = kernel;
    TF_Status *status = tf_api.NewStatus();
    TF_Tensor *tensor =
        tf_api.AllocateOutput(context, 0, TF_INT32, NULL, 0, sizeof(int32_t), status);
    if (tf_api.GetCode(status) != TF_OK) {
        tf_api.OpKernelContext_Failure(context, status);
    } else {
        pthread_rwlock_rdlock(&attached.lock);
        int32_t answer = question->row->answer(attached.ctx, question->process_set);
        pthread_rwlock_unlock(&attached.lock);
        memcpy(tf_api.TensorData(tensor), &answer, sizeof answer);
        tf_api.DeleteTensor(tensor);
    }
    tf_api.DeleteStatus(status);
}

void tf_question_delete(void *kernel)
{
    free(kernel);
}
