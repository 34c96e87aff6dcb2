// SPDX-License-Identifier: Apache-2.0
//
// Tests of the rules that run (base/guard.h): each is broken on purpose, in a child of its own, and
// must be caught on the spot and by its name. Builds without checks must not even look: there the
// tests below say so instead. That the compiler sees some of it earlier is for test_guard.py.
#define _GNU_SOURCE
#include "coord_world.h"

#include "coll/exec.h"
#include "coord/internal.h"
#include "engine/engine.h"
#include "engine/run.h"
#include "observe/internal.h"
#include "web/web.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(HVD_CHECKS)
#define CHECKS true
#else
#define CHECKS false
#endif

// --- What must not be done ----------------------------------------------------------------------

static hvd_ctx_t nobodys; // neither locked nor held

static void run_without_the_baton(void) NOT_ANALYSED
{
    run_progress(&nobodys);
}

static void fail_without_the_baton(void) NOT_ANALYSED
{
    err_t err = {.status = HVD_PEER_LOST};
    engine_fail(&nobodys, &err, -1);
}

static void make_a_request_without_the_lock(void) NOT_ANALYSED
{
    request_new(&nobodys);
}

static void *lock_and_stay(void *lock) NOT_ANALYSED
{
    lock_take(lock);
    return NULL;
}

static void make_a_request_under_anothers_lock(void) NOT_ANALYSED
{
    pthread_t other;
    lock_init(&nobodys.lock);
    assert_int_equal(pthread_create(&other, NULL, lock_and_stay, &nobodys.lock), 0);
    pthread_join(other, NULL);
    request_new(&nobodys);
}

static void look_for_a_set_with_neither(void)
{
    set_find(&nobodys, 0);
}

static void complete_a_request_twice(void)
{
    static request_t request;
    atomic_store(&request.state, REQUEST_DONE);
    request_complete(&nobodys, &request, HVD_OK, NULL);
}

static void take_a_lock_twice(void) NOT_ANALYSED
{
    lock_init(&nobodys.lock);
    lock_take(&nobodys.lock);
    lock_take(&nobodys.lock);
}

static void release_a_lock_of_nobody(void) NOT_ANALYSED
{
    lock_init(&nobodys.lock);
    lock_release(&nobodys.lock);
}

static void sequence_on_rank_1(void)
{
    world_t *world = world_new(2, world_params());
    sequence_report(world->ranks[1], HVD_STALLED, "who am I?");
}

static void count_a_share_that_never_came(void)
{
    world_t *world = world_new(3, world_params());
    submit(world, 0, (ask_t){.name = "x"});
    entry_find(sets_find(world->ranks[0], 0), "x", 1)->n_have++;
    submit(world, 1, (ask_t){.name = "x"});
    world_settle(world);
}

static void complete_a_round_that_is_closed(void)
{
    world_t *world = world_new(2, world_params());
    submit(world, 0, (ask_t){.name = "x"});
    entry_t *entry = entry_find(sets_find(world->ranks[0], 0), "x", 1);
    entry->is_open = false;
    sequence_complete(world->ranks[0], entry);
}

static void decide_more_than_was_submitted(void)
{
    world_t *world = world_new(2, world_params());
    world->ranks[0]->entries.n_pending--;
    coord_tick(world->ranks[0], world->now_ns);
}

static void queue_on_rank_1(void)
{
    world_t *world = world_new(2, world_params());
    submit(world, 1, (ask_t){.name = "x"});
    entry_t *entry = entry_find(sets_find(world->ranks[1], 0), "x", 1);
    chain_append(&world->ranks[1]->sequencer.ready, &entry->queued);
    world->ranks[1]->sequencer.n_queued++;
    coord_next(world->ranks[1]);
}

static lock_t job_lock;
static observe_t observed = {.job.lock = &job_lock};

static void record_without_the_lock(void)
{
    observe_completed(&observed, NULL, HVD_OK);
}

static void overrun_the_recorder(void)
{
    observed.recorder = recorder_new();
    observed.counters = counters_new(1);
    observed.recorder->n = RECORDER_SLOTS + 1; // of which none has been counted
    lock_init(&job_lock);
    lock_take(observed.job.lock);
    counters_catch_up(&observed);
    lock_release(observed.job.lock);
}

static void receive_more_than_a_step_has(void)
{
    step_t step = {.kind = STEP_RECV, .after = {NO_STEP, NO_STEP}, .bytes = 8};
    plan_t plan = {.steps = &step, .n_steps = 1};
    state_t state = {.first_edge = NO_STEP};
    exec_t exec = {.run.plan = &plan, .states = &state, .n_left = 1};
    exec_pass(&exec, 0, 9);
}

static void end_a_step_that_has_not_ended(void)
{
    step_t step = {.kind = STEP_RECV, .after = {NO_STEP, NO_STEP}, .bytes = 8};
    plan_t plan = {.steps = &step, .n_steps = 1};
    state_t state = {.first_edge = NO_STEP, .next_in_queue = NO_STEP, .done = 7};
    exec_t exec = {.run.plan = &plan, .states = &state, .n_left = 1};
    exec_dequeue(&exec, &(queue_t){0, 0});
}

static void use_nccl_without_the_baton(void) NOT_ANALYSED
{
    way_nccl_progress(&nobodys, NULL, NULL, NULL);
}

static void look_at_a_job_without_its_lock(void) NOT_ANALYSED
{
    static model_t model;
    model_sums(&model);
}

static const struct {
    void (*offend)(void);
    const char *in, *rule; // who notices, and which rule it names
} offences[] = {
    {run_without_the_baton, "run_progress", "HELD"},
    {fail_without_the_baton, "engine_fail", "HELD"},
    {use_nccl_without_the_baton, "way_nccl_progress", "HELD"},
    {look_at_a_job_without_its_lock, "model_sums", "LOCKED"},
    {make_a_request_without_the_lock, "request_new", "LOCKED"},
    {make_a_request_under_anothers_lock, "request_new", "LOCKED"},
    {look_for_a_set_with_neither, "set_find", "LOCKED or HELD"},
    {complete_a_request_twice, "request_complete", "state_of(request) == REQUEST_IN_FLIGHT"},
    {take_a_lock_twice, "lock_take", "!owner_is_me(&lock->owner)"},
    {release_a_lock_of_nobody, "lock_release", "owner_is_me(&lock->owner)"},
    {sequence_on_rank_1, "sequence_report", "SEQUENCER"},
    {count_a_share_that_never_came, "merge_share", "SOUND_ROUND"},
    {complete_a_round_that_is_closed, "sequence_complete", "SOUND_ROUND"},
    {decide_more_than_was_submitted, "coord_tick", "SOUND"},
    {queue_on_rank_1, "coord_next", "SOUND"},
    {record_without_the_lock, "observe_completed", "LOCKED"},
    {overrun_the_recorder, "counters_catch_up", "c->n_records <= recorder->n"},
    {receive_more_than_a_step_has, "exec_pass", "state->waits_for == 0 && bytes <= limit"},
    {end_a_step_that_has_not_ended, "exec_dequeue", "exec->n_left > 0"},
};

// --- Seeing it caught ---------------------------------------------------------------------------

// Runs it in a child; its last words, and true if it died of them.
static bool dies(void (*offend)(void), char *words, size_t bytes)
{
    int ends[2], code;
    size_t n = 0;
    ssize_t got;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0});
        signal(SIGILL, SIG_DFL); // cmocka would go on with the next test
        signal(SIGTRAP, SIG_DFL);
        alarm(60);
        dup2(ends[1], STDERR_FILENO);
        offend();
        _exit(0);
    }
    assert_true(child > 0);
    close(ends[1]);
    while ((got = read(ends[0], words + n, bytes - 1 - n)) > 0) {
        n += (size_t)got;
    }
    words[n] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, &code, 0), child);
    return WIFSIGNALED(code) && WTERMSIG(code) != SIGALRM;
}

static void broken_rules_are_caught_by_name(void **state)
{
    (void)state;
    for (size_t i = 0; CHECKS && i < N_ELEMENTS(offences); i++) {
        char words[8192], expected[256];
        snprintf(expected, sizeof expected, ": %s breaks a rule: %s", offences[i].in,
                 offences[i].rule);
        bool has_died = dies(offences[i].offend, words, sizeof words);
        if (!has_died || strstr(words, expected) == NULL) {
            fail_msg("'%s' was not caught; it said: %s", expected, words);
        }
    }
}

static void without_checks_nothing_is_looked_at(void **state)
{
    (void)state;
    int n_looks = 0;
    INVARIANT(++n_looks > 0);
    RULE("a rule that is kept", ++n_looks > 0);
    assert_int_equal(n_looks, CHECKS ? 2 : 0);
    owner_t owner = {0};
    owner_set(&owner);
    assert_int_equal(owner_is_me(&owner), CHECKS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(broken_rules_are_caught_by_name),
        cmocka_unit_test(without_checks_nothing_is_looked_at),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
