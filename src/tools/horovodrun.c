// SPDX-License-Identifier: Apache-2.0
//
// horovodrun.c - the launcher's program: what was asked for, and who does it.
//
// Everything that is done instead of a job is a row; the rest chooses between the launchers. No
// other file of the launcher writes to stdout by itself. Called hvd-info or hvd-bench, it is that
// tool: the wheel has one program.
#include "agent/agent.h"
#include "pai/pai.h"
#include "tools/top.h"
#include "tools/trial.h"

#include <stdlib.h>
#include <unistd.h>

int hvd_info_main(int argc, char **argv); // hvd-info.c, hvd-bench.c: their main
int hvd_bench_main(int argc, char **argv);

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

static int run_bench(const options_t *options)
{
    char name[] = "hvd-bench";
    char **argv = calloc((size_t)options->n_command + 2, sizeof *argv);
    if (argv == NULL) {
        return EXIT_INTERNAL;
    }
    argv[0] = name;
    for (int i = 0; i < options->n_command; i++) {
        argv[i + 1] = options->command[i];
    }
    int code = hvd_bench_main(options->n_command + 1, argv);
    free(argv);
    return code;
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
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL;
    const char *name = slash != NULL ? slash + 1 : argc > 0 ? argv[0] : "";
    if (strcmp(name, "hvd-info") == 0) {
        return hvd_info_main(argc, argv);
    }
    if (strcmp(name, "hvd-bench") == 0) {
        return hvd_bench_main(argc, argv);
    }
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
