// SPDX-License-Identifier: Apache-2.0
//
// horovodrun.c - the launcher's program: what was asked for, and who does it.
//
// Everything that is done instead of a job is a row; the rest chooses between the launchers. No
// other file of the launcher writes to stdout by itself.
#include "agent/agent.h"
#include "pai/pai.h"
#include "tools/top.h"
#include "tools/trial.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static int print_version(const options_t *options)
{
    (void)options;
    fprintf(stdout, "%s\n", hvd_version());
    return 0;
}

static int print_help(const options_t *options)
{
    (void)options;
    help_print(stdout);
    return 0;
}

static int print_man(const options_t *options)
{
    (void)options;
    man_print(stdout);
    return 0;
}

static int print_config(const options_t *options)
{
    config_print(options, stdout);
    return 0;
}

static int print_build(const options_t *options)
{
    (void)options;
    return check_build(stdout);
}

static int be_doctor_rank(const options_t *options)
{
    (void)options;
    return trial_rank();
}

static int print_completion(const options_t *options)
{
    completion_print(options->completion, stdout);
    return 0;
}

// The tool that is installed beside this program.
static int run_bench(const options_t *options)
{
    char path[4096 + 16], name[] = "hvd-bench";
    char **argv = calloc((size_t)options->n_command + 2, sizeof *argv);
    if (argv == NULL || !own_path(path, 4096)) {
        return EXIT_INTERNAL;
    }
    snprintf(strrchr(path, '/') + 1, sizeof name, "%s", name);
    argv[0] = name;
    for (int i = 0; i < options->n_command; i++) {
        argv[i + 1] = options->command[i];
    }
    execv(path, argv);
    say("cannot run %s: %s", path, strerror(errno));
    free(argv);
    return EXIT_INTERNAL;
}

static int launch(const options_t *options)
{
    static int (*const launchers[])(const options_t *) = {
        [CONTROLLER_AUTO] = job_run,
        [CONTROLLER_GLOO] = job_run,
        [CONTROLLER_MPI] = mpi_run,
        [CONTROLLER_JSRUN] = jsrun_run,
    };

    if (options->n_command == 0) {
        say("no command given; for example: %s -np 2 python train.py (see %s --help)", PROGRAM,
            PROGRAM);
        return EXIT_USAGE;
    }
    bool knows_hosts = options->hosts[0] != '\0' || options->hostfile[0] != '\0' ||
                       options->host_discovery_script[0] != '\0' || options->pai;
    int (*start)(const options_t *) = options->await_agents >= 0 && !knows_hosts ? gather_run
                                      : options_want_elastic(options)
                                          ? elastic_run
                                          : launchers[options->controller];
    return options->pai ? pai_run(options, start == job_run ? NULL : start) : start(options);
}

int main(int argc, char **argv)
{
    options_t options;
    err_t err = {0};
    if (argc > 1 && strcmp(argv[1], "pai") == 0) {
        return pai_main(argc, argv);
    }
    if (options_read(argc, argv, NULL, &options, &err) != HVD_OK) {
        say("%s", err.text);
        return EXIT_USAGE;
    }
    const struct {
        bool is_wanted;
        int (*act)(const options_t *);
    } actions[] = {
        {options.pai_gate[0] != '\0', pai_gate},
        {options.agent && options.redial, relay_redial},
        {options.agent, agent_main},
        {options.shell, shell_main},
        {options.doctor_rank, be_doctor_rank},
        {options.dial_agent[0] != '\0', relay_dial},
        {options.serve_agents, relay_serve},
        {options.pai_worker, pai_worker},
        {options.help, print_help},
        {options.version, print_version},
        {options.check_build, print_build},
        {options.man_page, print_man},
        {options.completion != COMPLETION_NONE, print_completion},
        {options.print_config, print_config},
        {options.top, top_main},
        {options.bench, run_bench},
        {options.doctor, doctor_run},
        {options.carry_commands && options.num_proc == 0, carry_run},
        {true, launch},
    };
    size_t i = 0;
    raise_open_files();
    while (!actions[i].is_wanted) {
        i++;
    }
    int code = actions[i].act(&options);
    options_free(&options);
    return code;
}
