// SPDX-License-Identifier: Apache-2.0
//
// mpi.c - commands of other launchers: the right one for whichever mpirun is installed, and jsrun.
//
// Which one it is, its version text tells. Open MPI and Spectrum MPI get variables by name (-x) and
// hosts with slots; MPICH and Intel MPI inherit the environment and want the same number of ranks
// on every host. mpi_run.c runs the command.
//
// Under LSF, jsrun starts the ranks from a resource file (ERF), which has a line for each rank: its
// host and an equal share of the host's cores. Hosts come from -H or a hostfile, else from LSF
// (LSB_MCPU_HOSTS, "host slots host slots", whose first is the launch node if it has one slot
// only). jsrun is run to its end, then the file is removed.
#define _GNU_SOURCE
#include "launch/launch.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define MANY_HOSTS 64
#define NO_JSRUN                                                                                   \
    "jsrun is not installed here; --jsrun is for LSF clusters. Leave it out: horovodrun starts "   \
    "ranks "                                                                                       \
    "itself"

mpi_flavor_t mpi_flavor_of(const char *version_text)
{
    static const struct {
        const char *said;
        mpi_flavor_t flavor;
    } flavors[] = {
        {"IBM Spectrum MPI", MPI_SPECTRUM}, {"Open MPI", MPI_OPEN}, {"OpenRTE", MPI_OPEN},
        {"Intel(R) MPI", MPI_INTEL},        {"MPICH", MPI_MPICH},   {"HYDRA", MPI_MPICH},
    };
    for (size_t i = 0; i < N_ELEMENTS(flavors); i++) {
        if (strstr(version_text, flavors[i].said) != NULL) {
            return flavors[i].flavor;
        }
    }
    return MPI_NONE;
}

// --- Words ---------------------------------------------------------------------------------------

static void add(buf_t *words, const char *format, ...) PRINTF_LIKE(2, 3);

static void add(buf_t *words, const char *format, ...)
{
    va_list args;
    char *text;
    va_start(args, format);
    int len = vasprintf(&text, format, args);
    va_end(args);
    if (len < 0 || buf_append(words, &text, sizeof text) == NULL) {
        words->failed = true;
    }
}

static hvd_status_t add_all(buf_t *words, const char *text, const char *flag, err_t *err)
{
    char **more = split_words(text);
    if (more == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s is \"%.200s\", which has an unterminated quote",
                    flag, text);
    }
    for (char **at = more; *at != NULL; at++) {
        add(words, "%s", *at);
    }
    free_words(more);
    return HVD_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// -x NAME of everything that may be carried over, sorted.
static void add_exports(buf_t *words, char *const *env)
{
    size_t n = 0, n_kept = 0;
    while (env[n] != NULL) {
        n++;
    }
    char **names = calloc(n + 1, sizeof *names);
    for (size_t i = 0; names != NULL && i < n; i++) {
        char *name = strndup(env[i], strcspn(env[i], "="));
        if (name != NULL && name[0] != '\0' && environ_is_exportable(name)) {
            names[n_kept++] = name;
        } else {
            free(name);
        }
    }
    if (names != NULL) {
        qsort(names, n_kept, sizeof *names, by_name);
    }
    for (size_t i = 0; i < n_kept; i++) {
        add(words, "-x");
        add(words, "%s", names[i]);
    }
    words->failed |= names == NULL;
    free_words(names);
}

static void join_hosts(const hosts_t *hosts, int n, bool with_slots, buf_t *text)
{
    char slots[16];
    for (int i = 0; i < n; i++) {
        buf_append(text, i > 0 ? "," : "", i > 0);
        buf_append(text, hosts->list[i].name, strlen(hosts->list[i].name));
        if (with_slots) {
            int len = snprintf(slots, sizeof slots, ":%d", hosts->list[i].slots);
            buf_append(text, slots, (size_t)len);
        }
    }
    buf_append(text, "", 1);
}

static void ssh_words(const options_t *options, char *text, size_t bytes)
{
    size_t len = 0;
    text[0] = '\0';
    if (options->ssh_port > 0) {
        len = (size_t)snprintf(text, bytes, "-p %d", (int)options->ssh_port);
    }
    if (options->ssh_identity_file[0] != '\0' && len < bytes) {
        snprintf(text + len, bytes - len, "%s-i %s", len > 0 ? " " : "",
                 options->ssh_identity_file);
    }
}

// --- Commands ------------------------------------------------------------------------------------

static hvd_status_t open_mpi(const options_t *options, mpi_flavor_t flavor, const hosts_t *hosts,
                             char *const *env, buf_t *words, err_t *err)
{
    const char *usual = flavor == MPI_SPECTRUM ? "-bind-to socket -map-by socket -rank-by core"
                                               : "--bind-to none --map-by slot";
    const char *usual_net = flavor == MPI_SPECTRUM ? "" : "-mca pml ob1 -mca btl ^openib";
    bool has_binding = options->binding_args[0] != '\0';
    char ssh[1024];
    hvd_status_t status;
    ssh_words(options, ssh, sizeof ssh);
    TRY(add_all(words, has_binding ? options->binding_args : usual, "--binding-args", err), out);
    TRY(add_all(words, options->tcp && flavor == MPI_SPECTRUM ? "-tcp" : usual_net, "--tcp", err),
        out);
    if (ssh[0] != '\0') {
        TRY(add_all(words, "-mca plm_rsh_args", "", err), out);
        add(words, "%s", ssh);
    }
    if (hosts->n >= MANY_HOSTS) {
        add(words, "-mca");
        add(words, "plm_rsh_no_tree_spawn");
        add(words, "true");
        add(words, "-mca");
        add(words, "plm_rsh_num_concurrent");
        add(words, "%d", hosts->n);
    }
    if (options->network_interfaces[0] != '\0') {
        add(words, "-mca");
        add(words, "btl_tcp_if_include");
        add(words, "%s", options->network_interfaces);
        add(words, "-x");
        add(words, "NCCL_SOCKET_IFNAME=%s", options->network_interfaces);
    }
    if (options->output_filename[0] != '\0') {
        add(words, "--output-filename");
        add(words, "%s", options->output_filename);
    }
    add_exports(words, env);
out:
    return status;
}

static hvd_status_t hydra(const options_t *options, const hosts_t *hosts, buf_t *words, err_t *err)
{
    const char *nics = options->network_interfaces;
    char ssh[1024];
    ssh_words(options, ssh, sizeof ssh);
    for (int i = 1; i < hosts->n; i++) {
        if (hosts->list[i].slots != hosts->list[0].slots) {
            return fail(
                err, HVD_INVALID_ARGUMENT,
                "MPICH and Intel MPI need the same number of slots on every host, but %s has "
                "%d and %s has %d; make them equal, or leave --mpi out",
                hosts->list[0].name, hosts->list[0].slots, hosts->list[i].name,
                hosts->list[i].slots);
        }
    }
    if (strchr(nics, ',') != NULL) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "MPICH and Intel MPI take a single network interface, not \"%s\"", nics);
    }
    if (ssh[0] != '\0') {
        add(words, "-bootstrap=ssh");
        add(words, "-bootstrap-exec-args");
        add(words, "%s", ssh);
    }
    if (nics[0] != '\0') {
        add(words, "-iface");
        add(words, "%s", nics);
        add(words, "-genv");
        add(words, "NCCL_SOCKET_IFNAME=%s", nics);
    }
    if (options->output_filename[0] != '\0') {
        add(words, "-outfile-pattern");
        add(words, "%s", options->output_filename);
    }
    return add_all(words, options->binding_args, "--binding-args", err);
}

char **mpi_command(const options_t *options, mpi_flavor_t flavor, const hosts_t *hosts, int np,
                   char *const *env, err_t *err)
{
    bool is_open = flavor == MPI_OPEN || flavor == MPI_SPECTRUM;
    buf_t words = {0}, list = {0};
    char *end = NULL;
    hvd_status_t status;
    join_hosts(hosts, hosts->n, is_open, &list);
    add(&words, "mpirun");
    TRY(add_all(&words, is_open ? "--allow-run-as-root --tag-output" : "-l", "", err), undo);
    add(&words, "-np");
    add(&words, "%d", np);
    if (is_open) {
        add(&words, "-H");
        add(&words, "%s", (const char *)list.data);
        TRY(open_mpi(options, flavor, hosts, env, &words, err), undo);
    } else {
        add(&words, "-ppn");
        add(&words, "%d", hosts->list[0].slots);
        add(&words, "-hosts");
        add(&words, "%s", (const char *)list.data);
        TRY(hydra(options, hosts, &words, err), undo);
    }
    TRY(add_all(&words, options->mpi_args, "--mpi-args", err), undo);
    for (int i = 0; i < options->n_command; i++) {
        add(&words, "%s", options->command[i]);
    }
    status = words.failed || list.failed ? fail(err, HVD_NO_MEMORY, "no memory for the command")
                                         : HVD_OK;
undo:
    buf_free(&list);
    buf_append(&words, &end, sizeof end);
    if (status != HVD_OK || words.failed) {
        free_words((char **)(void *)words.data);
        return NULL;
    }
    return (char **)(void *)words.data;
}

// --- jsrun ---------------------------------------------------------------------------------------

// "launch 1 a 4 b 4" to "a:4,b:4".
static hvd_status_t hosts_of_lsf(hosts_t *hosts_p, err_t *err)
{
    const char *text = environment("LSB_MCPU_HOSTS");
    char **words = text != NULL ? split_words(text) : NULL;
    buf_t list = {0};
    if (words == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "LSB_MCPU_HOSTS is not set, so this is not an LSF job; give hosts with -H");
    }
    bool skips =
        words[0] != NULL && words[1] != NULL && strcmp(words[1], "1") == 0 && words[2] != NULL;
    for (char **at = words + (skips ? 2 : 0); at[0] != NULL && at[1] != NULL; at += 2) {
        buf_append(&list, ",", list.len > 0);
        buf_append(&list, at[0], strlen(at[0]));
        buf_append(&list, ":", 1);
        buf_append(&list, at[1], strlen(at[1]));
    }
    buf_append(&list, "", 1);
    free_words(words);
    hvd_status_t status = list.failed ? fail(err, HVD_NO_MEMORY, "no memory for the hosts")
                                      : hosts_parse((const char *)list.data, 1, hosts_p, err);
    buf_free(&list);
    return status;
}

static hvd_status_t write_resources(const hosts_t *hosts, const job_plan_t *plan, char *path,
                                    err_t *err)
{
    long n_cores = MAX(sysconf(_SC_NPROCESSORS_ONLN), 1);
    int fd = mkstemp(path);
    FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (file == NULL) {
        return fail_errno(err, errno, "cannot create the resource file %s", path);
    }
    fprintf(file, "overlapping_rs: allow\ncpu_index_using: logical\n\n");
    for (int i = 0; i < plan->n_ranks; i++) {
        const rank_place_t *place = &plan->places[i];
        long share = MAX(n_cores / place->local_size, 1);
        long first = MIN(place->local_rank * share, n_cores - 1);
        fprintf(file, "rank: %d: { hostname: %s; cpu: {%ld-%ld} ; gpu: * ; mem: * }\n", i,
                hosts->list[place->host].name, first, MIN(first + share, n_cores) - 1);
    }
    if (fclose(file) != 0) {
        return fail_errno(err, errno, "cannot write the resource file %s", path);
    }
    return HVD_OK;
}

static char **jsrun_command(const options_t *options, const char *resources)
{
    const char *extra[] = {options->binding_args, options->mpi_args};
    buf_t words = {0};
    char *end = NULL;
    add(&words, "jsrun");
    add(&words, "--erf_input");
    add(&words, "%s", resources);
    if (options->output_filename[0] != '\0') {
        add(&words, "--stdio_stderr");
        add(&words, "%s", options->output_filename);
        add(&words, "--stdio_stdout");
        add(&words, "%s", options->output_filename);
    }
    for (size_t i = 0; i < N_ELEMENTS(extra); i++) {
        char **more = split_words(extra[i]);
        for (char **at = more; at != NULL && *at != NULL; at++) {
            add(&words, "%s", *at);
        }
        words.failed |= more == NULL;
        free_words(more);
    }
    for (int i = 0; i < options->n_command; i++) {
        add(&words, "%s", options->command[i]);
    }
    buf_append(&words, &end, sizeof end);
    return words.failed ? NULL : (char **)(void *)words.data;
}

// Its exit code; signals from the terminal are jsrun's to handle.
static int run_to_end(char **command)
{
    pid_t pid;
    int status = 0;
    signal(SIGINT, SIG_IGN);
    if (posix_spawnp(&pid, command[0], NULL, NULL, command, environ) != 0) {
        say(NO_JSRUN);
        return EXIT_NOT_FOUND;
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFSIGNALED(status) ? EXIT_BY_SIGNAL + WTERMSIG(status) : WEXITSTATUS(status);
}

int jsrun_run(const options_t *options)
{
    char path[] = "/tmp/horovod-erf-XXXXXX";
    bool has_hosts = options->hosts[0] != '\0' || options->hostfile[0] != '\0';
    hosts_t hosts = {0};
    job_plan_t plan = {0};
    err_t err = {0};
    int code = EXIT_USAGE;
    hvd_status_t status;
    TRY(has_hosts ? hosts_choose(options, &hosts, &err) : hosts_of_lsf(&hosts, &err), out);
    TRY(job_plan_make(&hosts, (int)options->num_proc, &plan, &err), out);
    TRY(write_resources(&hosts, &plan, path, &err), out);
    char **command = jsrun_command(options, path);
    if (command == NULL) {
        status = fail(&err, HVD_INVALID_ARGUMENT,
                      "--mpi-args or --binding-args has an unterminated quote");
    } else {
        code = run_to_end(command);
    }
    free_words(command);
    unlink(path);
out:
    if (status != HVD_OK) {
        say("%s", err.text);
    }
    job_plan_free(&plan);
    hosts_free(&hosts);
    return code;
}
