// SPDX-License-Identifier: Apache-2.0
//
// test_strangers.c - a job at work while somebody without its secret calls every port it has.
//
// The stranger is a process of its own, started by rank 0 before the job. Ranks tell their ports
// through memory the job shares. While they are called with foreign protocols and old exploits, and
// held up with ten thousand idle connections, every sum stays right, memory and the log stay small,
// nobody gets an answer worth having, and nothing that was sent is run.
#define _GNU_SOURCE
#include "fault.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PORTS_PER_RANK 4
#define MAX_PORTS 40
#define N_IDLE 10000
#define MIN_IDLE 500
#define N_CROWD 2000
#define MORE_KIB (32 * 1024)
#define ANSWER_BYTES 7 // a TLS alert is all that is ever said
#define CUT_MS (2000 * LOADED)
#define HOLD_MS 4000

// Numbers that all ranks and the stranger see; ports come first.
enum { N_READY = 40, STRANGER_DONE, CROWD_IS_THERE, CROWD_MAY_GO };

// --- Foreign bytes -------------------------------------------------------------------------------

// Each would do harm, or block for ever, in some service of this kind.
typedef struct foreign {
    const char *name;
    const char *bytes;
    size_t n_bytes;
} foreign_t;

#define FOREIGN(name, text) {name, text, sizeof(text) - 1}
#define PICKLE "cposix\nsystem\n(S'touch /tmp/hvd-test-was-run'\ntR."
#define PICKLE_BYTES "49"
#define MARK "/tmp/hvd-test-was-run"

static const foreign_t foreign[] = {
    FOREIGN("HTTP PUT of a pickle",
            "PUT /rendezvous/rank_0 HTTP/1.1\r\nHost: a\r\nContent-Length: " PICKLE_BYTES
            "\r\n\r\n" PICKLE),
    FOREIGN("HTTP PUT of 2 GiB", "PUT /x/y HTTP/1.1\r\nContent-Length: 2147483647\r\n\r\n" PICKLE),
    FOREIGN("HTTP GET", "GET /rendezvous/rank_0 HTTP/1.1\r\nHost: a.example\r\nAccept: */*\r\n"
                        "Connection: close\r\n\r\n"),
    FOREIGN("a digest, a length of 2 GiB, a pickle",
            "0123456789abcdef0123456789abcdef"
            "\xff\xff\xff\x7f" PICKLE "and more to have 64 bytes and then some of it"),
    FOREIGN("a TLS ClientHello", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
                                 "0123456789abcdef0123456789abcdef\x20"
                                 "0123456789abcdef0123456789abcdef\x00\x04\x13\x01"),
    FOREIGN("an ssh client", "SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"
                             "and a key exchange that is long enough"),
    FOREIGN("our magic, then nonsense",
            "\x8bhvd\r\n\x1a\n\x01\x00\x02\x01\x01\x00\x00\x00"
            "a job nobody knowfromto..epoc\x00\x00\x00\x00nonce of sixteen and a long tail"),
    FOREIGN("our magic, another version",
            "\x8bhvd\r\n\x1a\n\xff\xff\xff\xff\xff\xff\xff\xff"
            "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"
            "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
    FOREIGN("one byte", "x"),
    FOREIGN("nothing", ""),
};

// --- The stranger --------------------------------------------------------------------------------

_Noreturn static void give_up(const char *what, int port)
{
    fprintf(stderr, "the stranger, port %d: %s (errno %d: %s)\n", port, what, errno,
            strerror(errno));
    _exit(1);
}

static int call(int port, bool may_wait)
{
    struct sockaddr_in name = {.sin_family = AF_INET,
                               .sin_port = htons((uint16_t)port),
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | (may_wait ? 0 : SOCK_NONBLOCK), 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&name, sizeof name) != 0 &&
        errno != EINPROGRESS) {
        close(fd);
        return -1;
    }
    return fd;
}

static int say(int port, const foreign_t *what)
{
    int fd = call(port, true);
    if (fd < 0 || send(fd, what->bytes, what->n_bytes, MSG_NOSIGNAL) < 0) {
        give_up("cannot be called", port);
    }
    return fd;
}

// Waits until the other end has closed, without having said anything worth having.
static void expect_cut(int fd, int port, const foreign_t *what)
{
    size_t n_answer = 0;
    uint64_t deadline_ns = deadline_in_ms(CUT_MS);
    for (;;) {
        struct pollfd polled = {.fd = fd, .events = POLLIN};
        char data[256];
        poll(&polled, 1, 100);
        ssize_t n = recv(fd, data, sizeof data, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
            break;
        }
        n_answer += n > 0 ? (size_t)n : 0;
        if (clock_ns() > deadline_ns || n_answer > ANSWER_BYTES) {
            give_up(what->name, port);
        }
    }
    close(fd);
}

static void say_everything(int port)
{
    int fds[N_ELEMENTS(foreign)];
    for (size_t k = 0; k < N_ELEMENTS(foreign); k++) {
        fds[k] = say(port, &foreign[k]);
    }
    for (size_t k = 0; k < N_ELEMENTS(foreign); k++) {
        expect_cut(fds[k], port, &foreign[k]);
    }
}

static int raise_limit(int n_wanted)
{
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = (rlim_t)n_wanted + 200;
    limit.rlim_max = MAX(limit.rlim_max, limit.rlim_cur);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) { // not root: as many as there may be
        getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    return (int)MIN((rlim_t)n_wanted, limit.rlim_cur - 200);
}

// Opens n connections that say nothing; those that were cut are opened again, until *end is set or
// the time is over.
static void idle(const int *ports, int n_ports, int n, atomic_int *is_there, atomic_int *end,
                 int hold_ms)
{
    static int fds[N_IDLE];
    for (int i = 0; i < n; i++) {
        if ((fds[i] = call(ports[i % n_ports], false)) < 0 && i < MIN_IDLE) {
            give_up("cannot be called", ports[i % n_ports]);
        }
    }
    atomic_store(is_there, 1);
    uint64_t deadline_ns = deadline_in_ms(hold_ms);
    for (int i = 0; atomic_load(end) == 0 && clock_ns() < deadline_ns; i++) {
        char byte;
        int fd = fds[i % n];
        if (fd < 0 || recv(fd, &byte, 1, MSG_DONTWAIT) == 0) {
            if (fd >= 0) {
                close(fd);
            }
            fds[i % n] = call(ports[i % n % n_ports], false);
        }
        if (i % 100 == 0) {
            usleep(1000);
        }
    }
    for (int i = 0; i < n; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
}

static int collect_ports(const rank_t *r, int rendezvous_port, int ports[MAX_PORTS])
{
    int n = 0;
    ports[n++] = rendezvous_port;
    for (int i = 0; i < r->size * PORTS_PER_RANK; i++) {
        int port = atomic_load(rank_shared(r, i));
        if (port != 0) {
            ports[n++] = port;
        }
    }
    return n;
}

static void harass(const rank_t *r, int rendezvous_port)
{
    int ports[MAX_PORTS];
    int n_ports = collect_ports(r, rendezvous_port, ports);
    if (n_ports < 1 + r->size) {
        give_up("a rank without a port", 0);
    }
    unlink(MARK);
    for (int i = 0; i < n_ports; i++) {
        say_everything(ports[i]);
    }
    int n_idle = raise_limit(N_IDLE);
    if (n_idle < N_IDLE) {
        printf("the stranger may open %d connections only, instead of %d\n", n_idle, N_IDLE);
    }
    atomic_int is_there = 0, end = 0;
    idle(ports, n_ports, n_idle, &is_there, &end, HOLD_MS);
    if (access(MARK, F_OK) == 0) {
        give_up("what was sent has been run", 0);
    }
}

// Forks the stranger; it ends with rank 0 at the latest.
static pid_t start_stranger(rank_t *r, void (*fn)(const rank_t *r, int rendezvous_port))
{
    int rendezvous_port = 0;
    for (int i = 0; i < r->n_env; i++) {
        sscanf(r->env[i], "HOROVOD_RENDEZVOUS_PORT=%d", &rendezvous_port);
    }
    pid_t pid = fork();
    CHECK(r, pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        fn(r, rendezvous_port);
        _exit(0);
    }
    return pid;
}

static bool has_ended(rank_t *r, pid_t pid)
{
    int state;
    pid_t ended = waitpid(pid, &state, WNOHANG);
    CHECK(r, ended >= 0 && (ended == 0 || state == 0)); // it has said why
    return ended == pid;
}

// --- The job -------------------------------------------------------------------------------------

static void tell_ports(rank_t *r)
{
    int n = 0;
    for (int fd = 0; fd < 1024 && n < PORTS_PER_RANK; fd++) {
        int listens = 0;
        socklen_t bytes = sizeof listens;
        struct sockaddr_in name;
        socklen_t name_bytes = sizeof name;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens &&
            getsockname(fd, (struct sockaddr *)&name, &name_bytes) == 0 &&
            name.sin_family == AF_INET) {
            atomic_store(rank_shared(r, r->rank * PORTS_PER_RANK + n++), ntohs(name.sin_port));
        }
    }
    CHECK(r, n > 0);
}

// A row of /proc/<pid>/status in KiB.
static long memory_kib(rank_t *r, pid_t pid, const char *row)
{
    char path[64], line[256];
    long kib = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "r");
    CHECK(r, file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, row, strlen(row)) == 0) {
            kib = strtol(line + strlen(row) + 1, NULL, 10);
        }
    }
    fclose(file);
    CHECK(r, kib >= 0);
    return kib;
}

// From now on VmHWM is the most since now.
static void forget_peak(rank_t *r, pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/clear_refs", (int)pid);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(r, fd >= 0 && write(fd, "5", 1) == 1);
    close(fd);
}

// Sums until rank 0 says so.
static void work(fault_rank_t *f, pid_t stranger)
{
    rank_t *r = f->r;
    int64_t stop = 0;
    for (int step = 0; stop == 0; step++) {
        int64_t shape[1] = {1};
        hvd_tensor_t tensor = {.input = &stop, .output = &stop, .n_dims = 1, .shape = shape};
        rank_step(r, "step %d", step);
        CHECK_OK(r, fault_step(f, "small", 10));
        CHECK_OK(r, fault_step(f, "large", 50000));
        stop = r->rank == 0 && has_ended(r, stranger);
        CHECK_OK(r, rank_call(r, &(hvd_request_t){.op = HVD_ALLREDUCE,
                                                  .name = "stop",
                                                  .dtype = HVD_INT64,
                                                  .reduce = HVD_SUM,
                                                  .tensors = &tensor,
                                                  .n_tensors = 1}));
        usleep(2000); // a step of training would compute
    }
}

static void wait_then_harass(const rank_t *r, int rendezvous_port)
{
    uint64_t deadline_ns = deadline_in_ms(20000 * LOADED);
    while (atomic_load(rank_shared(r, N_READY)) < r->size) {
        if (clock_ns() > deadline_ns) {
            give_up("the job did not start", rendezvous_port);
        }
        usleep(1000);
    }
    harass(r, rendezvous_port);
}

// How much a process has grown at most since `before`.
static void check_memory(rank_t *r, pid_t pid, long before)
{
    long more = memory_kib(r, pid, "VmHWM:") - before;
    if (!SANITIZED && more > MORE_KIB) { // sanitizers keep what is freed
        check_failed(r, __FILE__, __LINE__, "process %d took %ld KiB more; %d are allowed",
                     (int)pid, more, MORE_KIB);
    }
}

static void strangers_do_no_harm(rank_t *r, void *arg)
{
    pid_t stranger = r->rank == 0 ? start_stranger(r, wait_then_harass) : 0;
    pid_t watched[] = {getpid(), getppid()}; // the rendezvous is in the parent
    long before[2];
    (void)arg;

    fault_rank_t *f = fault_open(r);
    for (int i = 0; i < 20; i++) {
        CHECK_OK(r, fault_step(f, "large", 50000));
    }
    tell_ports(r);
    for (int i = 0; i < 2; i++) {
        forget_peak(r, watched[i]);
        before[i] = memory_kib(r, watched[i], "VmRSS:");
    }
    double start = fault_now();
    atomic_fetch_add(rank_shared(r, N_READY), 1);
    work(f, stranger);
    for (int i = 0; i < 2; i++) {
        check_memory(r, watched[i], before[i]);
    }
    int n_minutes = 1 + (int)((fault_now() - start) / 60);
    CHECK(r, fault_logged(f, "turned away"));
    CHECK(r, fault_n_logged(f, "turned away") <= n_minutes);
    CHECK(r, fault_n_logged(f, "cannot accept") <= n_minutes);
    CHECK_OK(r, hvd_health(r->ctx, r->text, sizeof r->text));
    hvd_counters_t counters;
    CHECK_OK(r, hvd_counters(r->ctx, &counters, sizeof counters));
    CHECK(r, counters.strangers >= N_ELEMENTS(foreign));
    rank_barrier(r);
    fault_leave(f);
}

// --- The door ------------------------------------------------------------------------------------

static void crowd(const rank_t *r, int rendezvous_port)
{
    idle(&rendezvous_port, 1, raise_limit(N_CROWD), rank_shared(r, CROWD_IS_THERE),
         rank_shared(r, CROWD_MAY_GO), 20000 * LOADED);
}

// Ranks get in although strangers fill the rendezvous and come again when they are cut.
static void a_job_starts_in_a_crowd(rank_t *r, void *arg)
{
    pid_t stranger = r->rank == 0 ? start_stranger(r, crowd) : 0;
    (void)arg;

    rank_wait_for(r, rank_shared(r, CROWD_IS_THERE), 1);
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    fault_leave(f);
    atomic_store(rank_shared(r, CROWD_MAY_GO), 1);
    while (r->rank == 0 && !has_ended(r, stranger)) {
        usleep(1000);
    }
}

int main(int argc, char **argv)
{
    const subtest_t subtests[] = {
        {.name = "strangers do no harm", .fn = strangers_do_no_harm, .min_ranks = 2},
        {.name = "a job starts in a crowd", .fn = a_job_starts_in_a_crowd, .min_ranks = 2},
    };
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
