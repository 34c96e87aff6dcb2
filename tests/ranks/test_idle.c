// SPDX-License-Identifier: Apache-2.0
//
// test_idle.c - a rank that has nothing to do leaves the machine to others.
//
// Counted is how often the threads of a rank went to sleep, which is once for every time they were
// woken, and how long they used a core: while the program is busy with something else, and while a
// rank waits for what another has not submitted. Heartbeats go on in either case, or the job would
// end (the limits below are shorter than the waits). The machine may be busy, and what others do to
// its caches and its clock is counted, too; so the quietest of a few windows is what counts.
#include "cases.h"

#include <dirent.h>
#include <stdio.h>
#include <time.h>

#define SETTLE_MS 500
#define N_WINDOWS 3
#define WINDOW_MS 1500
#define MOST_WAKES_PER_S 20

// Of a core. Between hosts every heartbeat is encrypted.
static const double most_cpu[N_LAYOUTS] = {
    [LAYOUT_ONE] = 0.001, [LAYOUT_APART] = 0.002, [LAYOUT_BLOCKS] = 0.002, [LAYOUT_WOVEN] = 0.002};

typedef struct usage {
    long n_wakes;
    double cpu_s;
} usage_t;

// How often a thread went to sleep. A core that it had to leave to others is no wake-up.
static long sleeps_of(rank_t *r, const char *thread)
{
    char path[300], line[160];
    long n = -1;
    snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
    FILE *file = fopen(path, "r");
    CHECK(r, file != NULL);
    while (n < 0 && fgets(line, sizeof line, file) != NULL) {
        sscanf(line, "voluntary_ctxt_switches: %ld", &n);
    }
    fclose(file);
    CHECK(r, n >= 0);
    return n;
}

static usage_t usage_now(rank_t *r)
{
    usage_t usage = {0};
    struct timespec cpu;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(r, tasks != NULL);
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        usage.n_wakes += entry->d_name[0] != '.' ? sleeps_of(r, entry->d_name) : 0;
    }
    closedir(tasks);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    usage.cpu_s = (double)cpu.tv_sec + (double)cpu.tv_nsec / (double)NS_PER_S;
    return usage;
}

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

// Spends a window in `rest`, and again.
static void check_usage(rank_t *r, const char *what, void (*rest)(rank_t *r, void *arg), void *arg)
{
    double wakes = 1e9, cpu = 1e9;
    for (int i = 0; i < N_WINDOWS; i++) {
        usage_t before = usage_now(r);
        rest(r, arg);
        usage_t now = usage_now(r);
        wakes = MIN(wakes, (double)(now.n_wakes - before.n_wakes) / (WINDOW_MS / 1e3));
        cpu = MIN(cpu, (now.cpu_s - before.cpu_s) / (WINDOW_MS / 1e3));
    }
    printf("rank %d of %d, %s: %.1f wake-ups a second, %.3f %% of a core\n", r->rank, r->size, what,
           wakes, 100 * cpu);
    fflush(stdout);
    if (wakes > MOST_WAKES_PER_S || cpu > most_cpu[r->layout]) {
        check_failed(r, __FILE__, __LINE__,
                     "%s: %.1f wake-ups a second (at most %d), %.3f %% of a core (at most %.3f %%)",
                     what, wakes, MOST_WAKES_PER_S, 100 * cpu, 100 * most_cpu[r->layout]);
    }
}

static void rest_in_program(rank_t *r, void *arg)
{
    (void)r;
    (void)arg;
    sleep_ms(WINDOW_MS);
}

static void rest_in_wait(rank_t *r, void *arg)
{
    CHECK_INT(r, hvd_wait(r->ctx, *(hvd_handle_t *)arg, WINDOW_MS), HVD_TIMEOUT);
}

static void nothing_in_flight(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    rank_barrier(r);
    sleep_ms(SETTLE_MS);
    check_usage(r, "nothing in flight", rest_in_program, NULL);
    rank_check_sum(r, "after", 0, 1, r->size);
    rank_close(r);
}

// All ranks but the last wait in hvd_wait; the last sleeps in its program.
static void waiting_for_one(rank_t *r, void *arg)
{
    (void)arg;
    int64_t shape[1] = {2000};
    float values[2000] = {0};
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    hvd_request_t request = {.op = HVD_ALLREDUCE,
                             .name = "awaited",
                             .dtype = HVD_FLOAT32,
                             .tensors = &tensor,
                             .n_tensors = 1};
    hvd_handle_t handle;
    bool is_late = r->rank == r->size - 1;
    rank_open(r);
    rank_barrier(r);
    if (!is_late) {
        CHECK_OK(r, hvd_submit(r->ctx, &request, &handle, r->text, sizeof r->text));
    }
    sleep_ms(SETTLE_MS);
    if (is_late) {
        check_usage(r, "awaited by others", rest_in_program, NULL);
        sleep_ms(2 * SETTLE_MS);
        CHECK_OK(r, hvd_submit(r->ctx, &request, &handle, r->text, sizeof r->text));
    } else {
        check_usage(r, "waiting for one", rest_in_wait, &handle);
    }
    CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
    hvd_release(r->ctx, handle);
    rank_close(r);
}

#define HEARTBEATS "HOROVOD_HEARTBEAT_WARNING_SECONDS=1.5", "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=3"

static const subtest_t subtests[] = {
    {.name = "nothing in flight", .fn = nothing_in_flight, .env = {HEARTBEATS}},
    {.name = "waiting for one", .fn = waiting_for_one, .min_ranks = 2, .env = {HEARTBEATS}},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
