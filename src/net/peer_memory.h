// SPDX-License-Identifier: Apache-2.0
//
// peer_memory.h - reading and writing the memory of another rank of this host, without its help.
//
// The kernel allows that to processes of one user (process_vm_readv), unless a container, a
// hardened kernel or separate process namespaces forbid it. Whether it works is found out once, by
// reading a word whose value the owner has told: so a number that means another process here is
// noticed.
// Pure but for system calls; any thread.
#ifndef HVD_NET_PEER_MEMORY_H
#define HVD_NET_PEER_MEMORY_H

#include "base/base.h"

#include <sys/uio.h>

// How to recognise a process: a word of its own memory.
typedef struct memory_id {
    int64_t pid;
    uint64_t at, value;
} memory_id_t;

// Tells the others about `word`, which stays where it is, and lets relatives of this process in.
memory_id_t memory_introduce(const uint64_t *word);
void memory_withdraw(void); // lets nobody in any more who could not get in before
bool memory_is_reached(const memory_id_t *id);

// Copies between two lists of equal length, ours and those of process pid: to them if `writes`,
// else from them. Bytes copied, perhaps not all; -1 with errno: none.
ssize_t memory_copy(int64_t pid, bool writes, const struct iovec *ours, size_t n_ours,
                    const struct iovec *theirs, size_t n_theirs);

#endif
