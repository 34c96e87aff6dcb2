// SPDX-License-Identifier: Apache-2.0
//
// signals.c - what signals are called.
//
// glibc has functions for it since 2.32, which is newer than many a cluster; strsignal() answers in
// the user's language and is not for several threads. A row per signal; those that have none
// (real-time signals, numbers from elsewhere) are NULL. Any thread; nothing is owned.
#define _GNU_SOURCE
#include "base/signals.h"

#include "base/base.h"

#include <signal.h>

static const struct {
    const char *name, *description;
} signals[] = {
    [SIGHUP] = {"SIGHUP", "Hangup"},
    [SIGINT] = {"SIGINT", "Interrupt"},
    [SIGQUIT] = {"SIGQUIT", "Quit"},
    [SIGILL] = {"SIGILL", "Illegal instruction"},
    [SIGTRAP] = {"SIGTRAP", "Trace/breakpoint trap"},
    [SIGABRT] = {"SIGABRT", "Aborted"},
    [SIGBUS] = {"SIGBUS", "Bus error"},
    [SIGFPE] = {"SIGFPE", "Floating point exception"},
    [SIGKILL] = {"SIGKILL", "Killed"},
    [SIGUSR1] = {"SIGUSR1", "User defined signal 1"},
    [SIGSEGV] = {"SIGSEGV", "Segmentation fault"},
    [SIGUSR2] = {"SIGUSR2", "User defined signal 2"},
    [SIGPIPE] = {"SIGPIPE", "Broken pipe"},
    [SIGALRM] = {"SIGALRM", "Alarm clock"},
    [SIGTERM] = {"SIGTERM", "Terminated"},
    [SIGSTKFLT] = {"SIGSTKFLT", "Stack fault"},
    [SIGCHLD] = {"SIGCHLD", "Child exited"},
    [SIGCONT] = {"SIGCONT", "Continued"},
    [SIGSTOP] = {"SIGSTOP", "Stopped (signal)"},
    [SIGTSTP] = {"SIGTSTP", "Stopped"},
    [SIGTTIN] = {"SIGTTIN", "Stopped (tty input)"},
    [SIGTTOU] = {"SIGTTOU", "Stopped (tty output)"},
    [SIGURG] = {"SIGURG", "Urgent I/O condition"},
    [SIGXCPU] = {"SIGXCPU", "CPU time limit exceeded"},
    [SIGXFSZ] = {"SIGXFSZ", "File size limit exceeded"},
    [SIGVTALRM] = {"SIGVTALRM", "Virtual timer expired"},
    [SIGPROF] = {"SIGPROF", "Profiling timer expired"},
    [SIGWINCH] = {"SIGWINCH", "Window changed"},
    [SIGPOLL] = {"SIGPOLL", "I/O possible"},
    [SIGPWR] = {"SIGPWR", "Power failure"},
    [SIGSYS] = {"SIGSYS", "Bad system call"},
};

const char *signal_name_of(int signo)
{
    return signo > 0 && signo < (int)N_ELEMENTS(signals) ? signals[signo].name : NULL;
}

const char *signal_description_of(int signo)
{
    return signo > 0 && signo < (int)N_ELEMENTS(signals) ? signals[signo].description : NULL;
}
