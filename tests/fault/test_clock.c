// SPDX-License-Identifier: Apache-2.0
//
// test_clock.c - clocks on the wall that are wrong, or are set while a job runs: nothing happens.
//
// This program has a clock_gettime, time and gettimeofday of its own, which the library finds
// before those of the C library. Only CLOCK_REALTIME is wrong, on each rank in another way:
// an hour ahead, an hour behind, and jumping between the two all the time. What ranks decide must
// depend on monotonic clocks only.
#define _GNU_SOURCE
#include "fault.h"

#include "../json_check.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define HOUR 3600

static atomic_int wall_offset_s; // of this process

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) {
        now->tv_sec += atomic_load(&wall_offset_s);
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    *now = (struct timeval){.tv_sec = exact.tv_sec, .tv_usec = exact.tv_nsec / 1000};
    return result;
}

time_t time(time_t *now)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now != NULL) {
        *now = exact.tv_sec;
    }
    return exact.tv_sec;
}

// No moment of the trace lies outside of the time the job took.
static void check_trace(rank_t *r, const char *path, double seconds)
{
    char *text = read_text_file(path);
    int n = 0;
    CHECK(r, text != NULL && json_is_valid(text));
    for (const char *at = text; (at = strstr(at, "\"ts\": ")) != NULL; n++) {
        double ts = strtod(at += 6, NULL);
        if (ts < 0 || ts > seconds * 1e6) {
            check_failed(r, __FILE__, __LINE__, "%.0f us in a trace of %.1f s", ts, seconds);
        }
    }
    CHECK(r, n > 100);
    free(text);
    unlink(path);
}

// A rank may well be late, there are more than cores; but not by what its clock is wrong.
static void check_lateness(fault_rank_t *f)
{
    double late_ms = 0;
    pthread_mutex_lock(&f->lock);
    const char *at = strstr(f->lines, "is last in");
    bool is_read = at == NULL || sscanf(at, "is last in %*u of %*u steps, +%lf ms", &late_ms) == 1;
    pthread_mutex_unlock(&f->lock);
    CHECK(f->r, is_read && late_ms < 60000);
}

static void wrong_clocks(rank_t *r, void *arg)
{
    (void)arg;
    static const int offsets[] = {0, HOUR, -HOUR};
    char path[64];
    double start = fault_now();
    bool jumps = r->rank == r->size - 1;

    snprintf(path, sizeof path, "/tmp/hvd-test-clock-%d.json", (int)getpid());
    if (r->rank == 0) {
        rank_setenv(r, "HOROVOD_TIMELINE", path);
    }
    atomic_store(&wall_offset_s, offsets[r->rank % (int)N_ELEMENTS(offsets)]);
    fault_rank_t *f = fault_open(r);
    for (int i = 0; i < 100; i++) { // for more than a second
        if (jumps) {
            atomic_store(&wall_offset_s, i % 2 == 0 ? HOUR : -HOUR);
        }
        CHECK_OK(r, fault_step(f, "step", 1000));
        usleep(15000);
    }
    rank_barrier(r);
    CHECK(r, !fault_logged(f, "silent") && !fault_logged(f, "did not run"));
    CHECK(r, !fault_logged(f, "Missing ranks"));
    check_lateness(f);
    fault_leave(f);
    if (r->rank == 0) {
        check_trace(r, path, fault_now() - start);
    }
}

// The clock is set back on all ranks at once, as after the first contact with a time server.
static void set_back(rank_t *r, void *arg)
{
    (void)arg;
    atomic_store(&wall_offset_s, HOUR);
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    atomic_store(&wall_offset_s, 0);
    for (int i = 0; i < 20; i++) {
        CHECK_OK(r, fault_step(f, "step", 20000));
    }
    rank_barrier(r);
    fault_leave(f);
}

static const subtest_t subtests[] = {
    {.name = "wrong clocks", .fn = wrong_clocks, .min_ranks = 2},
    {.name = "set back", .fn = set_back, .min_ranks = 2},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
