// SPDX-License-Identifier: Apache-2.0
//
// peer.c - who a rank is, and what the process table says of it.
//
// A sentence about another rank is of use when it names host and process. For a rank of this host
// the kernel knows more: whether the process is stopped, waits for a device, or how it ended.
// /proc/PID/stat is read for that, at most once per sentence. A process counts as the peer only if
// it started at the moment the peer told, so a reused pid or another pid namespace misleads nobody.
// Threads: pure but for reading /proc; any thread.
#define _GNU_SOURCE
#include "base/peer.h"

#include "base/signals.h"
#include "base/testing.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define PF_EXITING 0x4 // in the flags of /proc/PID/stat
#define STAT_FLAGS 9   // numbers of fields there, as proc(5) counts them
#define STAT_STARTED 22
#define STAT_EXIT_CODE 52

typedef struct process {
    char state;
    bool is_exiting;
    uint64_t started;
    int exit_code; // as waitpid gives it
} process_t;

static size_t read_file(const char *path, char *text, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t len = 0;
    ssize_t n = 0;
    while (fd >= 0 && len < bytes - 1 && (n = read(fd, text + len, bytes - 1 - len)) > 0) {
        len += (size_t)n;
    }
    if (fd >= 0) {
        close(fd);
    }
    text[len] = '\0';
    return len;
}

// The second field, the program's name, may hold blanks and brackets: the last ')' ends it.
static bool read_stat(const char *path, process_t *process_p)
{
    char text[1024];
    if (read_file(path, text, sizeof text) == 0) {
        return false;
    }
    const char *at = strrchr(text, ')');
    if (at == NULL || at[1] != ' ') {
        return false;
    }
    *process_p = (process_t){.state = at[2]};
    at += 2;
    for (int field = 3; at != NULL; field++) {
        unsigned long long value = field > 3 ? strtoull(at, NULL, 10) : 0;
        process_p->is_exiting |= field == STAT_FLAGS && (value & PF_EXITING) != 0;
        process_p->started = field == STAT_STARTED ? value : process_p->started;
        process_p->exit_code = field == STAT_EXIT_CODE ? (int)value : process_p->exit_code;
        at = strchr(at, ' ');
        at = at != NULL ? at + 1 : NULL;
    }
    return true;
}

static bool read_process(int pid, process_t *process_p)
{
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    return read_stat(path, process_p);
}

// Some thread of it has a core, or waits for one.
static bool has_runnable_thread(int pid)
{
    char path[320];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    for (struct dirent *entry; tasks != NULL && !found && (entry = readdir(tasks)) != NULL;) {
        process_t thread;
        snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, entry->d_name);
        found = entry->d_name[0] != '.' && read_stat(path, &thread) && thread.state == 'R';
    }
    if (tasks != NULL) {
        closedir(tasks);
    }
    return found;
}

// 0: there is no such file.
static uint64_t inode_of(const char *path)
{
    struct stat file;
    return stat(path, &file) == 0 ? (uint64_t)file.st_ino : 0;
}

peer_id_t peer_of_self(const char *host)
{
    peer_id_t self = {.pid = (int)getpid()};
    process_t process;
    snprintf(self.host, sizeof self.host, "%s", host);
    // Pids are of the first, and when a process started of the second.
    self.space = inode_of("/proc/self/ns/pid") ^ inode_of("/proc/self/ns/time") << 32;
    self.network = inode_of("/proc/self/ns/net");
    if (read_process(self.pid, &process)) {
        self.started = process.started;
    }
    return self;
}

uint64_t peer_oom_kills(void)
{
    static const char key[] = "\noom_kill ";
    char text[16 * 1024];
    read_file("/proc/vmstat", text, sizeof text);
    const char *at = strstr(text, key);
    return at != NULL ? strtoull(at + sizeof key - 1, NULL, 10) : 0;
}

const char *peer_name(const peers_t *peers, int rank, char text[PEER_TEXT_BYTES])
{
    if (peers == NULL || rank < 0 || rank >= peers->size) {
        snprintf(text, PEER_TEXT_BYTES, "rank %d", rank);
    } else {
        snprintf(text, PEER_TEXT_BYTES, "rank %d (host %s, pid %d)", rank, peers->of[rank].host,
                 peers->of[rank].pid);
    }
    return text;
}

static void describe_end(const peers_t *peers, const process_t *process, char *text)
{
    int code = process->exit_code;
    int signal = code & 0x7f;
    if (signal == SIGKILL && peer_oom_kills() > peers->n_oom_kills) {
        snprintf(text, PEER_TEXT_BYTES,
                 "its process was killed by signal 9, most likely by the kernel's OOM killer: this "
                 "host ran out of memory, or the process reached its memory limit");
    } else if (signal != 0) {
        snprintf(text, PEER_TEXT_BYTES, "its process was killed by signal %d (%s)", signal,
                 signal_description_of(signal) != NULL ? signal_description_of(signal) : "unknown");
    } else if (code >> 8 == 0) {
        snprintf(text, PEER_TEXT_BYTES, "its process ended normally (exit status 0)");
    } else {
        snprintf(text, PEER_TEXT_BYTES,
                 "its process ended with exit status %d (its own output says why)",
                 code >> 8 & 0xff);
    }
}

static bool is_visible(const peers_t *peers, int rank)
{
    return peers != NULL && peers->host_of[rank] == peers->host_of[peers->self] &&
           peers->of[rank].started != 0 && peers->of[rank].space == peers->of[peers->self].space;
}

static bool has_ended(const process_t *process)
{
    return process->is_exiting || process->state == 'Z' || process->state == 'X';
}

bool process_is_stopped(int pid)
{
    process_t process;
    return read_process(pid, &process) && (process.state == 'T' || process.state == 't');
}

bool process_is_ending(int pid)
{
    process_t process;
    return read_process(pid, &process) && has_ended(&process);
}

bool peer_is_gone(const peers_t *peers, int rank)
{
    process_t process;
    return is_visible(peers, rank) &&
           (!read_process(peers->of[rank].pid, &process) ||
            process.started != peers->of[rank].started || has_ended(&process));
}

bool peer_is_runnable(const peers_t *peers, int rank)
{
    process_t process;
    return is_visible(peers, rank) && read_process(peers->of[rank].pid, &process) &&
           process.started == peers->of[rank].started && has_runnable_thread(peers->of[rank].pid);
}

// "" for one we have no words for.
static const char *words_for(char state)
{
    static const struct {
        char state;
        const char *what;
    } states[] = {
        {'T', "its process is stopped (state T); kill -CONT continues it"},
        {'t', "its process is stopped by a debugger (state t)"},
        {'D', "its process is waiting for a disk or device (state D)"},
        {'R', "its process is running (state R)"},
        {'S', "its process is alive (state S)"},
        {'Z', "its process has ended (state Z)"},
    };
    for (size_t i = 0; i < N_ELEMENTS(states); i++) {
        if (states[i].state == state) {
            return states[i].what;
        }
    }
    return "";
}

const char *process_state(int pid)
{
    process_t process;
    return read_process(pid, &process) ? words_for(process.state) : "";
}

const char *peer_state(const peers_t *peers, int rank, char text[PEER_TEXT_BYTES])
{
    process_t process;
    text[0] = '\0';
    if (!is_visible(peers, rank)) {
        return text;
    }
    if (!read_process(peers->of[rank].pid, &process)) {
        snprintf(text, PEER_TEXT_BYTES, "its process has ended%s",
                 peer_oom_kills() > peers->n_oom_kills
                     ? "; meanwhile the kernel's OOM killer has killed a process on this host"
                     : "");
        return text;
    }
    if (process.started != peers->of[rank].started) {
        return text;
    }
    if (has_ended(&process)) {
        describe_end(peers, &process, text);
        return text;
    }
    snprintf(text, PEER_TEXT_BYTES, "%s", words_for(process.state));
    return text;
}
