// SPDX-License-Identifier: Apache-2.0
//
// jsrun.c - horovodrun --jsrun: under LSF, jsrun starts the ranks from a resource file.
//
// The file (ERF) has a line for each rank: its host and an equal share of the host's cores. Hosts
// come from -H or a hostfile, else from LSF (LSB_MCPU_HOSTS, "host slots host slots", whose first
// is the launch node if it has one slot only). jsrun is run to its end, then the file is removed.
#define _GNU_SOURCE
#include "launch/launch.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define NO_JSRUN                                                                                   \
    "jsrun is not installed here; --jsrun is for LSF clusters. Leave it out: horovodrun starts "   \
    "ranks "                                                                                       \
    "itself"

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

static void add(buf_t *words, const char *word)
{
    char *copy = strdup(word);
    if (copy == NULL || buf_append(words, &copy, sizeof copy) == NULL) {
        words->failed = true;
    }
}

static char **make_command(const options_t *options, const char *resources)
{
    const char *extra[] = {options->binding_args, options->mpi_args};
    buf_t words = {0};
    char *end = NULL;
    add(&words, "jsrun");
    add(&words, "--erf_input");
    add(&words, resources);
    if (options->output_filename[0] != '\0') {
        add(&words, "--stdio_stderr");
        add(&words, options->output_filename);
        add(&words, "--stdio_stdout");
        add(&words, options->output_filename);
    }
    for (size_t i = 0; i < N_ELEMENTS(extra); i++) {
        char **more = split_words(extra[i]);
        for (char **at = more; at != NULL && *at != NULL; at++) {
            add(&words, *at);
        }
        words.failed |= more == NULL;
        free_words(more);
    }
    for (int i = 0; i < options->n_command; i++) {
        add(&words, options->command[i]);
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
    char **command = make_command(options, path);
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
