// SPDX-License-Identifier: Apache-2.0
//
// process.c - starting processes: ranks, helpers that talk over a socket, programs run to their
// end; and what the kernel says of those it has killed.
//
// Every process gets a session of its own, so a signal from the terminal reaches only us and the
// whole tree of a rank can be killed as a group; signal handling is reset to what a shell gives. A
// rank also asks the kernel to die with the agent. Whether exec worked is told through a pipe that
// closes by itself when it did. Descriptors are closed on exec everywhere. One thread.
#define _GNU_SOURCE
#include "agent/process.h"
#include "base/signals.h"
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_OPEN_FILES ((rlim_t)65536) // some programs close all up to the limit
#define LOOK_US 1000                    // between looks whether a program has ended

bool set_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

static void close_pair(int pair[2])
{
    for (int i = 0; i < 2; i++) {
        if (pair[i] >= 0) {
            close(pair[i]);
        }
        pair[i] = -1;
    }
}

// As after a login: no signal blocked or ignored.
static void reset_signals(void)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int signo = 1; signo < NSIG; signo++) {
        signal(signo, SIG_DFL);
    }
}

static bool move_fd(int from, int to)
{
    return dup2(from, to) >= 0; // the copy is not closed on exec
}

// In the child: never returns.
static void become_rank(char *const *argv, char **env, const char *directory, int out, int errors,
                        int report, pid_t parent)
{
    misfortune_t misfortune = {.step = STEP_PIPES};
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    setsid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(EXIT_BY_SIGNAL + SIGKILL); // the agent died in between
    }
    if (nothing >= 0 && move_fd(nothing, STDIN_FILENO) && move_fd(out, STDOUT_FILENO) &&
        move_fd(errors, STDERR_FILENO)) {
        misfortune.step = STEP_CHDIR;
        if (directory[0] == '\0' || chdir(directory) == 0) {
            misfortune.step = STEP_EXEC;
            reset_signals();
            environ = env; // execvp looks for PATH there
            execvp(argv[0], argv);
        }
    }
    misfortune.code = errno;
    if (write(report, &misfortune, sizeof misfortune) < 0) {
        _exit(EXIT_INTERNAL);
    }
    _exit(EXIT_NOT_FOUND);
}

static bool make_pipes(int out[2], int errors[2], int report[2])
{
    return pipe2(out, O_CLOEXEC) == 0 && pipe2(errors, O_CLOEXEC) == 0 &&
           pipe2(report, O_CLOEXEC) == 0;
}

bool spawn_rank(char *const *argv, char **env, const char *directory, child_t *child_p,
                misfortune_t *misfortune_p)
{
    int out[2] = {-1, -1}, errors[2] = {-1, -1}, report[2] = {-1, -1};
    misfortune_t misfortune = {.step = STEP_PIPES};
    pid_t parent = getpid(), pid = -1;
    if (make_pipes(out, errors, report)) {
        misfortune.step = STEP_FORK;
        pid = fork();
    }
    misfortune.code = errno;
    if (pid == 0) {
        become_rank(argv, env, directory, out[1], errors[1], report[1], parent);
    }
    if (pid > 0) {
        close(report[1]);
        report[1] = -1;
        ssize_t n;
        while ((n = read(report[0], &misfortune, sizeof misfortune)) < 0 && errno == EINTR) {
        }
        if (n == 0) { // exec has closed it
            *child_p = (child_t){.pid = pid, .fds = {out[0], errors[0]}};
            set_nonblocking(out[0]);
            set_nonblocking(errors[0]);
            out[0] = errors[0] = -1;
        } else {
            waitpid(pid, NULL, 0);
            pid = -1;
        }
    }
    close_pair(out);
    close_pair(errors);
    close_pair(report);
    *misfortune_p = misfortune;
    return pid > 0;
}

// --- Helpers -------------------------------------------------------------------------------------

hvd_status_t spawn_helper(char *const *argv, child_t *child_p, int *socket_p, err_t *err)
{
    int ends[2], errors[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        return fail_errno(err, errno, "cannot create a socket for %s; try ulimit -n 65536",
                          argv[0]);
    }
    if (pipe2(errors, O_CLOEXEC) != 0) {
        int code = errno;
        close_pair(ends);
        return fail_errno(err, code, "cannot create a pipe for %s; try ulimit -n 65536", argv[0]);
    }
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        reset_signals();
        if (move_fd(ends[1], STDIN_FILENO) && move_fd(ends[1], STDOUT_FILENO) &&
            move_fd(errors[1], STDERR_FILENO)) {
            execvp(argv[0], argv);
        }
        int why = errno;
        if (write(STDERR_FILENO, strerror(why), strlen(strerror(why))) < 0) {
            _exit(EXIT_INTERNAL);
        }
        _exit(why == ENOENT ? EXIT_NO_COMMAND : EXIT_NOT_EXECUTABLE);
    }
    int code = errno;
    close(ends[1]);
    close(errors[1]);
    if (pid < 0) {
        close(ends[0]);
        close(errors[0]);
        return fail_errno(err, code, "cannot fork to run %s", argv[0]);
    }
    set_nonblocking(ends[0]);
    set_nonblocking(errors[0]);
    *child_p = (child_t){.pid = pid, .fds = {-1, errors[0]}};
    *socket_p = ends[0];
    return HVD_OK;
}

// --- Programs run to their end -------------------------------------------------------------------

// Reads until the end, the deadline, or the text is full; false: too late.
static bool read_output(int fd, uint64_t deadline_ns, char *text, size_t bytes)
{
    size_t len = 0;
    for (;;) {
        struct pollfd polled = {.fd = fd, .events = POLLIN};
        char rest[4096];
        uint64_t now_ns = clock_ns();
        if (now_ns >= deadline_ns) {
            return false;
        }
        if (poll(&polled, 1, (int)MIN((deadline_ns - now_ns) / NS_PER_MS + 1, 1000)) <= 0) {
            continue;
        }
        ssize_t n = read(fd, rest, sizeof rest);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return true;
        }
        size_t kept = MIN((size_t)n, bytes - 1 - len);
        memcpy(text + len, rest, kept);
        len += kept;
        text[len] = '\0';
    }
}

// False: it still runs then.
static bool ends_by(pid_t pid, uint64_t deadline_ns, int *status_p)
{
    while (waitpid(pid, status_p, WNOHANG) == 0) {
        if (clock_ns() >= deadline_ns) {
            return false;
        }
        usleep(LOOK_US);
    }
    return true;
}

int run_program_in(char *const *argv, char **env, const char *directory, int timeout_ms, char *text,
                   size_t bytes, misfortune_t *misfortune_p)
{
    child_t child;
    uint64_t deadline_ns = deadline_in_ms(timeout_ms);
    int status = 0;
    text[0] = '\0';
    if (!spawn_rank(argv, env, directory, &child, misfortune_p)) {
        return -1;
    }
    misfortune_p->code = 0;
    bool in_time = read_output(child.fds[STREAM_STDOUT], deadline_ns, text, bytes);
    close(child.fds[STREAM_STDOUT]);
    close(child.fds[STREAM_STDERR]);
    in_time = in_time && ends_by(child.pid, deadline_ns, &status);
    if (!in_time) {
        kill_group(child.pid, SIGKILL);
        waitpid(child.pid, &status, 0);
    }
    return in_time && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int run_program(char *const *argv, int timeout_ms, char *text, size_t bytes)
{
    misfortune_t misfortune;
    return run_program_in(argv, environ, "", timeout_ms, text, bytes, &misfortune);
}

// Three descriptors for a rank here, a few for a host: a shell's usual 1,024 ends at 340 ranks.
void raise_open_files(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < MOST_OPEN_FILES) {
        limit.rlim_cur = MIN(limit.rlim_max, MOST_OPEN_FILES);
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

bool own_path(char *path, size_t bytes)
{
    ssize_t n = readlink("/proc/self/exe", path, bytes - 1);
    if (n <= 0) {
        return false;
    }
    path[n] = '\0';
    return true;
}

// --- Groups and signals --------------------------------------------------------------------------

void kill_group(pid_t pid, int signo)
{
    if (pid > 1) {
        kill(-pid, signo);
    }
}

bool group_is_empty(pid_t pid)
{
    return kill(-pid, 0) != 0 && errno == ESRCH;
}

const char *signal_name(int signo, char text[16])
{
    const char *name = signal_name_of(signo);
    if (name != NULL) {
        snprintf(text, 16, "%s", name);
    } else {
        snprintf(text, 16, "signal %d", signo);
    }
    return text;
}

int signals_open(int how, const int *signals)
{
    sigset_t set;
    sigemptyset(&set);
    for (int i = 0; signals[i] != 0; i++) {
        sigaddset(&set, signals[i]);
    }
    sigprocmask(how, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

// --- Out of memory -------------------------------------------------------------------------------

// SIGKILL has no return address. The counters of this machine and of our control group tell whether
// the kernel's out-of-memory killer was at work while the job ran: /proc/vmstat, memory.events of
// cgroup v2, memory.oom_control of v1. What is not there counts as 0.

// The number behind `name` at the start of a line.
static uint64_t counter_in(const char *path, const char *name)
{
    char line[512];
    size_t bytes = strlen(name);
    uint64_t value = 0;
    FILE *file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, name, bytes) == 0 && line[bytes] == ' ') {
            value = strtoull(line + bytes + 1, NULL, 10);
            break;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return value;
}

// Adds the counters of the groups this process is in: lines "id:controllers:path".
static uint64_t group_kills(void)
{
    char line[3072], path[4096];
    uint64_t value = 0;
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (controllers[1] == '\0') {
            snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.events", group);
            value += counter_in(path, "oom_kill");
        } else if (strstr(controllers + 1, "memory") != NULL) {
            snprintf(path, sizeof path, "/sys/fs/cgroup/memory%s/memory.oom_control", group);
            value += counter_in(path, "oom_kill");
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return value;
}

uint64_t oom_kills(void)
{
    return counter_in("/proc/vmstat", "oom_kill") + group_kills();
}
