// SPDX-License-Identifier: Apache-2.0
//
// nccl.c - the simulated NCCL: communicators, groups, and collectives that run on the simulated
// GPU's streams, through memory that the processes share.
//
// Calls inside a group are not queued before its end; those of one communicator and stream then are
// one piece of work, as one kernel would be. Ranks compare what they were asked for: a difference
// is told with both sides, and hangs until aborted, as it would. An abort concerns this process
// only; what it cuts short leaves garbage where the result belongs.
#define _GNU_SOURCE
#include "nccl.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC 0x5eca1ab1u
#define VERSION 23007
#define GARBAGE 0xEE
#define MAX_FACTORS 64
#define FIRST_FLOATING 6 // of the numbers of types
#define LAST_FLOATING 9
#define FIRST_FACTOR 5 // of the numbers of reductions

typedef struct unique_id {
    char bytes[128];
} unique_id_t;

typedef struct config {
    size_t bytes;
    unsigned magic, version;
    int blocking;
} config_t;

typedef struct request {
    comm_t *comm;
    sim_stream_t *stream;
    call_t call;
    const void *in;
    void *out;
    bool is_done;
} request_t;

typedef struct bundle { // what a stream runs as one
    size_t n;
    request_t requests[];
} bundle_t;

static __thread struct {
    int depth;
    request_t *requests;
    size_t n;
} group;

static struct {
    double values[MAX_FACTORS];
    atomic_int n;
} factors;

// --- Running -------------------------------------------------------------------------------------

static void spoil(const request_t *r, size_t bytes)
{
    void *out = r->out != NULL ? sim_touch(r->out, bytes, "an aborted collective") : NULL;
    if (out != NULL) {
        memset(out, GARBAGE, bytes);
    }
}

static bool ranks_agree(comm_t *comm, const call_t *call)
{
    for (int r = 0; r < comm->n; r++) {
        const call_t *other = &comm->shared->calls[r];
        if (memcmp(other, call, sizeof *call) == 0) {
            continue;
        }
        sim_mistake(0,
                    "rank %d calls %s of %lu elements of type %d as number %lu of a communicator, "
                    "rank %d %s of %lu of type %d as %lu",
                    comm->rank, nccl_kinds[call->kind], call->count, call->dtype, call->number, r,
                    nccl_kinds[other->kind], other->count, other->dtype, other->number);
        atomic_store(&comm->async, NCCL_INVALID_USAGE);
        return false;
    }
    return true;
}

static void *touch(const comm_t *comm, const void *memory, size_t bytes, const char *who)
{
    int device = sim_device_of(memory);
    if (bytes > 0 && device >= 0 && device != comm->device) {
        sim_mistake(0, "%s of device %d uses memory of device %d", who, comm->device, device);
        return NULL;
    }
    return sim_touch(memory, bytes, who);
}

static void give(comm_t *comm, const call_t *call, unsigned char *out, size_t bytes)
{
    size_t count = call->count;
    switch (call->kind) {
    case KIND_ALLREDUCE:
        nccl_reduce(comm, call, out, 0, count);
        break;
    case KIND_REDUCE:
        if (comm->rank == call->root) {
            nccl_reduce(comm, call, out, 0, count);
        }
        break;
    case KIND_REDUCESCATTER:
        nccl_reduce(comm, call, out, (size_t)comm->rank * count, count);
        break;
    case KIND_BROADCAST:
        memcpy(out, comm->slots + (size_t)call->root * SLOT_BYTES, bytes);
        break;
    default:
        for (int r = 0; r < comm->n; r++) {
            memcpy(out + (size_t)r * bytes, comm->slots + (size_t)r * SLOT_BYTES, bytes);
        }
    }
}

static void run_collective(request_t *r)
{
    comm_t *comm = r->comm;
    const call_t *call = &r->call;
    const char *who = nccl_kinds[call->kind];
    size_t bytes = call->count * nccl_bytes(call->dtype);
    size_t n = (size_t)comm->n;
    size_t in_bytes = call->kind == KIND_REDUCESCATTER ? bytes * n : bytes;
    size_t out_bytes = call->kind == KIND_ALLGATHER ? bytes * n : bytes;
    bool reads = call->kind != KIND_BROADCAST || comm->rank == call->root;
    bool writes = call->kind != KIND_REDUCE || comm->rank == call->root;
    const void *in = reads ? touch(comm, r->in, in_bytes, who) : NULL;
    unsigned char *out = writes ? touch(comm, r->out, out_bytes, who) : NULL;
    if ((reads && in == NULL) || (writes && out == NULL)) {
        sim_break_device(comm->device, SIM_ILLEGAL_ADDRESS);
        return;
    }
    if (reads) {
        memcpy(comm->slots + (size_t)comm->rank * SLOT_BYTES, in, in_bytes);
    }
    comm->shared->calls[comm->rank] = *call;
    bool arrived = nccl_barrier(comm, call);
    patience_t patience = {0};
    while (arrived && !ranks_agree(comm, call)) {
        while (nccl_breathe(comm, call, comm->rank, &patience)) {
        }
        arrived = false;
    }
    if (arrived) {
        give(comm, call, out, bytes);
        if (writes && sim_call_fails("nccl_wrong")) {
            out[bytes / 2] ^= 1;
        }
        arrived = nccl_barrier(comm, call); // the slots are free again
    }
    if (!arrived && writes) {
        spoil(r, out_bytes);
    }
}

// True: it has moved.
static bool move_message(request_t *r)
{
    comm_t *comm = r->comm;
    bool sends = r->call.kind == KIND_SEND;
    int from = sends ? comm->rank : r->call.root, to = sends ? r->call.root : comm->rank;
    size_t bytes = r->call.count * nccl_bytes(r->call.dtype);
    call_t *posted = &comm->shared->channels[from][to].call;
    atomic_int *full = &comm->shared->channels[from][to].full;
    unsigned char *channel = comm->channels + (size_t)(from * NCCL_RANKS + to) * CHANNEL_BYTES;
    if ((atomic_load(full) != 0) == sends) {
        return false;
    }
    void *memory = touch(comm, sends ? r->in : r->out, bytes, nccl_kinds[r->call.kind]);
    r->is_done = true;
    if (memory == NULL) {
        sim_break_device(comm->device, SIM_ILLEGAL_ADDRESS);
    } else if (sends) {
        memcpy(channel, memory, bytes);
        *posted = r->call;
    } else if (posted->count != r->call.count || posted->dtype != r->call.dtype) {
        sim_mistake(0, "rank %d sends %lu elements of type %d, rank %d receives %lu of type %d",
                    from, posted->count, posted->dtype, to, r->call.count, r->call.dtype);
        atomic_store(&comm->async, NCCL_INVALID_USAGE);
    } else {
        memcpy(memory, channel, bytes);
    }
    atomic_store(full, sends ? 1 : 0);
    return true;
}

static bool is_message(const request_t *r)
{
    return r->call.kind >= KIND_SEND;
}

static void run_messages(bundle_t *bundle)
{
    patience_t patience = {0};
    for (;;) {
        bool moved = false;
        request_t *waiting = NULL;
        for (size_t i = 0; i < bundle->n; i++) {
            request_t *r = &bundle->requests[i];
            if (is_message(r) && !r->is_done) {
                moved |= move_message(r);
                waiting = r->is_done ? waiting : r;
            }
        }
        if (waiting == NULL) {
            return;
        }
        if (!moved && !nccl_breathe(waiting->comm, &waiting->call, waiting->call.root, &patience)) {
            return;
        }
    }
}

// Asked to fail, or never to end: until it is aborted.
static bool breaks_down(comm_t *comm)
{
    bool fails = sim_call_fails("nccl_kernel");
    if (!fails && !sim_call_fails("nccl_hang")) {
        return false;
    }
    if (fails) {
        atomic_store(&comm->async, NCCL_REMOTE_ERROR);
    }
    while (!atomic_load(&comm->aborted)) {
        usleep(1000);
    }
    return true;
}

static void run_bundle(void *arg)
{
    static pthread_mutex_t kernels[SIM_DEVICES]; // all zero: not locked
    bundle_t *bundle = arg;
    request_t *first = &bundle->requests[0];
    pthread_mutex_t *kernel = &kernels[first->comm->device];
    if (sim.one_kernel) {
        pthread_mutex_lock(kernel);
    }
    nccl_board_begin(first->comm, &first->call);
    if (breaks_down(first->comm)) {
        bundle->n = 0; // aborted: nothing of it is carried out
    }
    for (size_t i = 0; i < bundle->n; i++) {
        if (!is_message(&bundle->requests[i])) {
            run_collective(&bundle->requests[i]);
        }
    }
    run_messages(bundle);
    nccl_board_end();
    if (sim.one_kernel) {
        pthread_mutex_unlock(kernel);
    }
}

// --- Groups --------------------------------------------------------------------------------------

EXPORT int ncclGroupStart(void)
{
    group.depth++;
    return NCCL_OK;
}

// All of one communicator and stream, from the first that is left.
static int queue_one_bundle(void)
{
    bundle_t *bundle = malloc(sizeof *bundle + group.n * sizeof bundle->requests[0]);
    bundle->n = 0;
    comm_t *comm = group.requests[0].comm;
    sim_stream_t *stream = group.requests[0].stream;
    size_t n_left = 0;
    for (size_t i = 0; i < group.n; i++) {
        request_t *r = &group.requests[i];
        if (r->comm == comm && r->stream == stream) {
            bundle->requests[bundle->n++] = *r;
        } else {
            group.requests[n_left++] = *r;
        }
    }
    group.n = n_left;
    return sim_push(stream, "nccl", run_bundle, bundle) == SIM_OK ? NCCL_OK : NCCL_CUDA_ERROR;
}

EXPORT int ncclGroupEnd(void)
{
    if (group.depth == 0) {
        sim_mistake(0, "ncclGroupEnd without ncclGroupStart");
        return NCCL_INVALID_USAGE;
    }
    int result = NCCL_OK;
    if (--group.depth == 0) {
        while (group.n > 0 && result == NCCL_OK) {
            result = queue_one_bundle();
        }
        free(group.requests); // the thread may end
        group.requests = NULL;
        group.n = 0;
    }
    return result;
}

static int check_comm(comm_t *comm, const char *what)
{
    if (comm == NULL || comm->magic != MAGIC) {
        sim_mistake(0, "%s with a communicator that was destroyed, or never made", what);
        return NCCL_INVALID_ARGUMENT;
    }
    return NCCL_OK;
}

static int check_call(comm_t *comm, const sim_stream_t *stream, const call_t *call)
{
    const char *what = nccl_kinds[call->kind];
    int result = check_comm(comm, what);
    if (result != NCCL_OK) {
        return result;
    }
    if (atomic_load(&comm->async) == NCCL_IN_PROGRESS) {
        sim_mistake(0, "%s with a communicator that is still being made", what);
        return NCCL_INVALID_USAGE;
    }
    if (sim_stream_device(stream) != comm->device) {
        sim_mistake(0, "%s of a communicator of device %d in a stream of device %d", what,
                    comm->device, sim_stream_device(stream));
        return NCCL_INVALID_USAGE;
    }
    size_t limit = call->kind >= KIND_SEND ? CHANNEL_BYTES : SLOT_BYTES;
    size_t n = call->kind == KIND_REDUCESCATTER ? (size_t)comm->n : 1;
    if (nccl_bytes(call->dtype) == 0 || call->count * nccl_bytes(call->dtype) * n > limit) {
        sim_mistake(0, "%s of %lu elements of type %d is more than the simulation can carry", what,
                    call->count, call->dtype);
        return NCCL_INVALID_ARGUMENT;
    }
    return NCCL_OK;
}

static int ask(comm_t *comm, call_t call, const void *in, void *out, void *stream)
{
    int device = sim_current() >= 0 ? sim_current() : 0;
    sim_stream_t *on = sim_stream_of(stream, device);
    int result = check_call(comm, on, &call);
    if (result != NCCL_OK) {
        return result;
    }
    if (atomic_fetch_add(&comm->n_inside, 1) > 0) {
        sim_mistake(0, "two threads use one communicator at the same time");
    }
    call.number = call.kind < KIND_SEND ? ++comm->n_calls : 0;
    if (call.op >= FIRST_FACTOR) {
        call.factor = factors.values[call.op - FIRST_FACTOR];
        call.op = FIRST_FACTOR;
    }
    ncclGroupStart();
    group.requests = realloc(group.requests, (group.n + 1) * sizeof *group.requests);
    group.requests[group.n++] =
        (request_t){.comm = comm, .stream = on, .call = call, .in = in, .out = out};
    result = ncclGroupEnd();
    atomic_fetch_sub(&comm->n_inside, 1);
    return result;
}

EXPORT int ncclAllReduce(const void *in, void *out, size_t n, int dtype, int op, comm_t *comm,
                         void *stream)
{
    return ask(comm, (call_t){.kind = KIND_ALLREDUCE, .dtype = dtype, .op = op, .count = n}, in,
               out, stream);
}

EXPORT int ncclBroadcast(const void *in, void *out, size_t n, int dtype, int root, comm_t *comm,
                         void *stream)
{
    return ask(comm, (call_t){.kind = KIND_BROADCAST, .dtype = dtype, .root = root, .count = n}, in,
               out, stream);
}

EXPORT int ncclBcast(void *memory, size_t n, int dtype, int root, comm_t *comm, void *stream)
{
    return ncclBroadcast(memory, memory, n, dtype, root, comm, stream);
}

EXPORT int ncclAllGather(const void *in, void *out, size_t n, int dtype, comm_t *comm, void *stream)
{
    return ask(comm, (call_t){.kind = KIND_ALLGATHER, .dtype = dtype, .count = n}, in, out, stream);
}

EXPORT int ncclReduceScatter(const void *in, void *out, size_t n, int dtype, int op, comm_t *comm,
                             void *stream)
{
    return ask(comm, (call_t){.kind = KIND_REDUCESCATTER, .dtype = dtype, .op = op, .count = n}, in,
               out, stream);
}

EXPORT int ncclReduce(const void *in, void *out, size_t n, int dtype, int op, int root,
                      comm_t *comm, void *stream)
{
    call_t call = {.kind = KIND_REDUCE, .dtype = dtype, .op = op, .root = root, .count = n};
    return ask(comm, call, in, out, stream);
}

EXPORT int ncclSend(const void *in, size_t n, int dtype, int peer, comm_t *comm, void *stream)
{
    return ask(comm, (call_t){.kind = KIND_SEND, .dtype = dtype, .root = peer, .count = n}, in,
               NULL, stream);
}

EXPORT int ncclRecv(void *out, size_t n, int dtype, int peer, comm_t *comm, void *stream)
{
    return ask(comm, (call_t){.kind = KIND_RECV, .dtype = dtype, .root = peer, .count = n}, NULL,
               out, stream);
}

// The factor is in host memory: residence 1, or read now all the same.
EXPORT int ncclRedOpCreatePreMulSum(int *op_p, const void *factor, int dtype, int residence,
                                    comm_t *comm)
{
    (void)residence;
    (void)comm;
    int at = atomic_fetch_add(&factors.n, 1) % MAX_FACTORS;
    if (dtype < FIRST_FLOATING || dtype > LAST_FLOATING) {
        return NCCL_INVALID_ARGUMENT;
    }
    factors.values[at] = nccl_factor(dtype, factor);
    *op_p = FIRST_FACTOR + at;
    return NCCL_OK;
}

EXPORT int ncclRedOpDestroy(int op, comm_t *comm)
{
    (void)comm;
    return op >= FIRST_FACTOR ? NCCL_OK : NCCL_INVALID_ARGUMENT;
}

// --- Communicators -------------------------------------------------------------------------------

EXPORT int ncclGetVersion(int *version_p)
{
    sim_setup();
    *version_p = sim.nccl_version != 0 ? sim.nccl_version : VERSION;
    return NCCL_OK;
}

EXPORT int ncclGetUniqueId(unique_id_t *id)
{
    memset(id, 0, sizeof *id);
    int file = memfd_create("gpusim-nccl", MFD_CLOEXEC);
    size_t bytes = SHARED_BYTES + NCCL_RANKS * SLOT_BYTES + NCCL_RANKS * NCCL_RANKS * CHANNEL_BYTES;
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) {
        return NCCL_SYSTEM_ERROR;
    }
    snprintf(id->bytes, sizeof id->bytes, "/proc/%d/fd/%d", (int)getpid(), file);
    return NCCL_OK;
}

static bool map_memory(comm_t *comm, const char *path)
{
    int file = open(path, O_RDWR | O_CLOEXEC);
    size_t bytes = SHARED_BYTES + NCCL_RANKS * SLOT_BYTES + NCCL_RANKS * NCCL_RANKS * CHANNEL_BYTES;
    void *memory =
        file >= 0 ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0)
                  : MAP_FAILED;
    if (file >= 0) {
        close(file);
    }
    if (memory == MAP_FAILED) {
        return false;
    }
    comm->shared = memory;
    comm->slots = (unsigned char *)memory + SHARED_BYTES;
    comm->channels = comm->slots + NCCL_RANKS * SLOT_BYTES;
    return true;
}

typedef struct making {
    comm_t *comm;
    unique_id_t id;
} making_t;

static int meet(comm_t *comm)
{
    shared_t *shared = comm->shared;
    static const call_t meeting = {.kind = KIND_ALLGATHER};
    shared->devices[comm->rank] = comm->device;
    shared->processes[comm->rank] = nccl_process();
    atomic_fetch_add(&shared->n_here, 1);
    if (!nccl_barrier(comm, &meeting)) {
        return NCCL_SYSTEM_ERROR;
    }
    for (int r = 0; r < comm->n; r++) {
        if (r != comm->rank && shared->devices[r] == comm->device) {
            fprintf(stderr,
                    "gpusim: Duplicate GPU detected: rank %d and rank %d both on device "
                    "%d\n",
                    comm->rank, r, comm->device);
            return NCCL_INVALID_USAGE;
        }
    }
    return NCCL_OK;
}

static _Atomic(comm_t *) last_made;

static void *make_comm(void *arg)
{
    making_t *making = arg;
    comm_t *comm = making->comm;
    comm->id = 0;
    for (const char *at = making->id.bytes; *at != '\0'; at++) {
        comm->id = comm->id * 31 + (unsigned char)*at;
    }
    int result = map_memory(comm, making->id.bytes) ? meet(comm) : NCCL_SYSTEM_ERROR;
    if (atomic_load(&comm->async) == NCCL_IN_PROGRESS && sim.nccl_init_ms > 0) {
        usleep((unsigned)(sim_random(comm->id, (uint64_t)comm->rank) % sim.nccl_init_ms) * 1000);
    }
    atomic_store(&comm->async, result);
    free(making);
    return NULL;
}

EXPORT int ncclCommInitRankConfig(comm_t **comm_p, int n, unique_id_t id, int rank,
                                  const config_t *config)
{
    sim_setup();
    if (n < 1 || n > NCCL_RANKS || rank < 0 || rank >= n) {
        return NCCL_INVALID_ARGUMENT;
    }
    comm_t *comm = calloc(1, sizeof *comm);
    comm->magic = MAGIC;
    comm->rank = rank;
    comm->n = n;
    comm->device = sim_current() >= 0 ? sim_current() : 0;
    comm->made_before = atomic_load(&last_made);
    while (!atomic_compare_exchange_weak(&last_made, &comm->made_before, comm)) {
    }
    making_t *making = malloc(sizeof *making);
    *making = (making_t){comm, id};
    *comm_p = comm;
    if (config != NULL && config->blocking == 0) {
        pthread_t thread;
        atomic_store(&comm->async, NCCL_IN_PROGRESS);
        if (pthread_create(&thread, NULL, make_comm, making) != 0) {
            return NCCL_SYSTEM_ERROR;
        }
        pthread_detach(thread);
        return NCCL_IN_PROGRESS;
    }
    make_comm(making);
    return atomic_load(&comm->async);
}

EXPORT int ncclCommInitRank(comm_t **comm_p, int n, unique_id_t id, int rank)
{
    return ncclCommInitRankConfig(comm_p, n, id, rank, NULL);
}

EXPORT int ncclCommInitRankScalable(comm_t **comm_p, int n, int rank, int n_ids, unique_id_t *ids,
                                    const config_t *config)
{
    (void)n_ids;
    return ncclCommInitRankConfig(comm_p, n, ids[0], rank, config);
}

EXPORT int ncclCommGetAsyncError(comm_t *comm, int *result_p)
{
    int result = check_comm(comm, "ncclCommGetAsyncError");
    if (result == NCCL_OK) {
        *result_p = atomic_load(&comm->async);
    }
    return result;
}

EXPORT int ncclCommFinalize(comm_t *comm)
{
    return check_comm(comm, "ncclCommFinalize");
}

// Its memory stays, in the list of all: a later use is recognised.
EXPORT int ncclCommDestroy(comm_t *comm)
{
    int result = check_comm(comm, "ncclCommDestroy");
    if (result == NCCL_OK) {
        sim_wait_device(comm->device);
        comm->magic = 0;
    }
    return result;
}

EXPORT int ncclCommAbort(comm_t *comm)
{
    int result = check_comm(comm, "ncclCommAbort");
    while (result == NCCL_OK && sim.abort_hangs) {
        sleep(1);
    }
    if (result == NCCL_OK) {
        atomic_store(&comm->aborted, true);
        comm->magic = 0;
    }
    return result;
}

EXPORT int ncclCommCount(comm_t *comm, int *n_p)
{
    *n_p = comm->n;
    return NCCL_OK;
}

EXPORT int ncclCommUserRank(comm_t *comm, int *rank_p)
{
    *rank_p = comm->rank;
    return NCCL_OK;
}

EXPORT int ncclCommCuDevice(comm_t *comm, int *device_p)
{
    *device_p = comm->device;
    return NCCL_OK;
}

EXPORT int ncclCommRegister(comm_t *comm, void *memory, size_t bytes, void **handle_p)
{
    (void)comm;
    (void)bytes;
    *handle_p = memory;
    return NCCL_OK;
}

EXPORT int ncclCommDeregister(comm_t *comm, void *handle)
{
    (void)comm;
    (void)handle;
    return NCCL_OK;
}

EXPORT const char *ncclGetErrorString(int result)
{
    static const char *const texts[] = {"no error",       "unhandled cuda error", "system error",
                                        "internal error", "invalid argument",     "invalid usage",
                                        "remote error",   "in progress"};
    return result >= 0 && result < 8 ? texts[result] : "unknown result";
}

EXPORT const char *ncclGetLastError(comm_t *comm)
{
    (void)comm;
    return gpusim_last_mistake();
}
