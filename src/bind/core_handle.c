// SPDX-License-Identifier: Apache-2.0
//
// core_handle.c - submit(), and the Handle it returns.
//
// A Handle keeps the tensors of its operation alive, so there is no table beside it. If it is
// dropped while the operation is in flight, what the engine may touch (submission_t) moves to
// core.dropped and is freed by a later call, when the operation is done.
//
// wait() returns what submit() was told to return: `output`, or finish(handle) if a function was
// given, called once, with the GIL, by the thread that waits. Waits go in slices, so that signals
// (Ctrl-C) are answered and shutdown() can get everybody out.
//
// Nothing here takes the GIL from the engine: outputs of unknown size are plain memory (Memory).
#include "bind/core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WAIT_SLICE_MS 100
#define WHERE_BYTES 240
#define SHUT_DOWN "Horovod has been shut down."

enum handle_state { IN_FLIGHT, ARRIVED, DONE, FAILED };

typedef struct handle {
    PyObject_HEAD
    enum handle_state state;
    hvd_op_t op;
    core_job_t *job;
    uint64_t life;        // of the job
    submission_t *flight; // NULL once done
    PyObject *output;
    PyObject *finish; // NULL: none, or already called
    PyObject *received_splits;
    int last_joined;
    hvd_status_t status;
    char *text; // of a failure
    char where[WHERE_BYTES];
} handle_t;

// --- Flights -------------------------------------------------------------------------------------

static void flight_free(submission_t *flight)
{
    for (int i = 0; i < flight->n_views; i++) {
        PyBuffer_Release(&flight->views[i]);
    }
    for (int i = 0; i < flight->n_outputs; i++) {
        free(flight->outputs[i].data);
    }
    free(flight->views);
    Py_XDECREF(flight->inputs);
    Py_XDECREF(flight->results);
    free(flight);
}

static submission_t *flight_new(PyObject *inputs, PyObject *outputs, int n_tensors, int n_outputs)
{
    submission_t *flight =
        calloc(1, sizeof *flight + (size_t)n_outputs * sizeof flight->outputs[0]);
    if (flight == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    flight->n_outputs = n_outputs;
    flight->inputs = Py_NewRef(inputs);
    flight->results = Py_NewRef(outputs);
    PyObject *first = n_tensors == 0          ? NULL
                      : PyTuple_Check(inputs) ? PyTuple_GetItem(inputs, 0)
                                              : inputs;
    if (first != NULL && PyObject_CheckBuffer(first)) {
        flight->views = calloc((size_t)n_tensors * 2, sizeof *flight->views);
        if (flight->views == NULL) {
            flight_free(flight);
            PyErr_NoMemory();
            return NULL;
        }
    }
    return flight;
}

void core_sweep_dropped(void)
{
    submission_t **link = &core.dropped;
    while (*link != NULL) {
        submission_t *flight = *link;
        hvd_ctx_t *ctx = flight->job->ctx;
        if (ctx != NULL && hvd_poll(ctx, flight->id) == HVD_IN_PROGRESS) {
            link = &flight->next;
            continue;
        }
        *link = flight->next;
        if (ctx != NULL) {
            hvd_release(ctx, flight->id);
        }
        flight_free(flight);
    }
}

// --- Submitting ----------------------------------------------------------------------------------

enum {
    ARG_OP,
    ARG_NAME,
    ARG_DTYPE,
    ARG_REDUCE,
    ARG_ROOT,
    ARG_SET,
    ARG_PRESCALE,
    ARG_POSTSCALE,
    ARG_INPUTS,
    ARG_OUTPUTS,
    ARG_SPLITS,
    ARG_WAITS,
    ARG_RESULT,
    ARG_FINISH,
    N_ARGS
};

// The Python objects of a submission; None where there is nothing.
typedef struct objects {
    PyObject *inputs, *outputs, *splits, *result, *finish;
} objects_t;

typedef struct handle_piece {
    hvd_tensor_t tensor;
    int64_t shape[HVD_MAX_DIMS];
} handle_piece_t;

// Runs on the thread that drives the engine, without the GIL.
static void *alloc_output(void *arg, int tensor, int n_dims, const int64_t *shape)
{
    submission_t *flight = arg;
    struct output *output = &flight->outputs[tensor];
    size_t bytes = flight->element_bytes;
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

static bool describe_into(submission_t *flight, PyObject *tensor, bool writable, void **data_p,
                          int *n_dims_p, int64_t *shape)
{
    Py_buffer view;
    if (!core_describe(tensor, writable, data_p, n_dims_p, shape, &view)) {
        return false;
    }
    if (view.obj == NULL) {
        return true;
    }
    if (flight->views == NULL) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_TypeError, "a group has buffers and other tensors");
        return false;
    }
    flight->views[flight->n_views++] = view;
    return true;
}

static bool read_piece(submission_t *flight, PyObject *input, PyObject *output,
                       handle_piece_t *piece)
{
    void *data;
    if (!describe_into(flight, input, output == input, &data, &piece->tensor.n_dims,
                       piece->shape)) {
        return false;
    }
    piece->tensor.input = data;
    piece->tensor.output = NULL;
    piece->tensor.shape = piece->shape;
    if (output == NULL) {
        return true;
    }
    int n_dims;
    int64_t shape[HVD_MAX_DIMS];
    if (output != input && !describe_into(flight, output, true, &data, &n_dims, shape)) {
        return false;
    }
    // An empty tensor may have no address, but NULL would ask for memory.
    static char nothing[1];
    piece->tensor.output = data != NULL ? data : nothing;
    return true;
}

static bool read_pieces(submission_t *flight, PyObject *inputs, PyObject *outputs, int n,
                        handle_piece_t *pieces)
{
    bool many = PyTuple_Check(inputs);
    for (int i = 0; i < n; i++) {
        PyObject *input = many ? PyTuple_GetItem(inputs, i) : inputs;
        PyObject *output = outputs == Py_None ? NULL : many ? PyTuple_GetItem(outputs, i) : outputs;
        if (!read_piece(flight, input, output, &pieces[i])) {
            return false;
        }
    }
    return true;
}

static int32_t *read_splits(PyObject *splits, int *n_p)
{
    Py_ssize_t n = PySequence_Size(splits);
    int32_t *values = n >= 0 ? malloc((size_t)(n > 0 ? n : 1) * sizeof *values) : NULL;
    for (Py_ssize_t i = 0; values != NULL && i < n; i++) {
        PyObject *item = PySequence_GetItem(splits, i);
        long value = item != NULL ? PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred() || value != (int32_t)value) {
            free(values);
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_ValueError, "split %zd is %ld, which has more than 32 bits", i,
                             value);
            }
            return NULL;
        }
        values[i] = (int32_t)value;
    }
    *n_p = (int)n;
    return values;
}

static bool read_request(PyObject *const *args, hvd_request_t *request)
{
    if (args[ARG_SET] == Py_None) {
        core_raise(HVD_UNKNOWN_SET,
                   "Process set provided does not exist, or has not been registered.", "");
        return false;
    }
    *request = (hvd_request_t){
        .op = (hvd_op_t)PyLong_AsLong(args[ARG_OP]),
        .dtype = (hvd_dtype_t)PyLong_AsLong(args[ARG_DTYPE]),
        .reduce = (hvd_reduce_t)PyLong_AsLong(args[ARG_REDUCE]),
        .root = (int)PyLong_AsLong(args[ARG_ROOT]),
        .process_set = (int)PyLong_AsLong(args[ARG_SET]),
        .prescale = PyFloat_AsDouble(args[ARG_PRESCALE]),
        .postscale = PyFloat_AsDouble(args[ARG_POSTSCALE]),
        .flags = args[ARG_WAITS] == Py_True ? HVD_WAITS : 0,
    };
    if (args[ARG_NAME] != Py_None) {
        request->name = PyUnicode_AsUTF8AndSize(args[ARG_NAME], NULL);
    }
    if (request->prescale != 1.0 || request->postscale != 1.0) {
        request->flags |= HVD_SCALED;
    }
    return !PyErr_Occurred();
}

static handle_t *handle_new(core_job_t *job, hvd_op_t op, PyObject *result, PyObject *finish)
{
    handle_t *handle = PyObject_New(handle_t, core.handle_type);
    if (handle == NULL) {
        return NULL;
    }
    handle->state = IN_FLIGHT;
    handle->op = op;
    handle->job = job;
    handle->life = job->life;
    handle->flight = NULL;
    handle->output = Py_NewRef(result);
    handle->finish = finish != Py_None ? Py_NewRef(finish) : NULL;
    handle->received_splits = NULL;
    handle->last_joined = -1;
    handle->status = HVD_OK;
    handle->text = NULL;
    core_where(handle->where, sizeof handle->where);
    return handle;
}

// Fills the request with the tensors and gives it to the library.
static bool submit_pieces(handle_t *handle, hvd_request_t *request, const objects_t *objects,
                          handle_piece_t *pieces, hvd_tensor_t *tensors)
{
    if (!read_pieces(handle->flight, objects->inputs, objects->outputs, request->n_tensors,
                     pieces)) {
        return false;
    }
    for (int i = 0; i < request->n_tensors; i++) {
        tensors[i] = pieces[i].tensor;
    }
    request->tensors = tensors;
    int32_t *splits = NULL;
    if (objects->splits != Py_None) {
        splits = read_splits(objects->splits, &request->n_splits);
        if (splits == NULL) {
            return false;
        }
        request->splits = splits;
    }
    char text[HVD_TEXT_BYTES];
    hvd_status_t status =
        hvd_submit(handle->job->ctx, request, &handle->flight->id, text, sizeof text);
    free(splits);
    if (status != HVD_OK) {
        core_raise(status, text, ""); // the exception's own traceback shows the line
        return false;
    }
    return true;
}

static bool submit_handle(handle_t *handle, hvd_request_t *request, const objects_t *objects)
{
    PyObject *inputs = objects->inputs;
    int n = inputs == Py_None ? 0 : PyTuple_Check(inputs) ? (int)PyTuple_Size(inputs) : 1;
    PyObject *outputs = objects->outputs;
    if (n > 0 && outputs != Py_None && PyTuple_Check(inputs) &&
        (!PyTuple_Check(outputs) || PyTuple_Size(outputs) != n)) {
        PyErr_SetString(PyExc_ValueError, "a group has not as many outputs as inputs");
        return false;
    }
    handle->flight = flight_new(inputs, outputs, n, outputs == Py_None ? n : 0);
    if (handle->flight == NULL) {
        return false;
    }
    handle->flight->job = handle->job;
    handle->flight->element_bytes =
        (unsigned)request->dtype < HVD_N_DTYPES ? hvd_dtype_bytes(request->dtype) : 0;
    request->n_tensors = n;
    request->where = handle->where;
    request->alloc = handle->flight->n_outputs > 0 ? alloc_output : NULL;
    request->arg = handle->flight;
    handle_piece_t one;
    hvd_tensor_t tensor;
    if (n <= 1) {
        return submit_pieces(handle, request, objects, &one, &tensor);
    }
    handle_piece_t *pieces = malloc((size_t)n * (sizeof *pieces + sizeof tensor));
    if (pieces == NULL) {
        PyErr_NoMemory();
        return false;
    }
    bool submitted = submit_pieces(handle, request, objects, pieces, (hvd_tensor_t *)(pieces + n));
    free(pieces);
    return submitted;
}

// The core adds bools as "or": their average would be false nearly everywhere.
static bool averages_bools(const hvd_request_t *request)
{
    return request->dtype == HVD_BOOL && request->reduce == HVD_AVERAGE &&
           (request->op == HVD_ALLREDUCE || request->op == HVD_REDUCESCATTER);
}

static PyObject *submit(hvd_request_t *request, const objects_t *objects)
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
    handle_t *handle = handle_new(job, request->op, objects->result, objects->finish);
    if (handle == NULL) {
        return NULL;
    }
    if (!submit_handle(handle, request, objects)) {
        if (handle->flight != NULL) {
            flight_free(handle->flight);
            handle->flight = NULL;
        }
        handle->state = FAILED;
        Py_DECREF(handle);
        return NULL;
    }
    return (PyObject *)handle;
}

PyObject *core_submit(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    (void)module;
    if (n_args != N_ARGS) {
        return PyErr_Format(PyExc_TypeError, "submit() takes %d arguments, not %zd", N_ARGS,
                            n_args);
    }
    hvd_request_t request;
    if (!read_request(args, &request)) {
        return NULL;
    }
    objects_t objects = {
        .inputs = args[ARG_INPUTS],
        .outputs = args[ARG_OUTPUTS],
        .splits = args[ARG_SPLITS],
        .result = args[ARG_RESULT],
        .finish = args[ARG_FINISH],
    };
    return submit(&request, &objects);
}

PyObject *core_submit_in_place(const hvd_request_t *request, PyObject *tensor)
{
    hvd_request_t own = *request;
    objects_t objects = {tensor, tensor, Py_None, tensor, Py_None};
    return submit(&own, &objects);
}

// --- Waiting -------------------------------------------------------------------------------------

static bool of_this_life(const handle_t *handle)
{
    return handle->life == handle->job->life && handle->job->ctx != NULL;
}

static void settle_failure(handle_t *handle, hvd_status_t status, const char *text)
{
    handle->state = FAILED;
    handle->status = status;
    handle->text = text != NULL ? strdup(text) : NULL;
    Py_CLEAR(handle->finish);
    Py_CLEAR(handle->output);
    if (handle->flight != NULL) {
        flight_free(handle->flight);
        handle->flight = NULL;
    }
}

static PyObject *splits_as_tuple(const hvd_result_t *result)
{
    PyObject *tuple = PyTuple_New(result->n_splits);
    for (int i = 0; tuple != NULL && i < result->n_splits; i++) {
        PyObject *value = PyLong_FromLong(result->received_splits[i]);
        if (value == NULL || PyTuple_SetItem(tuple, i, value) != 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

// The operation has ended: keeps what it brought and lets the library forget it.
static void settle(handle_t *handle)
{
    hvd_result_t result;
    hvd_status_t status = hvd_result(handle->job->ctx, handle->flight->id, &result);
    if (status == HVD_OK) {
        status = result.status;
    } else {
        result = (hvd_result_t){.text = ""};
    }
    hvd_handle_t id = handle->flight->id;
    if (status != HVD_OK) {
        settle_failure(handle, status, result.text);
    } else {
        handle->last_joined = result.last_joined;
        if (result.n_splits > 0) {
            handle->received_splits = splits_as_tuple(&result);
        }
        handle->state = ARRIVED;
    }
    hvd_release(handle->job->ctx, id);
}

// True when the operation has ended; false with an exception when a signal came or time was up.
static bool wait_until_ended(const handle_t *handle, double timeout_s)
{
    core_job_t *job = handle->job;
    hvd_handle_t id = handle->flight->id;
    hvd_status_t status = HVD_TIMEOUT;
    int64_t left_ms = timeout_s < 0 ? -1 : (int64_t)(timeout_s * 1000.0);
    hvd_ctx_t *ctx = job->ctx;
    job->n_inside++;
    while (status == HVD_TIMEOUT && !job->closing) {
        int64_t slice_ms = left_ms >= 0 && left_ms < WAIT_SLICE_MS ? left_ms : WAIT_SLICE_MS;
        Py_BEGIN_ALLOW_THREADS
        status = hvd_wait(ctx, id, slice_ms);
        Py_END_ALLOW_THREADS
        if (status != HVD_TIMEOUT) {
            break;
        }
        if (PyErr_CheckSignals() != 0) {
            break;
        }
        if (left_ms >= 0 && (left_ms -= slice_ms) <= 0) {
            core_raise(HVD_TIMEOUT, NULL, "");
            break;
        }
    }
    job->n_inside--;
    return !PyErr_Occurred();
}

// Most handles of a step have ended when the first has: nobody need let go of the GIL for them.
static bool has_ended(const handle_t *handle)
{
    hvd_result_t result;
    return hvd_result(handle->job->ctx, handle->flight->id, &result) == HVD_OK;
}

static bool bring_home(handle_t *handle, double timeout_s)
{
    if (handle->state != IN_FLIGHT) {
        return true;
    }
    if (of_this_life(handle) && !has_ended(handle) && !wait_until_ended(handle, timeout_s)) {
        return false;
    }
    if (handle->state == IN_FLIGHT) { // another thread may have waited too
        if (of_this_life(handle) && !handle->job->closing) {
            settle(handle);
        } else if (!of_this_life(handle)) {
            settle_failure(handle, HVD_SHUTDOWN, SHUT_DOWN);
        } else {
            core_raise(HVD_SHUTDOWN, SHUT_DOWN, handle->where);
            return false;
        }
    }
    return true;
}

static PyObject *handle_result(handle_t *handle)
{
    if (handle->state == FAILED) {
        return core_raise(handle->status, handle->text, handle->where);
    }
    if (handle->state == ARRIVED) {
        handle->state = DONE;
        if (handle->finish != NULL) {
            PyObject *result = PyObject_CallFunctionObjArgs(handle->finish, handle, NULL);
            Py_CLEAR(handle->finish);
            if (result == NULL) {
                return NULL;
            }
            Py_DECREF(handle->output);
            handle->output = result;
        }
        if (handle->flight != NULL) {
            flight_free(handle->flight);
            handle->flight = NULL;
        }
    }
    return Py_NewRef(handle->output);
}

static PyObject *handle_wait(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args > 1) {
        return PyErr_Format(PyExc_TypeError, "wait() takes one argument, not %zd", n_args);
    }
    PyObject *timeout = n_args == 1 ? args[0] : Py_None;
    double timeout_s = timeout == Py_None ? -1 : PyFloat_AsDouble(timeout);
    if (PyErr_Occurred() || !bring_home((handle_t *)self, timeout_s)) {
        return NULL;
    }
    return handle_result((handle_t *)self);
}

static PyObject *handle_poll(PyObject *self, PyObject *unused)
{
    (void)unused;
    handle_t *handle = (handle_t *)self;
    if (handle->state != IN_FLIGHT || !of_this_life(handle)) {
        Py_RETURN_TRUE;
    }
    hvd_status_t status;
    core_job_t *job = handle->job;
    hvd_ctx_t *ctx = job->ctx;
    hvd_handle_t id = handle->flight->id;
    CORE_ENTER(job)
    status = hvd_poll(ctx, id);
    CORE_LEAVE(job)
    return PyBool_FromLong(status != HVD_IN_PROGRESS);
}

// Waits for every handle before it reports the first failure: none is left in flight.
PyObject *core_wait_all(PyObject *module, PyObject *handles)
{
    (void)module;
    PyObject *list = PySequence_Tuple(handles);
    if (list == NULL) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_Size(list);
    PyObject *results = PyList_New(n);
    PyObject *failure = NULL; // the handle that failed first
    for (Py_ssize_t i = 0; results != NULL && i < n; i++) {
        PyObject *item = PyTuple_GetItem(list, i);
        if (Py_TYPE(item) != core.handle_type) {
            PyErr_SetString(PyExc_TypeError, "wait_all() takes handles");
            Py_CLEAR(results);
        } else if (!bring_home((handle_t *)item, -1)) {
            Py_CLEAR(results);
        } else if (((handle_t *)item)->state == FAILED) {
            failure = failure != NULL ? failure : item;
            PyList_SetItem(results, i, Py_NewRef(Py_None));
        } else {
            PyObject *result = handle_result((handle_t *)item);
            if (result == NULL) {
                Py_CLEAR(results);
            } else {
                PyList_SetItem(results, i, result);
            }
        }
    }
    if (results != NULL && failure != NULL) {
        Py_CLEAR(results);
        handle_result((handle_t *)failure);
    }
    Py_DECREF(list);
    return results;
}

// --- What finish() may ask -----------------------------------------------------------------------

static PyObject *shape_as_tuple(const struct output *output)
{
    PyObject *tuple = PyTuple_New(output->n_dims);
    for (int d = 0; tuple != NULL && d < output->n_dims; d++) {
        PyObject *value = PyLong_FromLongLong(output->shape[d]);
        if (value == NULL || PyTuple_SetItem(tuple, d, value) != 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

static PyObject *handle_memory(PyObject *self, PyObject *index)
{
    handle_t *handle = (handle_t *)self;
    long i = PyLong_AsLong(index);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (handle->flight == NULL || handle->state == IN_FLIGHT || i < 0 ||
        i >= handle->flight->n_outputs || handle->flight->outputs[i].data == NULL) {
        return PyErr_Format(PyExc_IndexError, "the handle has no memory %ld to give", i);
    }
    struct output *output = &handle->flight->outputs[i];
    size_t bytes = handle->flight->element_bytes;
    for (int d = 0; d < output->n_dims; d++) {
        bytes *= (size_t)output->shape[d];
    }
    PyObject *shape = shape_as_tuple(output);
    if (shape == NULL) {
        return NULL;
    }
    PyObject *memory = core_memory_new(output->data, bytes);
    output->data = NULL;
    if (memory == NULL) {
        Py_DECREF(shape);
        return NULL;
    }
    return Py_BuildValue("(NN)", memory, shape);
}

static PyObject *get_received_splits(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *splits = ((handle_t *)self)->received_splits;
    return Py_NewRef(splits != NULL ? splits : Py_None);
}

static PyObject *get_last_joined(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((handle_t *)self)->last_joined);
}

static PyObject *get_where(PyObject *self, void *unused)
{
    (void)unused;
    const char *where = ((handle_t *)self)->where;
    return PyUnicode_DecodeUTF8(where, (Py_ssize_t)strlen(where), "replace");
}

// --- The type ------------------------------------------------------------------------------------

static PyObject *handle_repr(PyObject *self)
{
    static const char *const words[] = {"in flight", "arrived", "done", "failed"};
    const handle_t *handle = (const handle_t *)self;
    return PyUnicode_FromFormat("<horovod handle: %s, %s>", hvd_op_name(handle->op),
                                words[handle->state]);
}

static void handle_dealloc(PyObject *self)
{
    handle_t *handle = (handle_t *)self;
    PyTypeObject *type = Py_TYPE(self);
    submission_t *flight = handle->flight;
    if (flight != NULL && handle->state == IN_FLIGHT && of_this_life(handle)) {
        flight->next = core.dropped;
        core.dropped = flight;
        core_sweep_dropped();
    } else if (flight != NULL) {
        flight_free(flight);
    }
    Py_XDECREF(handle->output);
    Py_XDECREF(handle->finish);
    Py_XDECREF(handle->received_splits);
    free(handle->text);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef handle_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))handle_wait, METH_FASTCALL,
     "wait(timeout=None): blocks until the operation is done and returns its result."},
    {"poll", handle_poll, METH_NOARGS, "poll(): True when wait() would not block."},
    {"memory", handle_memory, METH_O,
     "memory(i): (Memory, shape) of output i, for finish functions; to be taken once."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef handle_getters[] = {
    {"received_splits", get_received_splits, NULL, "alltoall: rows from each member", NULL},
    {"last_joined", get_last_joined, NULL, "join: the rank that joined last", NULL},
    {"where", get_where, NULL, "the user's line that submitted, as file:line", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_methods, handle_methods},
    {Py_tp_getset, handle_getters},
    {Py_tp_repr, handle_repr},
    {Py_tp_dealloc, handle_dealloc},
    {Py_tp_doc, "One operation in flight, or its result."},
    {0, NULL},
};

PyType_Spec core_handle_spec = {
    .name = "horovod._core.Handle",
    .basicsize = sizeof(handle_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = handle_slots,
};
