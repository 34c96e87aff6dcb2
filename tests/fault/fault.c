// SPDX-License-Identifier: Apache-2.0
//
// fault.c - see fault.h.
//
// The log arrives from whichever thread drives the engine, so the lines are kept under a lock. Sums
// are of small whole numbers that depend on rank and step: a result that mixes steps is seen.
#define _GNU_SOURCE
#include "fault.h"

#include <math.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#define IS_MARKED 46 // among the numbers all ranks see
#define MARKED_MS 47
#define FIRST_PID 48

double fault_now(void)
{
    return (double)clock_ns() / 1e9;
}

static int now_ms(void)
{
    return (int)(clock_ns() / NS_PER_MS % 1000000000);
}

void fault_mark(rank_t *r)
{
    atomic_store(rank_shared(r, MARKED_MS), now_ms());
    atomic_store(rank_shared(r, IS_MARKED), 1);
}

double fault_since(fault_rank_t *f)
{
    rank_wait_for(f->r, rank_shared(f->r, IS_MARKED), 1);
    return (double)(now_ms() - atomic_load(rank_shared(f->r, MARKED_MS))) / 1000;
}

pid_t fault_pid(const rank_t *r, int rank)
{
    return (pid_t)atomic_load(rank_shared(r, FIRST_PID + rank));
}

void fault_name(const rank_t *r, int rank, char text[128])
{
    snprintf(text, 128, "rank %d (host h%d, pid %d)", rank, layout_host(r->layout, rank, r->size),
             (int)fault_pid(r, rank));
}

// --- The system ---------------------------------------------------------------------------------

bool fault_run(const char *format, ...)
{
    char command[512];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    const char *path = getenv("PATH");
    if (path == NULL || strstr(path, "/usr/sbin") == NULL) { // where nft and ip are
        setenv("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", 1);
    }
    int state = system(command);
    return WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

// --- The log ------------------------------------------------------------------------------------

static void keep_line(void *arg, int level, const char *line)
{
    fault_rank_t *f = arg;
    size_t bytes = strlen(line);
    (void)level;
    pthread_mutex_lock(&f->lock);
    if (f->len + bytes + 2 <= sizeof f->lines) {
        memcpy(f->lines + f->len, line, bytes);
        memcpy(f->lines + f->len + bytes, "\n", 2);
        f->len += bytes + 1;
    }
    pthread_mutex_unlock(&f->lock);
    if (f->r->options->full) {
        fprintf(stderr, "%s\n", line);
    }
}

int fault_n_logged(fault_rank_t *f, const char *part)
{
    int n = 0;
    pthread_mutex_lock(&f->lock);
    for (const char *at = f->lines; (at = strstr(at, part)) != NULL; at += strcspn(at, "\n")) {
        n++;
    }
    pthread_mutex_unlock(&f->lock);
    return n;
}

bool fault_logged(fault_rank_t *f, const char *part)
{
    return fault_n_logged(f, part) > 0;
}

void fault_wait_logged(fault_rank_t *f, const char *part, double max_seconds)
{
    double start = fault_now();
    while (!fault_logged(f, part)) {
        if (fault_now() - start > max_seconds * LOADED) {
            check_failed(f->r, __FILE__, __LINE__, "no line with \"%s\"; the log is:\n%.3000s",
                         part, f->lines);
        }
        usleep(5000);
    }
}

// --- Life ---------------------------------------------------------------------------------------

fault_rank_t *fault_new(rank_t *r)
{
    fault_rank_t *f = calloc(1, sizeof *f);
    CHECK(r, f != NULL);
    f->r = r;
    f->flags = HVD_WAITS;
    pthread_mutex_init(&f->lock, NULL);
    atomic_store(rank_shared(r, FIRST_PID + r->rank), (int)getpid());
    return f;
}

hvd_status_t fault_join(fault_rank_t *f)
{
    rank_step(f->r, "init");
    return rank_try_open(f->r, &(hvd_options_t){.log = keep_line, .log_arg = f});
}

fault_rank_t *fault_open(rank_t *r)
{
    fault_rank_t *f = fault_new(r);
    CHECK_OK(r, fault_join(f));
    rank_step(r, "first sums");
    for (int i = 0; i < 3; i++) {
        CHECK_OK(r, fault_step(f, "first", 1000));
        CHECK_OK(r, fault_step(f, "first large", 100000));
    }
    return f;
}

void fault_leave(fault_rank_t *f)
{
    rank_step(f->r, "leaves");
    if (f->r->ctx != NULL) {
        CHECK_OK(f->r, hvd_shutdown(f->r->ctx));
    }
    f->r->ctx = NULL;
    pthread_mutex_destroy(&f->lock);
    free(f);
}

// --- Work ---------------------------------------------------------------------------------------

hvd_status_t fault_step(fault_rank_t *f, const char *name, size_t n)
{
    rank_t *r = f->r;
    int64_t shape[1] = {(int64_t)n};
    float *values = malloc((n + 1) * sizeof *values);
    int step = f->n_steps++;
    CHECK(r, values != NULL);
    for (size_t i = 0; i < n; i++) {
        values[i] = (float)(r->rank + step % 7 + (int)(i % 5));
    }
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    hvd_request_t request = {
        .op = f->spreads ? HVD_BROADCAST : HVD_ALLREDUCE,
        .name = name,
        .dtype = HVD_FLOAT32,
        .reduce = HVD_SUM,
        .tensors = &tensor,
        .n_tensors = 1,
        .flags = f->flags,
    };
    hvd_status_t status = rank_call(r, &request);
    int n_added = f->spreads ? 1 : r->size; // ranks 0 to this
    int base = n_added * (n_added - 1) / 2 + n_added * (step % 7);
    for (size_t i = 0; status == HVD_OK && i < n; i++) {
        if (fabsf(values[i] - (float)(base + n_added * (int)(i % 5))) > 0) {
            check_failed(r, __FILE__, __LINE__, "a wrong result in step %d: element %zu is %g",
                         step, i, (double)values[i]);
        }
    }
    free(values);
    return status;
}

// For docs/troubleshooting.md, whose texts are real ones.
static void show_end(const fault_rank_t *f, hvd_status_t status)
{
    if (f->r->options->full) {
        fprintf(stderr, "rank %d: %s: %s\n", f->r->rank, hvd_status_name(status), f->r->text);
    }
}

hvd_status_t fault_work(fault_rank_t *f, size_t n, double max_seconds)
{
    double start = fault_now();
    hvd_status_t status = HVD_OK;
    while (status == HVD_OK) {
        if (fault_now() - start > max_seconds * LOADED) {
            check_failed(f->r, __FILE__, __LINE__,
                         "still working after %.1f s; the log is:\n%.3000s", fault_now() - start,
                         f->lines);
        }
        status = fault_step(f, "work", n);
    }
    show_end(f, status);
    return status;
}

hvd_status_t fault_idle(fault_rank_t *f, double max_seconds)
{
    double start = fault_now();
    hvd_status_t status;
    while ((status = hvd_health(f->r->ctx, f->r->text, sizeof f->r->text)) == HVD_OK) {
        if (fault_now() - start > max_seconds * LOADED) {
            check_failed(f->r, __FILE__, __LINE__, "nothing noticed in %.1f s; the log:\n%.3000s",
                         fault_now() - start, f->lines);
        }
        usleep(2000);
    }
    show_end(f, status);
    return status;
}
