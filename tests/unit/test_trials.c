// SPDX-License-Identifier: Apache-2.0
//
// test_trials.c - which way of copying is kept (engine/trials.h): turns, votes, and trying
// again.
#include "engine/trials.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define WINDOWS_NS 700
#define MEMBERS 4

// Runs one whole trial and says what it found.
static copying_t try_it(trial_t *trial, uint64_t direct_ns, int others_for_windows)
{
    for (int turn = 0; turn < TRIAL_TURNS; turn++) {
        bool goes_direct = trial_copying(trial) == COPY_DIRECTLY;
        uint64_t slow_start = turn < 2 ? 100000 : 0; // memory is touched for the first time
        int votes = others_for_windows + trial_is_for_windows(trial);
        assert_true(trial_counts(trial));
        assert_int_equal(goes_direct, turn % 2);
        trial_ended(trial, slow_start + (goes_direct ? direct_ns : WINDOWS_NS), votes, MEMBERS);
    }
    assert_false(trial_counts(trial));
    return trial_copying(trial);
}

static void most_members_decide(void **state)
{
    (void)state;
    trial_t slower = {0}, faster = {0}, outvoted = {0}, halves = {0};
    assert_int_equal(try_it(&slower, 900, 3), COPY_BY_WINDOWS);
    assert_int_equal(try_it(&faster, 600, 0), COPY_DIRECTLY);
    assert_int_equal(try_it(&outvoted, 600, 3), COPY_BY_WINDOWS);
    assert_int_equal(try_it(&halves, 900, 1), COPY_DIRECTLY);
}

static void it_is_tried_again(void **state)
{
    (void)state;
    trial_t trial = {0};
    assert_int_equal(try_it(&trial, 900, 3), COPY_BY_WINDOWS);
    for (int i = TRIAL_TURNS; i < TRIAL_LASTS_TASKS; i++) {
        assert_int_equal(trial_copying(&trial), COPY_BY_WINDOWS);
        trial_ended(&trial, 0, 0, MEMBERS);
    }
    assert_int_equal(try_it(&trial, 600, 0), COPY_DIRECTLY); // nothing of before counts
}

static void sizes_have_trials_of_their_own(void **state)
{
    (void)state;
    static trials_t trials;
    const size_t mib = 1024 * KIB;
    assert_ptr_equal(trial_of(&trials, HVD_ALLGATHER, mib),
                     trial_of(&trials, HVD_ALLGATHER, 2 * mib - 1));
    assert_ptr_not_equal(trial_of(&trials, HVD_ALLGATHER, mib),
                         trial_of(&trials, HVD_ALLGATHER, 2 * mib));
    assert_ptr_not_equal(trial_of(&trials, HVD_ALLGATHER, mib),
                         trial_of(&trials, HVD_BROADCAST, mib));
    assert_ptr_equal(trial_of(&trials, HVD_ALLTOALL, SIZE_MAX),
                     &trials.of[HVD_ALLTOALL][TRIAL_SIZES - 1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(most_members_decide),
        cmocka_unit_test(it_is_tried_again),
        cmocka_unit_test(sizes_have_trials_of_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
