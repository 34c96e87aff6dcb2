// SPDX-License-Identifier: Apache-2.0
//
// mailbox.c - what the agent and the ranks of an elastic job tell each other, in small files.
//
// They lie in the agent's directory, which only this user can enter. The agent writes place.<id>
// (who the rank is in the next generation, NAME=value a line) and news ("number what": hosts have
// come or gone); a rank that has left a generation writes its number to ready.<id>, and one that is
// about to call the function it was started for may write 0 there. wants.<id> says how the
// rank wants to be treated. Each file is written under
// another name first and then renamed, so nobody reads half of one; the agent learns of new ones by
// inotify. docs/elastic.md tells what they mean.
#define _GNU_SOURCE
#include "agent/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#define READY "ready."
#define WANTS "wants."

hvd_status_t mailbox_watch(const char *directory, int *fd_p, err_t *err)
{
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (fd < 0 || inotify_add_watch(fd, directory, IN_MOVED_TO) < 0) {
        hvd_status_t status =
            fail_errno(err, errno, "cannot watch %s; try sysctl fs.inotify.max_user_instances=1024",
                       directory);
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    *fd_p = fd;
    return HVD_OK;
}

static bool write_note(const char *directory, const char *name, const void *text, size_t bytes)
{
    char path[160], draft[176];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    snprintf(draft, sizeof draft, "%s.new", path);
    int fd = open(draft, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) {
        return false;
    }
    bool is_whole = write(fd, text, bytes) == (ssize_t)bytes;
    close(fd);
    return is_whole && rename(draft, path) == 0;
}

bool mailbox_write_place(const char *directory, int id, const uint8_t *env, size_t bytes)
{
    char name[32];
    char *text = malloc(bytes + 1);
    if (text == NULL) {
        return false;
    }
    for (size_t i = 0; i < bytes; i++) {
        text[i] = env[i] == '\0' ? '\n' : (char)env[i];
    }
    snprintf(name, sizeof name, "place.%d", id);
    bool is_written = write_note(directory, name, text, bytes);
    free(text);
    return is_written;
}

bool mailbox_write_news(const char *directory, uint32_t number, uint32_t what)
{
    char text[48];
    int bytes = snprintf(text, sizeof text, "%u %u\n", number, what);
    return write_note(directory, "news", text, (size_t)bytes);
}

static bool parse_number(const char *text, uint32_t *number_p)
{
    char *end;
    *number_p = (uint32_t)strtoul(text, &end, 10);
    return end != text && *end == '\0';
}

static bool read_note(const char *path, char *text, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    ssize_t n = fd < 0 ? -1 : read(fd, text, bytes - 1);
    text[MAX(n, 0)] = '\0';
    if (fd >= 0) {
        close(fd);
    }
    return n > 0;
}

static bool read_number(const char *path, uint32_t *number_p)
{
    char text[32];
    return read_note(path, text, sizeof text) && parse_number(text, number_p);
}

bool mailbox_read_blame(const char *path, int *rank_p, char *what, size_t bytes)
{
    char text[1024];
    uint32_t rank = 0;
    if (!read_note(path, text, sizeof text)) {
        return false;
    }
    char *line = strchr(text, '\n');
    if (line != NULL) {
        *line++ = '\0';
        line[strcspn(line, "\n")] = '\0';
    }
    if (!parse_number(text, &rank) || rank > INT_MAX) {
        return false;
    }
    *rank_p = (int)rank;
    snprintf(what, bytes, "%s", line != NULL ? line : "");
    return true;
}

// "<kind><id>": the id; false: of another kind.
static bool parse_name(const char *name, const char *kind, uint32_t *id_p)
{
    size_t bytes = strlen(kind);
    return strncmp(name, kind, bytes) == 0 && parse_number(name + bytes, id_p);
}

void mailbox_read(int fd, const char *directory, const mailbox_fns_t *fns, void *arg)
{
    char events[4096] __attribute__((aligned(__alignof__(struct inotify_event))));
    char path[128 + NAME_MAX];
    ssize_t n;
    while ((n = read(fd, events, sizeof events)) > 0) {
        const struct inotify_event *event;
        for (char *at = events; at < events + n; at += sizeof *event + event->len) {
            uint32_t id, number;
            event = (const void *)at;
            snprintf(path, sizeof path, "%s/%.*s", directory, (int)event->len, event->name);
            if (event->len == 0) {
                continue;
            }
            if (parse_name(event->name, READY, &id) && read_number(path, &number)) {
                fns->ready(arg, (int)id, number);
            } else if (parse_name(event->name, WANTS, &id) && read_number(path, &number)) {
                fns->wants(arg, (int)id, number);
            }
        }
    }
}
