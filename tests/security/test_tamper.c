// SPDX-License-Identifier: Apache-2.0
//
// test_tamper.c - jobs whose links damage what they carry (HOROVOD_HOOK): every sum that is given
// out is right, and the job ends with a sentence that says what happened.
//
// Damage happens behind the encryption, on both sides, by seed. Bytes that vanish are noticed by
// what follows them, which does not fit; where nothing does, by an operation that stands still. The
// last subtest shows that the others can fail: without encryption a changed bit is a wrong sum.
#include "harness.h"

#include <stdio.h>

#define MAX_STEPS 20000
#define LARGE 100000 // elements: on a data link of its own
#define SMALL 1      // rides with the agreement

enum { N_SAID, N_ENDED }; // numbers that all ranks see

// One sum whose elements depend on rank and step. *right_p: whether the result is right.
static hvd_status_t sum(rank_t *r, int step, size_t n, bool *right_p)
{
    int64_t shape[1] = {(int64_t)n};
    int64_t *values = malloc(n * sizeof *values);
    CHECK(r, values != NULL);
    for (size_t i = 0; i < n; i++) {
        values[i] = (r->rank + 1) * (int64_t)(step + (int)i);
    }
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    hvd_status_t status = rank_call(r, &(hvd_request_t){
                                           .op = HVD_ALLREDUCE,
                                           .name = "sum",
                                           .dtype = HVD_INT64,
                                           .reduce = HVD_SUM,
                                           .tensors = &tensor,
                                           .n_tensors = 1,
                                           .flags = HVD_WAITS,
                                       });
    int64_t shares = r->size * (r->size + 1) / 2;
    *right_p = true;
    for (size_t i = 0; status == HVD_OK && i < n; i++) {
        *right_p = *right_p && values[i] == shares * (int64_t)(step + (int)i);
    }
    free(values);
    return status;
}

static void wait_for_all(rank_t *r, int number)
{
    atomic_fetch_add(rank_shared(r, number), 1);
    rank_wait_for(r, rank_shared(r, number), r->size);
}

static const size_t on_data_links = LARGE, on_control_links = SMALL;

// Works until the damage shows. arg: elements of each sum.
static void damage_is_refused(rank_t *r, void *arg)
{
    const size_t *n_p = arg;
    hvd_status_t status;
    bool right = true;
    rank_step(r, "init");
    status = rank_try_open(r, NULL);
    for (int step = 0; step < MAX_STEPS && status == HVD_OK; step++) {
        rank_step(r, "step %d", step);
        status = sum(r, step, *n_p, &right);
        CHECK(r, right);
    }
    rank_step(r, "after the end: %s", r->text);
    CHECK(r, status == HVD_PROTOCOL || status == HVD_PEER_LOST);
    CHECK_HAS(r, r->text, "rank ");
    if (strstr(r->text, "lost on the way") != NULL) {
        atomic_fetch_add(rank_shared(r, N_SAID), 1);
    }
    if (r->ctx != NULL) {
        rank_leave(r);
    }
    wait_for_all(r, N_ENDED);
    CHECK(r, atomic_load(rank_shared(r, N_SAID)) >= 1);
}

// The verdict of one rank reaches all through the agreement, which is always protected.
static void damage_shows_without_encryption(rank_t *r, void *arg)
{
    bool any_wrong = false;
    (void)arg;

    rank_open(r);
    for (int step = 0; step < MAX_STEPS && !any_wrong; step++) {
        bool right;
        int64_t shape[1] = {1}, wrong;
        rank_step(r, "step %d", step);
        CHECK_OK(r, sum(r, step, LARGE, &right));
        wrong = !right;
        hvd_tensor_t tensor = {.input = &wrong, .output = &wrong, .n_dims = 1, .shape = shape};
        CHECK_OK(r, rank_call(r, &(hvd_request_t){.op = HVD_ALLREDUCE,
                                                  .name = "verdict",
                                                  .dtype = HVD_INT64,
                                                  .reduce = HVD_MAX,
                                                  .tensors = &tensor,
                                                  .n_tensors = 1}));
        any_wrong = wrong != 0;
    }
    CHECK(r, any_wrong);
    rank_close(r);
}

#define ON_DATA(name_, hook)                                                                       \
    {.name = name_,                                                                                \
     .fn = damage_is_refused,                                                                      \
     .arg = (void *)&on_data_links,                                                                \
     .min_ranks = 2,                                                                               \
     .env = {"HOROVOD_TRANSPORTS=tcp", "HOROVOD_ENCRYPT=always", "HOROVOD_HOOK=" hook,             \
             "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=3"}}
#define ON_CONTROL(name_, hook)                                                                    \
    {                                                                                              \
        .name = name_, .fn = damage_is_refused, .arg = (void *)&on_control_links, .min_ranks = 2,  \
        .env = {"HOROVOD_TRANSPORTS=tcp", "HOROVOD_ENCRYPT=never", "HOROVOD_HOOK=" hook}           \
    }

int main(int argc, char **argv)
{
    const subtest_t subtests[] = {
        ON_DATA("a changed bit, seed 1", "flip=5000000,seed=1"),
        ON_DATA("a changed bit, seed 2", "flip=1000000,seed=2"),
        ON_DATA("pieces that change places", "reorder=3000000,seed=4"),
        ON_DATA("both, and late", "flip=9000000,reorder=9000000,delay=100,seed=5"),
        ON_DATA("bytes vanish, seed 1", "drop=3000000,seed=1"),
        ON_DATA("bytes vanish, seed 2", "drop=9000000,seed=2"),
        ON_CONTROL("a changed bit in the agreement", "flip=9000,seed=6"),
        ON_CONTROL("bytes of the agreement vanish", "drop=9000,seed=7"),
        ON_CONTROL("the agreement changes places", "reorder=9000,seed=8"),
        {.name = "without encryption a changed bit is a wrong sum",
         .fn = damage_shows_without_encryption,
         .min_ranks = 2,
         .env = {"HOROVOD_TRANSPORTS=tcp", "HOROVOD_ENCRYPT=never",
                 "HOROVOD_HOOK=flip=1000000,seed=9"}},
    };
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
