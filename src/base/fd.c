// SPDX-License-Identifier: Apache-2.0
//
// fd.c - descriptors that a forked child must not keep.
//
// A connection ends when the last process that has it closes it. A child forked after init (a data
// loader) would so hide the death of its parent from all other ranks, and keep its ports open, for
// as long as it lives. There is no flag for it as there is for exec, so the child closes them
// itself, first thing: the numbers are marked in a bitmap that it finds in its copy of the memory.
// Closing says nothing to the peer, since the parent still has the connection.
//
// The bitmap is the process's, not a context's, because fork() is. A number is marked while the
// library has it open and no longer. Any thread.
#include "base/base.h"

#include <unistd.h>

#define MAX_MARKED (64 * 1024) // higher numbers stay open in children, as they would without this
#define WORD_BITS 64

static atomic_uint_least64_t marked[MAX_MARKED / WORD_BITS];

static void close_marked(void)
{
    for (int i = 0; i < MAX_MARKED / WORD_BITS; i++) {
        uint64_t word = atomic_exchange(&marked[i], 0);
        for (; word != 0; word &= word - 1) {
            close(i * WORD_BITS + __builtin_ctzll(word));
        }
    }
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, close_marked); // without memory for it all is as it was before
}

void fd_not_for_children(int fd)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (fd >= 0 && fd < MAX_MARKED) {
        atomic_fetch_or(&marked[fd / WORD_BITS], UINT64_C(1) << fd % WORD_BITS);
    }
}

void fd_for_children(int fd)
{
    if (fd >= 0 && fd < MAX_MARKED) {
        atomic_fetch_and(&marked[fd / WORD_BITS], ~(UINT64_C(1) << fd % WORD_BITS));
    }
}

void fd_close(int fd)
{
    fd_for_children(fd);
    close(fd); // unmarked by now: the number may be somebody else's a moment later
}
