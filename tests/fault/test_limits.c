// SPDX-License-Identifier: Apache-2.0
//
// test_limits.c - too little of something: shared memory, disk, descriptors, memory, ports.
//
// In this program's scene /dev/shm has 1 MiB. Memory is limited with a control group where the
// machine lets the test make one (--only "out of memory" is a test of its own, skipped where it
// cannot run).
//
// Needs root, or a kernel that lets users make namespaces; without either it says so and fails.
#define _GNU_SOURCE
#include "fault.h"
#include "scene.h"

#include "../json_check.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define SKIPPED 77 // as ctest is told in tests/tests.cmake
#define NOBODY 65534

// --- Shared memory, disk ------------------------------------------------------------------------

// Seconds init takes, the best of three.
static double time_init(rank_t *r, const char *transports)
{
    double best = 1e9;
    rank_setenv(r, "HOROVOD_TRANSPORTS", transports);
    for (int i = 0; i < 3; i++) {
        fault_rank_t *f = fault_new(r);
        double start = fault_now();
        CHECK_OK(r, fault_join(f));
        best = MIN(best, fault_now() - start);
        rank_barrier(r);
        fault_leave(f);
    }
    return best;
}

// Sockets serve instead; the first rank says so, once, with numbers and what to do. To find out
// takes no time.
static void small_shm(rank_t *r, void *arg)
{
    (void)arg;
    double sockets_only = time_init(r, "tcp");
    double with_attempt = time_init(r, NULL);
    if (with_attempt > sockets_only + 0.1 * LOADED) {
        check_failed(r, __FILE__, __LINE__, "started in %.2f s, with sockets only in %.2f s",
                     with_attempt, sockets_only);
    }
    fault_rank_t *f = fault_open(r);
    for (int i = 0; i < 10; i++) {
        CHECK_OK(r, fault_step(f, "over sockets", 50000));
    }
    if (r->rank == 0) {
        CHECK_INT(r, fault_n_logged(f, "of shared memory"), 1);
        CHECK(r, fault_logged(f, "/dev/shm has"));
        CHECK(r, fault_logged(f, "use sockets instead"));
        CHECK(r, fault_logged(f, "--shm-size"));
    } else {
        CHECK_INT(r, fault_n_logged(f, "of shared memory"), 0);
    }
    rank_barrier(r);
    fault_leave(f);
}

// The timeline stops growing with one warning, and parses; the work goes on.
static void disk_full(rank_t *r, void *arg)
{
    (void)arg;
    static const char path[] = "/dev/shm/timeline.json";
    rank_setenv(r, "HOROVOD_TIMELINE", path);
    fault_rank_t *f = fault_open(r);
    if (r->rank == 0) {
        fault_run("head -c 1100000 /dev/zero > /dev/shm/filler 2>/dev/null");
    }
    rank_barrier(r);
    char name[32];
    for (int i = 0; i < 2000; i++) {
        snprintf(name, sizeof name, "traced.%d", i);
        CHECK_OK(r, fault_step(f, name, 10));
    }
    if (r->rank == 0) {
        fault_wait_logged(f, "The timeline ends here", 5);
        CHECK(r, fault_logged(f, "No space left on device"));
    }
    rank_barrier(r);
    CHECK_INT(r, fault_n_logged(f, "The timeline ends here"), r->rank == 0);
    CHECK_OK(r, fault_step(f, "goes on", 10));
    rank_barrier(r);
    fault_leave(f);
    if (r->rank == 0) {
        CHECK(r, json_file_is_valid(path));
        CHECK(r, access("/dev/shm/timeline.json.new", F_OK) != 0);
        unlink("/dev/shm/filler");
        unlink(path);
    }
}

// What is said goes to a disk that is full; the work goes on.
static void log_on_full_disk(rank_t *r, void *arg)
{
    (void)arg;
    int kept = dup(STDERR_FILENO), full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    CHECK(r, kept >= 0 && full >= 0 && dup2(full, STDERR_FILENO) == STDERR_FILENO);
    rank_setenv(r, "HOROVOD_LOG_LEVEL", "trace");
    rank_setenv(r, "HOROVOD_RECORDER_DIR", "/dev/full/nowhere");
    rank_open(r);
    kill(getpid(), SIGUSR2); // dumps cannot be written either
    for (int i = 0; i < 20; i++) {
        rank_check_sum(r, "goes on", 0, r->rank, r->size * (r->size - 1) / 2);
    }
    rank_close(r);
    CHECK(r, dup2(kept, STDERR_FILENO) == STDERR_FILENO);
    close(kept);
    close(full);
}

// --- Descriptors, threads, ports -----------------------------------------------------------------

static void few_descriptors(rank_t *r, void *arg)
{
    (void)arg;
    struct rlimit limit = {.rlim_cur = 16, .rlim_max = 16};
    CHECK_INT(r, setrlimit(RLIMIT_NOFILE, &limit), 0);
    double start = fault_now();
    CHECK_STATUS(r, rank_try_open(r, NULL), HVD_SYSTEM);
    CHECK(r, fault_now() - start < 1 * LOADED);
    if (r->options->full) {
        fprintf(stderr, "%s\n", r->text);
    }
    CHECK_HAS(r, r->text, "file descriptors, but");
    CHECK_HAS(r, r->text, "of the 16 it may have are in use");
    CHECK_HAS(r, r->text, "ulimit -n");
}

// A user who may have no more processes, which threads count as.
static void few_threads(rank_t *r, void *arg)
{
    (void)arg;
    struct rlimit limit = {.rlim_cur = 1, .rlim_max = 1};
    if (setgid(NOBODY) != 0 || setuid(NOBODY) != 0) { // root may have as many as it likes
        CHECK_INT(r, errno, EINVAL);                  // but is not root but in this namespace
    }
    CHECK_INT(r, setrlimit(RLIMIT_NPROC, &limit), 0);
    double start = fault_now();
    hvd_status_t status = rank_try_open(r, NULL);
    CHECK(r, status != HVD_OK);
    CHECK(r, fault_now() - start < 1 * LOADED);
    if (r->options->full) {
        fprintf(stderr, "%s\n", r->text);
    }
    CHECK_STATUS(r, status, HVD_SYSTEM);
    CHECK_HAS(r, r->text, "thread");
    CHECK_HAS(r, r->text, "ulimit -u");
}

static void port_in_use(rank_t *r, void *arg)
{
    (void)arg;
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof name;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(r, bind(fd, (struct sockaddr *)&name, bytes) == 0 && listen(fd, 1) == 0);
    CHECK_INT(r, getsockname(fd, (struct sockaddr *)&name, &bytes), 0);
    uint8_t secret[32] = {1};
    hvd_rendezvous_t *server;
    char port[32];
    double start = fault_now();
    CHECK_STATUS(
        r,
        hvd_rendezvous_start(NULL, ntohs(name.sin_port), secret, &server, r->text, sizeof r->text),
        HVD_SYSTEM);
    snprintf(port, sizeof port, "%d", ntohs(name.sin_port));
    CHECK_HAS(r, r->text, port);
    snprintf(port, sizeof port, "(pid %d)", (int)getpid());
    CHECK_HAS(r, r->text, "in use by test_limits ");
    CHECK_HAS(r, r->text, port);
    CHECK(r, fault_now() - start < 1 * LOADED);
    close(fd);
    CHECK_OK(r, hvd_rendezvous_start(NULL, 0, secret, &server, r->text, sizeof r->text));
    hvd_rendezvous_stop(server);
}

// --- Memory -------------------------------------------------------------------------------------

static const struct {
    const char *folder, *limit;
} groups[] = {
    {"/sys/fs/cgroup/memory", "memory.limit_in_bytes"},
    {"/sys/fs/cgroup", "memory.max"},
};

// A group of 64 MiB without a process in it; its folder, or "".
static void make_group(char *folder, size_t bytes)
{
    char limit[256];
    folder[0] = '\0';
    for (size_t i = 0; i < N_ELEMENTS(groups); i++) {
        snprintf(folder, bytes, "%s/hvd-test-%d", groups[i].folder, (int)getpid());
        snprintf(limit, sizeof limit, "%s/%s", folder, groups[i].limit);
        if (mkdir(folder, 0700) == 0 && scene_write_file(limit, "67108864")) {
            return;
        }
        rmdir(folder);
        folder[0] = '\0';
    }
}

static char memory_group[200];

static void out_of_memory(rank_t *r, void *arg)
{
    (void)arg;
    int victim = r->size - 1;
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    if (r->rank == victim) {
        char path[256];
        snprintf(path, sizeof path, "%s/cgroup.procs", memory_group);
        CHECK(r, scene_write_file(path, "0"));
        rank_will_die(r);
        for (size_t i = 0; i < 300; i++) {
            volatile char *block = malloc(MIB);
            fault_mark(r); // it may be the last
            for (size_t k = 0; block != NULL && k < MIB; k += 4 * KIB) {
                block[k] = 1;
            }
        }
        check_failed(r, __FILE__, __LINE__, "took 300 MiB in a group of 64");
    }
    CHECK_STATUS(r, fault_work(f, 1000, 20), HVD_PEER_LOST);
    CHECK(r, fault_since(f) < 1 * LOADED);
    CHECK_NAMES(f, victim);
    CHECK_HAS(r, r->text, "OOM killer");
    fault_leave(f);
}

static int test_memory(int argc, char **argv)
{
    static const subtest_t subtest = {.name = "out of memory", .fn = out_of_memory};
    make_group(memory_group, sizeof memory_group);
    if (memory_group[0] == '\0') {
        printf("not tested: this machine lets no memory control group be made\n");
        return SKIPPED;
    }
    int status = ranks_main(argc, argv, &subtest, 1);
    for (int i = 0; i < 100 && rmdir(memory_group) != 0; i++) {
        usleep(20000); // the kernel may still count what the victim had
    }
    if (access(memory_group, F_OK) == 0) {
        fprintf(stderr, "left behind: %s\n", memory_group);
        status = 1;
    }
    return status;
}

// --- Table --------------------------------------------------------------------------------------

static const subtest_t subtests[] = {
    {.name = "small shm", .fn = small_shm, .min_ranks = 2},
    {.name = "disk full", .fn = disk_full, .min_ranks = 2},
    {.name = "log on a full disk", .fn = log_on_full_disk, .min_ranks = 2},
    {.name = "few descriptors", .fn = few_descriptors, .min_ranks = 2},
    {.name = "few threads", .fn = few_threads, .min_ranks = 2},
    {.name = "port in use", .fn = port_in_use, .one_world_only = true},
};

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[argc - 1], "out of memory") == 0) {
        return test_memory(argc, argv);
    }
    if (!scene_make() || mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m") != 0) {
        fprintf(stderr,
                "%s needs root, or the right to make mount namespaces: nothing was tested\n",
                argv[0]);
        return 1;
    }
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
