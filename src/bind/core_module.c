// SPDX-License-Identifier: Apache-2.0
//
// core_module.c - horovod._core: the context of this process, and every question about it.
//
// Methods are thin: arguments in, one call of hvd.h, a value or an exception out. Whatever may wait
// for other ranks releases the GIL. The Python packages under horovod/ are the only callers; what
// users see is written there.
#include "bind/core.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

core_t core;

hvd_ctx_t *core_context(void)
{
    if (core.jobs[0].ctx == NULL) {
        core_raise(HVD_NOT_INITIALIZED, "Horovod has not been initialized; use hvd.init().", "");
    }
    return core.jobs[0].ctx;
}

core_job_t *core_job_of(int *process_set)
{
    unsigned number = (unsigned)*process_set >> CORE_SET_BITS;
    if (number == 0 || *process_set < 0) { // a set no job has is refused by the library
        return core_context() != NULL ? &core.jobs[0] : NULL;
    }
    if (number >= CORE_JOBS || core.jobs[number].ctx == NULL) {
        core_raise(HVD_SHUTDOWN, "The group of ranks has been closed.", "");
        return NULL;
    }
    *process_set &= (1 << CORE_SET_BITS) - 1;
    return &core.jobs[number];
}

// --- Life ----------------------------------------------------------------------------------------

typedef struct rank_sets {
    int n;
    int **ranks;
    int *sizes;
} rank_sets_t;

static void sets_free(rank_sets_t *sets)
{
    for (int i = 0; sets->ranks != NULL && i < sets->n; i++) {
        free(sets->ranks[i]);
    }
    free(sets->ranks);
    free(sets->sizes);
}

static bool read_sets(PyObject *sequence, rank_sets_t *sets)
{
    *sets = (rank_sets_t){0};
    Py_ssize_t n = PySequence_Size(sequence);
    if (n < 0) {
        return false;
    }
    sets->ranks = calloc((size_t)n + 1, sizeof *sets->ranks);
    sets->sizes = calloc((size_t)n + 1, sizeof *sets->sizes);
    if (sets->ranks == NULL || sets->sizes == NULL) {
        PyErr_NoMemory();
        sets_free(sets);
        return false;
    }
    sets->n = (int)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        bool read = item != NULL && core_read_ints(item, &sets->ranks[i], &sets->sizes[i]);
        Py_XDECREF(item);
        if (!read) {
            sets_free(sets);
            return false;
        }
    }
    return true;
}

// Joins a job; the GIL is let go of meanwhile.
static bool join_job(core_job_t *job, const hvd_options_t *options)
{
    char text[HVD_TEXT_BYTES] = "";
    hvd_ctx_t *ctx = NULL;
    hvd_status_t status;
    Py_BEGIN_ALLOW_THREADS
    status = hvd_init(options, &ctx, text, sizeof text);
    Py_END_ALLOW_THREADS
    if (status != HVD_OK) {
        core_raise(status, text, "");
        return false;
    }
    core_stack_open();
    hvd_set_stack_source(ctx, core_stack, NULL);
    *job = (core_job_t){.ctx = ctx, .life = ++core.n_lives};
    return true;
}

static void let_others_run(void)
{
    Py_BEGIN_ALLOW_THREADS
    usleep(1000);
    Py_END_ALLOW_THREADS
}

static void leave_job(core_job_t *job)
{
    hvd_ctx_t *ctx = job->ctx;
    if (ctx == NULL || job->closing) {
        return;
    }
    job->closing = true;
    Py_BEGIN_ALLOW_THREADS
    hvd_stop(ctx);
    Py_END_ALLOW_THREADS
    while (job->n_inside > 0) { // what they were in has ended
        let_others_run();
    }
    job->ctx = NULL; // now nobody can come any more
    Py_BEGIN_ALLOW_THREADS
    hvd_shutdown(ctx);
    Py_END_ALLOW_THREADS
    job->closing = false;
    core_sweep_dropped();
}

static PyObject *init(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *process_sets;
    unsigned long long comm = 0;
    if (!PyArg_ParseTuple(args, "O|K", &process_sets, &comm)) {
        return NULL;
    }
    if (core.pid != getpid()) {
        memset(core.jobs, 0, sizeof core.jobs); // of the parent, which goes on using them
        core.dropped = NULL;
    }
    while (core.jobs[0].closing && core.jobs[0].ctx == NULL) { // a shutdown of another thread
        let_others_run();
    }
    if (core.jobs[0].ctx != NULL) {
        Py_RETURN_NONE;
    }
    rank_sets_t sets;
    if (!read_sets(process_sets, &sets)) {
        return NULL;
    }
    hvd_options_t options = {
        .process_sets = (const int *const *)sets.ranks,
        .process_set_sizes = sets.sizes,
        .n_process_sets = sets.n,
        .mpi_comm = (uintptr_t)comm,
    };
    bool joined = join_job(&core.jobs[0], &options);
    sets_free(&sets);
    if (!joined) {
        return NULL;
    }
    core.pid = getpid();
    Py_RETURN_NONE;
}

// Another job, described by an environment of its own: a tuple of "NAME=value".
static PyObject *open_job(PyObject *module, PyObject *env)
{
    (void)module;
    int number = 1;
    while (number < CORE_JOBS && (core.jobs[number].ctx != NULL || core.jobs[number].closing)) {
        number++;
    }
    if (core_context() == NULL || !PyTuple_Check(env) || number == CORE_JOBS) {
        return PyErr_Occurred()
                   ? NULL
                   : PyErr_Format(PyExc_ValueError,
                                  "open() takes a tuple, and at most %d groups can be open",
                                  CORE_JOBS - 1);
    }
    Py_ssize_t n = PyTuple_Size(env);
    const char **variables = calloc((size_t)n + 1, sizeof *variables);
    if (variables == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        variables[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(env, i), NULL);
        if (variables[i] == NULL) {
            free(variables);
            return NULL;
        }
    }
    core_job_t *job = &core.jobs[number];
    hvd_options_t options = {.env = variables};
    job->closing = true; // nobody else's while it is being joined
    bool joined = join_job(job, &options);
    job->closing = false;
    free(variables);
    return joined ? PyLong_FromLong((long)number << CORE_SET_BITS) : NULL;
}

static PyObject *close_job(PyObject *module, PyObject *set_object)
{
    (void)module;
    int set = (int)PyLong_AsLong(set_object);
    if (PyErr_Occurred()) {
        return NULL;
    }
    unsigned number = (unsigned)set >> CORE_SET_BITS;
    if (number > 0 && number < CORE_JOBS && core.pid == getpid()) {
        leave_job(&core.jobs[number]);
    }
    Py_RETURN_NONE;
}

static PyObject *shutdown(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    for (int i = CORE_JOBS; i-- > 0 && core.pid == getpid();) {
        leave_job(&core.jobs[i]);
    }
    Py_RETURN_NONE;
}

static PyObject *leave_because(PyObject *module, PyObject *text)
{
    (void)module;
    bool is_ours = core.jobs[0].ctx != NULL && core.pid == getpid() && !core.jobs[0].closing;
    const char *error = PyUnicode_AsUTF8AndSize(text, NULL);
    if (error == NULL) {
        return NULL;
    }
    if (!is_ours) {
        Py_RETURN_NONE;
    }
    return PyBool_FromLong(hvd_leave_because(core.jobs[0].ctx, error) == HVD_OK);
}

static PyObject *is_initialized(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(core.jobs[0].ctx != NULL && core.pid == getpid());
}

static PyObject *context(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromVoidPtr(core.jobs[0].ctx);
}

static PyObject *health(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    hvd_ctx_t *ctx = core_context();
    if (ctx == NULL) {
        return NULL;
    }
    char text[HVD_TEXT_BYTES] = "";
    hvd_status_t status = hvd_health(ctx, text, sizeof text);
    return Py_BuildValue("(ss)", hvd_status_name(status), text);
}

static PyObject *settle(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    hvd_ctx_t *ctx = core_context();
    if (ctx == NULL) {
        return NULL;
    }
    hvd_status_t status;
    Py_BEGIN_ALLOW_THREADS
    status = hvd_settle(ctx, HVD_FOREVER);
    Py_END_ALLOW_THREADS
    if (status != HVD_OK) {
        return core_raise(status, NULL, "");
    }
    Py_RETURN_NONE;
}

static PyObject *gpu(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    hvd_gpu_t found;
    hvd_gpu(core.jobs[0].ctx, &found);
    return Py_BuildValue("(siis)", found.driver, found.driver_version, found.nccl_version,
                         found.why_not);
}

// --- Who am I ------------------------------------------------------------------------------------

#define QUESTION(name)                                                                             \
    static PyObject *name(PyObject *module, PyObject *unused)                                      \
    {                                                                                              \
        (void)module;                                                                              \
        (void)unused;                                                                              \
        hvd_ctx_t *ctx = core_context();                                                           \
        return ctx != NULL ? PyLong_FromLong(hvd_##name(ctx)) : NULL;                              \
    }

QUESTION(rank)
QUESTION(size)
QUESTION(local_rank)
QUESTION(local_size)
QUESTION(cross_rank)
QUESTION(cross_size)
QUESTION(mpi_threads)

static PyObject *is_homogeneous(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    hvd_ctx_t *ctx = core_context();
    return ctx != NULL ? PyBool_FromLong(hvd_is_homogeneous(ctx)) : NULL;
}

static PyObject *config(PyObject *module, PyObject *name)
{
    (void)module;
    hvd_ctx_t *ctx = core_context();
    const char *env_name = ctx != NULL ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    if (env_name == NULL) {
        return NULL;
    }
    char value[HVD_TEXT_BYTES] = "";
    const char *origin = "";
    hvd_status_t status = hvd_config(ctx, env_name, value, sizeof value, &origin);
    return status == HVD_OK ? Py_BuildValue("(ss)", value, origin) : core_raise(status, NULL, "");
}

// --- Process sets --------------------------------------------------------------------------------

static PyObject *process_set_add(PyObject *module, PyObject *sequence)
{
    (void)module;
    hvd_ctx_t *ctx = core_context();
    int *ranks;
    int n;
    if (ctx == NULL || !core_read_ints(sequence, &ranks, &n)) {
        return NULL;
    }
    char text[HVD_TEXT_BYTES] = "";
    int id = -1;
    hvd_status_t status;
    CORE_ENTER(&core.jobs[0])
    status = hvd_process_set_add(ctx, ranks, n, &id, text, sizeof text);
    CORE_LEAVE(&core.jobs[0])
    free(ranks);
    return status == HVD_OK ? PyLong_FromLong(id) : core_raise(status, text, "");
}

static PyObject *process_set_remove(PyObject *module, PyObject *id_object)
{
    (void)module;
    hvd_ctx_t *ctx = core_context();
    int id = ctx != NULL ? (int)PyLong_AsLong(id_object) : 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    char text[HVD_TEXT_BYTES] = "";
    hvd_status_t status;
    CORE_ENTER(&core.jobs[0])
    status = hvd_process_set_remove(ctx, id, text, sizeof text);
    CORE_LEAVE(&core.jobs[0])
    if (status != HVD_OK) {
        return core_raise(status, text, "");
    }
    Py_RETURN_NONE;
}

static PyObject *ints_as_list(const int *values, int n)
{
    PyObject *list = PyList_New(n);
    for (int i = 0; list != NULL && i < n; i++) {
        PyList_SetItem(list, i, PyLong_FromLong(values[i]));
    }
    return list;
}

static PyObject *process_set_ids(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    hvd_ctx_t *ctx = core_context();
    if (ctx == NULL) {
        return NULL;
    }
    int n = hvd_process_set_count(ctx);
    int *ids = malloc((size_t)n * sizeof *ids);
    if (ids == NULL) {
        return PyErr_NoMemory();
    }
    hvd_status_t status = hvd_process_set_ids(ctx, ids, n);
    PyObject *list = status == HVD_OK ? ints_as_list(ids, n) : core_raise(status, NULL, "");
    free(ids);
    return list;
}

static PyObject *process_set_ranks(PyObject *module, PyObject *id_object)
{
    (void)module;
    hvd_ctx_t *ctx = core_context();
    int id = ctx != NULL ? (int)PyLong_AsLong(id_object) : 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    int n = hvd_process_set_size(ctx, id);
    if (n < 0) {
        return core_raise((hvd_status_t)n, NULL, "");
    }
    int *ranks = malloc((size_t)n * sizeof *ranks);
    if (ranks == NULL) {
        return PyErr_NoMemory();
    }
    hvd_status_t status = hvd_process_set_ranks(ctx, id, ranks, n);
    PyObject *list = status == HVD_OK ? ints_as_list(ranks, n) : core_raise(status, NULL, "");
    free(ranks);
    return list;
}

// --- Seeing inside -------------------------------------------------------------------------------

static PyObject *timeline_start(PyObject *module, PyObject *args)
{
    (void)module;
    const char *path;
    int mark_cycles;
    hvd_ctx_t *ctx = core_context();
    if (ctx == NULL || !PyArg_ParseTuple(args, "sp", &path, &mark_cycles)) {
        return NULL;
    }
    char text[HVD_TEXT_BYTES] = "";
    hvd_status_t status;
    CORE_ENTER(&core.jobs[0])
    status = hvd_timeline_start(ctx, path, mark_cycles != 0, text, sizeof text);
    CORE_LEAVE(&core.jobs[0])
    return Py_BuildValue("(ss)", hvd_status_name(status), text);
}

static PyObject *timeline_stop(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    hvd_ctx_t *ctx = core_context();
    if (ctx == NULL) {
        return NULL;
    }
    hvd_status_t status;
    CORE_ENTER(&core.jobs[0])
    status = hvd_timeline_stop(ctx);
    CORE_LEAVE(&core.jobs[0])
    return PyUnicode_FromString(hvd_status_name(status));
}

// Of a number, or None.
static bool read_number(PyObject *object, double *value, const double **value_p)
{
    *value = object != Py_None ? PyFloat_AsDouble(object) : 0;
    *value_p = object != Py_None ? value : NULL;
    return !PyErr_Occurred();
}

static PyObject *report(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *step_object, *loss_object, *samples_object;
    const double *loss_p, *samples_p;
    double loss, samples;
    hvd_ctx_t *ctx = core_context();
    if (ctx == NULL ||
        !PyArg_ParseTuple(args, "OOO", &step_object, &loss_object, &samples_object) ||
        !read_number(loss_object, &loss, &loss_p) ||
        !read_number(samples_object, &samples, &samples_p)) {
        return NULL;
    }
    int64_t step = step_object != Py_None ? (int64_t)PyLong_AsLongLong(step_object) : 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    hvd_status_t status = hvd_report(ctx, step_object != Py_None ? &step : NULL, loss_p, samples_p);
    return status == HVD_OK ? Py_NewRef(Py_None) : core_raise(status, NULL, "");
}

static PyObject *metrics(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    hvd_ctx_t *ctx = core_context();
    if (ctx == NULL) {
        return NULL;
    }
    size_t bytes = hvd_metrics(ctx, NULL, 0) + 4096; // numbers may grow until it is read again
    char *text = malloc(bytes);
    if (text == NULL) {
        return PyErr_NoMemory();
    }
    hvd_metrics(ctx, text, bytes);
    PyObject *string = PyUnicode_FromString(text);
    free(text);
    return string;
}

static PyObject *version(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(hvd_version());
}

// --- The module ----------------------------------------------------------------------------------

static PyMethodDef methods[] = {
    {"init", init, METH_VARARGS,
     "init(process_sets, comm=0): joins the job; static sets as lists of ranks; handle of an MPI\n"
     "communicator with the ranks of the job."},
    {"shutdown", shutdown, METH_NOARGS, "shutdown(): leaves the job, and those of open()."},
    {"leave_because", leave_because, METH_O,
     "leave_because(error): this process is about to end because of it. False: that is a\n"
     "consequence of another rank's end; None: there is no job to leave."},
    {"open", open_job, METH_O,
     "open(environment) -> process set: joins another job, whose ranks form a group and are\n"
     "numbered from 0. environment: a tuple of NAME=value."},
    {"close", close_job, METH_O, "close(process set): leaves a job of open()."},
    {"is_initialized", is_initialized, METH_NOARGS, "is_initialized() -> bool"},
    {"context", context, METH_NOARGS, "context(): address of the hvd_ctx_t, for other bindings."},
    {"settle", settle, METH_NOARGS,
     "settle(): waits until what was launched on the device has landed there; raises if not well."},
    {"gpu", gpu, METH_NOARGS,
     "gpu(): (driver, its version, NCCL's version, why there is none), as found here."},
    {"health", health, METH_NOARGS, "health(): (status name, sentence)."},
    {"rank", rank, METH_NOARGS, "rank() -> int"},
    {"size", size, METH_NOARGS, "size() -> int"},
    {"local_rank", local_rank, METH_NOARGS, "local_rank() -> int"},
    {"local_size", local_size, METH_NOARGS, "local_size() -> int"},
    {"cross_rank", cross_rank, METH_NOARGS, "cross_rank() -> int"},
    {"cross_size", cross_size, METH_NOARGS, "cross_size() -> int"},
    {"mpi_threads", mpi_threads, METH_NOARGS, "mpi_threads() -> -1 without MPI, else 0 or 1"},
    {"is_homogeneous", is_homogeneous, METH_NOARGS, "is_homogeneous() -> bool"},
    {"config", config, METH_O, "config(name): (value, origin) of a knob."},
    {"process_set_add", process_set_add, METH_O, "process_set_add(ranks) -> id; collective."},
    {"process_set_remove", process_set_remove, METH_O, "process_set_remove(id); collective."},
    {"process_set_ids", process_set_ids, METH_NOARGS, "process_set_ids() -> list"},
    {"process_set_ranks", process_set_ranks, METH_O, "process_set_ranks(id) -> list"},
    {"timeline_start", timeline_start, METH_VARARGS,
     "timeline_start(path, mark_cycles) -> (status name, sentence)"},
    {"profile_start", core_profile_start, METH_VARARGS,
     "profile_start(path) -> (status name, sentence)"},
    {"set_ranges", core_set_ranges, METH_VARARGS,
     "set_ranges(looks, record_function, push, pop): how profilers are told of operations"},
    {"timeline_stop", timeline_stop, METH_NOARGS, "timeline_stop() -> status name"},
    {"report", report, METH_VARARGS, "report(step, loss, samples): numbers, or None"},
    {"metrics", metrics, METH_NOARGS, "metrics() -> the metrics of this rank as text"},
    {"version", version, METH_NOARGS, "version() of libhvd"},
    {"submit", (PyCFunction)(void (*)(void))core_submit, METH_FASTCALL | METH_KEYWORDS,
     "submit(*, op, name=None, dtype, reduce=SUM, root=0, process_set=0, prescale=1.0,\n"
     "postscale=1.0, inputs=None, outputs=None, splits=None, waits=False, result=None,\n"
     "finish=None) -> Handle\n\n"
     "process_set: a ProcessSet or its number.\n"
     "inputs: a tensor, a tuple of them, or None; outputs: the same, or None to allocate.\n"
     "The handle's wait() returns result, or finish(handle)."},
    {"set_current_stream", core_set_current_stream, METH_O,
     "set_current_stream(function): function(device) gives the address of the current stream"},
    {"wait_all", core_wait_all, METH_O, "wait_all(handles) -> list of results"},
    {"n_reductions", core_n_reductions, METH_NOARGS,
     "n_reductions() -> how many submissions of this process were to be reduced"},
    {"count_with_main_thread", core_count_with_main_thread, METH_NOARGS,
     "count_with_main_thread(): what the calling thread submits without a name is counted with\n"
     "the main thread's from now on; both keep an order, the same on all ranks."},
    {"rendezvous_start", core_rendezvous_start, METH_VARARGS,
     "rendezvous_start(address, port, secret) -> (server, port)"},
    {"rendezvous_stop", core_rendezvous_stop, METH_O, "rendezvous_stop(server)"},
    {NULL, NULL, 0, NULL},
};

typedef struct constant {
    const char *name;
    int value;
} constant_t;

static const constant_t constants[] = {
    {"AVERAGE", HVD_AVERAGE}, {"SUM", HVD_SUM},           {"ADASUM", HVD_ADASUM},
    {"MIN", HVD_MIN},         {"MAX", HVD_MAX},           {"PRODUCT", HVD_PRODUCT},
    {"UINT8", HVD_UINT8},     {"INT8", HVD_INT8},         {"UINT16", HVD_UINT16},
    {"INT16", HVD_INT16},     {"INT32", HVD_INT32},       {"INT64", HVD_INT64},
    {"FLOAT16", HVD_FLOAT16}, {"FLOAT32", HVD_FLOAT32},   {"FLOAT64", HVD_FLOAT64},
    {"BOOL", HVD_BOOL},       {"BFLOAT16", HVD_BFLOAT16},
};

// ALLREDUCE and so on, and the constants above.
static bool add_constants(PyObject *module)
{
    for (int op = 0; op < HVD_N_OPS; op++) {
        const char *name = hvd_op_name((hvd_op_t)op);
        char upper[32] = "";
        for (size_t i = 0; name[i] != '\0' && i + 1 < sizeof upper; i++) {
            upper[i] = (char)toupper((unsigned char)name[i]);
        }
        if (PyModule_AddIntConstant(module, upper, op) != 0) {
            return false;
        }
    }
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) != 0) {
            return false;
        }
    }
    return true;
}

static bool import_errors(void)
{
    PyObject *exceptions = PyImport_ImportModule("horovod.common.exceptions");
    if (exceptions == NULL) {
        return false;
    }
    core.internal_error = PyObject_GetAttrString(exceptions, "HorovodInternalError");
    core.not_initialized_error = PyObject_GetAttrString(exceptions, "NotInitializedError");
    core.package = PyObject_GetAttrString(exceptions, "PACKAGE_FOLDER");
    Py_DECREF(exceptions);
    return core.internal_error != NULL && core.not_initialized_error != NULL &&
           core.package != NULL;
}

static bool make_names(void)
{
    const struct {
        PyObject **name_p;
        const char *text;
    } names[] = {
        {&core.s_data_ptr, "data_ptr"}, {&core.s_shape, "shape"},
        {&core.s_f_back, "f_back"},     {&core.s_co_filename, "co_filename"},
        {&core.s_grad, "grad"},         {&core.s_dtype, "dtype"},
        {&core.s_is_cpu, "is_cpu"},     {&core.s_is_contiguous, "is_contiguous"},
        {&core.s_is_cuda, "is_cuda"},   {&core.s_get_device, "get_device"},
        {&core.s_layout, "layout"},     {&core.s_process_set_id, "process_set_id"},
        {&core.s_f_lasti, "f_lasti"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        *names[i].name_p = PyUnicode_InternFromString(names[i].text);
        if (*names[i].name_p == NULL) {
            return false;
        }
    }
    return true;
}

static bool add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type_p)
{
    PyObject *type = PyType_FromSpec(spec);
    *type_p = (PyTypeObject *)type;
    return type != NULL && PyModule_AddObjectRef(module, strrchr(spec->name, '.') + 1, type) == 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "horovod._core",
    .m_doc = "The C core, as the packages of horovod use it.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__core(void); // the interpreter finds it by name

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || !import_errors() || !make_names() || !core_make_keywords() ||
        !add_type(module, &core_handle_spec, &core.handle_type) ||
        !add_type(module, &core_hook_spec, &core.hook_type) ||
        !add_type(module, &core_in_place_spec, &core.in_place_type) ||
        !add_type(module, &core_memory_spec, &core.memory_type) ||
        !add_type(module, &core_channel_spec, &core.channel_type) ||
        !add_type(module, &core_listener_spec, &core.listener_type)) {
        Py_XDECREF(module);
        return NULL;
    }
    if (!add_constants(module)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
