// SPDX-License-Identifier: Apache-2.0
//
// mpi_run.c - horovodrun --mpi: runs mpirun, in place of this process or as the child of a session.
//
// Ranks find each other through PMIx or PMI, so nothing of ours has to be running: mpirun takes the
// place of this process, and its exit code is the last word. Unless agents have to dial: then
// mpirun is the child of a session that waits for all of them and carries its commands to their
// hosts (carry.c). One thread, the session's.
#define _GNU_SOURCE
#include "launch/session.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define VERSION_TIMEOUT_MS 20000
#define LOOK_MS 1000
#define NOTICE_MS 3000   // for mpirun to notice by itself that a host is lost
#define LAST_LOOK_MS 300 // for us to see what mpirun has seen
#define END_MS 1500      // for what is left of it on hosts
#define NO_MPI                                                                                     \
    "horovod does not find an installed MPI. Either install one of Open MPI, Spectrum MPI, MPICH " \
    "or Intel MPI and put its mpirun into PATH, or leave --mpi out: horovodrun starts ranks "      \
    "itself"

// --- Running -------------------------------------------------------------------------------------

// Options as the environment has them: mpirun carries it to the ranks.
static void export_options(const options_t *options)
{
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if ((option.traits & EXPORTED) != 0 && options->origins[i] > BY_ENVIRONMENT) {
            setenv(option.info.env, options->texts[i], 1);
        }
    }
    if (options->network_interfaces[0] != '\0') {
        setenv("HOROVOD_GLOO_IFACE", options->network_interfaces, 1);
    }
    if (options->tcp) {
        setenv("NCCL_IB_DISABLE", "1", 1);
    }
    setenv("PYTHONUNBUFFERED", "1", 0);
}

static void tell(char *const *command)
{
    buf_t text = {0};
    for (char *const *at = command; *at != NULL; at++) {
        quote_word(*at, &text);
        buf_append(&text, " ", at[1] != NULL);
    }
    buf_append(&text, "", 1);
    if (!text.failed) {
        say("%s", (const char *)text.data);
    }
    buf_free(&text);
}

mpi_flavor_t mpi_find(void)
{
    char *ask[] = {"mpirun", "--version", NULL};
    char version[4096];
    mpi_flavor_t flavor = run_program(ask, VERSION_TIMEOUT_MS, version, sizeof version) == 0
                              ? mpi_flavor_of(version)
                              : MPI_NONE;
    if (flavor == MPI_NONE) {
        say(NO_MPI);
    }
    return flavor;
}

// In place of this process.
static int become_mpirun(const options_t *options)
{
    err_t err = {0};
    hosts_t hosts = {0};
    job_plan_t plan = {0};
    int code = EXIT_USAGE;
    mpi_flavor_t flavor = mpi_find();
    if (flavor == MPI_NONE) {
        return EXIT_NOT_FOUND;
    }
    char **command = NULL;
    if (hosts_choose(options, &hosts, &err) == HVD_OK &&
        job_plan_make(&hosts, (int)options->num_proc, &plan, &err) == HVD_OK) {
        export_options(options);
        command = mpi_command(options, flavor, &hosts, plan.n_ranks, environ, &err);
    }
    if (command != NULL) {
        if (options->verbose) {
            tell(command);
        }
        execvp(command[0], command);
        fail_errno(&err, errno, "cannot start mpirun");
        code = EXIT_NOT_FOUND;
    }
    say("%s", err.text);
    free_words(command);
    job_plan_free(&plan);
    hosts_free(&hosts);
    return code;
}

// --- As the child of a session -------------------------------------------------------------------

// What makes each mpirun use a shell of ours, from this host only.
static const struct {
    const char *name, *value; // NULL: the shell
} shell_settings[] = {
    {"OMPI_MCA_plm_rsh_agent", NULL},
    {"OMPI_MCA_plm_rsh_no_tree_spawn", "1"},
    {"PRTE_MCA_plm_ssh_agent", NULL},
    {"PRTE_MCA_plm_ssh_no_tree_spawn", "1"},
    {"HYDRA_LAUNCHER", "ssh"},
    {"HYDRA_LAUNCHER_EXEC", NULL},
    {"I_MPI_HYDRA_BOOTSTRAP", "ssh"},
    {"I_MPI_HYDRA_BOOTSTRAP_EXEC", NULL},
    {"I_MPI_HYDRA_BRANCH_COUNT", "1024"},
    {"OMPI_MCA_orte_leave_session_attached", "1"},
    {"PRTE_MCA_prte_leave_session_attached", "1"},
};

// A script, since some mpiruns take no more than a path.
static hvd_status_t write_shell(char *directory, char *path, size_t bytes, err_t *err)
{
    char program[4096];
    buf_t quoted = {0};
    if (mkdtemp(directory) == NULL || !own_path(program, sizeof program)) {
        return fail_errno(err, errno, "cannot write the remote shell for mpirun to /tmp");
    }
    quote_word(program, &quoted);
    buf_append(&quoted, "", 1);
    snprintf(path, bytes, "%s/shell", directory);
    FILE *file = quoted.failed ? NULL : fopen(path, "we");
    bool is_written =
        file != NULL && fchmod(fileno(file), 0700) == 0 &&
        fprintf(file, "#!/bin/sh\nexec %s --shell -- \"$@\"\n", (const char *)quoted.data) > 0;
    is_written = file != NULL && fclose(file) == 0 && is_written;
    buf_free(&quoted);
    return is_written ? HVD_OK : fail_errno(err, errno, "cannot write %s", path);
}

static void use_shell(const session_t *session, const char *path)
{
    char place[64];
    for (size_t i = 0; i < N_ELEMENTS(shell_settings); i++) {
        const char *value = shell_settings[i].value;
        setenv(shell_settings[i].name, value != NULL ? value : path, 1);
    }
    snprintf(place, sizeof place, "127.0.0.1:%d", awaited_port(session->awaited));
    setenv("HOROVODRUN_DIAL", place, 1);
    setenv("HOROVODRUN_SECRET_FILE", session->options->secret_file, 1);
}

void mpi_start_child(session_t *session, int (*launcher)(const options_t *),
                     const options_t *options)
{
    char path[64] = "";
    err_t err = {0};
    if (session->awaited != NULL) {
        snprintf(session->shell, sizeof session->shell, "/tmp/hvd-shell-XXXXXX");
        if (write_shell(session->shell, path, sizeof path, &err) != HVD_OK) {
            session_fail(session, EXIT_INTERNAL, "%s", err.text);
            return;
        }
    }
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        sigset_t none;
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        if (session->awaited != NULL) {
            use_shell(session, path);
        }
        _exit(getppid() != parent ? EXIT_BY_SIGNAL + SIGTERM : launcher(options));
    }
    session->child = pid;
    if (pid < 0) {
        session->child = 0;
        session_fail(session, EXIT_INTERNAL, "cannot start the job: %s", strerror(errno));
    }
}

void mpi_hear_child(session_t *session)
{
    int status;
    if (session->child > 0 && waitpid(session->child, &status, WNOHANG) == session->child) {
        session->child = 0;
        session->policy->on_child(session, status);
    } else if (session->child > 0 && clock_ns() >= session->late_at_ns) {
        kill(session->child, SIGKILL);
    }
}

void mpi_free(session_t *session)
{
    char path[64];
    if (session->shell[0] != '\0') {
        snprintf(path, sizeof path, "%s/shell", session->shell);
        unlink(path);
        rmdir(session->shell);
    }
}

static void on_ready(session_t *session, agent_link_t *link)
{
    (void)link;
    for (int i = 0; i < session->n_links; i++) {
        if (link_is_coming(session->links[i])) {
            return;
        }
    }
    if (session->child == 0 && session->child_code < 0) {
        mpi_start_child(session, become_mpirun, session->options);
    }
    carry_serve(session);
}

static void on_exit_of(session_t *session, worker_t *worker)
{
    carry_end(session, worker);
}

static void on_lost(session_t *session, agent_link_t *link, const char *how)
{
    bool is_missed = !link->is_shell && !session->is_stopping;
    carry_lose(session, link);
    if (is_missed && how == NULL) {
        job_policy.on_lost(session, link, how);
    } else if (is_missed && session->lost == NULL) {
        session->lost = link;
        session->stop_at_ns = deadline_in_ms(NOTICE_MS);
    }
    link_close(link);
}

static void on_child(session_t *session, int status)
{
    session->child_code =
        WIFSIGNALED(status) ? EXIT_BY_SIGNAL + WTERMSIG(status) : WEXITSTATUS(status);
    if (!session->is_stopping) {
        session->stop_at_ns = deadline_in_ms(session->lost == NULL ? LAST_LOOK_MS : 0);
    }
}

static uint64_t on_time(session_t *session, uint64_t now_ns)
{
    (void)now_ns;
    return carry_serve(session);
}

// Open MPI 5 now and then calls it a success when a host is lost.
static int conclude(session_t *session)
{
    int code = session->child_code;
    if (session->lost != NULL && code != 0) {
        sink_say(session->sink, STREAM_STDERR, "%s: lost the agent on host %s; is the host up?",
                 PROGRAM, session->lost->host->name);
    }
    bool was_stopped = code == EXIT_BY_SIGNAL + SIGTERM;
    return session->lost != NULL && (code == 0 || was_stopped) ? EXIT_UNREACHABLE : code;
}

const session_policy_t mpi_policy = {.hears_signals = true,
                                     .at_home = true,
                                     .look_ms = LOOK_MS,
                                     .grace_ms = END_MS,
                                     .on_arrival = carry_arrival,
                                     .on_ready = on_ready,
                                     .on_exit = on_exit_of,
                                     .on_output = carry_pass_on,
                                     .on_lost = on_lost,
                                     .on_child = on_child,
                                     .on_time = on_time,
                                     .conclude = conclude};

int mpi_run(const options_t *options)
{
    session_t session = {.signal_fd = -1};
    hosts_t hosts = {0};
    err_t err = {0};
    hvd_status_t status;
    if (options->await_agents < 0) {
        return become_mpirun(options);
    }
    if (mpi_find() == MPI_NONE) {
        return EXIT_NOT_FOUND; // better before agents are waited for
    }
    TRY(hosts_choose(options, &hosts, &err), out);
    hosts_find_local(options, &hosts);
    TRY(session_init(&session, options, &mpi_policy, &err), out);
    TRY(session_add_hosts(&session, &hosts, hosts.n, &err), out);
    TRY(session_prepare(&session, false, 0, &err), out);
out:;
    int code = status == HVD_OK ? session_run(&session) : session_refuse(&session, &err);
    session_close(&session);
    hosts_free(&hosts);
    return code;
}
