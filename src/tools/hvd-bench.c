// SPDX-License-Identifier: Apache-2.0
//
// hvd-bench - measures the library the way users meet it: submit, agree, run, wait.
//
// Starts its own ranks by fork (on this machine, as one host or several), or is one rank of a job
// that somebody else started (--no-fork). A sample is one blocking call; for each sample the
// slowest rank counts. Every result is verified. One JSON object per line with --json, else a
// table.
#define _GNU_SOURCE
#include "base/base.h"
#include "coll/reduce.h"
#include "engine/engine.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_SIZES 64
#define MAX_RANKS 512
#define HUGE_PAGE ((size_t)2 << 20)
#define MANY_TENSORS 500
#define WARM_UP 5

typedef struct bench_options {
    const char *op;
    hvd_dtype_t dtype;
    hvd_reduce_t reduce;
    size_t bytes[MAX_SIZES];
    int n_bytes;
    int ranks, hosts;
    double budget_s;
    int max_samples;
    bool json, pin, no_fork, serve, demo, out_of_place;
    const char *env[32]; // ends in NULL
    int n_env;
} bench_options_t;

typedef struct rank {
    hvd_ctx_t *ctx;
    const bench_options_t *options;
    int rank, size;
    char text[HVD_TEXT_BYTES];
} rank_t;

static void die(rank_t *r, const char *what)
{
    fprintf(stderr, "hvd-bench: rank %d: %s: %s\n", r->rank, what, r->text);
    exit(1);
}

// --- Operations ----------------------------------------------------------------------------------

static void run_request(rank_t *r, hvd_request_t *request)
{
    hvd_handle_t handle;
    request->flags |= HVD_WAITS;
    if (hvd_submit(r->ctx, request, &handle, r->text, sizeof r->text) != HVD_OK) {
        die(r, "submit");
    }
    if (hvd_wait(r->ctx, handle, HVD_FOREVER) != HVD_OK) {
        hvd_result_t result;
        hvd_result(r->ctx, handle, &result);
        snprintf(r->text, sizeof r->text, "%s", result.text);
        die(r, request->name);
    }
    hvd_release(r->ctx, handle);
}

static void barrier(rank_t *r)
{
    run_request(r, &(hvd_request_t){.op = HVD_BARRIER, .name = "bench.barrier"});
}

static void max_over_ranks(rank_t *r, double *values, int n)
{
    int64_t shape[1] = {n};
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    char name[64];
    snprintf(name, sizeof name, "bench.max.%d", n);
    run_request(r, &(hvd_request_t){.op = HVD_ALLREDUCE,
                                    .name = name,
                                    .dtype = HVD_FLOAT64,
                                    .reduce = HVD_MAX,
                                    .tensors = &tensor,
                                    .n_tensors = 1});
}

// What is timed: one call of `once` on prepared memory.
typedef struct workload {
    const char *op;
    size_t bytes; // as asked for
    size_t in_bytes, out_bytes;
    uint8_t *in, *out; // out may be in
    hvd_request_t request;
    hvd_tensor_t tensor;
    int64_t shape[1];
    char name[64];
    hvd_handle_t handles[MANY_TENSORS];
    char many_names[MANY_TENSORS][32];
} workload_t;

static void *memory(size_t bytes)
{
    size_t rounded = (MAX(bytes, 64) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    bool large = bytes >= HUGE_PAGE;
    void *at =
        aligned_alloc(large ? HUGE_PAGE : 64, large ? rounded : (MAX(bytes, 64) + 63) / 64 * 64);
    if (at == NULL) {
        fprintf(stderr, "hvd-bench: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    if (large) {
        madvise(at, rounded, MADV_HUGEPAGE); // as numerical libraries do for their arrays
    }
    memset(at, 0, large ? rounded : bytes);
    return at;
}

static void fill_ones(hvd_dtype_t dtype, uint8_t *at, size_t bytes)
{
    size_t element = hvd_dtype_bytes(dtype);
    uint8_t one[8] = {1};
    const float one_f = 1.0f;
    const double one_d = 1.0;
    const uint16_t one_half = 0x3C00;
    const uint16_t one_bfloat = 0x3F80;
    switch (dtype) {
    case HVD_FLOAT32:
        memcpy(one, &one_f, 4);
        break;
    case HVD_FLOAT64:
        memcpy(one, &one_d, 8);
        break;
    case HVD_FLOAT16:
        memcpy(one, &one_half, 2);
        break;
    case HVD_BFLOAT16:
        memcpy(one, &one_bfloat, 2);
        break;
    default:
        break;
    }
    for (size_t i = 0; i + element <= bytes; i += element) {
        memcpy(at + i, one, element);
    }
}

static bool all_equal_scaled_one(hvd_dtype_t dtype, const uint8_t *at, size_t bytes, int factor)
{
    size_t element = hvd_dtype_bytes(dtype);
    uint8_t ones[8];
    uint8_t want[8];
    fill_ones(dtype, ones, element);
    reduce_scale(dtype, want, ones, 1, factor);
    for (size_t i = 0; i + element <= bytes; i += element) {
        if (memcmp(at + i, want, element) != 0) {
            return false;
        }
    }
    return true;
}

static hvd_op_t op_named(const char *name)
{
    for (int op = 0; op < HVD_N_OPS; op++) {
        if (strcmp(hvd_op_name((hvd_op_t)op), name) == 0) {
            return (hvd_op_t)op;
        }
    }
    return HVD_ALLREDUCE; // many, memcpy
}

// Sizes as the other libraries' benchmarks count them: allgather by its result, alltoall and
// reducescatter by one rank's input.
static void prepare(rank_t *r, workload_t *w, const char *op, size_t bytes)
{
    const bench_options_t *o = r->options;
    size_t element = hvd_dtype_bytes(o->dtype);
    size_t n = (size_t)r->size;
    size_t whole = MAX(bytes / element, 1) * element;
    size_t share = MAX(whole / element / n, 1) * element;
    *w = (workload_t){.op = op, .bytes = bytes};
    hvd_op_t code = op_named(op);
    bool many = strcmp(op, "many") == 0;
    w->in_bytes = many                                                ? whole * MANY_TENSORS
                  : code == HVD_ALLGATHER                             ? share
                  : code == HVD_ALLTOALL || code == HVD_REDUCESCATTER ? share * n
                                                                      : whole;
    w->out_bytes = code == HVD_ALLGATHER       ? share * n
                   : code == HVD_REDUCESCATTER ? share
                                               : w->in_bytes;
    bool in_place = (code == HVD_ALLREDUCE || code == HVD_BROADCAST) && !o->out_of_place &&
                    strcmp(op, "memcpy") != 0;
    w->in = memory(w->in_bytes);
    w->out = in_place ? w->in : memory(w->out_bytes);
    fill_ones(o->dtype, w->in, w->in_bytes);
    w->shape[0] = (int64_t)((many ? whole : w->in_bytes) / element);
    w->tensor = (hvd_tensor_t){.input = w->in, .output = w->out, .n_dims = 1, .shape = w->shape};
    snprintf(w->name, sizeof w->name, "bench.%s.%zu", op, bytes);
    w->request = (hvd_request_t){.op = code,
                                 .name = w->name,
                                 .dtype = o->dtype,
                                 .reduce = o->reduce,
                                 .tensors = &w->tensor,
                                 .n_tensors = 1};
    for (int i = 0; i < MANY_TENSORS; i++) {
        snprintf(w->many_names[i], sizeof w->many_names[i], "bench.many.%zu.%d", bytes, i);
    }
}

static void unprepare(workload_t *w)
{
    if (w->out != w->in) {
        free(w->out);
    }
    free(w->in);
}

static void run_many(rank_t *r, workload_t *w)
{
    size_t one = w->in_bytes / MANY_TENSORS;
    for (int i = 0; i < MANY_TENSORS; i++) {
        hvd_tensor_t tensor = w->tensor;
        tensor.input = w->in + (size_t)i * one;
        tensor.output = w->out + (size_t)i * one;
        hvd_request_t request = w->request;
        request.name = w->many_names[i];
        request.tensors = &tensor;
        if (hvd_submit(r->ctx, &request, &w->handles[i], r->text, sizeof r->text) != HVD_OK) {
            die(r, "submit");
        }
    }
    for (int i = 0; i < MANY_TENSORS; i++) {
        if (hvd_wait(r->ctx, w->handles[i], HVD_FOREVER) != HVD_OK) {
            die(r, "wait");
        }
        hvd_release(r->ctx, w->handles[i]);
    }
}

static void once(rank_t *r, workload_t *w)
{
    if (strcmp(w->op, "memcpy") == 0) {
        memcpy(w->out, w->in, w->in_bytes);
    } else if (strcmp(w->op, "many") == 0) {
        run_many(r, w);
    } else {
        run_request(r, &w->request);
    }
}

static bool verify(rank_t *r, workload_t *w)
{
    hvd_op_t op = op_named(w->op);
    bool reduces = (op == HVD_ALLREDUCE && strcmp(w->op, "memcpy") != 0) || op == HVD_REDUCESCATTER;
    int factor = reduces && r->options->reduce == HVD_SUM ? r->size : 1;
    if (op == HVD_BARRIER) {
        return true;
    }
    return all_equal_scaled_one(r->options->dtype, w->out, w->out_bytes, factor);
}

// --- Measuring -----------------------------------------------------------------------------------

static double now_us(void)
{
    return (double)clock_ns() / 1000.0;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct figures {
    double median_us, p99_us, min_us;
    double middle_us; // mean of the middle half: finer than a tick of the clock
    int samples;
    bool ok;
} figures_t;

static int choose_samples(rank_t *r, workload_t *w)
{
    double best = 1e18;
    bool copies = strcmp(w->op, "memcpy") == 0;
    for (int i = 0; i < WARM_UP; i++) {
        if (copies) {
            barrier(r);
        }
        double start = now_us();
        once(r, w);
        best = MIN(best, now_us() - start);
    }
    max_over_ranks(r, &best, 1);
    double n = r->options->budget_s * 1e6 / MAX(best, 0.1);
    return (int)MAX(3, MIN(n, r->options->max_samples));
}

static double mean(const double *values, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += values[i];
    }
    return sum / MAX(n, 1);
}

static figures_t measure(rank_t *r, workload_t *w)
{
    figures_t f = {0};
    once(r, w);
    double wrong = verify(r, w) ? 0 : 1;
    max_over_ranks(r, &wrong, 1);
    f.ok = wrong == 0;
    memset(w->in, 0, w->in_bytes); // sums in place stay finite
    f.samples = choose_samples(r, w);
    double *times = memory((size_t)f.samples * sizeof *times);
    for (int i = 0; i < MIN(20, f.samples / 5); i++) {
        once(r, w);
    }
    barrier(r);
    bool copies = strcmp(w->op, "memcpy") == 0;
    for (int i = 0; i < f.samples; i++) {
        if (copies) {
            barrier(r); // the others are synchronised by what they do
        }
        double start = now_us();
        once(r, w);
        times[i] = now_us() - start;
    }
    max_over_ranks(r, times, f.samples);
    qsort(times, (size_t)f.samples, sizeof *times, compare_doubles);
    f.median_us = times[f.samples / 2];
    f.middle_us = mean(times + f.samples / 4, MAX(f.samples / 2, 1));
    f.p99_us = times[(int)((f.samples - 1) * 0.99)];
    f.min_us = times[0];
    free(times);
    return f;
}

// Bytes that had to cross between ranks, per second: comparable between operations and rank counts.
static double bus_gb_s(const char *op, size_t bytes, int n, double us)
{
    double factor = (n - 1.0) / n;
    factor *= strcmp(op, "allreduce") == 0 ? 2 : 1;
    factor = strcmp(op, "broadcast") == 0 || strcmp(op, "memcpy") == 0 ? 1 : factor;
    return n > 1 || strcmp(op, "memcpy") == 0 ? (double)bytes * factor / us / 1000 : 0;
}

static void print_json(const rank_t *r, const workload_t *w, const figures_t *f)
{
    const bench_options_t *o = r->options;
    printf("{\"op\": \"%s\", \"dtype\": \"%s\", \"bytes\": %zu, \"ranks\": %d, \"hosts\": %d, "
           "\"median_us\": %.3f, \"middle_us\": %.4f, "
           "\"p99_us\": %.3f, \"min_us\": %.3f, \"samples\": %d, \"bus_gb_s\": %.3f, \"ok\": %s}\n",
           w->op, hvd_dtype_name(o->dtype), w->bytes, r->size, o->hosts, f->median_us, f->middle_us,
           f->p99_us, f->min_us, f->samples, bus_gb_s(w->op, w->bytes, r->size, f->median_us),
           f->ok ? "true" : "false");
    fflush(stdout);
}

static void print_row(const rank_t *r, const workload_t *w, const figures_t *f)
{
    printf("%14s  %9s  %12zu  %12.2f  %12.2f  %9.2f  %s\n", w->op,
           hvd_dtype_name(r->options->dtype), w->bytes, f->median_us, f->p99_us,
           bus_gb_s(w->op, w->bytes, r->size, f->median_us), f->ok ? "correct" : "WRONG");
    fflush(stdout);
}

static void pin_to_core(int rank)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)rank % (size_t)sysconf(_SC_NPROCESSORS_ONLN), &set);
    sched_setaffinity(0, sizeof set, &set);
}

static int bench(rank_t *r)
{
    const bench_options_t *o = r->options;
    bool ok = true;
    if (r->rank == 0 && !o->json) {
        printf("%14s  %9s  %12s  %12s  %12s  %9s\n", "operation", "dtype", "bytes", "median us",
               "p99 us", "bus GB/s");
    }
    for (int i = 0; i < o->n_bytes; i++) {
        static workload_t w; // large: names of all tensors of "many"
        prepare(r, &w, o->op, o->bytes[i]);
        figures_t f = measure(r, &w);
        if (r->rank == 0) {
            (o->json ? print_json : print_row)(r, &w, &f);
        }
        ok &= f.ok;
        unprepare(&w);
    }
    return ok ? 0 : 1;
}

// --- Ranks ---------------------------------------------------------------------------------------

static int run_rank(const bench_options_t *o, const char *const *env)
{
    rank_t r = {.options = o, .rank = -1};
    hvd_options_t init = {.env = env};
    if (hvd_init(env != NULL ? &init : NULL, &r.ctx, r.text, sizeof r.text) != HVD_OK) {
        die(&r, "init");
    }
    r.rank = hvd_rank(r.ctx);
    r.size = hvd_size(r.ctx);
    if (o->pin) {
        pin_to_core(r.rank);
    }
    int code = bench(&r);
    hvd_shutdown(r.ctx);
    return code;
}

static void hex_of(const uint8_t secret[32], char hex[65])
{
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", secret[i]);
    }
}

// The child waits for the port, then is a rank.
static int child_main(const bench_options_t *o, int rank, int from_parent)
{
    char hello[128];
    ssize_t n = read(from_parent, hello, sizeof hello - 1);
    if (n <= 65) {
        return 1; // the parent is gone
    }
    hello[n] = '\0';
    int per_host = (o->ranks + o->hosts - 1) / o->hosts;
    int secret[2];
    if (pipe(secret) != 0 || write(secret[1], hello, 64) != 64) {
        return 1;
    }
    close(secret[1]);
    static char text[12][96];
    const char *env[64];
    int k = 0;
    int local_size = MIN(per_host, o->ranks - rank / per_host * per_host);
    snprintf(text[0], sizeof text[0], "HOROVOD_RANK=%d", rank);
    snprintf(text[1], sizeof text[1], "HOROVOD_SIZE=%d", o->ranks);
    snprintf(text[2], sizeof text[2], "HOROVOD_LOCAL_RANK=%d", rank % per_host);
    snprintf(text[3], sizeof text[3], "HOROVOD_LOCAL_SIZE=%d", local_size);
    snprintf(text[4], sizeof text[4], "HOROVOD_CROSS_RANK=%d", rank / per_host);
    snprintf(text[5], sizeof text[5], "HOROVOD_CROSS_SIZE=%d", o->hosts);
    snprintf(text[6], sizeof text[6], "HOROVOD_HOSTNAME=bench%d", rank / per_host);
    snprintf(text[7], sizeof text[7], "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1");
    snprintf(text[8], sizeof text[8], "HOROVOD_RENDEZVOUS_PORT=%s", hello + 65);
    snprintf(text[9], sizeof text[9], "HOROVOD_SECRET_FD=%d", secret[0]);
    while (k < 10) {
        env[k] = text[k];
        k++;
    }
    for (int i = 0; i < o->n_env; i++) {
        env[k++] = o->env[i];
    }
    env[k] = NULL;
    return run_rank(o, env);
}

static int reap(const pid_t *pids, int n)
{
    int worst = 0;
    for (int left = n; left > 0; left--) {
        int state;
        pid_t pid = wait(&state);
        int code = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
        if (pid > 0 && code != 0 && worst == 0) {
            worst = code;
            for (int i = 0; i < n; i++) {
                if (pids[i] != pid) {
                    kill(pids[i], SIGTERM);
                }
            }
        }
    }
    return worst;
}

// Of ranks that were killed, or ended before they could leave the job.
static void remove_sockets(const bench_options_t *o)
{
    config_t config;
    err_t err;
    char base[LIVE_PATH_BYTES];
    if (config_load(&config, o->env, NULL, &err) == HVD_OK) {
        if (live_base_dir(config.monitor_dir, base)) {
            live_clean(base, NULL);
        }
        config_free(&config);
    }
}

static int fork_ranks(const bench_options_t *o)
{
    uint8_t secret[32];
    char hex[65];
    err_t err;
    pid_t pids[MAX_RANKS];
    int to_child[MAX_RANKS];
    if (random_bytes(secret, sizeof secret, &err) != HVD_OK) {
        fprintf(stderr, "hvd-bench: %s\n", err.text);
        return 1;
    }
    hex_of(secret, hex);
    for (int i = 0; i < o->ranks; i++) {
        int ends[2];
        if (pipe(ends) != 0 || (pids[i] = fork()) < 0) {
            fprintf(stderr, "hvd-bench: cannot start rank %d: %s\n", i, strerror(errno));
            return 1;
        }
        if (pids[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); // who kills us means them too
            close(ends[1]);
            exit(child_main(o, i, ends[0]));
        }
        close(ends[0]);
        to_child[i] = ends[1];
    }
    hvd_rendezvous_t *server;
    char text[HVD_TEXT_BYTES];
    if (hvd_rendezvous_start(NULL, 0, secret, &server, text, sizeof text) != HVD_OK) {
        fprintf(stderr, "hvd-bench: %s\n", text);
        return 1;
    }
    for (int i = 0; i < o->ranks; i++) {
        char hello[128];
        int n = snprintf(hello, sizeof hello, "%s %d", hex, hvd_rendezvous_port(server));
        if (write(to_child[i], hello, (size_t)n) != n) {
            fprintf(stderr, "hvd-bench: rank %d has died\n", i);
        }
        close(to_child[i]);
    }
    int code = reap(pids, o->ranks);
    remove_sockets(o);
    hvd_rendezvous_stop(server);
    return code;
}

// One rank of a job somebody else started; with --serve-rendezvous it also runs the meeting place.
static int run_alone(const bench_options_t *o)
{
    hvd_rendezvous_t *server = NULL;
    if (o->serve) {
        config_t config;
        err_t err;
        uint8_t secret[32];
        char text[HVD_TEXT_BYTES];
        if (config_load(&config, NULL, NULL, &err) != HVD_OK) {
            fprintf(stderr, "hvd-bench: %s\n", err.text);
            return 1;
        }
        FILE *file = fopen(config.secret_file, "r");
        bool read_all = file != NULL;
        for (int i = 0; read_all && i < 32; i++) {
            read_all = fscanf(file, "%2hhx", &secret[i]) == 1;
        }
        if (file != NULL) {
            fclose(file);
        }
        if (!read_all || hvd_rendezvous_start(config.rendezvous_addr, (int)config.rendezvous_port,
                                              secret, &server, text, sizeof text) != HVD_OK) {
            fprintf(stderr, "hvd-bench: cannot serve the rendezvous: %s\n",
                    read_all ? text : "no secret");
            return 1;
        }
        config_free(&config);
    }
    int code = run_rank(o, NULL);
    hvd_rendezvous_stop(server);
    return code;
}

// --- Options -------------------------------------------------------------------------------------

static const char usage[] =
    "usage: hvd-bench [--op "
    "allreduce|allgather|broadcast|alltoall|reducescatter|barrier|many|memcpy]\n"
    "                 [--dtype float32] [--reduce sum] [--bytes 4,1024,...] [--ranks 2] [--hosts "
    "1]\n"
    "                 [--transport shm|tcp] [--algorithm NAME] [--env NAME=VALUE] [--encrypt "
    "auto|always|never]\n"
    "                 [--budget SECONDS] [--max-samples N] [--out-of-place] [--pin] [--json]\n"
    "                 [--no-fork [--serve-rendezvous]] [--demo]\n";

static void add_env(bench_options_t *o, const char *name, const char *value)
{
    char *text;
    if (o->n_env < (int)N_ELEMENTS(o->env) - 1 && asprintf(&text, "%s=%s", name, value) > 0) {
        o->env[o->n_env++] = text;
    }
}

static bool parse_sizes(bench_options_t *o, char *text)
{
    o->n_bytes = 0;
    for (char *save = NULL, *word = strtok_r(text, ",", &save); word != NULL;
         word = strtok_r(NULL, ",", &save)) {
        char *end;
        unsigned long long n = strtoull(word, &end, 10);
        n <<= *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
        if (end == word || o->n_bytes == MAX_SIZES) {
            return false;
        }
        o->bytes[o->n_bytes++] = (size_t)n;
    }
    return o->n_bytes > 0;
}

static bool parse_dtype(const char *text, hvd_dtype_t *dtype_p)
{
    for (int d = 0; d < HVD_N_DTYPES; d++) {
        if (strcmp(hvd_dtype_name((hvd_dtype_t)d), text) == 0) {
            *dtype_p = (hvd_dtype_t)d;
            return true;
        }
    }
    return false;
}

static bool parse_reduce(const char *text, hvd_reduce_t *reduce_p)
{
    for (int i = 0; i < HVD_N_REDUCES; i++) {
        if (strcmp(hvd_reduce_name((hvd_reduce_t)i), text) == 0) {
            *reduce_p = (hvd_reduce_t)i;
            return true;
        }
    }
    return false;
}

enum {
    OP = 1,
    DTYPE,
    REDUCE,
    BYTES,
    RANKS,
    HOSTS,
    TRANSPORT,
    ALGORITHM,
    ENV,
    ENCRYPT,
    BUDGET,
    SAMPLES,
    OUT,
    PIN,
    JSON,
    NO_FORK,
    SERVE,
    DEMO,
    HELP,
};

static const struct option long_options[] = {
    {"op", 1, 0, OP},
    {"dtype", 1, 0, DTYPE},
    {"reduce", 1, 0, REDUCE},
    {"bytes", 1, 0, BYTES},
    {"ranks", 1, 0, RANKS},
    {"hosts", 1, 0, HOSTS},
    {"transport", 1, 0, TRANSPORT},
    {"algorithm", 1, 0, ALGORITHM},
    {"env", 1, 0, ENV},
    {"encrypt", 1, 0, ENCRYPT},
    {"budget", 1, 0, BUDGET},
    {"max-samples", 1, 0, SAMPLES},
    {"out-of-place", 0, 0, OUT},
    {"pin", 0, 0, PIN},
    {"json", 0, 0, JSON},
    {"no-fork", 0, 0, NO_FORK},
    {"serve-rendezvous", 0, 0, SERVE},
    {"demo", 0, 0, DEMO},
    {"help", 0, 0, HELP},
    {0},
};

static bool parse_one(bench_options_t *o, int code, char *value)
{
    char forced[128];
    switch (code) {
    case OP:
        o->op = value;
        return true;
    case DTYPE:
        return parse_dtype(value, &o->dtype);
    case REDUCE:
        return parse_reduce(value, &o->reduce);
    case BYTES:
        return parse_sizes(o, value);
    case RANKS:
        o->ranks = (int)strtol(value, NULL, 10);
        return o->ranks > 0 && o->ranks <= MAX_RANKS;
    case HOSTS:
        o->hosts = (int)strtol(value, NULL, 10);
        return o->hosts > 0;
    case TRANSPORT:
        add_env(o, "HOROVOD_TRANSPORTS", value);
        return true;
    case ALGORITHM:
        snprintf(forced, sizeof forced, "%s=%s", o->op, value);
        add_env(o, "HOROVOD_ALGORITHM", forced);
        return true;
    case ENV:
        o->env[o->n_env++] = value;
        return o->n_env < (int)N_ELEMENTS(o->env);
    case ENCRYPT:
        add_env(o, "HOROVOD_ENCRYPT", value);
        return true;
    case BUDGET:
        o->budget_s = strtod(value, NULL);
        return true;
    case SAMPLES:
        o->max_samples = (int)strtol(value, NULL, 10);
        return o->max_samples > 0;
    case OUT:
        o->out_of_place = true;
        return true;
    case PIN:
        o->pin = true;
        return true;
    case JSON:
        o->json = true;
        return true;
    case NO_FORK:
        o->no_fork = true;
        return true;
    case SERVE:
        o->serve = true;
        return true;
    case DEMO:
        o->demo = true;
        return true;
    default:
        return false;
    }
}

static int run_demo(bench_options_t *o)
{
    static const struct {
        const char *what, *op;
        int ranks, hosts;
    } acts[] = {
        {"4 ranks on one host, through shared memory", "allreduce", 4, 1},
        {"4 ranks on two hosts (simulated here), through shared memory and encrypted TCP",
         "allreduce", 4, 2},
        {"the same ranks exchange blocks", "alltoall", 4, 2},
    };
    int code = 0;
    for (size_t i = 0; i < N_ELEMENTS(acts) && code == 0; i++) {
        bench_options_t act = *o;
        act.op = acts[i].op;
        act.ranks = acts[i].ranks;
        act.hosts = acts[i].hosts;
        act.budget_s = 0.2;
        act.bytes[0] = 4, act.bytes[1] = 64 * KIB, act.bytes[2] = MIB, act.bytes[3] = 16 * MIB;
        act.n_bytes = 4;
        printf("\n%s\n", acts[i].what);
        fflush(stdout);
        code = fork_ranks(&act);
    }
    printf("\n%s\n", code == 0 ? "All results were checked and are correct."
                               : "Something went wrong, see above.");
    return code;
}

int main(int argc, char **argv)
{
    bench_options_t o = {.op = "allreduce",
                         .dtype = HVD_FLOAT32,
                         .reduce = HVD_SUM,
                         .bytes = {4, KIB, 64 * KIB, MIB, 16 * MIB},
                         .n_bytes = 5,
                         .ranks = 2,
                         .hosts = 1,
                         .budget_s = 1.0,
                         .max_samples = 1000};
    int code;
    while ((code = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (code == HELP) {
            fputs(usage, stdout);
            return 0;
        }
        if (!parse_one(&o, code, optarg)) {
            fputs(usage, stderr);
            return 2;
        }
    }
    if (o.demo) {
        return run_demo(&o);
    }
    return o.no_fork ? run_alone(&o) : fork_ranks(&o);
}
