// SPDX-License-Identifier: Apache-2.0
//
// core.h - what the files of the Python extension horovod._core share.
//
// The extension is the only door between Python and libhvd: it finds the memory of tensors,
// submits, waits with the GIL released and turns statuses into exceptions. It knows no framework: a
// tensor is whatever has data_ptr() and shape (PyTorch), or a buffer (NumPy arrays, bytearray).
//
// Threads: everything here runs under the GIL except the waits, which count themselves in n_inside
// of their job; shutdown waits until nobody is inside. One process is one rank, so there is one
// context, that of job 0, whose address other bindings get from context(). Groups of ranks that are
// no process set of it may form jobs of their own: open().
#ifndef HVD_BIND_CORE_H
#define HVD_BIND_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bind/request.h"

#include <sys/types.h>

#if PY_VERSION_HEX < 0x030a0000 // what Python 3.9 lacks
#define Py_TPFLAGS_DISALLOW_INSTANTIATION 0
#define PyModule_AddObjectRef(module, name, value)                                                 \
    PyModule_AddObject(module, name, (Py_INCREF(value), value))

static inline PyObject *Py_NewRef(PyObject *object)
{
    Py_INCREF(object);
    return object;
}

static inline PyObject *Py_XNewRef(PyObject *object)
{
    Py_XINCREF(object);
    return object;
}
#endif

// What may be said of a submission, by keyword; NULL: nothing, which None is too, but for a process
// set. References are borrowed from the caller.
#define CORE_N_KEYWORDS 16
typedef union core_args {
    struct {
        PyObject *op, *name, *dtype, *reduce, *root, *process_set, *prescale, *postscale;
        PyObject *inputs, *outputs; // a tensor, or a tuple of them; without outputs memory is made
        PyObject *splits, *waits;
        PyObject *result, *finish; // what wait() returns: the result, or finish(handle)
        PyObject *device, *stream; // of tensors on a GPU: its number, the stream that wrote them
    };
    PyObject *by_keyword[CORE_N_KEYWORDS]; // in the order core_request.c has them in
} core_args_t;

// What the engine may still touch after its handle was dropped: tensors, and memory taken for
// outputs. Freed once the operation is done, under the GIL.
typedef struct submission {
    struct submission *next; // among those whose handle was dropped
    struct core_job *job;
    hvd_handle_t id;
    bool lingers;      // until it has landed on the device, whoever lets go of it
    PyObject *inputs;  // tensors, kept alive
    PyObject *results; // and the outputs
    Py_buffer *views;  // of those that are buffers
    int n_views;
    size_t element_bytes;
    int n_outputs;
    struct output {
        void *data; // NULL: empty, or not allocated here
        int n_dims;
        int64_t shape[HVD_MAX_DIMS];
    } outputs[];
} submission_t;

// A job this process is a rank of.
typedef struct core_job {
    hvd_ctx_t *ctx; // NULL: none
    uint64_t life;  // differs from one context to the next: handles of an earlier are recognised
    int n_inside;   // threads in the library without the GIL
    bool closing;   // shutdown has begun: waits give up
} core_job_t;

// What submit() returns: one operation in flight, or its result.
enum handle_state { IN_FLIGHT, ARRIVED, DONE, FAILED };

typedef struct handle {
    PyObject_HEAD
    enum handle_state state;
    hvd_op_t op;
    core_job_t *job;
    uint64_t life;        // of the job
    submission_t *flight; // NULL once done
    int device;           // of its tensors; -1: the host
    void *stream;         // in which they were submitted there
    PyObject *output;
    PyObject *finish; // NULL: none, or already called
    PyObject *received_splits;
    int last_joined;
    hvd_status_t status;
    char *text;      // of a failure
    char where[240]; // the user's line that submitted it
} handle_t;

// Around calls that may block: others may run meanwhile, but the context stays.
// clang-format off
#define CORE_ENTER(job)                                                                            \
    (job)->n_inside++;                                                                             \
    Py_BEGIN_ALLOW_THREADS
#define CORE_LEAVE(job)                                                                            \
    Py_END_ALLOW_THREADS                                                                           \
    (job)->n_inside--;
// clang-format on

#define CORE_JOBS 256
// What Python knows as the number of a process set is job << CORE_SET_BITS | set.
#define CORE_SET_BITS 20

typedef struct core {
    core_job_t jobs[CORE_JOBS]; // [0]: the one of init()
    uint64_t n_lives;
    pid_t pid;             // who called init; a forked child must not touch the contexts
    submission_t *dropped; // in flight, but nobody holds the handle
    PyObject *package;     // folder of the package: frames below it are not the user's
    PyObject *internal_error;
    PyObject *not_initialized_error;
    bool (*is_profiled)(void); // NULL: by nobody; else whether a range is worth its time now
    bool (*torch_looks)(void);
    PyObject *record_function; // of PyTorch's profiler
    int (*nvtx_push)(const char *text);
    int (*nvtx_pop)(void);
    PyObject *current_stream; // current_stream(device): the stream's address; NULL: no GPU is used
    PyTypeObject *handle_type;
    PyTypeObject *memory_type;
    PyTypeObject *channel_type;
    PyTypeObject *listener_type;
    PyTypeObject *hook_type;
    PyTypeObject *in_place_type;
    // Names of attributes, made once.
    PyObject *s_data_ptr, *s_shape, *s_f_back, *s_co_filename;
    PyObject *s_grad, *s_dtype, *s_is_cpu, *s_is_cuda, *s_get_device, *s_is_contiguous, *s_layout;
    PyObject *s_process_set_id, *s_f_lasti;
    PyObject *s_keywords[CORE_N_KEYWORDS];
} core_t;

extern core_t core;

// The context of this process, or NULL with an exception set.
hvd_ctx_t *core_context(void);
// The job a process set belongs to, or NULL with an exception set; the number is left as it is
// there.
core_job_t *core_job_of(int *process_set);

// core_error.c: sets the exception a status is told by; text may be NULL, where may be "".
PyObject *core_raise(hvd_status_t status, const char *text, const char *where);
// Writes "file:line" of the user's innermost frame, or "".
void core_where(char *where, size_t bytes);

// core_tensor.c: memory and shape of one tensor. *view_p is to be released if its obj is not NULL.
bool core_describe(PyObject *tensor, bool writable, void **data_p, int *n_dims_p,
                   int64_t shape[HVD_MAX_DIMS], Py_buffer *view_p);
// Is this PyTorch tensor, of the layout `strided`, dense memory that C can use as it is? Says in
// the request where, if that is not the host.
bool core_locate(PyObject *tensor, PyObject *strided, hvd_request_t *request);

static inline bool core_is_given(const PyObject *value)
{
    return value != NULL && value != Py_None;
}

// core_request.c
bool core_make_keywords(void);
// Keywords, as a METH_FASTCALL function gets them: their names, or NULL, and as many values.
bool core_read_keywords(PyObject *const *values, PyObject *names, core_args_t *args);
// Writes what the keywords say over what the request has. Its name lives as long as args->name, its
// series until the thread asks again.
bool core_read_request(const core_args_t *args, hvd_request_t *request);
PyObject *core_count_with_main_thread(PyObject *module, PyObject *ignored);
PyObject *core_n_reductions(PyObject *module, PyObject *ignored);

// A sequence of numbers, as ranks or splits; *values_p is to be freed.
bool core_read_ints(PyObject *sequence, int32_t **values_p, int *n_p);

// core_submit.c: hands the operation to the library, with the tensors that `args` names; the rest
// of the request is filled, and may be written to. A new Handle, or NULL with an exception set.
PyObject *core_start(hvd_request_t *request, const core_args_t *args);
PyObject *core_submit(PyObject *module, PyObject *const *values, Py_ssize_t n_positional,
                      PyObject *names);
void core_submission_free(submission_t *submission);
// Frees it when the library is done with it.
void core_submission_drop(submission_t *submission);
void core_sweep_dropped(void);
extern PyType_Spec core_in_place_spec;

// core_handle.c: a handle of nothing yet, or NULL with an exception set.
handle_t *core_handle_new(core_job_t *job, hvd_op_t op, const core_args_t *args);
PyObject *core_wait_all(PyObject *module, PyObject *handles);
PyObject *core_set_current_stream(PyObject *module, PyObject *function);
// The stream that the calling thread uses on the device; false with an exception set.
bool core_current_stream(int device, void **stream_p);
extern PyType_Spec core_handle_spec;

// core_range.c: what profilers see of this thread, between the two.
typedef struct core_range {
    PyObject *opened;
    bool is_pushed;
} core_range_t;
core_range_t core_range_begin(const char *what, hvd_op_t op, const char *name);
void core_range_end(core_range_t *range);
PyObject *core_set_ranges(PyObject *module, PyObject *args);
PyObject *core_profile_start(PyObject *module, PyObject *args);

static inline bool core_is_profiled(void)
{
    return core.is_profiled != NULL && core.is_profiled();
}

// core_hook.c
extern PyType_Spec core_hook_spec;

// core_memory.c: takes over `data`.
PyObject *core_memory_new(void *data, size_t bytes);
extern PyType_Spec core_memory_spec;

// core_channel.c
extern PyType_Spec core_channel_spec, core_listener_spec;

// core_stack.c: a hvd_stack_fn, and what it needs for a program that keeps the GIL, with the GIL.
void core_stack_open(void);
size_t core_stack(void *arg, uint64_t thread, char *text, size_t bytes);

// core_rendezvous.c
PyObject *core_rendezvous_start(PyObject *module, PyObject *args);
PyObject *core_rendezvous_stop(PyObject *module, PyObject *capsule);

#endif
