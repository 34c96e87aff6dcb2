// SPDX-License-Identifier: Apache-2.0
//
// oom.c - has the kernel been killing processes for lack of memory?
//
// SIGKILL has no return address. The counters of this machine and of our control group tell whether
// the kernel's out-of-memory killer was at work while the job ran: /proc/vmstat, memory.events of
// cgroup v2, memory.oom_control of v1. What is not there counts as 0.
#include "launch/agent.h"

#include <stdio.h>
#include <stdlib.h>

// The number behind `name` at the start of a line.
static uint64_t counter_in(const char *path, const char *name)
{
    char line[512];
    size_t bytes = strlen(name);
    uint64_t value = 0;
    FILE *file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, name, bytes) == 0 && line[bytes] == ' ') {
            value = strtoull(line + bytes + 1, NULL, 10);
            break;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return value;
}

// Adds the counters of the groups this process is in: lines "id:controllers:path".
static uint64_t group_kills(void)
{
    char line[3072], path[4096];
    uint64_t value = 0;
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (controllers[1] == '\0') {
            snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.events", group);
            value += counter_in(path, "oom_kill");
        } else if (strstr(controllers + 1, "memory") != NULL) {
            snprintf(path, sizeof path, "/sys/fs/cgroup/memory%s/memory.oom_control", group);
            value += counter_in(path, "oom_kill");
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return value;
}

uint64_t oom_kills(void)
{
    return counter_in("/proc/vmstat", "oom_kill") + group_kills();
}
