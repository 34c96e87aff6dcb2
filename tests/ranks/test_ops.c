// SPDX-License-Identifier: Apache-2.0
//
// test_ops.c - every operation with every dtype and reduction, around every size at which the
// library changes its way, against what it must give.
//
// The product of everything would take hours. Operation x reduction x dtype ("kind") is gone
// through whole; what varies beside it (size, form of the output, group, dimensions, factors, root)
// is walked through in steps of a golden section, which spreads a few tries per kind evenly over
// all combinations; other worlds start elsewhere. --full tries many times as many.
#include "cases.h"

#include <stdio.h>
#include <unistd.h>

#define TRIES 4
#define FULL_TRIES 120
#define CHANGES 80
#define COPIES 200 // some trials of engine/trials.h, and what comes after them
#define SMALL_BYTES 2048

// Operation and reduction; the dtypes that go with them are found by `allowed`.
static const struct {
    hvd_op_t op;
    hvd_reduce_t reduce;
} kinds[] = {
    {HVD_ALLREDUCE, HVD_SUM},     {HVD_ALLREDUCE, HVD_AVERAGE},     {HVD_ALLREDUCE, HVD_MIN},
    {HVD_ALLREDUCE, HVD_MAX},     {HVD_ALLREDUCE, HVD_PRODUCT},     {HVD_ALLREDUCE, HVD_ADASUM},
    {HVD_ALLGATHER, HVD_SUM},     {HVD_BROADCAST, HVD_SUM},         {HVD_ALLTOALL, HVD_SUM},
    {HVD_REDUCESCATTER, HVD_SUM}, {HVD_REDUCESCATTER, HVD_AVERAGE},
};

// Bytes of the tensor. Switch points: 2 KiB rides in the agreement, 16 and 512 KiB change the plan,
// 32 KiB is run in two levels or copied from process to process, 64 KiB is a slice and a plan's
// threshold, 256 KiB a slot.
static const size_t sizes[] = {
    0,
    1,
    3,
    37,
    1000,
    2 * KIB - 8,
    2 * KIB,
    2 * KIB + 8,
    4 * KIB,
    16 * KIB - 8,
    16 * KIB,
    16 * KIB + 8,
    32 * KIB - 8,
    32 * KIB + 8,
    64 * KIB - 8,
    64 * KIB,
    64 * KIB + 8,
    100003,
    256 * KIB - 8,
    256 * KIB + 8,
    512 * KIB - 8,
    512 * KIB + 8,
};

static const double factors[][2] = {{1, 1}, {1, 1}, {0.5, 1}, {1, 2}, {2, 0.5}, {0.5, 0.25}};

static bool allowed(hvd_op_t op, hvd_reduce_t reduce, hvd_dtype_t dtype)
{
    bool floating = dtype == HVD_FLOAT16 || dtype == HVD_BFLOAT16 || dtype == HVD_FLOAT32 ||
                    dtype == HVD_FLOAT64;
    bool reduces = op == HVD_ALLREDUCE || op == HVD_REDUCESCATTER;
    if (reduces && reduce == HVD_ADASUM) {
        return floating;
    }
    return !reduces || reduce != HVD_AVERAGE || dtype != HVD_BOOL;
}

static bool has_factors(const op_case_t *c)
{
    bool reduces = c->op == HVD_ALLREDUCE || c->op == HVD_REDUCESCATTER;
    return reduces && c->dtype != HVD_BOOL && c->reduce != HVD_ADASUM;
}

// Takes a digit off the number.
static size_t digit(uint64_t *number, size_t base)
{
    size_t value = (size_t)(*number % base);
    *number /= base;
    return value;
}

// Everything that varies beside the kind, as digits of one number.
static void vary(op_case_t *c, uint64_t number)
{
    bool scalar = c->op == HVD_ALLREDUCE || c->op == HVD_BROADCAST;
    bool half = c->dtype == HVD_FLOAT16 || c->dtype == HVD_BFLOAT16;
    bool sums = c->reduce == HVD_SUM || c->reduce == HVD_AVERAGE;
    size_t bytes = sizes[digit(&number, N_ELEMENTS(sizes))];
    c->form = (form_t)digit(&number, N_FORMS);
    bool group = digit(&number, 4) == 0;
    c->n_tensors = group && c->op != HVD_ALLTOALL ? 3 : 1;
    size_t elements = bytes / hvd_dtype_bytes(c->dtype);
    c->n_dims = 1 + (int)digit(&number, 3);
    if (scalar && bytes == 1) {
        c->n_dims = 0;
    }
    static const size_t columns[] = {1, 3, 16, 1, 5, 0};
    c->columns = c->n_dims < 2 ? 1 : columns[digit(&number, N_ELEMENTS(columns))];
    c->rows = MAX(elements / MAX(c->columns, 1), bytes > 0);
    c->salt = (unsigned)digit(&number, 12);
    c->root = (int)digit(&number, (size_t)c->n_members);
    if (c->op == HVD_ALLTOALL && c->salt % 4 == 0) {
        c->rows = c->rows / (size_t)c->n_members * (size_t)c->n_members; // even splits
    }
    const double *factor = factors[digit(&number, N_ELEMENTS(factors))];
    c->pre = has_factors(c) ? factor[0] : 1;
    c->post = has_factors(c) ? factor[1] : 1;
    c->rounding = half && sums && digit(&number, 2) == 0;
    if (c->rounding) {
        c->pre = 1;
    }
}

// Steps through all numbers so that any few in a row lie far apart.
static uint64_t spread(uint64_t i)
{
    return i * 0x9e3779b97f4a7c15ull >> 20;
}

static void run_kind(rank_t *r, op_case_t *c, uint64_t *n_cases)
{
    int tries = r->options->full ? FULL_TRIES : r->options->count > 0 ? r->options->count : TRIES;
    for (int i = 0; i < FEWER(tries); i++) {
        char text[STEP_BYTES];
        char name[64];
        vary(c, spread((*n_cases)++));
        op_describe(c, text, sizeof text);
        snprintf(name, sizeof name, "case.%llu", (unsigned long long)*n_cases);
        rank_step(r, "%s", text);
        op_run(r, c, name);
    }
}

static void every_kind(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    int members[MAX_RANKS];
    for (int m = 0; m < r->size; m++) {
        members[m] = m;
    }
    uint64_t n_cases = r->options->seed * 100000 + (uint64_t)r->size * 10000 + r->layout * 2000;
    for (size_t k = 0; k < N_ELEMENTS(kinds); k++) {
        for (int dtype = 0; dtype < HVD_N_DTYPES; dtype++) {
            op_case_t c = {
                .op = kinds[k].op,
                .reduce = kinds[k].reduce,
                .dtype = (hvd_dtype_t)dtype,
                .members = members,
                .n_members = r->size,
            };
            if (allowed(c.op, c.reduce, c.dtype)) {
                run_kind(r, &c, &n_cases);
            }
        }
    }
    rank_close(r);
}

// Every size with one dtype: the places where the way changes are all passed.
static void every_size(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    int members[MAX_RANKS];
    for (int m = 0; m < r->size; m++) {
        members[m] = m;
    }
    for (size_t s = 0; s < N_ELEMENTS(sizes); s++) {
        for (size_t k = 0; k < N_ELEMENTS(kinds); k++) {
            op_case_t c = {
                .op = kinds[k].op,
                .reduce = kinds[k].reduce,
                .dtype = HVD_FLOAT32,
                .form = (form_t)((s + k) % N_FORMS),
                .members = members,
                .n_members = r->size,
                .root = (int)s % r->size,
                .n_tensors = 1,
                .n_dims = 1,
                .rows = sizes[s] / 4,
                .columns = 1,
                .pre = 1,
                .post = 1,
                .salt = 1 + 4 * (unsigned)s,
            };
            rank_step(r, "%zu bytes of %s %s", sizes[s], hvd_op_name(c.op),
                      hvd_reduce_name(c.reduce));
            op_run(r, &c, NULL);
        }
    }
    rank_close(r);
}

// A few names that stand for one thing, several times, and then for another: what is remembered of
// a name must not show. Between them the result of the time before is still being looked at.
static void names_change(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    static op_run_t runs[2];
    static const char *const names[] = {"one", "two", "three"};
    int members[MAX_RANKS];
    for (int m = 0; m < r->size; m++) {
        members[m] = m;
    }
    dice_t dice = {.state = r->options->seed * 1000 + (uint64_t)r->size};
    op_case_t c = {0};
    for (int i = 0; i < FEWER(CHANGES); i++) {
        const char *name = names[dice_below(&dice, (int)N_ELEMENTS(names))];
        int n_times = 1 + dice_below(&dice, 6);
        if (i % 3 == 0) {
            c = op_random(&dice, 0, members, r->size, SMALL_BYTES);
        } else { // only one thing is different
            c.pre = i % 3 == 1 && c.pre == 1 ? 2 : 1;
            c.rows += (size_t)dice_below(&dice, 2);
        }
        rank_step(r, "%s is something else for the %dth time", name, i);
        for (int k = 0; k < n_times; k++) {
            c.salt++;
            op_submit(r, &c, name, HVD_WAITS, &runs[0]);
            if (dice_below(&dice, 3) == 0) {
                CHECK_OK(r, hvd_wait(r->ctx, runs[0].handle, 60000));
                op_submit(r, &c, name, HVD_WAITS, &runs[1]);
                op_check(r, &runs[1]);
            }
            op_check(r, &runs[0]);
        }
    }
    rank_close(r);
}

// Bytes are copied one way or the other, in turns at first and then as the members found best
// (engine/trials.h): ranks that come late have other times than their peers, and still go the same
// way.
static void copying_changes(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    static const hvd_op_t ops[] = {HVD_ALLGATHER, HVD_BROADCAST, HVD_ALLTOALL};
    static op_run_t runs[4];
    int members[MAX_RANKS];
    for (int m = 0; m < r->size; m++) {
        members[m] = m;
    }
    dice_t dice = {.state = r->options->seed};
    dice_t delays = {.state = r->options->seed + (uint64_t)r->rank};
    for (int i = 0; i < COPIES; i++) {
        rank_step(r, "round %d", i);
        int n = 1 + dice_below(&dice, (int)N_ELEMENTS(runs));
        for (int k = 0; k < n; k++) {
            op_case_t c = {
                .op = ops[dice_below(&dice, (int)N_ELEMENTS(ops))],
                .dtype = HVD_FLOAT32,
                .form = (form_t)dice_below(&dice, N_FORMS),
                .members = members,
                .n_members = r->size,
                .root = dice_below(&dice, r->size),
                .n_tensors = 1,
                .n_dims = 1,
                .rows = (i % 4 == 0 ? 300 : 100) * KIB / 4 * (size_t)r->size,
                .columns = 1,
                .pre = 1,
                .post = 1,
                .salt = (unsigned)(4 * i + k),
            };
            char name[32];
            snprintf(name, sizeof name, "copy.%d", k);
            usleep((useconds_t)(dice_below(&delays, 3) * 300));
            op_submit(r, &c, name, k == 0 ? HVD_WAITS : 0, &runs[k]);
        }
        for (int k = 0; k < n; k++) {
            op_check(r, &runs[k]);
        }
    }
    rank_close(r);
}

// Nobody may leave a barrier before everybody has come.
static void barrier_holds(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    atomic_int *arrived = rank_shared(r, 0);
    for (int round = 1; round <= FEWER(50); round++) {
        rank_step(r, "barrier %d", round);
        atomic_fetch_add(arrived, 1);
        rank_barrier(r);
        CHECK(r, atomic_load(arrived) >= round * r->size);
    }
    rank_close(r);
}

static void who_am_i(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    int host = layout_host(r->layout, r->rank, r->size);
    int local_rank = 0;
    int per_host[MAX_RANKS] = {0};
    for (int other = 0; other < r->size; other++) {
        int other_host = layout_host(r->layout, other, r->size);
        per_host[other_host]++;
        local_rank += other_host == host && other < r->rank;
    }
    bool homogeneous = true;
    int cross_size = 0;
    for (int h = 0; h < MAX_RANKS; h++) {
        homogeneous &= per_host[h] == 0 || per_host[h] == per_host[0];
        cross_size += per_host[h] > local_rank;
    }
    CHECK_INT(r, hvd_rank(r->ctx), r->rank);
    CHECK_INT(r, hvd_size(r->ctx), r->size);
    CHECK_INT(r, hvd_local_rank(r->ctx), local_rank);
    CHECK_INT(r, hvd_local_size(r->ctx), per_host[host]);
    CHECK_INT(r, hvd_cross_size(r->ctx), cross_size);
    CHECK_INT(r, hvd_is_homogeneous(r->ctx), homogeneous);
    CHECK_OK(r, hvd_health(r->ctx, r->text, sizeof r->text));
    rank_close(r);
}

// Where the launcher says nothing of hosts, the library finds out.
static void who_am_i_unhelped(rank_t *r, void *arg)
{
    static const char *const names[] = {"HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
                                        "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"};
    for (size_t i = 0; i < N_ELEMENTS(names); i++) {
        rank_setenv(r, names[i], NULL);
    }
    who_am_i(r, arg);
}

static const subtest_t subtests[] = {
    {.name = "who am i", .fn = who_am_i},
    {.name = "who am i, unhelped", .fn = who_am_i_unhelped},
    {.name = "barrier holds", .fn = barrier_holds},
    {.name = "every size", .fn = every_size},
    {.name = "every kind", .fn = every_kind},
    {.name = "names change", .fn = names_change},
    {.name = "copying changes", .fn = copying_changes},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
