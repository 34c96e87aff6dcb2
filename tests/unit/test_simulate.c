// SPDX-License-Identifier: Apache-2.0
//
// test_simulate.c - the prices of src/simulate: against what can be worked out by hand, the path of
// a tree against the whole tree, and the plans of all algorithms for many numbers of members.
#include "simulate/simulate.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>

#define LATENCY_NS 5000.0
#define MESSAGE_NS 3000.0

static machine_t machine(int n_ranks, int per_host)
{
    return (machine_t){.n_ranks = n_ranks,
                       .per_host = per_host,
                       .network = {LATENCY_NS, MESSAGE_NS, 0},
                       .host = {200, 100, 0},
                       .tree_arity = 8,
                       .segment_bytes = 256 * KIB};
}

static double agreement_ns(const machine_t *m, size_t payload_bytes, int whole_tree_ranks)
{
    double ns = -1;
    err_t err = {0};
    if (simulate_agreement(m, payload_bytes, whole_tree_ranks, &ns, &err) != HVD_OK) {
        fail_msg("%d ranks: %s", m->n_ranks, err.text);
    }
    return ns;
}

static void assert_near(double got, double wanted)
{
    if (!(got >= wanted * 0.9999 - 0.01 && got <= wanted * 1.0001 + 0.01)) {
        fail_msg("%.2f ns instead of %.2f", got, wanted);
    }
}

// --- The agreement ------------------------------------------------------------------------------

static void alone_nobody_is_asked(void **state)
{
    (void)state;
    machine_t m = machine(1, 1);
    assert_near(agreement_ns(&m, 0, INT32_MAX), 0);
}

// What rides between two hosts meets half way; what does not goes to rank 0 and back.
static void two_hosts(void **state)
{
    (void)state;
    machine_t m = machine(2, 1);
    double one_way = MESSAGE_NS + LATENCY_NS + MESSAGE_NS;
    assert_near(agreement_ns(&m, 4, INT32_MAX), one_way);
    assert_near(agreement_ns(&m, 0, INT32_MAX), 2 * one_way);
}

// Rank 0 takes one message after the other, and sends one after the other.
static void a_star(void **state)
{
    (void)state;
    for (int n_children = 2; n_children <= 8; n_children++) {
        machine_t m = machine(1 + n_children, 1);
        double at_root = MESSAGE_NS + LATENCY_NS + n_children * MESSAGE_NS;
        assert_near(agreement_ns(&m, 0, INT32_MAX),
                    at_root + n_children * MESSAGE_NS + LATENCY_NS + MESSAGE_NS);
    }
}

// Sixteen times a core sends or takes one of eight messages.
static void ranks_may_share_cores(void **state)
{
    (void)state;
    machine_t m = machine(5, 1);
    double apart = agreement_ns(&m, 0, INT32_MAX);
    m.n_cores = 2;
    double shared = agreement_ns(&m, 0, INT32_MAX);
    m.n_cores = 1;
    double one = agreement_ns(&m, 0, INT32_MAX);
    assert_true(shared >= apart && one > shared && one >= 16 * MESSAGE_NS);
}

// Where every node has the same below it, the path is no approximation.
static void the_path_is_exact_for_full_trees(void **state)
{
    (void)state;
    static const int shapes[][2] = {{1 + 8, 1}, {1 + 8 + 64, 1}, {9, 4}, {73, 3}};
    for (size_t i = 0; i < N_ELEMENTS(shapes); i++) {
        machine_t m = machine(shapes[i][0] * shapes[i][1], shapes[i][1]);
        for (size_t payload = 0; payload <= 64; payload += 64) {
            double whole = agreement_ns(&m, payload, INT32_MAX);
            assert_near(agreement_ns(&m, payload, 1), whole);
        }
    }
}

static void the_path_is_never_too_fast(void **state)
{
    (void)state;
    for (int n = 10; n < 600; n = n * 3 / 2 + 1) {
        machine_t m = machine(n, 1);
        double whole = agreement_ns(&m, 0, INT32_MAX), path = agreement_ns(&m, 0, 1);
        if (path < whole * 0.9999 || path > whole * 2) {
            fail_msg("%d ranks: %.0f ns by the path, %.0f by all", n, path, whole);
        }
    }
}

// The bound that docs/scale.md names, and growth with the logarithm.
static void thousands_of_ranks(void **state)
{
    (void)state;
    double last = 0;
    for (int n = 64; n <= 32768; n *= 8) {
        machine_t m = machine(n, 1);
        double ns = agreement_ns(&m, 0, SIMULATE_WHOLE_TREE_RANKS);
        assert_true(n > 4096 || ns <= 600e3);
        assert_true(last == 0 || ns - last <= 100e3);
        last = ns;
    }
}

// --- Plans --------------------------------------------------------------------------------------

typedef struct blocks {
    size_t bytes[64];
} blocks_t;

static coll_args_t args_of(hvd_op_t op, int size, size_t bytes, blocks_t *blocks)
{
    for (int i = 0; i < size; i++) {
        blocks->bytes[i] = bytes / (size_t)size / 4 * 4;
    }
    return (coll_args_t){.op = op,
                         .dtype = HVD_FLOAT32,
                         .reduce = HVD_SUM,
                         .size = size,
                         .bytes = bytes,
                         .blocks = blocks->bytes,
                         .send_bytes = blocks->bytes,
                         .recv_bytes = blocks->bytes,
                         .equal_blocks = true,
                         .segment_bytes = 256 * KIB};
}

static double plan_ns(const machine_t *m, hvd_op_t op, const char *name, int size, size_t bytes,
                      int per_host, int lanes)
{
    blocks_t blocks;
    coll_args_t args = args_of(op, size, bytes, &blocks);
    double ns = -1;
    err_t err = {0};
    if (simulate_plan(m, coll_find(op, name), &args, per_host, lanes, &ns, &err) != HVD_OK) {
        fail_msg("%s of %d: %s", name, size, err.text);
    }
    return ns;
}

// Each round is one exchange: the core sends, and takes what has come meanwhile.
static void rounds_of_doubling(void **state)
{
    (void)state;
    machine_t m = machine(64, 1);
    double round = MESSAGE_NS + LATENCY_NS + MESSAGE_NS;
    for (int n = 2, rounds = 1; n <= 32; n *= 2, rounds++) {
        assert_near(plan_ns(&m, HVD_ALLREDUCE, "recursive_doubling", n, 8, 1, 1), rounds * round);
    }
}

static void members_of_one_host_do_not_use_the_wire(void **state)
{
    (void)state;
    machine_t m = machine(2, 2);
    m.network.byte_ns = 1;
    double inside = plan_ns(&m, HVD_ALLREDUCE, "recursive_doubling", 2, 8, 2, 1);
    assert_near(inside, 100 + 200 + 100);
}

// A ring sends 2 (n - 1) / n of the bytes through every wire; lanes share it.
static void long_rings_are_bound_by_the_wire(void **state)
{
    (void)state;
    machine_t m = machine(64, 1);
    size_t bytes = 64 * MIB;
    m.network.byte_ns = 1;
    for (int n = 2; n <= 16; n++) {
        for (int lanes = 1; lanes <= 4; lanes *= 4) {
            double bound = 2.0 * (n - 1) / n * (double)bytes * lanes;
            double ns = plan_ns(&m, HVD_ALLREDUCE, "ring", n, bytes, 1, lanes);
            assert_true(ns >= bound && ns <= bound * 1.15);
        }
    }
}

// The plans of all members fit, all their steps can run, and more bytes never take less time.
static void every_plan_runs(void **state)
{
    (void)state;
    machine_t m = machine(64, 1);
    m.network.byte_ns = 0.1;
    for (int i = 0; i < coll_n_algorithms; i++) {
        const algorithm_t *a = &coll_algorithms[i];
        for (int n = 2; n <= 19; n++) {
            if (a->flags & NEEDS_ADASUM) {
                continue;
            }
            double little = plan_ns(&m, a->op, a->name, n, 4096, 1, 1);
            double much = plan_ns(&m, a->op, a->name, n, 4 * MIB, 1, 1);
            assert_true(little > 0 && much >= little);
        }
    }
}

// --- Operations ---------------------------------------------------------------------------------

static void operations_take_the_ways_of_the_engine(void **state)
{
    (void)state;
    static const struct {
        int ranks, per_host;
        hvd_op_t op;
        size_t bytes;
        const char *way;
    } rows[] = {
        {64, 8, HVD_ALLREDUCE, 4, "RIDING"},      {64, 8, HVD_ALLREDUCE, MIB, "TWO_LEVEL"},
        {64, 1, HVD_ALLREDUCE, MIB, "PLAN"},      {64, 8, HVD_BROADCAST, MIB, "PLAN"},
        {8, 8, HVD_ALLREDUCE, MIB, "STREAM"},     {64, 8, HVD_BARRIER, 0, "AGREED"},
        {64, 8, HVD_ALLGATHER, 64 * KIB, "PLAN"},
    };
    config_t config;
    err_t err = {0};
    const char *const none[] = {NULL};
    assert_int_equal(config_load(&config, none, NULL, &err), HVD_OK);
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        machine_t m = machine(rows[i].ranks, rows[i].per_host);
        m.network.byte_ns = m.host.byte_ns = 0.1;
        price_t price;
        hvd_status_t status =
            simulate_operation(&m, &config, rows[i].op, rows[i].bytes, &price, &err);
        if (status != HVD_OK) {
            fail_msg("row %zu: %s", i, err.text);
        }
        assert_string_equal(price.way, rows[i].way);
        assert_true(price.agreement_ns > 0 && price.data_ns >= 0);
    }
    config_free(&config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(alone_nobody_is_asked),
        cmocka_unit_test(two_hosts),
        cmocka_unit_test(a_star),
        cmocka_unit_test(ranks_may_share_cores),
        cmocka_unit_test(the_path_is_exact_for_full_trees),
        cmocka_unit_test(the_path_is_never_too_fast),
        cmocka_unit_test(thousands_of_ranks),
        cmocka_unit_test(rounds_of_doubling),
        cmocka_unit_test(members_of_one_host_do_not_use_the_wire),
        cmocka_unit_test(long_rings_are_bound_by_the_wire),
        cmocka_unit_test(every_plan_runs),
        cmocka_unit_test(operations_take_the_ways_of_the_engine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
