// SPDX-License-Identifier: Apache-2.0
//
// futex.c - sleeping on a word of memory until somebody changes it.
//
// FUTEX_WAIT_BITSET is used because it takes an absolute deadline: a wait that is interrupted and
// tried again cannot grow. The futexes are not private, for the word may lie in memory shared by
// the processes of a host. Callers look at the word again after every return: a signal, a changed
// word and a wake all end the wait. Any thread.
#include "base/base.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void futex_wait(atomic_uint *word, unsigned expected, uint64_t deadline_ns)
{
    struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % NS_PER_S)};
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected,
            deadline_ns == NEVER_NS ? NULL : &deadline, NULL, FUTEX_BITSET_MATCH_ANY);
}

void futex_wake(atomic_uint *word, int n_waiters)
{
    syscall(SYS_futex, word, FUTEX_WAKE, n_waiters, NULL, NULL, 0);
}
