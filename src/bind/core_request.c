// SPDX-License-Identifier: Apache-2.0
//
// core_request.c - reads what Python says of a request, for everybody who submits one.
//
// submit() and InPlace.start() are called with keywords, which Python hands over as interned texts:
// each is found by its address, at the first look if the caller wrote them in the order below.
#include "bind/core.h"

#include <stdio.h>
#include <stdlib.h>

#define SERIES_ROOM 100

static const char *const keywords[] = {
    "op",     "name",    "dtype",  "reduce", "root",   "process_set", "prescale", "postscale",
    "inputs", "outputs", "splits", "waits",  "result", "finish",      "device",   "stream",
};
_Static_assert(sizeof keywords / sizeof keywords[0] == CORE_N_KEYWORDS, "those of core_args_t");

bool core_make_keywords(void)
{
    for (int i = 0; i < CORE_N_KEYWORDS; i++) {
        core.s_keywords[i] = PyUnicode_InternFromString(keywords[i]);
        if (core.s_keywords[i] == NULL) {
            return false;
        }
    }
    return true;
}

// The place of a keyword in core_args_t, searched from where it is expected; -1: none.
static int find_keyword(PyObject *keyword, int expected)
{
    for (int i = expected; i < CORE_N_KEYWORDS; i++) {
        if (core.s_keywords[i] == keyword) {
            return i;
        }
    }
    for (int i = 0; i < CORE_N_KEYWORDS; i++) { // in another order, or a text made at run time
        if (PyUnicode_Compare(core.s_keywords[i], keyword) == 0) {
            return i;
        }
    }
    return -1;
}

bool core_read_keywords(PyObject *const *values, PyObject *names, core_args_t *args)
{
    *args = (core_args_t){0};
    Py_ssize_t n = names != NULL ? PyTuple_Size(names) : 0;
    int expected = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        int found = find_keyword(name, expected);
        if (found < 0) {
            PyErr_Format(PyExc_TypeError, "a request has no keyword '%U'", name);
            return false;
        }
        args->by_keyword[found] = values[i];
        expected = found + 1;
    }
    return true;
}

static int as_int(PyObject *number, int otherwise)
{
    return core_is_given(number) ? (int)PyLong_AsLong(number) : otherwise;
}

static double as_factor(PyObject *number)
{
    return number != NULL ? PyFloat_AsDouble(number) : 1.0;
}

// A set is a ProcessSet or its number, which is None while the set is not registered. With an
// exception set if it is neither.
static int as_process_set(PyObject *set)
{
    PyObject *number = PyLong_Check(set) || set == Py_None
                           ? Py_NewRef(set)
                           : PyObject_GetAttr(set, core.s_process_set_id);
    int value = core_is_given(number) ? (int)PyLong_AsLong(number) : -1;
    if (number == Py_None) {
        core_raise(HVD_UNKNOWN_SET,
                   "Process set provided does not exist, or has not been registered.", "");
    }
    Py_XDECREF(number);
    return value;
}

// --- Operations without a name -------------------------------------------------------------------
// Ranks match them by the order of the calls, which threads keep only each for itself.

static _Thread_local bool counts_with_main;
static _Thread_local char series_of_thread[SERIES_ROOM];

PyObject *core_count_with_main_thread(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    counts_with_main = true;
    return Py_NewRef(Py_None);
}

// What common/threads.py makes of the calling thread; NULL: it counts with the main thread, or an
// exception is set.
static const char *series_of_caller(void)
{
    PyObject *threads = PyImport_ImportModule("horovod.common.threads");
    PyObject *series = threads != NULL ? PyObject_CallMethod(threads, "series", NULL) : NULL;
    const char *text = core_is_given(series) ? PyUnicode_AsUTF8AndSize(series, NULL) : NULL;
    if (text != NULL) {
        snprintf(series_of_thread, sizeof series_of_thread, "%s", text);
    }
    counts_with_main = series == Py_None;
    Py_XDECREF(series);
    Py_XDECREF(threads);
    return text != NULL ? series_of_thread : NULL;
}

static bool has_tensors(hvd_op_t op)
{
    return op != HVD_BARRIER && op != HVD_JOIN;
}

// --- Requests ------------------------------------------------------------------------------------

static uint64_t n_reductions; // under the GIL

PyObject *core_n_reductions(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    return PyLong_FromUnsignedLongLong(n_reductions);
}

bool core_read_request(const core_args_t *args, hvd_request_t *request)
{
    request->op = (hvd_op_t)as_int(args->op, (int)request->op);
    request->dtype = (hvd_dtype_t)as_int(args->dtype, (int)request->dtype);
    request->reduce = (hvd_reduce_t)as_int(args->reduce, (int)request->reduce);
    request->root = as_int(args->root, 0);
    request_set_scales(request, as_factor(args->prescale), as_factor(args->postscale));
    if (args->waits == Py_True) {
        request->flags |= HVD_WAITS;
    }
    n_reductions += request->op == HVD_ALLREDUCE || request->op == HVD_REDUCESCATTER;
    if (core_is_given(args->device)) {
        request->flags |= HVD_ON_DEVICE;
        request->device = as_int(args->device, 0);
        request->stream = core_is_given(args->stream) ? PyLong_AsVoidPtr(args->stream) : NULL;
    }
    if (core_is_given(args->name)) {
        request->name = PyUnicode_AsUTF8AndSize(args->name, NULL);
    } else if (!counts_with_main && has_tensors(request->op) && !PyErr_Occurred()) {
        request->series = series_of_caller();
    }
    if (args->process_set != NULL && !PyErr_Occurred()) {
        request->process_set = as_process_set(args->process_set);
    }
    return !PyErr_Occurred();
}

bool core_read_ints(PyObject *sequence, int32_t **values_p, int *n_p)
{
    Py_ssize_t n = PySequence_Size(sequence);
    int32_t *values = n >= 0 ? malloc((size_t)(n > 0 ? n : 1) * sizeof *values) : NULL;
    if (values == NULL) {
        return PyErr_Occurred() ? false : (PyErr_NoMemory(), false);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        long value = item != NULL ? PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (!PyErr_Occurred() && value != (int32_t)value) {
            PyErr_Format(PyExc_ValueError, "%ld at position %zd does not fit into 32 bits", value,
                         i);
        }
        if (PyErr_Occurred()) {
            free(values);
            return false;
        }
        values[i] = (int32_t)value;
    }
    *values_p = values;
    *n_p = (int)n;
    return true;
}
