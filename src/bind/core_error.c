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

// --- Where the user called -----------------------------------------------------------------------

// What is known of the code of a frame, so that a line submitting again and again is looked up
// once. Two codes at one place take turns.
typedef struct site {
    PyCodeObject *code; // held, so that its address stays its own
    bool ours;
    int at; // instruction that `text` is the line of, or -1
    char text[240];
} site_t;

#define N_SITES 64 // a power of two

// Does the code belong to the package, or stand between it and the user's, as PyTorch's backward()
// and Function.apply() do?
static bool is_ours(PyObject *file)
{
    static const char *const between[] = {"-packages/torch/", "/torch/autograd/function.py"};
    if (core.package == NULL || !PyUnicode_Check(file)) {
        return false;
    }
    if (PyUnicode_Tailmatch(file, core.package, 0, PY_SSIZE_T_MAX, -1) == 1) {
        return true;
    }
    const char *name = PyUnicode_AsUTF8AndSize(file, NULL);
    for (size_t i = 0; name != NULL && i < sizeof between / sizeof between[0]; i++) {
        if (strstr(name, between[i]) != NULL) {
            return true;
        }
    }
    return false;
}

// Takes over the reference to the code.
static site_t *site_of(PyCodeObject *code)
{
    static site_t sites[N_SITES]; // under the GIL
    site_t *site = &sites[((uintptr_t)code >> 6) & (N_SITES - 1)];
    if (site->code == code) {
        Py_DECREF((PyObject *)code);
        return site;
    }
    PyObject *file = PyObject_GetAttr((PyObject *)code, core.s_co_filename);
    PyCodeObject *before = site->code;
    site->code = code;
    site->ours = file != NULL && is_ours(file);
    site->at = -1;
    Py_XDECREF(file);
    Py_XDECREF((PyObject *)before);
    return site;
}

static int instruction_of(PyObject *frame)
{
    PyObject *at = PyObject_GetAttr(frame, core.s_f_lasti);
    int value = at != NULL ? (int)PyLong_AsLong(at) : -1;
    Py_XDECREF(at);
    return value;
}

static const char *line_of(site_t *site, PyObject *frame)
{
    int at = instruction_of(frame);
    if (at >= 0 && at == site->at) {
        return site->text;
    }
    site->text[0] = '\0';
    PyObject *file = PyObject_GetAttr((PyObject *)site->code, core.s_co_filename);
    const char *name = file != NULL ? PyUnicode_AsUTF8AndSize(file, NULL) : NULL;
    if (name != NULL) {
        int line = PyFrame_GetLineNumber((PyFrameObject *)frame);
        snprintf(site->text, sizeof site->text, "%s:%d", name, line);
        site->at = at;
    }
    Py_XDECREF(file);
    return site->text;
}

void core_where(char *where, size_t bytes)
{
    where[0] = '\0';
    PyObject *frame = (PyObject *)PyEval_GetFrame(); // none on threads of autograd
    Py_XINCREF(frame);
    while (frame != NULL && frame != Py_None) {
        site_t *site = site_of(PyFrame_GetCode((PyFrameObject *)frame));
        if (!site->ours) {
            const char *text = line_of(site, frame);
            size_t length = strnlen(text, bytes - 1);
            memcpy(where, text, length);
            where[length] = '\0';
            break;
        }
        PyObject *back = PyObject_GetAttr(frame, core.s_f_back);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    PyErr_Clear();
}
