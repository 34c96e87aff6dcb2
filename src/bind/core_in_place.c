// SPDX-License-Identifier: Apache-2.0
//
// core_in_place.c - the InPlace type: what a collective on one PyTorch tensor in place costs, in C.
//
// Scripts call allreduce_async_() once for every tensor, so what each call would do in Python is
// done here: the default reduction, the name's prefix, the number of the dtype, and the question
// whether the tensor's own memory will do. Everything out of the ordinary is handed to the Python
// function `slow`, with the same arguments.
//
// Runs under the GIL. The Python module owns one InPlace for each operation and keeps its method
// start(), a C function Python calls without making a tuple.
#include "bind/core.h"

#include <string.h>

typedef struct in_place {
    PyObject_HEAD
    hvd_op_t op;
    hvd_reduce_t reduce; // where the caller names none
    PyObject *prefix;    // of names, as "allreduce."
    PyObject *dtypes;    // dict: PyTorch's dtype -> number
    PyObject *strided;   // the layout of dense tensors
    PyObject *slow;
} in_place_t;

enum {
    ARG_TENSOR,
    ARG_AVERAGE,
    ARG_NAME,
    ARG_REDUCE,
    ARG_ROOT,
    ARG_PRESCALE,
    ARG_POSTSCALE,
    ARG_PROCESS_SET,
    ARG_WAITS,
    N_ARGS
};

#define NAME_BYTES 512

// The name with its prefix, in the buffer; false if it is longer, or no text.
static bool read_name(const in_place_t *self, PyObject *name, char buffer[NAME_BYTES])
{
    if (!PyUnicode_Check(name)) {
        return false;
    }
    Py_ssize_t prefix_length, length;
    const char *prefix = PyUnicode_AsUTF8AndSize(self->prefix, &prefix_length);
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    if (prefix == NULL || text == NULL || prefix_length + length >= NAME_BYTES) {
        return false;
    }
    memcpy(buffer, prefix, (size_t)prefix_length);
    memcpy(buffer + prefix_length, text, (size_t)length + 1);
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

static bool read_set(PyObject *process_set, int *id_p)
{
    PyObject *id = PyObject_GetAttr(process_set, core.s_process_set_id);
    bool read = id != NULL && PyLong_Check(id);
    *id_p = read ? (int)PyLong_AsLong(id) : 0;
    Py_XDECREF(id);
    return read;
}

// True if the request is an ordinary one and complete; without an exception otherwise.
static bool read_request(const in_place_t *self, PyObject *const *args, char name[NAME_BYTES],
                         hvd_request_t *request)
{
    *request = (hvd_request_t){
        .op = self->op,
        .name = args[ARG_NAME] != Py_None ? name : NULL,
        .reduce = args[ARG_REDUCE] == Py_None ? self->reduce
                                              : (hvd_reduce_t)PyLong_AsLong(args[ARG_REDUCE]),
        .root = (int)PyLong_AsLong(args[ARG_ROOT]),
        .prescale = PyFloat_AsDouble(args[ARG_PRESCALE]),
        .postscale = PyFloat_AsDouble(args[ARG_POSTSCALE]),
        .flags = args[ARG_WAITS] == Py_True ? HVD_WAITS : 0,
    };
    if (request->prescale != 1.0 || request->postscale != 1.0) {
        request->flags |= HVD_SCALED;
    }
    bool ordinary = !PyErr_Occurred() && args[ARG_AVERAGE] == Py_None &&
                    (args[ARG_REDUCE] == Py_None || PyLong_CheckExact(args[ARG_REDUCE])) &&
                    request->reduce != HVD_ADASUM &&
                    (request->name == NULL || read_name(self, args[ARG_NAME], name)) &&
                    read_set(args[ARG_PROCESS_SET], &request->process_set) &&
                    read_dtype(self, args[ARG_TENSOR], &request->dtype) &&
                    core_is_plain(args[ARG_TENSOR], self->strided);
    PyErr_Clear(); // the slow way says what is wrong
    return ordinary;
}

static PyObject *in_place_start(PyObject *object, PyObject *const *args, Py_ssize_t n_args)
{
    const in_place_t *self = (const in_place_t *)object;
    if (n_args != N_ARGS) {
        return PyErr_Format(PyExc_TypeError, "start() takes %d arguments, not %zd", N_ARGS, n_args);
    }
    char name[NAME_BYTES];
    hvd_request_t request;
    if (read_request(self, args, name, &request)) {
        return core_submit_in_place(&request, args[ARG_TENSOR]);
    }
    return PyObject_CallFunctionObjArgs(self->slow, args[ARG_TENSOR], args[ARG_AVERAGE],
                                        args[ARG_NAME], args[ARG_REDUCE], args[ARG_ROOT],
                                        args[ARG_PRESCALE], args[ARG_POSTSCALE],
                                        args[ARG_PROCESS_SET], args[ARG_WAITS], NULL);
}

// InPlace(op, reduce, prefix, dtypes, strided, slow)
static PyObject *in_place_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    int op, reduce;
    PyObject *prefix, *dtypes, *strided, *slow;
    if (!PyArg_ParseTuple(args, "iiUO!OO", &op, &reduce, &prefix, &PyDict_Type, &dtypes, &strided,
                          &slow)) {
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
    {"start", (PyCFunction)(void (*)(void))in_place_start, METH_FASTCALL,
     "start(tensor, average, name, reduce, root, prescale, postscale, process_set, waits)\n"
     "-> Handle, whose wait() returns the tensor; or what slow() of the same arguments returns."},
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
