// SPDX-License-Identifier: Apache-2.0
//
// clock.c - the monotonic clock and deadlines.
//
// Time is nanoseconds since an arbitrary start, equal in all processes of a host; a deadline is a
// point of that time. Reading it costs about 20 ns and no system call (vDSO). Any thread.
#include "base/base.h"

#include <time.h>

uint64_t clock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t deadline_in_ms(int64_t ms)
{
    uint64_t now_ns = clock_ns();

    // A timeout too long to express is as good as none.
    if (ms < 0 || (uint64_t)ms >= (NEVER_NS - now_ns) / NS_PER_MS) {
        return NEVER_NS;
    }
    return now_ns + (uint64_t)ms * NS_PER_MS;
}
