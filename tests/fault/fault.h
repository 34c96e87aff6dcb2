// SPDX-License-Identifier: Apache-2.0
//
// fault.h - what tests of failures share: a rank whose log is kept, work that goes on until
// something happens, sentences that must be said, and times within which.
//
// Bounds are those a user may count on an idle machine, times LOADED: tests share their machine
// with others. A rank tells its pid to the others, so that any rank can stop or kill another.
#ifndef TESTS_FAULT_FAULT_H
#define TESTS_FAULT_FAULT_H

#include "harness.h"

#include <pthread.h>
#include <sys/types.h>

#define LOADED (3 * PATIENCE)

typedef struct fault_rank {
    rank_t *r;
    pthread_mutex_t lock;
    char lines[64 * 1024]; // of the log, newline after each
    size_t len;
    int n_steps;
    unsigned flags; // of each step; HVD_WAITS at first
    bool spreads;   // a step is a broadcast from rank 0 instead of a sum
} fault_rank_t;

// Tells the pid; the log will be kept.
fault_rank_t *fault_new(rank_t *r);
hvd_status_t fault_join(fault_rank_t *f); // init
// Both, and it must succeed. The first sums are checked, so links exist.
fault_rank_t *fault_open(rank_t *r);
void fault_leave(fault_rank_t *f); // shutdown, whatever the state; frees
pid_t fault_pid(const rank_t *r, int rank);

// One allreduce (or broadcast) of n float32 whose result is checked; HVD_OK, or why not (sentence
// in r->text).
hvd_status_t fault_step(fault_rank_t *f, const char *name, size_t n);
// Steps until one fails; the sentence is in r->text.
hvd_status_t fault_work(fault_rank_t *f, size_t n, double max_seconds);
// Does nothing but look at hvd_health until it is bad; the sentence is in r->text.
hvd_status_t fault_idle(fault_rank_t *f, double max_seconds);

bool fault_logged(fault_rank_t *f, const char *part);
int fault_n_logged(fault_rank_t *f, const char *part); // lines with it
void fault_wait_logged(fault_rank_t *f, const char *part, double max_seconds);

bool fault_run(const char *format, ...) PRINTF_LIKE(1, 2); // a shell command; true if it succeeds

double fault_now(void); // seconds, monotonic
// The fault is made now, by this rank; and how long ago that was, for any rank: it waits for it.
void fault_mark(rank_t *r);
double fault_since(fault_rank_t *f);
// "rank 2 (host h1, pid 77)", as it must stand in sentences.
void fault_name(const rank_t *r, int rank, char text[128]);

#define CHECK_NAMES(f, rank_)                                                                      \
    do {                                                                                           \
        char name_[128];                                                                           \
        fault_name((f)->r, (rank_), name_);                                                        \
        CHECK_HAS((f)->r, (f)->r->text, name_);                                                    \
    } while (0)

#define CHECK_WITHIN(f, since, seconds)                                                            \
    do {                                                                                           \
        double took_ = fault_now() - (since);                                                      \
        if (took_ > (seconds) * LOADED) {                                                          \
            check_failed((f)->r, __FILE__, __LINE__, "took %.2f s, allowed are %.2f x %d", took_,  \
                         (double)(seconds), LOADED);                                               \
        }                                                                                          \
    } while (0)

#endif
