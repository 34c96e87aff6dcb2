// SPDX-License-Identifier: Apache-2.0
//
// supervisor.c - a small process that outlives the agent, so that its death leaves nothing behind.
//
// The agent tells it of every process group it starts and forgets, through a pipe that only the
// agent holds. When the pipe closes, because the agent is done or because somebody killed it, the
// supervisor kills the groups that are left, and whatever else has a rank's environment, and
// removes the agent's directory, which holds the secret. It ignores signals other than SIGKILL and
// sits in a session of its own. Cost: a pipe and a fork.
//
// If the supervisor is killed as well, as with a whole container or a machine out of memory, the
// next one finds the directory: nobody holds its lock any more.
#define _GNU_SOURCE
#include "agent/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_GROUPS 4096
#define MAX_ROUNDS 20 // what is killed may just have started another
#define ROUND_US 5000
#define ABANDONED_SECONDS 60 // a younger one may not have its lock yet

static void remove_directory(const char *path)
{
    char name[4096];
    DIR *directory = opendir(path);
    if (directory == NULL) {
        return;
    }
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
            unlink(name);
        }
    }
    closedir(directory);
    rmdir(path);
}

// True if nobody else has it; held for as long as this process lives.
static bool lock_directory(const char *path)
{
    struct stat seen;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    bool is_ours = fd >= 0 && fstat(fd, &seen) == 0 && seen.st_uid == geteuid();
    if (is_ours && flock(fd, LOCK_EX | LOCK_NB) == 0) {
        return true;
    }
    if (fd >= 0) {
        close(fd);
    }
    return false;
}

// Directories of agents that were killed together with their supervisors, beside our own.
static void remove_abandoned(const char *own)
{
    char path[4096];
    struct stat seen;
    size_t place_bytes = (size_t)(strrchr(own, '/') - own);
    snprintf(path, sizeof path, "%.*s", (int)place_bytes, own);
    DIR *place = opendir(path);
    for (struct dirent *entry; place != NULL && (entry = readdir(place)) != NULL;) {
        snprintf(path, sizeof path, "%.*s/%s", (int)place_bytes, own, entry->d_name);
        bool is_old = strncmp(entry->d_name, AGENT_DIRECTORY, strlen(AGENT_DIRECTORY)) == 0 &&
                      lstat(path, &seen) == 0 && time(NULL) - seen.st_mtime > ABANDONED_SECONDS;
        if (is_old && strcmp(path, own) != 0 && lock_directory(path)) {
            remove_directory(path);
        }
    }
    if (place != NULL) {
        closedir(place);
    }
}

static void note(pid_t *groups, int *n, pid_t group)
{
    if (group > 0 && *n < MAX_GROUPS) {
        groups[(*n)++] = group;
    }
    for (int i = 0; group < 0 && i < *n; i++) {
        if (groups[i] == -group) {
            groups[i] = groups[--*n];
            return;
        }
    }
}

static bool has_mark(const char *pid, const char *mark)
{
    char path[300], text[128 * 1024];
    snprintf(path, sizeof path, "/proc/%s/environ", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text) : -1;
    if (fd >= 0) {
        close(fd);
    }
    return n > 0 && memmem(text, (size_t)n, mark, strlen(mark) + 1) != NULL;
}

// What ranks have started has their environment, in whatever session and under whatever parent it
// is. How many there were.
static int kill_marked(const char *directory)
{
    char mark[160];
    int n = 0;
    DIR *table = opendir("/proc");
    snprintf(mark, sizeof mark, "HOROVOD_SECRET_FILE=%s/secret", directory);
    for (struct dirent *entry; table != NULL && (entry = readdir(table)) != NULL;) {
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (pid > 1 && pid != getpid() && has_mark(entry->d_name, mark)) {
            n += kill(pid, SIGKILL) == 0;
        }
    }
    if (table != NULL) {
        closedir(table);
    }
    return n;
}

static void keep(int fd, const char *directory)
{
    pid_t groups[MAX_GROUPS], group;
    int n = 0;
    ssize_t got;
    while ((got = read(fd, &group, sizeof group)) == sizeof group || (got < 0 && errno == EINTR)) {
        if (got > 0) {
            note(groups, &n, group);
        }
    }
    for (int i = 0; i < n; i++) {
        kill_group(groups[i], SIGKILL);
    }
    for (int round = 0; kill_marked(directory) > 0 && round < MAX_ROUNDS; round++) {
        usleep(ROUND_US);
    }
    remove_directory(directory);
}

hvd_status_t supervisor_start(const char *directory, supervisor_t *supervisor_p, err_t *err)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return fail_errno(err, errno, "cannot create a pipe");
    }
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        prctl(PR_SET_NAME, "hvd-supervisor");
        for (int signo = 1; signo < NSIG; signo++) {
            signal(signo, SIG_IGN);
        }
        // Holding these would keep an ssh session, or the reader of our output, waiting. A system
        // call, since glibc has a function for it from 2.34 on only.
        syscall(SYS_close_range, 0U, (unsigned)ends[0] - 1, 0U);
        syscall(SYS_close_range, (unsigned)ends[0] + 1, ~0U, 0U);
        lock_directory(directory);
        remove_abandoned(directory);
        keep(ends[0], directory);
        _exit(0);
    }
    int code = errno;
    close(ends[0]);
    if (pid < 0) {
        close(ends[1]);
        return fail_errno(err, code, "cannot fork");
    }
    *supervisor_p = (supervisor_t){.fd = ends[1], .pid = pid};
    return HVD_OK;
}

static void tell(supervisor_t *supervisor, pid_t group)
{
    while (write(supervisor->fd, &group, sizeof group) < 0 && errno == EINTR) {
    }
}

void supervisor_add(supervisor_t *supervisor, pid_t group)
{
    tell(supervisor, group);
}

void supervisor_remove(supervisor_t *supervisor, pid_t group)
{
    tell(supervisor, -group);
}

void supervisor_stop(supervisor_t *supervisor, const char *directory)
{
    close(supervisor->fd);
    while (waitpid(supervisor->pid, NULL, 0) < 0 && errno == EINTR) {
    }
    remove_directory(directory); // is still there if somebody has killed the supervisor
}
