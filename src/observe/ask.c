// SPDX-License-Identifier: Apache-2.0
//
// ask.c - asks ranks of this host what they are doing: hvd-info does, and agents that stop ranks.
//
// Sockets (live.c) are found in the kernel's list of names. Anybody can take such a name, so a rank
// is believed only if its process belongs to the user whom the name tells, or to root. All are
// asked at once, and one that does not answer in time is left alone. Any thread; nothing is kept.
#define _GNU_SOURCE
#include "observe/observe.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define ANSWER_BYTES (256 * KIB)
#define IS_LISTENING 0x10000 // among the flags of a socket in /proc/net/unix

// --- Finding -------------------------------------------------------------------------------------

// A line of the kernel's list, if it is of a rank that listens. Exactly: what is read must give the
// same name again.
static bool read_name(const char *line, live_rank_t *r)
{
    unsigned flags;
    int at = 0;
    char job[LIVE_JOB_BYTES - 32];
    *r = (live_rank_t){.fd = -1};
    if (sscanf(line, "%*s %*s %*s %x %*s %*s %*s @%n", &flags, &at) != 1 || at == 0 ||
        (flags & IS_LISTENING) == 0 ||
        sscanf(line + at, "hvd-%u/%95[^/\n]/rank-%d", &r->uid, job, &r->rank) != 3) {
        return false;
    }
    snprintf(r->name, sizeof r->name, LIVE_NAME, r->uid, job, r->rank);
    snprintf(r->job, sizeof r->job, "hvd-%u/%s", r->uid, job);
    return r->rank >= 0 && strncmp(r->name, line + at, strcspn(line + at, "\n")) == 0 &&
           strlen(r->name) == strcspn(line + at, "\n");
}

int live_find(live_rank_t *ranks, int n_ranks)
{
    char line[512];
    int n = 0;
    FILE *list = fopen("/proc/net/unix", "re");
    if (list == NULL) {
        return -1;
    }
    while (n < n_ranks && fgets(line, sizeof line, list) != NULL) {
        // To other users it would not answer.
        n += read_name(line, &ranks[n]) && (geteuid() == 0 || geteuid() == ranks[n].uid);
    }
    fclose(list);
    return n;
}

// --- Asking --------------------------------------------------------------------------------------

bool live_begin(live_rank_t *r, const live_question_t *question)
{
    char request[128];
    live_peer_t peer;
    int bytes = snprintf(request, sizeof request, "GET %s HTTP/1.0\r\n\r\n", question->page);
    r->fd = live_connect(r->name);
    if (r->fd < 0) {
        return errno == EAGAIN; // so many wait there that it must be stuck
    }
    if (!live_peer_is(r->fd, r->uid, &peer) ||
        (question->wants != NULL && !question->wants(question->arg, peer.pid))) {
        close(r->fd);
        return false;
    }
    r->pid = peer.pid;
    if (send(r->fd, request, (size_t)bytes, MSG_NOSIGNAL) != bytes) {
        close(r->fd);
        r->fd = -1;
    }
    return true;
}

void live_hear(live_rank_t *r)
{
    char part[16 * KIB];
    ssize_t n = recv(r->fd, part, sizeof part, 0);
    if (n > 0 && r->text.len < ANSWER_BYTES) {
        buf_append(&r->text, part, (size_t)n);
        return;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    close(r->fd);
    r->fd = -1;
    buf_append(&r->text, "", 1);
    char *text = r->text.failed ? NULL : (char *)r->text.data;
    char *body = text != NULL ? strstr(text, "\r\n\r\n") : NULL;
    bool is_whole = n == 0 && body != NULL && strncmp(text, "HTTP/1.0 200", 12) == 0;
    r->answer = is_whole ? body + 4 : NULL;
}

void live_end(live_rank_t *r)
{
    if (r->fd >= 0) {
        close(r->fd);
        r->fd = -1;
    }
    r->answer = NULL;
    buf_free(&r->text);
}

static void hear_all(live_rank_t *ranks, int n, struct pollfd *polled, int wait_ms)
{
    uint64_t deadline_ns = deadline_in_ms(wait_ms), now_ns;
    int n_open = n;
    while (n_open > 0 && (now_ns = clock_ns()) < deadline_ns) {
        n_open = 0;
        for (int i = 0; i < n; i++) {
            polled[i] = (struct pollfd){.fd = ranks[i].fd, .events = POLLIN};
            n_open += ranks[i].fd >= 0;
        }
        int left_ms = n_open > 0 ? (int)((deadline_ns - now_ns) / NS_PER_MS) + 1 : 0;
        int n_heard = poll(polled, (nfds_t)n, left_ms);
        for (int i = 0; i < n && n_heard > 0; i++) {
            if (polled[i].revents != 0) {
                live_hear(&ranks[i]);
            }
        }
    }
    for (int i = 0; i < n; i++) {
        if (ranks[i].fd >= 0) {
            close(ranks[i].fd);
            ranks[i].fd = -1;
        }
    }
}

int live_ask(live_rank_t *ranks, int n_ranks, const live_question_t *question)
{
    struct pollfd *polled = calloc((size_t)MAX(n_ranks, 1), sizeof *polled);
    int n = 0;
    for (int i = 0; i < n_ranks && polled != NULL; i++) {
        ranks[n] = ranks[i];
        n += live_begin(&ranks[n], question);
    }
    if (n > 0) {
        hear_all(ranks, n, polled, question->wait_ms);
    }
    free(polled);
    return n;
}

void live_forget(live_rank_t *ranks, int n)
{
    for (int i = 0; i < n; i++) {
        buf_free(&ranks[i].text);
    }
}
