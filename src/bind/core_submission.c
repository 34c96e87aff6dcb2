// SPDX-License-Identifier: Apache-2.0
//
// core_submission.c - hands tensors to the library, and keeps what the engine may touch.
//
// A submission holds its tensors, views of buffers and memory for outputs until the operation is
// done. If its handle is dropped earlier, it moves to core.dropped and is freed by a later call.
// The engine needs no GIL: outputs of unknown size are plain memory.
#include "bind/core.h"

#include <stdlib.h>

void core_submission_free(submission_t *submission)
{
    for (int i = 0; i < submission->n_views; i++) {
        PyBuffer_Release(&submission->views[i]);
    }
    for (int i = 0; i < submission->n_outputs; i++) {
        free(submission->outputs[i].data);
    }
    free(submission->views);
    Py_XDECREF(submission->inputs);
    Py_XDECREF(submission->results);
    free(submission);
}

static submission_t *submission_new(const core_args_t *args, int n_tensors)
{
    int n_outputs = core_is_given(args->outputs) ? 0 : n_tensors;
    submission_t *submission =
        calloc(1, sizeof *submission + (size_t)n_outputs * sizeof submission->outputs[0]);
    if (submission == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    submission->n_outputs = n_outputs;
    submission->inputs = Py_XNewRef(args->inputs);
    submission->results = Py_XNewRef(args->outputs);
    PyObject *first = n_tensors == 0                ? NULL
                      : PyTuple_Check(args->inputs) ? PyTuple_GetItem(args->inputs, 0)
                                                    : args->inputs;
    if (first != NULL && PyObject_CheckBuffer(first)) {
        submission->views = calloc((size_t)n_tensors * 2, sizeof *submission->views);
        if (submission->views == NULL) {
            core_submission_free(submission);
            PyErr_NoMemory();
            return NULL;
        }
    }
    return submission;
}

void core_sweep_dropped(void)
{
    submission_t **at = &core.dropped;
    while (*at != NULL) {
        submission_t *submission = *at;
        hvd_ctx_t *ctx = submission->job->ctx;
        if (ctx != NULL && hvd_poll(ctx, submission->id) == HVD_IN_PROGRESS) {
            at = &submission->next;
            continue;
        }
        *at = submission->next;
        if (ctx != NULL) {
            hvd_release(ctx, submission->id);
        }
        core_submission_free(submission);
    }
}

// --- Tensors -------------------------------------------------------------------------------------

typedef int64_t shape_t[HVD_MAX_DIMS];

// Runs on the thread that drives the engine, without the GIL.
static void *alloc_output(void *arg, int tensor, int n_dims, const int64_t *shape)
{
    submission_t *submission = arg;
    struct output *output = &submission->outputs[tensor];
    size_t bytes = submission->element_bytes;
    for (int d = 0; d < n_dims; d++) {
        bytes *= (size_t)shape[d];
        output->shape[d] = shape[d];
    }
    output->n_dims = n_dims;
    if (posix_memalign(&output->data, 64, bytes > 0 ? bytes : 1) != 0) {
        output->data = NULL;
    }
    return output->data;
}

static bool describe_into(submission_t *submission, PyObject *tensor, bool writable, void **data_p,
                          int *n_dims_p, shape_t shape)
{
    Py_buffer view;
    if (!core_describe(tensor, writable, data_p, n_dims_p, shape, &view)) {
        return false;
    }
    if (view.obj == NULL) {
        return true;
    }
    if (submission->views == NULL) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_TypeError, "a group cannot mix buffers with other tensors");
        return false;
    }
    submission->views[submission->n_views++] = view;
    return true;
}

// output: NULL to have memory made for it.
static bool read_tensor(submission_t *submission, PyObject *input, PyObject *output, shape_t shape,
                        hvd_tensor_t *tensor)
{
    void *data;
    if (!describe_into(submission, input, output == input, &data, &tensor->n_dims, shape)) {
        return false;
    }
    tensor->input = data;
    tensor->output = NULL;
    tensor->shape = shape;
    if (output == NULL) {
        return true;
    }
    int n_dims;
    shape_t unused;
    if (output != input && !describe_into(submission, output, true, &data, &n_dims, unused)) {
        return false;
    }
    // An empty tensor may have no address, but NULL would ask for memory.
    static char nothing[1];
    tensor->output = data != NULL ? data : nothing;
    return true;
}

// How many tensors there are; -1 with an exception if there are not as many outputs.
static int count_tensors(const core_args_t *args)
{
    if (!core_is_given(args->inputs)) {
        return 0;
    }
    if (!PyTuple_Check(args->inputs)) {
        return 1;
    }
    Py_ssize_t n = PyTuple_Size(args->inputs);
    PyObject *outputs = args->outputs;
    Py_ssize_t n_outputs = !core_is_given(outputs)  ? n
                           : PyTuple_Check(outputs) ? PyTuple_Size(outputs)
                                                    : 1;
    if (n_outputs != n) {
        PyErr_Format(PyExc_ValueError,
                     "a group needs one output per input: %zd inputs, %zd outputs", n, n_outputs);
        return -1;
    }
    return (int)n;
}

// --- Submitting ----------------------------------------------------------------------------------

// Fills the request with the tensors and gives it to the library.
static bool submit(submission_t *submission, hvd_request_t *request, const core_args_t *args,
                   hvd_tensor_t *tensors, shape_t *shapes)
{
    bool many = request->n_tensors > 0 && PyTuple_Check(args->inputs);
    bool given = submission->n_outputs == 0;
    for (int i = 0; i < request->n_tensors; i++) {
        PyObject *input = many ? PyTuple_GetItem(args->inputs, i) : args->inputs;
        PyObject *output = !given ? NULL : many ? PyTuple_GetItem(args->outputs, i) : args->outputs;
        if (!read_tensor(submission, input, output, shapes[i], &tensors[i])) {
            return false;
        }
    }
    request->tensors = tensors;
    int32_t *splits = NULL;
    if (core_is_given(args->splits) && !core_read_ints(args->splits, &splits, &request->n_splits)) {
        return false;
    }
    request->splits = splits;
    char text[HVD_TEXT_BYTES];
    hvd_status_t status =
        hvd_submit(submission->job->ctx, request, &submission->id, text, sizeof text);
    free(splits);
    if (status != HVD_OK) {
        core_raise(status, text, ""); // the exception's own traceback shows the line
    }
    return status == HVD_OK;
}

static bool submit_many(submission_t *submission, hvd_request_t *request, const core_args_t *args)
{
    size_t n = (size_t)request->n_tensors;
    hvd_tensor_t *tensors = malloc(n * (sizeof *tensors + sizeof(shape_t)));
    if (tensors == NULL) {
        PyErr_NoMemory();
        return false;
    }
    bool submitted = submit(submission, request, args, tensors, (shape_t *)(tensors + n));
    free(tensors);
    return submitted;
}

submission_t *core_submission_start(core_job_t *job, hvd_request_t *request,
                                    const core_args_t *args)
{
    request->n_tensors = count_tensors(args);
    submission_t *submission =
        request->n_tensors >= 0 ? submission_new(args, request->n_tensors) : NULL;
    if (submission == NULL) {
        return NULL;
    }
    submission->job = job;
    submission->element_bytes =
        (unsigned)request->dtype < HVD_N_DTYPES ? hvd_dtype_bytes(request->dtype) : 0;
    request->alloc = submission->n_outputs > 0 ? alloc_output : NULL;
    request->arg = submission;
    hvd_tensor_t tensor;
    shape_t shape;
    bool submitted = request->n_tensors <= 1 ? submit(submission, request, args, &tensor, &shape)
                                             : submit_many(submission, request, args);
    if (!submitted) {
        core_submission_free(submission);
        return NULL;
    }
    return submission;
}
