// SPDX-License-Identifier: Apache-2.0
//
// mpi.c - collectives by an MPI library that is found at run time.
//
// A peer that dies must be noticed by the engine, not waited for. So collectives are the
// non-blocking ones, driven by MPI_Test. Open MPI runs some of these with simpler algorithms, which
// take up to four times as long for large tensors: one it can be talked out of, the others go to a
// worker thread that may block. It is also the thread that initialises and finalises MPI; where
// that gives no more than MPI_THREAD_FUNNELED it makes all calls. Errors are returned, not fatal:
// our communicator has its own handler.
#define _GNU_SOURCE
#include "coll/mpi_library.h"

#include "net/net.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define POLL_US 200
#define SPIN_NS (200 * NS_PER_US)
#define WORKER_POLL_NS (5 * NS_PER_MS) // nothing else of MPI can start while the worker is busy
#define UNEVEN_FACTOR 16
#define LARGE_BYTES ((size_t)512 << 10) // from here on a blocking call may pay for its thread
#define TESTS_AT_ONCE 32 // between looks at the rest of the job: MPI works only while it is asked

// --- Collectives ---------------------------------------------------------------------------------

static const mpi_constant_t type_of[HVD_N_DTYPES] = {
    [HVD_UINT8] = UINT8, [HVD_INT8] = INT8,   [HVD_UINT16] = UINT16, [HVD_INT16] = INT16,
    [HVD_INT32] = INT32, [HVD_INT64] = INT64, [HVD_FLOAT32] = FLOAT, [HVD_FLOAT64] = DOUBLE,
};

static const mpi_constant_t op_of[HVD_N_REDUCES] = {
    [HVD_SUM] = SUM, [HVD_MIN] = MIN, [HVD_MAX] = MAX, [HVD_PRODUCT] = PRODUCT};

// Rings of MPICH and its kin cut all blocks into pieces of the smallest: with one of a few bytes
// among large ones an allgather takes minutes. Our own does not mind.
static bool blocks_are_alike(const coll_args_t *args)
{
    size_t least = SIZE_MAX, most = 0;
    for (int m = 0; m < args->size; m++) {
        least = MIN(least, args->blocks[m]);
        most = MAX(most, args->blocks[m]);
    }
    return most / UNEVEN_FACTOR <= least;
}

// Counts and where each block starts, in units of `unit` bytes.
static void lay_out(const size_t *bytes, int n, size_t unit, int *counts, int *offsets)
{
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        counts[i] = (int)(bytes[i] / unit);
        offsets[i] = (int)at;
        at += bytes[i] / unit;
    }
}

// Runs the plane's collective: at once if request_p is NULL, else as what *request_p stands for.
typedef int run_t(mpi_plane_t *plane, mpi_handle_t *request_p);

static int run_allreduce(mpi_plane_t *plane, mpi_handle_t *request_p)
{
    const coll_args_t *args = plane->args;
    int n = (int)(args->bytes / hvd_dtype_bytes(args->dtype));
    uintptr_t in = plane->input == plane->output ? plane->abi->in_place : (uintptr_t)plane->input;
    mpi_handle_t type = plane->constants[type_of[args->dtype]];
    mpi_handle_t op = plane->constants[op_of[args->reduce]];
    return request_p == NULL
               ? plane->Allreduce(in, plane->output, n, type, op, plane->comm)
               : plane->Iallreduce(in, plane->output, n, type, op, plane->comm, request_p);
}

static int run_broadcast(mpi_plane_t *plane, mpi_handle_t *request_p)
{
    const coll_args_t *args = plane->args;
    mpi_handle_t byte = plane->constants[BYTE];
    int n = (int)args->bytes;
    if (args->member == args->root && plane->input != plane->output) {
        memcpy(plane->output, plane->input, args->bytes);
    }
    return request_p == NULL
               ? plane->Bcast(plane->output, n, byte, args->root, plane->comm)
               : plane->Ibcast(plane->output, n, byte, args->root, plane->comm, request_p);
}

static int run_allgather(mpi_plane_t *plane, mpi_handle_t *request_p)
{
    const coll_args_t *args = plane->args;
    mpi_handle_t byte = plane->constants[BYTE];
    lay_out(args->blocks, plane->size, 1, plane->counts, plane->offsets);
    int n = plane->counts[args->member];

    return request_p == NULL
               ? plane->Allgatherv(plane->input, n, byte, plane->output, plane->counts,
                                   plane->offsets, byte, plane->comm)
               : plane->Iallgatherv(plane->input, n, byte, plane->output, plane->counts,
                                    plane->offsets, byte, plane->comm, request_p);
}

static int run_alltoall(mpi_plane_t *plane, mpi_handle_t *request_p)
{
    const coll_args_t *args = plane->args;
    mpi_handle_t byte = plane->constants[BYTE];
    lay_out(args->recv_bytes, plane->size, 1, plane->counts, plane->offsets);
    lay_out(args->send_bytes, plane->size, 1, plane->sent_counts, plane->sent_offsets);

    return request_p == NULL
               ? plane->Alltoallv(plane->input, plane->sent_counts, plane->sent_offsets, byte,
                                  plane->output, plane->counts, plane->offsets, byte, plane->comm)
               : plane->Ialltoallv(plane->input, plane->sent_counts, plane->sent_offsets, byte,
                                   plane->output, plane->counts, plane->offsets, byte, plane->comm,
                                   request_p);
}

static int run_reducescatter(mpi_plane_t *plane, mpi_handle_t *request_p)
{
    const coll_args_t *args = plane->args;
    mpi_handle_t type = plane->constants[type_of[args->dtype]];
    mpi_handle_t op = plane->constants[op_of[args->reduce]];
    lay_out(args->blocks, plane->size, hvd_dtype_bytes(args->dtype), plane->counts, plane->offsets);

    return request_p == NULL ? plane->Reduce_scatter(plane->input, plane->output, plane->counts,
                                                     type, op, plane->comm)
                             : plane->Ireduce_scatter(plane->input, plane->output, plane->counts,
                                                      type, op, plane->comm, request_p);
}

static run_t *const run_of[HVD_N_OPS] = {
    [HVD_ALLREDUCE] = run_allreduce,         [HVD_BROADCAST] = run_broadcast,
    [HVD_ALLGATHER] = run_allgather,         [HVD_ALLTOALL] = run_alltoall,
    [HVD_REDUCESCATTER] = run_reducescatter,
};

bool mpi_can_run(const coll_args_t *args, size_t total_bytes)
{
    bool reduces = op_has(args->op, OP_REDUCES);
    bool has_type = type_of[args->dtype] != WORLD || dtype_is_half(args->dtype);
    bool gathers = op_infos[args->op].layout == LAYOUT_GATHERED;
    if (run_of[args->op] == NULL || (gathers && !blocks_are_alike(args))) {
        return false;
    }
    // Widening doubles half types.
    return total_bytes <= INT_MAX / 2 && (!reduces || (has_type && op_of[args->reduce] != WORLD));
}

// --- The worker ----------------------------------------------------------------------------------

static void worker_tell(mpi_worker_t *w, unsigned state)
{
    atomic_store(&w->state, state);
    futex_wake(&w->state, 1);
}

// With a core for each of the two threads either looks out for the other for a while before it
// sleeps: to be woken takes longer than the rest of a hand-over.
static void worker_look(const mpi_worker_t *w, unsigned state)
{
    bool may_spin = atomic_load_explicit(&w->may_spin, memory_order_relaxed);
    uint64_t until_ns = may_spin ? clock_ns() + SPIN_NS : 0;
    while (may_spin && atomic_load(&w->state) == state && clock_ns() < until_ns) {
        cpu_relax();
    }
}

static void *worker_main(void *arg)
{
    mpi_plane_t *plane = arg;
    mpi_worker_t *w = &plane->worker;
    unsigned state;
    while ((state = atomic_load(&w->state)) != WORKER_ENDS) {
        if (state != WORKER_ASKED) {
            worker_look(w, state);
            futex_wait(&w->state, state, NEVER_NS);
            continue;
        }
        w->code = w->work(plane);
        worker_tell(w, WORKER_DONE);
    }
    return NULL;
}

static hvd_status_t worker_start(mpi_plane_t *plane, err_t *err)
{
    int code = thread_start(&plane->worker.thread, "hvd-mpi", worker_main, plane);
    plane->worker.runs = code == 0;
    return code == 0 ? HVD_OK : thread_failed(err, code, "the thread for MPI");
}

static void worker_stop(mpi_worker_t *w)
{
    if (w->runs) {
        worker_tell(w, WORKER_ENDS);
        pthread_join(w->thread, NULL);
    }
}

static void worker_ask(mpi_worker_t *w, work_t *work)
{
    INVARIANT(atomic_load(&w->state) == WORKER_IDLE);
    w->work = work;
    worker_tell(w, WORKER_ASKED);
}

// Sleeps for a moment if it is not done: where the worker has no other core than ours, every look
// at it would take time from it.
static bool worker_is_done(mpi_worker_t *w)
{
    worker_look(w, WORKER_ASKED);
    futex_wait(&w->state, WORKER_ASKED, clock_ns() + WORKER_POLL_NS);
    unsigned done = WORKER_DONE;
    return atomic_compare_exchange_strong(&w->state, &done, WORKER_IDLE);
}

// Has the worker do something and waits for it.
static int worker_do(mpi_worker_t *w, work_t *work)
{
    worker_ask(w, work);
    while (!worker_is_done(w)) {
    }
    return w->code;
}

// --- Starting and progress -----------------------------------------------------------------------

static int run_blocking(mpi_plane_t *plane)
{
    return run_of[plane->args->op](plane, NULL);
}

hvd_status_t mpi_start(mpi_plane_t *plane, const coll_args_t *args, size_t total_bytes,
                       const void *input, void *output, err_t *err)
{
    bool is_slow = total_bytes >= LARGE_BYTES && (plane->slow_ops >> args->op & 1) != 0;
    plane->args = args;
    plane->input = input;
    plane->output = output;
    if (is_slow || plane->one_thread) {
        worker_ask(&plane->worker, run_blocking);
        return HVD_OK;
    }
    int code = run_of[args->op](plane, &plane->request);
    return code == 0 ? HVD_OK
                     : fail(err, HVD_SYSTEM, "%s could not start %s: MPI error %d", plane->name,
                            hvd_op_name(args->op), code);
}

hvd_status_t mpi_progress(mpi_plane_t *plane, err_t *err)
{
    mpi_worker_t *w = &plane->worker;
    int done = 0;
    int code = 0;
    if (atomic_load(&w->state) != WORKER_IDLE) {
        done = worker_is_done(w);
        code = done ? w->code : 0;
    } else {
        for (int i = 0; i < TESTS_AT_ONCE && code == 0 && !done; i++) {
            code = plane->Test(&plane->request, &done, plane->abi->no_status);
        }
    }
    if (code != 0) {
        return fail(err, HVD_SYSTEM, "%s failed in a collective: MPI error %d", plane->name, code);
    }
    return done ? HVD_OK : HVD_IN_PROGRESS;
}

// --- Opening and closing ------------------------------------------------------------------------

const char *mpi_library_name(const mpi_plane_t *plane)
{
    return plane->name;
}

bool mpi_has_threads(const mpi_plane_t *plane)
{
    return plane->level >= plane->abi->multiple;
}

// Asks whether the program has initialised MPI, and does it if not.
static int init_thread(mpi_plane_t *plane)
{
    int initialized = 0;
    plane->Initialized(&initialized);
    plane->is_ours = !initialized;
    return initialized ? plane->Query_thread(&plane->level)
                       : plane->Init_thread(NULL, NULL, plane->abi->multiple, &plane->level);
}

static hvd_status_t initialize(mpi_plane_t *plane, err_t *err)
{
    int finalized = 0;
    plane->Finalized(&finalized);
    if (finalized) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "MPI has been finalised in this process and cannot be used again; to init more "
                    "than once, initialise MPI in the program (with mpi4py: import it first)");
    }
    int code = worker_do(&plane->worker, init_thread);
    if (code != 0) {
        return fail(err, HVD_SYSTEM, "%s cannot be initialised: MPI error %d", plane->name, code);
    }
    // What the program has initialised, on a thread that is not ours, must allow others.
    if (plane->level < (plane->is_ours ? plane->abi->funneled : plane->abi->serialized)) {
        return fail(err, HVD_UNSUPPORTED,
                    "%s was initialised without support for threads; ask for "
                    "MPI_THREAD_MULTIPLE (MPI_Init_thread)",
                    plane->name);
    }
    return HVD_OK;
}

hvd_status_t mpi_open(const config_t *config, mpi_plane_t **plane_p, err_t *err)
{
    hvd_status_t status;
    if (config->encrypt == ENCRYPT_ALWAYS) {
        return fail(
            err, HVD_INVALID_ARGUMENT,
            "HOROVOD_CPU_OPERATIONS is MPI, which does not encrypt tensors, but HOROVOD_ENCRYPT is "
            "always; unset one of them (Horovod's own collectives encrypt)");
    }
    mpi_plane_t *plane = calloc(1, sizeof *plane);
    if (plane == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    TRY(mpi_library_open(plane, config, err), undo);
    TRY(worker_start(plane, err), undo);
    TRY(initialize(plane, err), undo);
    *plane_p = plane;
    return HVD_OK;
undo:
    mpi_close(plane, false);
    return status;
}

static int look_at_world(mpi_plane_t *plane)
{
    int code = plane->Comm_rank(plane->world, &plane->rank);
    return code != 0 ? code : plane->Comm_size(plane->world, &plane->size);
}

// Until the request is done, or the deadline.
static int finish(mpi_plane_t *plane, int *done_p)
{
    int code = 0;
    *done_p = 0;
    while (code == 0 && !*done_p && clock_ns() < plane->deadline_ns) {
        code = plane->Test(&plane->request, done_p, plane->abi->no_status);
        if (!*done_p) {
            usleep(POLL_US);
        }
    }
    return code;
}

static bool set_variable(mpi_plane_t *plane, const char *name, int value)
{
    int level, index, count;
    mpi_handle_t handle = 0;
    if (plane->T_init_thread == NULL || plane->T_init_thread(0, &level) != 0) {
        return false;
    }
    bool is_set = plane->T_cvar_get_index(name, &index) == 0 &&
                  plane->T_cvar_handle_alloc(index, NULL, &handle, &count) == 0 && count == 1 &&
                  plane->T_cvar_write(handle, &value) == 0;
    if (handle != 0) {
        plane->T_cvar_handle_free(&handle);
    }
    plane->T_finalize();
    return is_set;
}

// Variables are left alone where the program uses MPI too. A blocking call of one rank and a
// non-blocking one of another never meet, so all do what the least able can.
static int agree_on_ways(mpi_plane_t *plane, int *done_p)
{
    const cure_t *cure = &plane->abi->cure;
    int32_t *ways = plane->ways;
    ways[WAY_CURED] = plane->is_ours && cure->variable != NULL &&
                      set_variable(plane, cure->variable, cure->value);
    ways[WAY_ANY_THREAD] = plane->level >= plane->abi->serialized;
    int code = plane->Iallreduce(plane->abi->in_place, ways, N_WAYS, plane->constants[INT32],
                                 plane->constants[MIN], plane->comm, &plane->request);
    code = code != 0 ? code : finish(plane, done_p);
    plane->slow_ops = plane->abi->slow_ops & ~(ways[WAY_CURED] ? 1U << cure->op : 0);
    plane->one_thread = !ways[WAY_ANY_THREAD];
    return code;
}

// A communicator of our own, unless some rank does not come before the deadline.
static int make_comm(mpi_plane_t *plane)
{
    int done = 0;
    int code = plane->Comm_idup(plane->world, &plane->comm, &plane->request);
    code = code != 0 ? code : finish(plane, &done);
    if (code == 0 && done) {
        code = plane->Comm_set_errhandler(plane->comm, plane->constants[ERRORS_RETURN]);
        code = code != 0 ? code : agree_on_ways(plane, &done);
    }
    plane->has_comm = code == 0 && done;
    return code;
}

static hvd_status_t take_memory(mpi_plane_t *plane, err_t *err)
{
    int size = plane->size;
    plane->counts = calloc((size_t)size * 4, sizeof *plane->counts);
    if (plane->counts == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a job of %d ranks", size);
    }
    plane->offsets = plane->counts + size;
    plane->sent_counts = plane->offsets + size;
    plane->sent_offsets = plane->sent_counts + size;
    return HVD_OK;
}

hvd_status_t mpi_attach(mpi_plane_t *plane, uintptr_t comm, int rank, int size, bool has_spare_core,
                        uint64_t deadline_ns, err_t *err)
{
    hvd_status_t status;
    atomic_store(&plane->worker.may_spin, has_spare_core);
    plane->world = comm != 0 ? comm : plane->constants[WORLD];
    plane->deadline_ns = deadline_ns;
    if (worker_do(&plane->worker, look_at_world) != 0 || plane->rank != rank ||
        plane->size != size) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "this is rank %d of %d, but MPI counts it as rank %d of %d; start the job with "
                    "one mpirun, or unset HOROVOD_CPU_OPERATIONS",
                    rank, size, plane->rank, plane->size);
    }
    TRY(take_memory(plane, err), out);
    int code = worker_do(&plane->worker, make_comm);
    if (code != 0) {
        return fail(err, HVD_SYSTEM, "%s could not create a communicator: MPI error %d",
                    plane->name, code);
    }
    if (!plane->has_comm) {
        return fail(err, HVD_TIMEOUT,
                    "not all ranks use MPI for collectives, or some did not start in time; set the "
                    "same HOROVOD_CPU_OPERATIONS on all of them, or raise HOROVOD_START_TIMEOUT");
    }
out:
    return status;
}

static int leave(mpi_plane_t *plane)
{
    plane->Comm_free(&plane->comm);
    return plane->is_ours ? plane->Finalize() : 0;
}

void mpi_close(mpi_plane_t *plane, bool ended_well)
{
    if (plane == NULL || atomic_load(&plane->worker.state) == WORKER_ASKED) {
        return;
    }
    if (ended_well && plane->has_comm) {
        worker_do(&plane->worker, leave);
    }
    worker_stop(&plane->worker);
    // The library stays loaded: it has threads and handlers of its own.
    free(plane->counts);
    free(plane);
}
