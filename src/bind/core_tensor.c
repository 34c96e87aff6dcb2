// SPDX-License-Identifier: Apache-2.0
//
// core_tensor.c - where the memory of a tensor is, and its shape.
//
// Two kinds of object are understood: buffers (NumPy arrays, bytearray, memoryview), through the
// buffer protocol, and objects with data_ptr() and shape (PyTorch tensors). The caller has made
// sure of dense row-major memory on the host; for buffers the protocol refuses anything else.
#include "bind/core.h"

static bool check_dims(Py_ssize_t n_dims)
{
    if (n_dims < 0 || n_dims > HVD_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "a tensor has %zd dimensions; at most %d are allowed",
                     n_dims, HVD_MAX_DIMS);
        return false;
    }
    return true;
}

static bool describe_buffer(PyObject *tensor, bool writable, void **data_p, int *n_dims_p,
                            int64_t *shape, Py_buffer *view_p)
{
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(tensor, view_p, flags) != 0) {
        view_p->obj = NULL;
        return false;
    }
    if (!check_dims(view_p->ndim)) {
        PyBuffer_Release(view_p);
        view_p->obj = NULL;
        return false;
    }
    *data_p = view_p->buf;
    *n_dims_p = view_p->ndim;
    for (int d = 0; d < view_p->ndim; d++) {
        shape[d] = view_p->shape[d];
    }
    return true;
}

static bool read_shape(PyObject *tensor, int *n_dims_p, int64_t *shape)
{
    PyObject *size = PyObject_GetAttr(tensor, core.s_shape);
    if (size == NULL || !PyTuple_Check(size) || !check_dims(PyTuple_Size(size))) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "the shape of a tensor must be a tuple");
        }
        Py_XDECREF(size);
        return false;
    }
    *n_dims_p = (int)PyTuple_Size(size);
    for (int d = 0; d < *n_dims_p; d++) {
        shape[d] = PyLong_AsLongLong(PyTuple_GetItem(size, d));
    }
    Py_DECREF(size);
    return !PyErr_Occurred();
}

bool core_describe(PyObject *tensor, bool writable, void **data_p, int *n_dims_p,
                   int64_t shape[HVD_MAX_DIMS], Py_buffer *view_p)
{
    view_p->obj = NULL;
    if (PyObject_CheckBuffer(tensor)) {
        return describe_buffer(tensor, writable, data_p, n_dims_p, shape, view_p);
    }
    PyObject *address = PyObject_CallMethodObjArgs(tensor, core.s_data_ptr, NULL);
    if (address == NULL) {
        return false;
    }
    *data_p = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return !PyErr_Occurred() && read_shape(tensor, n_dims_p, shape);
}

static bool attribute_is(PyObject *object, PyObject *name, const PyObject *value)
{
    PyObject *found = PyObject_GetAttr(object, name);
    Py_XDECREF(found); // the objects asked for live as long as PyTorch
    return found == value;
}

// The GPU it is on, and the stream that the caller uses there, which has written it.
static bool locate_on_device(PyObject *tensor, hvd_request_t *request)
{
    if (core.current_stream == NULL || !attribute_is(tensor, core.s_is_cuda, Py_True)) {
        return false;
    }
    PyObject *number = PyObject_CallMethodObjArgs(tensor, core.s_get_device, NULL);
    long device = number != NULL ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    request->flags |= HVD_ON_DEVICE;
    request->device = (int)device;
    return device >= 0 && core_current_stream(request->device, &request->stream);
}

bool core_locate(PyObject *tensor, PyObject *strided, hvd_request_t *request)
{
    bool plain = false;
    if (attribute_is(tensor, core.s_layout, strided) &&
        (attribute_is(tensor, core.s_is_cpu, Py_True) || locate_on_device(tensor, request))) {
        PyObject *dense = PyObject_CallMethodObjArgs(tensor, core.s_is_contiguous, NULL);
        plain = dense == Py_True;
        Py_XDECREF(dense);
    }
    PyErr_Clear(); // what has no such attributes is not plain
    return plain;
}
