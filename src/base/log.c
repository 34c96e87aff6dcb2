// SPDX-License-Identifier: Apache-2.0
//
// log.c - log lines, and the only place that writes to stderr.
//
// A line is made on the stack and leaves in one write(2) no longer than a pipe takes whole, so
// lines of different ranks do not mix:
//   2026-11-15 22:48:01.123456 [3]<net> warning: lost the connection to rank 5
// The rank is - while it is not known. Control characters become blanks: what a peer or a user put
// into a name cannot forge a second line. Any thread, no lock, errno is kept; log_t belongs to the
// caller and is only read.
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <stdio.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 2048 // less than PIPE_BUF, which is what POSIX promises to keep together

static const char *const level_names[] = {
    [LOG_TRACE] = "trace", [LOG_DEBUG] = "debug", [LOG_INFO] = "info", [LOG_WARN] = "warning",
    [LOG_ERROR] = "error", [LOG_FATAL] = "fatal", [LOG_OFF] = "off",
};

log_level_t log_level_parse(const char *text)
{
    for (size_t i = 0; i < N_ELEMENTS(level_names); i++) {
        if (text != NULL && strcasecmp(text, level_names[i]) == 0) {
            return (log_level_t)i;
        }
    }
    return LOG_WARN;
}

// What snprintf really put into `room` bytes, whatever it wanted to.
static size_t written(int wanted, size_t room)
{
    return wanted < 0 ? 0 : MIN((size_t)wanted, room - 1);
}

static size_t put_time(char *line, size_t room)
{
    struct timespec now;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &now);
    if (localtime_r(&now.tv_sec, &parts) == NULL) {
        return 0;
    }
    size_t len = strftime(line, room, "%Y-%m-%d %H:%M:%S", &parts);
    int wanted = snprintf(line + len, room - len, ".%06ld ", now.tv_nsec / 1000);
    return len + written(wanted, room - len);
}

static size_t put_head(const log_t *log, log_level_t level, const char *component, char *line,
                       size_t room)
{
    char rank[16] = "-";
    size_t len = log->hide_time ? 0 : put_time(line, room);
    if (log->rank >= 0) {
        snprintf(rank, sizeof rank, "%d", log->rank);
    }
    int wanted =
        snprintf(line + len, room - len, "[%s]<%s> %s: ", rank, component, level_names[level]);
    return len + written(wanted, room - len);
}

static void blank_controls(char *line, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if ((unsigned char)line[i] < ' ' || line[i] == 0x7f) {
            line[i] = ' ';
        }
    }
}

// A log that cannot be written is not worth failing over.
static void write_stderr(const char *line, size_t bytes)
{
    while (write(STDERR_FILENO, line, bytes) < 0 && errno == EINTR) {
    }
}

void log_write(const log_t *log, log_level_t level, const char *component, const char *format, ...)
{
    char line[LINE_BYTES];
    size_t room = sizeof line - 1; // one byte is kept for the newline
    int saved_errno = errno;
    va_list args;
    size_t len = put_head(log, level, component, line, room);
    va_start(args, format);
    len += written(vsnprintf(line + len, room - len, format, args), room - len);
    va_end(args);
    blank_controls(line, len);
    line[len] = '\0';
    if (log->sink != NULL) {
        log->sink(log->arg, (int)level, line);
    } else {
        line[len] = '\n';
        write_stderr(line, len + 1);
    }
    errno = saved_errno;
}

#if defined(HVD_CHECKS)
void rule_broken(const char *rule, const char *function, const char *file, int line)
{
    fprintf(stderr, "%s:%d: %s breaks a rule: %s\n", file, line, function, rule);
    __builtin_trap();
}
#endif
