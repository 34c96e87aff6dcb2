// SPDX-License-Identifier: Apache-2.0
//
// clock.c - the monotonic clock and deadlines.
//
// Time is nanoseconds since an arbitrary start, equal in all processes of a host; a deadline is a
// point of that time. Reading it costs about 20 ns and no system call (vDSO); ticks cost less and
// become time when somebody looks at them. Any thread.
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

tick_origin_t ticks_origin(void)
{
    return (tick_origin_t){.ticks = ticks_now(), .ns = clock_ns()};
}

double ticks_pace(const tick_origin_t *origin)
{
    uint64_t ticks = ticks_now() - origin->ticks;
    uint64_t ns = clock_ns() - origin->ns;
    return ticks > 0 && ns > 0 ? (double)ns / (double)ticks : 1.0;
}
