// SPDX-License-Identifier: Apache-2.0
//
// peer_memory.c - see peer_memory.h.
//
// Kernels with Yama (Ubuntu's) let a process in only if it is an ancestor, or has been named. What
// is named here is the parent, which for ranks of one launcher is the same: it and its descendants
// may come in, and no other process of the user. Ranks with other parents then stay apart, and the
// probe says so.
#define _GNU_SOURCE
#include "net/peer_memory.h"

#include <sys/prctl.h>
#include <unistd.h>

static void let_in(unsigned long pid)
{
#if defined(PR_SET_PTRACER)
    prctl(PR_SET_PTRACER, pid, 0ul, 0ul, 0ul); // EINVAL without Yama: nothing to do
#else
    (void)pid;
#endif
}

memory_id_t memory_introduce(const uint64_t *word)
{
    let_in((unsigned long)getppid());
    return (memory_id_t){.pid = getpid(), .at = (uint64_t)(uintptr_t)word, .value = *word};
}

void memory_withdraw(void)
{
    let_in(0);
}

bool memory_is_reached(const memory_id_t *id)
{
    uint64_t value = 0;
    struct iovec here = {.iov_base = &value, .iov_len = sizeof value};
    struct iovec there = {.iov_base = (void *)(uintptr_t)id->at, .iov_len = sizeof value};
    return memory_copy(id->pid, false, &here, 1, &there, 1) == (ssize_t)sizeof value &&
           value == id->value;
}

ssize_t memory_copy(int64_t pid, bool writes, const struct iovec *ours, size_t n_ours,
                    const struct iovec *theirs, size_t n_theirs)
{
    return (writes ? process_vm_writev : process_vm_readv)((pid_t)pid, ours, n_ours, theirs,
                                                           n_theirs, 0);
}
