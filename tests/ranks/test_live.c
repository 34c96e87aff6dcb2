// SPDX-License-Identifier: Apache-2.0
//
// test_live.c - observing real jobs while they run, and what they leave when they do not: the
// socket of each rank, hvd-info --live, dumps, the warning about a slow rank, and a timeline that
// can be read whatever happens to the process or the disk.
#define _GNU_SOURCE
#include "cases.h"

#include "../json_check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATH_BYTES 160
#define PAGE_BYTES (512 * 1024)
#define SOON_NS (20 * NS_PER_S * PATIENCE)

// --- Helpers ------------------------------------------------------------------------------------

// The log of this rank; the sink is called by several threads.
typedef struct lines {
    pthread_mutex_t lock;
    char text[64 * 1024];
} lines_t;

static lines_t lines = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void keep_line(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    pthread_mutex_lock(&lines.lock);
    size_t len = strlen(lines.text);
    snprintf(lines.text + len, sizeof lines.text - len, "%s\n", line);
    pthread_mutex_unlock(&lines.lock);
}

static int count(const char *text, const char *part)
{
    int n = 0;
    size_t bytes = strlen(part);
    for (; *text != '\0'; text++) { // by hand: sanitizers make strstr look at all that follows
        n += *text == *part && strncmp(text, part, bytes) == 0;
    }
    return n;
}

static int lines_with(const char *part)
{
    pthread_mutex_lock(&lines.lock);
    int n = count(lines.text, part);
    pthread_mutex_unlock(&lines.lock);
    return n;
}

static void wait_for_line(rank_t *r, const char *part)
{
    uint64_t start_ns = clock_ns();
    while (lines_with(part) == 0) {
        if (clock_ns() - start_ns > SOON_NS) {
            check_failed(r, __FILE__, __LINE__, "no line with \"%s\" in: %s", part, lines.text);
        }
        usleep(2000);
    }
}

static void open_listening(rank_t *r)
{
    rank_step(r, "init");
    CHECK_OK(r, rank_try_open(r, &(hvd_options_t){.log = keep_line}));
}

// A directory of this rank's own job, the same for all its ranks.
static void shared_dir(rank_t *r, char path[PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "/tmp/hvd-test-live-%d-%s", (int)getppid(), layout_names[r->layout]);
    if (mkdir(path, 0700) != 0) {
        CHECK(r, errno == EEXIST);
    }
}

static void remove_dir(rank_t *r, const char *path)
{
    uint64_t start_ns = clock_ns();
    while (rmdir(path) != 0 && errno != ENOENT) { // the others may still be leaving
        CHECK(r, clock_ns() - start_ns < SOON_NS);
        usleep(2000);
    }
}

static int connect_to(rank_t *r, const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    CHECK(r, strlen(path) + 1 < sizeof address.sun_path);
    memcpy(address.sun_path + 1, path, strlen(path)); // abstract: behind a NUL
    socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(path));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(r, fd >= 0);
    struct timeval limit = {.tv_sec = 20 * PATIENCE};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    CHECK_INT(r, connect(fd, (struct sockaddr *)&address, bytes), 0);
    return fd;
}

// The answer to a request, whole; the caller's until the next call.
static char *fetch(rank_t *r, const char *path, const char *request)
{
    static char page[PAGE_BYTES];
    size_t len = 0;
    ssize_t n;
    int fd = connect_to(r, path);
    CHECK_INT(r, write(fd, request, strlen(request)), strlen(request));
    while ((n = read(fd, page + len, sizeof page - 1 - len)) > 0) {
        len += (size_t)n;
    }
    CHECK_INT(r, n, 0);
    page[len] = '\0';
    close(fd);
    return page;
}

static double metric(rank_t *r, const char *page, const char *name)
{
    char start[128];
    snprintf(start, sizeof start, "\n%s ", name);
    const char *at = strstr(page, start);
    if (at == NULL) {
        check_failed(r, __FILE__, __LINE__, "no %s in %s", name, page);
    }
    return strtod(at + strlen(start), NULL);
}

static void sum_floats(rank_t *r, const char *name, int64_t n)
{
    float *values = calloc((size_t)n, sizeof *values);
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = &n};
    hvd_request_t request = {.op = HVD_ALLREDUCE,
                             .name = name,
                             .dtype = HVD_FLOAT32,
                             .reduce = HVD_SUM,
                             .tensors = &tensor,
                             .n_tensors = 1,
                             .flags = HVD_WAITS};
    CHECK_OK(r, rank_call(r, &request));
    free(values);
}

// Something that only this rank submits, and so waits with.
static hvd_handle_t start_alone(rank_t *r, const char *name)
{
    static int64_t shape[] = {1};
    static float value;
    hvd_handle_t handle;
    hvd_tensor_t tensor = {.input = &value, .output = &value, .n_dims = 1, .shape = shape};
    hvd_request_t request = {.op = HVD_ALLREDUCE,
                             .name = name,
                             .dtype = HVD_FLOAT32,
                             .reduce = HVD_SUM,
                             .tensors = &tensor,
                             .n_tensors = 1};
    CHECK_OK(r, hvd_submit(r->ctx, &request, &handle, r->text, sizeof r->text));
    return handle;
}

// --- The socket ---------------------------------------------------------------------------------

#define N_SMALL 200
#define N_LARGE 50

static void counters_add_up(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    for (int i = 0; i < N_SMALL; i++) {
        sum_floats(r, "small", 2);
    }
    for (int i = 0; i < N_LARGE; i++) {
        sum_floats(r, "large", 30000);
    }
    rank_step(r, "scrapes");
    usleep(50000); // the agreement's own numbers are gathered now and then
    sum_floats(r, "large", 30000);
    const char *path = hvd_monitor_path(r->ctx);
    CHECK_STARTS(r, path, "hvd-");
    const char *page = fetch(r, path, "GET /metrics HTTP/1.1\r\nHost: rank\r\n\r\n");
    CHECK_STARTS(r, page, "HTTP/1.0 200 OK\r\n");
    CHECK_HAS(r, page, "# TYPE hvd_operations_total counter\n");
    double operations = metric(r, page, "hvd_operations_total{operation=\"allreduce\"}");
    CHECK_INT(r, operations, N_SMALL + N_LARGE + 1);
    CHECK_INT(r, metric(r, page, "hvd_bytes_total{operation=\"allreduce\"}"),
              4 * (N_SMALL * 2 + (N_LARGE + 1) * 30000));
    CHECK_INT(r,
              metric(r, page, "hvd_board_operations_total") +
                  metric(r, page, "hvd_riding_operations_total") +
                  metric(r, page, "hvd_batched_operations_total"),
              operations);
    CHECK_INT(r, metric(r, page, "hvd_failed_total"), 0);
    CHECK_INT(r, metric(r, page, "hvd_in_flight"), 0);
    CHECK(r, metric(r, page, "hvd_run_seconds_total") > 0);
    hvd_counters_t c;
    CHECK_OK(r, hvd_counters(r->ctx, &c, sizeof c));
    CHECK_INT(r, c.operations[HVD_ALLREDUCE], operations);
    CHECK_STARTS(r, fetch(r, path, "GET /nothing HTTP/1.0\r\n\r\n"), "HTTP/1.0 404");
    CHECK_HAS(r, fetch(r, path, "GET /recorder HTTP/1.0\r\n\r\n"), " large\n");
    CHECK_HAS(r, fetch(r, path, "GET /status HTTP/1.0\r\n\r\n"), "state\tidle\n");
    rank_close(r);
}

// Clients that say nothing, too much, or do not listen, keep neither the rank nor others.
static void rude_clients(rank_t *r, void *arg)
{
    (void)arg;
    int fds[12];
    char junk[8192];
    rank_open(r);
    sum_floats(r, "some", 1000);
    memset(junk, 'x', sizeof junk);
    for (int i = 0; i < 12; i++) {
        fds[i] = connect_to(r, hvd_monitor_path(r->ctx));
        if (i % 3 == 1) {
            CHECK(r, send(fds[i], junk, sizeof junk, MSG_NOSIGNAL) != 0);
        } else if (i % 3 == 2) {
            CHECK(r, send(fds[i], "GET /recorder HTTP/1.0\r\n\r\n", 26, MSG_NOSIGNAL) == 26);
        }
    }
    sum_floats(r, "some", 1000);
    rank_step(r, "comes after rude clients");
    const char *page = fetch(r, hvd_monitor_path(r->ctx), "GET /metrics HTTP/1.0\r\n\r\n");
    CHECK_STARTS(r, page, "HTTP/1.0 200 OK\r\n");
    for (int i = 0; i < 12; i++) {
        close(fds[i]);
    }
    rank_close(r);
}

// --- hvd-info -----------------------------------------------------------------------------------

static const char *run_info(rank_t *r, const char *target)
{
    static char output[64 * 1024];
    char command[4 * PATH_BYTES];
    char self[2 * PATH_BYTES];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(r, n > 0);
    self[n] = '\0';
    *strrchr(self, '/') = '\0'; // it stands beside the directory of the tests
    snprintf(command, sizeof command, "%s/../hvd-info --live %s 2>&1", self, target);
    FILE *pipe = popen(command, "r");
    CHECK(r, pipe != NULL);
    output[fread(output, 1, sizeof output - 1, pipe)] = '\0';
    pclose(pipe);
    return output;
}

static void wait_for_info(rank_t *r, const char *target, const char *part)
{
    uint64_t start_ns = clock_ns();
    const char *told;
    while (strstr(told = run_info(r, target), part) == NULL) {
        if (clock_ns() - start_ns > SOON_NS) {
            check_failed(r, __FILE__, __LINE__, "no \"%s\" in: %s", part, told);
        }
        usleep(2000);
    }
}

// A name of this rank's own job, the same for all its ranks.
static void name_job(rank_t *r, char name[PATH_BYTES])
{
    snprintf(name, PATH_BYTES, "test-live-%d-%s", (int)getppid(), layout_names[r->layout]);
    rank_setenv(r, "HOROVOD_JOB_ID", name);
}

static void info_shows_who_waits(rank_t *r, void *arg)
{
    (void)arg;
    char job[PATH_BYTES];
    int missing = r->size - 1;
    name_job(r, job);
    rank_open(r);
    rank_check_sum(r, "all have it", 0, 1, r->size);
    hvd_handle_t handle = r->rank != missing ? start_alone(r, "one lacks it") : 0;
    atomic_fetch_add(rank_shared(r, 0), 1);
    rank_wait_for(r, rank_shared(r, 0), r->size);
    if (r->rank == 0) {
        char expected[64];
        const char *told = run_info(r, job);
        snprintf(expected, sizeof expected, "%d rank%s on this host of %d", r->size,
                 r->size == 1 ? "" : "s", r->size);
        CHECK_HAS(r, told, expected);
        CHECK_INT(r, count(told, "allreduce 'one lacks it'"), missing);
        CHECK_INT(r, count(told, "waiting"), missing);
        CHECK_INT(r, count(told, "idle"), 1);
        CHECK_INT(r, count(told, "allreduce 'all have it'"), r->size);
        snprintf(expected, sizeof expected, "rank %d ", missing);
        CHECK_INT(r, count(told, expected), missing);
        CHECK_HAS(r, run_info(r, ""), job); // all jobs
        CHECK_HAS(r, run_info(r, hvd_monitor_path(r->ctx)), "idle");
        CHECK_HAS(r, run_info(r, "nonexistent"), "no rank of job nonexistent");
        atomic_fetch_add(rank_shared(r, 1), 1);
    }
    rank_wait_for(r, rank_shared(r, 1), 1);
    if (r->rank == missing) {
        handle = start_alone(r, "one lacks it");
    }
    CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
    hvd_release(r->ctx, handle);
    rank_close(r);
    wait_for_info(r, job, "no rank of job"); // nothing is left of it
}

// A rank that is killed leaves nothing that the others, or anybody, would have to remove.
static void killed_ranks_leave_nothing(rank_t *r, void *arg)
{
    (void)arg;
    char job[PATH_BYTES], expected[64];
    name_job(r, job);
    rank_open(r);
    rank_check_sum(r, "all are there", 0, 1, r->size);
    usleep(200000 * PATIENCE); // links are made while the ranks already work: lets them settle
    rank_check_sum(r, "all are there", 0, 1, r->size);
    if (r->rank == r->size - 1) {
        rank_will_die(r);
        kill(getpid(), SIGKILL);
    }
    uint64_t start_ns = clock_ns();
    while (hvd_health(r->ctx, r->text, sizeof r->text) == HVD_OK) {
        CHECK(r, clock_ns() - start_ns < SOON_NS);
        usleep(2000);
    }
    if (r->rank == 0) {
        snprintf(expected, sizeof expected, "%d rank%s on this host of %d", r->size - 1,
                 r->size == 2 ? "" : "s", r->size);
        wait_for_info(r, job, expected); // it may take the kernel a moment
        atomic_store(rank_shared(r, 0), 1);
    }
    rank_wait_for(r, rank_shared(r, 0), 1);
    hvd_shutdown(r->ctx);
    wait_for_info(r, job, "no rank of job");
}

// --- Stragglers ---------------------------------------------------------------------------------

static void a_slow_rank_is_named(rank_t *r, void *arg)
{
    (void)arg;
    hvd_late_t late[MAX_RANKS];
    int slow = r->size - 1;
    open_listening(r);
    // A verdict needs 100 steps; those in which all happen to meet on the board do not count.
    for (int i = 0; i < 160; i++) {
        rank_step(r, "step %d", i);
        if (r->rank == slow) {
            usleep(30000); // more than a busy machine keeps the others
        }
        sum_floats(r, "gradient", 1000);
        sum_floats(r, "another", 20000);
    }
    if (r->rank == 0) {
        char expected[64];
        snprintf(expected, sizeof expected, "rank %d is last in ", slow);
        wait_for_line(r, expected);
        CHECK_INT(r, lines_with("is last in "), 1);
        int n = hvd_stragglers(r->ctx, late, MAX_RANKS);
        CHECK_INT(r, n, r->size);
        CHECK_INT(r, late[slow].rank, slow);
        CHECK(r, late[slow].n_last > 60);
        CHECK(r, late[slow].late_ns / late[slow].n_last > 5 * NS_PER_MS);
    }
    rank_close(r);
}

// --- Dumps --------------------------------------------------------------------------------------

static size_t stack_of(void *arg, uint64_t thread, char *text, size_t bytes)
{
    bool mine = thread == (uint64_t)(uintptr_t)*(pthread_t *)arg;
    return (size_t)snprintf(text, bytes, "%s\nat train.py:42", mine ? "my thread" : "another");
}

static char *dump_file(rank_t *r, const char *dir, const char *reason)
{
    char path[2 * PATH_BYTES];
    snprintf(path, sizeof path, "%s/hvd-%s-rank-%d-pid-%d.txt", dir, reason, r->rank,
             (int)getpid());
    char *text = read_text_file(path);
    if (text == NULL) {
        check_failed(r, __FILE__, __LINE__, "no file %s", path);
    }
    unlink(path);
    return text;
}

static void dump_on_signal(rank_t *r, void *arg)
{
    (void)arg;
    char dir[PATH_BYTES];
    pthread_t me = pthread_self();
    shared_dir(r, dir);
    rank_setenv(r, "HOROVOD_RECORDER_DIR", dir);
    open_listening(r);
    hvd_set_stack_source(r->ctx, stack_of, &me);
    rank_check_sum(r, "done", 0, 1, r->size);
    hvd_handle_t handle = r->rank == 0 ? start_alone(r, "in flight") : 0;
    CHECK_INT(r, kill(getpid(), SIGUSR2), 0);
    wait_for_line(r, "<recorder> warning: signal: ");
    char *text = dump_file(r, dir, "signal");
    CHECK_HAS(r, text, " done\n");
    if (r->rank == 0 && r->size > 1) {
        CHECK_HAS(r, text, "allreduce - 'in flight'");
        CHECK_HAS(r, text, "| my thread\n      | at train.py:42\n");
        wait_for_line(r, "at train.py:42");
    }
    free(text);
    rank_step(r, "goes on when all have seen their dump");
    atomic_fetch_add(rank_shared(r, 2), 1);
    rank_wait_for(r, rank_shared(r, 2), r->size);
    if (r->rank != 0) {
        handle = start_alone(r, "in flight");
    }
    CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
    hvd_release(r->ctx, handle);
    rank_close(r);
    struct sigaction now;
    CHECK_INT(r, sigaction(SIGUSR2, NULL, &now), 0);
    CHECK(r, now.sa_handler == SIG_DFL); // as it was
    atomic_fetch_add(rank_shared(r, 1), 1);
    rank_wait_for(r, rank_shared(r, 1), r->size);
    remove_dir(r, dir);
}

static atomic_int n_signals;

static void on_own_signal(int number)
{
    (void)number;
    atomic_fetch_add(&n_signals, 1);
}

// A program that handles the signal itself, before or after init, keeps it.
static void own_handlers_stay(rank_t *r, void *arg)
{
    (void)arg;
    struct sigaction own = {.sa_handler = on_own_signal};
    CHECK_INT(r, sigaction(SIGUSR2, &own, NULL), 0);
    open_listening(r);
    CHECK_INT(r, kill(getpid(), SIGUSR2), 0);
    CHECK_INT(r, atomic_load(&n_signals), 1);
    rank_close(r);
    struct sigaction usual = {.sa_handler = SIG_DFL};
    CHECK_INT(r, sigaction(SIGUSR2, &usual, NULL), 0);
    open_listening(r);
    CHECK_INT(r, sigaction(SIGUSR2, &own, NULL), 0);
    CHECK_INT(r, kill(getpid(), SIGUSR2), 0);
    CHECK_INT(r, atomic_load(&n_signals), 2);
    rank_close(r);
    struct sigaction now;
    CHECK_INT(r, sigaction(SIGUSR2, NULL, &now), 0);
    CHECK(r, now.sa_handler == on_own_signal);
    CHECK_INT(r, lines_with("signal: "), 0);
}

static void dump_on_stall(rank_t *r, void *arg)
{
    (void)arg;
    open_listening(r);
    rank_check_sum(r, "done", 0, 1, r->size);
    hvd_handle_t handle = r->rank == 0 ? start_alone(r, "lacks others") : 0;
    if (r->rank == 0) {
        wait_for_line(r, "stall: 1 in flight: allreduce 'lacks others' waiting for ");
        atomic_store(rank_shared(r, 0), 1);
    }
    rank_wait_for(r, rank_shared(r, 0), 1);
    if (r->rank != 0) {
        handle = start_alone(r, "lacks others");
    }
    CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
    hvd_release(r->ctx, handle);
    rank_close(r);
}

static void dump_on_failure(rank_t *r, void *arg)
{
    (void)arg;
    char dir[PATH_BYTES];
    shared_dir(r, dir);
    rank_setenv(r, "HOROVOD_RECORDER_DIR", dir);
    open_listening(r);
    rank_check_sum(r, "done", 0, 1, r->size);
    usleep(200000 * PATIENCE); // links are made while the ranks already work: lets them settle
    rank_check_sum(r, "done", 0, 1, r->size);
    if (r->rank == r->size - 1) {
        rank_wait_for(r, rank_shared(r, 0), r->size - 1);
        rank_will_die(r);
        kill(getpid(), SIGKILL);
    }
    hvd_handle_t handle = start_alone(r, "without the last");
    atomic_fetch_add(rank_shared(r, 0), 1);
    CHECK_STATUS(r, hvd_wait(r->ctx, handle, 60000), HVD_PEER_LOST);
    hvd_release(r->ctx, handle);
    hvd_shutdown(r->ctx); // which waits for the dump
    char *text = dump_file(r, dir, "failure");
    CHECK_HAS(r, text, "HVD_PEER_LOST without the last\n");
    CHECK_HAS(r, text, "ended: ");
    CHECK_INT(r, lines_with("failure: 1 lost: allreduce 'without the last' before all"), 1);
    free(text);
    atomic_fetch_add(rank_shared(r, 1), 1);
    rank_wait_for(r, rank_shared(r, 1), r->size - 1); // all have their files
    remove_dir(r, dir);
}

// --- Timeline -----------------------------------------------------------------------------------

static void trace_path(const rank_t *r, char path[PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "/tmp/hvd-test-trace-%d-%s.json", (int)getppid(),
             layout_names[r->layout]);
}

static void check_trace(const rank_t *r, const char *text)
{
    size_t len = strlen(text);
    if (!json_is_valid(text)) {
        check_failed(r, __FILE__, __LINE__, "%zu bytes that are no JSON end with: %s", len,
                     text + (len > 300 ? len - 300 : 0));
    }
}

static void work_with_timeline(rank_t *r, const char *path)
{
    rank_open(r);
    usleep(50000); // rank 0 begins to listen for the others with its first housekeeping
    for (int i = 0; i < 50; i++) {
        sum_floats(r, "allreduce.x", 3);
        sum_floats(r, "allreduce.y", 20000);
        usleep(1000);
    }
    rank_close(r);
    if (r->rank == 0) {
        char *text = read_text_file(path);
        CHECK(r, text != NULL);
        check_trace(r, text);
        CHECK_HAS(r, text, "\"name\": \"allreduce.x\"");
        CHECK_INT(r, count(text, "\"NEGOTIATE_ALLREDUCE\""), 100);
        CHECK_INT(r, count(text, "\"ph\": \"B\"") + count(text, "\"ph\": \"E\""), 0);
        CHECK(r, count(text, "\"COMPUTE\"") > 50);
        for (int rank = 0; rank < r->size; rank++) {
            char mark[64];
            snprintf(mark, sizeof mark, "{\"name\": \"rank %d ready\", \"ph\": \"i\"", rank);
            CHECK(r, r->size == 1 || count(text, mark) > 0);
        }
        free(text);
    }
}

// Marks of every rank inside the negotiation, and a new start in the same process, which writes the
// file anew.
static void timeline_of_a_job(rank_t *r, void *arg)
{
    (void)arg;
    char path[PATH_BYTES];
    trace_path(r, path);
    rank_setenv(r, "HOROVOD_TIMELINE", path);
    for (int start = 0; start < 2; start++) {
        work_with_timeline(r, path);
    }
    if (r->rank == 0) {
        unlink(path);
    }
}

// Works until it is killed, with a timeline on: in a child, which is a world of one.
static void work_until_killed(rank_t *r, const char *path)
{
    rank_setenv(r, "HOROVOD_TIMELINE", path);
    rank_setenv(r, "HOROVOD_MONITOR", "0"); // nobody survives who could remove its socket
    rank_setenv(r, "HOROVOD_RANK", "0");
    rank_setenv(r, "HOROVOD_SIZE", "1");
    rank_setenv(r, "HOROVOD_LOCAL_RANK", "0");
    rank_setenv(r, "HOROVOD_LOCAL_SIZE", "1");
    r->without_secret = true;
    if (rank_try_open(r, NULL) != HVD_OK) {
        _exit(1);
    }
    for (int i = 0;; i++) {
        char name[32];
        snprintf(name, sizeof name, "tensor.%d", i % 1000);
        sum_floats(r, name, i % 2 == 0 ? 1 : 5000);
        if (i % 10 == 0) {
            usleep(1000);
        }
    }
}

#define N_KILLS FEWER(60)

// Every second one is killed when it has begun to write what it does, however slow the machine is.
static bool may_be_killed(const char *path, int number)
{
    char *text = access(path, F_OK) == 0 ? read_text_file(path) : NULL;
    bool has_begun =
        text != NULL && (number % 2 == 1 || strstr(text, "NEGOTIATE_ALLREDUCE") != NULL);
    free(text);
    return has_begun;
}

static void timeline_survives_kills(rank_t *r, void *arg)
{
    (void)arg;
    char path[PATH_BYTES];
    dice_t dice = {.state = r->options->seed};
    int n_with_work = 0;
    trace_path(r, path);
    if (r->rank != 0) {
        return; // there is no job, only children of rank 0
    }
    for (int i = 0; i < N_KILLS; i++) {
        rank_step(r, "kill %d", i);
        unlink(path);
        pid_t child = fork();
        CHECK(r, child >= 0);
        if (child == 0) {
            work_until_killed(r, path);
        }
        uint64_t start_ns = clock_ns();
        while (!may_be_killed(path, i)) {
            CHECK(r, clock_ns() - start_ns < SOON_NS);
            usleep(500);
        }
        usleep((useconds_t)(5000 + dice_below(&dice, 200000)));
        CHECK_INT(r, kill(child, SIGKILL), 0);
        CHECK_INT(r, waitpid(child, NULL, 0), child);
        char *text = read_text_file(path);
        CHECK(r, text != NULL);
        check_trace(r, text);
        n_with_work += strstr(text, "NEGOTIATE_ALLREDUCE") != NULL;
        free(text);
    }
    CHECK(r, n_with_work >= N_KILLS / 2);
    unlink(path);
    strncat(path, ".new", sizeof path - strlen(path) - 1);
    unlink(path); // the last one may have been killed while it made its file larger
}

// A disk with room for a megabyte, in a namespace of this process; where that is not allowed, a
// limit on the size of files does.
static void make_small_disk(rank_t *r, const char *dir)
{
    bool mounted = unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) == 0 &&
                   mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                   mount("none", dir, "tmpfs", 0, "size=1m") == 0;
    if (!mounted) {
        struct rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
        CHECK_INT(r, setrlimit(RLIMIT_FSIZE, &limit), 0);
    }
}

static void full_disk(rank_t *r, void *arg)
{
    (void)arg;
    char dir[PATH_BYTES];
    char path[2 * PATH_BYTES];
    shared_dir(r, dir);
    snprintf(path, sizeof path, "%s/trace.json", dir);
    if (r->rank == 0) {
        make_small_disk(r, dir);
        rank_setenv(r, "HOROVOD_TIMELINE", path);
    }
    open_listening(r);
    // About half a kilobyte for each; gently, so that none is left out.
    for (int i = 0; i < 4000; i++) {
        rank_step(r, "operation %d", i);
        sum_floats(r, "again", 5);
        if (i % 50 == 0) {
            usleep(2000);
        }
    }
    if (r->rank == 0) {
        wait_for_line(r, "The timeline ends here");
    }
    rank_check_sum(r, "goes on", 0, 1, r->size);
    rank_close(r);
    CHECK_INT(r, lines_with("The timeline ends here"), r->rank == 0);
    if (r->rank == 0) {
        char *text = read_text_file(path);
        CHECK(r, text != NULL);
        check_trace(r, text);
        CHECK(r, strlen(text) > 400 * 1024 && count(text, "NEGOTIATE_ALLREDUCE") > 500);
        free(text);
        unlink(path);
        umount2(dir, MNT_DETACH);
        remove_dir(r, dir);
    }
}

static const subtest_t subtests[] = {
    {.name = "counters add up", .fn = counters_add_up},
    {.name = "rude clients", .fn = rude_clients, .one_world_only = true},
    {.name = "info shows who waits",
     .fn = info_shows_who_waits,
     .min_ranks = 2,
     .layouts = ONLY_LAYOUT(LAYOUT_ONE)},
    {.name = "killed ranks leave nothing", .fn = killed_ranks_leave_nothing, .min_ranks = 2},
    {.name = "a slow rank is named", .fn = a_slow_rank_is_named, .min_ranks = 2},
    {.name = "dump on signal", .fn = dump_on_signal},
    {.name = "own handlers stay", .fn = own_handlers_stay, .one_world_only = true},
    {.name = "dump on stall",
     .fn = dump_on_stall,
     .min_ranks = 2,
     .env = {"HOROVOD_STALL_CHECK_TIME_SECONDS=0.3"}},
    {.name = "dump on failure", .fn = dump_on_failure, .min_ranks = 2},
    {.name = "timeline of a job", .fn = timeline_of_a_job},
    {.name = "timeline survives kills", .fn = timeline_survives_kills, .one_world_only = true},
    {.name = "full disk", .fn = full_disk, .layouts = ONLY_LAYOUT(LAYOUT_ONE)},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
