// SPDX-License-Identifier: Apache-2.0
//
// hvd-info - what this build contains, and what it would do on this machine.
//
// Every view asks the library itself, so nothing here has to be kept in step with it: knobs come
// from their table, algorithms and routes from theirs, and transports from a job that is opened for
// a moment, with this process as its first rank.
//
// Started as a rank of a job, --transports joins the job and tells what it found.
#define _GNU_SOURCE
#include "engine/engine.h"
#include "net/shm.h"
#include "tools/live.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <openssl/crypto.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>

#define MAX_RANKS 65536
#define MAX_COLUMNS 8
#define SMALLEST ((size_t)4)
#define LARGEST (256 * MIB)
#define MAX_OWN_DESCRIPTORS 1024
#define CHOICE_BYTES (HVD_TEXT_BYTES + 64)

typedef struct info_options {
    int ranks, hosts;
    const char *job; // NULL: all of them
} info_options_t;

// --- Tables: cells row after row, columns as wide as their widest cell ---------------------------

typedef struct table {
    int n_columns;
    buf_t cells; // char *, owned
} table_t;

static void add(table_t *table, const char *format, ...) PRINTF_LIKE(2, 3);

static void add(table_t *table, const char *format, ...)
{
    va_list args;
    char *text;
    va_start(args, format);
    if (vasprintf(&text, format, args) < 0 || !buf_append(&table->cells, &text, sizeof text)) {
        fputs("hvd-info: out of memory\n", stderr);
        exit(1);
    }
    va_end(args);
}

static int blanks_after(int width, const char *cell, bool is_last)
{
    return is_last ? 0 : width + 2 - (int)strlen(cell);
}

// Prints the table and gives its memory back.
static void print_table(table_t *table)
{
    char **cells = (char **)(void *)table->cells.data;
    int n_cells = (int)(table->cells.len / sizeof *cells);
    int width[MAX_COLUMNS] = {0};
    for (int i = 0; i < n_cells; i++) {
        int column = i % table->n_columns;
        width[column] = MAX(width[column], (int)strlen(cells[i]));
    }
    for (int i = 0; i < n_cells; i++) {
        int column = i % table->n_columns;
        bool is_last = column == table->n_columns - 1 || cells[i + 1][0] == '\0';
        for (int next = i + 1; is_last && next % table->n_columns != 0; next++) {
            is_last = cells[next][0] == '\0'; // only blanks would follow
        }
        printf("%s%s%*s%s", column == 0 ? "  " : "", cells[i],
               blanks_after(width[column], cells[i], is_last), "",
               column == table->n_columns - 1 ? "\n" : "");
    }
    for (int i = 0; i < n_cells; i++) {
        free(cells[i]);
    }
    buf_free(&table->cells);
}

static const char *size_text(size_t bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    size_t unit = 0;
    double value = (double)bytes;
    while (value >= 1024 && unit + 1 < N_ELEMENTS(units)) {
        value /= 1024;
        unit++;
    }
    snprintf(text, 32, value < 10 && value != (int)value ? "%.1f %s" : "%.0f %s", value,
             units[unit]);
    return text;
}

// --- Knobs ---------------------------------------------------------------------------------------

static bool load_knobs(config_t *config)
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
    if (!load_knobs(&config)) {
        return 1;
    }
    static const char *const heads[] = {"name", "value", "origin", "default", "unit", "meaning"};
    for (size_t i = 0; i < N_ELEMENTS(heads); i++) {
        add(&table, "%s", heads[i]);
    }
    for (int id = 0; id < N_KNOBS; id++) {
        const knob_info_t *info = &knob_infos[id];
        config_format(&config, (enum knob_id)id, value, sizeof value);
        add(&table, "%s", info->env);
        add(&table, "%s", value[0] != '\0' ? value : "-");
        add(&table, "%s", config.origin[id] == FROM_DEFAULT ? "default" : "environment");
        add(&table, "%s", info->default_text[0] != '\0' ? info->default_text : "-");
        add(&table, "%s", info->unit[0] != '\0' ? info->unit : "-");
        add(&table, "%s", info->help);
    }
    config_free(&config);
    puts("knobs");
    print_table(&table);
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

static int print_build(const info_options_t *options)
{
    table_t table = {.n_columns = 2};
    struct utsname machine;
    (void)options;
    uname(&machine);
    add(&table, "libhvd");
    add(&table, "%s", hvd_version());
    add(&table, "compiler");
#if defined(__clang__)
    add(&table, "%s", __VERSION__);
#else
    add(&table, "gcc %s", __VERSION__);
#endif
    add(&table, "OpenSSL");
    add(&table, "%s, built with %s", OpenSSL_version(OPENSSL_VERSION), OPENSSL_VERSION_TEXT);
    add(&table, "machine");
    add(&table, "%s, %s %s, %d cores for this process", machine.machine, machine.sysname,
        machine.release, usable_cores());
    add(&table, "vector kernels");
    add(&table, "%s", reduce_kernels_name());
    add(&table, "wire version");
    add(&table, "%d", WIRE_VERSION);
    puts("build");
    print_table(&table);
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
        .inline_bytes = scene->config->inline_bytes,
        .one_host = scene->hosts == 1,
        .has_stream = true,
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
        inner = "; short ones waited for at once meet on the host's board";
    }
    snprintf(text, CHOICE_BYTES, "%s%s", ways[way].tells, inner);
}

static void add_choice(table_t *table, const coll_args_t *args, size_t from, size_t to,
                       const char *choice)
{
    char from_text[32], to_text[32];
    bool is_adasum = args->reduce == HVD_ADASUM;
    add(table, "%s%s", hvd_op_name(args->op), is_adasum ? " (adasum)" : "");
    if (from == SMALLEST && to == LARGEST) {
        add(table, "all sizes");
    } else if (from == to) {
        add(table, "%s", size_text(from, from_text));
    } else {
        add(table, "%s to %s", size_text(from, from_text), size_text(to, to_text));
    }
    add(table, "%s", choice);
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
    static const struct {
        hvd_op_t op;
        hvd_reduce_t reduce;
    } cases[] = {
        {HVD_ALLREDUCE, HVD_SUM}, {HVD_ALLREDUCE, HVD_ADASUM}, {HVD_ALLGATHER, HVD_SUM},
        {HVD_BROADCAST, HVD_SUM}, {HVD_ALLTOALL, HVD_SUM},     {HVD_REDUCESCATTER, HVD_SUM},
        {HVD_BARRIER, HVD_SUM},
    };
    table_t table = {.n_columns = 3};

    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        add_choices(&table, scene, cases[i].op, cases[i].reduce);
    }
    printf("chosen for %d rank%s on %d host%s (float32; size: what allgather returns, else what "
           "one rank gives)\n",
           scene->ranks, scene->ranks > 1 ? "s" : "", scene->hosts, scene->hosts > 1 ? "s" : "");
    print_table(&table);
}

static int print_algorithms(const info_options_t *options)
{
    table_t table = {.n_columns = 3};
    config_t config;
    scene_t scene;
    if (!load_knobs(&config)) {
        return 1;
    }
    for (int i = 0; i < coll_n_algorithms; i++) {
        add(&table, "%s", hvd_op_name(coll_algorithms[i].op));
        add(&table, "%s", coll_algorithms[i].name);
        add(&table, "%s", coll_algorithms[i].good_at);
    }
    puts("algorithms that write plans");
    print_table(&table);
    puts("");
    set_scene(&scene, &config, options);
    print_choices(&scene);
    clear_scene(&scene);
    config_free(&config);
    return 0;
}

// --- Transports ----------------------------------------------------------------------------------

static const void *ip_of(const struct sockaddr *address, size_t *bytes_p)
{
    bool is_v6 = address->sa_family == AF_INET6;
    *bytes_p = is_v6 ? sizeof(struct in6_addr) : sizeof(struct in_addr);
    return is_v6 ? (const void *)&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr
                 : (const void *)&((const struct sockaddr_in *)(const void *)address)->sin_addr;
}

// Does this process listen at the address? Its own sockets know best.
static bool listens_at(const struct sockaddr *address)
{
    size_t ip_bytes;
    const void *ip = ip_of(address, &ip_bytes);
    for (int fd = 0; fd < MAX_OWN_DESCRIPTORS; fd++) {
        int listening = 0;
        socklen_t bytes = sizeof listening;
        struct sockaddr_storage own;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &bytes) != 0 || listening == 0) {
            continue;
        }
        bytes = sizeof own;
        if (getsockname(fd, (struct sockaddr *)&own, &bytes) == 0 &&
            own.ss_family == address->sa_family &&
            memcmp(ip_of((struct sockaddr *)&own, &ip_bytes), ip, ip_bytes) == 0) {
            return true;
        }
    }
    return false;
}

// To be called while the job is open.
static void print_interfaces(const config_t *config)
{
    table_t table = {.n_columns = 3};
    struct ifaddrs *all = NULL;
    char text[NI_MAXHOST];
    if (getifaddrs(&all) != 0) {
        return;
    }
    for (const struct ifaddrs *at = all; at != NULL; at = at->ifa_next) {
        int family = at->ifa_addr != NULL ? at->ifa_addr->sa_family : AF_UNSPEC;
        socklen_t bytes =
            family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
        if ((family != AF_INET && family != AF_INET6) ||
            getnameinfo(at->ifa_addr, bytes, text, sizeof text, NULL, 0, NI_NUMERICHOST) != 0) {
            continue;
        }
        add(&table, "%s", at->ifa_name);
        add(&table, "%s", text);
        add(&table, "%s",
            listens_at(at->ifa_addr)        ? "listens"
            : (at->ifa_flags & IFF_UP) == 0 ? "not used: down"
                                            : "not used");
    }
    freeifaddrs(all);
    bool all_wanted = config->iface == NULL || config->iface[0] == '\0';
    printf("tcp (HOROVOD_GLOO_IFACE %s)\n",
           all_wanted ? "not set: every usable address" : config->iface);
    print_table(&table);
}

static void print_shared_memory(const config_t *config, int ranks_here)
{
    struct statvfs fs;
    char size[32] = "?", free_now[32] = "?", needed[32];
    if (statvfs("/dev/shm", &fs) == 0) {
        size_text((size_t)fs.f_blocks * fs.f_frsize, size);
        size_text((size_t)fs.f_bavail * fs.f_frsize, free_now);
    }
    puts("shared memory");
    printf("  /dev/shm has %s, %s free; a host of %d ranks takes %s (HOROVOD_SHM_BYTES %zu)\n",
           size, free_now, ranks_here,
           size_text(shm_segment_bytes(ranks_here, config->shm_bytes), needed), config->shm_bytes);
}

static void add_peer(table_t *table, net_t *net, int peer, const char *what)
{
    char why_not[1024];
    add(table, "%s", what);
    add(table, "%s", net_transport_name(net, peer, why_not, sizeof why_not));
    add(table, "%s%s", why_not[0] != '\0' ? "not " : "", why_not);
}

// Opens the network of a job in which every rank has this process's addresses.
static hvd_status_t open_alone(const net_job_t *job, net_t **net_p, err_t *err)
{
    size_t n = (size_t)job->size;
    const uint8_t **addresses = calloc(n, sizeof *addresses);
    size_t *lengths = calloc(n, sizeof *lengths);
    uint8_t *attached = calloc(n, 1);
    hvd_status_t status = HVD_NO_MEMORY;
    buf_t mine = {0};
    if (addresses == NULL || lengths == NULL || attached == NULL) {
        goto out;
    }
    TRY(net_open(job, net_p, err), out);
    TRY(net_address(*net_p, &mine, err), out);
    for (size_t r = 0; r < n; r++) {
        addresses[r] = mine.data;
        lengths[r] = mine.len;
    }
    TRY(net_attach(*net_p, addresses, lengths, deadline_in_ms(1000), err), out);
    memset(attached, net_attached(*net_p), n);
    status = net_settle(*net_p, attached, err);
out:
    free(addresses);
    free(lengths);
    free(attached);
    buf_free(&mine);
    return status;
}

// A job of `ranks_here` ranks on this host, of which this is the first, and one elsewhere.
static int try_transports(const config_t *config, int ranks_here)
{
    table_t table = {.n_columns = 3};
    int *host_of = calloc((size_t)ranks_here + 1, sizeof *host_of);
    net_job_t job = {.size = ranks_here + 1, .host_of = host_of, .config = config};
    uint8_t secret[32];
    net_t *net = NULL;
    hvd_status_t status;
    err_t err = {.text = "out of memory"};
    if (host_of == NULL) {
        return 1;
    }
    host_of[ranks_here] = 1;
    TRY(random_bytes(secret, sizeof secret, &err), out);
    TRY(secure_keys_new(secret, &job.keys, &err), out);
    TRY(open_alone(&job, &net, &err), out);
    if (ranks_here > 1) {
        add_peer(&table, net, 1, "to ranks on this host");
    }
    add_peer(&table, net, ranks_here, "to ranks on other hosts");
    puts("transports of a job started here");
    print_table(&table);
    print_shared_memory(config, ranks_here);
    print_interfaces(config);
out:
    if (status != HVD_OK) {
        printf("no job can start here: %s\n", err.text);
    }
    net_close(net);
    secure_keys_free(job.keys);
    free(host_of);
    return 0;
}

// --- Launcher ------------------------------------------------------------------------------------

static int print_launcher(const info_options_t *options)
{
    table_t table = {.n_columns = 2};
    const char *way, *launcher;
    config_t config;
    (void)options;
    if (!load_knobs(&config)) {
        return 1;
    }
    boot_describe(&config, &way, &launcher);
    add(&table, "launched by");
    add(&table, "%s", launcher);
    add(&table, "way");
    add(&table, "%s", way);
    for (int id = KNOB_rank; id <= KNOB_secret_fd; id++) {
        if (config.origin[id] == FROM_ENVIRONMENT) {
            char value[256];
            config_format(&config, (enum knob_id)id, value, sizeof value);
            add(&table, "%s", knob_infos[id].env);
            add(&table, "%s", value);
        }
    }
    for (int i = 0; i < N_LAUNCH_VARS; i++) {
        if (config.seen[i] != NULL) {
            add(&table, "%s", launch_var_names[i]);
            add(&table, "%.200s", config.seen[i]);
        }
    }
    puts("launcher");
    print_table(&table);
    config_free(&config);
    return 0;
}

// --- A job of its own ----------------------------------------------------------------------------

static int print_own_job(void)
{
    table_t table = {.n_columns = 3};
    char text[HVD_TEXT_BYTES];
    char what[64];
    hvd_ctx_t *ctx;
    if (hvd_init(NULL, &ctx, text, sizeof text) != HVD_OK) {
        fprintf(stderr, "hvd-info: %s\n", text);
        return 1;
    }
    for (int r = 0; r < hvd_size(ctx); r++) {
        if (r != hvd_rank(ctx)) {
            snprintf(what, sizeof what, "from rank %d to rank %d", hvd_rank(ctx), r);
            add_peer(&table, ctx->net, r, what);
        }
    }
    printf("transports of rank %d of %d\n", hvd_rank(ctx), hvd_size(ctx));
    print_table(&table);
    if (ctx->mpi != NULL) {
        printf("collectives by %s; the links carry the agreement, and what MPI cannot do\n",
               mpi_library_name(ctx->mpi));
    }
    hvd_shutdown(ctx);
    return 0;
}

static int print_transports(const info_options_t *options)
{
    const char *way, *launcher;
    config_t config;
    if (!load_knobs(&config)) {
        return 1;
    }
    boot_describe(&config, &way, &launcher);
    bool is_alone = strcmp(way, "self") == 0 || (strcmp(way, "env") == 0 && config.size == 1);
    int per_host = (options->ranks + options->hosts - 1) / options->hosts;
    int code = is_alone ? try_transports(&config, per_host) : print_own_job();
    config_free(&config);
    return code;
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
    {"--transports", print_transports, "which can be used here, and why the others cannot"},
    {"--live", print_live_view, "what every rank of this host is doing now"},
};

static int print_usage(FILE *to, int code)
{
    fputs("usage: hvd-info [view ...] [--ranks N] [--hosts H] [--live [JOB|DIRECTORY]]\n", to);
    for (size_t i = 0; i < N_ELEMENTS(views); i++) {
        fprintf(to, "  %-18s%s\n", views[i].option, views[i].help);
    }
    fputs("  --ranks N         number of ranks to answer for (default 4)\n"
          "  --hosts H         number of hosts they run on (default 2)\n"
          "  --help            print this text\n",
          to);
    return code;
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

int main(int argc, char **argv)
{
    info_options_t options = {.ranks = 4, .hosts = 2};
    const view_t *wanted[N_ELEMENTS(views)];
    size_t n_wanted = 0;
    for (int i = 1; i < argc; i++) {
        const view_t *view = view_named(argv[i]);
        if (strcmp(argv[i], "--help") == 0) {
            return print_usage(stdout, 0);
        }
        int *count_p = strcmp(argv[i], "--ranks") == 0   ? &options.ranks
                       : strcmp(argv[i], "--hosts") == 0 ? &options.hosts
                                                         : NULL;
        if (view != NULL && n_wanted < N_ELEMENTS(wanted)) {
            wanted[n_wanted++] = view;
            if (view->print == print_live_view && argv[i + 1] != NULL && argv[i + 1][0] != '-') {
                options.job = argv[++i];
            }
        } else if (count_p == NULL || !parse_count(argv[++i], count_p)) {
            return print_usage(stderr, 2);
        }
    }
    if (options.hosts > options.ranks) {
        return print_usage(stderr, 2);
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
