// SPDX-License-Identifier: Apache-2.0
//
// thread.c - starting a thread of ours in a process of the user's.
//
// The user's signals are for the user's threads, so ours block them all; the mask is inherited,
// which closes the moment before a thread could block them itself. Any thread.
#define _GNU_SOURCE // pthread_setname_np
#include "base/base.h"

#include <signal.h>

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
