// SPDX-License-Identifier: Apache-2.0
//
// core_memory.c - the Memory type: an output whose size only the agreement of all ranks told.
//
// The engine takes plain memory for it, without the GIL; a Memory owns that memory and lends it
// through the buffer protocol, so a framework can use it as a tensor without a copy. It lives as
// long as anything that was made from it.
#include "bind/core.h"

#include <stdlib.h>

typedef struct memory {
    PyObject_HEAD
    void *data;
    size_t bytes;
} memory_t;

PyObject *core_memory_new(void *data, size_t bytes)
{
    memory_t *memory = PyObject_New(memory_t, core.memory_type);
    if (memory == NULL) {
        free(data);
        return NULL;
    }
    memory->data = data;
    memory->bytes = bytes;
    return (PyObject *)memory;
}

static int memory_get_buffer(PyObject *self, Py_buffer *view, int flags)
{
    memory_t *memory = (memory_t *)self;
    static char nothing[1]; // a buffer of no bytes still wants an address
    void *data = memory->data != NULL ? memory->data : nothing;
    return PyBuffer_FillInfo(view, self, data, (Py_ssize_t)memory->bytes, 0, flags);
}

static void memory_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    free(((memory_t *)self)->data);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot memory_slots[] = {
    {Py_bf_getbuffer, memory_get_buffer},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_doc, "Bytes that an operation brought; lends them as a writable buffer."},
    {0, NULL},
};

PyType_Spec core_memory_spec = {
    .name = "horovod._core.Memory",
    .basicsize = sizeof(memory_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = memory_slots,
};
