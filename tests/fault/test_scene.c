// SPDX-License-Identifier: Apache-2.0
//
// test_scene.c - something is left behind on purpose: the check after every job must see it.
//
// Each row leaves one thing, which must be named, takes it away again, and then nothing may be
// there. The last one is a job whose rank 1 leaves a file: the harness must call that a failure.
//
// Needs root, or a kernel that lets users make namespaces; without either it says so and fails.
#define _GNU_SOURCE
#include "harness.h"
#include "scene.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define GONE_MS 10000
#define KEY 0x68766474

static atomic_int *left_pid; // of the process that was left, which the test sees
static int left_fd = -1;
static pthread_t left_thread;
static atomic_bool is_over;

// --- Left by a process that has ended, or by its child -------------------------------------------

static void leave_process(void)
{
    if (fork() == 0) {
        setsid();
        atomic_store(left_pid, (int)getpid());
        for (;;) {
            pause();
        }
    }
    while (atomic_load(left_pid) == 0) {
        usleep(1000);
    }
}

static void end_process(void)
{
    kill((pid_t)atomic_exchange(left_pid, 0), SIGKILL);
}

static void leave_segment(void)
{
    close(shm_open("/hvd-left", O_CREAT | O_RDWR, 0600));
}

static void remove_segment(void)
{
    shm_unlink("/hvd-left");
}

static void leave_file(void)
{
    mkdir("/tmp/hvd-left", 0700);
    close(open("/tmp/hvd-left/trace.json.new", O_CREAT | O_WRONLY, 0600));
}

static void remove_file(void)
{
    unlink("/tmp/hvd-left/trace.json.new");
    rmdir("/tmp/hvd-left");
}

static void leave_listener(void)
{
    struct sockaddr_in name = {
        .sin_family = AF_INET, .sin_port = htons(4711), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(fd, (struct sockaddr *)&name, sizeof name) == 0 && listen(fd, 1) == 0) {
        leave_process();
    }
}

static int bind_unix(const char *path, size_t bytes)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    memcpy(name.sun_path, path, bytes);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    socklen_t n = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes);
    return bind(fd, (struct sockaddr *)&name, n);
}

static void leave_socket_file(void)
{
    bind_unix("/var/tmp/rank-0.sock", 20);
}

static void remove_socket_file(void)
{
    unlink("/var/tmp/rank-0.sock");
}

static void leave_abstract_socket(void)
{
    if (bind_unix("\0hvd-left", 9) == 0) {
        leave_process();
    }
}

static void leave_old_segment(void)
{
    shmget(KEY, 4096, IPC_CREAT | 0600);
}

static void remove_old_segment(void)
{
    shmctl(shmget(KEY, 0, 0), IPC_RMID, NULL);
}

static void leave_mount(void)
{
    mount("left", "/mnt", "tmpfs", 0, NULL);
}

static void remove_mount(void)
{
    umount("/mnt");
}

// --- Left in the program itself, as a rendezvous server could ------------------------------------

static void leave_descriptor(void)
{
    left_fd = socket(AF_INET, SOCK_DGRAM, 0);
}

static void close_descriptor(void)
{
    close(left_fd);
}

static void *wait_until_over(void *arg)
{
    while (!atomic_load(&is_over)) {
        usleep(1000);
    }
    return arg;
}

static void leave_thread(void)
{
    pthread_create(&left_thread, NULL, wait_until_over, NULL);
}

static void end_thread(void)
{
    atomic_store(&is_over, true);
    pthread_join(left_thread, NULL);
}

// --- Table --------------------------------------------------------------------------------------

static const struct row {
    const char *what;
    bool is_own; // left in this process, not in a child
    void (*leave)(void);
    void (*remove)(void);
    const char *line; // of what is left
} rows[] = {
    {"a process", false, leave_process, end_process, "process "},
    {"a segment", false, leave_segment, remove_segment, "file /dev/shm/hvd-left\n"},
    {"a file", false, leave_file, remove_file, "file /tmp/hvd-left/trace.json.new\n"},
    {"a socket's file", false, leave_socket_file, remove_socket_file,
     "file /var/tmp/rank-0.sock\n"},
    {"a port", false, leave_listener, end_process, "socket tcp 0100007F:1267 state 0A"},
    {"an abstract socket", false, leave_abstract_socket, end_process, " @hvd-left\n"},
    {"a System V segment", false, leave_old_segment, remove_old_segment, "shm "},
    {"a mount", false, leave_mount, remove_mount, " /mnt "},
    {"a descriptor", true, leave_descriptor, close_descriptor, "descriptor "},
    {"a thread", true, leave_thread, end_thread, "thread "},
};

static void leave_in_child(void (*leave)(void))
{
    pid_t child = fork();
    if (child == 0) {
        leave();
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

static bool is_seen(const struct row *row)
{
    scene_t *before = scene_look();
    if (row->is_own) {
        row->leave();
    } else {
        leave_in_child(row->leave);
    }
    const char *left = scene_left(before, 0);
    bool seen = strstr(left, row->line) != NULL;
    printf("%-6s %s is seen\n", seen ? "ok" : "FAILED", row->what);
    if (!seen) {
        printf("no \"%s\" in:\n%s", row->line, left);
    }
    row->remove();
    left = scene_left(before, GONE_MS);
    bool clean = left[0] == '\0';
    if (!clean) {
        printf("FAILED %s was removed, and still there is:\n%s", row->what, left);
    }
    scene_free(before);
    return seen && clean;
}

static void leaves_a_file(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    rank_close(r);
    if (r->rank == 1) {
        leave_file();
    }
}

static bool a_job_fails_for_it(void)
{
    bool ok = ranks_run(2, LAYOUT_ONE, NULL, leaves_a_file, NULL);
    remove_file();
    printf("%-6s a job that leaves a file fails\n", !ok ? "ok" : "FAILED");
    return !ok;
}

int main(int argc, char **argv)
{
    int n_failed = 0;
    (void)argc;
    left_pid =
        mmap(NULL, sizeof *left_pid, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (left_pid == MAP_FAILED || !scene_make()) {
        fprintf(stderr, "%s needs root, or the right to make namespaces: nothing was tested\n",
                argv[0]);
        return 1;
    }
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        n_failed += !is_seen(&rows[i]);
    }
    n_failed += !a_job_fails_for_it();
    return n_failed > 0;
}
