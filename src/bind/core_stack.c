// SPDX-License-Identifier: Apache-2.0
//
// core_stack.c - where a Python thread is, for the flight recorder of the library.
//
// libhvd notes which thread submitted an operation, by the number Python knows it under as well
// (threading.get_ident()). When it dumps its recorder, its monitor thread comes here. A thread of
// its own then waits for the GIL and asks the interpreter for that thread's stack, with the text of
// its lines. Where a program never lets go of the GIL that waits too long; then the standard
// module faulthandler tells files, lines and functions without it. It does so from the handler of a
// signal, so at init one that nobody uses is given to it, and raised here when needed.
//
// Thread: the monitor thread of a context. An asking belongs to whoever comes last: the thread that
// answers or the one that has stopped waiting.
#define _GNU_SOURCE
#include "bind/core.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define GIL_PATIENCE_S 1
#define STACK_BYTES 8192
#define ALL_STACKS_BYTES 65536

// --- With the GIL --------------------------------------------------------------------------------

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

// The folder of this package, with its slash. False: not known.
static bool find_own_folder(char *folder, size_t bytes)
{
    PyObject *module = PyImport_ImportModule("horovod._core");
    PyObject *file = module != NULL ? PyModule_GetFilenameObject(module) : NULL;
    PyObject *utf8 = file != NULL ? PyUnicode_AsEncodedString(file, "utf-8", "replace") : NULL;
    const char *path = utf8 != NULL ? PyBytes_AsString(utf8) : NULL;
    const char *slash = path != NULL ? strrchr(path, '/') : NULL;
    bool is_known = slash != NULL && (size_t)(slash - path) + 2 <= bytes;
    if (is_known) {
        snprintf(folder, bytes, "%.*s", (int)(slash - path) + 1, path);
    }
    Py_XDECREF(utf8);
    Py_XDECREF(file);
    Py_XDECREF(module);
    return is_known;
}

static bool is_own(PyObject *entry, const char *folder)
{
    PyObject *utf8 = PyUnicode_AsEncodedString(entry, "utf-8", "replace");
    const char *text = utf8 != NULL ? PyBytes_AsString(utf8) : NULL;
    const char *path = text != NULL ? strstr(text, "File \"") : NULL;
    bool own = path != NULL && strncmp(path + strlen("File \""), folder, strlen(folder)) == 0;
    Py_XDECREF(utf8);
    return own;
}

// Takes this package's frames out of `lines`, also those between the user's, as of a decorator:
// where the user called it is what helps. A stack of nothing else keeps all of its frames.
static void drop_own_frames(PyObject *lines)
{
    char folder[PATH_MAX];
    Py_ssize_t n = lines != NULL ? PyList_Size(lines) : 0, n_users = 0;
    if (n == 0 || !find_own_folder(folder, sizeof folder)) {
        return;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        n_users += !is_own(PyList_GetItem(lines, i), folder);
    }
    for (Py_ssize_t i = n - 1; i >= 0 && n_users > 0; i--) {
        if (is_own(PyList_GetItem(lines, i), folder)) {
            PyList_SetSlice(lines, i, i + 1, NULL);
        }
    }
}

// The innermost frames come last: if there is no room for all, they are what is kept.
static size_t write_stack(uint64_t thread, char *text, size_t bytes)
{
    size_t written = 0;
    PyObject *lines = stack_lines(thread);
    drop_own_frames(lines);
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

typedef struct asking {
    pthread_mutex_t lock;
    pthread_cond_t answered;
    bool is_done, is_alone; // the other side is through with it
    uint64_t thread;
    size_t bytes;
    char text[STACK_BYTES];
} asking_t;

static void asking_free(asking_t *asking)
{
    pthread_cond_destroy(&asking->answered);
    pthread_mutex_destroy(&asking->lock);
    free(asking);
}

static void *answer(void *arg)
{
    asking_t *asking = arg;
    PyGILState_STATE state = PyGILState_Ensure();
    size_t bytes = write_stack(asking->thread, asking->text, sizeof asking->text);
    PyGILState_Release(state);
    pthread_mutex_lock(&asking->lock);
    asking->bytes = bytes;
    asking->is_done = true;
    bool is_alone = asking->is_alone;
    pthread_cond_signal(&asking->answered);
    pthread_mutex_unlock(&asking->lock);
    if (is_alone) {
        asking_free(asking);
    }
    return NULL;
}

static asking_t *asking_new(uint64_t thread)
{
    asking_t *asking = calloc(1, sizeof *asking);
    pthread_condattr_t clock;
    pthread_t answerer;
    if (asking == NULL) {
        return NULL;
    }
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&asking->lock, NULL);
    pthread_cond_init(&asking->answered, &clock);
    pthread_condattr_destroy(&clock);
    asking->thread = thread;
    if (pthread_create(&answerer, NULL, answer, asking) != 0) {
        asking_free(asking);
        return NULL;
    }
    pthread_detach(answerer);
    return asking;
}

// False: the GIL was not to be had in time.
static bool ask(uint64_t thread, char *text, size_t bytes, size_t *written_p)
{
    struct timespec deadline;
    asking_t *asking = asking_new(thread);
    if (asking == NULL) {
        return false;
    }
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += GIL_PATIENCE_S;
    pthread_mutex_lock(&asking->lock);
    while (!asking->is_done &&
           pthread_cond_timedwait(&asking->answered, &asking->lock, &deadline) == 0) {
    }
    bool is_done = asking->is_done;
    if (is_done) {
        *written_p = asking->bytes < bytes ? asking->bytes : bytes;
        memcpy(text, asking->text + (asking->bytes - *written_p), *written_p);
    }
    asking->is_alone = true;
    pthread_mutex_unlock(&asking->lock);
    if (is_done) {
        asking_free(asking);
    }
    return is_done;
}

// --- Without it ----------------------------------------------------------------------------------

// A signal belongs to the process, and so does what its handler writes to.
static atomic_int stack_signal; // 0: none
static int stack_file = -1;

static int find_unused_signal(void)
{
    struct sigaction now;
    for (int number = SIGRTMAX - 1; number > SIGRTMIN; number--) {
        if (sigaction(number, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
            now.sa_handler == SIG_DFL) {
            return number;
        }
    }
    return 0;
}

void core_stack_open(void)
{
    int number = find_unused_signal();
    if (atomic_load(&stack_signal) != 0 || number == 0) {
        return;
    }
    stack_file = memfd_create("hvd-stacks", MFD_CLOEXEC);
    PyObject *module = PyImport_ImportModule("faulthandler");
    PyObject *done = module != NULL && stack_file >= 0
                         ? PyObject_CallMethod(module, "register", "iii", number, stack_file, 1)
                         : NULL;
    if (done != NULL) {
        atomic_store(&stack_signal, number);
    } else {
        PyErr_Clear(); // stacks then need the GIL
    }
    Py_XDECREF(done);
    Py_XDECREF(module);
}

// All threads' stacks, to the file.
static void raise_signal(int number)
{
    sigset_t only, before;
    sigemptyset(&only);
    sigaddset(&only, number);
    pthread_sigmask(SIG_UNBLOCK, &only, &before);
    raise(number);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// What stands between "Thread 0x00007f..." and the next of these.
static size_t part_of_thread(char *all, uint64_t thread, char *text, size_t bytes)
{
    char head[32];
    snprintf(head, sizeof head, "hread 0x%016llx", (unsigned long long)thread);
    char *from = strstr(all, head);
    from = from != NULL ? strchr(from, '\n') : NULL;
    if (from == NULL) {
        return 0;
    }
    char *to = strstr(from, "\n\n");
    int n = snprintf(text, bytes, "(it holds the GIL; innermost first)%.*s",
                     to != NULL ? (int)(to - from) : (int)strlen(from), from);
    return n < 0 ? 0 : (size_t)n < bytes ? (size_t)n : bytes - 1;
}

static size_t dump(uint64_t thread, char *text, size_t bytes)
{
    int number = atomic_load(&stack_signal);
    char *all = number != 0 ? calloc(1, ALL_STACKS_BYTES) : NULL;
    size_t written = 0;
    if (all != NULL && ftruncate(stack_file, 0) == 0 && lseek(stack_file, 0, SEEK_SET) == 0) {
        raise_signal(number);
        if (pread(stack_file, all, ALL_STACKS_BYTES - 1, 0) > 0) {
            written = part_of_thread(all, thread, text, bytes);
        }
    }
    free(all);
    return written;
}

size_t core_stack(void *arg, uint64_t thread, char *text, size_t bytes)
{
    size_t written = 0;
    (void)arg;
    if (!Py_IsInitialized()) {
        return 0;
    }
    return ask(thread, text, bytes, &written) ? written : dump(thread, text, bytes);
}
