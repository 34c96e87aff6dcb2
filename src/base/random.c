// SPDX-License-Identifier: Apache-2.0
//
// random.c - bytes nobody can guess, and memory that nobody can read later.
//
// Random bytes come from the kernel, so a forked child never repeats its parent's. Any thread.
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <sys/random.h>

void wipe(void *memory, size_t bytes)
{
    if (bytes > 0) {
        explicit_bzero(memory, bytes);
    }
}

hvd_status_t random_bytes(void *memory, size_t bytes, err_t *err)
{
    uint8_t *next = memory;
    while (bytes > 0) {
        ssize_t got = getrandom(next, bytes, 0);
        if (got < 0 && errno != EINTR) {
            return fail_errno(err, errno, "cannot get %zu random bytes from the kernel", bytes);
        }
        if (got > 0) {
            next += got;
            bytes -= (size_t)got;
        }
    }
    return HVD_OK;
}
