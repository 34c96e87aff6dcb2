// SPDX-License-Identifier: Apache-2.0
//
// sleeper.h - how a rank sleeps until somebody has work for it.
//
// A word is 1 while the rank sleeps; whoever makes work visible rings it (see wake_ring in net.h).
// Two manners, chosen once, before the first sleep:
//   alone   the word is private. Sleeping is ppoll() on the watched descriptors and a bell.
//   shared  the word lies in memory that other processes ring. Sleeping is a futex on it, and one
//           thread polls the descriptors on the sleeper's behalf.
//
// No wake-up is lost as long as the order is kept: sleeper_announce, look once more for work,
// sleeper_sleep. A sleep may end without a reason.
// Threads: one owner calls everything; sleeper_wake may be called by any thread, and sleeper_sleep
// by one that has just handed the ownership over: it then returns at the latest with the next
// owner's sleeper_end.
#ifndef HVD_NET_SLEEPER_H
#define HVD_NET_SLEEPER_H

#include "base/base.h"

#define SLEEPER_MAX_FDS 8

typedef struct sleeper sleeper_t;

hvd_status_t sleeper_new(sleeper_t **sleeper_p, err_t *err);
// The descriptor stays the caller's and must outlive the sleeper. At most SLEEPER_MAX_FDS.
hvd_status_t sleeper_watch(sleeper_t *sleeper, int fd, err_t *err);
// From now on the word is `word`, and a thread polls what is watched.
hvd_status_t sleeper_share(sleeper_t *sleeper, atomic_uint *word, err_t *err);
void sleeper_free(sleeper_t *sleeper); // safe on NULL

unsigned sleeper_announce(sleeper_t *sleeper); // the ticket for sleeper_sleep
void sleeper_sleep(sleeper_t *sleeper, unsigned ticket, uint64_t deadline_ns);
void sleeper_end(sleeper_t *sleeper); // awake again, slept or not
void sleeper_wake(sleeper_t *sleeper);

#endif
