// SPDX-License-Identifier: Apache-2.0
//
// hvd-bench - measures the library the way users meet it: submit, agree, run, wait.
//
// Starts its own ranks by fork (ranks.c; as one host or several), or is one rank of a job
// that somebody else started (--no-fork). bench.c measures.
#define _GNU_SOURCE
#include "engine/engine.h"
#include "tools/bench.h"
#include "tools/ranks.h"

#include <getopt.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_BYTES (1ULL << 40) // of a size to measure
#define MAX_SIMULATED_RANKS 1000000

// A network of 100 Gbit/s through the kernel, hosts with eight ranks.
#define USUAL_MACHINE {.per_host = 8, .network = {5e3, 3e3, 1 / 12.5}, .host = {200, 200, 1 / 10.0}}

// --- Ranks ---------------------------------------------------------------------------------------

static void pin_to_core(int rank)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)rank % (size_t)sysconf(_SC_NPROCESSORS_ONLN), &set);
    sched_setaffinity(0, sizeof set, &set);
}

static int run_rank(const bench_options_t *o, const char *const *env)
{
    bench_rank_t r = {.options = o, .rank = -1};
    hvd_options_t init = {.env = env};
    if (hvd_init(env != NULL ? &init : NULL, &r.ctx, r.text, sizeof r.text) != HVD_OK) {
        bench_die(&r, "init");
    }
    r.rank = hvd_rank(r.ctx);
    r.size = hvd_size(r.ctx);
    if (o->pin) {
        pin_to_core(r.rank);
    }
    int code = bench_measure(&r);
    hvd_shutdown(r.ctx);
    return code;
}

static int run_forked(void *options, int rank, const char *const *env)
{
    (void)rank;
    return run_rank(options, env);
}

static int fork_ranks(bench_options_t *o)
{
    return ranks_run(&(rank_job_t){.tool = "hvd-bench",
                                   .ranks = o->ranks,
                                   .hosts = o->hosts,
                                   .env = o->env,
                                   .n_env = o->n_env,
                                   .run = run_forked,
                                   .arg = o});
}

// One rank of a job somebody else started; with --serve-rendezvous it also runs the rendezvous.
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
    "usage: hvd-bench [--op allreduce|allgather|broadcast|alltoall|reducescatter|barrier|memcpy]\n"
    "                 [--op many|many-gather [--tensors BYTES*COUNT,...]]\n"
    "                 [--dtype float32] [--reduce sum] [--bytes 4,1024,...] [--ranks 2] [--hosts "
    "1]\n"
    "                 [--transport shm|tcp] [--algorithm NAME] [--env NAME=VALUE] [--encrypt "
    "auto|always|never]\n"
    "                 [--budget SECONDS] [--max-samples N] [--out-of-place] [--pin] [--json]\n"
    "                 [--no-fork [--serve-rendezvous]] [--demo]\n"
    "       hvd-bench --simulate RANKS [--per-host 8] [--cores N] [--op ...] [--bytes ...] "
    "[--json]\n"
    "                 [--network LATENCY_US,MESSAGE_US,GIGABYTES_PER_S] [--memory the same]\n";

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
        int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
        bool is_number = end != word && *word != '-' && end[shift > 0] == '\0';
        if (!is_number || n > MAX_BYTES >> shift || o->n_bytes == MAX_SIZES) {
            return false;
        }
        n <<= shift;
        o->bytes[o->n_bytes++] = (size_t)n;
    }
    return o->n_bytes > 0;
}

// "9408,256*2": bytes, and how many tensors of that size.
static bool parse_tensors(bench_options_t *o, char *text)
{
    o->n_tensors = 0;
    for (char *save = NULL, *word = strtok_r(text, ",", &save); word != NULL;
         word = strtok_r(NULL, ",", &save)) {
        char *end;
        size_t bytes = strtoull(word, &end, 10);
        long times = *end == '*' ? strtol(end + 1, &end, 10) : 1;
        if (end == word || *end != '\0' || times < 1 || times > MAX_TENSORS - o->n_tensors) {
            return false;
        }
        for (long i = 0; i < times; i++) {
            o->tensors[o->n_tensors++] = bytes;
        }
    }
    return o->n_tensors > 0;
}

static bool parse_op(const char *text, const char **op_p)
{
    bool is_known = strcmp(text, "many") == 0 || strcmp(text, "many-gather") == 0 ||
                    strcmp(text, "memcpy") == 0;
    for (int op = 0; op < HVD_N_OPS; op++) {
        is_known |= op != HVD_JOIN && strcmp(hvd_op_name((hvd_op_t)op), text) == 0;
    }
    *op_p = text;
    return is_known;
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
    TENSORS,
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
    SIMULATE,
    PER_HOST,
    CORES,
    NETWORK,
    MEMORY,
    HELP,
};

static const struct option long_options[] = {
    {"op", 1, 0, OP},
    {"dtype", 1, 0, DTYPE},
    {"reduce", 1, 0, REDUCE},
    {"bytes", 1, 0, BYTES},
    {"tensors", 1, 0, TENSORS},
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
    {"simulate", 1, 0, SIMULATE},
    {"per-host", 1, 0, PER_HOST},
    {"cores", 1, 0, CORES},
    {"network", 1, 0, NETWORK},
    {"memory", 1, 0, MEMORY},
    {"help", 0, 0, HELP},
    {0},
};

// Three numbers: microseconds on the way, microseconds of a core, gigabytes a second.
static bool parse_path(const char *text, path_cost_t *cost_p)
{
    double latency_us, message_us, gigabytes;
    char end;
    if (sscanf(text, "%lf,%lf,%lf%c", &latency_us, &message_us, &gigabytes, &end) != 3 ||
        !(latency_us >= 0 && message_us >= 0 && gigabytes > 0)) {
        return false;
    }
    *cost_p = (path_cost_t){latency_us * 1e3, message_us * 1e3, 1 / gigabytes};
    return true;
}

static bool parse_count(const char *text, int most, int *count_p)
{
    char *end;
    long n = strtol(text, &end, 10);
    *count_p = (int)n;
    return end != text && *end == '\0' && n > 0 && n <= most;
}

static bool parse_one(bench_options_t *o, int code, char *value)
{
    char forced[128];
    switch (code) {
    case OP:
        return parse_op(value, &o->op);
    case DTYPE:
        return parse_dtype(value, &o->dtype);
    case REDUCE:
        return parse_reduce(value, &o->reduce);
    case BYTES:
        return parse_sizes(o, value);
    case TENSORS:
        return parse_tensors(o, value);
    case RANKS:
        return parse_count(value, RANKS_MOST, &o->ranks);
    case HOSTS:
        return parse_count(value, RANKS_MOST, &o->hosts);
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
    case SIMULATE:
        return parse_count(value, MAX_SIMULATED_RANKS, &o->simulated.n_ranks);
    case PER_HOST:
        return parse_count(value, MAX_SIMULATED_RANKS, &o->simulated.per_host);
    case CORES:
        return parse_count(value, MAX_SIMULATED_RANKS, &o->simulated.n_cores);
    case NETWORK:
        return parse_path(value, &o->simulated.network);
    case MEMORY:
        return parse_path(value, &o->simulated.host);
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

// getopt_long has said what it does not know itself.
static void print_refusal(int code, const char *value)
{
    for (const struct option *option = long_options; option->name != NULL; option++) {
        if (option->val == code) {
            fprintf(stderr, "hvd-bench: --%s cannot be \"%s\"\n", option->name, value);
        }
    }
    fputs(usage, stderr);
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
                         .max_samples = 1000,
                         .simulated = USUAL_MACHINE};
    int code;
    while ((code = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (code == HELP) {
            fputs(usage, stdout);
            return 0;
        }
        if (!parse_one(&o, code, optarg)) {
            print_refusal(code, optarg);
            return 2;
        }
    }
    if (o.simulated.n_ranks > 0) {
        return bench_simulate(&o);
    }
    if (o.demo) {
        return run_demo(&o);
    }
    return o.no_fork ? run_alone(&o) : fork_ranks(&o);
}
