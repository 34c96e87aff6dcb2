// SPDX-License-Identifier: Apache-2.0
//
// test_random.c - thousands of random operations, submitted in another order on every rank, from
// two threads, on overlapping process sets, and every result checked.
//
// Operations come in rounds. All ranks roll the same operations of a round from the seed; each
// shuffles them by its own dice, deals them to its two threads, and waits for all of them before
// the next round. In between, threads poll, wait for moments and let handles go. Names come again
// in later rounds, mostly with the same operation behind them, sometimes with another. To repeat a
// failure, pass the seed it printed: --seed N.
#include "cases.h"

#include <pthread.h>
#include <stdio.h>

#define N_OPERATIONS 10000
#define PER_ROUND 100
#define N_NAMES 730 // not a multiple of PER_ROUND: a name's neighbours change
#define MAX_BYTES (64 * KIB)
#define N_SETS 4

typedef struct set_members {
    int id;
    int ranks[MAX_RANKS];
    int n;
} set_members_t;

typedef struct worker {
    rank_t r;
    const set_members_t *sets;
    const int *operations; // numbers of this thread's operations in this round
    int n;
    int round;
    dice_t dice;
} worker_t;

// --- The operations -----------------------------------------------------------------------------

static uint64_t mix(uint64_t a, uint64_t b)
{
    dice_t dice = {.state = a * 0x2545f4914f6cdd1dull + b};
    return dice_next(&dice);
}

static int name_of(int operation)
{
    return operation % N_NAMES;
}

// Four of five names keep their operation from round to round.
static dice_t dice_of(uint64_t seed, int operation)
{
    int name = name_of(operation);
    bool changes = mix(seed, (uint64_t)name) % 5 == 0;
    return (dice_t){.state =
                        mix(seed + 1, changes ? 1000000 + (uint64_t)operation : (uint64_t)name)};
}

static int set_of(uint64_t seed, int operation)
{
    int choice = (int)(mix(seed + 2, (uint64_t)name_of(operation)) % (2 * N_SETS));
    return choice < N_SETS ? choice : 0; // mostly all ranks
}

static op_case_t operation_of(uint64_t seed, const set_members_t *sets, int operation)
{
    const set_members_t *set = &sets[set_of(seed, operation)];
    dice_t dice = dice_of(seed, operation);
    return op_random(&dice, set->id, set->ranks, set->n, MAX_BYTES);
}

static bool is_member(const set_members_t *set, int rank)
{
    for (int i = 0; i < set->n; i++) {
        if (set->ranks[i] == rank) {
            return true;
        }
    }
    return false;
}

// --- One thread, one round ----------------------------------------------------------------------

static void do_something_else(worker_t *w, op_run_t *runs, int n_submitted)
{
    op_run_t *run = &runs[dice_below(&w->dice, n_submitted)];
    if (run->forgets) {
        return;
    }
    hvd_status_t status = HVD_OK;
    switch (dice_below(&w->dice, 6)) {
    case 0:
        status = hvd_poll(w->r.ctx, run->handle);
        break;
    case 1:
        status = hvd_wait(w->r.ctx, run->handle, dice_below(&w->dice, 3));
        break;
    case 2:
        sched_yield();
        break;
    default:
        break;
    }
    CHECK(&w->r, status == HVD_OK || status == HVD_IN_PROGRESS || status == HVD_TIMEOUT);
}

static void submit_one(worker_t *w, op_run_t *run, int operation)
{
    uint64_t seed = w->r.options->seed;
    op_case_t c = operation_of(seed, w->sets, operation);
    char name[32];
    char text[STEP_BYTES];
    snprintf(name, sizeof name, "n%d", name_of(operation));
    op_describe(&c, text, sizeof text);
    rank_step(&w->r, "seed %llu, round %d, submits %s: %s", (unsigned long long)seed, w->round,
              name, text);
    bool owns_output = c.form == FORM_LIBRARY; // which goes with the handle
    run->forgets = !owns_output && dice_below(&w->dice, 10) == 0;
    bool waits = !run->forgets && dice_below(&w->dice, 8) == 0;
    op_submit(&w->r, &c, name, waits ? HVD_WAITS : 0, run);
    if (waits) {
        hvd_wait(w->r.ctx, run->handle, 1); // in vain if others come to it later
    }
}

static void *work(void *arg)
{
    worker_t *w = arg;
    op_run_t *runs = calloc((size_t)w->n + 1, sizeof *runs);
    int *order = calloc((size_t)w->n + 1, sizeof *order);
    CHECK(&w->r, runs != NULL && order != NULL);
    for (int i = 0; i < w->n; i++) {
        order[i] = i;
        submit_one(w, &runs[i], w->operations[i]);
        do_something_else(w, runs, i + 1);
    }
    dice_shuffle(&w->dice, order, w->n);
    for (int i = 0; i < w->n; i++) {
        char text[STEP_BYTES];
        op_describe(&runs[order[i]].c, text, sizeof text);
        rank_step(&w->r, "seed %llu, round %d, waits for n%d: %s",
                  (unsigned long long)w->r.options->seed, w->round,
                  name_of(w->operations[order[i]]), text);
        op_check(&w->r, &runs[order[i]]);
    }
    free(runs);
    free(order);
    return NULL;
}

// --- All rounds ---------------------------------------------------------------------------------

static void run_round(worker_t workers[2], int round, dice_t *dice)
{
    const rank_t *r = &workers[0].r;
    int operations[PER_ROUND];
    int n = 0;
    for (int i = 0; i < PER_ROUND; i++) {
        int operation = round * PER_ROUND + i;
        if (is_member(&workers[0].sets[set_of(r->options->seed, operation)], r->rank)) {
            operations[n++] = operation;
        }
    }
    dice_shuffle(dice, operations, n);
    int half = n > 0 ? dice_below(dice, n) : 0;
    for (int i = 0; i < 2; i++) {
        workers[i].round = round;
        workers[i].operations = operations + (i == 0 ? 0 : half);
        workers[i].n = i == 0 ? half : n - half;
    }
    pthread_t thread;
    CHECK_INT(r, pthread_create(&thread, NULL, work, &workers[1]), 0);
    work(&workers[0]);
    pthread_join(thread, NULL);
}

static void add_set(rank_t *r, set_members_t *set, int first, int step)
{
    set->n = 0;
    for (int rank = first; rank < r->size; rank += step) {
        set->ranks[set->n++] = rank;
    }
    if (set->n == 0 || set->n == r->size) { // is there already
        *set = (set_members_t){.n = r->size};
        for (int rank = 0; rank < r->size; rank++) {
            set->ranks[rank] = rank;
        }
        return;
    }
    CHECK_OK(r, hvd_process_set_add(r->ctx, set->ranks, set->n, &set->id, r->text, sizeof r->text));
}

static void random_operations(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    // All; the even ranks; the odd ones; all but the first.
    static const int starts[N_SETS][2] = {{0, 1}, {0, 2}, {1, 2}, {1, 1}};
    set_members_t sets[N_SETS] = {0};
    for (int s = 0; s < N_SETS; s++) {
        bool again = s == 3 && r->size < 3; // the odd ranks, once more
        if (again) {
            sets[s] = sets[2];
        } else {
            add_set(r, &sets[s], starts[s][0], starts[s][1]);
        }
    }
    dice_t dice = {.state = mix(r->options->seed + 3, (uint64_t)r->rank)};
    worker_t workers[2];
    for (int i = 0; i < 2; i++) {
        workers[i] = (worker_t){.r = rank_thread(r, 1 + i), .sets = sets};
        workers[i].dice.state = dice_next(&dice);
    }
    int n = r->options->count > 0 ? r->options->count : FEWER(N_OPERATIONS);
    for (int round = 0; round < (n + PER_ROUND - 1) / PER_ROUND; round++) {
        run_round(workers, round, &dice);
    }
    rank_close(r);
}

static const subtest_t subtests[] = {
    {
        .name = "random operations",
        .fn = random_operations,
        .min_ranks = 2,
        .env = {"HOROVOD_DYNAMIC_PROCESS_SETS=1"},
    },
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
