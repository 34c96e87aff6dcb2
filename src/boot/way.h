// SPDX-License-Identifier: Apache-2.0
//
// way.h - one way to be launched, as boot.c sees it. Private to boot/.
//
// A way knows from the environment whether it is the one, and then fills in the job. To add one:
// write src/boot/<name>.c with a boot_way_t at its end, and a row in boot.c.
#ifndef HVD_BOOT_WAY_H
#define HVD_BOOT_WAY_H

#include "boot/boot.h"

typedef struct boot_way {
    const char *name;
    bool (*looks_right)(const config_t *config);
    // Who this process is. Fills rank, size, local, cross and, if size > 1, the secret.
    hvd_status_t (*find)(const config_t *config, uint64_t deadline_ns, boot_job_t *job, err_t *err);
    // Where the ranks of a job of more than one meet.
    hvd_status_t (*meet)(const config_t *config, const boot_job_t *job, uint64_t deadline_ns,
                         kv_client_t **client_p, err_t *err);
} boot_way_t;

extern const boot_way_t boot_way_env, boot_way_self;

#endif
