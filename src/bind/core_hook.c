// SPDX-License-Identifier: Apache-2.0
//
// core_hook.c - the GradientHook type: submits a parameter's gradient the moment it is complete.
//
// PyTorch calls it once for each parameter and backward pass, so it does in C what happens every
// time: counts the pass and, at the last one, submits the allreduce of param.grad in place. What is
// out of the ordinary (compression, groups, sparse or strided gradients, devices that the core does
// not know) is handed to the Python function `slow`, which submits in its own way and returns a
// handle.
//
// Runs under the GIL, on the thread that runs the backward pass. The optimizer owns the hooks.
#include "bind/core.h"

#include <stddef.h>
#include <structmember.h>

typedef struct hook {
    PyObject_HEAD
    PyObject *parameter;   // its name, as the user gave it
    PyObject *torch_dtype; // of the parameter
    PyObject *strided;     // the layout of dense tensors
    PyObject *slow;        // slow(hook, param) -> handle
    PyObject *handle;      // of the submission in flight, or None
    PyObject *name;        // of the request, which points into it
    hvd_request_t request; // what every submission is alike in
    char always_slow;
    int passes; // backward passes that make a gradient
    int left;   // of those
} hook_t;

// A dense gradient of the parameter's own dtype, on the host or a GPU? Otherwise the slow way
// decides.
static bool is_ordinary(const hook_t *hook, PyObject *grad, hvd_request_t *request)
{
    PyObject *dtype = PyObject_GetAttr(grad, core.s_dtype);
    bool same = dtype == hook->torch_dtype;
    Py_XDECREF(dtype);
    PyErr_Clear();
    return same && core_locate(grad, hook->strided, request);
}

// Adds to the exception, if it is about a name in use, where a gradient may have got it from.
static void explain_duplicate(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *status = PyObject_GetAttrString(error, "status");
    const char *duplicate = hvd_status_name(HVD_DUPLICATE_NAME);
    if (status != NULL && PyUnicode_Check(status) &&
        PyUnicode_CompareWithASCIIString(status, duplicate) == 0) {
        Py_XDECREF(PyObject_CallMethod(
            error, "add_note", "s",
            "Optimizers whose gradients one backward pass computes need different names for them: "
            "hvd.DistributedOptimizer(..., named_parameters=[(\"a.\" + name, p) for name, p in "
            "model.named_parameters()])"));
    }
    Py_XDECREF(status);
    PyErr_Clear();
    PyErr_Restore(type, error, traceback);
}

static PyObject *submit_grad(hook_t *hook, PyObject *param)
{
    PyObject *grad = PyObject_GetAttr(param, core.s_grad);
    if (grad == NULL) {
        return NULL;
    }
    PyObject *handle;
    hvd_request_t request = hook->request;
    if (hook->always_slow || !is_ordinary(hook, grad, &request)) {
        handle = PyObject_CallFunctionObjArgs(hook->slow, (PyObject *)hook, param, NULL);
    } else {
        core_args_t args = {.inputs = grad, .outputs = grad, .result = grad};
        handle = core_start(&request, &args);
    }
    if (handle == NULL) {
        explain_duplicate();
    }
    Py_DECREF(grad);
    return handle;
}

static PyObject *hook_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    hook_t *hook = (hook_t *)self;
    if (PyTuple_Size(args) < 1) {
        PyErr_SetString(PyExc_TypeError, "a gradient hook is called with its parameter");
        return NULL;
    }
    if (hook->left <= 0) {
        return PyErr_Format(
            PyExc_AssertionError,
            "Gradients were computed more than backward_passes_per_step times before call to "
            "step(). Increase backward_passes_per_step to accumulate gradients locally (parameter "
            "'%U').",
            hook->parameter);
    }
    if (--hook->left == 0) {
        PyObject *handle = submit_grad(hook, PyTuple_GetItem(args, 0));
        if (handle == NULL) {
            return NULL;
        }
        PyObject *before = hook->handle;
        hook->handle = handle;
        Py_DECREF(before);
    }
    Py_RETURN_NONE;
}

// GradientHook(parameter, torch_dtype, strided, slow, always_slow, passes; those of a request)
static PyObject *hook_new(PyTypeObject *type, PyObject *positional, PyObject *keywords)
{
    static char *words[] = {"parameter", "torch_dtype", "strided", "slow",   "always_slow",
                            "passes",    "name",        "dtype",   "reduce", "process_set",
                            "prescale",  "postscale",   NULL};
    PyObject *parameter, *torch_dtype, *strided, *slow;
    int always_slow, passes;
    core_args_t args = {0};
    hvd_request_t request = {.op = HVD_ALLREDUCE};
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "$UOOOpiUOOOOO", words, &parameter,
                                     &torch_dtype, &strided, &slow, &always_slow, &passes,
                                     &args.name, &args.dtype, &args.reduce, &args.process_set,
                                     &args.prescale, &args.postscale) ||
        !core_read_request(&args, &request)) {
        return NULL;
    }
    hook_t *hook = PyObject_GC_New(hook_t, type);
    if (hook == NULL) {
        return NULL;
    }
    hook->parameter = Py_NewRef(parameter);
    hook->torch_dtype = Py_NewRef(torch_dtype);
    hook->strided = Py_NewRef(strided);
    hook->slow = Py_NewRef(slow);
    hook->handle = Py_NewRef(Py_None);
    hook->name = Py_NewRef(args.name);
    hook->request = request;
    hook->always_slow = always_slow != 0;
    hook->passes = hook->left = passes;
    PyObject_GC_Track((PyObject *)hook);
    return (PyObject *)hook;
}

static int hook_traverse(PyObject *self, visitproc visit, void *arg)
{
    hook_t *hook = (hook_t *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(hook->slow);
    Py_VISIT(hook->handle);
    return 0;
}

static int hook_clear(PyObject *self)
{
    Py_CLEAR(((hook_t *)self)->slow);
    return 0;
}

static void hook_dealloc(PyObject *self)
{
    hook_t *hook = (hook_t *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(hook->parameter);
    Py_XDECREF(hook->torch_dtype);
    Py_XDECREF(hook->strided);
    Py_XDECREF(hook->slow);
    Py_XDECREF(hook->handle);
    Py_XDECREF(hook->name);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMemberDef hook_members[] = {
    {"parameter", T_OBJECT, offsetof(hook_t, parameter), READONLY, "name of the parameter"},
    {"handle", T_OBJECT, offsetof(hook_t, handle), 0, "handle in flight, or None"},
    {"always_slow", T_BOOL, offsetof(hook_t, always_slow), 0, "never submits by itself"},
    {"passes", T_INT, offsetof(hook_t, passes), 0, "backward passes that make a gradient"},
    {"left", T_INT, offsetof(hook_t, left), 0, "passes until the gradient is complete"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_new, hook_new},
    {Py_tp_call, hook_call},
    {Py_tp_traverse, hook_traverse},
    {Py_tp_clear, hook_clear},
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_members, hook_members},
    {Py_tp_doc, "Called with a parameter whose gradient was accumulated; submits it."},
    {0, NULL},
};

PyType_Spec core_hook_spec = {
    .name = "horovod._core.GradientHook",
    .basicsize = sizeof(hook_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = hook_slots,
};
