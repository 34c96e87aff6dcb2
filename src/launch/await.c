// SPDX-License-Identifier: Apache-2.0
//
// await.c - agents that dial: the door at which the launcher awaits them, and those who have come.
//
// Whoever has proved the secret and said which host it is waits here, pinged so that it knows that
// the launcher is there, until the session wants an agent on that host; it then talks as any other
// agent does. One who does not say hello in time, or is gone, is forgotten. All descriptors are
// behind one, so the session's loop watches that. One thread, the session's.
#define _GNU_SOURCE
#include "launch/launch.h"
#include "launch/link.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define HELLO_MS 10000
#define MAX_CALLERS 4096

typedef struct caller {
    channel_t channel;
    uint64_t deadline_ns; // for its hello
    bool has_said;
    char address[DOOR_ADDRESS_BYTES];
    introduction_t introduction;
} caller_t;

struct awaited {
    int epoll_fd;
    door_rules_t rules;
    door_t *door;
    caller_t *callers[MAX_CALLERS];
    int n_callers;
    int port;
};

static void watch(const awaited_t *awaited, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(awaited->epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

// Somebody has proved the secret.
static void enter(void *owner, const guest_t *guest)
{
    awaited_t *awaited = owner;
    caller_t *caller = awaited->n_callers < MAX_CALLERS ? calloc(1, sizeof *caller) : NULL;
    hvd_channel_t *secure = caller != NULL ? channel_of_guest(guest) : NULL;
    if (secure == NULL) {
        say("refused the agent at %s: too many are connected", guest->address);
        if (caller == NULL) {
            secure_free(guest->secure);
        }
        fd_close(guest->fd);
        free(caller);
        return;
    }
    channel_open_secure(&caller->channel, guest->fd, secure);
    snprintf(caller->address, sizeof caller->address, "%s", guest->address);
    caller->deadline_ns = deadline_in_ms(HELLO_MS);
    awaited->callers[awaited->n_callers++] = caller;
    watch(awaited, guest->fd);
}

// Without its channel, which has gone to somebody else or is closed.
static void forget(awaited_t *awaited, int i)
{
    free(awaited->callers[i]);
    awaited->callers[i] = awaited->callers[--awaited->n_callers];
}

static void on_hello(caller_t *caller, const frame_t *frame)
{
    caller->has_said = frame->kind == FRAME_HELLO && frame->hello.host[0] != '\0';
    caller->channel.is_closed |= !caller->has_said;
    if (caller->has_said) {
        caller->introduction.slot = frame->hello.slot;
        snprintf(caller->introduction.host, sizeof caller->introduction.host, "%s",
                 frame->hello.host);
        snprintf(caller->introduction.version, sizeof caller->introduction.version, "%s",
                 frame->hello.version);
        snprintf(caller->introduction.about, sizeof caller->introduction.about, "%s",
                 frame->hello.about);
    }
}

// What it says after its hello are pings, until somebody takes it.
static void hear(caller_t *caller)
{
    frame_t frame;
    do {
        channel_receive(&caller->channel);
        while (channel_next(&caller->channel, &frame)) {
            if (!caller->has_said) {
                on_hello(caller, &frame);
            }
        }
    } while (channel_has_more(&caller->channel));
    channel_send(&caller->channel);
}

int awaited_fd(const awaited_t *awaited)
{
    return awaited->epoll_fd;
}

void awaited_progress(awaited_t *awaited)
{
    door_progress(awaited->door);
    for (int i = awaited->n_callers - 1; i >= 0; i--) {
        caller_t *caller = awaited->callers[i];
        hear(caller);
        bool is_late = !caller->has_said && clock_ns() >= caller->deadline_ns;
        if (is_late) {
            say("the client at %s has the secret but is not an agent", caller->address);
        }
        if (is_late || caller->channel.is_closed) {
            channel_close(&caller->channel);
            forget(awaited, i);
        }
    }
}

void awaited_ping(awaited_t *awaited)
{
    for (int i = 0; i < awaited->n_callers; i++) {
        channel_put(&awaited->callers[i]->channel, &(frame_t){.kind = FRAME_PING});
        channel_send(&awaited->callers[i]->channel);
    }
}

// The number of the agent for this host (NULL: of any) with the lowest slot; -1: none has come.
static int find(const awaited_t *awaited, const char *host)
{
    int found = -1;
    for (int i = 0; i < awaited->n_callers; i++) {
        const caller_t *caller = awaited->callers[i];
        const introduction_t *introduction = &caller->introduction;
        bool is_meant = host == NULL || // a shell has no slot, and is no agent
                        (introduction->slot >= 0 && strcmp(introduction->host, host) == 0);
        if (caller->has_said && is_meant &&
            (found < 0 || introduction->slot < awaited->callers[found]->introduction.slot)) {
            found = i;
        }
    }
    return found;
}

bool awaited_has(const awaited_t *awaited, const char *host)
{
    return find(awaited, host) >= 0;
}

bool awaited_take(awaited_t *awaited, const char *host, channel_t *channel_p,
                  introduction_t *introduction_p)
{
    int found = find(awaited, host);
    if (found >= 0) {
        *channel_p = awaited->callers[found]->channel;
        *introduction_p = awaited->callers[found]->introduction;
        epoll_ctl(awaited->epoll_fd, EPOLL_CTL_DEL, channel_p->in_fd, NULL);
        forget(awaited, found);
    }
    return found >= 0;
}

// --- The door ------------------------------------------------------------------------------------

// Under another name first, so that nobody reads half of it.
static hvd_status_t write_place(const char *path, const char *place, err_t *err)
{
    char draft[4096];
    snprintf(draft, sizeof draft, "%s.new", path);
    FILE *file = fopen(draft, "we");
    bool is_written = file != NULL && fprintf(file, "%s\n", place) > 0;
    if (file != NULL) {
        is_written = fclose(file) == 0 && is_written;
    }
    return is_written && rename(draft, path) == 0
               ? HVD_OK
               : fail_errno(err, errno, "cannot write %s (--await-file)", path);
}

// For agents: what to give to --dial.
static hvd_status_t tell_place(const options_t *options, int port, err_t *err)
{
    buf_t place = {0};
    hvd_status_t status = own_addresses(options->network_interfaces, &place, err);
    if (status != HVD_OK && options->network_interfaces[0] == '\0') { // only itself
        buf_clear(&place);
        buf_append(&place, "127.0.0.1", sizeof "127.0.0.1");
        status = HVD_OK;
    }
    if (status == HVD_OK && place.len > 0) {
        place.len--; // its end
        buf_printf(&place, ":%d", port);
        buf_append(&place, "", 1);
    }
    if (status == HVD_OK && !place.failed) {
        const char *text = (const char *)place.data;
        if ((options->await_agents == 0 && options->events_fd < 0) || options->verbose) {
            say("awaiting agents: %s --agent --dial %s", PROGRAM, text);
        }
        status =
            options->await_file[0] != '\0' ? write_place(options->await_file, text, err) : HVD_OK;
    }
    status = status == HVD_OK && place.failed ? fail(err, HVD_NO_MEMORY, "no memory") : status;
    buf_free(&place);
    return status;
}

hvd_status_t awaited_open(const options_t *options, awaited_t **awaited_p, err_t *err)
{
    awaited_t *awaited = calloc(1, sizeof *awaited);
    int port = (int)options->await_agents;
    hvd_status_t status;
    if (awaited == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to await agents");
    }
    if (options->secret_file[0] == '\0' && options->secret_fd < 0) {
        free(awaited);
        return fail(err, HVD_INVALID_ARGUMENT,
                    "--await-agents needs a secret that the agents have too: --secret-file or "
                    "--secret-fd; openssl rand -hex 32 makes one");
    }
    awaited->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    awaited->rules = (door_rules_t){.name = "agents", .owner = awaited, .enter = enter};
    TRY(door_at(options, &port, "--await-agents", &awaited->rules, &awaited->door, err), undo);
    watch(awaited, door_fd(awaited->door));
    TRY(tell_place(options, port, err), undo);
    awaited->port = port;
    *awaited_p = awaited;
    return HVD_OK;
undo:
    awaited_close(awaited);
    return status;
}

int awaited_port(const awaited_t *awaited)
{
    return awaited->port;
}

void awaited_close(awaited_t *awaited)
{
    if (awaited == NULL) {
        return;
    }
    for (int i = 0; i < awaited->n_callers; i++) {
        channel_close(&awaited->callers[i]->channel);
        free(awaited->callers[i]);
    }
    door_close(awaited->door);
    secure_keys_free(awaited->rules.keys);
    close(awaited->epoll_fd);
    free(awaited);
}
