// SPDX-License-Identifier: Apache-2.0
//
// test_algorithms.c - every algorithm of the table, forced by its knob, and the knobs that change
// how things are cut, batched and remembered, with the same random operations behind each.
//
// Algorithms come from coll_algorithms itself, so a new row is tested without a change here.
#include "cases.h"

#include "coll/coll.h"

#include <stdio.h>

#define N_OPERATIONS 24

static void fill_members(const rank_t *r, int members[MAX_RANKS])
{
    for (int m = 0; m < r->size; m++) {
        members[m] = m;
    }
}

// --- Every algorithm ----------------------------------------------------------------------------

// What the row can serve: its operation, and Adasum only where that is what it does.
static op_case_t case_for(const algorithm_t *row, dice_t *dice, const int *members, int n)
{
    static const size_t rows[] = {0, 1, 5, 100, 3001, 20011, 70001};
    op_case_t c;
    do {
        c = op_random(dice, 0, members, n, 200 * KIB);
    } while (c.op != row->op);
    if (row->flags & NEEDS_ADASUM) {
        c.reduce = HVD_ADASUM;
        c.dtype = dice_below(dice, 2) ? HVD_FLOAT32 : HVD_FLOAT16;
        c.pre = c.post = 1;
        c.n_tensors = 1;
    }
    if (row->flags & NEEDS_EQUAL_BLOCKS) {
        c.salt = c.salt / 4 * 4; // even splits
    }
    c.rows = rows[dice_below(dice, N_ELEMENTS(rows))];
    if (c.op == HVD_ALLTOALL && c.salt % 4 == 0) {
        c.rows = c.rows / (size_t)n * (size_t)n;
    }
    return c;
}

// A job per row: the knob is read at init.
static void every_algorithm(rank_t *r, void *arg)
{
    (void)arg;
    int members[MAX_RANKS];
    fill_members(r, members);
    for (int i = 0; i < coll_n_algorithms; i++) {
        const algorithm_t *row = &coll_algorithms[i];
        if (row->op == HVD_BARRIER) {
            continue; // agreeing to a barrier is all there is to it
        }
        char forced[64];
        snprintf(forced, sizeof forced, "%s=%s", hvd_op_name(row->op), row->name);
        rank_setenv(r, "HOROVOD_ALGORITHM", forced);
        rank_step(r, "init for %s", forced);
        CHECK_OK(r, rank_try_open(r, NULL));
        dice_t dice = {.state = r->options->seed * 100 + (uint64_t)i};
        for (int k = 0; k < FEWER(N_OPERATIONS); k++) {
            op_case_t c = case_for(row, &dice, members, r->size);
            char text[STEP_BYTES];
            op_describe(&c, text, sizeof text);
            rank_step(r, "%s: %s", forced, text);
            op_run(r, &c, NULL);
        }
        rank_close(r);
    }
}

// --- Every knob ---------------------------------------------------------------------------------

// Several in flight at once, so that there is something to fuse, under names that come again.
static void random_batches(rank_t *r, void *arg)
{
    (void)arg;
    enum { AT_ONCE = 20 };
    int members[MAX_RANKS];
    fill_members(r, members);
    rank_open(r);
    dice_t dice = {.state = r->options->seed};
    dice_t own = {.state = (uint64_t)r->rank};
    op_run_t *runs = calloc(AT_ONCE, sizeof *runs);
    op_case_t cases[AT_ONCE];
    int order[AT_ONCE];
    for (int round = 0; round < FEWER(20); round++) {
        for (int i = 0; i < AT_ONCE; i++) {
            order[i] = i;
            dice_t named = {.state = (uint64_t)i + (round % 5 == 4 ? dice_next(&dice) : 0)};
            cases[i] = op_random(&named, 0, members, r->size, i % 7 == 0 ? 100 * KIB : 3 * KIB);
        }
        dice_shuffle(&own, order, AT_ONCE);
        for (int i = 0; i < AT_ONCE; i++) {
            char name[32];
            snprintf(name, sizeof name, "batch.%d.%d", round % 3, order[i]);
            rank_step(r, "round %d, submits %s", round, name);
            op_submit(r, &cases[order[i]], name, 0, &runs[order[i]]);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            rank_step(r, "round %d, waits for %d", round, i);
            op_check(r, &runs[i]);
        }
    }
    free(runs);
    rank_close(r);
}

// Equal tensors under many names: they fuse, as gradients do.
static void gradients(rank_t *r, void *arg)
{
    (void)arg;
    enum { N_NAMES = 60 };
    int members[MAX_RANKS];
    fill_members(r, members);
    rank_open(r);
    dice_t own = {.state = (uint64_t)r->rank};
    op_run_t *runs = calloc(N_NAMES, sizeof *runs);
    int order[N_NAMES];
    for (int i = 0; i < N_NAMES; i++) {
        order[i] = i;
    }
    for (int step = 0; step < FEWER(10); step++) {
        dice_shuffle(&own, order, N_NAMES);
        for (int i = 0; i < N_NAMES; i++) {
            op_case_t c = {
                .op = order[i] % 10 == 9 ? HVD_ALLGATHER : HVD_ALLREDUCE,
                .dtype = order[i] % 3 == 0 ? HVD_FLOAT16 : HVD_FLOAT32,
                .reduce = HVD_AVERAGE,
                .form = (form_t)(order[i] % N_FORMS),
                .members = members,
                .n_members = r->size,
                .n_tensors = 1 + order[i] % 2,
                .n_dims = 2,
                .rows = 1 + (size_t)order[i] * 37 % 500,
                .columns = 7,
                .pre = 1,
                .post = 1,
                .salt = (unsigned)(order[i] + step),
            };
            char name[32];
            snprintf(name, sizeof name, "gradient.%d", order[i]);
            rank_step(r, "step %d, submits %s", step, name);
            op_submit(r, &c, name, 0, &runs[order[i]]);
        }
        for (int i = 0; i < N_NAMES; i++) {
            rank_step(r, "step %d, waits for gradient.%d", step, order[i]);
            op_check(r, &runs[order[i]]);
        }
    }
    free(runs);
    rank_close(r);
}

#define WITH(title, function, ...)                                                                 \
    {                                                                                              \
        .name = title, .fn = function, .env = {__VA_ARGS__}                                        \
    }

static const subtest_t subtests[] = {
    WITH("every algorithm, small segments", every_algorithm, "HOROVOD_SEGMENT_BYTES=512",
         "HOROVOD_INLINE_BYTES=0"),
    WITH("every algorithm, delayed", every_algorithm, "HOROVOD_HOOK=delay=200,seed=3"),
    WITH("batches", random_batches, "HOROVOD_SEGMENT_BYTES=4096"),
    WITH("batches, no fusion", random_batches, "HOROVOD_FUSION_THRESHOLD=0"),
    WITH("batches, little fusion", random_batches, "HOROVOD_FUSION_THRESHOLD=5000"),
    WITH("batches, no cache", random_batches, "HOROVOD_CACHE_CAPACITY=0"),
    WITH("batches, small cache", random_batches, "HOROVOD_CACHE_CAPACITY=4"),
    WITH("batches, cycle time", random_batches, "HOROVOD_CYCLE_TIME=1"),
    WITH("batches, nothing inline", random_batches, "HOROVOD_INLINE_BYTES=0"),
    WITH("batches, much inline", random_batches, "HOROVOD_INLINE_BYTES=16384"),
    WITH("batches, delayed", random_batches, "HOROVOD_HOOK=delay=100,seed=5"),
    WITH("batches, little shared memory", random_batches, "HOROVOD_SHM_BYTES=262144"),
    WITH("gradients", gradients, NULL),
    WITH("gradients, no fusion", gradients, "HOROVOD_FUSION_THRESHOLD=0"),
    WITH("gradients, groups apart", gradients, "HOROVOD_DISABLE_GROUP_FUSION=1"),
    WITH("gradients, small cache", gradients, "HOROVOD_CACHE_CAPACITY=4"),
    WITH("gradients, cycle time", gradients, "HOROVOD_CYCLE_TIME=1"),
    WITH("gradients, narrow tree", gradients, "HOROVOD_TREE_ARITY=1"),
    WITH("gradients, encrypted", gradients, "HOROVOD_ENCRYPT=always"),
    WITH("gradients, plain", gradients, "HOROVOD_ENCRYPT=never"),
    WITH("gradients, forced two levels", gradients, "HOROVOD_ALGORITHM=allreduce=two_level"),
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
