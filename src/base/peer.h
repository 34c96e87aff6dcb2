// SPDX-License-Identifier: Apache-2.0
//
// peer.h - who the ranks are, and what the process table says of them: for sentences.
//
// A table of peers is filled once at the start; any thread may read it afterwards.
#ifndef HVD_BASE_PEER_H
#define HVD_BASE_PEER_H

#include "base/base.h"

#define PEER_TEXT_BYTES 192

typedef struct peer_id {
    int pid;
    uint64_t started; // of the process, in the kernel's ticks; tells a reused pid from the peer's
    uint64_t space;   // the namespaces in which that pid and that time mean something
    uint64_t network; // the network namespace; 0: not known
    uint64_t kernel;  // equal for ranks, of whatever hosts, that share a machine's cores
    char host[64];
} peer_id_t;

typedef struct peers {
    int self, size;
    const int *host_of;   // host index of every rank
    peer_id_t *of;        // by rank
    uint64_t n_oom_kills; // on this host, before the start
} peers_t;

peer_id_t peer_of_self(const char *host);
uint64_t peer_oom_kills(void); // processes this host's kernel has ended for want of memory
// "rank 2 (host b, pid 77)"; without a table "rank 2".
const char *peer_name(const peers_t *peers, int rank, char text[PEER_TEXT_BYTES]);
// What the process table says of a peer on this host, as "its process is stopped (state T)"; ""
// for one on another host, or in another pid namespace.
const char *peer_state(const peers_t *peers, int rank, char text[PEER_TEXT_BYTES]);
// It is on this host, and has a core or waits for one: alive, however silent.
bool peer_is_runnable(const peers_t *peers, int rank);
// The process table of this host says for sure that the peer has ended.
bool peer_is_gone(const peers_t *peers, int rank);
// What the process table says of a process, as above; "" if nothing.
const char *process_state(int pid);
bool process_is_stopped(int pid); // by a signal or a debugger

#endif
