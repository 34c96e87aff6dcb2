// SPDX-License-Identifier: Apache-2.0
//
// holder.c - who listens at a port of this host, for the sentence about a port in use.
//
// The kernel's table of sockets gives the socket's number, and the descriptors of each process
// lead to it. Reads /proc only, and only when a bind has failed. Processes of other users and
// sockets of other network namespaces cannot be seen: then nothing is said. Any thread.
#define _GNU_SOURCE
#include "boot/boot.h"

#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define STATE_LISTEN 0x0a

// The number of the socket that listens at the port; 0: none is known.
static uint64_t listener_at(const char *table, int port)
{
    FILE *file = fopen(table, "re");
    char line[512];
    uint64_t found = 0;
    while (file != NULL && found == 0 && fgets(line, sizeof line, file) != NULL) {
        unsigned at, state;
        uint64_t number;
        if (sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*s %*s %" SCNu64,
                   &at, &state, &number) == 3 &&
            at == (unsigned)port && state == STATE_LISTEN) {
            found = number;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

static bool has_socket(const char *pid, const char *wanted)
{
    char path[64], entry_path[320], target[64];
    const struct dirent *entry;
    bool found = false;
    snprintf(path, sizeof path, "/proc/%.16s/fd", pid);
    DIR *folder = opendir(path);
    while (folder != NULL && !found && (entry = readdir(folder)) != NULL) {
        snprintf(entry_path, sizeof entry_path, "%s/%.200s", path, entry->d_name);
        ssize_t n = readlink(entry_path, target, sizeof target - 1);
        target[MAX(n, 0)] = '\0';
        found = strcmp(target, wanted) == 0;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return found;
}

static void read_name(const char *pid, char name[32])
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%.16s/comm", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL || fgets(name, 32, file) == NULL) {
        snprintf(name, 32, "a process");
    }
    name[strcspn(name, "\n")] = '\0';
    if (file != NULL) {
        fclose(file);
    }
}

void boot_port_holder(int port, char *text, size_t bytes)
{
    uint64_t number = listener_at("/proc/net/tcp", port);
    const struct dirent *entry;
    char wanted[64], name[32];
    text[0] = '\0';
    number = number != 0 ? number : listener_at("/proc/net/tcp6", port);
    DIR *processes = number != 0 ? opendir("/proc") : NULL;
    snprintf(wanted, sizeof wanted, "socket:[%" PRIu64 "]", number);
    while (processes != NULL && text[0] == '\0' && (entry = readdir(processes)) != NULL) {
        if (isdigit((unsigned char)entry->d_name[0]) && has_socket(entry->d_name, wanted)) {
            read_name(entry->d_name, name);
            snprintf(text, bytes, "%s (pid %.16s)", name, entry->d_name);
        }
    }
    if (processes != NULL) {
        closedir(processes);
    }
}
