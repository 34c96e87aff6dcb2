// SPDX-License-Identifier: Apache-2.0
//
// message.c - what the launcher itself has to say, on stderr: one line, one write.
//
// While ranks run, their output and ours leave through the sink (output.c) instead, so that lines
// do not mix. Any thread. hints.def has what to try when a job fails as many do.
#include "cli/cli.h"

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

// --- Hints ---------------------------------------------------------------------------------------

typedef struct hint {
    const char *about, *advice;
} hint_t;

const char *hint_for_line(const char *line)
{
    static const hint_t hints[] = {
#define HINT(part, advice) {part, advice},
#define FOREIGN(flag, instead)
#include "cli/hints.def"
#undef HINT
#undef FOREIGN
    };
    size_t i = 0;
    while (i < N_ELEMENTS(hints) && strstr(line, hints[i].about) == NULL) {
        i++;
    }
    return i < N_ELEMENTS(hints) ? hints[i].advice : NULL;
}

const char *hint_for_flag(const char *flag)
{
    static const hint_t flags[] = {
#define HINT(part, advice)
#define FOREIGN(flag, instead) {flag, instead},
#include "cli/hints.def"
#undef HINT
#undef FOREIGN
    };
    size_t i = 0;
    while (i < N_ELEMENTS(flags) && strcmp(flag, flags[i].about) != 0) {
        i++;
    }
    return i < N_ELEMENTS(flags) ? flags[i].advice : NULL;
}
