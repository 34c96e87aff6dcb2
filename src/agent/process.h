// SPDX-License-Identifier: Apache-2.0
//
// process.h - processes and signals (process.c).
//
// Any thread.
#ifndef HVD_AGENT_PROCESS_H
#define HVD_AGENT_PROCESS_H

#include "base/base.h"

#include <sys/types.h>

enum { STREAM_STDOUT = 0, STREAM_STDERR = 1, N_STREAMS };

typedef struct child {
    pid_t pid;
    int fds[N_STREAMS]; // our ends of its stdout and stderr
} child_t;

// Starts a rank in a session of its own, dying with this thread. On failure: the step that failed,
// and its errno.
typedef struct misfortune {
    enum { STEP_MEMORY, STEP_PIPES, STEP_FORK, STEP_CHDIR, STEP_EXEC } step;
    int code;
} misfortune_t;
bool spawn_rank(char *const *argv, char **env, const char *directory, child_t *child_p,
                misfortune_t *misfortune_p);
// Starts a helper (ssh, an agent) in a session of its own, talking over one socket.
hvd_status_t spawn_helper(char *const *argv, child_t *child_p, int *socket_p, err_t *err);
// Runs a program to its end and keeps what it prints, at most `bytes`; its exit status. -1: it
// cannot be started, was killed, or is late and has been killed.
int run_program(char *const *argv, int timeout_ms, char *text, size_t bytes);
// The same as a rank is run, and why it cannot be started; code 0: it was.
int run_program_in(char *const *argv, char **env, const char *directory, int timeout_ms, char *text,
                   size_t bytes, misfortune_t *misfortune_p);
void raise_open_files(void);             // as far as it is allowed and of use; children inherit it
bool own_path(char *path, size_t bytes); // of this program
bool set_nonblocking(int fd);
void kill_group(pid_t pid, int signo);
bool group_is_empty(pid_t pid);
const char *signal_name(int signo, char text[16]); // "SIGKILL"
// A descriptor that tells of these signals (the last is 0), which are blocked from here on: beside
// others (SIG_BLOCK), or alone (SIG_SETMASK). -1: errno.
int signals_open(int how, const int *signals);
uint64_t oom_kills(void); // by the kernel, on this host or in this group, so far

#endif
