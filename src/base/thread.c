// SPDX-License-Identifier: Apache-2.0
//
// thread.c - starting our threads in the user's process.
//
// The user's signals are for the user's threads, so ours block them all; the mask is inherited,
// which closes the moment before a thread could block them itself. Any thread.
#define _GNU_SOURCE // pthread_setname_np
#include "base/base.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

int thread_start(pthread_t *thread_p, const char *name, void *(*run)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(thread_p, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code == 0) {
        pthread_setname_np(*thread_p, name);
    }
    return code;
}

// Is there hardly room for the stack of another thread below the limit of the address space? Then
// starting one has failed for want of it, which gives the same errno as too many threads.
static bool address_space_is_full(struct rlimit *limit_p)
{
    unsigned long long pages = 0;
    struct rlimit stack;
    FILE *file = getrlimit(RLIMIT_AS, limit_p) == 0 && limit_p->rlim_cur != RLIM_INFINITY &&
                         getrlimit(RLIMIT_STACK, &stack) == 0
                     ? fopen("/proc/self/statm", "re")
                     : NULL;
    bool is_read = file != NULL && fscanf(file, "%llu", &pages) == 1;
    if (file != NULL) {
        fclose(file);
    }
    rlim_t needed = stack.rlim_cur == RLIM_INFINITY ? 8 * MIB : stack.rlim_cur;
    return is_read && pages * (rlim_t)sysconf(_SC_PAGESIZE) + 2 * needed > limit_p->rlim_cur;
}

hvd_status_t thread_failed(err_t *err, int code, const char *what)
{
    struct rlimit limit;
    if (code == EAGAIN && address_space_is_full(&limit)) {
        return fail(err, HVD_NO_MEMORY,
                    "cannot start %s: this process has reached the limit of %llu MiB of address "
                    "space, of which a thread needs some for its stack. Raise the limit (ulimit "
                    "-v, RLIMIT_AS or LimitAS=)",
                    what, (unsigned long long)(limit.rlim_cur / MIB));
    }
    if (code != EAGAIN || getrlimit(RLIMIT_NPROC, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return fail_errno(err, code,
                          "cannot start %s; check the process limit (pids.max of the control "
                          "group, docker --pids-limit) and free memory",
                          what);
    }
    return fail(err, HVD_SYSTEM,
                "cannot start %s: this user has reached the limit of %llu processes and threads, "
                "and a rank needs up to four more. Raise the limit (ulimit -u, LimitNPROC= or "
                "docker --ulimit nproc)",
                what, (unsigned long long)limit.rlim_cur);
}
