// SPDX-License-Identifier: Apache-2.0
//
// core_submit.c - hands operations to the library, and keeps what the engine may touch: submit(),
// and InPlace.start() for one PyTorch tensor in place.
//
// A submission holds its tensors, views of buffers and memory for outputs until the operation is
// done. If its handle is dropped earlier, it moves to core.dropped and is freed by a later call.
// The engine needs no GIL: outputs of unknown size are plain memory.
#include "bind/core.h"

#include <stdlib.h>
#include <string.h>

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

static submission_t *submission_new(core_job_t *job, const hvd_request_t *request,
                                    const core_args_t *args)
{
    int n_outputs = core_is_given(args->outputs) ? 0 : request->n_tensors;
    submission_t *submission =
        calloc(1, sizeof *submission + (size_t)n_outputs * sizeof submission->outputs[0]);
    if (submission == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    submission->job = job;
    submission->element_bytes =
        (unsigned)request->dtype < HVD_N_DTYPES ? hvd_dtype_bytes(request->dtype) : 0;
    submission->n_outputs = n_outputs;
    submission->inputs = Py_XNewRef(args->inputs);
    submission->results = Py_XNewRef(args->outputs);
    PyObject *first = request->n_tensors == 0       ? NULL
                      : PyTuple_Check(args->inputs) ? PyTuple_GetItem(args->inputs, 0)
                                                    : args->inputs;
    if (first != NULL && PyObject_CheckBuffer(first)) {
        submission->views = calloc((size_t)request->n_tensors * 2, sizeof *submission->views);
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
        // On a device it may be launched, and not have landed: hvd_wait() tells.
        if (ctx != NULL && (hvd_poll(ctx, submission->id) == HVD_IN_PROGRESS ||
                            hvd_wait(ctx, submission->id, 0) == HVD_TIMEOUT)) {
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

void core_submission_drop(submission_t *submission)
{
    submission->next = core.dropped;
    core.dropped = submission;
    core_sweep_dropped();
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

// What a request points to until the library has copied it.
typedef struct lent {
    hvd_tensor_t one;
    shape_t shape;      // of it
    hvd_tensor_t *many; // else NULL; their shapes lie behind
    int32_t *splits;
} lent_t;

static void lent_free(lent_t *lent)
{
    free(lent->many);
    free(lent->splits);
}

// Fills the request with the tensors and splits of `args`.
static bool read_tensors(submission_t *submission, const core_args_t *args, lent_t *lent,
                         hvd_request_t *request)
{
    size_t n = (size_t)request->n_tensors;
    bool many = n > 0 && PyTuple_Check(args->inputs);
    bool given = submission->n_outputs == 0;
    lent->splits = NULL;
    lent->many = n > 1 ? malloc(n * (sizeof *lent->many + sizeof(shape_t))) : NULL;
    if (n > 1 && lent->many == NULL) {
        PyErr_NoMemory();
        return false;
    }
    hvd_tensor_t *tensors = n > 1 ? lent->many : &lent->one;
    shape_t *shapes = n > 1 ? (shape_t *)(tensors + n) : &lent->shape;
    bool read = true;
    for (Py_ssize_t i = 0; read && i < (Py_ssize_t)n; i++) {
        PyObject *input = many ? PyTuple_GetItem(args->inputs, i) : args->inputs;
        PyObject *output = !given ? NULL : many ? PyTuple_GetItem(args->outputs, i) : args->outputs;
        read = read_tensor(submission, input, output, shapes[i], &tensors[i]);
    }
    if (read && core_is_given(args->splits)) {
        read = core_read_ints(args->splits, &lent->splits, &request->n_splits);
    }
    if (!read) {
        lent_free(lent);
        return false;
    }
    request->tensors = tensors;
    request->splits = lent->splits;
    return true;
}

// --- Submitting ----------------------------------------------------------------------------------

// The core adds bools as "or": their average would be false nearly everywhere.
static bool averages_bools(const hvd_request_t *request)
{
    return request->dtype == HVD_BOOL && request->reduce == HVD_AVERAGE &&
           (request->op == HVD_ALLREDUCE || request->op == HVD_REDUCESCATTER);
}

static PyObject *start(hvd_request_t *request, const core_args_t *args)
{
    core_job_t *job = core_job_of(&request->process_set);
    if (job == NULL) {
        return NULL;
    }
    if (averages_bools(request)) {
        return core_raise(HVD_INVALID_ARGUMENT,
                          "The average of bool is not supported; use Sum, "
                          "Min or Max, or numbers.",
                          "");
    }
    if (core.dropped != NULL) {
        core_sweep_dropped();
    }
    request->n_tensors = count_tensors(args);
    handle_t *handle = request->n_tensors >= 0 ? core_handle_new(job, request->op, args) : NULL;
    if (handle == NULL) {
        return NULL;
    }
    submission_t *flight = submission_new(job, request, args);
    lent_t lent;
    if (flight != NULL && read_tensors(flight, args, &lent, request)) {
        char text[HVD_TEXT_BYTES];
        request->where = handle->where;
        bool on_device = (request->flags & HVD_ON_DEVICE) != 0;
        handle->device = on_device ? request->device : -1;
        handle->stream = request->stream;
        for (int i = 0; on_device && i < flight->n_outputs; i++) {
            flight->outputs[i].n_dims = request->tensors[i].n_dims;
        }
        request->alloc = flight->n_outputs > 0 && !on_device ? alloc_output : NULL;
        request->arg = flight;
        hvd_status_t status = hvd_submit(job->ctx, request, &flight->id, text, sizeof text);
        lent_free(&lent);
        if (status == HVD_OK) {
            handle->flight = flight;
            return (PyObject *)handle;
        }
        core_raise(status, text, ""); // the exception's own traceback shows the line
    }
    if (flight != NULL) {
        core_submission_free(flight);
    }
    Py_DECREF(handle);
    return NULL;
}

PyObject *core_start(hvd_request_t *request, const core_args_t *args)
{
    if (!core_is_profiled()) {
        return start(request, args);
    }
    core_range_t range = core_range_begin("submit", request->op, request->name);
    PyObject *handle = start(request, args);
    core_range_end(&range);
    return handle;
}

PyObject *core_submit(PyObject *module, PyObject *const *values, Py_ssize_t n_positional,
                      PyObject *names)
{
    (void)module;
    core_args_t args;
    if (!core_read_keywords(values, names, &args)) {
        return NULL;
    }
    bool has_tensors = core_is_given(args.inputs);
    if (n_positional > 0 || args.op == NULL || (has_tensors && args.dtype == NULL)) {
        return PyErr_Format(PyExc_TypeError, "submit() takes keywords: op, with tensors dtype, "
                                             "and what else the operation needs");
    }
    hvd_request_t request = {.reduce = HVD_SUM};
    return core_read_request(&args, &request) ? core_start(&request, &args) : NULL;
}

// --- One PyTorch tensor in place -----------------------------------------------------------------
//
// Scripts call allreduce_async_() once for every tensor, so what each call would do in Python is
// done here: the default reduction, the name's prefix, the number of the dtype, and the question
// whether the tensor's own memory will do. Everything out of the ordinary is handed to the Python
// function `slow`, with the same arguments. The Python module owns one InPlace for each operation
// and keeps its method start(), a C function Python calls without making a tuple.

typedef struct in_place {
    PyObject_HEAD
    hvd_op_t op;
    hvd_reduce_t reduce; // where the caller names none
    PyObject *prefix;    // of names, as "allreduce."
    PyObject *dtypes;    // dict: PyTorch's dtype -> number
    PyObject *strided;   // the layout of dense tensors
    PyObject *slow;
} in_place_t;

#define NAME_BYTES 512

// Puts the prefix before the name; false if it gets longer than the buffer.
static bool add_prefix(const in_place_t *self, const char **name_p, char buffer[NAME_BYTES])
{
    Py_ssize_t prefix_length;
    const char *prefix = PyUnicode_AsUTF8AndSize(self->prefix, &prefix_length);
    size_t length = strlen(*name_p);
    if (prefix == NULL || (size_t)prefix_length + length >= NAME_BYTES) {
        return false;
    }
    memcpy(buffer, prefix, (size_t)prefix_length);
    memcpy(buffer + prefix_length, *name_p, length + 1);
    *name_p = buffer;
    return true;
}

static bool read_dtype(const in_place_t *self, PyObject *tensor, hvd_dtype_t *dtype_p)
{
    PyObject *dtype = PyObject_GetAttr(tensor, core.s_dtype);
    PyObject *number = dtype != NULL ? PyDict_GetItemWithError(self->dtypes, dtype) : NULL;
    Py_XDECREF(dtype);
    if (number == NULL) {
        return false;
    }
    *dtype_p = (hvd_dtype_t)PyLong_AsLong(number);
    return true;
}

// True if the request is an ordinary one and complete; without an exception otherwise.
static bool read_request(const in_place_t *self, const core_args_t *args, PyObject *tensor,
                         char name[NAME_BYTES], hvd_request_t *request)
{
    *request = (hvd_request_t){.op = self->op, .reduce = self->reduce};
    bool ordinary = (!core_is_given(args->reduce) || PyLong_CheckExact(args->reduce)) &&
                    core_read_request(args, request) && request->reduce != HVD_ADASUM &&
                    (request->name == NULL || add_prefix(self, &request->name, name)) &&
                    read_dtype(self, tensor, &request->dtype) &&
                    core_locate(tensor, self->strided, request);
    PyErr_Clear(); // the slow way says what is wrong
    return ordinary;
}

static PyObject *call_slow(const in_place_t *self, PyObject *const *values, PyObject *names)
{
    PyObject *positional = PyTuple_Pack(1, values[0]);
    PyObject *keywords = PyDict_New();
    PyObject *result = NULL;
    Py_ssize_t n = names != NULL ? PyTuple_Size(names) : 0;
    bool made = positional != NULL && keywords != NULL;
    for (Py_ssize_t i = 0; made && i < n; i++) {
        made = PyDict_SetItem(keywords, PyTuple_GetItem(names, i), values[1 + i]) == 0;
    }
    if (made) {
        result = PyObject_Call(self->slow, positional, keywords);
    }
    Py_XDECREF(positional);
    Py_XDECREF(keywords);
    return result;
}

static PyObject *in_place_start(PyObject *object, PyObject *const *values, Py_ssize_t n_positional,
                                PyObject *names)
{
    const in_place_t *self = (const in_place_t *)object;
    if (n_positional != 1) {
        return PyErr_Format(PyExc_TypeError, "start() takes a tensor, and keywords");
    }
    core_args_t args;
    if (!core_read_keywords(values + 1, names, &args)) {
        return NULL;
    }
    char name[NAME_BYTES];
    hvd_request_t request;
    if (!read_request(self, &args, values[0], name, &request)) {
        return call_slow(self, values, names);
    }
    args = (core_args_t){.inputs = values[0], .outputs = values[0], .result = values[0]};
    return core_start(&request, &args);
}

// InPlace(op, reduce, prefix, dtypes, strided, slow)
static PyObject *in_place_new(PyTypeObject *type, PyObject *positional, PyObject *keywords)
{
    static char *words[] = {"op", "reduce", "prefix", "dtypes", "strided", "slow", NULL};
    int op, reduce;
    PyObject *prefix, *dtypes, *strided, *slow;
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "$iiUO!OO", words, &op, &reduce, &prefix,
                                     &PyDict_Type, &dtypes, &strided, &slow)) {
        return NULL;
    }
    in_place_t *self = PyObject_New(in_place_t, type);
    if (self == NULL) {
        return NULL;
    }
    self->op = (hvd_op_t)op;
    self->reduce = (hvd_reduce_t)reduce;
    self->prefix = Py_NewRef(prefix);
    self->dtypes = Py_NewRef(dtypes);
    self->strided = Py_NewRef(strided);
    self->slow = Py_NewRef(slow);
    return (PyObject *)self;
}

static void in_place_dealloc(PyObject *object)
{
    in_place_t *self = (in_place_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_DECREF(self->prefix);
    Py_DECREF(self->dtypes);
    Py_DECREF(self->strided);
    Py_DECREF(self->slow);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef in_place_methods[] = {
    {"start", (PyCFunction)(void (*)(void))in_place_start, METH_FASTCALL | METH_KEYWORDS,
     "start(tensor, *, name=None, reduce=None, root=0, process_set=0, prescale=1.0,\n"
     "postscale=1.0, waits=False) -> Handle\n\n"
     "The handle's wait() returns the tensor. What is out of the ordinary is slow()'s, with the\n"
     "same arguments."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot in_place_slots[] = {
    {Py_tp_new, in_place_new},
    {Py_tp_methods, in_place_methods},
    {Py_tp_dealloc, in_place_dealloc},
    {Py_tp_doc, "A collective on one tensor in place."},
    {0, NULL},
};

PyType_Spec core_in_place_spec = {
    .name = "horovod._core.InPlace",
    .basicsize = sizeof(in_place_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = in_place_slots,
};
