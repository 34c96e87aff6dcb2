// SPDX-License-Identifier: Apache-2.0
//
// core_rendezvous.c - the rendezvous server of the library, for launchers and tests in Python.
//
// rendezvous_start() gives a capsule and the port; the server runs in a thread of its own until
// rendezvous_stop(), or until the capsule goes.
#include "bind/core.h"

#define CAPSULE_NAME "horovod.rendezvous"

static void stop_with_capsule(PyObject *capsule)
{
    hvd_rendezvous_t *server = PyCapsule_GetPointer(capsule, CAPSULE_NAME);
    if (server == NULL) {
        PyErr_Clear();
    } else if (PyCapsule_GetContext(capsule) == NULL) {
        hvd_rendezvous_stop(server);
    }
}

PyObject *core_rendezvous_start(PyObject *module, PyObject *args)
{
    (void)module;
    const char *address;
    int port;
    const char *secret;
    Py_ssize_t secret_bytes;
    if (!PyArg_ParseTuple(args, "ziy#", &address, &port, &secret, &secret_bytes)) {
        return NULL;
    }
    if (secret_bytes != 32) {
        return PyErr_Format(PyExc_ValueError, "the secret has %zd bytes instead of 32",
                            secret_bytes);
    }
    char text[HVD_TEXT_BYTES] = "";
    hvd_rendezvous_t *server = NULL;
    hvd_status_t status =
        hvd_rendezvous_start(address, port, (const uint8_t *)secret, &server, text, sizeof text);
    if (status != HVD_OK) {
        return core_raise(status, text, "");
    }
    PyObject *capsule = PyCapsule_New(server, CAPSULE_NAME, stop_with_capsule);
    if (capsule == NULL) {
        hvd_rendezvous_stop(server);
        return NULL;
    }
    return Py_BuildValue("(Ni)", capsule, hvd_rendezvous_port(server));
}

PyObject *core_rendezvous_stop(PyObject *module, PyObject *capsule)
{
    (void)module;
    hvd_rendezvous_t *server = PyCapsule_GetPointer(capsule, CAPSULE_NAME);
    if (server == NULL) {
        return NULL;
    }
    if (PyCapsule_GetContext(capsule) == NULL) {
        PyCapsule_SetContext(capsule, server); // stopped
        Py_BEGIN_ALLOW_THREADS
        hvd_rendezvous_stop(server);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}
