// SPDX-License-Identifier: Apache-2.0
//
// ending.h - how ranks ended, which is the cause, and the block that says so (ending.c).
//
// Pure.
#ifndef HVD_LAUNCH_ENDING_H
#define HVD_LAUNCH_ENDING_H

#include "launch/output.h"

#include <sys/types.h>

typedef struct rank_end {
    bool has_ended, was_oom, was_stopped; // stopped: after we had asked it to end
    bool was_halted;                      // as by SIGSTOP, when we asked
    int code;                             // of the process; 128 + signal
    int signo;                            // 0: none
    int blames;                           // the rank whose silence made it give up; -1: none
    pid_t pid;
    uint64_t time_ns;
} rank_end_t;

// The rank whose failure is the cause, or -1: the first that failed, but one that a signal killed
// within a moment of it goes before one that gave up because of that.
int ending_cause(const rank_end_t *ends, int n);
// Who is to blame: the cause itself, or a rank that was halted and for which another gave up
// waiting.
int ending_blamed(const rank_end_t *ends, int n, int cause);
// The block that closes a failed job: at most 15 lines. The host is of who is to blame, the tail of
// the cause.
void ending_report(const rank_end_t *ends, int n, int blamed, int cause, const char *host,
                   const splitter_t *tail, buf_t *out);

#endif
