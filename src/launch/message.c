// SPDX-License-Identifier: Apache-2.0
//
// message.c - what the launcher itself has to say, on stderr: one line, one write.
//
// While ranks run, their output and ours leave through the sink (output.c) instead, so that lines
// do not mix. Any thread.
#include "launch/launch.h"

#include <unistd.h>

void say(const char *format, ...)
{
    char line[HVD_TEXT_BYTES * 2];
    va_list args;
    size_t len = (size_t)snprintf(line, sizeof line, "%s: ", PROGRAM);
    va_start(args, format);
    int wanted = vsnprintf(line + len, sizeof line - len - 1, format, args);
    va_end(args);
    len += wanted < 0 ? 0 : MIN((size_t)wanted, sizeof line - len - 2);
    line[len++] = '\n';
    // A message that cannot be written is not worth failing over.
    if (write(STDERR_FILENO, line, len) < 0) {
        return;
    }
}
