// SPDX-License-Identifier: Apache-2.0
//
// hvd-info - what this build contains, and what it would do on this machine.
//
// Every view asks the library itself, so nothing here has to be kept in step with it: knobs come
// from their table, algorithms and routes from theirs. Transports are in info_transports.c, what
// ranks are doing now in live.c.
#define _GNU_SOURCE
#include "engine/engine.h"
#include "tools/info.h"
#include "tools/live.h"

#include <openssl/crypto.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>

#define MAX_RANKS 65536
#define SMALLEST ((size_t)4)
#define LARGEST (256 * MIB)
#define CHOICE_BYTES (HVD_TEXT_BYTES + 64)

// --- Knobs ---------------------------------------------------------------------------------------

bool info_load_knobs(config_t *config)
{
    log_t log = {.level = LOG_WARN, .rank = -1, .hide_time = true};
    err_t err;
    if (config_load(config, NULL, &log, &err) != HVD_OK) {
        fprintf(stderr, "hvd-info: %s\n", err.text);
        return false;
    }
    return true;
}

static int print_knobs(const info_options_t *options)
{
    table_t table = {.n_columns = 6};
    config_t config;
    char value[4096];
    (void)options;
    if (!info_load_knobs(&config)) {
        return 1;
    }
    static const char *const heads[] = {"name", "value", "origin", "default", "unit", "meaning"};
    for (size_t i = 0; i < N_ELEMENTS(heads); i++) {
        table_add(&table, "%s", heads[i]);
    }
    for (int id = 0; id < N_KNOBS; id++) {
        const knob_info_t *info = &knob_infos[id];
        config_format(&config, (enum knob_id)id, value, sizeof value);
        table_add(&table, "%s", info->env);
        table_add(&table, "%s", value[0] != '\0' ? value : "-");
        table_add(&table, "%s", config.origin[id] == FROM_DEFAULT ? "default" : "environment");
        table_add(&table, "%s", info->default_text[0] != '\0' ? info->default_text : "-");
        table_add(&table, "%s", info->unit[0] != '\0' ? info->unit : "-");
        table_add(&table, "%s", info->help);
    }
    config_free(&config);
    puts("knobs");
    table_print(&table);
    return 0;
}

// What a value may be, for people.
static void allowed_values(const knob_info_t *info, char *text, size_t bytes)
{
    if (strcmp(info->kind, "choice") == 0) {
        snprintf(text, bytes, "%s", info->choices);
        for (char *bar = text; (bar = strchr(bar, '|')) != NULL; *bar = '/') {
        }
    } else if (strcmp(info->kind, "text") == 0) {
        snprintf(text, bytes, "text");
    } else if (strcmp(info->kind, "bool") == 0) {
        snprintf(text, bytes, "0/1");
    } else {
        snprintf(text, bytes, "%.15g to %.15g%s%s", info->min, info->max,
                 info->unit[0] != '\0' ? " " : "", info->unit);
    }
}

static int print_markdown_knobs(const info_options_t *options)
{
    (void)options;
    puts("# Knobs\n\n"
         "Written by `hvd-info --markdown-knobs` from `src/base/knobs.def`: change that file,\n"
         "then run `build/hvd-info --markdown-knobs > docs/knobs.md`. `build/hvd-info --knobs`\n"
         "prints the values in force and where each came from.\n\n"
         "A knob is an environment variable, read once by `hvd_init()`. An empty value counts\n"
         "as not set. A value that does not parse or is out of range is an error that names the\n"
         "knob and what is allowed. A `HOROVOD_` name that is not known gets a warning with the\n"
         "nearest one that is. Numbers of bytes may end in K, M or G (powers of 1024);\n"
         "switches also take true/false, yes/no and on/off.\n\n"
         "| name | default | allowed | meaning |\n"
         "|---|---|---|---|");
    for (int id = 0; id < N_KNOBS; id++) {
        const knob_info_t *info = &knob_infos[id];
        char allowed[256];
        allowed_values(info, allowed, sizeof allowed);
        bool has_default = info->default_text[0] != '\0';
        printf("| `%s` | %s%s%s | %s | %s |\n", info->env, has_default ? "`" : "",
               info->default_text, has_default ? "`" : "", allowed, info->help);
    }
    return 0;
}

// --- Build ---------------------------------------------------------------------------------------

static int usable_cores(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

static void add_gpu(table_t *table)
{
    hvd_gpu_t gpu;
    hvd_gpu(NULL, &gpu);
    table_add(table, "GPU driver");
    if (gpu.driver[0] != '\0') {
        table_add(table, "%s %d.%d", gpu.driver, gpu.driver_version / 1000,
                  gpu.driver_version % 1000 / 10);
    } else {
        table_add(table, "none");
    }
    table_add(table, "NCCL");
    if (gpu.nccl_version != 0) {
        table_add(table, "%d.%d.%d", gpu.nccl_version / 10000, gpu.nccl_version / 100 % 100,
                  gpu.nccl_version % 100);
    } else {
        table_add(table, "none: %s", gpu.why_not);
    }
}

static int print_build(const info_options_t *options)
{
    table_t table = {.n_columns = 2};
    struct utsname machine;
    (void)options;
    uname(&machine);
    table_add(&table, "libhvd");
    table_add(&table, "%s", hvd_version());
    table_add(&table, "compiler");
#if defined(__clang__)
    table_add(&table, "%s", __VERSION__);
#else
    table_add(&table, "gcc %s", __VERSION__);
#endif
    table_add(&table, "OpenSSL");
    table_add(&table, "%s, built with %s", OpenSSL_version(OPENSSL_VERSION), OPENSSL_VERSION_TEXT);
    table_add(&table, "machine");
    table_add(&table, "%s, %s %s, %d cores for this process", machine.machine, machine.sysname,
              machine.release, usable_cores());
    table_add(&table, "vector kernels");
    table_add(&table, "%s", reduce_kernels_name());
    table_add(&table, "wire version");
    table_add(&table, "%d", WIRE_VERSION);
    add_gpu(&table);
    puts("build");
    table_print(&table);
    return 0;
}

// --- Algorithms ----------------------------------------------------------------------------------

// A job as --ranks and --hosts describe it: ranks fill hosts one after the other, shared memory
// works on each.
typedef struct scene {
    const config_t *config;
    int ranks, hosts;  // hosts that got ranks
    int least_on_host; // ranks of the emptiest host
    bool several;      // some host has more than one
    size_t *blocks;
} scene_t;

static void set_scene(scene_t *scene, const config_t *config, const info_options_t *options)
{
    int per_host = (options->ranks + options->hosts - 1) / options->hosts;
    *scene = (scene_t){.config = config, .ranks = options->ranks};
    scene->hosts = (options->ranks + per_host - 1) / per_host;
    scene->least_on_host = options->ranks - (scene->hosts - 1) * per_host;
    scene->several = per_host > 1;
    scene->blocks = calloc((size_t)scene->ranks, sizeof *scene->blocks);
    if (scene->blocks == NULL) {
        fputs("hvd-info: out of memory\n", stderr);
        exit(1);
    }
}

static void clear_scene(scene_t *scene)
{
    free(scene->blocks);
}

static coll_args_t args_of(const scene_t *scene, hvd_op_t op, hvd_reduce_t reduce, size_t bytes)
{
    size_t share = MAX(bytes / sizeof(float) / (size_t)scene->ranks, 1) * sizeof(float);
    for (int r = 0; r < scene->ranks; r++) {
        scene->blocks[r] = share;
    }
    return (coll_args_t){
        .op = op,
        .dtype = HVD_FLOAT32,
        .reduce = reduce,
        .size = scene->ranks,
        .bytes = bytes,
        .blocks = scene->blocks,
        .send_bytes = scene->blocks,
        .recv_bytes = scene->blocks,
        .equal_blocks = true,
        .segment_bytes = scene->config->segment_bytes,
    };
}

static way_id_t way_of(const scene_t *scene, const coll_args_t *args)
{
    return way_choose(&(way_case_t){
        .args = args,
        .algorithm = scene->config->algorithm,
        .inline_bytes = way_inline_bytes(scene->config, scene->ranks, scene->hosts),
        .one_host = scene->hosts == 1,
        .has_stream = true,
        .all_bytes = args->bytes * (args->op == HVD_ALLTOALL ? (size_t)args->size : 1),
        .two_levels = scene->several,
    });
}

static const char *plan_name(const scene_t *scene, const coll_args_t *args, err_t *err)
{
    const algorithm_t *algorithm = coll_choose(args, scene->config->algorithm, err);
    return algorithm != NULL ? algorithm->name : err->text;
}

static void describe_way(const scene_t *scene, coll_args_t args, char text[CHOICE_BYTES])
{
    way_id_t way = way_of(scene, &args);
    bool may_take_board = scene->hosts == 1 && scene->several && scene->ranks <= BOARD_MEMBERS;
    const char *inner = "";
    err_t err;
    if (way == WAY_TWO_LEVEL) { // each rank of the emptiest host carries a shard
        args.size = scene->hosts;
        args.bytes /= (size_t)scene->least_on_host;
    }
    if (ways[way].by_plan) {
        inner = plan_name(scene, &args, &err);
    } else if (way == WAY_RIDING && may_take_board) {
        inner = "; short ones that are waited for at once use the host's board";
    }
    snprintf(text, CHOICE_BYTES, "%s%s", ways[way].tells, inner);
}

static void add_choice(table_t *table, const coll_args_t *args, size_t from, size_t to,
                       const char *choice)
{
    char from_text[32], to_text[32];
    bool is_adasum = args->reduce == HVD_ADASUM;
    table_add(table, "%s%s", hvd_op_name(args->op), is_adasum ? " (adasum)" : "");
    if (from == SMALLEST && to == LARGEST) {
        table_add(table, "all sizes");
    } else if (from == to) {
        table_add(table, "%s", info_size_text(from, from_text));
    } else {
        table_add(table, "%s to %s", info_size_text(from, from_text), info_size_text(to, to_text));
    }
    table_add(table, "%s", choice);
}

// One line for each run of sizes that are treated alike.
static void add_choices(table_t *table, const scene_t *scene, hvd_op_t op, hvd_reduce_t reduce)
{
    char now[CHOICE_BYTES], last[CHOICE_BYTES];
    size_t from = SMALLEST;
    for (size_t bytes = SMALLEST; bytes <= LARGEST; bytes *= 2) {
        coll_args_t args = args_of(scene, op, reduce, bytes);
        describe_way(scene, args, now);
        if (bytes > SMALLEST && strcmp(now, last) != 0) {
            add_choice(table, &args, from, bytes / 2, last);
            from = bytes;
        }
        if (bytes == LARGEST) {
            add_choice(table, &args, from, bytes, now);
        }
        memcpy(last, now, sizeof last);
    }
}

static void print_choices(const scene_t *scene)
{
    table_t table = {.n_columns = 3};
    for (hvd_op_t op = 0; op < HVD_N_OPS; op++) {
        if (op_infos[op].layout != LAYOUT_NOTHING || op_has(op, OP_INSTANT)) { // not join
            add_choices(&table, scene, op, HVD_SUM);
        }
        if (op_has(op, OP_REDUCES) && !op_has(op, OP_SUMS_ONLY)) {
            add_choices(&table, scene, op, HVD_ADASUM);
        }
    }
    printf("chosen for %d rank%s on %d host%s (float32; size: what allgather returns, else what "
           "one rank gives)\n",
           scene->ranks, scene->ranks > 1 ? "s" : "", scene->hosts, scene->hosts > 1 ? "s" : "");
    table_print(&table);
}

static int print_algorithms(const info_options_t *options)
{
    table_t table = {.n_columns = 3};
    config_t config;
    scene_t scene;
    if (!info_load_knobs(&config)) {
        return 1;
    }
    for (int i = 0; i < coll_n_algorithms; i++) {
        table_add(&table, "%s", hvd_op_name(coll_algorithms[i].op));
        table_add(&table, "%s", coll_algorithms[i].name);
        table_add(&table, "%s", coll_algorithms[i].good_at);
    }
    puts("algorithms that write plans");
    table_print(&table);
    puts("");
    set_scene(&scene, &config, options);
    print_choices(&scene);
    clear_scene(&scene);
    config_free(&config);
    return 0;
}

// --- Launcher ------------------------------------------------------------------------------------

static int print_launcher(const info_options_t *options)
{
    table_t table = {.n_columns = 2};
    const char *name, *title;
    config_t config;
    (void)options;
    if (!info_load_knobs(&config)) {
        return 1;
    }
    boot_describe(&config, &name, &title);
    table_add(&table, "launched by");
    table_add(&table, "%s", title);
    table_add(&table, "recognised as");
    table_add(&table, "%s", name);
    for (int id = KNOB_rank; id <= KNOB_secret_fd; id++) {
        if (config.origin[id] == FROM_ENVIRONMENT) {
            char value[256];
            config_format(&config, (enum knob_id)id, value, sizeof value);
            table_add(&table, "%s", knob_infos[id].env);
            table_add(&table, "%s", value);
        }
    }
    for (int i = 0; i < N_LAUNCH_VARS; i++) {
        if (config.seen[i] != NULL) {
            table_add(&table, "%s", launch_var_names[i]);
            table_add(&table, "%.200s", config.seen[i]);
        }
    }
    puts("launcher");
    table_print(&table);
    config_free(&config);
    return 0;
}

// --- Live ----------------------------------------------------------------------------------------

static int print_live_view(const info_options_t *options)
{
    return print_live(options->job);
}

// --- Options -------------------------------------------------------------------------------------

typedef struct view {
    const char *option;
    int (*print)(const info_options_t *options); // the exit code
    const char *help;
} view_t;

static const view_t views[] = {
    {"--build", print_build, "version, compiler, OpenSSL, processor (without options)"},
    {"--knobs", print_knobs, "every setting: value, origin, default, unit, meaning"},
    {"--markdown-knobs", print_markdown_knobs, "docs/knobs.md"},
    {"--algorithms", print_algorithms, "what there is, and which is chosen for which size"},
    {"--launcher", print_launcher, "what started this process, and what it passed on"},
    {"--transports", info_transports, "which can be used here, and why the others cannot"},
    {"--gpu-selftest", info_gpu_selftest,
     "every operation on the GPUs of this machine, by NCCL and by the host"},
    {"--live", print_live_view, "what every rank of this host is doing now"},
};

static int print_usage(FILE *to)
{
    fputs("usage: hvd-info [view ...] [--ranks N] [--hosts H] [--live [JOB]]\n", to);
    for (size_t i = 0; i < N_ELEMENTS(views); i++) {
        fprintf(to, "  %-18s%s\n", views[i].option, views[i].help);
    }
    fputs("  --ranks N         number of ranks to answer for (default 4)\n"
          "  --hosts H         number of hosts they run on (default 2)\n"
          "  --help            print this text\n",
          to);
    return 0;
}

static bool parse_count(const char *text, int *count_p)
{
    char *end;
    long value = text != NULL ? strtol(text, &end, 10) : 0;
    if (value < 1 || value > MAX_RANKS || *end != '\0') {
        return false;
    }
    *count_p = (int)value;
    return true;
}

static const view_t *view_named(const char *option)
{
    for (size_t i = 0; i < N_ELEMENTS(views); i++) {
        if (strcmp(views[i].option, option) == 0) {
            return &views[i];
        }
    }
    return NULL;
}

static int fail_option(const char *option)
{
    const char *nearest = "";
    size_t least = strlen(option) / 2 + 1;
    for (size_t i = 0; i < N_ELEMENTS(views); i++) {
        size_t distance = edit_distance(option, views[i].option);
        nearest = distance < least ? views[i].option : nearest;
        least = MIN(least, distance);
    }
    fprintf(stderr, "hvd-info: unknown option %s%s%s; --help lists the options\n", option,
            nearest[0] != '\0' ? ", did you mean " : "", nearest);
    return 2;
}

static int fail_count(const char *option, const char *value)
{
    fprintf(stderr, "hvd-info: %s needs a whole number from 1 to %d, not \"%s\"\n", option,
            MAX_RANKS, value != NULL ? value : "");
    return 2;
}

int main(int argc, char **argv)
{
    info_options_t options = {.ranks = 4, .hosts = 2};
    const view_t *wanted[N_ELEMENTS(views)];
    size_t n_wanted = 0;
    for (int i = 1; i < argc; i++) {
        const view_t *view = view_named(argv[i]);
        if (strcmp(argv[i], "--help") == 0) {
            return print_usage(stdout);
        }
        int *count_p = strcmp(argv[i], "--ranks") == 0   ? &options.ranks
                       : strcmp(argv[i], "--hosts") == 0 ? &options.hosts
                                                         : NULL;
        options.has_ranks |= count_p == &options.ranks;
        if (view != NULL && n_wanted < N_ELEMENTS(wanted)) {
            wanted[n_wanted++] = view;
            if (view->print == print_live_view && argv[i + 1] != NULL && argv[i + 1][0] != '-') {
                options.job = argv[++i];
            }
        } else if (count_p == NULL) {
            return fail_option(argv[i]);
        } else if (!parse_count(argv[i + 1], count_p)) {
            return fail_count(argv[i], argv[i + 1]);
        } else {
            i++;
        }
    }
    if (options.hosts > options.ranks) {
        fprintf(stderr, "hvd-info: %d ranks cannot run on %d hosts\n", options.ranks,
                options.hosts);
        return 2;
    }
    if (n_wanted == 0) {
        wanted[n_wanted++] = &views[0];
    }
    int code = 0;
    for (size_t i = 0; i < n_wanted && code == 0; i++) {
        fputs(i > 0 ? "\n" : "", stdout);
        code = wanted[i]->print(&options);
    }
    return code;
}
