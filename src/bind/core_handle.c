// SPDX-License-Identifier: Apache-2.0
//
// core_handle.c - the Handle of an operation, and waiting for it.
//
// A Handle owns its submission, which keeps the tensors of the operation alive: there is no table
// beside it. If it is dropped while the operation is in flight, the submission goes on without it.
//
// wait() returns what submit() was told to return: `output`, or finish(handle) if a function was
// given, called once, with the GIL, by the thread that waits. Waits go in slices, so that signals
// (Ctrl-C) are answered and shutdown() can get everybody out.
#include "bind/core.h"

#include <stdlib.h>
#include <string.h>

#define WAIT_SLICE_MS 100
#define SHUT_DOWN "Horovod has been shut down."

// --- Streams -------------------------------------------------------------------------------------

bool core_current_stream(int device, void **stream_p)
{
    PyObject *address = core.current_stream != NULL
                            ? PyObject_CallFunction(core.current_stream, "i", device)
                            : PyErr_Format(PyExc_RuntimeError, "nobody told the current stream");
    *stream_p = address != NULL ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    return !PyErr_Occurred();
}

PyObject *core_set_current_stream(PyObject *module, PyObject *function)
{
    (void)module;
    PyObject *before = core.current_stream;
    core.current_stream = Py_NewRef(function);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

// --- Making --------------------------------------------------------------------------------------

handle_t *core_handle_new(core_job_t *job, hvd_op_t op, const core_args_t *args)
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
    handle->device = -1;
    handle->output = Py_NewRef(args->result != NULL ? args->result : Py_None);
    handle->finish = core_is_given(args->finish) ? Py_NewRef(args->finish) : NULL;
    handle->received_splits = NULL;
    handle->last_joined = -1;
    handle->status = HVD_OK;
    handle->text = NULL;
    core_where(handle->where, sizeof handle->where);
    return handle;
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
        core_submission_free(handle->flight);
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

// Results that finish() fetches to a device, the library keeps until then.
static bool is_kept(const handle_t *handle)
{
    return handle->device >= 0 && handle->flight != NULL && handle->flight->n_outputs > 0;
}

// Its results are under way to the device: the stream that the caller uses now waits for them. The
// allocator gives the tensors' memory to whoever comes next in the stream they were made in: if
// that is another one, they are kept until all has landed.
static hvd_status_t order_stream(handle_t *handle)
{
    void *stream;
    if (!core_current_stream(handle->device, &stream)) {
        PyErr_Clear();
        return hvd_wait(handle->job->ctx, handle->flight->id, HVD_FOREVER);
    }
    handle->flight->lingers = stream != handle->stream;
    return hvd_wait_on(handle->job->ctx, handle->flight->id, stream, HVD_FOREVER);
}

// The operation has ended: keeps what it brought and lets the library forget it, unless finish()
// will fetch its results to a device.
static void settle(handle_t *handle, const hvd_result_t *result)
{
    hvd_handle_t id = handle->flight->id;
    hvd_status_t status = result->status;
    if (handle->device >= 0 && status == HVD_OK) {
        status = order_stream(handle);
    }
    if (status != result->status) {
        settle_failure(handle, status, NULL);
    } else if (result->status != HVD_OK) {
        settle_failure(handle, result->status, result->text);
    } else {
        handle->last_joined = result->last_joined;
        if (result->n_splits > 0) {
            handle->received_splits = splits_as_tuple(result);
        }
        handle->state = ARRIVED;
    }
    if (!is_kept(handle) && (handle->flight == NULL || !handle->flight->lingers)) {
        hvd_release(handle->job->ctx, id);
    }
}

// What became of the operation; HVD_IN_PROGRESS: nothing yet.
static hvd_result_t result_of(const handle_t *handle)
{
    hvd_result_t result;
    if (!of_this_life(handle)) {
        return (hvd_result_t){.status = HVD_SHUTDOWN, .text = SHUT_DOWN};
    }
    hvd_status_t status = hvd_result(handle->job->ctx, handle->flight->id, &result);
    return status == HVD_OK ? result : (hvd_result_t){.status = status, .text = ""};
}

// Waits until the operation has ended, and keeps what it brought; false with an exception when a
// signal came or time was up. Most handles of a step have ended when the first has: nobody need let
// go of the GIL for them.
static bool await(handle_t *handle, double timeout_s)
{
    void *stream = NULL; // of a device, where to be queued is as good as done
    if (handle->device >= 0 && handle->state == IN_FLIGHT &&
        !core_current_stream(handle->device, &stream)) {
        return false;
    }
    core_job_t *job = handle->job;
    int64_t left_ms = timeout_s < 0 ? -1 : (int64_t)(timeout_s * 1000.0);
    hvd_result_t result;
    while (handle->state == IN_FLIGHT && (result = result_of(handle)).status == HVD_IN_PROGRESS &&
           !job->closing) {
        int64_t slice_ms = left_ms >= 0 && left_ms < WAIT_SLICE_MS ? left_ms : WAIT_SLICE_MS;
        hvd_ctx_t *ctx = job->ctx;
        hvd_handle_t id = handle->flight->id;
        hvd_status_t status;
        CORE_ENTER(job)
        status = handle->device >= 0 ? hvd_wait_on(ctx, id, stream, slice_ms)
                                     : hvd_wait(ctx, id, slice_ms);
        CORE_LEAVE(job)
        if (status != HVD_TIMEOUT) {
            continue;
        }
        if (PyErr_CheckSignals() != 0) {
            return false;
        }
        if (left_ms >= 0 && (left_ms -= slice_ms) <= 0) {
            core_raise(HVD_TIMEOUT, NULL, "");
            return false;
        }
    }
    if (handle->state != IN_FLIGHT) { // another thread may have waited too
        return true;
    }
    if (!of_this_life(handle)) {
        settle_failure(handle, result.status, result.text);
    } else if (job->closing) {
        core_raise(HVD_SHUTDOWN, SHUT_DOWN, handle->where);
        return false;
    } else {
        settle(handle, &result);
    }
    return true;
}

static bool bring_home(handle_t *handle, double timeout_s)
{
    if (handle->state != IN_FLIGHT || !core_is_profiled()) {
        return await(handle, timeout_s);
    }
    core_range_t range = core_range_begin("wait", handle->op, NULL);
    bool is_home = await(handle, timeout_s);
    core_range_end(&range);
    return is_home;
}

static void forget_flight(handle_t *handle)
{
    if (handle->flight == NULL) {
        return;
    }
    if (handle->flight->lingers && of_this_life(handle)) {
        core_submission_drop(handle->flight);
        handle->flight = NULL;
        return;
    }
    if (is_kept(handle) && of_this_life(handle)) {
        hvd_release(handle->job->ctx, handle->flight->id);
    }
    core_submission_free(handle->flight);
    handle->flight = NULL;
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
        forget_flight(handle);
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

static bool has_result(const handle_t *handle, long i)
{
    if (handle->flight == NULL || handle->state == IN_FLIGHT || i < 0 ||
        i >= handle->flight->n_outputs || handle->device < 0) {
        PyErr_Format(PyExc_IndexError, "the handle has no output %ld on a device", i);
        return false;
    }
    return true;
}

static PyObject *handle_shape(PyObject *self, PyObject *index)
{
    const handle_t *handle = (handle_t *)self;
    long i = PyLong_AsLong(index);
    if (PyErr_Occurred() || !has_result(handle, i)) {
        return NULL;
    }
    struct output *output = &handle->flight->outputs[i];
    void *data;
    hvd_status_t status =
        hvd_output(handle->job->ctx, handle->flight->id, (int)i, &data, output->shape);
    return status == HVD_OK ? shape_as_tuple(output) : core_raise(status, NULL, handle->where);
}

static PyObject *handle_fetch(PyObject *self, PyObject *args)
{
    const handle_t *handle = (handle_t *)self;
    int i;
    unsigned long long to;
    void *stream;
    if (!PyArg_ParseTuple(args, "iK", &i, &to) || !has_result(handle, i) ||
        !core_current_stream(handle->device, &stream)) {
        return NULL;
    }
    hvd_status_t status =
        hvd_fetch(handle->job->ctx, handle->flight->id, i, (void *)(uintptr_t)to, stream);
    return status == HVD_OK ? Py_NewRef(Py_None) : core_raise(status, NULL, handle->where);
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
        return PyErr_Format(PyExc_IndexError,
                            "the handle has no output %ld, or it was taken before", i);
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
        core_submission_drop(flight);
    } else {
        forget_flight(handle);
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
    {"shape", handle_shape, METH_O, "shape(i): of output i, for one on a device."},
    {"fetch", handle_fetch, METH_VARARGS,
     "fetch(i, address): copies output i to the device, in the order of the current stream."},
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
