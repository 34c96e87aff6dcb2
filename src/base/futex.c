// SPDX-License-Identifier: Apache-2.0
//
// futex.c - sleeping on a word of memory until somebody changes it.
//
// FUTEX_WAIT_BITSET is used because it takes an absolute deadline: a wait that is interrupted and
// tried again cannot grow. The futexes are not private, for the word may lie in memory shared by
// the processes of a host. Callers look at the word again after every return: a signal, a changed
// word and a wake all end the wait. Any thread.
//
// The slow half of lock_t (guard.h) is here as well: whoever finds it taken looks at it for as long
// as a holder mostly takes, then marks it as wanted and sleeps.
#include "base/base.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOCK_SPINS 100

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

void lock_wait(atomic_uint *word)
{
    for (int i = 0; i < LOCK_SPINS; i++) {
        unsigned was = LOCK_FREE;
        if (atomic_load_explicit(word, memory_order_relaxed) == LOCK_FREE &&
            atomic_compare_exchange_strong_explicit(word, &was, LOCK_TAKEN, memory_order_acquire,
                                                    memory_order_relaxed)) {
            return;
        }
        cpu_relax();
    }
    while (atomic_exchange_explicit(word, LOCK_WANTED, memory_order_acquire) != LOCK_FREE) {
        futex_wait(word, LOCK_WANTED, NEVER_NS);
    }
}

void lock_wake_one(atomic_uint *word)
{
    futex_wake(word, 1);
}
