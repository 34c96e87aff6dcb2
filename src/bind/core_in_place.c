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
                    core_is_plain(tensor, self->strided);
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
    return read_request(self, &args, values[0], name, &request)
               ? core_submit_in_place(&request, values[0])
               : call_slow(self, values, names);
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
