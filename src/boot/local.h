// SPDX-License-Identifier: Apache-2.0
//
// local.h - hands the ticket from rank 0 to the other ranks of one host, with nothing prepared.
//
// Rank 0 listens at a local socket whose name follows from the user and the job; the kernel says
// which user is at the other end, and both sides refuse anyone else. The name is gone with the
// socket, so nothing is left behind. Threads: the one that calls hvd_init.
#ifndef HVD_BOOT_LOCAL_H
#define HVD_BOOT_LOCAL_H

#include "boot/launcher.h"

// Gives `ticket` to n_others processes. `job` is any text that is this job's own.
hvd_status_t local_give(const char *job, const char *ticket, int n_others, uint64_t deadline_ns,
                        err_t *err);
hvd_status_t local_take(const char *job, uint64_t deadline_ns, char ticket[TICKET_BYTES],
                        err_t *err);

#endif
