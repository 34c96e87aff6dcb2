// SPDX-License-Identifier: Apache-2.0
//
// gate.c - the worker of an OpenPAI job, and the gate through which the master holds it.
//
// `horovodrun --pai-worker` is the command of a worker's container, which lives as long as its
// command: it waits at a local socket. The master has an agent on every task over ssh
// (`horovodrun --agent --pai-gate`), for as long as the job runs, and the gate is that agent's
// parent: it knocks at the worker's socket until somebody opens, ends the agent when the worker is
// gone, and passes the last word on: the master's exit code, with which the worker ends. A gate
// that goes without it has lost its master: the worker gives another one GRACE_MS to come and then
// ends with a failure. A container that runs something else (as sleep) has a gate that nobody
// opens. One thread, one poll, each.
//
// With --secret-file there is neither ssh nor a gate: the worker itself is the agent, and dials.
#define _GNU_SOURCE
#include "agent/agent.h"
#include "pai/internal.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define KNOCK_MS 200
#define LAST_KNOCKS_MS 1000 // the master has ended before the worker's command began
#define GRACE_MS 3000
#define MAX_GATES 8 // one is usual; more while the master tries again
#define LINE_BYTES 64

// In a directory of this user's own: another user must not be able to end our worker.
static hvd_status_t socket_address(const char *task, bool makes, struct sockaddr_un *address_p,
                                   err_t *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char directory[64];
    struct stat seen;
    snprintf(directory, sizeof directory, "/tmp/horovod-pai-%u", (unsigned)getuid());
    if (makes && mkdir(directory, 0700) != 0 && errno != EEXIST) {
        return fail_errno(err, errno, "cannot create %s", directory);
    }
    if (lstat(directory, &seen) != 0) {
        return fail_errno(err, errno, "cannot access %s", directory);
    }
    if (!S_ISDIR(seen.st_mode) || seen.st_uid != getuid() || (seen.st_mode & 077) != 0) {
        return fail(err, HVD_SYSTEM,
                    "%s is not a directory that only this user can access; remove it", directory);
    }
    int bytes = snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", directory, task);
    if (bytes >= (int)sizeof address.sun_path || strchr(task, '/') != NULL) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the name of task %.200s is too long, or has a \"/\" in it", task);
    }
    *address_p = address;
    return HVD_OK;
}

// --- The worker ----------------------------------------------------------------------------------

typedef struct gate_line {
    int fd; // -1: none
    char text[LINE_BYTES];
    size_t len;
} gate_line_t;

typedef struct gate_worker {
    int listener;
    gate_line_t gates[MAX_GATES];
    int n_gates;
    bool had_gate, has_code;
    int code;
    uint64_t give_up_ns;
} gate_worker_t;

static hvd_status_t worker_listen(const char *task, gate_worker_t *worker, char *path, err_t *err)
{
    struct sockaddr_un address;
    hvd_status_t status = socket_address(task, true, &address, err);
    if (status != HVD_OK) {
        return status;
    }
    unlink(address.sun_path); // of a worker that was killed
    worker->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (worker->listener < 0 ||
        bind(worker->listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(worker->listener, MAX_GATES) != 0) {
        return fail_errno(err, errno, "cannot listen on %s", address.sun_path);
    }
    snprintf(path, sizeof address.sun_path, "%s", address.sun_path);
    return HVD_OK;
}

static void open_gate(gate_worker_t *worker)
{
    int fd = accept4(worker->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
        worker->gates[worker->n_gates++] = (gate_line_t){.fd = fd};
        if (!worker->had_gate) {
            say("connected to the master");
        }
        worker->had_gate = true;
        worker->give_up_ns = NEVER_NS;
    }
}

// "end <code>"
static bool read_end(const char *line, int *code_p)
{
    char *end;
    if (strncmp(line, PAI_GATE_END " ", strlen(PAI_GATE_END) + 1) != 0) {
        return false;
    }
    long code = strtol(line + strlen(PAI_GATE_END) + 1, &end, 10);
    *code_p = (int)code;
    return *end == '\n' && code >= 0 && code <= 255;
}

static void hear_gate(gate_worker_t *worker, int i)
{
    gate_line_t *gate = &worker->gates[i];
    ssize_t n = read(gate->fd, gate->text + gate->len, LINE_BYTES - 1 - gate->len);
    if (n > 0) {
        gate->len += (size_t)n;
        gate->text[gate->len] = '\0';
        worker->has_code |= read_end(gate->text, &worker->code);
        return;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    close(gate->fd);
    worker->gates[i] = worker->gates[--worker->n_gates];
    if (worker->n_gates == 0) {
        worker->give_up_ns = deadline_in_ms(GRACE_MS);
    }
}

static void wait_for_end(gate_worker_t *worker)
{
    while (!worker->has_code && clock_ns() < worker->give_up_ns) {
        struct pollfd polled[MAX_GATES + 1];
        int n = worker->n_gates;
        polled[0] = (struct pollfd){.fd = n < MAX_GATES ? worker->listener : -1, .events = POLLIN};
        for (int i = 0; i < n; i++) {
            polled[1 + i] = (struct pollfd){.fd = worker->gates[i].fd, .events = POLLIN};
        }
        poll(polled, (nfds_t)n + 1, 500);
        for (int i = n - 1; i >= 0; i--) { // from the end: one that closes is replaced by the last
            if (polled[1 + i].revents != 0) {
                hear_gate(worker, i);
            }
        }
        if (polled[0].revents != 0) {
            open_gate(worker);
        }
    }
}

static int conclude(const gate_worker_t *worker, const options_t *options)
{
    if (worker->has_code) {
        say("the master ended with exit code %d, and so does this worker", worker->code);
        return worker->code;
    }
    if (worker->had_gate) {
        say("lost the master: it was killed, or the network was cut. Look at its log");
        return EXIT_UNREACHABLE;
    }
    say("the master did not %s within %d s (--pai-timeout); does its container run \"%s --pai "
        "...\"? Look at its log",
        options->secret_file[0] != '\0' ? "answer" : "connect", (int)options->pai_timeout, PROGRAM);
    return EXIT_START_TIMEOUT;
}

// A worker only waits: what else is said of it was meant for the master.
static hvd_status_t check_worker(const options_t *options, err_t *err)
{
    if (options->pai) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "--pai and --pai-worker exclude each other: a task is the master or a worker; "
                    "give only one of them");
    }
    return options->n_command == 0
               ? HVD_OK
               : fail(err, HVD_INVALID_ARGUMENT,
                      "--pai-worker takes no command, but got \"%.100s\": it runs the one given to "
                      "\"%s --pai\" in the master's container; leave it out",
                      options->command[0], PROGRAM);
}

static int wait_at_socket(const options_t *options, const char *task)
{
    gate_worker_t worker = {.listener = -1, .give_up_ns = NEVER_NS};
    char path[sizeof((struct sockaddr_un *)0)->sun_path] = "";
    err_t err = {0};
    int code = EXIT_USAGE;
    worker.give_up_ns = deadline_in_ms(options->pai_timeout * 1000);
    if (worker_listen(task, &worker, path, &err) != HVD_OK) {
        say("%s", err.text);
    } else {
        wait_for_end(&worker);
        code = conclude(&worker, options);
        unlink(path);
    }
    for (int i = 0; i < worker.n_gates; i++) {
        close(worker.gates[i].fd);
    }
    if (worker.listener >= 0) {
        close(worker.listener);
    }
    return code;
}

// Is the agent of this task, at a port of the master's.
static int dial_master(const options_t *options, const hosts_t *tasks)
{
    options_t own = *options;
    const host_t *self = &tasks->list[0], *master = pai_master(tasks);
    char place[300], interface[64] = "";
    bool is_told;
    if (master == NULL) {
        say("it is not clear which task is the master; call its role \"master\"");
        return EXIT_USAGE;
    }
    int port = master->agent_port > 0 ? master->agent_port : (int)options->agent_port;
    pai_interface(self->address, interface, sizeof interface);
    snprintf(place, sizeof place, "%s:%d", master->address, port);
    own.dial = place;
    own.agent_name = self->name;
    own.agent_about = interface;
    own.start_timeout = (double)options->pai_timeout;
    int code = agent_stay(&own, &is_told);
    const gate_worker_t end = {.had_gate = code == 0, .has_code = is_told, .code = code};
    return code == EXIT_NO_SECRET ? code : conclude(&end, options);
}

int pai_worker(const options_t *options)
{
    hosts_t tasks = {0};
    err_t err = {0};
    if (check_worker(options, &err) != HVD_OK || pai_tasks(options, &tasks, &err) != HVD_OK) {
        say("%s", err.text);
        return EXIT_USAGE;
    }
    say("%s waits for the master", tasks.list[0].name);
    int code = options->secret_file[0] != '\0' ? dial_master(options, &tasks)
                                               : wait_at_socket(options, tasks.list[0].name);
    hosts_free(&tasks);
    return code;
}

// --- The gate ------------------------------------------------------------------------------------

static bool knock(const char *task, int *fd_p)
{
    struct sockaddr_un address;
    if (socket_address(task, false, &address, NULL) != HVD_OK) {
        return false;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        if (fd >= 0) {
            close(fd);
        }
        return false;
    }
    *fd_p = fd;
    return true;
}

bool pai_interface(const char *address, char *name, size_t bytes)
{
    struct ifaddrs *interfaces = NULL;
    struct in_addr v4, *other4;
    struct in6_addr v6;
    bool is_v4 = inet_pton(AF_INET, address, &v4) == 1;
    bool is_v6 = inet_pton(AF_INET6, address, &v6) == 1;
    bool is_found = false;
    if (getifaddrs(&interfaces) != 0) {
        return false;
    }
    for (struct ifaddrs *at = interfaces; at != NULL && !is_found; at = at->ifa_next) {
        int family = at->ifa_addr != NULL ? at->ifa_addr->sa_family : AF_UNSPEC;
        if (family == AF_INET && is_v4) {
            other4 = &((struct sockaddr_in *)(void *)at->ifa_addr)->sin_addr;
            is_found = other4->s_addr == v4.s_addr;
        } else if (family == AF_INET6 && is_v6) {
            is_found = memcmp(&((struct sockaddr_in6 *)(void *)at->ifa_addr)->sin6_addr, &v6,
                              sizeof v6) == 0;
        }
        if (is_found) {
            snprintf(name, bytes, "%s", at->ifa_name);
        }
    }
    freeifaddrs(interfaces);
    return is_found;
}

// The agent, with our stdin and stdout; what it was told at the end is on the pipe.
static pid_t start_agent(const options_t *options, const char *interface, int *told_p)
{
    options_t own = *options;
    int told[2];
    if (pipe2(told, O_CLOEXEC) != 0) {
        return -1;
    }
    pid_t pid = fork();
    if (pid == 0) {
        sigset_t none;
        bool is_told;
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        close(told[0]);
        own.agent_about = (char *)interface;
        int code = agent_stay(&own, &is_told);
        if (is_told && dprintf(told[1], PAI_GATE_END " %d\n", code) < 0) {
            _exit(EXIT_UNREACHABLE);
        }
        _exit(code);
    }
    close(told[1]);
    *told_p = told[0];
    return pid;
}

// Until the agent has ended, which it is asked to when the worker is gone.
static void hold(const char *task, pid_t agent, int signal_fd, int *worker_p)
{
    bool is_asked = false;
    struct signalfd_siginfo info;
    while (waitpid(agent, NULL, WNOHANG) == 0) {
        bool knocks = *worker_p < 0 && !knock(task, worker_p);
        struct pollfd polled[] = {{.fd = signal_fd, .events = POLLIN},
                                  {.fd = is_asked ? -1 : *worker_p}};
        poll(polled, N_ELEMENTS(polled), knocks ? KNOCK_MS : -1);
        while (read(signal_fd, &info, sizeof info) == sizeof info) {
            is_asked |= info.ssi_signo != SIGCHLD;
        }
        is_asked |= polled[1].revents != 0;
        if (is_asked) {
            kill(agent, SIGTERM);
        }
    }
}

int pai_gate(const options_t *options)
{
    char task[300], interface[64] = "", line[LINE_BYTES] = "";
    const char *at = strrchr(options->pai_gate, '@');
    int worker = -1, told = -1;
    int signal_fd = signals_open(SIG_SETMASK, (const int[]){SIGCHLD, SIGTERM, SIGINT, SIGHUP, 0});
    snprintf(task, sizeof task, "%.*s", at != NULL ? (int)(at - options->pai_gate) : 299,
             options->pai_gate);
    pai_interface(at != NULL ? at + 1 : "", interface, sizeof interface);
    pid_t agent = start_agent(options, interface, &told);
    close(STDIN_FILENO); // the agent's alone
    close(STDOUT_FILENO);
    if (agent < 0 || signal_fd < 0) {
        return EXIT_INTERNAL;
    }
    hold(task, agent, signal_fd, &worker);
    ssize_t n = read(told, line, sizeof line - 1);
    uint64_t deadline_ns = deadline_in_ms(LAST_KNOCKS_MS);
    while (n > 0 && worker < 0 && !knock(task, &worker) && clock_ns() < deadline_ns) {
        usleep(50000);
    }
    bool is_told = worker >= 0 && n > 0 && write(worker, line, (size_t)n) > 0;
    if (worker >= 0) {
        close(worker);
    }
    return is_told ? 0 : EXIT_UNREACHABLE;
}
