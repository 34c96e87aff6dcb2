// SPDX-License-Identifier: Apache-2.0
//
// live_files.c - the files of live.c: what they are called, and who may remove them when.
//
//   <base>/<job>/rank-<N>.sock     rank N listens there
//   <base>/<job>/.<N>-<pid>        the same socket, for the moment before it listens
//
// A socket gets its first name when it already listens, so one that refuses belongs to a process
// that is gone, and whoever finds it may remove it: the keeper of the job's agent when the job is
// over, a rank that leaves a failed job, the next job that starts, hvd-info. They may come before
// the kernel has closed the socket of one that was killed: the process that listens is asked for,
// too.
//
// The base may be a directory of the user's that holds anything, so nothing is removed on a guess:
// a file only if it is a socket, belongs to this user and has exactly one of these names, in a
// directory of mode 0700; a directory only when it is empty and such a socket has gone from it, or
// it is ours by its place (below /tmp/hvd-<uid>) or its name (that of the job). Any thread.
#define _GNU_SOURCE
#include "observe/observe.h"

#include "base/peer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define NAME_BYTES 256 // of a file

// --- Names ---------------------------------------------------------------------------------------

static void default_base(char path[LIVE_PATH_BYTES])
{
    snprintf(path, LIVE_PATH_BYTES, "/tmp/hvd-%u", (unsigned)getuid());
}

static bool is_default_base(const char *base)
{
    char path[LIVE_PATH_BYTES];
    default_base(path);
    return strcmp(base, path) == 0;
}

bool live_base_dir(const char *given, char path[LIVE_PATH_BYTES])
{
    if (given == NULL || given[0] == '\0') {
        default_base(path);
        return true;
    }
    return snprintf(path, LIVE_PATH_BYTES, "%s", given) < LIVE_PATH_BYTES;
}

// Exactly: what is read must give the same name again.
bool live_rank_of(const char *name, int *rank_p)
{
    char again[NAME_BYTES];
    int rank = -1;
    if (sscanf(name, LIVE_NAME, &rank) != 1 || rank < 0) {
        return false;
    }
    snprintf(again, sizeof again, LIVE_NAME, rank);
    *rank_p = rank;
    return strcmp(again, name) == 0;
}

static bool is_hidden_name(const char *name, int *pid_p)
{
    char again[NAME_BYTES];
    int rank = -1;
    if (sscanf(name, LIVE_HIDDEN_NAME, &rank, pid_p) != 2 || rank < 0 || *pid_p <= 0) {
        return false;
    }
    snprintf(again, sizeof again, LIVE_HIDDEN_NAME, rank, *pid_p);
    return strcmp(again, name) == 0;
}

// --- Sockets -------------------------------------------------------------------------------------

int live_connect(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        int code = errno;
        close(fd);
        errno = code;
        return -1;
    }
    return fd;
}

static bool is_ours(const char *path)
{
    struct stat seen;
    int rank, pid;
    const char *name = strrchr(path, '/');
    name = name != NULL ? name + 1 : path;
    return (live_rank_of(name, &rank) || is_hidden_name(name, &pid)) && lstat(path, &seen) == 0 &&
           S_ISSOCK(seen.st_mode) && seen.st_uid == geteuid();
}

static bool nobody_listens(const char *path)
{
    struct ucred listener;
    socklen_t bytes = sizeof listener;
    int fd = live_connect(path);
    if (fd < 0) {
        return errno == ECONNREFUSED;
    }
    bool is_ending = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &listener, &bytes) == 0 &&
                     process_is_ending((int)listener.pid);
    close(fd);
    return is_ending;
}

// Whoever has made it hidden may not listen yet.
static bool may_listen_soon(const char *path)
{
    int pid;
    const char *name = strrchr(path, '/');
    return is_hidden_name(name != NULL ? name + 1 : path, &pid) &&
           (kill(pid, 0) == 0 || errno != ESRCH) && !process_is_ending(pid);
}

bool live_remove_if_dead(const char *path)
{
    return is_ours(path) && !may_listen_soon(path) && nobody_listens(path) && unlink(path) == 0;
}

// --- Directories ---------------------------------------------------------------------------------

static bool is_private(const struct stat *seen)
{
    return S_ISDIR(seen->st_mode) && seen->st_uid == geteuid() && (seen->st_mode & 077) == 0;
}

bool live_own_dir(const char *path)
{
    struct stat seen;
    if ((mkdir(path, 0700) != 0 && errno != EEXIST) || lstat(path, &seen) != 0) {
        return false; // ENOENT: somebody removed it, or the one above, since it was empty
    }
    if (!is_private(&seen)) {
        errno = ENOTDIR;
        return false;
    }
    return true;
}

void live_remove_base(const char *base)
{
    if (is_default_base(base)) {
        rmdir(base); // unless it holds another job
    }
}

// NULL: it is none that live_own_dir() would have taken.
static DIR *open_own_dir(const char *path)
{
    struct stat seen;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *folder = fd >= 0 && fstat(fd, &seen) == 0 && is_private(&seen) ? fdopendir(fd) : NULL;
    if (folder == NULL && fd >= 0) {
        close(fd);
    }
    return folder;
}

int live_clean_job(const char *dir)
{
    DIR *folder = open_own_dir(dir);
    struct dirent *entry;
    int n_removed = 0, n_left = 0;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char path[LIVE_PATH_BYTES + NAME_BYTES];
        int n = snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        if (n < (int)sizeof path && is_ours(path)) {
            bool is_removed = live_remove_if_dead(path);
            n_removed += is_removed;
            n_left += !is_removed;
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    if (n_removed > 0) {
        rmdir(dir); // unless somebody is left in it
    }
    return n_left;
}

// A second job of the same name has a number behind it, and so have the generations of an elastic
// one.
static bool is_of_job(const char *name, const char *job)
{
    size_t n = strlen(job);
    return strncmp(name, job, n) == 0 && (name[n] == '\0' || name[n] == '-');
}

int live_clean(const char *base, const char *job)
{
    DIR *folder = open_own_dir(base);
    struct dirent *entry;
    int n_left = 0;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char path[LIVE_PATH_BYTES + NAME_BYTES];
        int n = snprintf(path, sizeof path, "%s/%s", base, entry->d_name);
        bool is_wanted = job == NULL || is_of_job(entry->d_name, job);
        if (entry->d_name[0] == '.' || n >= (int)sizeof path || !is_wanted) {
            continue;
        }
        n_left += live_clean_job(path);
        if (job != NULL || is_default_base(base)) {
            rmdir(path);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    live_remove_base(base);
    return n_left;
}
