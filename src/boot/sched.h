// SPDX-License-Identifier: Apache-2.0
//
// sched.h - the one part of sched.c that is tested by itself. Private to boot/.
// Pure; any thread.
#ifndef HVD_BOOT_SCHED_H
#define HVD_BOOT_SCHED_H

#include "boot/launcher.h"

// The first host of a Slurm list: "n[01-03,07],gpu2" -> "n01". Cut if it does not fit.
void sched_first_host(const char *list, char *host, size_t bytes);

#endif
