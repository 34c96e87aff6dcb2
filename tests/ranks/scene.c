// SPDX-License-Identifier: Apache-2.0
//
// scene.c - see scene.h.
//
// A look is a text of lines that name things so that the same thing has the same line again; what
// is left is the lines of a later look that an earlier one has not. Sockets count while a process
// holds them: what the kernel keeps for a while after a close belongs to nobody. Processes in other
// network namespaces (hosts.h of the fault tests) are asked for the sockets there.
#define _GNU_SOURCE
#include "scene.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <net/if.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AGAIN_MS 20

static const char *const folders[] = {"/tmp", "/var/tmp", "/dev/shm"};
#define N_FOLDERS (sizeof folders / sizeof *folders)

struct scene {
    FILE *out;
    char *lines; // whole after fclose(out)
    size_t len;
    char *left;
};

static bool is_made;

// --- Making --------------------------------------------------------------------------------------

bool scene_write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) {
        close(fd);
    }
    return ok;
}

// Users who may make namespaces of users are root in those.
static bool become_root(void)
{
    char uids[64], gids[64];
    if (geteuid() == 0) {
        return true;
    }
    snprintf(uids, sizeof uids, "0 %u 1", (unsigned)geteuid());
    snprintf(gids, sizeof gids, "0 %u 1", (unsigned)getegid());
    return unshare(CLONE_NEWUSER) == 0 && scene_write_file("/proc/self/setgroups", "deny") &&
           scene_write_file("/proc/self/uid_map", uids) &&
           scene_write_file("/proc/self/gid_map", gids);
}

// All directories on the way to `path`, and itself.
static void make_path(const char *path)
{
    char part[4096];
    for (size_t i = 1; i < sizeof part && (i == 1 || path[i - 1] != '\0'); i++) {
        if (path[i] == '/' || path[i] == '\0') {
            snprintf(part, i + 1, "%s", path);
            mkdir(part, 0755);
        }
    }
}

// Sources and builds may lie below a folder that is about to be covered: they stay where they are.
static bool cover(const char *folder)
{
    static const char *const kept[] = {SCENE_SOURCE_DIR, SCENE_BUILD_DIR};
    size_t bytes = strlen(folder);
    bool is_inside[2];
    int fds[2] = {-1, -1};
    for (int i = 0; i < 2; i++) {
        is_inside[i] = strncmp(kept[i], folder, bytes) == 0 && kept[i][bytes] == '/';
        fds[i] = is_inside[i] ? open(kept[i], O_PATH | O_CLOEXEC) : -1;
    }
    bool ok = mount("scene", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") == 0;
    for (int i = 0; i < 2; i++) {
        char from[64];
        snprintf(from, sizeof from, "/proc/self/fd/%d", fds[i]);
        if (is_inside[i]) {
            make_path(kept[i]);
            ok = ok && mount(from, kept[i], NULL, MS_BIND | MS_REC, NULL) == 0;
            close(fds[i]);
        }
    }
    return ok;
}

static bool raise_loopback(void)
{
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool up = fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &lo) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return up;
}

bool scene_make(void)
{
    char here[4096];
    if (is_made) {
        return true;
    }
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    bool ok = getcwd(here, sizeof here) != NULL && become_root() &&
              unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC) == 0 &&
              mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 && raise_loopback();
    for (size_t i = 0; ok && i < N_FOLDERS; i++) {
        ok = cover(folders[i]);
    }
    // What was the working directory may be covered now; by its name it is the one that was kept.
    is_made = ok && (chdir(here) == 0 || chdir("/") == 0) && setenv("TMPDIR", "/tmp", 1) == 0;
    return is_made;
}

// --- Looking -------------------------------------------------------------------------------------

static scene_t *looking; // nftw has no argument for it

static int see_file(const char *path, const struct stat *seen, int kind, struct FTW *at)
{
    (void)seen;
    (void)kind;
    if (at->level > 0) {
        fprintf(looking->out, "file %s\n", path);
    }
    return 0;
}

static void see_files(scene_t *scene)
{
    looking = scene;
    for (size_t i = 0; i < N_FOLDERS; i++) {
        nftw(folders[i], see_file, 16, FTW_PHYS | FTW_MOUNT);
    }
}

// Lines of a table of the kernel, but for its first.
static void see_table(scene_t *scene, const char *what, const char *path)
{
    FILE *file = fopen(path, "re");
    char line[1024];
    for (int n = 0; file != NULL && fgets(line, sizeof line, file) != NULL; n++) {
        if (n > 0) {
            fprintf(scene->out, "%s %.*s\n", what, (int)strcspn(line, "\n"), line);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}

// Address, state and inode of a line of /proc/net/tcp or udp; 0A is a listening one.
static void see_sockets(scene_t *scene, int pid, const char *protocol)
{
    char path[64], line[512], address[64], state[8];
    unsigned long inode;
    snprintf(path, sizeof path, "/proc/%d/net/%s", pid, protocol);
    FILE *file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, " %*d: %63s %*s %7s %*s %*s %*s %*s %*s %lu", address, state, &inode) ==
                3 &&
            inode != 0) {
            fprintf(scene->out, "socket %s %s state %s inode %lu\n", protocol, address, state,
                    inode);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}

// A table's number of references and flags change: protocol, type, inode and name do not.
static void see_unix_sockets(scene_t *scene, int pid)
{
    char path[64], line[512], name[256];
    unsigned type;
    unsigned long inode;
    snprintf(path, sizeof path, "/proc/%d/net/unix", pid);
    FILE *file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        name[0] = '\0';
        if (sscanf(line, "%*s %*s %*s %*s %x %*s %lu %255s", &type, &inode, name) >= 2 &&
            inode != 0) {
            fprintf(scene->out, "socket unix type %u inode %lu %s\n", type, inode, name);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}

static void see_network_of(scene_t *scene, int pid)
{
    static const char *const protocols[] = {"tcp", "tcp6", "udp", "udp6"};
    for (size_t i = 0; is_made && i < sizeof protocols / sizeof *protocols; i++) {
        see_sockets(scene, pid, protocols[i]);
    }
    if (is_made) {
        see_unix_sockets(scene, pid);
    }
}

// A child that has ended and waits for being collected holds nothing any more.
static void see_process(scene_t *scene, int pid)
{
    char path[64], text[512], state = 'Z';
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    size_t n = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    text[n] = '\0';
    char *end = strrchr(text, ')'); // names may have brackets and blanks
    if (end != NULL && sscanf(end + 1, " %c %d", &state, &parent) == 2 && state != 'Z' &&
        parent == getpid()) {
        fprintf(scene->out, "process %.*s\n", (int)(end + 1 - text), text);
        see_network_of(scene, pid);
    }
    if (file != NULL) {
        fclose(file);
    }
}

static void see_processes(scene_t *scene)
{
    DIR *folder = opendir("/proc");
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        if (isdigit((unsigned char)entry->d_name[0])) {
            see_process(scene, atoi(entry->d_name));
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    see_network_of(scene, getpid());
}

// This program's own: threads, and what its descriptors lead to.
static void see_own(scene_t *scene, const char *what, const char *path)
{
    DIR *folder = opendir(path);
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char name[512], target[512];
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        ssize_t n = readlink(name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = '\0';
        if (entry->d_name[0] != '.' && atoi(entry->d_name) != dirfd(folder)) {
            fprintf(scene->out, "%s %s %s\n", what, entry->d_name, target);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

// The thread sanitizer starts a thread of its own, when it likes.
#if defined(__SANITIZE_THREAD__)
#define SEES_THREADS 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SEES_THREADS 0
#endif
#endif
#ifndef SEES_THREADS
#define SEES_THREADS 1
#endif

scene_t *scene_look(void)
{
    static const char *const tables[] = {"shm", "sem", "msg"};
    scene_t *scene = calloc(1, sizeof *scene);
    if (scene == NULL || (scene->out = open_memstream(&scene->lines, &scene->len)) == NULL) {
        abort();
    }
    if (SEES_THREADS) {
        see_own(scene, "thread", "/proc/self/task");
    }
    see_own(scene, "descriptor", "/proc/self/fd");
    see_processes(scene);
    if (is_made) {
        see_files(scene);
        see_table(scene, "mount", "/proc/self/mountinfo");
    }
    for (size_t i = 0; is_made && i < sizeof tables / sizeof *tables; i++) {
        char path[32];
        snprintf(path, sizeof path, "/proc/sysvipc/%s", tables[i]);
        see_table(scene, tables[i], path);
    }
    fclose(scene->out);
    return scene;
}

void scene_free(scene_t *scene)
{
    free(scene->lines);
    free(scene->left);
    free(scene);
}

// --- Comparing -----------------------------------------------------------------------------------

static bool has_line(const char *lines, const char *line, size_t bytes)
{
    for (const char *at = lines; *at != '\0'; at += strcspn(at, "\n") + 1) {
        if (strcspn(at, "\n") == bytes && memcmp(at, line, bytes) == 0) {
            return true;
        }
    }
    return false;
}

static char *new_lines(const scene_t *before, const scene_t *now)
{
    char *text = calloc(now->len + 1, 1);
    size_t len = 0;
    for (const char *at = now->lines; text != NULL && *at != '\0'; at += strcspn(at, "\n") + 1) {
        size_t bytes = strcspn(at, "\n");
        if (!has_line(before->lines, at, bytes) && !has_line(text, at, bytes)) {
            memcpy(text + len, at, bytes + 1);
            len += bytes + 1;
        }
    }
    return text;
}

const char *scene_left(scene_t *before, int patience_ms)
{
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        scene_t *now = scene_look();
        free(before->left);
        before->left = new_lines(before, now);
        scene_free(now);
        clock_gettime(CLOCK_MONOTONIC, &end);
        if (before->left == NULL || before->left[0] == '\0' ||
            (end.tv_sec - start.tv_sec) * 1000 + (end.tv_nsec - start.tv_nsec) / 1000000 >=
                patience_ms) {
            return before->left != NULL ? before->left : "no memory to look";
        }
        usleep(LOOK_AGAIN_MS * 1000);
    }
}
