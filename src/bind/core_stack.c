// SPDX-License-Identifier: Apache-2.0
//
// core_stack.c - where a Python thread is, for the flight recorder of the library.
//
// libhvd notes which thread submitted an operation, by the number Python knows it under as well
// (threading.get_ident()). When it dumps its recorder, its monitor thread comes here, waits for the
// GIL and asks the interpreter for that thread's stack. An interpreter that never lets go of the
// GIL therefore keeps the monitor thread, and nothing else.
#include "bind/core.h"

#include <string.h>

// Everything new here is given back by the caller of the function that made it.
static PyObject *stack_lines(uint64_t thread)
{
    PyObject *lines = NULL;
    PyObject *key = PyLong_FromUnsignedLongLong(thread);
    PyObject *sys = PyImport_ImportModule("sys");
    PyObject *traceback = PyImport_ImportModule("traceback");
    PyObject *frames = sys != NULL ? PyObject_CallMethod(sys, "_current_frames", NULL) : NULL;
    if (key != NULL && frames != NULL && traceback != NULL) {
        PyObject *frame = PyDict_GetItemWithError(frames, key); // borrowed; NULL: not a Python one
        if (frame != NULL) {
            lines = PyObject_CallMethod(traceback, "format_stack", "O", frame);
        }
    }
    Py_XDECREF(frames);
    Py_XDECREF(traceback);
    Py_XDECREF(sys);
    Py_XDECREF(key);
    return lines;
}

// The innermost frames come last: if there is no room for all, they are what is kept.
static size_t write_stack(uint64_t thread, char *text, size_t bytes)
{
    size_t written = 0;
    PyObject *lines = stack_lines(thread);
    PyObject *nothing = PyUnicode_FromString("");
    PyObject *whole = lines != NULL && nothing != NULL ? PyUnicode_Join(nothing, lines) : NULL;
    PyObject *utf8 = whole != NULL ? PyUnicode_AsEncodedString(whole, "utf-8", "replace") : NULL;
    char *at = NULL;
    Py_ssize_t length = 0;
    if (utf8 != NULL && PyBytes_AsStringAndSize(utf8, &at, &length) == 0) {
        written = (size_t)length < bytes ? (size_t)length : bytes;
        memcpy(text, at + ((size_t)length - written), written);
    }
    PyErr_Clear(); // nobody is there to hear of it
    Py_XDECREF(utf8);
    Py_XDECREF(whole);
    Py_XDECREF(nothing);
    Py_XDECREF(lines);
    return written;
}

size_t core_stack(void *arg, uint64_t thread, char *text, size_t bytes)
{
    (void)arg;
    if (!Py_IsInitialized()) {
        return 0;
    }
    PyGILState_STATE state = PyGILState_Ensure();
    size_t written = write_stack(thread, text, bytes);
    PyGILState_Release(state);
    return written;
}
