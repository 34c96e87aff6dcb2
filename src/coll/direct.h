// SPDX-License-Identifier: Apache-2.0
//
// direct.h - collectives that only move bytes, among ranks of one host: straight from the tensors
// of one process into those of another.
//
// One copy instead of the two through a window, made by whoever gets the bytes (and in a broadcast
// by the root as well, so that no core is idle). direct.c explains the method.
// Threads: the holder of the engine.
#ifndef HVD_COLL_DIRECT_H
#define HVD_COLL_DIRECT_H

#include "coll/coll.h"
#include "net/shm.h"

typedef struct direct direct_t;

// Does it know how to run this operation?
bool direct_serves(hvd_op_t op);
hvd_status_t direct_new(domain_t *shm, int n_ranks, direct_t **direct_p, err_t *err);
void direct_free(direct_t *direct);
// The members tell each other at the end what they are for: to go on like this, or through windows.
hvd_status_t direct_start(direct_t *direct, const coll_task_t *task, bool is_for_windows,
                          err_t *err);
int direct_n_for_windows(const direct_t *direct); // in the task that ended last
// HVD_OK: finished. HVD_IN_PROGRESS: a peer is not as far yet; *moved_p tells whether anything was
// done. HVD_UNSUPPORTED: it did not work, all members know that, and nothing but outputs was
// touched: the task may be run in another way.
hvd_status_t direct_progress(direct_t *direct, bool *moved_p, err_t *err);
// The task will not be finished: nobody writes into this rank's tensors any more.
void direct_abandon(direct_t *direct);

#endif
