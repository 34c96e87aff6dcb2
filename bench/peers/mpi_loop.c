// SPDX-License-Identifier: Apache-2.0
//
// The C loop of an MPI peer: times blocking collectives of whatever MPI it is built with, so that
// an MPI library is measured without an interpreter between the calls.
//
//   mpicc -std=c11 -O2 mpi_loop.c -o mpi_loop
//   mpiexec -n 2 ./mpi_loop --peer mpich --op allreduce,broadcast --bytes 4,1048576 --pin
//
// A sample is the time of one blocking call; for each sample the slowest rank counts. The first
// call is verified, then five calls estimate the time, which sets the number of samples (--budget
// seconds, at most --max-samples), a fifth of them (at most 20) run as warm-up, then the samples
// are taken back to back. Rank 0 prints one JSON object per operation and size.
//
// --thread-multiple asks for that thread level, which changes the speed of some libraries much, in
// either direction by size, and most of all with more ranks than cores.
//
// What "bytes" means: allreduce, broadcast, memcpy: the buffer; allgather: the gathered result;
// alltoall, reducescatter: the input of one rank.
//
// many and many-gather fly many non-blocking allreduces or allgathers at once: --tensors has the
// bytes of each, as in "9408,256*2", and the row has their sum.

#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_LIST = 64, MAX_TENSORS = 1024, ESTIMATE_CALLS = 5, WARMUP_CALLS = 20, MIN_SAMPLES = 3 };
enum { HUGE_PAGE = 2 << 20 };

static int g_rank, g_ranks;
static bool g_small_pages;

// One operation at one size. in and out hold count and out_count floats.
typedef struct {
    size_t count, out_count;
    size_t part;           // floats that one rank contributes or keeps, where the op divides
    const size_t *tensors; // floats in each of those that fly at once
    int n_tensors;
    float *in, *out;
    MPI_Request *requests;
} loop_t;

// How the loop treats an operation.
enum {
    IN_PLACE = 1, // the result is in `in`
    GROWS = 2,    // repeated calls grow the values, so the timed ones start from zero
    ALIGNED = 4,  // an untimed barrier runs before every call
};

typedef struct {
    const char *name;
    void (*shape)(loop_t *l); // derives part, count and out_count from count
    void (*call)(loop_t *l);  // what is timed
    float (*expect)(const loop_t *l, size_t i);
    int flags;
} op_t;

static void die(const char *text, const char *what)
{
    fprintf(stderr, "mpi_loop: %s%s\n", text, what);
    int up = 0;
    MPI_Initialized(&up);
    if (up)
        MPI_Abort(MPI_COMM_WORLD, 2);
    exit(2);
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

// Small integers, so that every sum is exact in float32.
static float value(int rank, size_t i)
{
    return (float)(rank + 1 + (int)(i % 5));
}

static float sum_of_ranks(size_t i)
{
    return (float)(g_ranks * (g_ranks + 1) / 2 + g_ranks * (int)(i % 5));
}

// ---- the operations ----

static void shape_plain(loop_t *l)
{
    l->part = l->count;
    l->out_count = 0;
}

static void shape_copy(loop_t *l)
{
    l->part = l->count;
    l->out_count = l->count;
}

static void shape_gather(loop_t *l)
{
    l->part = l->count / g_ranks ? l->count / g_ranks : 1;
    l->count = l->part;
    l->out_count = l->part * g_ranks;
}

static void shape_exchange(loop_t *l)
{
    l->part = l->count / g_ranks ? l->count / g_ranks : 1;
    l->count = l->part * g_ranks;
    l->out_count = l->count;
}

static void shape_scatter(loop_t *l)
{
    shape_exchange(l);
    l->out_count = l->part;
}

static void shape_many(loop_t *l)
{
    l->count = 0;
    for (int t = 0; t < l->n_tensors; t++)
        l->count += l->tensors[t];
    l->part = l->count;
    l->out_count = 0;
}

static void shape_many_gathered(loop_t *l)
{
    shape_many(l);
    l->out_count = l->count * g_ranks;
}

static void call_allreduce(loop_t *l)
{
    MPI_Allreduce(MPI_IN_PLACE, l->in, (int)l->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void call_broadcast(loop_t *l)
{
    MPI_Bcast(l->in, (int)l->count, MPI_FLOAT, 0, MPI_COMM_WORLD);
}

static void call_allgather(loop_t *l)
{
    MPI_Allgather(l->in, (int)l->part, MPI_FLOAT, l->out, (int)l->part, MPI_FLOAT, MPI_COMM_WORLD);
}

static void call_alltoall(loop_t *l)
{
    MPI_Alltoall(l->in, (int)l->part, MPI_FLOAT, l->out, (int)l->part, MPI_FLOAT, MPI_COMM_WORLD);
}

static void call_reducescatter(loop_t *l)
{
    MPI_Reduce_scatter_block(l->in, l->out, (int)l->part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void call_many(loop_t *l)
{
    float *at = l->in;
    for (int t = 0; t < l->n_tensors; at += l->tensors[t++])
        MPI_Iallreduce(MPI_IN_PLACE, at, (int)l->tensors[t], MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                       &l->requests[t]);
    MPI_Waitall(l->n_tensors, l->requests, MPI_STATUSES_IGNORE);
}

static void call_many_gathered(loop_t *l)
{
    const float *from = l->in;
    float *to = l->out;
    for (int t = 0; t < l->n_tensors; t++) {
        int n = (int)l->tensors[t];
        MPI_Iallgather(from, n, MPI_FLOAT, to, n, MPI_FLOAT, MPI_COMM_WORLD, &l->requests[t]);
        from += n;
        to += n * g_ranks;
    }
    MPI_Waitall(l->n_tensors, l->requests, MPI_STATUSES_IGNORE);
}

static void call_memcpy(loop_t *l)
{
    memcpy(l->out, l->in, l->count * sizeof *l->in);
    __asm__ volatile("" ::: "memory");
}

static float expect_sum(const loop_t *l, size_t i)
{
    (void)l;
    return sum_of_ranks(i);
}

static float expect_root(const loop_t *l, size_t i)
{
    (void)l;
    return value(0, i);
}

static float expect_own(const loop_t *l, size_t i)
{
    (void)l;
    return value(g_rank, i);
}

static float expect_gathered(const loop_t *l, size_t i)
{
    return value((int)(i / l->part), i % l->part);
}

static float expect_many_gathered(const loop_t *l, size_t i)
{
    size_t before = 0; // floats of one rank in the tensors before
    int t = 0;
    while (i >= (before + l->tensors[t]) * g_ranks)
        before += l->tensors[t++];
    i -= before * g_ranks;
    return value((int)(i / l->tensors[t]), before + i % l->tensors[t]);
}

static float expect_exchanged(const loop_t *l, size_t i)
{
    return value((int)(i / l->part), g_rank * l->part + i % l->part);
}

static float expect_scattered(const loop_t *l, size_t i)
{
    return sum_of_ranks(g_rank * l->part + i);
}

static const op_t ops[] = {
    {"allreduce", shape_plain, call_allreduce, expect_sum, IN_PLACE | GROWS},
    {"broadcast", shape_plain, call_broadcast, expect_root, IN_PLACE},
    {"allgather", shape_gather, call_allgather, expect_gathered, 0},
    {"alltoall", shape_exchange, call_alltoall, expect_exchanged, 0},
    {"reducescatter", shape_scatter, call_reducescatter, expect_scattered, 0},
    {"many", shape_many, call_many, expect_sum, IN_PLACE | GROWS},
    {"many-gather", shape_many_gathered, call_many_gathered, expect_many_gathered, 0},
    {"memcpy", shape_copy, call_memcpy, expect_own, ALIGNED},
};

// ---- one test ----

// Large buffers ask for huge pages, as NumPy's do; --small-pages leaves that to the system.
static float *buffer(size_t count)
{
    if (count == 0)
        return NULL;
    size_t bytes = count * sizeof(float);
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    size_t room = (bytes + align - 1) / align * align;
    float *p = aligned_alloc(align, room);
    if (!p)
        die("out of memory", "");
    if (align == HUGE_PAGE && !g_small_pages)
        (void)madvise(p, room, MADV_HUGEPAGE);
    memset(p, 0, room);
    return p;
}

static void open_loop(loop_t *l, const op_t *op, size_t bytes, const size_t *tensors, int n_tensors)
{
    *l = (loop_t){.count = bytes / sizeof(float) ? bytes / sizeof(float) : 1,
                  .tensors = tensors,
                  .n_tensors = n_tensors};
    op->shape(l);
    l->in = buffer(l->count);
    l->out = buffer(l->out_count);
    l->requests = malloc((n_tensors + 1) * sizeof *l->requests);
    if (!l->requests)
        die("out of memory", "");
    for (size_t i = 0; i < l->count; i++)
        l->in[i] = value(g_rank, i);
}

static void close_loop(loop_t *l)
{
    free(l->in);
    free(l->out);
    free(l->requests);
}

static bool verify(const loop_t *l, const op_t *op)
{
    const float *result = op->flags & IN_PLACE ? l->in : l->out;
    size_t n = op->flags & IN_PLACE ? l->count : l->out_count;
    int good = 1;
    for (size_t i = 0; i < n && good; i++)
        good = result[i] == op->expect(l, i);
    MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return good;
}

static double timed_call(loop_t *l, const op_t *op)
{
    if (op->flags & ALIGNED)
        MPI_Barrier(MPI_COMM_WORLD);
    double start = now_us();
    op->call(l);
    return now_us() - start;
}

// How many samples fit into the budget, judged by the fastest of a few calls on the slowest rank.
static int plan_samples(loop_t *l, const op_t *op, double budget_s, int max_samples)
{
    double best = timed_call(l, op);
    for (int i = 1; i < ESTIMATE_CALLS; i++) {
        double t = timed_call(l, op);
        if (t < best)
            best = t;
    }
    MPI_Allreduce(MPI_IN_PLACE, &best, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    double n = budget_s * 1e6 / (best > 0.1 ? best : 0.1);
    if (n > max_samples)
        return max_samples;
    return n < MIN_SAMPLES ? MIN_SAMPLES : (int)n;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_row(const char *peer, const op_t *op, const loop_t *l, size_t bytes,
                      double *samples, int n, bool good)
{
    qsort(samples, n, sizeof *samples, ascending);
    bool many = op->shape == shape_many || op->shape == shape_many_gathered;
    size_t total = many ? l->count * sizeof(float) : bytes;
    printf("{\"peer\":\"%s\",\"op\":\"%s\",\"dtype\":\"float32\",\"bytes\":%zu,\"ranks\":%d,"
           "\"median_us\":%.3f,\"p99_us\":%.3f,\"min_us\":%.3f,\"samples\":%d,\"ok\":%s}\n",
           peer, op->name, total, g_ranks, samples[n / 2], samples[(int)(n * 0.99)], samples[0], n,
           good ? "true" : "false");
    fflush(stdout);
}

typedef struct {
    const char *peer;
    const op_t *op[MAX_LIST];
    size_t bytes[MAX_LIST];
    size_t tensors[MAX_TENSORS]; // in floats
    int nops, nbytes, ntensors, max_samples;
    double budget_s;
    int pin, thread_multiple, small_pages;
} options_t;

static bool run_test(const options_t *o, const op_t *op, size_t bytes)
{
    loop_t l;
    open_loop(&l, op, bytes, o->tensors, o->ntensors);
    timed_call(&l, op);
    bool good = verify(&l, op);
    if (op->flags & GROWS)
        memset(l.in, 0, l.count * sizeof *l.in);
    int n = plan_samples(&l, op, o->budget_s, o->max_samples);
    double *samples = malloc(n * sizeof *samples);
    if (!samples)
        die("out of memory", "");
    for (int i = 0; i < WARMUP_CALLS && i < n / 5; i++)
        timed_call(&l, op);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < n; i++)
        samples[i] = timed_call(&l, op);
    MPI_Allreduce(MPI_IN_PLACE, samples, n, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (g_rank == 0)
        print_row(o->peer, op, &l, bytes, samples, n, good);
    free(samples);
    close_loop(&l);
    return good;
}

// ---- command line ----

static const op_t *find_op(const char *name)
{
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (strcmp(ops[i].name, name) == 0)
            return &ops[i];
    die("unknown operation: ", name);
    return NULL;
}

static void parse_ops(options_t *o, char *list)
{
    o->nops = 0;
    for (char *s = strtok(list, ","); s && o->nops < MAX_LIST; s = strtok(NULL, ","))
        o->op[o->nops++] = find_op(s);
}

static void parse_bytes(options_t *o, char *list)
{
    o->nbytes = 0;
    for (char *s = strtok(list, ","); s && o->nbytes < MAX_LIST; s = strtok(NULL, ","))
        o->bytes[o->nbytes++] = strtoull(s, NULL, 10);
}

// "9408,256*2": bytes, and how many tensors of that size.
static void parse_tensors(options_t *o, char *list)
{
    o->ntensors = 0;
    for (char *s = strtok(list, ","); s; s = strtok(NULL, ",")) {
        char *end;
        size_t floats = strtoull(s, &end, 10) / sizeof(float);
        int times = *end == '*' ? atoi(end + 1) : 1;
        for (int i = 0; i < times && o->ntensors < MAX_TENSORS; i++)
            o->tensors[o->ntensors++] = floats ? floats : 1;
    }
}

static int *find_flag(options_t *o, const char *name)
{
    if (strcmp(name, "--pin") == 0)
        return &o->pin;
    if (strcmp(name, "--thread-multiple") == 0)
        return &o->thread_multiple;
    return strcmp(name, "--small-pages") == 0 ? &o->small_pages : NULL;
}

static options_t parse(int argc, char **argv)
{
    options_t o = {.peer = "mpi",
                   .op = {&ops[0]},
                   .bytes = {4},
                   .nops = 1,
                   .nbytes = 1,
                   .max_samples = 1000,
                   .budget_s = 1.0};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        int *flag = find_flag(&o, name);
        if (flag) {
            *flag = 1;
            continue;
        }
        char *arg = i + 1 < argc ? argv[++i] : NULL;
        if (!arg)
            die("no such option, or its value is missing: ", name);
        if (strcmp(name, "--peer") == 0)
            o.peer = arg;
        else if (strcmp(name, "--op") == 0)
            parse_ops(&o, arg);
        else if (strcmp(name, "--bytes") == 0)
            parse_bytes(&o, arg);
        else if (strcmp(name, "--budget") == 0)
            o.budget_s = atof(arg);
        else if (strcmp(name, "--max-samples") == 0)
            o.max_samples = atoi(arg);
        else if (strcmp(name, "--tensors") == 0)
            parse_tensors(&o, arg);
        else
            die("unknown option: ", name);
    }
    if (o.max_samples < MIN_SAMPLES)
        die("--max-samples must be at least 3", "");
    return o;
}

// Rank i to core i when every rank can have one: two ranks that spin must not share a core.
static void pin_to_core(void)
{
    if (g_ranks > sysconf(_SC_NPROCESSORS_ONLN))
        return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(g_rank, &set);
    if (sched_setaffinity(0, sizeof set, &set))
        perror("mpi_loop: cannot pin, going on");
}

int main(int argc, char **argv)
{
    options_t o = parse(argc, argv);
    g_small_pages = o.small_pages;
    int provided;
    MPI_Init_thread(&argc, &argv, o.thread_multiple ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE,
                    &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &g_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &g_ranks);
    if (o.pin)
        pin_to_core();
    bool good = true;
    for (int i = 0; i < o.nops; i++)
        for (int j = 0; j < o.nbytes; j++)
            good &= run_test(&o, o.op[i], o.bytes[j]);
    MPI_Finalize();
    return good ? 0 : 1;
}
