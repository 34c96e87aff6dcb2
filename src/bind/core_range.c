// SPDX-License-Identifier: Apache-2.0
//
// core_range.c - ranges around submissions and waits, for profilers that are looking; this rank's
// own timeline for a profile.
//
// Two kinds of them: PyTorch's, which is asked by a function of its library whether it looks at
// this thread, and sees a record_function(); and those that know NVTX, whose library is there only
// where they have brought it. Nobody looks: one pointer is read, or that function called.
// Under the GIL; begun and ended by the same thread.
#include "bind/core.h"

#include <stdio.h>

static bool always(void)
{
    return true;
}

// set_ranges(looks, record_function, push, pop): addresses, or 0.
PyObject *core_set_ranges(PyObject *module, PyObject *args)
{
    (void)module;
    Py_ssize_t looks, push, pop;
    PyObject *record_function;
    if (!PyArg_ParseTuple(args, "nOnn", &looks, &record_function, &push, &pop)) {
        return NULL;
    }
    PyObject *before = core.record_function;
    core.record_function = record_function == Py_None ? NULL : Py_NewRef(record_function);
    Py_XDECREF(before);
    core.torch_looks = (bool (*)(void))looks;
    core.nvtx_push = (int (*)(const char *))push;
    core.nvtx_pop = (int (*)(void))pop;
    core.is_profiled = core.nvtx_push != NULL ? always : core.torch_looks;
    Py_RETURN_NONE;
}

core_range_t core_range_begin(const char *what, hvd_op_t op, const char *name)
{
    core_range_t range = {0};
    char text[256];
    snprintf(text, sizeof text, "horovod.%s %s%s%s", what, hvd_op_name(op), name != NULL ? " " : "",
             name != NULL ? name : "");
    if (core.nvtx_push != NULL) {
        core.nvtx_push(text);
        range.is_pushed = true;
    }
    if (core.record_function != NULL && core.torch_looks != NULL && core.torch_looks()) {
        PyObject *opened = PyObject_CallFunction(core.record_function, "s", text);
        PyObject *entered = opened != NULL ? PyObject_CallMethod(opened, "__enter__", NULL) : NULL;
        range.opened = entered != NULL ? Py_NewRef(opened) : NULL;
        Py_XDECREF(opened);
        Py_XDECREF(entered);
        PyErr_Clear(); // a profiler that has trouble is no reason for the operation to fail
    }
    return range;
}

// An exception that is set stays.
void core_range_end(core_range_t *range)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (range->opened != NULL) {
        Py_XDECREF(
            PyObject_CallMethod(range->opened, "__exit__", "OOO", Py_None, Py_None, Py_None));
        Py_CLEAR(range->opened);
        PyErr_Clear();
    }
    if (range->is_pushed) {
        core.nvtx_pop();
    }
    PyErr_Restore(type, error, traceback);
}

PyObject *core_profile_start(PyObject *module, PyObject *args)
{
    (void)module;
    const char *path;
    hvd_ctx_t *ctx = core_context();
    if (ctx == NULL || !PyArg_ParseTuple(args, "s", &path)) {
        return NULL;
    }
    char text[HVD_TEXT_BYTES] = "";
    hvd_status_t status;
    CORE_ENTER(&core.jobs[0])
    status = hvd_profile_start(ctx, path, text, sizeof text);
    CORE_LEAVE(&core.jobs[0])
    return Py_BuildValue("(ss)", hvd_status_name(status), text);
}
