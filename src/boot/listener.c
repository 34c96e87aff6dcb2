// SPDX-License-Identifier: Apache-2.0
//
// listener.c - the door at which channels come in: see hvd_listener_open in hvd.h.
//
// wire/door.c does the work; here those who have come in wait until they are asked for.
// Threads: one at a time. The listener owns the door, its keys, and whoever nobody has asked for.
#define _GNU_SOURCE
#include "boot/boot.h"
#include "wire/door.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>

#define MAX_WAITING 256

typedef struct entrant {
    int fd;
    hvd_channel_t *channel;
} entrant_t;

struct hvd_listener {
    door_t *door;
    secure_keys_t *keys;
    log_t log;
    int port;
    entrant_t waiting[MAX_WAITING];
    int n_waiting;
};

static void enter(void *owner, const guest_t *guest)
{
    hvd_listener_t *listener = owner;
    bool is_full = listener->n_waiting == MAX_WAITING;
    hvd_channel_t *channel = is_full ? NULL : channel_of_guest(guest);
    if (channel == NULL) {
        if (is_full) {
            secure_free(guest->secure);
        }
        fd_close(guest->fd);
        return;
    }
    listener->waiting[listener->n_waiting++] = (entrant_t){guest->fd, channel};
}

// IPv6 takes IPv4 callers too, where there is IPv6.
static hvd_status_t listen_everywhere(hvd_listener_t *listener, err_t *err)
{
    struct sockaddr_storage at = {0};
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&at;
    struct sockaddr_in *v4 = (struct sockaddr_in *)&at;
    socklen_t bytes = sizeof *v6;
    *v6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT};
    int code = door_listen(listener->door, &at, &bytes);
    if (code != 0) {
        bytes = sizeof *v4;
        *v4 = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
        code = door_listen(listener->door, &at, &bytes);
    }
    listener->port = ntohs(at.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
    return code == 0 ? HVD_OK : fail_errno(err, code, "cannot listen at any port");
}

hvd_status_t hvd_listener_open(const uint8_t secret[32], hvd_listener_t **listener_p, char *text,
                               size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status;
    hvd_listener_t *listener = calloc(1, sizeof *listener);
    if (listener == NULL) {
        return err_export(&err, HVD_NO_MEMORY, text, text_bytes);
    }
    listener->log = (log_t){.level = LOG_WARN, .rank = -1};
    TRY(secure_keys_new(secret, &listener->keys, &err), undo);
    const door_rules_t rules = {.name = "listener",
                                .log = &listener->log,
                                .keys = listener->keys,
                                .role = HELLO_CHANNEL,
                                .owner = listener,
                                .enter = enter};
    TRY(door_open(&rules, &listener->door, &err), undo);
    TRY(listen_everywhere(listener, &err), undo);
    *listener_p = listener;
    return HVD_OK;
undo:
    hvd_listener_close(listener);
    return err_export(&err, status, text, text_bytes);
}

int hvd_listener_port(const hvd_listener_t *listener)
{
    return listener->port;
}

int hvd_listener_fd(const hvd_listener_t *listener)
{
    return door_fd(listener->door);
}

hvd_status_t hvd_listener_accept(hvd_listener_t *listener, int *fd_p, hvd_channel_t **channel_p)
{
    if (listener->n_waiting == 0) {
        door_progress(listener->door);
    }
    if (listener->n_waiting == 0) {
        return HVD_IN_PROGRESS;
    }
    const entrant_t *entrant = &listener->waiting[--listener->n_waiting];
    fd_for_children(entrant->fd); // it is the caller's, who knows nothing of our marks
    *fd_p = entrant->fd;
    *channel_p = entrant->channel;
    return HVD_OK;
}

void hvd_listener_close(hvd_listener_t *listener)
{
    if (listener == NULL) {
        return;
    }
    door_close(listener->door);
    for (int i = 0; i < listener->n_waiting; i++) {
        hvd_channel_close(listener->waiting[i].channel);
        fd_close(listener->waiting[i].fd);
    }
    secure_keys_free(listener->keys);
    free(listener);
}
