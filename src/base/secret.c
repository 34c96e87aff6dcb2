// SPDX-License-Identifier: Apache-2.0
//
// secret.c - memory that must not be read later, and bytes nobody can guess.
//
// Random bytes come from the kernel, so a forked child never repeats its parent's. Secrets that
// stay lie in pages of their own, which no core dump, no swap and no forked child gets to see, as
// far as the kernel is willing. Any thread; the memory is the caller's.
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/random.h>

void wipe(void *memory, size_t bytes)
{
    if (bytes > 0) {
        explicit_bzero(memory, bytes);
    }
}

void *secret_new(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    // Each is an extra; a kernel or a limit that refuses one is not a reason to fail.
    (void)madvise(memory, bytes, MADV_DONTDUMP);
    (void)madvise(memory, bytes, MADV_WIPEONFORK);
    (void)mlock(memory, bytes);
    return memory;
}

void secret_free(void *memory, size_t bytes)
{
    if (memory != NULL) {
        wipe(memory, bytes);
        munmap(memory, bytes);
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
