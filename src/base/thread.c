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
#include <sys/resource.h>

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

hvd_status_t thread_failed(err_t *err, int code, const char *what)
{
    struct rlimit limit;
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
