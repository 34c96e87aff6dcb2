// SPDX-License-Identifier: Apache-2.0
//
// harness.h - jobs of real processes for tests of the public API.
//
// A test program is a table of subtests and one call of ranks_main(). For every world asked for on
// the command line (number of ranks x layout) each subtest is one job: its ranks are forked, get
// their HOROVOD_ variables through hvd_options and the secret through a pipe, and meet at a
// rendezvous server in the parent. A job fails when a check fails, a rank dies or hangs (the parent
// then says in which step, and kills what it has started), or something is left behind: a process,
// file, segment, socket (scene.h).
//
// Threads: a rank_t belongs to one thread; rank_thread() makes one for a further thread of a rank.
#ifndef TESTS_RANKS_HARNESS_H
#define TESTS_RANKS_HARNESS_H

#include "base/base.h"

#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif
// Less work where every access is checked, and more patience.
#define FEWER(n) (SANITIZED ? ((n) + 4) / 5 : (n))
#define PATIENCE (SANITIZED ? 4 : 1)

#define MAX_RANKS 16
#define MAX_THREADS 8 // of one rank
#define STEP_BYTES 192
#define MAX_ENV 64

typedef enum layout {
    LAYOUT_ONE,    // all ranks on one host
    LAYOUT_APART,  // every rank on a host of its own
    LAYOUT_BLOCKS, // two hosts, the lower half of the ranks on the first
    LAYOUT_WOVEN,  // two hosts, ranks taking turns
    N_LAYOUTS
} layout_t;

extern const char *const layout_names[N_LAYOUTS];
int layout_host(layout_t layout, int rank, int size);

// What the command line asked for.
typedef struct options {
    int ranks[MAX_RANKS];
    int n_ranks;
    layout_t layouts[N_LAYOUTS];
    int n_layouts;
    const char *env[MAX_ENV]; // NAME=value for every job
    int n_env;
    const char *only;   // run subtests whose names contain this; NULL: all
    const char *except; // leave out those whose names contain this; NULL: none
    bool full;
    bool alone;    // fail rather than see less of what is left behind
    bool launched; // this process is a rank that mpirun has started
    uint64_t seed;
    int count; // 0: the subtest's own
} options_t;

typedef struct job job_t; // harness.c

typedef struct rank {
    int rank, size;
    layout_t layout;
    const options_t *options;
    hvd_ctx_t *ctx;            // after rank_open
    char text[HVD_TEXT_BYTES]; // sentence of the last call that failed
    const job_t *job;
    bool without_secret; // rank_try_open leaves out HOROVOD_SECRET_FD
    bool is_launched;    // by mpirun: the process's own environment says everything
    char *env[MAX_ENV];
    int n_env;
    char *step; // STEP_BYTES that the parent shows when the rank hangs
} rank_t;

typedef void (*rank_fn)(rank_t *r, void *arg);

typedef struct subtest {
    const char *name;
    rank_fn fn;
    void *arg;
    int min_ranks;       // smaller worlds are skipped
    const char *env[8];  // NAME=value, beside the options'
    unsigned layouts;    // bit mask of layout_t; 0: all
    bool one_world_only; // the same whatever the world: runs in the first that fits
} subtest_t;

#define ONLY_LAYOUT(layout) (1u << (layout))

// Where the rendezvous server listens; NULL: on loopback, where ranks look for it by default.
extern const char *ranks_server_address;

// Runs every subtest in every world; the exit status of the program.
int ranks_main(int argc, char **argv, const subtest_t *subtests, int n_subtests);
// One job. env: NAME=value strings, NULL at the end, or NULL.
bool ranks_run(int n_ranks, layout_t layout, const char *const *env, rank_fn fn, void *arg);
// A job inside this process: every rank is a thread. The caller is a rank of an outer job.
void ranks_in_threads(const rank_t *outer, int n_ranks, layout_t layout, rank_fn fn, void *arg);

// --- Inside a rank ------------------------------------------------------------------------------

// Sets, or with NULL drops, a variable for the next init.
void rank_setenv(rank_t *r, const char *name, const char *value);
const char *rank_getenv(const rank_t *r, const char *name); // NULL: it is not there
// hvd_init with the rank's environment; more, if not NULL, gives process sets and log.
hvd_status_t rank_try_open(rank_t *r, const hvd_options_t *more);
void rank_open(rank_t *r);  // and it must succeed
void rank_close(rank_t *r); // when all have come so far: a rank that stops stops the job
void rank_leave(rank_t *r); // now, whatever the others do
// Says what comes next, for the report of a hang or a failed check.
void rank_step(rank_t *r, const char *format, ...) PRINTF_LIKE(2, 3);
// This rank is about to die on purpose: its end by a signal is no failure.
void rank_will_die(rank_t *r);
rank_t rank_thread(const rank_t *r, int thread); // 1 to MAX_THREADS - 1
// Small numbers that all ranks of the job see, zero at first.
atomic_int *rank_shared(const rank_t *r, int i);
#define N_SHARED 64

// Submits and waits, at most a minute; the handle's status, and its sentence in r->text.
hvd_status_t rank_call(rank_t *r, const hvd_request_t *request);
void rank_barrier(rank_t *r);
// An allreduce of one number, which must give `expected`.
void rank_check_sum(rank_t *r, const char *name, int set, int64_t mine, int64_t expected);

// Waits on a number that another rank or thread sets.
void rank_wait_for(rank_t *r, atomic_int *word, int value);

// --- Random numbers: the same everywhere for the same seed --------------------------------------

typedef struct dice {
    uint64_t state;
} dice_t;

uint64_t dice_next(dice_t *dice);
int dice_below(dice_t *dice, int n);
void dice_shuffle(dice_t *dice, int *items, int n);

// --- Checks: print rank, place, expected and got, and end the rank ------------------------------

_Noreturn void check_failed(const rank_t *r, const char *file, int line, const char *format, ...)
    PRINTF_LIKE(4, 5);

#define CHECK(r, condition)                                                                        \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            check_failed(r, __FILE__, __LINE__, "not so: %s", #condition);                         \
        }                                                                                          \
    } while (0)

#define CHECK_INT(r, got, expected)                                                                \
    do {                                                                                           \
        long long got_ = (long long)(got), expected_ = (long long)(expected);                      \
        if (got_ != expected_) {                                                                   \
            check_failed(r, __FILE__, __LINE__, "%s: expected %lld, got %lld", #got, expected_,    \
                         got_);                                                                    \
        }                                                                                          \
    } while (0)

// Any expression of hvd_status_t; the sentence shown is the rank's last.
#define CHECK_STATUS(r, got, expected)                                                             \
    do {                                                                                           \
        hvd_status_t got_ = (got), expected_ = (expected);                                         \
        if (got_ != expected_) {                                                                   \
            check_failed(r, __FILE__, __LINE__, "%s: expected %s, got %s (%s)", #got,              \
                         hvd_status_name(expected_), hvd_status_name(got_), (r)->text);            \
        }                                                                                          \
    } while (0)

#define CHECK_OK(r, got) CHECK_STATUS(r, got, HVD_OK)

#define CHECK_HAS(r, text, part)                                                                   \
    do {                                                                                           \
        if (strstr((text), (part)) == NULL) {                                                      \
            check_failed(r, __FILE__, __LINE__, "expected a sentence with \"%s\", got \"%s\"",     \
                         (part), (text));                                                          \
        }                                                                                          \
    } while (0)

#define CHECK_STARTS(r, text, start)                                                               \
    do {                                                                                           \
        if (strncmp((text), (start), strlen(start)) != 0) {                                        \
            check_failed(r, __FILE__, __LINE__, "expected a sentence starting \"%s\", got \"%s\"", \
                         (start), (text));                                                         \
        }                                                                                          \
    } while (0)

#endif
