// SPDX-License-Identifier: Apache-2.0
//
// live.h - what every rank of a job on this host is doing now (hvd-info --live).
//
// Owns: finding the sockets that ranks show their state at, and the table made of their answers.
#ifndef HVD_TOOLS_LIVE_H
#define HVD_TOOLS_LIVE_H

// target: name of a job, or a directory with sockets; NULL: every job of this user. The exit code.
int print_live(const char *target);

#endif
