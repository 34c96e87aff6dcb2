// SPDX-License-Identifier: Apache-2.0
//
// core_hook.c - the GradientHook type: submits a parameter's gradient the moment it is complete.
//
// PyTorch calls it once for each parameter and backward pass, so it does in C what happens every
// time: counts the pass and, at the last one, submits the allreduce of param.grad in place. What is
// out of the ordinary (compression, groups, sparse or strided gradients, other devices) is handed
// to the Python function `slow`, which submits in its own way and returns a handle.
//
// Runs under the GIL, on the thread that runs the backward pass. The optimizer owns the hooks.
#include "bind/core.h"

#include <stddef.h>
#include <structmember.h>

typedef struct hook {
    PyObject_HEAD
    PyObject *name;
    PyObject *dtype;  // of the parameter, as PyTorch's object
    PyObject *slow;   // slow(hook, param) -> handle
    PyObject *handle; // of the submission in flight, or None
    PyObject *submit_args; // all arguments of submit(), with holes for the gradient
    char always_slow;
    int passes; // backward passes that make a gradient
    int left;   // of those
} hook_t;

enum { GRAD_INPUT = 8, GRAD_OUTPUT = 9, GRAD_RESULT = 12, N_SUBMIT_ARGS = 14 };

// A dense gradient in host memory, of the parameter's own dtype? Otherwise the slow way decides.
static bool is_ordinary(const hook_t *hook, PyObject *grad)
{
    PyObject *dtype = PyObject_GetAttr(grad, core.s_dtype);
    PyObject *is_cpu = dtype == hook->dtype ? PyObject_GetAttr(grad, core.s_is_cpu) : NULL;
    PyObject *dense =
        is_cpu == Py_True ? PyObject_CallMethodObjArgs(grad, core.s_is_contiguous, NULL) : NULL;
    bool ordinary = dense == Py_True;
    Py_XDECREF(dtype);
    Py_XDECREF(is_cpu);
    Py_XDECREF(dense);
    PyErr_Clear(); // sparse tensors have no contiguity
    return ordinary;
}

static PyObject *submit_grad(hook_t *hook, PyObject *param)
{
    PyObject *grad = PyObject_GetAttr(param, core.s_grad);
    if (grad == NULL) {
        return NULL;
    }
    PyObject *handle;
    if (hook->always_slow || !is_ordinary(hook, grad)) {
        handle = PyObject_CallFunctionObjArgs(hook->slow, (PyObject *)hook, param, NULL);
    } else {
        PyObject *args[N_SUBMIT_ARGS];
        for (int i = 0; i < N_SUBMIT_ARGS; i++) {
            args[i] = PyTuple_GetItem(hook->submit_args, i);
        }
        args[GRAD_INPUT] = args[GRAD_OUTPUT] = args[GRAD_RESULT] = grad;
        handle = core_submit(NULL, args, N_SUBMIT_ARGS);
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
            hook->name);
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

// GradientHook(name, dtype, slow, submit_args, always_slow, passes)
static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    PyObject *name, *dtype, *slow, *submit_args;
    int always_slow, passes;
    if (!PyArg_ParseTuple(args, "OOOOpi", &name, &dtype, &slow, &submit_args, &always_slow,
                          &passes)) {
        return NULL;
    }
    if (!PyTuple_Check(submit_args) || PyTuple_Size(submit_args) != N_SUBMIT_ARGS) {
        PyErr_SetString(PyExc_TypeError, "submit_args must be the arguments of submit()");
        return NULL;
    }
    hook_t *hook = PyObject_GC_New(hook_t, type);
    if (hook == NULL) {
        return NULL;
    }
    hook->name = Py_NewRef(name);
    hook->dtype = Py_NewRef(dtype);
    hook->slow = Py_NewRef(slow);
    hook->submit_args = Py_NewRef(submit_args);
    hook->handle = Py_NewRef(Py_None);
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
    Py_XDECREF(hook->name);
    Py_XDECREF(hook->dtype);
    Py_XDECREF(hook->slow);
    Py_XDECREF(hook->handle);
    Py_XDECREF(hook->submit_args);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMemberDef hook_members[] = {
    {"name", T_OBJECT, offsetof(hook_t, name), READONLY, "name of the parameter"},
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
