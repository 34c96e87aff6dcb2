// SPDX-License-Identifier: Apache-2.0
//
// test_join.c - ranks that run out of work early join, and the others go on as if the joined ones
// brought zeros, until all have joined.
//
// Average still divides by all ranks; all are told the same last rank; what cannot work without a
// partner says so; and afterwards the job is as before.
#include "cases.h"

#include <stdio.h>

static int join(rank_t *r)
{
    hvd_handle_t handle;
    hvd_result_t result;
    CHECK_OK(
        r, hvd_submit(r->ctx, &(hvd_request_t){.op = HVD_JOIN}, &handle, r->text, sizeof r->text));
    CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
    CHECK_OK(r, hvd_result(r->ctx, handle, &result));
    int last = result.last_joined;
    hvd_release(r->ctx, handle);
    return last;
}

// Sum and average over `n_active` ranks that bring `value`, the others nothing.
static void reduce_partly(rank_t *r, const char *name, size_t n, hvd_reduce_t reduce, int n_active)
{
    float *values = calloc(n, sizeof *values);
    CHECK(r, values != NULL);
    for (size_t i = 0; i < n; i++) {
        values[i] = (float)(i % 100) + 1;
    }
    int64_t shape[1] = {(int64_t)n};
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    hvd_request_t request = {
        .op = HVD_ALLREDUCE,
        .name = name,
        .dtype = HVD_FLOAT32,
        .reduce = reduce,
        .tensors = &tensor,
        .n_tensors = 1,
    };
    CHECK_OK(r, rank_call(r, &request));
    for (size_t i = 0; i < n; i++) {
        double mine = (double)(i % 100) + 1;
        double expected = mine * n_active / (reduce == HVD_AVERAGE ? r->size : 1);
        if ((values[i] - expected) / expected > 1e-6 || (expected - values[i]) / expected > 1e-6) {
            check_failed(r, __FILE__, __LINE__, "element %zu: expected %g, got %g", i, expected,
                         (double)values[i]);
        }
    }
    free(values);
}

// Rank k runs k + 1 steps of each size, then joins. Sizes: riding, plan or stream, two-level.
static void uneven_steps(rank_t *r, void *arg)
{
    (void)arg;
    static const size_t sizes[] = {10, 3000, 60000};
    rank_open(r);
    for (int round = 0; round < 3; round++) {
        for (int step = 0; step <= r->rank; step++) {
            for (size_t s = 0; s < N_ELEMENTS(sizes); s++) {
                char name[32];
                snprintf(name, sizeof name, "step.%d.%zu", step, s);
                rank_step(r, "round %d, %s", round, name);
                // No one has left before their last step is done by all who are still there.
                reduce_partly(r, name, sizes[s], s == 1 ? HVD_AVERAGE : HVD_SUM, r->size - step);
            }
        }
        rank_step(r, "round %d, join", round);
        int last = join(r);
        CHECK_INT(r, last, r->size - 1); // everyone else had fewer steps
        rank_step(r, "round %d, after join", round);
        reduce_partly(r, "after", sizes[round], HVD_AVERAGE, r->size);
        op_case_t c = {
            .op = HVD_ALLGATHER,
            .dtype = HVD_INT16,
            .members = (int[MAX_RANKS]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
            .n_members = r->size,
            .n_tensors = 1,
            .n_dims = 1,
            .rows = 11,
            .columns = 1,
            .pre = 1,
            .post = 1,
        };
        op_run(r, &c, "gathered after");
    }
    rank_close(r);
}

// Whoever is last, everybody hears the same name. The last one first adds up something by itself,
// which ends only when all the others have joined.
static void last_is_known(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    for (int last = 0; last < r->size; last++) {
        rank_step(r, "rank %d joins last", last);
        if (r->rank == last) {
            reduce_partly(r, "alone", 10, HVD_SUM, 1);
        }
        int heard = join(r);
        CHECK_INT(r, heard, last);
        rank_check_sum(r, "heard", 0, heard, (int64_t)last * r->size);
    }
    rank_close(r);
}

static const struct {
    hvd_op_t op;
    const char *start;
} impossible[] = {
    {HVD_ALLGATHER, "Allgather is not supported with Join at this time."},
    {HVD_BROADCAST, "Broadcast is not supported with Join at this time."},
    {HVD_ALLTOALL, "Alltoall is not supported with Join at this time."},
    {HVD_REDUCESCATTER, "Reducescatter is not supported with Join at this time."},
};

// Rank 0 joins first; the others try what needs all.
static void others_cannot(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    if (r->rank != 0) {
        float in[8 * MAX_RANKS] = {0};
        float out[8 * MAX_RANKS * MAX_RANKS];
        int64_t shape[1] = {8 * r->size};
        hvd_tensor_t tensor = {.input = in, .output = out, .n_dims = 1, .shape = shape};
        for (size_t i = 0; i < N_ELEMENTS(impossible); i++) {
            hvd_request_t request = {
                .op = impossible[i].op,
                .name = hvd_op_name(impossible[i].op),
                .dtype = HVD_FLOAT32,
                .reduce = HVD_SUM,
                .root = 1,
                .tensors = &tensor,
                .n_tensors = 1,
            };
            rank_step(r, "%s while rank 0 has joined", request.name);
            CHECK_STATUS(r, rank_call(r, &request), HVD_JOINED);
            CHECK_STARTS(r, r->text, impossible[i].start);
        }
        reduce_partly(r, "still", 100, HVD_SUM, r->size - 1);
    }
    rank_step(r, "join");
    join(r);
    rank_check_sum(r, "after", 0, 1, r->size);
    rank_close(r);
}

// Join is for all ranks; and a rank that has joined submits nothing.
static void join_itself(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    if (r->rank == 0) {
        hvd_handle_t handle;
        float value = 1;
        int64_t shape[1] = {1};
        hvd_tensor_t tensor = {.input = &value, .output = &value, .n_dims = 1, .shape = shape};
        hvd_request_t request = {
            .op = HVD_ALLREDUCE,
            .name = "after my join",
            .dtype = HVD_FLOAT32,
            .reduce = HVD_SUM,
            .tensors = &tensor,
            .n_tensors = 1,
        };
        CHECK_OK(r, hvd_submit(r->ctx, &(hvd_request_t){.op = HVD_JOIN}, &handle, r->text,
                               sizeof r->text));
        CHECK_STATUS(r, hvd_wait(r->ctx, handle, 20), HVD_TIMEOUT);
        CHECK_STATUS(r, rank_call(r, &request), HVD_JOINED);
        atomic_store(rank_shared(r, 0), 1);
        CHECK_OK(r, hvd_wait(r->ctx, handle, 60000));
        hvd_release(r->ctx, handle);
    } else {
        rank_wait_for(r, rank_shared(r, 0), 1);
        join(r);
    }
    rank_check_sum(r, "after", 0, 1, r->size);
    rank_close(r);
}

// Names made by counting are the same everywhere again, whoever had how much to do before.
static void nameless_afterwards(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    for (int round = 0; round < 3; round++) {
        for (int step = 0; step <= r->rank; step++) {
            rank_step(r, "round %d, step %d", round, step);
            reduce_partly(r, NULL, 10, HVD_SUM, r->size - step);
        }
        join(r);
        rank_step(r, "round %d, after join", round);
        reduce_partly(r, NULL, 3000, HVD_AVERAGE, r->size);
        CHECK_OK(r, rank_call(r, &(hvd_request_t){.op = HVD_BARRIER}));
    }
    rank_close(r);
}

static const subtest_t subtests[] = {
    {.name = "uneven steps", .fn = uneven_steps},
    {.name = "nameless afterwards", .fn = nameless_afterwards},
    {.name = "last is known", .fn = last_is_known},
    {.name = "others cannot", .fn = others_cannot, .min_ranks = 2},
    {.name = "join itself", .fn = join_itself, .min_ranks = 2},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
