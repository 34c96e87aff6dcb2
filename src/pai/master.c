// SPDX-License-Identifier: Apache-2.0
//
// master.c - the master of an OpenPAI job: waits for every task, runs the job, tells how it ended.
//
// Containers of a job start when they like. A gate (gate.c) is opened on every task, all at once,
// again every RETRY_MS where nobody answers yet; a line tells who is missing and why, and a
// deadline ends it with the same list. When all are there the job runs in a child process, natively
// or through mpirun, over the interfaces that own the addresses OpenPAI has given the tasks. Gates
// stay open all the while: one that closes means a lost task, and ends a job that has not noticed
// by itself within NOTICE_MS. The exit code goes to the workers through the gates and is ours. One
// thread, one poll.
#define _GNU_SOURCE
#include "launch/process.h"
#include "pai/internal.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define RETRY_MS 1000
#define TELL_MS 10000    // between lines of progress while nothing changes
#define NOTICE_MS 3000   // for a launcher to name a lost task itself
#define LAST_LOOK_MS 300 // for us to see what mpirun has seen
#define END_MS 3000      // for gates to pass the last word on
#define MAX_OPENING 64
#define SAID_BYTES 1024

typedef struct gate {
    const host_t *host;
    child_t process;
    int socket; // -1: none
    bool has_process, is_here;
    uint64_t retry_at_ns;
    char said[SAID_BYTES]; // end of what ssh printed
    char hello[256];
    size_t hello_bytes;
    char interface[64]; // "": not known
} gate_t;

typedef struct master {
    options_t options; // with what the variables say; fields belong to the caller's
    hosts_t hosts;
    gate_t *gates; // of all hosts but this one, which mpirun alone reaches by ssh like the others
    int n_gates;
    char path[4096]; // of this program
    int signal_fd;
    int signo; // that asked us to end
    uint64_t tell_at_ns, begin_ns;
    int n_told;
    char *interfaces;
    char fatal[HVD_TEXT_BYTES]; // waiting longer does not help
} master_t;

// --- One gate ------------------------------------------------------------------------------------

static void close_gate(gate_t *gate, int timeout_ms)
{
    uint64_t deadline_ns = deadline_in_ms(timeout_ms);
    int status;
    if (gate->socket >= 0) {
        close(gate->socket);
        gate->socket = -1;
    }
    if (gate->has_process) {
        while (waitpid(gate->process.pid, &status, WNOHANG) == 0) {
            if (clock_ns() >= deadline_ns) {
                kill_group(gate->process.pid, SIGKILL);
            }
            usleep(1000);
        }
        close(gate->process.fds[STREAM_STDERR]);
        gate->has_process = false;
    }
}

static void start_gate(master_t *master, gate_t *gate)
{
    char arguments[700];
    bool uses_ssh = master->options.agent_port == 0;
    err_t err = {0};
    snprintf(arguments, sizeof arguments, "--pai-gate %s@%s", gate->host->name,
             gate->host->address);
    char **command = uses_ssh
                         ? remote_program(&master->options, gate->host, master->path, arguments)
                         : remote_command(&master->options, gate->host, master->path);
    gate->said[0] = '\0';
    gate->hello_bytes = 0;
    if (command == NULL) {
        snprintf(master->fatal, sizeof master->fatal,
                 "--ssh-command is \"%.200s\", which is not a command",
                 master->options.ssh_command);
    } else if (spawn_helper(command, &gate->process, &gate->socket, &err) != HVD_OK) {
        snprintf(gate->said, sizeof gate->said, "%.500s", err.text);
        gate->retry_at_ns = deadline_in_ms(RETRY_MS);
    } else {
        gate->has_process = true;
    }
    free_words(command);
}

static void read_errors(gate_t *gate)
{
    char text[512];
    ssize_t n;
    while ((n = read(gate->process.fds[STREAM_STDERR], text, sizeof text)) > 0) {
        size_t have = strlen(gate->said), more = (size_t)n;
        size_t keep = MIN(have, sizeof gate->said - 1 - more);
        memmove(gate->said, gate->said + have - keep, keep);
        memcpy(gate->said + keep, text, more);
        gate->said[keep + more] = '\0';
    }
}

// "horovod-pai-gate VERSION INTERFACE"; anything else is not for us.
static void on_hello_line(master_t *master, gate_t *gate)
{
    char version[64], interface[64];
    if (sscanf(gate->hello, PAI_GATE_HELLO " %63s %63s", version, interface) != 2) {
        snprintf(master->fatal, sizeof master->fatal,
                 "the answer from %s does not come from " PROGRAM
                 ": \"%.100s\"; does the shell there print something before it runs a command? "
                 "Try: ssh %s true",
                 gate->host->name, gate->hello, gate->host->name);
    } else if (strcmp(version, hvd_version()) != 0) {
        snprintf(master->fatal, sizeof master->fatal,
                 "%s has version %s of " PROGRAM ", this task has %s; use the same image for all "
                 "roles",
                 gate->host->name, version, hvd_version());
    } else {
        snprintf(gate->interface, sizeof gate->interface, "%s",
                 strcmp(interface, "-") != 0 ? interface : "");
        gate->is_here = true;
    }
}

// false: it is gone.
static bool hear_gate(master_t *master, gate_t *gate)
{
    ssize_t n = read(gate->socket, gate->hello + gate->hello_bytes,
                     sizeof gate->hello - 1 - gate->hello_bytes);
    if (n <= 0) {
        return n < 0 && (errno == EAGAIN || errno == EINTR);
    }
    if (gate->is_here || master->options.agent_port > 0) {
        gate->is_here = true; // an agent has said hello, or a ping; the job's own link looks closer
        return true;
    }
    gate->hello_bytes += (size_t)n;
    gate->hello[gate->hello_bytes] = '\0';
    char *newline = strchr(gate->hello, '\n');
    if (newline != NULL || gate->hello_bytes == sizeof gate->hello - 1) {
        if (newline != NULL) {
            *newline = '\0';
        }
        on_hello_line(master, gate);
        gate->hello_bytes = 0;
    }
    return true;
}

static void lose_gate(master_t *master, gate_t *gate)
{
    read_errors(gate);
    close_gate(gate, 0);
    gate->is_here = false;
    gate->retry_at_ns = deadline_in_ms(RETRY_MS);
    if (strstr(gate->said, REMOTE_NOT_INSTALLED) != NULL) {
        snprintf(master->fatal, sizeof master->fatal,
                 PROGRAM " is not installed on %s; use the same image for all roles",
                 gate->host->name);
    }
}

// --- All gates -----------------------------------------------------------------------------------

static int count_here(const master_t *master)
{
    int n = 0;
    for (int i = 0; i < master->n_gates; i++) {
        n += master->gates[i].is_here;
    }
    return n;
}

static void start_some(master_t *master)
{
    uint64_t now_ns = clock_ns();
    int n_opening = 0;
    for (int i = 0; i < master->n_gates; i++) {
        n_opening += master->gates[i].has_process && !master->gates[i].is_here;
    }
    for (int i = 0; i < master->n_gates && n_opening < MAX_OPENING; i++) {
        if (!master->gates[i].has_process && master->gates[i].retry_at_ns <= now_ns) {
            start_gate(master, &master->gates[i]);
            n_opening++;
        }
    }
}

// A signal that asks us to end is kept; the end of a child is only a reason to look.
static void hear_signals(master_t *master, pid_t job)
{
    struct signalfd_siginfo info;
    while (read(master->signal_fd, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGCHLD) {
            continue;
        }
        master->signo = (int)info.ssi_signo;
        if (job > 0 && info.ssi_code != SI_KERNEL) { // a terminal tells the whole group itself
            kill(job, (int)info.ssi_signo);
        }
    }
}

// One look at gates and signals. *lost_p: the last gate that closed, if any.
static bool look(master_t *master, pid_t job, int timeout_ms, gate_t **lost_p)
{
    int n = master->n_gates;
    struct pollfd *polled = calloc((size_t)n + 1, sizeof *polled);
    if (polled == NULL) {
        return false;
    }
    for (int i = 0; i < n; i++) {
        polled[i] = (struct pollfd){.fd = master->gates[i].socket, .events = POLLIN};
    }
    polled[n] = (struct pollfd){.fd = master->signal_fd, .events = POLLIN};
    poll(polled, (nfds_t)n + 1, timeout_ms);
    hear_signals(master, job);
    for (int i = 0; i < n; i++) {
        if (polled[i].revents != 0 && !hear_gate(master, &master->gates[i])) {
            lose_gate(master, &master->gates[i]);
            *lost_p = &master->gates[i];
        }
    }
    free(polled);
    return true;
}

// --- Waiting -------------------------------------------------------------------------------------

// The last line ssh printed, without its end.
static const char *last_line(char *text)
{
    size_t len = strlen(text);
    while (len > 0 && strchr("\r\n", text[len - 1]) != NULL) {
        text[--len] = '\0';
    }
    char *newline = strrchr(text, '\n');
    return newline != NULL ? newline + 1 : text;
}

// "worker-1 at 10.0.0.5 (nobody listens at its ssh port), worker-2 ..."; not all of a thousand.
static void put_missing(master_t *master, buf_t *text)
{
    int n_left = master->n_gates - count_here(master), n_shown = 0;
    for (int i = 0; i < master->n_gates; i++) {
        gate_t *gate = &master->gates[i];
        if (gate->is_here || n_shown == 16) {
            continue;
        }
        remote_fault_t fault = remote_explain(gate->said, -1);
        const char *said = last_line(gate->said);
        buf_printf(text, "%s%s at %s (%s%s%.100s)", n_shown > 0 ? ", " : "", gate->host->name,
                   gate->host->address, said[0] != '\0' ? fault.what : "no answer yet",
                   said[0] != '\0' ? ": " : "", said);
        n_shown++;
    }
    if (n_left > n_shown) {
        buf_printf(text, " and %d more", n_left - n_shown);
    }
    buf_append(text, "", 1);
}

static void tell_progress(master_t *master)
{
    int n_here = count_here(master);
    buf_t missing = {0};
    if (n_here == master->n_told && clock_ns() < master->tell_at_ns) {
        return;
    }
    master->n_told = n_here;
    master->tell_at_ns = deadline_in_ms(TELL_MS);
    put_missing(master, &missing);
    if (n_here == master->n_gates) {
        say("all %d tasks are ready", master->hosts.n);
    } else if (!missing.failed) {
        say("%d of %d tasks are ready after %d s of %d (--pai-timeout); missing: %.1000s",
            n_here + master->hosts.n - master->n_gates, master->hosts.n,
            (int)((clock_ns() - master->begin_ns) / NS_PER_S), (int)master->options.pai_timeout,
            (const char *)missing.data);
    }
    buf_free(&missing);
}

static int give_up(master_t *master)
{
    buf_t missing = {0};
    put_missing(master, &missing);
    say("%d of %d tasks did not answer within %d s (--pai-timeout): %.1000s. Look at their logs: "
        "is there an sshd in the image, and does their command run \"%s --pai-worker\"?",
        master->n_gates - count_here(master), master->hosts.n, (int)master->options.pai_timeout,
        missing.failed ? "" : (const char *)missing.data, PROGRAM);
    buf_free(&missing);
    return EXIT_START_TIMEOUT;
}

// An exit code: 0 when every task is there.
static int wait_for_all(master_t *master)
{
    uint64_t deadline_ns = deadline_in_ms(master->options.pai_timeout * 1000);
    gate_t *lost = NULL;
    master->begin_ns = clock_ns();
    master->tell_at_ns = deadline_in_ms(RETRY_MS); // no line for those who come at once
    while (count_here(master) < master->n_gates) {
        start_some(master);
        if (!look(master, -1, 200, &lost)) {
            say("no memory for %d tasks", master->n_gates);
            return EXIT_INTERNAL;
        }
        if (master->signo != 0) {
            return EXIT_BY_SIGNAL + master->signo;
        }
        if (master->fatal[0] != '\0') {
            say("%s", master->fatal);
            return EXIT_UNREACHABLE;
        }
        tell_progress(master);
        if (clock_ns() >= deadline_ns && count_here(master) < master->n_gates) {
            return give_up(master);
        }
    }
    return 0;
}

// --- Running -------------------------------------------------------------------------------------

static bool knows_all_interfaces(const master_t *master)
{
    for (int i = 0; i < master->n_gates; i++) {
        if (master->gates[i].interface[0] == '\0') {
            return false;
        }
    }
    return true;
}

// Appends the names that are new: this task's, then those of the others.
static void list_interfaces(const master_t *master, const char *own, buf_t *list)
{
    buf_append(list, own, strlen(own));
    for (int i = 0; i < master->n_gates; i++) {
        const char *name = master->gates[i].interface;
        bool is_new = strcmp(name, own) != 0;
        for (int other = 0; is_new && other < i; other++) {
            is_new = strcmp(name, master->gates[other].interface) != 0;
        }
        if (is_new) {
            buf_printf(list, ",%s", name);
        }
    }
    buf_append(list, "", 1);
}

// The interfaces that own the tasks' addresses. All ranks get the same list, so where a task has
// not told its own, they choose by themselves. The mpiruns that need one (Intel MPI, MPICH) want
// this task's, and take no list: where names differ they are told in their environment.
static bool choose_interfaces(master_t *master, bool is_native)
{
    static const char *const of_mpirun[] = {"I_MPI_HYDRA_IFACE", "HYDRA_IFACE"};
    char own[64];
    buf_t list = {0};
    if (master->options.network_interfaces[0] != '\0' || !knows_all_interfaces(master) ||
        !pai_interface(master->hosts.list[0].address, own, sizeof own)) {
        return true;
    }
    list_interfaces(master, own, &list);
    if (list.failed) {
        buf_free(&list);
        return false;
    }
    master->interfaces = (char *)list.data;
    if (is_native || strchr(master->interfaces, ',') == NULL) {
        master->options.network_interfaces = master->interfaces;
        return true;
    }
    for (size_t i = 0; i < N_ELEMENTS(of_mpirun); i++) {
        setenv(of_mpirun[i], own, 0);
    }
    setenv("HOROVOD_GLOO_IFACE", master->interfaces, 0);
    setenv("NCCL_SOCKET_IFNAME", master->interfaces, 0);
    return true;
}

// The job in a process of its own, which ends with us.
static pid_t start_job(const master_t *master, int (*launcher)(const options_t *))
{
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        sigset_t none;
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        close(master->signal_fd);
        for (int i = 0; i < master->n_gates; i++) {
            close(master->gates[i].socket);
        }
        _exit(getppid() != parent ? EXIT_BY_SIGNAL + SIGTERM : launcher(&master->options));
    }
    return pid;
}

static int run_job(master_t *master, int (*launcher)(const options_t *))
{
    uint64_t stop_at_ns = NEVER_NS;
    gate_t *lost = NULL;
    int status = 0;
    pid_t ended, job = start_job(master, launcher);
    if (job < 0) {
        say("cannot start the job: %s", strerror(errno));
        return EXIT_INTERNAL;
    }
    while ((ended = waitpid(job, &status, WNOHANG)) == 0 || (ended < 0 && errno == EINTR)) {
        gate_t *now_lost = NULL;
        if (!look(master, job, 500, &now_lost)) {
            usleep(500000); // no memory for a look: the job itself goes on
        }
        if (now_lost != NULL && lost == NULL) {
            lost = now_lost;
            stop_at_ns = deadline_in_ms(NOTICE_MS);
        }
        if (clock_ns() >= stop_at_ns) {
            say("lost task %s; stopping the job. %.200s", lost->host->name, last_line(lost->said));
            kill(job, SIGTERM);
            stop_at_ns = NEVER_NS;
        }
    }
    // mpirun may have seen before us that a task is gone.
    uint64_t last_look_ns = deadline_in_ms(launcher == mpi_run ? LAST_LOOK_MS : 0);
    while (lost == NULL && clock_ns() < last_look_ns) {
        look(master, job, LAST_LOOK_MS / 10, &lost);
    }
    int code = WIFSIGNALED(status) ? EXIT_BY_SIGNAL + WTERMSIG(status) : WEXITSTATUS(status);
    bool was_stopped = lost != NULL && stop_at_ns == NEVER_NS && code == EXIT_BY_SIGNAL + SIGTERM;
    // Open MPI 5 now and then calls it a success when a host is lost.
    bool is_wrong = lost != NULL && code == 0 && launcher == mpi_run;
    if (lost != NULL && (code != 0 || is_wrong) && !was_stopped) {
        say("task %s was lost: look at its log", lost->host->name);
    }
    return is_wrong || (was_stopped && master->signo == 0) ? EXIT_UNREACHABLE : code;
}

static void tell_end(master_t *master, int code)
{
    char line[32];
    int bytes = snprintf(line, sizeof line, PAI_GATE_END " %d\n", code);
    for (int i = 0; i < master->n_gates; i++) {
        gate_t *gate = &master->gates[i];
        if (gate->socket >= 0 && master->options.agent_port == 0 &&
            write(gate->socket, line, (size_t)bytes) < 0) {
            close_gate(gate, 0);
        }
        if (gate->socket >= 0) {
            shutdown(gate->socket, SHUT_WR);
        }
    }
    for (int i = 0; i < master->n_gates; i++) {
        close_gate(&master->gates[i], END_MS);
    }
}

// --- All together --------------------------------------------------------------------------------

static hvd_status_t open_master(const options_t *options, bool is_native, master_t *master,
                                err_t *err)
{
    int first = is_native ? 1 : 0;
    if (options->hosts[0] != '\0' || options->hostfile[0] != '\0') {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "%s contradicts --pai, which runs on the tasks of the job; leave it out (-np "
                    "and --slots-per-host say how many ranks)",
                    options->hosts[0] != '\0' ? "--hosts" : "--hostfile");
    }
    hvd_status_t status = hosts_of_openpai(options, &master->hosts, err);

    master->options = *options;
    if (status != HVD_OK) {
        return status;
    }
    if (options->secret_file[0] != '\0' && options->agent_port == 0) {
        master->options.agent_port = 1; // agents that wait; every task has a port of its own
    }
    for (int i = 1; i < master->hosts.n && master->options.agent_port == 1; i++) {
        if (master->hosts.list[i].agent_port == 0) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "--secret-file needs a port on which agents listen: --agent-port, or a "
                        "port labelled horovod in the job file for every role");
        }
    }
    master->gates = calloc((size_t)master->hosts.n, sizeof *master->gates);
    if (master->gates == NULL || !own_path(master->path, sizeof master->path)) {
        return fail(err, HVD_NO_MEMORY, "no memory for %d tasks, or /proc is not mounted",
                    master->hosts.n);
    }
    master->n_gates = master->hosts.n - first;
    for (int i = 0; i < master->n_gates; i++) {
        master->gates[i].host = &master->hosts.list[i + first];
        master->gates[i].socket = -1;
    }
    master->signal_fd = signals_open(SIG_BLOCK, (const int[]){SIGINT, SIGTERM, SIGHUP, SIGCHLD, 0});
    return master->signal_fd >= 0 ? HVD_OK : fail_errno(err, errno, "cannot listen for signals");
}

int pai_run(const options_t *options, int (*launcher)(const options_t *))
{
    master_t master = {.signal_fd = -1};
    err_t err = {0};
    int code = EXIT_USAGE;
    bool is_native = launcher != mpi_run;
    if (open_master(options, is_native, &master, &err) != HVD_OK) {
        say("%s", err.text);
    } else if (!is_native && mpi_find() == MPI_NONE) {
        code = EXIT_NOT_FOUND; // better before the others are waited for
    } else {
        code = wait_for_all(&master);
        if (code == 0 && !choose_interfaces(&master, is_native)) {
            say("no memory for the names of interfaces");
            code = EXIT_INTERNAL;
        }
        if (code == 0 && !is_native) {
            pai_choose_fabric(options);
        }
        code = code != 0 ? code : run_job(&master, launcher);
        tell_end(&master, code);
    }
    if (master.signal_fd >= 0) {
        close(master.signal_fd);
    }
    free(master.interfaces);
    free(master.gates);
    hosts_free(&master.hosts);
    return code;
}
