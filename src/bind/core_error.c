// SPDX-License-Identifier: Apache-2.0
//
// core_error.c - from a status and its sentence to a Python exception, and where the user called.
//
// The scope decides the class: what is wrong with one call is a ValueError, what failed on its way
// is horovod.common.exceptions.HorovodInternalError, which elastic training catches. The message
// has the core's sentence, the user's line that submitted, and what to try.
#include "bind/core.h"

#include <stdio.h>
#include <string.h>

static PyObject *class_of(hvd_status_t status)
{
    switch (status) {
    case HVD_NOT_INITIALIZED:
        return core.not_initialized_error;
    case HVD_TIMEOUT:
        return PyExc_TimeoutError;
    case HVD_UNSUPPORTED: // users know this one as a failed operation
        return core.internal_error;
    default:
        return hvd_status_scope(status) == HVD_SCOPE_ARGUMENT ? PyExc_ValueError
                                                              : core.internal_error;
    }
}

static void set_text(PyObject *error, const char *name, const char *text)
{
    PyObject *value = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (value == NULL || PyObject_SetAttrString(error, name, value) != 0) {
        PyErr_Clear();
    }
    Py_XDECREF(value);
}

PyObject *core_raise(hvd_status_t status, const char *text, const char *where)
{
    char message[HVD_TEXT_BYTES + 1024];
    const char *hint = hvd_status_hint(status);
    bool has_text = text != NULL && text[0] != '\0';
    bool argument = hvd_status_scope(status) == HVD_SCOPE_ARGUMENT;
    snprintf(message, sizeof message, "%s%s%s%s%s", has_text ? text : hvd_status_text(status),
             where[0] != '\0' ? "\n  submitted at " : "", where,
             hint[0] != '\0' && !argument ? "\n  try: " : "", argument ? "" : hint);
    PyObject *type = class_of(status);
    PyObject *sentence = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
    PyObject *error = sentence != NULL ? PyObject_CallFunctionObjArgs(type, sentence, NULL) : NULL;
    Py_XDECREF(sentence);
    if (error != NULL) {
        set_text(error, "status", hvd_status_name(status));
        set_text(error, "where", where);
        PyErr_SetObject(type, error);
        Py_DECREF(error);
    }
    return NULL;
}

// Does the code of this frame belong to the package, or stand between two of its frames, as
// PyTorch's Function.apply does in some versions? *file_p is a new reference.
static bool is_ours(PyFrameObject *frame, PyObject **file_p)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    *file_p = PyObject_GetAttr((PyObject *)code, core.s_co_filename);
    Py_DECREF(code);
    if (*file_p == NULL || core.package == NULL || !PyUnicode_Check(*file_p)) {
        return false;
    }
    if (PyUnicode_Tailmatch(*file_p, core.package, 0, PY_SSIZE_T_MAX, -1) == 1) {
        return true;
    }
    const char *name = PyUnicode_AsUTF8AndSize(*file_p, NULL);
    return name != NULL && strstr(name, "/torch/autograd/function.py") != NULL;
}

void core_where(char *where, size_t bytes)
{
    where[0] = '\0';
    PyObject *frame = (PyObject *)PyEval_GetFrame(); // none on threads of autograd
    Py_XINCREF(frame);
    while (frame != NULL && frame != Py_None) {
        PyObject *file;
        if (!is_ours((PyFrameObject *)frame, &file)) {
            const char *name = file != NULL ? PyUnicode_AsUTF8AndSize(file, NULL) : NULL;
            if (name != NULL) {
                int line = PyFrame_GetLineNumber((PyFrameObject *)frame);
                snprintf(where, bytes, "%s:%d", name, line);
            }
            Py_XDECREF(file);
            break;
        }
        Py_DECREF(file);
        PyObject *back = PyObject_GetAttr(frame, core.s_f_back);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    PyErr_Clear();
}
