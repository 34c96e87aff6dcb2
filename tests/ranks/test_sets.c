// SPDX-License-Identifier: Apache-2.0
//
// test_sets.c - process sets: given at init, added and removed later, overlapping, used from
// several threads at once in different orders, spanning hosts.
//
// Sets are described by a first rank and a step, so every rank can say who is in which.
#include "cases.h"

#include <pthread.h>
#include <stdio.h>

typedef struct set {
    int id;
    int ranks[MAX_RANKS];
    int n;
    int member; // this rank's position; -1: none
} set_t;

static set_t describe_set(const rank_t *r, int first, int step, int end)
{
    set_t set = {.member = -1};
    for (int rank = first; rank < MIN(end, r->size); rank += step) {
        set.member = rank == r->rank ? set.n : set.member;
        set.ranks[set.n++] = rank;
    }
    return set;
}

static void check_queries(rank_t *r, const set_t *set)
{
    int ranks[MAX_RANKS];
    CHECK_INT(r, hvd_process_set_size(r->ctx, set->id), set->n);
    CHECK_INT(r, hvd_process_set_rank(r->ctx, set->id),
              set->member >= 0 ? set->member : HVD_NOT_MEMBER);
    CHECK_OK(r, hvd_process_set_ranks(r->ctx, set->id, ranks, MAX_RANKS));
    for (int i = 0; i < set->n; i++) {
        CHECK_INT(r, ranks[i], set->ranks[i]);
    }
    if (set->n > 1) {
        CHECK_STATUS(r, hvd_process_set_ranks(r->ctx, set->id, ranks, set->n - 1),
                     HVD_INVALID_ARGUMENT);
    }
}

// One of each operation, small enough to ride and too large for it.
static void use_set(rank_t *r, const set_t *set, unsigned salt)
{
    static const hvd_op_t ops[] = {HVD_ALLREDUCE, HVD_ALLGATHER,     HVD_BROADCAST,
                                   HVD_ALLTOALL,  HVD_REDUCESCATTER, HVD_BARRIER};
    static const size_t rows[] = {7, 3000};
    if (set->member < 0) {
        return;
    }
    for (size_t i = 0; i < N_ELEMENTS(ops) * N_ELEMENTS(rows); i++) {
        char name[64];
        op_case_t c = {
            .op = ops[i / N_ELEMENTS(rows)],
            .dtype = i % 3 == 0 ? HVD_INT32 : HVD_FLOAT64,
            .reduce = HVD_SUM,
            .form = (form_t)((i + salt) % N_FORMS),
            .set = set->id,
            .members = set->ranks,
            .n_members = set->n,
            .root = (int)salt % set->n,
            .n_tensors = 1,
            .n_dims = 1,
            .rows = rows[i % N_ELEMENTS(rows)],
            .columns = 1,
            .pre = 1,
            .post = 1,
            .salt = salt * 4 + 1,
        };
        snprintf(name, sizeof name, "set.%zu", i); // the same in every set
        rank_step(r, "set %d, %s of %zu", set->id, hvd_op_name(c.op), c.rows);
        op_run(r, &c, name);
    }
}

static void add_set(rank_t *r, set_t *set)
{
    CHECK_OK(r, hvd_process_set_add(r->ctx, set->ranks, set->n, &set->id, r->text, sizeof r->text));
}

static void remove_set(rank_t *r, const set_t *set)
{
    CHECK_OK(r, hvd_process_set_remove(r->ctx, set->id, r->text, sizeof r->text));
}

// --- Given at init ------------------------------------------------------------------------------

static hvd_status_t open_with(rank_t *r, const set_t *sets, int n)
{
    const int *lists[8];
    int sizes[8];
    for (int i = 0; i < n; i++) {
        lists[i] = sets[i].ranks;
        sizes[i] = sets[i].n;
    }
    hvd_options_t more = {.process_sets = lists, .process_set_sizes = sizes, .n_process_sets = n};
    return rank_try_open(r, &more);
}

static void static_sets(rank_t *r, void *arg)
{
    (void)arg;
    set_t sets[] = {
        describe_set(r, 0, 2, r->size),
        describe_set(r, 1, 2, r->size),
        describe_set(r, 1, 1, r->size),
    };
    int n = r->size > 2 ? 3 : 2;
    CHECK_OK(r, open_with(r, sets, n));
    CHECK_INT(r, hvd_process_set_count(r->ctx), n + 1);
    int ids[8];
    CHECK_OK(r, hvd_process_set_ids(r->ctx, ids, 8));
    for (int i = 0; i < n; i++) {
        sets[i].id = i + 1;
        CHECK_INT(r, ids[i + 1], i + 1);
        check_queries(r, &sets[i]);
        use_set(r, &sets[i], (unsigned)i);
    }
    set_t all = describe_set(r, 0, 1, r->size);
    check_queries(r, &all);
    use_set(r, &all, 5);
    // Without the knob that is all there will ever be.
    int id = -1;
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, sets[0].ranks, 1, &id, r->text, sizeof r->text),
                 HVD_STATIC_SETS);
    CHECK_HAS(r, r->text, "HOROVOD_DYNAMIC_PROCESS_SETS");
    CHECK_STATUS(r, hvd_process_set_remove(r->ctx, 1, r->text, sizeof r->text), HVD_STATIC_SETS);
    CHECK_INT(r, id, -1);
    use_set(r, &sets[0], 6);
    rank_close(r);
}

// Twice the same ranks: refused everywhere. A second try without is as good as a first.
static void duplicate_then_again(rank_t *r, void *arg)
{
    (void)arg;
    set_t sets[] = {
        describe_set(r, 0, 2, r->size),
        describe_set(r, 1, 2, r->size),
        describe_set(r, 0, 2, r->size),
    };
    rank_step(r, "init with the same set twice");
    CHECK(r, open_with(r, sets, 3) != HVD_OK);
    CHECK_HAS(r, r->text, "rocess set");
    rank_step(r, "init again");
    CHECK_OK(r, open_with(r, sets, 2));
    for (int i = 0; i < 2; i++) {
        sets[i].id = i + 1;
        check_queries(r, &sets[i]);
        use_set(r, &sets[i], 1);
    }
    rank_close(r);
}

static void different_lists_at_init(rank_t *r, void *arg)
{
    (void)arg;
    set_t sets[] = {describe_set(r, 0, 2, r->size), describe_set(r, r->rank == 0 ? 1 : 0, 1, 2)};
    rank_step(r, "init with different sets");
    CHECK_STATUS(r, open_with(r, sets, 2), HVD_INVALID_ARGUMENT);
    CHECK_HAS(r, r->text, "different process sets");
    rank_open(r);
    rank_barrier(r);
    rank_close(r);
}

// --- Added and removed --------------------------------------------------------------------------

static void add_use_remove(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    set_t even = describe_set(r, 0, 2, r->size);
    set_t odd = describe_set(r, 1, 2, r->size);
    for (int round = 0; round < 5; round++) {
        rank_step(r, "round %d", round);
        add_set(r, &even);
        add_set(r, &odd);
        CHECK(r, even.id > 0 && odd.id > 0 && even.id != odd.id);
        CHECK(r, even.id <= 2 && odd.id <= 2); // ids of removed sets come again
        CHECK_INT(r, hvd_process_set_count(r->ctx), 3);
        rank_check_sum(r, "same ids", 0, even.id * 100 + odd.id,
                       (even.id * 100 + odd.id) * r->size);
        check_queries(r, &even);
        check_queries(r, &odd);
        use_set(r, &even, (unsigned)round);
        use_set(r, &odd, (unsigned)round);
        remove_set(r, round % 2 ? &even : &odd);
        remove_set(r, round % 2 ? &odd : &even);
        CHECK_INT(r, hvd_process_set_count(r->ctx), 1);
        CHECK_INT(r, hvd_process_set_size(r->ctx, even.id), HVD_UNKNOWN_SET);
        CHECK_INT(r, hvd_process_set_rank(r->ctx, odd.id), HVD_UNKNOWN_SET);
    }
    rank_close(r);
}

static void wrong_changes(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    set_t even = describe_set(r, 0, 2, r->size);
    set_t all = describe_set(r, 0, 1, r->size);
    add_set(r, &even);
    int id = -1;
    char *text = r->text;
    size_t bytes = sizeof r->text;
    rank_step(r, "sets that are there already");
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, even.ranks, even.n, &id, text, bytes),
                 HVD_EXISTING_SET);
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, all.ranks, all.n, &id, text, bytes),
                 HVD_EXISTING_SET);
    rank_step(r, "ranks that do not exist");
    const int beyond[] = {0, r->size};
    const int negative[] = {-1};
    const int twice[] = {0, 0};
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, beyond, 2, &id, text, bytes), HVD_INVALID_ARGUMENT);
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, negative, 1, &id, text, bytes),
                 HVD_INVALID_ARGUMENT);
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, twice, 2, &id, text, bytes), HVD_INVALID_ARGUMENT);
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, NULL, 0, &id, text, bytes), HVD_INVALID_ARGUMENT);
    rank_step(r, "sets that are not there");
    CHECK_STATUS(r, hvd_process_set_remove(r->ctx, 0, text, bytes), HVD_UNKNOWN_SET);
    CHECK_STATUS(r, hvd_process_set_remove(r->ctx, 55, text, bytes), HVD_UNKNOWN_SET);
    rank_step(r, "different lists");
    const int mine[] = {r->rank == 0 ? 0 : 1};
    CHECK_STATUS(r, hvd_process_set_add(r->ctx, mine, 1, &id, text, bytes), HVD_MISMATCH);
    CHECK_HAS(r, text, "Mismatched process sets:");
    CHECK_INT(r, id, -1);
    CHECK_INT(r, hvd_process_set_count(r->ctx), 2);
    use_set(r, &even, 3);
    use_set(r, &all, 3);
    rank_close(r);
}

// The order in which ranks are named does not matter.
static void order_of_ranks(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    set_t set = describe_set(r, 0, 1, r->size - 1);
    int named[MAX_RANKS];
    for (int i = 0; i < set.n; i++) {
        named[i] = set.ranks[r->rank % 2 ? i : set.n - 1 - i];
    }
    CHECK_OK(r, hvd_process_set_add(r->ctx, named, set.n, &set.id, r->text, sizeof r->text));
    check_queries(r, &set);
    use_set(r, &set, 1);
    rank_close(r);
}

// --- At the same time ---------------------------------------------------------------------------

#define N_THREADS 3

typedef struct user {
    rank_t r;
    set_t sets[N_THREADS];
    int thread;
    int n_rounds;
} user_t;

static void use_set_once(rank_t *r, const set_t *set, int round)
{
    op_case_t c = {
        .op = round % 3 == 2 ? HVD_ALLGATHER : HVD_ALLREDUCE,
        .dtype = HVD_FLOAT32,
        .reduce = HVD_SUM,
        .form = FORM_OUT_OF_PLACE,
        .set = set->id,
        .members = set->ranks,
        .n_members = set->n,
        .n_tensors = 1,
        .n_dims = 1,
        .rows = round % 4 == 3 ? 20000 : 50,
        .columns = 1,
        .pre = 1,
        .post = 1,
        .salt = (unsigned)round,
    };
    char name[32];
    snprintf(name, sizeof name, "round.%d", round % 7);
    rank_step(r, "set %d, round %d", set->id, round);
    op_run(r, &c, name);
}

// Each thread looks after one set of its own. All block; ranks and threads come in any order.
static void *user_main(void *arg)
{
    user_t *user = arg;
    const set_t *set = &user->sets[user->thread];
    for (int round = 0; set->member >= 0 && round < user->n_rounds; round++) {
        use_set_once(&user->r, set, round);
    }
    return NULL;
}

static void overlapping_sets_in_threads(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    user_t users[N_THREADS];
    pthread_t threads[N_THREADS];
    set_t sets[N_THREADS] = {
        describe_set(r, 0, 1, r->size),
        describe_set(r, 0, 2, r->size),
        describe_set(r, 0, 1, r->size - 1),
    };
    add_set(r, &sets[1]);
    add_set(r, &sets[2]);
    for (int i = 0; i < N_THREADS; i++) {
        int t = (i + r->rank) % N_THREADS;
        users[t] = (user_t){.r = rank_thread(r, 1 + t), .thread = t, .n_rounds = FEWER(200)};
        memcpy(users[t].sets, sets, sizeof sets);
        CHECK_INT(r, pthread_create(&threads[t], NULL, user_main, &users[t]), 0);
    }
    for (int t = 0; t < N_THREADS; t++) {
        pthread_join(threads[t], NULL);
    }
    remove_set(r, &sets[2]);
    use_set(r, &sets[1], 9);
    rank_close(r);
}

// A set goes while a member still waits in it: that member is told.
static void removed_under_way(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    set_t set = describe_set(r, 0, 1, r->size - 1);
    add_set(r, &set);
    float value = 1;
    int64_t shape[1] = {1};
    hvd_tensor_t tensor = {.input = &value, .output = &value, .n_dims = 1, .shape = shape};
    hvd_handle_t handle = 0;
    if (r->rank == 0) { // the other members never submit it
        hvd_request_t request = {
            .op = HVD_ALLREDUCE,
            .name = "orphan",
            .dtype = HVD_FLOAT32,
            .reduce = HVD_SUM,
            .process_set = set.id,
            .tensors = &tensor,
            .n_tensors = 1,
        };
        CHECK_OK(r, hvd_submit(r->ctx, &request, &handle, r->text, sizeof r->text));
    }
    remove_set(r, &set);
    if (r->rank == 0) {
        hvd_result_t result;
        CHECK_STATUS(r, hvd_wait(r->ctx, handle, 60000), HVD_UNKNOWN_SET);
        CHECK_OK(r, hvd_result(r->ctx, handle, &result));
        CHECK_HAS(r, result.text, "orphan");
        hvd_release(r->ctx, handle);
    }
    rank_check_sum(r, "goes on", 0, 1, r->size);
    rank_close(r);
}

#define DYNAMIC {"HOROVOD_DYNAMIC_PROCESS_SETS=1"}

static const subtest_t subtests[] = {
    {.name = "static sets", .fn = static_sets, .min_ranks = 2},
    {.name = "duplicate, then again", .fn = duplicate_then_again, .min_ranks = 2},
    {.name = "different lists at init", .fn = different_lists_at_init, .min_ranks = 2},
    {.name = "add, use, remove", .fn = add_use_remove, .min_ranks = 2, .env = DYNAMIC},
    {.name = "wrong changes", .fn = wrong_changes, .min_ranks = 3, .env = DYNAMIC},
    {.name = "order of ranks", .fn = order_of_ranks, .min_ranks = 3, .env = DYNAMIC},
    {
        .name = "overlapping sets in threads",
        .fn = overlapping_sets_in_threads,
        .min_ranks = 3,
        .env = DYNAMIC,
    },
    {.name = "removed under way", .fn = removed_under_way, .min_ranks = 3, .env = DYNAMIC},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
