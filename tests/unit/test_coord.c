// SPDX-License-Identifier: Apache-2.0
//
// Tests of src/coord and src/wire/control: one for each rule of the agreement, with the beginnings
// of the sentences users' programs look for. The many-ranks, many-orders side is in
// test_agreement_sim.c; here every case is small enough to follow by hand.
#define _GNU_SOURCE
#include "coord_world.h"

#include "wire/control.h"

#define DIMS(...)                                                                                  \
    .dims = (const int64_t[]){__VA_ARGS__}, .n_dims = N_ELEMENTS(((const int64_t[]){__VA_ARGS__}))
#define SIZES(...)                                                                                 \
    .sizes = (const int64_t[]){__VA_ARGS__}, .n_sizes = N_ELEMENTS(((const int64_t[]){__VA_ARGS__}))

static void expect_order(const world_t *world, int rank, const char *const *names, int n)
{
    int at = 0;
    for (int i = 0; i < world->n_seen[rank]; i++) {
        const seen_t *seen = &world->seen[rank][i];
        for (int k = 0; k < seen->n_entries; k++) {
            assert_true(at < n);
            assert_string_equal(seen->names[k], names[at++]);
        }
    }
    assert_int_equal(at, n);
}

static int count_runs(const world_t *world, int rank)
{
    int n = 0;
    for (int i = 0; i < world->n_seen[rank]; i++) {
        n += world->seen[rank][i].kind == DECIDE_RUN;
    }
    return n;
}

// --- Readiness ----------------------------------------------------------------------------------

static void an_entry_runs_once_all_members_have_it(void **state)
{
    (void)state;
    for (int size = 1; size <= 9; size++) {
        world_t *world = world_new(size, world_params());
        for (int round = 0; round < 3; round++) {
            uint64_t tags[WORLD_MAX_RANKS];
            for (int rank = size - 1; rank >= 0; rank--) {
                tags[rank] = submit(world, rank, (ask_t){.name = "x"});
                world_settle(world);
                assert_int_equal(world->n_seen[0] > 0, rank == 0);
            }
            for (int rank = 0; rank < size; rank++) {
                assert_ran(world, rank, tags[rank]);
                assert_int_equal(world->n_seen[rank], 1);
                assert_int_equal(world->seen[rank][0].batch, world->seen[0][0].batch);
                assert_int_equal(coord_pending(world->ranks[rank]), 0);
            }
            world_forget(world);
        }
        world_free(world);
    }
}

static void known_names_need_few_bytes(void **state)
{
    (void)state;
    world_t *world = world_new(2, world_params());
    submit(world, ALL_RANKS, (ask_t){.name = "a name of some length, as gradients have"});
    world_settle(world);
    assert_true(world->n_bytes > 80);
    world->n_bytes = 0;
    submit(world, ALL_RANKS, (ask_t){.name = "a name of some length, as gradients have"});
    world_settle(world);
    assert_true(world->n_bytes <= 2 * 16);
    // With its value.
    submit(world, ALL_RANKS, (ask_t){.name = "x", DIMS(1)});
    world_settle(world);
    world->n_bytes = 0;
    submit(world, ALL_RANKS, (ask_t){.name = "x", DIMS(1)});
    world_settle(world);
    assert_true(world->n_bytes <= 2 * (24 + 4));
    world_free(world);
}

static void a_changed_signature_is_announced_anew(void **state)
{
    (void)state;
    world_t *world = world_new(5, world_params());
    for (int64_t length = 1000; length < 1010; length++) {
        uint64_t tag = submit(world, ALL_RANKS, (ask_t){.name = "x", DIMS(length / 2)});
        world_settle(world);
        for (int rank = 0; rank < 5; rank++) {
            assert_ran(world, rank, tag);
        }
    }
    world_free(world);
}

static void submission_errors_concern_one_call(void **state)
{
    (void)state;
    world_t *world = world_new(3, world_params());
    int set;
    err_t err;
    for (int rank = 0; rank < 3; rank++) {
        assert_int_equal(coord_define_set(world->ranks[rank], (const int[]){2, 0}, 2, &set, &err),
                         HVD_OK);
        assert_int_equal(set, 1);
    }
    ask_t ask = {.name = "x"};
    submit(world, 0, ask);
    assert_int_equal(try_submit(world, 0, &ask, 9, &err), HVD_DUPLICATE_NAME);
    assert_has(err.text, "same name as another tensor that is currently being processed");
    ask.set = 17;
    assert_int_equal(try_submit(world, 0, &ask, 9, &err), HVD_UNKNOWN_SET);
    assert_starts(err.text, "Process set provided does not exist, or has not been registered.");
    ask.set = 1;
    assert_int_equal(try_submit(world, 1, &ask, 9, &err), HVD_NOT_MEMBER);
    assert_starts(err.text, "Rank 1 is not a member of the provided process set.");
    ask = (ask_t){.name = "g", .op = HVD_ALLGATHER, DIMS(-1, 3)};
    assert_int_equal(try_submit(world, 1, &ask, 9, &err), HVD_INVALID_ARGUMENT); // no sizes
    ask = (ask_t){.name = "n", DIMS(3, -1)};
    assert_int_equal(try_submit(world, 1, &ask, 9, &err), HVD_INVALID_ARGUMENT);
    // None of it did harm, and the same name in another set is another tensor.
    uint64_t tag = submit(world, 0, (ask_t){.name = "x", .set = 1});
    submit(world, 2, (ask_t){.name = "x", .set = 1});
    world_settle(world);
    assert_ran(world, 0, tag);
    assert_int_equal(world->n_seen[1], 0);
    world_free(world);
}

static void a_name_is_in_flight_until_its_batch_is_done(void **state)
{
    (void)state;
    world_t *world = world_new(2, world_params());
    err_t err;
    world->holds_batches = true;
    submit(world, ALL_RANKS, (ask_t){.name = "x"});
    world_settle(world);
    assert_int_equal(try_submit(world, 1, &(ask_t){.name = "x"}, 9, &err), HVD_DUPLICATE_NAME);
    coord_batch_done(world->ranks[1], world->seen[1][0].batch, world->now_ns);
    assert_int_equal(try_submit(world, 1, &(ask_t){.name = "x"}, 9, &err), HVD_OK);
    world_free(world);
}

// --- Mismatches ---------------------------------------------------------------------------------

typedef struct mismatch_case {
    ask_t others, odd;
    const char *start, *values; // values: of rank 0 and of the odd one
} mismatch_case_t;

static const mismatch_case_t mismatches[] = {
    {{.name = "t"},
     {.name = "t", .dtype = HVD_INT32},
     "Mismatched data types: ",
     "rank 0 submitted float32 and rank 2 int32 for tensor 't'"},
    {{.name = "t"},
     {.name = "t", .op = HVD_BROADCAST},
     "Mismatched operations: ",
     "rank 0 submitted ALLREDUCE and rank 2 BROADCAST for tensor 't'"},
    {{.name = "t"},
     {.name = "t", DIMS(7, 8)},
     "Mismatched ALLREDUCE tensor shapes: ",
     "rank 0 submitted [1000] and rank 2 [7, 8] for tensor 't'"},
    {{.name = "t", DIMS(500)},
     {.name = "t", DIMS(501)},
     "Mismatched ALLREDUCE tensor shapes: ",
     "rank 0 submitted [500] and rank 2 [501]"},
    {{.name = "t", .n_tensors = 2},
     {.name = "t", .n_tensors = 3},
     "Mismatched ALLREDUCE tensor shapes: ",
     "rank 0 submitted 2 tensors and rank 2 3 tensors"},
    {{.name = "t", .prescale = 2},
     {.name = "t", .prescale = 3},
     "Mismatched prescale and/or postscale factors: ",
     "prescale 2, postscale 1 and rank 2 prescale 3"},
    {{.name = "t"},
     {.name = "t", .postscale = 3},
     "Mismatched prescale and/or postscale factors: ",
     "postscale 3"},
    {{.name = "t"},
     {.name = "t", .reduce = HVD_MAX},
     "Mismatched reduction operation: ",
     "rank 0 submitted sum and rank 2 max"},
    {{.name = "t", .op = HVD_BROADCAST, .root = 1},
     {.name = "t", .op = HVD_BROADCAST, .root = 2},
     "Mismatched BROADCAST root ranks: ",
     "rank 0 submitted root 1 and rank 2 root 2"},
    {{.name = "t", .op = HVD_ALLGATHER, DIMS(-1, 3), SIZES(4)},
     {.name = "t", .op = HVD_ALLGATHER, DIMS(-1, 4), SIZES(4)},
     "Mismatched ALLGATHER tensor shapes: ",
     "rank 0 submitted [*, 3] and rank 2 [*, 4]"},
    {{.name = "t", .op = HVD_ALLTOALL, DIMS(-1, 3), SIZES(1, 1, 1, 1, 1)},
     {.name = "t", .op = HVD_ALLTOALL, DIMS(-1), SIZES(1, 1, 1, 1, 1)},
     "Mismatched ALLTOALL tensor shapes: ",
     "rank 0 submitted [*, 3] and rank 2 [*]"},
    // The order of checks: data types before operations before shapes.
    {{.name = "t"},
     {.name = "t", .dtype = HVD_INT32, .op = HVD_BROADCAST, DIMS(5)},
     "Mismatched data types: ",
     ""},
    {{.name = "t"},
     {.name = "t", .op = HVD_BROADCAST, DIMS(5), .prescale = 2},
     "Mismatched operations: ",
     ""},
    {{.name = "t"},
     {.name = "t", DIMS(5), .prescale = 2, .reduce = HVD_MAX},
     "Mismatched ALLREDUCE",
     ""},
};

// On every member the same sentence, the name is free again, and the job goes on.
static void mismatches_fail_on_every_member(void **state)
{
    (void)state;
    for (int known = 0; known < 2; known++) {
        for (size_t i = 0; i < N_ELEMENTS(mismatches); i++) {
            const mismatch_case_t *row = &mismatches[i];
            world_t *world = world_new(5, world_params());
            uint64_t tags[5];
            if (known) {
                submit(world, ALL_RANKS, row->others);
                world_settle(world);
            }
            for (int rank = 4; rank >= 0; rank--) {
                tags[rank] = submit(world, rank, rank == 2 ? row->odd : row->others);
            }
            world_settle(world);
            for (int rank = 0; rank < 5; rank++) {
                assert_failed(world, rank, tags[rank], HVD_MISMATCH, row->start);
                const seen_t *seen = seen_tag(world, rank, tags[rank]);
                assert_has(seen->text, row->values);
                assert_has(seen->text, "Make every rank submit the same");
                assert_string_equal(seen->text, seen_tag(world, 0, tags[0])->text);
            }
            uint64_t after = submit(world, ALL_RANKS, row->others);
            world_settle(world);
            for (int rank = 0; rank < 5; rank++) {
                assert_ran(world, rank, after);
            }
            world_free(world);
        }
    }
}

// Whatever the order of arrival, the two lowest ranks that differ are named.
static void the_lowest_ranks_are_named(void **state)
{
    static const int orders[][6] = {{0, 1, 2, 3, 4, 5}, {5, 4, 3, 2, 1, 0}, {3, 0, 5, 2, 4, 1}};
    static const hvd_dtype_t dtypes[6] = {HVD_INT64, HVD_INT64, HVD_INT8,
                                          HVD_INT32, HVD_INT8,  HVD_FLOAT64};
    (void)state;
    for (size_t order = 0; order < N_ELEMENTS(orders); order++) {
        for (int arity = 1; arity <= 5; arity += 2) {
            int parent[6];
            tree_of_arity(parent, 6, arity);
            world_t *world = world_new_tree(6, parent, world_params());
            for (int i = 0; i < 6; i++) {
                int rank = orders[order][i];
                submit(world, rank, (ask_t){.name = "t", .dtype = dtypes[rank]});
                world_settle(world);
            }
            assert_has(world->seen[4][0].text,
                       "rank 0 submitted int64 and rank 2 int8 for tensor 't'");
            world_free(world);
        }
    }
}

static void scalars_cannot_be_gathered(void **state)
{
    const struct {
        ask_t ask;
        const char *start;
    } rows[] = {
        {{.name = "t", .op = HVD_ALLGATHER, .is_scalar = true, SIZES(1)},
         "Process-set rank zero tried to ALLGATHER a rank-zero tensor."},
        {{.name = "t", .op = HVD_ALLTOALL, .is_scalar = true, SIZES(1, 1, 1)},
         "Process-set rank zero tried to ALLTOALL a rank-zero tensor."},
        {{.name = "t", .op = HVD_REDUCESCATTER, .is_scalar = true},
         "Process-set rank zero tried to REDUCESCATTER a rank-zero tensor."},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        world_t *world = world_new(3, world_params());
        uint64_t tag = submit(world, ALL_RANKS, rows[i].ask);
        world_settle(world);
        assert_failed(world, 2, tag, HVD_MISMATCH, rows[i].start);
        world_free(world);
    }
}

// --- Sizes --------------------------------------------------------------------------------------

static void sizes_of_all_members_reach_all(void **state)
{
    (void)state;
    world_t *world = world_new(7, world_params());
    size_t bytes[4];
    for (int round = 0; round < 4; round++) {
        world_forget(world);
        world->n_bytes = 0;
        // Rounds 0 and 1 alike, then one rank changes, then all.
        for (int rank = 6; rank >= 0; rank--) {
            int64_t rows = round == 3 ? 100 + rank : round == 2 && rank == 4 ? 77 : 10 * rank;
            submit(world, rank,
                   (ask_t){.name = "g", .op = HVD_ALLGATHER, DIMS(-1, 3), SIZES(rows)});
        }
        world_settle(world);
        bytes[round] = world->n_bytes;
        for (int rank = 0; rank < 7; rank++) {
            const seen_t *seen = &world->seen[rank][0];
            assert_int_equal(seen->n_sizes, 7);
            for (int member = 0; member < 7; member++) {
                int64_t rows = round == 3                  ? 100 + member
                               : round == 2 && member == 4 ? 77
                                                           : 10 * member;
                assert_int_equal(seen->sizes[member], rows);
            }
        }
    }
    assert_true(bytes[1] < bytes[2] && bytes[2] < bytes[3] && bytes[3] < bytes[0]);
    world_free(world);
}

static void splits_of_all_members_reach_all(void **state)
{
    (void)state;
    world_t *world = world_new(3, world_params());
    for (int rank = 0; rank < 3; rank++) {
        submit(
            world, rank,
            (ask_t){.name = "a", .op = HVD_ALLTOALL, DIMS(-1), SIZES(rank, 10 + rank, 20 + rank)});
    }
    world_settle(world);
    for (int rank = 0; rank < 3; rank++) {
        for (int i = 0; i < 9; i++) {
            assert_int_equal(world->seen[rank][0].sizes[i], i % 3 * 10 + i / 3);
        }
    }
    world_free(world);
}

// --- Values that ride along ---------------------------------------------------------------------

// The first element of the i-th entry's result.
static double value_of(const seen_t *seen, int i)
{
    double wide;
    int64_t whole;
    int32_t small;
    float single;
    switch (seen->signature.dtype) {
    case HVD_FLOAT64:
        memcpy(&wide, seen->results[i], sizeof wide);
        return wide;
    case HVD_INT64:
        memcpy(&whole, seen->results[i], sizeof whole);
        return (double)whole;
    case HVD_INT32:
        memcpy(&small, seen->results[i], sizeof small);
        return small;
    default:
        memcpy(&single, seen->results[i], sizeof single);
        return single;
    }
}

static double first_value(const seen_t *seen)
{
    return value_of(seen, 0);
}

// Two hosts of two ranks: 0 and 1, 2 and 3.
static const int two_hosts[] = {-1, 0, 0, 2};

static void submit_values(world_t *world, const int *ranks, int n)
{
    for (int i = 0; i < n; i++) {
        submit(world, ranks[i], (ask_t){.name = "x", DIMS(3), .value = 1 << ranks[i]});
        world_settle(world);
    }
}

// In whichever order ranks come, all get the sum, each once; and if the far host comes last, or
// while the offer is on its way, without a record.
static void halves_of_a_job_meet_half_way(void **state)
{
    static const struct {
        int order[4];
        bool meets;
    } rows[] = {{{0, 1, 2, 3}, true},
                {{1, 0, 3, 2}, true},
                {{2, 0, 1, 3}, true},
                {{2, 3, 0, 1}, false},
                {{0, 2, 3, 1}, false}};
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        world_t *world = world_new_tree(4, two_hosts, world_params());
        submit_values(world, (const int[]){0, 1, 2, 3}, 4); // the first time it is a new name
        for (int round = 0; round < 3; round++) {
            world_forget(world);
            submit_values(world, rows[i].order, 4);
            for (int rank = 0; rank < 4; rank++) {
                assert_int_equal(world->n_seen[rank], 1);
                assert_true(first_value(&world->seen[rank][0]) == 15);
                assert_true((world->seen[rank][0].batch == COORD_NO_BATCH) == rows[i].meets);
            }
        }
        world_free(world);
    }
}

// The far host answers an offer with something else: the record that follows counts.
static void an_offer_may_be_answered_otherwise(void **state)
{
    (void)state;
    world_t *world = world_new_tree(4, two_hosts, world_params());
    submit_values(world, (const int[]){0, 1, 2, 3}, 4);
    world_forget(world);
    submit_values(world, (const int[]){0, 1, 3}, 3); // offered
    uint64_t odd = submit(world, 2, (ask_t){.name = "x", DIMS(4), .value = 1});
    world_settle(world);
    assert_failed(world, 2, odd, HVD_MISMATCH, "Mismatched ALLREDUCE tensor shapes: ");
    assert_int_equal(world->seen[0][0].status, HVD_MISMATCH);
    // The name is free, and the offer forgotten.
    world_forget(world);
    submit_values(world, (const int[]){3, 1, 0, 2}, 4);
    assert_true(first_value(&world->seen[3][0]) == 15);
    // Or it joins.
    world_forget(world);
    submit_values(world, (const int[]){0, 1, 3}, 3);
    submit(world, 2, (ask_t){.name = "join", .op = HVD_JOIN});
    world_settle(world);
    assert_true(first_value(&world->seen[0][0]) == 11);
    assert_true(first_value(&world->seen[3][0]) == 11);
    assert_int_not_equal(world->seen[0][0].batch, COORD_NO_BATCH);
    world_free(world);
}

static void small_allreduces_are_done_by_the_agreement(void **state)
{
    static const struct {
        hvd_reduce_t reduce;
        double expected; // of 2, 3, 4, 5, 6
    } rows[] = {{HVD_SUM, 20}, {HVD_MIN, 2}, {HVD_MAX, 6}, {HVD_PRODUCT, 720}};
    static const hvd_dtype_t dtypes[] = {HVD_INT32,    HVD_INT64,   HVD_FLOAT16,
                                         HVD_BFLOAT16, HVD_FLOAT32, HVD_FLOAT64};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        for (size_t t = 0; t < N_ELEMENTS(dtypes); t++) {
            world_t *world = world_new(5, world_params());
            world->holds_batches = true; // such batches need no coord_batch_done
            for (int round = 0; round < 4; round++) {
                world_forget(world);
                for (int rank = 0; rank < 5; rank++) {
                    submit(world, rank,
                           (ask_t){.name = "x",
                                   DIMS(3),
                                   .reduce = rows[i].reduce,
                                   .dtype = dtypes[t],
                                   .value = rank + 2});
                }
                world_settle(world);
                for (int rank = 0; rank < 5; rank++) {
                    const seen_t *seen = &world->seen[rank][0];
                    assert_int_equal(seen->result_bytes, 3 * MAX(4, hvd_dtype_bytes(dtypes[t])));
                    assert_true(first_value(seen) == rows[i].expected);
                }
            }
            world_free(world);
        }
    }
}

static void what_rides_is_a_matter_of_the_signature(void **state)
{
    coord_params_t params = world_params();
    int64_t words[] = {1, 16};
    signature_t signature = {.op = HVD_ALLREDUCE,
                             .dtype = HVD_FLOAT16,
                             .reduce = HVD_SUM,
                             .prescale = 1,
                             .postscale = 1,
                             .n_tensors = 1,
                             .dims = words,
                             .n_dims_words = 2};
    size_t bytes = 0;
    (void)state;
    world_t *world = world_new(1, params);
    assert_true(signature_rides(&signature, params.inline_bytes, &bytes));
    assert_int_equal(bytes, 64); // accumulators of half types are float32
    words[1] = 17;
    assert_false(signature_rides(&signature, params.inline_bytes, &bytes));
    words[1] = INT64_MAX;
    assert_false(signature_rides(&signature, params.inline_bytes, &bytes));
    words[1] = 1;
    signature.reduce = HVD_ADASUM;
    assert_false(signature_rides(&signature, params.inline_bytes, &bytes));
    signature.reduce = HVD_SUM;
    signature.op = HVD_REDUCESCATTER;
    assert_true(signature_rides(&signature, params.inline_bytes, &bytes));
    assert_int_equal(bytes, 4);
    signature.op = HVD_BROADCAST;
    assert_true(signature_rides(&signature, params.inline_bytes, &bytes));
    assert_int_equal(bytes, 2); // as they are: nothing is added to them but zeros
    signature.op = HVD_ALLGATHER;
    assert_false(signature_rides(&signature, params.inline_bytes, &bytes));
    world_free(world);
    params.inline_bytes = 0;
    world = world_new(1, params);
    signature.op = HVD_ALLREDUCE;
    assert_false(signature_rides(&signature, params.inline_bytes, &bytes));
    world_free(world);
}

// float32 sums depend on their order: with one tree, never on the order of arrival.
static void the_order_of_reduction_is_fixed(void **state)
{
    static const int orders[][4] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {2, 0, 3, 1}};
    static const double values[4] = {1e8, 1.5, -1e8, 0.25};
    double results[N_ELEMENTS(orders)];
    (void)state;
    for (size_t order = 0; order < N_ELEMENTS(orders); order++) {
        int parent[4] = {-1, 0, 0, 0};
        world_t *world = world_new_tree(4, parent, world_params());
        for (int i = 0; i < 4; i++) {
            int rank = orders[order][i];
            submit(world, rank, (ask_t){.name = "x", DIMS(1), .value = values[rank]});
            world_settle(world);
        }
        results[order] = first_value(&world->seen[3][0]);
        world_free(world);
        assert_true(results[order] == results[0]);
    }
    assert_true(results[0] == (double)((float)((1e8f + 1.5f) - 1e8f) + 0.25f));
}

static void a_barrier_is_over_once_agreed(void **state)
{
    (void)state;
    world_t *world = world_new(4, world_params());
    world->holds_batches = true;
    for (int round = 0; round < 4; round++) {
        uint64_t tag = submit(world, ALL_RANKS, (ask_t){.name = "b", .op = HVD_BARRIER});
        world_settle(world);
        assert_ran(world, 3, tag);
        assert_non_null(seen_tag(world, 3, tag)->results[0]);
    }
    world_free(world);
}

// --- Batches ------------------------------------------------------------------------------------

static void what_comes_together_is_fused(void **state)
{
    (void)state;
    world_t *world = world_new(3, world_params());
    for (int round = 0; round < 2; round++) {
        world_forget(world);
        submit(world, ALL_RANKS, (ask_t){.name = "a"});
        submit(world, ALL_RANKS, (ask_t){.name = "i", .dtype = HVD_INT32});
        submit(world, ALL_RANKS, (ask_t){.name = "b", DIMS(20, 30)});
        submit(world, ALL_RANKS, (ask_t){.name = "m", .reduce = HVD_MAX});
        submit(world, ALL_RANKS, (ask_t){.name = "c"});
        submit(world, ALL_RANKS, (ask_t){.name = "s", .prescale = 2});
        submit(world, ALL_RANKS, (ask_t){.name = "j", .dtype = HVD_INT32});
        world_settle(world);
        // In order of completion, looking past what does not fit.
        static const char *const order[] = {"a", "b", "c", "i", "j", "m", "s"};
        for (int rank = 0; rank < 3; rank++) {
            expect_order(world, rank, order, 7);
            assert_int_equal(world->seen[rank][0].n_entries, 3);
            assert_int_equal(count_runs(world, rank), 4);
        }
    }
    world_free(world);
}

typedef struct fusion_case {
    ask_t ask;
    int n_batches; // of four such entries
} fusion_case_t;

static void operations_fuse_by_their_kind(void **state)
{
    const fusion_case_t rows[] = {
        {{.op = HVD_ALLREDUCE}, 1},
        {{.op = HVD_ALLREDUCE, .reduce = HVD_ADASUM}, 4},
        {{.op = HVD_ALLGATHER, DIMS(-1, 9), SIZES(5)}, 1},
        {{.op = HVD_BROADCAST}, 1},
        {{.op = HVD_ALLTOALL, DIMS(-1), SIZES(2, 2)}, 4},
        {{.op = HVD_REDUCESCATTER}, 1},
        {{.op = HVD_ALLREDUCE, .n_tensors = 2}, 1},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        world_t *world = world_new(2, world_params());
        for (int k = 0; k < 4; k++) {
            ask_t ask = rows[i].ask;
            char name[16];
            snprintf(name, sizeof name, "t%d", k);
            ask.name = name;
            submit(world, ALL_RANKS, ask);
        }
        world_settle(world);
        assert_int_equal(count_runs(world, 1), rows[i].n_batches);
        world_free(world);
    }
}

static void fusion_keeps_to_its_limits(void **state)
{
    static const struct {
        size_t fusion_bytes;
        bool separate_groups;
        int n_tensors, n_batches; // of six entries of n_tensors * 4000 bytes
    } rows[] = {{0, false, 1, 6},      {4000, false, 1, 6},  {7999, false, 1, 6},
                {8000, false, 1, 3},   {12000, false, 1, 2}, {100000, false, 1, 1},
                {100000, false, 2, 1}, {100000, true, 1, 1}, {100000, true, 2, 6},
                {100, false, 1, 6}};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        coord_params_t params = world_params();
        params.fusion_bytes = rows[i].fusion_bytes;
        params.separate_groups = rows[i].separate_groups;
        world_t *world = world_new(2, params);
        for (int k = 0; k < 6; k++) {
            char name[16];
            snprintf(name, sizeof name, "t%d", k);
            submit(world, ALL_RANKS, (ask_t){.name = name, .n_tensors = rows[i].n_tensors});
        }
        world_settle(world);
        assert_int_equal(count_runs(world, 1), rows[i].n_batches);
        world_free(world);
    }
}

// Two run; what comes meanwhile is one batch, once there is room.
static void two_batches_run_at_a_time(void **state)
{
    (void)state;
    world_t *world = world_new(2, world_params());
    world->holds_batches = true;
    static const char *const names[] = {"a", "b", "c", "d", "e"};
    for (int i = 0; i < 5; i++) {
        submit(world, ALL_RANKS, (ask_t){.name = names[i]});
        world_settle(world);
    }
    assert_int_equal(count_runs(world, 1), 2);
    coord_batch_done(world->ranks[1], world->seen[1][0].batch, world->now_ns);
    world_settle(world);
    assert_int_equal(count_runs(world, 1), 2); // rank 0 keeps the clock
    coord_batch_done(world->ranks[0], world->seen[0][0].batch, world->now_ns);
    world_settle(world);
    assert_int_equal(count_runs(world, 1), 3);
    expect_order(world, 1, names, 5);
    world_free(world);
}

// Batches the sequencer has no part in neither wait for its own nor count.
static void other_sets_do_not_wait_for_the_sequencer(void **state)
{
    (void)state;
    world_t *world = world_new(4, world_params());
    int set;
    for (int rank = 0; rank < 4; rank++) {
        coord_define_set(world->ranks[rank], (const int[]){1, 3}, 2, &set, NULL);
    }
    world->holds_batches = true;
    static const char *const names[] = {"a", "b", "c", "d"};
    for (int i = 0; i < 3; i++) {
        submit(world, ALL_RANKS, (ask_t){.name = names[i]});
        world_settle(world);
    }
    assert_int_equal(count_runs(world, 3), 2);
    for (int i = 0; i < 4; i++) {
        submit(world, 1, (ask_t){.name = names[i], .set = set});
        submit(world, 3, (ask_t){.name = names[i], .set = set});
        world_settle(world);
    }
    assert_int_equal(count_runs(world, 3), 6);
    assert_int_equal(count_runs(world, 2), 2);
    world_free(world);
}

static void a_cycle_time_holds_batches_back(void **state)
{
    coord_params_t params = world_params();
    (void)state;
    params.cycle_ns = NS_PER_MS;
    params.fusion_bytes = 12000;
    world_t *world = world_new(2, params);
    assert_true(coord_next_tick(world->ranks[0]) == NEVER_NS);
    submit(world, ALL_RANKS, (ask_t){.name = "a"});
    world_settle(world);
    assert_int_equal(count_runs(world, 1), 0);
    assert_true(coord_next_tick(world->ranks[0]) == world->now_ns + NS_PER_MS);
    world_tick(world, NS_PER_MS / 2);
    submit(world, ALL_RANKS, (ask_t){.name = "b"});
    world_settle(world);
    assert_int_equal(count_runs(world, 1), 0);
    world_tick(world, NS_PER_MS / 2);
    assert_int_equal(count_runs(world, 1), 1);
    assert_int_equal(world->seen[1][0].n_entries, 2);
    // A full buffer does not wait.
    submit(world, ALL_RANKS, (ask_t){.name = "a"});
    submit(world, ALL_RANKS, (ask_t){.name = "b"});
    submit(world, ALL_RANKS, (ask_t){.name = "c"});
    world_settle(world);
    assert_int_equal(count_runs(world, 1), 2);
    world_free(world);
}

// Frameworks submit in different orders and wait for single tensors.
static void orders_may_differ(void **state)
{
    (void)state;
    world_t *world = world_new(2, world_params());
    uint64_t x0 = submit(world, 0, (ask_t){.name = "x"});
    uint64_t y0 = submit(world, 0, (ask_t){.name = "y"});
    uint64_t y1 = submit(world, 1, (ask_t){.name = "y"});
    world_settle(world);
    assert_ran(world, 0, y0);
    assert_ran(world, 1, y1);
    uint64_t x1 = submit(world, 1, (ask_t){.name = "x"});
    world_settle(world);
    assert_ran(world, 0, x0);
    assert_ran(world, 1, x1);
    world_free(world);
}

// --- The cache ----------------------------------------------------------------------------------

static void ids_are_evicted_and_given_again(void **state)
{
    static const int capacities[] = {0, 1, 2, 3, 7};
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(capacities); i++) {
        coord_params_t params = world_params();
        params.cache_capacity = capacities[i];
        params.fusion_bytes = 8000;
        world_t *world = world_new(6, params);
        for (int round = 0; round < 5; round++) {
            uint64_t tags[6];
            for (int k = 0; k < 6; k++) {
                char name[16];
                snprintf(name, sizeof name, "t%d", (k * 5 + round) % 6);
                tags[k] = submit(world, ALL_RANKS, (ask_t){.name = name});
            }
            world_settle(world);
            for (int k = 0; k < 6; k++) {
                assert_ran(world, 5, tags[k]);
            }
        }
        world_free(world);
    }
}

// A READY that is under way while its id is evicted counts, once. What evicts it is a tensor the
// sender has no part in; otherwise the sender would have spoken of it first.
static void a_ready_crossing_its_eviction_counts_once(void **state)
{
    const ask_t old = {.name = "old", .op = HVD_ALLGATHER, DIMS(-1), SIZES(3)};
    int parent[3] = {-1, 0, 1}; // a chain: both the edge 2-1 and the edge 1-0 see the race
    (void)state;
    for (int hops = 0; hops <= 2; hops++) {
        coord_params_t params = world_params();
        params.cache_capacity = 1;
        world_t *world = world_new_tree(3, parent, params);
        int alone;
        for (int rank = 0; rank < 3; rank++) {
            assert_int_equal(
                coord_define_set(world->ranks[rank], (const int[]){0}, 1, &alone, NULL), HVD_OK);
        }
        submit(world, ALL_RANKS, old);
        world_settle(world);
        // Ranks 1 and 2 are ready for "old" under its id; the line gets `hops` edges far.
        uint64_t tag = submit(world, 2, old);
        submit(world, 1, old);
        for (int hop = 0; hop < hops; hop++) {
            world_move(world, 2 - hop, 0);
        }
        // Rank 0 gives the seat in the cache to a tensor of its own.
        submit(world, 0, (ask_t){.name = "new", .set = alone});
        world_decide(world, 0);
        world_settle(world);
        assert_null(seen_tag(world, 2, tag));
        ask_t changed = old;
        changed.sizes = (const int64_t[]){4};
        submit(world, 0, changed);
        world_settle(world);
        const seen_t *seen = seen_tag(world, 2, tag);
        assert_non_null(seen);
        assert_int_equal(seen->kind, DECIDE_RUN);
        assert_int_equal(seen->sizes[0], 4);
        assert_int_equal(seen->sizes[1], 3);
        assert_int_equal(seen->sizes[2], 3);
        for (int rank = 0; rank < 3; rank++) {
            assert_int_equal(coord_counters(world->ranks[rank]).n_stale_lines, 0);
        }
        world_free(world);
    }
}

// --- Join ---------------------------------------------------------------------------------------

static void joined_ranks_take_part_with_zeros(void **state)
{
    (void)state;
    for (int joiner = 0; joiner < 4; joiner++) {
        world_t *world = world_new(4, world_params());
        uint64_t join = submit(world, joiner, (ask_t){.name = "join", .op = HVD_JOIN});
        world_settle(world);
        for (int rank = 0; rank < 4; rank++) {
            if (rank != joiner) {
                submit(world, rank, (ask_t){.name = "large"});
                submit(world, rank, (ask_t){.name = "sum", DIMS(1), .value = 5});
                submit(world, rank, (ask_t){.name = "min", DIMS(1), .value = 5, .reduce = HVD_MIN});
                submit(world, rank, (ask_t){.name = "b", .op = HVD_BARRIER});
            }
        }
        world_settle(world);
        for (int rank = 0; rank < 4; rank++) {
            int n_found = 0;
            for (int i = 0; i < world->n_seen[rank]; i++) {
                const seen_t *seen = &world->seen[rank][i];
                assert_int_equal(seen->tags[0] == 0, rank == joiner);
                for (int k = 0; k < seen->n_entries; k++, n_found++) {
                    if (strcmp(seen->names[k], "sum") == 0) {
                        assert_true(value_of(seen, k) == 15);
                    }
                    if (strcmp(seen->names[k], "min") == 0) {
                        assert_true(value_of(seen, k) == 0);
                    }
                }
            }
            assert_int_equal(n_found, 4);
        }
        assert_null(seen_tag(world, joiner, join));
        world_free(world);
    }
}

static void join_ends_when_all_have_joined(void **state)
{
    (void)state;
    world_t *world = world_new(5, world_params());
    for (int round = 0; round < 3; round++) {
        uint64_t tags[5];
        world_forget(world);
        // Rank 4 is last, with a tensor nobody else has.
        for (int rank = 0; rank < 4; rank++) {
            tags[rank] = submit(world, rank, (ask_t){.name = "join", .op = HVD_JOIN});
        }
        world_settle(world);
        uint64_t alone = submit(world, 4, (ask_t){.name = "alone"});
        tags[4] = submit(world, 4, (ask_t){.name = "join", .op = HVD_JOIN});
        world_settle(world);
        for (int rank = 0; rank < 5; rank++) {
            const seen_t *seen = seen_tag(world, rank, tags[rank]);
            assert_non_null(seen);
            assert_int_equal(seen->kind, DECIDE_JOINED);
            assert_int_equal(seen->last_joined, 4);
            assert_ptr_equal(seen, &world->seen[rank][world->n_seen[rank] - 1]);
            assert_int_equal(coord_pending(world->ranks[rank]), 0);
        }
        assert_ran(world, 4, alone);
        // Everything is as before.
        uint64_t after = submit(world, ALL_RANKS, (ask_t){.name = "x", DIMS(1), .value = 1});
        world_settle(world);
        assert_true(first_value(seen_tag(world, 0, after)) == 5);
    }
    world_free(world);
}

static void a_submission_before_joining_counts(void **state)
{
    (void)state;
    world_t *world = world_new(3, world_params());
    uint64_t min = submit(world, 2, (ask_t){.name = "min", DIMS(1), .value = 7, .reduce = HVD_MIN});
    uint64_t gather =
        submit(world, 2, (ask_t){.name = "g", .op = HVD_ALLGATHER, DIMS(-1), SIZES(2)});
    submit(world, 2, (ask_t){.name = "join", .op = HVD_JOIN});
    world_settle(world);
    for (int rank = 0; rank < 2; rank++) {
        submit(world, rank, (ask_t){.name = "min", DIMS(1), .value = 9, .reduce = HVD_MIN});
        submit(world, rank, (ask_t){.name = "g", .op = HVD_ALLGATHER, DIMS(-1), SIZES(2)});
    }
    world_settle(world);
    assert_true(first_value(seen_tag(world, 2, min)) == 7); // nobody contributed zeros
    assert_ran(world, 2, gather);
    world_free(world);
}

static void other_operations_fail_while_ranks_have_joined(void **state)
{
    const struct {
        ask_t ask;
        const char *start;
    } rows[] = {
        {{.name = "t", .op = HVD_ALLGATHER, DIMS(-1), SIZES(1)},
         "Allgather is not supported with Join at this time."},
        {{.name = "t", .op = HVD_BROADCAST}, "Broadcast is not supported with Join at this time."},
        {{.name = "t", .op = HVD_ALLTOALL, DIMS(-1), SIZES(1, 1, 1, 1, 1)},
         "Alltoall is not supported with Join at this time."},
        {{.name = "t", .op = HVD_REDUCESCATTER},
         "Reducescatter is not supported with Join at this time."},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        for (int known = 0; known < 2; known++) {
            world_t *world = world_new(5, world_params());
            if (known) {
                submit(world, ALL_RANKS, rows[i].ask);
                world_settle(world);
            }
            submit(world, 3, (ask_t){.name = "join", .op = HVD_JOIN});
            world_settle(world);
            uint64_t tags[5] = {0};
            for (int rank = 0; rank < 5; rank++) {
                if (rank != 3) {
                    tags[rank] = submit(world, rank, rows[i].ask);
                }
            }
            int n_before = world->n_seen[3];
            world_settle(world);
            for (int rank = 0; rank < 5; rank++) {
                if (rank != 3) {
                    assert_failed(world, rank, tags[rank], HVD_JOINED, rows[i].start);
                }
            }
            assert_int_equal(world->n_seen[3], n_before);
            world_free(world);
        }
    }
}

// A set may come to be after some of its members have joined.
static void joined_ranks_take_part_in_new_sets(void **state)
{
    (void)state;
    for (int joiner = 0; joiner < 4; joiner++) {
        world_t *world = world_new(4, world_params());
        coord_add_set(world->ranks[joiner], (const int[]){1, joiner == 0 ? 0 : 2, 3}, 3, 80,
                      world->now_ns, NULL);
        submit(world, joiner, (ask_t){.name = "join", .op = HVD_JOIN});
        world_settle(world);
        for (int rank = 0; rank < 4; rank++) {
            if (rank != joiner) {
                coord_add_set(world->ranks[rank], (const int[]){1, joiner == 0 ? 0 : 2, 3}, 3, 80,
                              world->now_ns, NULL);
            }
        }
        world_settle(world);
        int set = seen_tag(world, joiner, 80)->set;
        assert_int_equal(seen_tag(world, joiner, 80)->kind, DECIDE_SET_ADDED);
        uint64_t tag = 0;
        for (int rank = 1; rank < 4; rank++) {
            if (rank != joiner && (rank != 2 || joiner != 0)) {
                tag = submit(world, rank, (ask_t){.name = "x", .set = set, DIMS(1), .value = 1});
            }
        }
        world_settle(world);
        assert_true(first_value(seen_tag(world, joiner == 3 ? 2 : 3, tag)) == 2);
        world_free(world);
    }
}

static void joined_ranks_cannot_submit(void **state)
{
    (void)state;
    world_t *world = world_new(2, world_params());
    err_t err;
    submit(world, 1, (ask_t){.name = "join", .op = HVD_JOIN});
    assert_int_equal(try_submit(world, 1, &(ask_t){.name = "x"}, 9, &err), HVD_JOINED);
    assert_int_equal(try_submit(world, 1, &(ask_t){.name = "j", .op = HVD_JOIN}, 9, &err),
                     HVD_DUPLICATE_NAME);
    assert_int_equal(try_submit(world, 0, &(ask_t){.name = "j", .op = HVD_JOIN, .set = 1}, 9, &err),
                     HVD_INVALID_ARGUMENT);
    world_free(world);
}

// --- Process sets -------------------------------------------------------------------------------

static uint64_t change_set(world_t *world, const int *ranks, int n_ranks, int removed)
{
    uint64_t tag = ++world->next_tag;
    err_t err;
    for (int rank = 0; rank < world->size; rank++) {
        hvd_status_t status =
            ranks != NULL
                ? coord_add_set(world->ranks[rank], ranks, n_ranks, tag, world->now_ns, &err)
                : coord_remove_set(world->ranks[rank], removed, tag, world->now_ns, &err);
        if (status != HVD_OK) {
            fail_msg("%s", err.text);
        }
        world_settle(world);
    }
    return tag;
}

static int added_id(const world_t *world, uint64_t tag)
{
    int id = seen_tag(world, 0, tag)->set;
    for (int rank = 0; rank < world->size; rank++) {
        const seen_t *seen = seen_tag(world, rank, tag);
        assert_non_null(seen);
        assert_int_equal(seen->kind, DECIDE_SET_ADDED);
        assert_int_equal(seen->set, id);
    }
    return id;
}

static void sets_come_and_go_alike_on_all_ranks(void **state)
{
    (void)state;
    world_t *world = world_new(5, world_params());
    int a = added_id(world, change_set(world, (const int[]){3, 1}, 2, 0));
    int b = added_id(world, change_set(world, (const int[]){0, 1, 4}, 3, 0));
    int c = added_id(world, change_set(world, (const int[]){2}, 1, 0));
    assert_true(a == 1 && b == 2 && c == 3);
    uint64_t tags[5] = {0};
    for (int rank = 1; rank < 5; rank += 2) {
        tags[rank] = submit(world, rank, (ask_t){.name = "x", .set = a, DIMS(1), .value = rank});
    }
    uint64_t alone = submit(world, 2, (ask_t){.name = "x", .set = c});
    world_settle(world);
    assert_true(first_value(seen_tag(world, 3, tags[3])) == 4);
    assert_ran(world, 2, alone);
    int n;
    const int *ranks = coord_set_ranks(world->ranks[2], a, &n);
    assert_int_equal(n, 2);
    assert_true(ranks[0] == 1 && ranks[1] == 3);
    assert_int_equal(coord_set_count(world->ranks[4]), 4);
    // Freed ids are used again, the one free for longest first.
    uint64_t removed = change_set(world, NULL, 0, b);
    assert_int_equal(seen_tag(world, 3, removed)->kind, DECIDE_SET_REMOVED);
    assert_int_equal(seen_tag(world, 3, removed)->set, b);
    change_set(world, NULL, 0, a);
    assert_null(coord_set_ranks(world->ranks[2], a, &n));
    assert_int_equal(coord_set_count(world->ranks[4]), 2);
    assert_int_equal(coord_set_id(world->ranks[4], 1), c);
    assert_int_equal(added_id(world, change_set(world, (const int[]){0, 1}, 2, 0)), b);
    assert_int_equal(added_id(world, change_set(world, (const int[]){3, 1}, 2, 0)), a);
    assert_int_equal(added_id(world, change_set(world, (const int[]){0, 4}, 2, 0)), 4);
    uint64_t tag = submit(world, 0, (ask_t){.name = "x", .set = b});
    submit(world, 1, (ask_t){.name = "x", .set = b});
    world_settle(world);
    assert_ran(world, 0, tag);
    world_free(world);
}

static void sets_are_checked_where_they_are_asked_for(void **state)
{
    coord_params_t params = world_params();
    err_t err;
    (void)state;
    world_t *world = world_new(3, params);
    coord_t *coord = world->ranks[1];
    change_set(world, (const int[]){0, 2}, 2, 0);
    assert_int_equal(coord_add_set(coord, (const int[]){2, 0}, 2, 9, 0, &err), HVD_EXISTING_SET);
    assert_int_equal(coord_add_set(coord, (const int[]){2, 1, 0}, 3, 9, 0, &err), HVD_EXISTING_SET);
    assert_int_equal(coord_add_set(coord, (const int[]){1, 1}, 2, 9, 0, &err),
                     HVD_INVALID_ARGUMENT);
    assert_int_equal(coord_add_set(coord, (const int[]){1, 3}, 2, 9, 0, &err),
                     HVD_INVALID_ARGUMENT);
    assert_int_equal(coord_add_set(coord, NULL, 0, 9, 0, &err), HVD_INVALID_ARGUMENT);
    assert_int_equal(coord_remove_set(coord, 0, 9, 0, &err), HVD_INVALID_ARGUMENT);
    assert_int_equal(coord_remove_set(coord, 5, 9, 0, &err), HVD_UNKNOWN_SET);
    world_free(world);
    params.dynamic_sets = false;
    world = world_new(2, params);
    assert_int_equal(coord_add_set(world->ranks[0], (const int[]){1}, 1, 9, 0, &err),
                     HVD_STATIC_SETS);
    assert_int_equal(coord_remove_set(world->ranks[0], 1, 9, 0, &err), HVD_STATIC_SETS);
    int id;
    assert_int_equal(coord_define_set(world->ranks[0], (const int[]){1}, 1, &id, &err), HVD_OK);
    assert_int_equal(id, 1);
    assert_int_equal(coord_define_set(world->ranks[0], (const int[]){1}, 1, &id, &err),
                     HVD_EXISTING_SET);
    world_free(world);
}

static void different_sets_are_a_mismatch(void **state)
{
    (void)state;
    world_t *world = world_new(3, world_params());
    for (int rank = 0; rank < 3; rank++) {
        coord_add_set(world->ranks[rank], (const int[]){0, rank == 1 ? 2 : 1}, 2, 50, world->now_ns,
                      NULL);
    }
    world_settle(world);
    for (int rank = 0; rank < 3; rank++) {
        assert_failed(world, rank, 50, HVD_MISMATCH, "Mismatched process sets: ");
        assert_has(seen_tag(world, rank, 50)->text, "rank 0 submitted [0, 1] and rank 1 [0, 2]");
    }
    assert_int_equal(added_id(world, change_set(world, (const int[]){0, 1}, 2, 0)), 1);
    for (int rank = 0; rank < 3; rank++) {
        if (rank == 2) {
            coord_remove_set(world->ranks[rank], 1, 51, world->now_ns, NULL);
        } else {
            coord_add_set(world->ranks[rank], (const int[]){0, 2}, 2, 51, world->now_ns, NULL);
        }
    }
    world_settle(world);
    assert_failed(world, 1, 51, HVD_MISMATCH, "Mismatched operations: ");
    world_free(world);
}

static void removing_a_set_fails_what_waits_in_it(void **state)
{
    (void)state;
    world_t *world = world_new(4, world_params());
    int set = added_id(world, change_set(world, (const int[]){0, 1, 3}, 3, 0));
    uint64_t waiting = submit(world, 3, (ask_t){.name = "x", .set = set});
    submit(world, 1, (ask_t){.name = "y", .set = set});
    world_settle(world);
    change_set(world, NULL, 0, set);
    assert_failed(world, 3, waiting, HVD_UNKNOWN_SET,
                  "Process set 1 was removed while tensor 'x' waited");
    assert_int_equal(coord_pending(world->ranks[3]), 0);
    int again = added_id(world, change_set(world, (const int[]){0, 3}, 2, 0));
    assert_int_equal(again, set);
    submit(world, 3, (ask_t){.name = "y", .set = again});
    world_settle(world);
    assert_int_equal(coord_pending(world->ranks[3]), 1); // the old set's y does not count
    uint64_t tag = submit(world, 0, (ask_t){.name = "y", .set = again});
    world_settle(world);
    assert_ran(world, 0, tag);
    world_free(world);
}

// Submitted after this rank agreed to the removal, but before it happened: the line comes too late.
static void late_lines_for_a_removed_set_are_dropped(void **state)
{
    (void)state;
    world_t *world = world_new(4, world_params());
    int set = added_id(world, change_set(world, (const int[]){0, 1, 3}, 3, 0));
    uint64_t known = submit(world, 0, (ask_t){.name = "known", .set = set});
    submit(world, 1, (ask_t){.name = "known", .set = set});
    submit(world, 3, (ask_t){.name = "known", .set = set});
    world_settle(world);
    assert_ran(world, 0, known);
    for (int rank = 0; rank < 4; rank++) {
        coord_remove_set(world->ranks[rank], set, 70, world->now_ns, NULL);
    }
    for (int rank = 3; rank > 0; rank--) {
        world_move(world, rank, 0);
    }
    world_decide(world, 0);
    assert_int_equal(seen_tag(world, 0, 70)->kind, DECIDE_SET_REMOVED);
    uint64_t tags[] = {submit(world, 3, (ask_t){.name = "known", .set = set}),
                       submit(world, 3, (ask_t){.name = "new", .set = set})};
    submit(world, 1, (ask_t){.name = "known", .set = set});
    submit(world, 1, (ask_t){.name = "new", .set = set});
    for (int rank = 3; rank > 0; rank--) {
        world_move(world, rank, 0);
    }
    world_settle(world);
    assert_failed(world, 3, tags[0], HVD_UNKNOWN_SET,
                  "Process set 1 was removed while tensor 'known' waited");
    assert_failed(world, 3, tags[1], HVD_UNKNOWN_SET,
                  "Process set 1 was removed while tensor 'new' waited");
    assert_int_equal(coord_counters(world->ranks[0]).n_stale_lines, 2);
    world_free(world);
}

// What all members had submitted before the removal still runs, even if it had to queue.
static void removing_a_set_lets_complete_work_run(void **state)
{
    (void)state;
    world_t *world = world_new(3, world_params());
    int set = added_id(world, change_set(world, (const int[]){0, 1}, 2, 0));
    world->holds_batches = true;
    uint64_t tags[4];
    static const char *const names[] = {"a", "b", "c", "d"};
    for (int i = 0; i < 4; i++) {
        tags[i] = submit(world, 0, (ask_t){.name = names[i], .set = set});
        submit(world, 1, (ask_t){.name = names[i], .set = set});
        world_settle(world);
    }
    assert_null(seen_tag(world, 0, tags[3]));
    uint64_t removed = ++world->next_tag;
    for (int rank = 0; rank < 3; rank++) {
        coord_remove_set(world->ranks[rank], set, removed, world->now_ns, NULL);
    }
    world_settle(world);
    assert_null(seen_tag(world, 0, removed));
    world->holds_batches = false;
    for (int rank = 0; rank < 2; rank++) {
        int n = world->n_seen[rank];
        for (int i = 0; i < n; i++) {
            if (world->seen[rank][i].kind == DECIDE_RUN) {
                coord_batch_done(world->ranks[rank], world->seen[rank][i].batch, world->now_ns);
            }
        }
    }
    world_settle(world);
    assert_ran(world, 0, tags[3]);
    assert_int_equal(seen_tag(world, 2, removed)->kind, DECIDE_SET_REMOVED);
    world_free(world);
}

// --- Ends ---------------------------------------------------------------------------------------

static void expect_end(const world_t *world, int rank, hvd_status_t status, const char *start)
{
    assert_true(world->n_seen[rank] > 0);
    const seen_t *last = &world->seen[rank][world->n_seen[rank] - 1];
    assert_int_equal(last->kind, DECIDE_ENDED);
    assert_int_equal(last->status, status);
    assert_starts(last->text, start);
    for (int i = 0; i + 1 < world->n_seen[rank]; i++) {
        assert_int_not_equal(world->seen[rank][i].kind, DECIDE_ENDED);
    }
}

static void shutdown_ends_everything_everywhere(void **state)
{
    (void)state;
    for (int who = 0; who < 5; who++) {
        world_t *world = world_new(5, world_params());
        uint64_t waiting = submit(world, 1, (ask_t){.name = "x"});
        uint64_t join = submit(world, 3, (ask_t){.name = "join", .op = HVD_JOIN});
        err_t err;
        coord_shutdown(world->ranks[who], "RuntimeError: a bug", world->now_ns);
        coord_shutdown(world->ranks[who], "RuntimeError: a bug", world->now_ns);
        assert_int_equal(try_submit(world, who, &(ask_t){.name = "late"}, 9, &err), HVD_SHUTDOWN);
        assert_has(err.text, "Horovod has been shut down.");
        world_settle(world);
        for (int rank = 0; rank < 5; rank++) {
            expect_end(world, rank, HVD_SHUTDOWN, "Horovod has been shut down.");
            assert_int_equal(coord_end_rank(world->ranks[rank]), who);
            assert_string_equal(coord_end_reason(world->ranks[rank]), "RuntimeError: a bug");
            assert_int_equal(try_submit(world, rank, &(ask_t){.name = "late"}, 9, &err),
                             HVD_SHUTDOWN);
            assert_int_equal(coord_pending(world->ranks[rank]), 0);
            assert_true(coord_next_tick(world->ranks[rank]) == NEVER_NS);
        }
        assert_failed(world, 1, waiting, HVD_SHUTDOWN, "Horovod has been shut down.");
        assert_failed(world, 3, join, HVD_SHUTDOWN, "Horovod has been shut down.");
        world_free(world);
    }
}

// What all ranks had submitted before somebody asked to stop still runs, even if it had to queue.
static void shutdown_lets_complete_work_run(void **state)
{
    static const char *const names[] = {"a", "b", "c", "d"};
    (void)state;
    world_t *world = world_new(3, world_params());
    world->holds_batches = true;
    for (int i = 0; i < 4; i++) {
        submit(world, ALL_RANKS, (ask_t){.name = names[i]});
        world_settle(world);
    }
    assert_int_equal(count_runs(world, 2), 2);
    coord_shutdown(world->ranks[2], "", world->now_ns);
    world_settle(world);
    for (int rank = 0; rank < 3; rank++) {
        expect_order(world, rank, names, 4);
        expect_end(world, rank, HVD_SHUTDOWN, "Horovod has been shut down. Rank 2 ");
    }
    world_free(world);
}

static void an_abort_reaches_everybody_with_its_cause(void **state)
{
    (void)state;
    for (int who = 0; who < 7; who++) {
        world_t *world = world_new(7, world_params());
        uint64_t tag = submit(world, 6, (ask_t){.name = "x"});
        err_t err;
        coord_abort(world->ranks[who], HVD_PEER_LOST, 5, "rank 9 on host h is gone");
        world_settle(world);
        for (int rank = 0; rank < 7; rank++) {
            expect_end(world, rank, HVD_PEER_LOST, "rank 9 on host h is gone");
            assert_int_equal(coord_end_rank(world->ranks[rank]), 5);
            assert_int_equal(try_submit(world, rank, &(ask_t){.name = "late"}, 9, &err),
                             HVD_PEER_LOST);
            assert_has(err.text, "rank 9 on host h is gone");
        }
        assert_failed(world, 6, tag, HVD_PEER_LOST, "rank 9 on host h is gone");
        world_free(world);
    }
}

// --- Stalls -------------------------------------------------------------------------------------

static const seen_t *report_on(const world_t *world, int rank, int which)
{
    for (int i = 0; i < world->n_seen[rank]; i++) {
        if (world->seen[rank][i].kind == DECIDE_REPORT && which-- == 0) {
            return &world->seen[rank][i];
        }
    }
    return NULL;
}

#define STALL_END_TEXT                                                                             \
    "Rank 0 did not submit 'x' within 100 seconds (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS), nor did " \
    "ranks 1-4, while rank 5 waited.\n"
#define STALL_TEXT                                                                                 \
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of "      \
    "ranks and are "                                                                               \
    "waiting for remainder of ranks for more than 60 seconds."

static void stalls_are_reported_with_the_missing_ranks(void **state)
{
    coord_params_t params = world_params();
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    for (int arity = 1; arity <= 6; arity++) {
        int parent[7];
        tree_of_arity(parent, 7, arity);
        world_t *world = world_new_tree(7, parent, params);
        assert_true(coord_next_tick(world->ranks[0]) == NEVER_NS);
        for (int rank = 0; rank < 7; rank++) {
            if (rank != 2 && rank != 5) {
                submit(world, rank, (ask_t){.name = "late/a"});
            }
            if (rank == 6) {
                submit(world, rank, (ask_t){.name = "late/b"});
            }
        }
        world_settle(world);
        world_tick(world, 59 * NS_PER_S);
        assert_null(report_on(world, 0, 0));
        for (int i = 0; i < 20; i++) {
            world_tick(world, NS_PER_S);
        }
        for (int rank = 0; rank < 7; rank++) {
            const seen_t *report = report_on(world, rank, 0);
            assert_non_null(report);
            assert_starts(report->text, STALL_TEXT);
            assert_has(
                report->text,
                "Missing ranks:\n0: [late/b]\n1: [late/b]\n2: [late/a, late/b]\n3: [late/b]\n"
                "4: [late/b]\n5: [late/a, late/b]");
            assert_null(strstr(report->text, "\n6:"));
            assert_null(report_on(world, rank, 1));
        }
        // Once more after another minute, then the ranks come.
        for (int i = 0; i < 60; i++) {
            world_tick(world, NS_PER_S);
        }
        assert_non_null(report_on(world, 3, 1));
        assert_null(report_on(world, 3, 2));
        submit(world, 2, (ask_t){.name = "late/a"});
        uint64_t tag = submit(world, 5, (ask_t){.name = "late/a"});
        for (int rank = 0; rank < 6; rank++) {
            submit(world, rank, (ask_t){.name = "late/b"});
        }
        world_settle(world);
        assert_ran(world, 5, tag);
        for (int rank = 0; rank < 7; rank++) {
            assert_true(coord_next_tick(world->ranks[rank]) == NEVER_NS);
            assert_int_equal(coord_pending(world->ranks[rank]), 0);
        }
        world_free(world);
    }
}

static void long_reports_are_cut(void **state)
{
    coord_params_t params = world_params();
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    world_t *world = world_new(3, params);
    for (int i = 0; i < 50; i++) {
        char name[300];
        snprintf(name, sizeof name, "t%02d%0250d", i, 0);
        submit(world, 1, (ask_t){.name = name});
    }
    world_settle(world);
    for (int i = 0; i < 80; i++) {
        world_tick(world, NS_PER_S);
    }
    const char *text = report_on(world, 2, 0)->text;
    assert_has(text, "\n0: [t00000");
    assert_has(text, ", t05000");
    assert_has(text, " ...]");
    assert_null(strstr(text, "t06"));
    assert_non_null(report_on(world, 2, 1)); // the rest of the fifty
    world_free(world);
}

static void joined_ranks_are_not_missing(void **state)
{
    coord_params_t params = world_params();
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    world_t *world = world_new(4, params);
    submit(world, 3, (ask_t){.name = "join", .op = HVD_JOIN});
    submit(world, 1, (ask_t){.name = "x"});
    submit(world, 2, (ask_t){.name = "x"});
    world_settle(world);
    for (int i = 0; i < 80; i++) {
        world_tick(world, NS_PER_S);
    }
    assert_has(report_on(world, 3, 0)->text, "Missing ranks:\n0: [x]");
    assert_null(strstr(report_on(world, 3, 0)->text, "\n3:"));
    world_free(world);
}

// broadcast("x") here and allreduce("x") there wait for each other under two names. A rank that has
// both is merely late, and who names operations without such words is not meant.
static void one_name_for_two_operations_is_told(void **state)
{
    static const struct {
        const char *names[2];
        bool has_both, is_told;
    } rows[] = {
        {{"broadcast.x", "allreduce.x"}, false, true},
        {{"broadcast.x", "grouped_allreduce.x"}, false, true},
        {{"broadcast.x", "allreduce.x"}, true, false},
        {{"layer1.weight", "layer2.weight"}, false, false},
        {{"layer1.weight", "allreduce.weight"}, false, false},
    };
    coord_params_t params = world_params();

    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    for (size_t row = 0; row < N_ELEMENTS(rows); row++) {
        const char *first = rows[row].names[0], *second = rows[row].names[1];
        world_t *world = world_new(3, params);
        submit(world, 0, (ask_t){.name = first, .op = HVD_BROADCAST});
        submit(world, 1, (ask_t){.name = second});
        submit(world, 2, (ask_t){.name = second});
        if (rows[row].has_both) {
            submit(world, 2, (ask_t){.name = first, .op = HVD_BROADCAST});
        }
        world_settle(world);
        for (int i = 0; i < 80; i++) {
            world_tick(world, NS_PER_S);
        }
        const char *told = strstr(report_on(world, 1, 0)->text, "differ only in the operation");
        assert_int_equal(told != NULL, rows[row].is_told);
        world_free(world);
    }
}

static void a_stall_beyond_the_second_limit_ends_the_job(void **state)
{
    coord_params_t params = world_params();
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    params.stall_fail_ns = 100 * NS_PER_S;
    world_t *world = world_new(6, params);
    uint64_t tag = submit(world, 5, (ask_t){.name = "x"});
    world_settle(world);
    for (int i = 0; i < 99; i++) {
        world_tick(world, NS_PER_S);
    }
    assert_non_null(report_on(world, 4, 0));
    assert_null(seen_tag(world, 5, tag));
    for (int i = 0; i < 20; i++) {
        world_tick(world, NS_PER_S);
    }
    for (int rank = 0; rank < 6; rank++) {
        expect_end(world, rank, HVD_STALLED, STALL_END_TEXT STALL_TEXT);
        assert_int_equal(coord_end_rank(world->ranks[rank]), 0);
    }
    assert_failed(world, 5, tag, HVD_STALLED, STALL_END_TEXT STALL_TEXT);
    assert_has(seen_tag(world, 5, tag)->text, "\n4: [x]");
    world_free(world);
}

// A rank that does not even answer is reported too.
static void a_rank_that_does_not_answer_is_missing(void **state)
{
    coord_params_t params = world_params();
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    world_t *world = world_new(4, params);
    submit(world, 0, (ask_t){.name = "x"});
    submit(world, 3, (ask_t){.name = "x"});
    world_settle(world);
    world->is_dead[2] = true;
    for (int i = 0; i < 120; i++) {
        world_tick(world, NS_PER_S);
    }
    assert_has(report_on(world, 3, 0)->text, "Missing ranks:\n1: [x]\n2: [x]");
    world_free(world);
}

// A job that repeats a step every 100 ms is told after 10 s, once, in a line, and then as the knob
// says; also if one of its steps took much longer.
static void a_stall_out_of_rhythm_is_reported_early(void **state)
{
    coord_params_t params = world_params();
    coord_activity_t doing = {.n_submitted = 41, .quiet_ns = 5 * NS_PER_S, .last = "grad.6"};
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    world_t *world = world_new(5, params);
    for (int i = 0; i < 30; i++) {
        submit(world, ALL_RANKS, (ask_t){.name = "grad"});
        world_settle(world);
        world_tick(world, i == 25 ? 3 * NS_PER_S : 100 * NS_PER_MS);
    }
    coord_set_activity(world->ranks[4], &doing);
    for (int rank = 0; rank < 4; rank++) {
        submit(world, rank, (ask_t){.name = "grad"});
    }
    for (int i = 0; i < 99; i++) {
        world_tick(world, 100 * NS_PER_MS);
    }
    assert_null(report_on(world, 2, 0));
    for (int i = 0; i < 300; i++) {
        world_tick(world, 100 * NS_PER_MS);
    }
    const seen_t *report = report_on(world, 2, 0);
    assert_non_null(report);
    assert_has(report->text, "Rank 4 has not submitted 'grad' for 1");
    assert_null(strchr(report->text, '\n'));
    assert_int_equal(report->status, HVD_TIMEOUT);
    assert_null(report_on(world, 2, 1)); // once
    for (int i = 0; i < 600; i++) {
        world_tick(world, 100 * NS_PER_MS);
    }
    report = report_on(world, 2, 1);
    assert_has(report->text, "for more than 60 seconds");
    assert_has(report->text, "Missing ranks:\n4: [grad]\nReady ranks:\n[grad] 0-3\n");
    assert_has(report->text, "What the missing ranks last did:\nrank 4: it had nothing in flight, "
                             "and the last done was 'grad.6' (number 41, 5.0 s before)");
    assert_has(report->text, "The job does not end by itself");
    world_free(world);
}

// The same if its steps need no agreement, and only the engine has seen them.
static void a_rhythm_that_the_engine_tells_counts_too(void **state)
{
    coord_params_t params = world_params();
    coord_activity_t doing = {
        .n_steps = 20, .longest_step_ns = NS_PER_S, .second_step_ns = 100 * NS_PER_MS};
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    world_t *world = world_new(3, params);
    coord_set_activity(world->ranks[0], &doing);
    submit(world, 1, (ask_t){.name = "grad"});
    for (int i = 0; i < 99; i++) {
        world_tick(world, 100 * NS_PER_MS);
    }
    assert_null(report_on(world, 1, 0));
    for (int i = 0; i < 40; i++) {
        world_tick(world, 100 * NS_PER_MS);
    }
    assert_non_null(report_on(world, 1, 0));
    assert_has(report_on(world, 1, 0)->text, "not submitted 'grad' for 1");
    world_free(world);
}

// Each rank sits in a wait for what another has not submitted: that is certain, and told after a
// few seconds, once. If a single rank may still go on, it is not.
static void ranks_that_wait_for_each_other_are_told_soon(void **state)
{
    coord_params_t params = world_params();
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    for (int arity = 1; arity <= 4; arity++) {
        for (int n_blocked = 4; n_blocked <= 5; n_blocked++) {
            int parent[5];
            tree_of_arity(parent, 5, arity);
            world_t *world = world_new_tree(5, parent, params);
            for (int rank = 0; rank < 5; rank++) {
                coord_activity_t doing = {.n_submitted = 1,
                                          .n_in_flight = 1,
                                          .quiet_ns = 3 * NS_PER_S,
                                          .is_blocked = rank < n_blocked,
                                          .where = "train.py:7"};
                snprintf(doing.blocked_in, sizeof doing.blocked_in, rank % 2 == 0 ? "a" : "b");
                submit(world, rank, (ask_t){.name = rank % 2 == 0 ? "a" : "b"});
                coord_set_activity(world->ranks[rank], &doing);
            }
            for (int i = 0; i < 50; i++) {
                world_tick(world, 100 * NS_PER_MS);
            }
            const seen_t *report = report_on(world, 3, 0);
            assert_int_equal(report != NULL, n_blocked == 5);
            for (int rank = 0; report != NULL && rank < 5; rank++) {
                char line[64];
                snprintf(line, sizeof line, "\nrank %d: it waits in '%s' (train.py:7) for 3.0 s",
                         rank, rank % 2 == 0 ? "a" : "b");
                assert_has(report->text, line);
            }
            for (int i = 0; i < 300; i++) {
                world_tick(world, 100 * NS_PER_MS);
            }
            assert_null(report_on(world, 3, n_blocked == 5));
            world_free(world);
        }
    }
}

// One that is slow by nature, or has only begun, is left alone.
static void slow_jobs_are_not_hurried(void **state)
{
    coord_params_t params = world_params();
    (void)state;
    params.stall_warn_ns = 60 * NS_PER_S;
    for (int n_steps = 10; n_steps <= 30; n_steps += 20) {
        world_t *world = world_new(3, params);
        for (int i = 0; i < n_steps; i++) {
            submit(world, ALL_RANKS, (ask_t){.name = "grad"});
            world_tick(world, n_steps == 10 ? 100 * NS_PER_MS : 10 * NS_PER_S);
        }
        submit(world, 1, (ask_t){.name = "grad"});
        for (int i = 0; i < 45; i++) {
            world_tick(world, NS_PER_S);
        }
        assert_null(report_on(world, 0, 0));
        world_free(world);
    }
}

// --- Heartbeats ----------------------------------------------------------------------------------

static coord_params_t heartbeat_params(void)
{
    coord_params_t params = world_params();
    params.heartbeat_ns = NS_PER_S / 2;
    params.heartbeat_warn_ns = 3 * NS_PER_S;
    params.heartbeat_fail_ns = 10 * NS_PER_S;
    params.heartbeat_first_ns = 30 * NS_PER_S;
    return params;
}

static const seen_t *silence_on(const world_t *world, int rank, int which)
{
    for (int i = 0; i < world->n_seen[rank]; i++) {
        if (world->seen[rank][i].kind == DECIDE_SILENT && which-- == 0) {
            return &world->seen[rank][i];
        }
    }
    return NULL;
}

static void beat_for(world_t *world, int n_halves)
{
    for (int i = 0; i < n_halves; i++) {
        world_tick(world, NS_PER_S / 2);
    }
}

static void a_silent_neighbour_is_reported_then_given_up(void **state)
{
    world_t *world = world_new(5, heartbeat_params());
    coord_activity_t doing = {.n_submitted = 7, .n_in_flight = 1, .last = "grad.3"};
    (void)state;
    coord_set_activity(world->ranks[1], &doing);
    beat_for(world, 20);
    for (int rank = 0; rank < 5; rank++) {
        assert_null(silence_on(world, rank, 0));
    }
    world->is_dead[1] = true; // the parent of 3 and 4, a child of 0
    beat_for(world, 5);
    assert_null(silence_on(world, 0, 0));
    beat_for(world, 2);
    const int neighbours[] = {0, 3, 4};
    for (size_t i = 0; i < N_ELEMENTS(neighbours); i++) {
        const seen_t *seen = silence_on(world, neighbours[i], 0);
        assert_non_null(seen);
        assert_int_equal(seen->rank, 1);
        assert_int_equal(seen->status, HVD_IN_PROGRESS);
        assert_true(seen->silent_ns >= 3 * NS_PER_S);
        assert_string_equal(seen->last, "grad.3");
    }
    beat_for(world, 12);
    assert_null(silence_on(world, 0, 1));
    beat_for(world, 2);
    assert_int_equal(silence_on(world, 0, 1)->status, HVD_PEER_LOST);
    assert_null(silence_on(world, 2, 0)); // no neighbour of it
    world_free(world);
}

// A rank that was stopped blames nobody; the others only see it come back.
static void a_rank_that_was_away_knows_it(void **state)
{
    world_t *world = world_new(3, heartbeat_params());
    (void)state;
    beat_for(world, 4);
    world->is_dead[2] = true;
    beat_for(world, 10);
    assert_int_equal(coord_absence_ns(world->ranks[1], world->now_ns), 0);
    assert_true(coord_absence_ns(world->ranks[2], world->now_ns) >= 5 * NS_PER_S);
    world->is_dead[2] = false;
    beat_for(world, 4);
    assert_int_equal(silence_on(world, 2, 0)->rank, 2);
    assert_true(silence_on(world, 2, 0)->silent_ns >= 5 * NS_PER_S);
    assert_null(silence_on(world, 2, 1));
    assert_true(coord_absence_ns(world->ranks[2], world->now_ns) >= 5 * NS_PER_S);
    assert_int_equal(silence_on(world, 0, 0)->status, HVD_IN_PROGRESS);
    assert_int_equal(silence_on(world, 0, 1)->status, HVD_OK);
    beat_for(world, 20);
    assert_int_equal(coord_absence_ns(world->ranks[2], world->now_ns), 0);
    assert_null(silence_on(world, 0, 2));
    world_free(world);
}

// What a rank forgives for its own absence is that absence only: on a busy machine, too, whoever is
// silent for good is given up, and whoever is heard in between is not.
static void a_rank_that_is_held_up_over_and_over_waits_for_nobody_for_ever(void **state)
{
    coord_params_t params = heartbeat_params();
    uint64_t held_up_ns = params.heartbeat_ns + params.heartbeat_warn_ns;
    int n_beats = 0;
    const seen_t *seen;
    (void)state;
    world_t *world = world_new(2, params);
    beat_for(world, 4);
    for (int i = 0; i < 60; i++) {
        world_tick(world, held_up_ns);
    }
    for (int i = 0; (seen = silence_on(world, 0, i)) != NULL; i++) {
        assert_int_equal(seen->rank, 0); // nobody else is blamed
    }
    world->is_dead[1] = true;
    do {
        world_tick(world, held_up_ns);
        seen = &world->seen[0][world->n_seen[0] - 1];
        n_beats++;
        assert_true(n_beats <= 25);
    } while (seen->kind != DECIDE_SILENT || seen->rank != 1 || seen->status != HVD_PEER_LOST);
    assert_true(n_beats >= 20); // 10 s, of half a second each
    world_free(world);
}

// Links may take long to be made: a rank that was never heard has more time, but not for ever.
static void one_that_was_never_heard_has_more_time(void **state)
{
    world_t *world = world_new(2, heartbeat_params());
    (void)state;
    world->is_dead[1] = true;
    beat_for(world, 78);
    assert_null(silence_on(world, 0, 0));
    beat_for(world, 4);
    assert_int_equal(silence_on(world, 0, 0)->status, HVD_PEER_LOST);
    world_free(world);
}

// --- Standing still -----------------------------------------------------------------------------

static const seen_t *stuck_on(const world_t *world, int rank)
{
    for (int i = 0; i < world->n_seen[rank]; i++) {
        if (world->seen[rank][i].kind == DECIDE_STUCK) {
            return &world->seen[rank][i];
        }
    }
    return NULL;
}

static void stand(world_t *world, int rank, uint64_t batch, uint64_t seconds, const char *text)
{
    coord_progress_t still = {.is_running = true,
                              .batch = batch,
                              .least_ns = seconds * NS_PER_S,
                              .longest_ns = seconds * NS_PER_S};
    snprintf(still.text, sizeof still.text, "%s", text);
    coord_set_progress(world->ranks[rank], &still);
}

// What is lost is named by the rank that has waited for it longest, from two levels down.
static void a_batch_that_stands_still_everywhere_is_given_up(void **state)
{
    world_t *world = world_new(5, heartbeat_params());
    (void)state;
    beat_for(world, 4);
    stand(world, 3, 7, 11, "rank 3 waits");
    stand(world, 4, 7, 10, "rank 4 waits");
    stand(world, 2, 7, 12, ""); // it waits for 3 or 4, and does not know what for
    beat_for(world, 2);
    assert_null(stuck_on(world, 0)); // not for certain yet
    beat_for(world, 4);
    const seen_t *seen = stuck_on(world, 0);
    assert_non_null(seen);
    assert_int_equal(seen->batch, 7);
    assert_true(seen->silent_ns == 10 * NS_PER_S);
    assert_string_equal(seen->text, "rank 3 waits");
    for (int rank = 1; rank < 5; rank++) {
        assert_null(stuck_on(world, rank));
    }
    world_free(world);
}

static void while_somebody_moves_nobody_is_stuck(void **state)
{
    world_t *world = world_new(5, heartbeat_params());
    (void)state;
    beat_for(world, 4);
    stand(world, 3, 7, 11, "rank 3 waits");
    stand(world, 4, 7, 0, ""); // the same batch moves here
    beat_for(world, 10);
    assert_null(stuck_on(world, 0));
    stand(world, 4, 6, 0, ""); // here an older one does, for which 3 may have to wait
    beat_for(world, 10);
    assert_null(stuck_on(world, 0));
    stand(world, 4, 9, 0, ""); // 4 is ahead: what 3 waits for is not coming
    beat_for(world, 10);
    assert_non_null(stuck_on(world, 0));
    world_free(world);
}

// Who is silent may move: that is for its heartbeats to tell.
static void silence_is_no_standstill(void **state)
{
    coord_params_t params = heartbeat_params();
    params.heartbeat_fail_ns = 20 * NS_PER_S;
    world_t *world = world_new(5, params);

    (void)state;
    beat_for(world, 4);
    world->is_dead[4] = true; // below 1
    beat_for(world, 6);
    stand(world, 3, 7, 25, "rank 3 waits");
    beat_for(world, 20);
    assert_null(stuck_on(world, 0));
    world->is_dead[4] = false;
    beat_for(world, 10);
    assert_non_null(stuck_on(world, 0));
    world_free(world);
}

// --- Broken neighbours --------------------------------------------------------------------------

static void frames_are_cut_off_a_stream(void **state)
{
    (void)state;
    uint8_t stream[FRAME_HEADER_BYTES + 5] = {5};
    size_t bytes = 0;
    err_t err;
    for (size_t n = 0; n < sizeof stream; n++) {
        assert_int_equal(frame_read(stream, n, &bytes, &err), HVD_IN_PROGRESS);
    }
    assert_int_equal(frame_read(stream, sizeof stream, &bytes, &err), HVD_OK);
    assert_int_equal(bytes, 5);
    frame_write_header(stream, FRAME_MAX_BYTES);
    assert_int_equal(frame_read(stream, sizeof stream, &bytes, &err), HVD_IN_PROGRESS);
    frame_write_header(stream, FRAME_MAX_BYTES + 1);
    assert_int_equal(frame_read(stream, FRAME_HEADER_BYTES, &bytes, &err), HVD_PROTOCOL);
}

static hvd_status_t receive_line(world_t *world, int to, int from, const control_line_t *line,
                                 err_t *err)
{
    buf_t body = {0};
    control_put(&body, line);
    hvd_status_t status =
        coord_receive(world->ranks[to], from, body.data, body.len, world->now_ns, err);
    buf_free(&body);
    return status;
}

static const signature_t good = {
    .prescale = 1, .postscale = 1, .dtype = HVD_FLOAT32, .reduce = HVD_SUM};

static void nonsense_is_refused(void **state)
{
    static const int64_t one[] = {1};
    const control_line_t from_child[] = {
        {.kind = LINE_READY, .id = 99},
        {.kind = LINE_READY, .id = 0},
        {.kind = LINE_NEW, .set = 5, .name = {"x", 1}, .n_variants = 1, .variants = {good}},
        {.kind = LINE_NEW, .name = {"x", 1}, .n_variants = 1, .variants = {{.op = OP_REMOVE_SET}}},
        {.kind = LINE_NEW,
         .name = {"x", 1},
         .n_variants = 1,
         .variants = {{.op = HVD_ALLGATHER}}}, // no sizes
        {.kind = LINE_NEW,
         .name = {"x", 1},
         .n_variants = 1,
         .variants = {good},
         .example_ranks = {4}},
        {.kind = LINE_NEW,
         .name = {"x", 1},
         .n_variants = 1,
         .variants = {good},
         .payload = (const uint8_t *)"abcd",
         .payload_bytes = 4},
        {.kind = LINE_NEW,
         .name = {"x", 1},
         .n_variants = 1,
         .variants = {{.op = OP_ADD_SET, .n_tensors = 1, .dims = one, .n_dims_words = 1}}},
        {.kind = LINE_JOIN, .rank = 0},
        {.kind = LINE_JOIN, .rank = 4},
        {.kind = LINE_STOP, .rank = 4},
        {.kind = RECORD_SHUTDOWN, .rank = 1},
        {.kind = RECORD_RUN, .n_items = 0},
    };
    const control_line_t from_parent[] = {
        {.kind = RECORD_RUN, .set = 9, .n_items = 0},
        {.kind = RECORD_EVICT, .id = 7},
        {.kind = RECORD_JOINED, .rank = 1},
        {.kind = RECORD_SET_ADD, .set = 1, .name = {"q", 1}, .sizes = one, .n_sizes = 1},
        {.kind = RECORD_SET_REMOVE, .set = 0, .name = {"q", 1}},
        {.kind = RECORD_ERROR, .set = 3, .name = {"q", 1}, .status = HVD_MISMATCH},
        {.kind = LINE_READY, .id = 1},
        {.kind = LINE_JOIN, .rank = 1},
        {.kind = RECORD_SHUTDOWN, .rank = 4},
    };
    (void)state;
    err_t err;
    for (size_t i = 0; i < N_ELEMENTS(from_child); i++) {
        world_t *broken = world_new(4, world_params());
        assert_int_equal(receive_line(broken, 0, 1, &from_child[i], &err), HVD_PROTOCOL);
        assert_has(err.text, "rank 1");
        world_free(broken);
    }
    for (size_t i = 0; i < N_ELEMENTS(from_parent); i++) {
        world_t *broken = world_new(4, world_params());
        assert_int_equal(receive_line(broken, 1, 0, &from_parent[i], &err), HVD_PROTOCOL);
        assert_has(err.text, "rank 0");
        world_free(broken);
    }
}

// Right in themselves, but not from that rank, twice, or unasked.
static void nonsense_in_its_place_is_refused(void **state)
{
    (void)state;
    world_t *world = world_new(4, world_params());
    err_t err;
    const control_line_t line = {.kind = LINE_READY, .id = 99};
    assert_int_equal(receive_line(world, 1, 2, &line, &err), HVD_PROTOCOL); // no neighbour
    // The same share twice.
    control_line_t twice = {
        .kind = LINE_NEW, .name = {"y", 1}, .n_variants = 1, .variants = {good}};
    assert_int_equal(receive_line(world, 0, 2, &twice, &err), HVD_OK);
    assert_int_equal(receive_line(world, 0, 2, &twice, &err), HVD_PROTOCOL);
    // A batch nobody here asked for.
    buf_t body = {0};
    control_put_batch(&body, 1, 0, false, 1);
    control_put_run(&body,
                    &(control_run_t){.id = 3, .named = true, .name = {"z", 1}, .signature = good});
    assert_int_equal(coord_receive(world->ranks[1], 0, body.data, body.len, 0, &err), HVD_PROTOCOL);
    assert_int_equal(coord_receive(world->ranks[1], 0, body.data, body.len - 1, 0, &err),
                     HVD_PROTOCOL);
    buf_free(&body);
    world_free(world);
}

static void offers_that_do_not_fit_are_refused(void **state)
{
    control_line_t offer = {.kind = RECORD_OFFER, .id = 1, .payload_bytes = 4};
    err_t err;
    offer.payload = (const uint8_t *)"four";
    (void)state;
    world_t *world = world_new(2, world_params());
    assert_int_equal(receive_line(world, 1, 0, &offer, &err), HVD_PROTOCOL); // no such id
    submit(world, ALL_RANKS, (ask_t){.name = "x", DIMS(1)});
    submit(world, ALL_RANKS, (ask_t){.name = "does not ride"});
    world_settle(world);
    offer.payload_bytes = 3;
    assert_int_equal(receive_line(world, 1, 0, &offer, &err), HVD_PROTOCOL);
    offer.payload_bytes = 4;
    assert_int_equal(receive_line(world, 0, 1, &offer, &err), HVD_PROTOCOL); // upward
    assert_int_equal(receive_line(world, 1, 0, &offer, &err), HVD_OK);
    assert_int_equal(receive_line(world, 1, 0, &offer, &err), HVD_PROTOCOL); // twice
    offer.id = 2;
    offer.payload_bytes = 0;
    assert_int_equal(receive_line(world, 1, 0, &offer, &err), HVD_PROTOCOL);
    world_free(world);
}

static void trees_are_checked(void **state)
{
    static const int circles[][4] = {{-1, 2, 1, 0}, {0, 0, 0, 0}, {-1, -1, 0, 0}, {-1, 0, 4, 0}};
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(circles); i++) {
        coord_params_t params = world_params();
        coord_t *coord = NULL;
        err_t err;
        params.size = 4;
        params.parent = circles[i];
        assert_int_equal(coord_new(&params, &coord, &err), HVD_INVALID_ARGUMENT);
        assert_null(coord);
    }
}

// --- Lines --------------------------------------------------------------------------------------

static void assert_same_text(control_text_t a, control_text_t b)
{
    assert_int_equal(a.bytes, b.bytes);
    assert_memory_equal(a.at, b.at, b.bytes);
}

static void assert_same_signature(const signature_t *a, const signature_t *b)
{
    assert_true(a->op == b->op && a->dtype == b->dtype && a->reduce == b->reduce &&
                a->root == b->root && a->prescale == b->prescale && a->postscale == b->postscale &&
                a->n_tensors == b->n_tensors && a->n_dims_words == b->n_dims_words);
    assert_memory_equal(a->dims, b->dims, (size_t)b->n_dims_words * sizeof(int64_t));
}

static const int64_t wire_words[] = {2, -1, 3, 0, 1, INT64_MAX - 1};
static const int64_t wire_sizes[] = {0, 1, 127, 128, INT64_MAX};

#define PLAIN_SIGNATURE                                                                            \
    {.op = HVD_ALLGATHER,                                                                          \
     .dtype = HVD_BFLOAT16,                                                                        \
     .prescale = 1,                                                                                \
     .postscale = 1,                                                                               \
     .n_tensors = 3,                                                                               \
     .dims = wire_words,                                                                           \
     .n_dims_words = 6}
#define SCALED_SIGNATURE                                                                           \
    {.op = HVD_BROADCAST,                                                                          \
     .reduce = HVD_PRODUCT,                                                                        \
     .root = 1000,                                                                                 \
     .prescale = 0.1,                                                                              \
     .postscale = -3,                                                                              \
     .n_tensors = 3,                                                                               \
     .dims = wire_words,                                                                           \
     .n_dims_words = 6}

// Every kind of line.
static const control_line_t lines[] = {
    {.kind = LINE_READY, .id = UINT32_MAX, .example_ranks = {-1}},
    {.kind = LINE_READY,
     .id = 5,
     .zeros = true,
     .example_ranks = {17},
     .sizes = wire_sizes,
     .n_sizes = 5,
     .payload = (const uint8_t *)"payload",
     .payload_bytes = 7},
    {.kind = LINE_NEW,
     .set = 3,
     .name = {"na\0me", 5},
     .n_variants = 1,
     .variants = {PLAIN_SIGNATURE},
     .example_ranks = {9},
     .sizes = wire_sizes,
     .n_sizes = 5},
    {.kind = LINE_CONFLICT,
     .set = 3,
     .name = {"", 0},
     .n_variants = 2,
     .variants = {PLAIN_SIGNATURE, SCALED_SIGNATURE},
     .example_ranks = {2, 70000},
     .zeros = true},
    {.kind = LINE_JOIN, .rank = 300},
    {.kind = LINE_EVICTED, .id = 7},
    {.kind = LINE_STALLED, .set = 1, .name = {"x", 1}, .age_ns = UINT64_MAX},
    {.kind = LINE_ANSWER,
     .inquiry = 4,
     .n_items = 2,
     .payload = (const uint8_t *)"\1\2",
     .payload_bytes = 2},
    {.kind = LINE_STOP, .rank = 1, .text = {"why", 3}},
    {.kind = RECORD_RUN, .batch = UINT32_MAX, .set = 2, .rides = true, .n_items = 0},
    {.kind = RECORD_ERROR,
     .batch = 1,
     .set = 2,
     .name = {"x", 1},
     .status = HVD_MISMATCH,
     .text = {"why", 3}},
    {.kind = RECORD_EVICT, .id = 1},
    {.kind = RECORD_JOINED, .batch = 3, .rank = 1},
    {.kind = RECORD_SET_ADD,
     .batch = 3,
     .set = 1,
     .name = {"x", 1},
     .sizes = wire_sizes,
     .n_sizes = 3},
    {.kind = RECORD_SET_REMOVE, .batch = 3, .set = 1, .name = {"x", 1}},
    {.kind = RECORD_INQUIRE, .inquiry = 2, .n_items = 0},
    {.kind = RECORD_REPORT, .batch = 2, .status = HVD_STALLED, .text = {"text", 4}},
    {.kind = RECORD_SHUTDOWN, .batch = 2, .rank = 5, .text = {"why", 3}},
    {.kind = LINE_ABORT, .status = HVD_SYSTEM, .rank = CONTROL_NO_RANK, .text = {"text", 4}},
    {.kind = LINE_HEARTBEAT,
     .n_submitted = 9,
     .n_in_flight = 2,
     .quiet_ns = UINT64_MAX,
     .name = {"last", 4}},
    {.kind = LINE_PROGRESS, .batch = 9, .least_ns = 2, .longest_ns = 77, .text = {"waits", 5}},
    {.kind = RECORD_OFFER, .id = 300},
    {.kind = RECORD_OFFER, .id = 1, .payload = (const uint8_t *)"four", .payload_bytes = 4},
};

static void assert_same_line(const control_line_t *got, const control_line_t *line)
{
    assert_true(got->kind == line->kind && got->zeros == line->zeros && got->rides == line->rides &&
                got->id == line->id && got->batch == line->batch && got->set == line->set &&
                got->rank == line->rank && got->status == line->status &&
                got->n_items == line->n_items && got->n_variants == line->n_variants &&
                got->n_sizes == line->n_sizes && got->payload_bytes == line->payload_bytes);
    if (line->kind == LINE_STALLED) {
        assert_int_equal(got->age_ns, line->age_ns);
    }
    if (line->kind == LINE_ANSWER || line->kind == RECORD_INQUIRE) {
        assert_int_equal(got->inquiry, line->inquiry);
    }
    if (line->kind == LINE_HEARTBEAT) {
        assert_true(got->n_submitted == line->n_submitted &&
                    got->n_in_flight == line->n_in_flight && got->quiet_ns == line->quiet_ns);
    }
    if (line->kind == LINE_PROGRESS) {
        assert_true(got->least_ns == line->least_ns && got->longest_ns == line->longest_ns);
    }
    assert_memory_equal(got->payload, line->payload, line->payload_bytes);
    assert_memory_equal(got->sizes, line->sizes, (size_t)line->n_sizes * sizeof(int64_t));
    if (line->name.at != NULL) {
        assert_same_text(got->name, line->name);
    }
    if (line->text.at != NULL) {
        assert_same_text(got->text, line->text);
    }
    for (int v = 0; v < line->n_variants; v++) {
        assert_int_equal(got->example_ranks[v], line->example_ranks[v]);
        assert_same_signature(&got->variants[v], &line->variants[v]);
    }
}

static void lines_survive_the_wire(void **state)
{
    control_reader_t reader = {0};
    control_line_t got;
    buf_t body = {0};
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(lines); i++) {
        control_put(&body, &lines[i]);
    }
    control_open(&reader, body.data, body.len);
    for (size_t i = 0; i < N_ELEMENTS(lines); i++) {
        assert_true(control_next(&reader, &got));
        assert_same_line(&got, &lines[i]);
    }
    assert_false(control_next(&reader, &got));
    assert_false(control_bad(&reader));
    // Cut anywhere, a line is bad or was whole before.
    for (size_t cut = 0; cut < body.len; cut++) {
        uint8_t *part = copy_of(body.data, cut);
        size_t n = 0;
        control_open(&reader, part, cut);
        while (control_next(&reader, &got)) {
            n++;
        }
        assert_true(n < N_ELEMENTS(lines));
        free(part);
    }
    control_reader_free(&reader);
    buf_free(&body);
}

// Any bytes at all: no crash, no end past the end. The fuzzer goes further.
static void random_bytes_are_read_safely(void **state)
{
    world_t *world = world_new(5, world_params());
    uint64_t random = 88172645463325252u;
    uint8_t bytes[64];
    err_t err;
    (void)state;
    submit(world, ALL_RANKS, (ask_t){.name = "x"});
    world_settle(world);
    for (int round = 0; round < 20000; round++) {
        for (size_t i = 0; i < sizeof bytes; i++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // Small numbers and known kinds get further.
            bytes[i] = (uint8_t)(i == 0            ? random % CONTROL_N_KINDS
                                 : random % 3 == 0 ? random >> 8
                                                   : random % 6);
        }
        uint8_t *body = copy_of(bytes, 1 + random % sizeof bytes);
        size_t n = 1 + random % sizeof bytes;
        coord_receive(world->ranks[1], round % 2 == 0 ? 0 : 3, body, n, 0, &err);
        free(body);
    }
    world_free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_entry_runs_once_all_members_have_it),
        cmocka_unit_test(known_names_need_few_bytes),
        cmocka_unit_test(a_changed_signature_is_announced_anew),
        cmocka_unit_test(submission_errors_concern_one_call),
        cmocka_unit_test(a_name_is_in_flight_until_its_batch_is_done),
        cmocka_unit_test(mismatches_fail_on_every_member),
        cmocka_unit_test(the_lowest_ranks_are_named),
        cmocka_unit_test(scalars_cannot_be_gathered),
        cmocka_unit_test(sizes_of_all_members_reach_all),
        cmocka_unit_test(splits_of_all_members_reach_all),
        cmocka_unit_test(halves_of_a_job_meet_half_way),
        cmocka_unit_test(an_offer_may_be_answered_otherwise),
        cmocka_unit_test(small_allreduces_are_done_by_the_agreement),
        cmocka_unit_test(what_rides_is_a_matter_of_the_signature),
        cmocka_unit_test(the_order_of_reduction_is_fixed),
        cmocka_unit_test(a_barrier_is_over_once_agreed),
        cmocka_unit_test(what_comes_together_is_fused),
        cmocka_unit_test(operations_fuse_by_their_kind),
        cmocka_unit_test(fusion_keeps_to_its_limits),
        cmocka_unit_test(two_batches_run_at_a_time),
        cmocka_unit_test(other_sets_do_not_wait_for_the_sequencer),
        cmocka_unit_test(a_cycle_time_holds_batches_back),
        cmocka_unit_test(orders_may_differ),
        cmocka_unit_test(ids_are_evicted_and_given_again),
        cmocka_unit_test(a_ready_crossing_its_eviction_counts_once),
        cmocka_unit_test(joined_ranks_take_part_with_zeros),
        cmocka_unit_test(join_ends_when_all_have_joined),
        cmocka_unit_test(a_submission_before_joining_counts),
        cmocka_unit_test(other_operations_fail_while_ranks_have_joined),
        cmocka_unit_test(joined_ranks_take_part_in_new_sets),
        cmocka_unit_test(joined_ranks_cannot_submit),
        cmocka_unit_test(sets_come_and_go_alike_on_all_ranks),
        cmocka_unit_test(sets_are_checked_where_they_are_asked_for),
        cmocka_unit_test(different_sets_are_a_mismatch),
        cmocka_unit_test(removing_a_set_fails_what_waits_in_it),
        cmocka_unit_test(late_lines_for_a_removed_set_are_dropped),
        cmocka_unit_test(removing_a_set_lets_complete_work_run),
        cmocka_unit_test(shutdown_ends_everything_everywhere),
        cmocka_unit_test(shutdown_lets_complete_work_run),
        cmocka_unit_test(an_abort_reaches_everybody_with_its_cause),
        cmocka_unit_test(stalls_are_reported_with_the_missing_ranks),
        cmocka_unit_test(long_reports_are_cut),
        cmocka_unit_test(joined_ranks_are_not_missing),
        cmocka_unit_test(one_name_for_two_operations_is_told),
        cmocka_unit_test(a_stall_beyond_the_second_limit_ends_the_job),
        cmocka_unit_test(a_rank_that_does_not_answer_is_missing),
        cmocka_unit_test(a_stall_out_of_rhythm_is_reported_early),
        cmocka_unit_test(a_rhythm_that_the_engine_tells_counts_too),
        cmocka_unit_test(ranks_that_wait_for_each_other_are_told_soon),
        cmocka_unit_test(slow_jobs_are_not_hurried),
        cmocka_unit_test(a_silent_neighbour_is_reported_then_given_up),
        cmocka_unit_test(a_batch_that_stands_still_everywhere_is_given_up),
        cmocka_unit_test(while_somebody_moves_nobody_is_stuck),
        cmocka_unit_test(silence_is_no_standstill),
        cmocka_unit_test(a_rank_that_was_away_knows_it),
        cmocka_unit_test(a_rank_that_is_held_up_over_and_over_waits_for_nobody_for_ever),
        cmocka_unit_test(one_that_was_never_heard_has_more_time),
        cmocka_unit_test(frames_are_cut_off_a_stream),
        cmocka_unit_test(nonsense_is_refused),
        cmocka_unit_test(nonsense_in_its_place_is_refused),
        cmocka_unit_test(offers_that_do_not_fit_are_refused),
        cmocka_unit_test(trees_are_checked),
        cmocka_unit_test(lines_survive_the_wire),
        cmocka_unit_test(random_bytes_are_read_safely),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
