// SPDX-License-Identifier: Apache-2.0
//
// top.c - a live view of a job in a terminal: every second what its launcher says.
//
// Each horovodrun listens at an abstract Unix socket, hvd-<uid>/launcher-<pid>, for its own user
// (launch/watch.c); the table is drawn there, for as many columns and rows as the terminal has.
// While somebody looks, agents ask their ranks; nobody needs to have asked for that when the job
// was started. Into a pipe it prints one table. One thread; ends with the job, or with Ctrl-C.
#define _GNU_SOURCE
#include "tools/top.h"
#include "observe/observe.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define ANSWER_MS 2000
#define PERIOD_MS 1000
#define FIRST_MS 2500 // until agents have asked ranks, and rates are known
#define MAX_JOBS 64
#define TEXT_BYTES (4 * MIB)

// Pids of the launchers of this user.
static int find_launchers(int pids[MAX_JOBS])
{
    char line[512], name[LIVE_NAME_BYTES];
    int n = 0;
    FILE *list = fopen("/proc/net/unix", "re");
    while (list != NULL && n < MAX_JOBS && fgets(line, sizeof line, list) != NULL) {
        const char *at = strstr(line, " @hvd-");
        unsigned uid, flags;
        int pid;
        line[strcspn(line, "\n")] = '\0';
        if (at == NULL || sscanf(line, "%*s %*s %*s %x", &flags) != 1 || (flags & 0x10000) == 0 ||
            sscanf(at, " @hvd-%u/launcher-%d", &uid, &pid) != 2) {
            continue;
        }
        snprintf(name, sizeof name, "hvd-%u/launcher-%d", uid, pid);
        if (strcmp(name, at + 2) == 0 && uid == geteuid()) {
            pids[n++] = pid;
        }
    }
    if (list != NULL) {
        fclose(list);
    }
    return n;
}

// The whole answer of a socket, until it is closed; false: none in time.
static bool receive(int fd, buf_t *answer)
{
    uint64_t deadline_ns = deadline_in_ms(ANSWER_MS), now_ns;
    while ((now_ns = clock_ns()) < deadline_ns && answer->len < TEXT_BYTES) {
        struct pollfd polled = {.fd = fd, .events = POLLIN};
        char part[16 * KIB];
        poll(&polled, 1, (int)((deadline_ns - now_ns) / NS_PER_MS) + 1);
        ssize_t n = recv(fd, part, sizeof part, MSG_DONTWAIT);
        if (n == 0) {
            buf_append(answer, "", 1);
            return !answer->failed;
        }
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            return false;
        }
        buf_append(answer, part, n > 0 ? (size_t)n : 0);
    }
    return false;
}

// The table; NULL: there is no such launcher any more. In *answer.
static const char *ask(int pid, int columns, int rows, buf_t *answer)
{
    char name[LIVE_NAME_BYTES], request[160];
    live_peer_t peer;
    snprintf(name, sizeof name, "hvd-%u/launcher-%d", (unsigned)geteuid(), pid);
    int bytes = snprintf(request, sizeof request,
                         "GET /text?columns=%d&rows=%d HTTP/1.1\r\nHost: localhost\r\n"
                         "Connection: close\r\n\r\n",
                         columns, rows);
    buf_clear(answer);
    int fd = live_connect(name);
    bool has_answer = fd >= 0 && live_peer_is(fd, geteuid(), &peer) && peer.pid == pid &&
                      send(fd, request, (size_t)bytes, MSG_NOSIGNAL) == bytes &&
                      receive(fd, answer);
    if (fd >= 0) {
        close(fd);
    }
    const char *text = has_answer ? (const char *)answer->data : "";
    const char *body = strstr(text, "\r\n\r\n");
    return strncmp(text, "HTTP/1.1 200", 12) == 0 && body != NULL ? body + 4 : NULL;
}

static int choose(const options_t *options)
{
    int pids[MAX_JOBS], n = find_launchers(pids);
    int wanted = options->n_command > 0 ? (int)strtol(options->command[0], NULL, 10) : 0;
    for (int i = 0; i < n; i++) {
        if (pids[i] == wanted) {
            return wanted;
        }
    }
    if (n == 1 && wanted == 0) {
        return pids[0];
    }
    if (n == 0 || wanted != 0) {
        say("no job of this user %sruns on this host, in this network namespace; --top looks where "
            "%s was started",
            wanted != 0 ? "with that number " : "", PROGRAM);
        return 0;
    }
    say("%d jobs run here; choose one by the number of its launcher:", n);
    for (int i = 0; i < n; i++) {
        say("  %s --top %d", PROGRAM, pids[i]);
    }
    return 0;
}

int top_main(const options_t *options)
{
    bool is_terminal = isatty(STDOUT_FILENO);
    int pid = choose(options);
    buf_t answer = {0};
    const char *table = pid != 0 ? ask(pid, 80, 24, &answer) : NULL; // wakes the agents
    if (table == NULL) {
        buf_free(&answer);
        return EXIT_FAILURE;
    }
    if (!is_terminal) {
        poll(NULL, 0, FIRST_MS);
        table = ask(pid, 160, 1 << 20, &answer);
        fputs(table != NULL ? table : "", stdout);
    }
    while (is_terminal && table != NULL) {
        struct winsize size = {.ws_col = 80, .ws_row = 24};
        ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
        table = ask(pid, MAX(size.ws_col, 20), MAX(size.ws_row, 6), &answer);
        if (table != NULL) {
            fprintf(stdout, "\033[H\033[J%s", table);
            fflush(stdout);
            poll(NULL, 0, PERIOD_MS);
        }
    }
    buf_free(&answer);
    return 0;
}
