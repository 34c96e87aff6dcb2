// SPDX-License-Identifier: Apache-2.0
//
// live.h - what every rank of a job on this host is doing now (hvd-info --live).
//
// Owns: finding the sockets where ranks show their state, and the table made of their answers.
#ifndef HVD_TOOLS_LIVE_H
#define HVD_TOOLS_LIVE_H

// target: a job, as HOROVOD_JOB_ID or hvd_monitor_path() names it; NULL: every job of this user.
// The exit code.
int print_live(const char *target);

#endif
