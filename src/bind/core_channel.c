// SPDX-License-Identifier: Apache-2.0
//
// core_channel.c - Channel: a socket between services in Python that has proved the job's secret;
// Listener: the port at which such sockets come in. See hvd_channel_open in hvd.h.
//
// Nothing here blocks, so the GIL is kept. The socket stays Python's: it must outlive the channel.
// A status becomes an exception: ConnectionError for a peer that is gone or may not come in,
// what core_raise says for the rest.
#include "bind/core.h"

#include <stdlib.h>

typedef struct py_channel {
    PyObject_HEAD
    hvd_channel_t *channel;
} py_channel_t;

static PyObject *raise_lost(hvd_status_t status, const char *text)
{
    if (status == HVD_PEER_LOST || status == HVD_UNAUTHENTICATED || status == HVD_PROTOCOL) {
        PyErr_SetString(PyExc_ConnectionError, text);
        return NULL;
    }
    return core_raise(status, text, "");
}

static bool is_secret(Py_ssize_t bytes)
{
    if (bytes != 32) {
        PyErr_Format(PyExc_ValueError, "the secret has %zd bytes instead of 32", bytes);
    }
    return bytes == 32;
}

static int channel_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    int fd, is_server;
    const char *secret;
    Py_ssize_t secret_bytes;
    static char *names[] = {"fd", "is_server", "secret", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "ipy#", names, &fd, &is_server, &secret,
                                     &secret_bytes)) {
        return -1;
    }
    if (!is_secret(secret_bytes)) {
        return -1;
    }
    char text[HVD_TEXT_BYTES] = "";
    hvd_channel_t *channel = NULL;
    hvd_status_t status =
        hvd_channel_open(fd, is_server != 0, (const uint8_t *)secret, &channel, text, sizeof text);
    if (status != HVD_OK) {
        raise_lost(status, text);
        return -1;
    }
    hvd_channel_close(((py_channel_t *)self)->channel);
    ((py_channel_t *)self)->channel = channel;
    return 0;
}

static void channel_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    hvd_channel_close(((py_channel_t *)self)->channel);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

static hvd_channel_t *opened(PyObject *self)
{
    hvd_channel_t *channel = ((py_channel_t *)self)->channel;
    if (channel == NULL) {
        PyErr_SetString(PyExc_ConnectionError, "the channel is closed");
    }
    return channel;
}

static PyObject *channel_shake(PyObject *self, PyObject *unused)
{
    (void)unused;
    hvd_channel_t *channel = opened(self);
    if (channel == NULL) {
        return NULL;
    }
    char text[HVD_TEXT_BYTES] = "";
    hvd_status_t status = hvd_channel_shake(channel, text, sizeof text);
    return status < 0 ? raise_lost(status, text) : PyBool_FromLong(status == HVD_OK);
}

static PyObject *channel_send(PyObject *self, PyObject *data)
{
    Py_buffer view;
    hvd_channel_t *channel = opened(self);
    if (channel == NULL || PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    char text[HVD_TEXT_BYTES] = "";
    int64_t n = hvd_channel_send(channel, view.buf, (size_t)view.len, text, sizeof text);
    PyBuffer_Release(&view);
    return n < 0 ? raise_lost((hvd_status_t)n, text) : PyLong_FromLongLong(n);
}

static PyObject *channel_recv(PyObject *self, PyObject *data)
{
    Py_buffer view;
    hvd_channel_t *channel = opened(self);
    if (channel == NULL || PyObject_GetBuffer(data, &view, PyBUF_WRITABLE) != 0) {
        return NULL;
    }
    char text[HVD_TEXT_BYTES] = "";
    int64_t n = hvd_channel_recv(channel, view.buf, (size_t)view.len, text, sizeof text);
    PyBuffer_Release(&view);
    return n < 0 ? raise_lost((hvd_status_t)n, text) : PyLong_FromLongLong(n);
}

static PyObject *channel_wants_write(PyObject *self, PyObject *unused)
{
    (void)unused;
    hvd_channel_t *channel = opened(self);
    return channel != NULL ? PyBool_FromLong(hvd_channel_wants_write(channel)) : NULL;
}

static PyObject *channel_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    hvd_channel_close(((py_channel_t *)self)->channel);
    ((py_channel_t *)self)->channel = NULL;
    Py_RETURN_NONE;
}

static PyMethodDef channel_methods[] = {
    {"shake", channel_shake, METH_NOARGS, "shake() -> bool: has the peer proved the secret?"},
    {"send", channel_send, METH_O, "send(data) -> bytes taken; b'' moves what was taken before"},
    {"recv", channel_recv, METH_O, "recv(buffer) -> bytes received; 0: none are there"},
    {"wants_write", channel_wants_write, METH_NOARGS, "wants_write() -> bool"},
    {"close", channel_close, METH_NOARGS, "close(): forgets the keys; the socket stays open"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot channel_slots[] = {
    {Py_tp_doc, "Channel(fd, is_server, secret): a socket that proves the job's secret."},
    {Py_tp_init, channel_init},
    {Py_tp_dealloc, channel_dealloc},
    {Py_tp_methods, channel_methods},
    {0, NULL},
};

PyType_Spec core_channel_spec = {
    .name = "horovod._core.Channel",
    .basicsize = sizeof(py_channel_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = channel_slots,
};

// --- Listener ------------------------------------------------------------------------------------

typedef struct py_listener {
    PyObject_HEAD
    hvd_listener_t *listener;
} py_listener_t;

static int listener_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    py_listener_t *mine = (py_listener_t *)self;
    const char *secret;
    Py_ssize_t secret_bytes;
    static char *names[] = {"secret", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y#", names, &secret, &secret_bytes) ||
        !is_secret(secret_bytes)) {
        return -1;
    }
    char text[HVD_TEXT_BYTES] = "";
    hvd_listener_t *listener = NULL;
    hvd_status_t status = hvd_listener_open((const uint8_t *)secret, &listener, text, sizeof text);
    if (status != HVD_OK) {
        core_raise(status, text, "");
        return -1;
    }
    hvd_listener_close(mine->listener);
    mine->listener = listener;
    return 0;
}

static void listener_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    hvd_listener_close(((py_listener_t *)self)->listener);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

static hvd_listener_t *listening(PyObject *self)
{
    hvd_listener_t *listener = ((py_listener_t *)self)->listener;
    if (listener == NULL) {
        PyErr_SetString(PyExc_ConnectionError, "the listener is closed");
    }
    return listener;
}

static PyObject *listener_port(PyObject *self, PyObject *unused)
{
    (void)unused;
    hvd_listener_t *listener = listening(self);
    return listener != NULL ? PyLong_FromLong(hvd_listener_port(listener)) : NULL;
}

static PyObject *listener_fileno(PyObject *self, PyObject *unused)
{
    (void)unused;
    hvd_listener_t *listener = listening(self);
    return listener != NULL ? PyLong_FromLong(hvd_listener_fd(listener)) : NULL;
}

static PyObject *listener_accept(PyObject *self, PyObject *unused)
{
    (void)unused;
    int fd;
    hvd_channel_t *channel;
    hvd_listener_t *listener = listening(self);
    if (listener == NULL) {
        return NULL;
    }
    PyObject *made = PyType_GenericAlloc(core.channel_type, 0); // first: later nothing can fail
    if (made == NULL || hvd_listener_accept(listener, &fd, &channel) != HVD_OK) {
        Py_XDECREF(made);
        return made != NULL ? Py_NewRef(Py_None) : NULL;
    }
    ((py_channel_t *)made)->channel = channel;
    return Py_BuildValue("iN", fd, made);
}

static PyObject *listener_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    hvd_listener_close(((py_listener_t *)self)->listener);
    ((py_listener_t *)self)->listener = NULL;
    Py_RETURN_NONE;
}

static PyMethodDef listener_methods[] = {
    {"port", listener_port, METH_NOARGS, "port() -> int: where it listens, on every interface"},
    {"fileno", listener_fileno, METH_NOARGS, "fileno() -> int: readable when accept() has work"},
    {"accept", listener_accept, METH_NOARGS,
     "accept() -> (fd, Channel) of a peer that has proved the secret; None: nobody"},
    {"close", listener_close, METH_NOARGS, "close(): listens no more"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot listener_slots[] = {
    {Py_tp_doc, "Listener(secret): where sockets come in that prove the job's secret."},
    {Py_tp_init, listener_init},
    {Py_tp_dealloc, listener_dealloc},
    {Py_tp_methods, listener_methods},
    {0, NULL},
};

PyType_Spec core_listener_spec = {
    .name = "horovod._core.Listener",
    .basicsize = sizeof(py_listener_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = listener_slots,
};
