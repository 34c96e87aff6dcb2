// SPDX-License-Identifier: Apache-2.0
//
// testing.h - what tests may ask of boot, and nobody else needs.
//
// Included by tests and by the file that defines it.
#ifndef HVD_BOOT_TESTING_H
#define HVD_BOOT_TESTING_H

#include "boot/boot.h"

// Connections the server has cut so far because they did not belong to the job. Any thread.
uint64_t kv_server_n_refused(const hvd_rendezvous_t *server);

#endif
