// SPDX-License-Identifier: Apache-2.0
//
// dial.h - connections between launcher and agents without ssh: dialling (dial.c), and waiting for
// agents that dial (await.c).
//
// Both sides prove the secret that they share (--secret-file, --secret-fd) before anything else is
// said. One thread.
#ifndef HVD_LAUNCH_DIAL_H
#define HVD_LAUNCH_DIAL_H

#include "launch/frame.h"
#include "launch/options.h"
#include "wire/door.h"
#include "wire/secret.h"

hvd_status_t shared_secret(const options_t *options, uint8_t secret[SECRET_BYTES], err_t *err);
// 0, or an exit code and a text that says why.
int dial(const char *host, const char *port, const uint8_t secret[SECRET_BYTES], int *fd_p,
         hvd_channel_t **channel_p, char *text, size_t text_bytes);
// The numeric address of the other end; NULL: it is gone.
const char *peer_address(int fd, char *text, size_t bytes);
// An agent to its launcher, at each address of --dial in turn until --start-timeout. 0, or an exit
// code; the reason has been said.
int dial_launcher(const options_t *options, channel_t *channel_p);
// A door at every interface for those who have the secret. *port_p 0: the kernel chooses. `rules`
// needs name, owner and enter; its keys are the caller's to free, also on failure.
hvd_status_t door_at(const options_t *options, int *port_p, const char *setting,
                     door_rules_t *rules, door_t **door_p, err_t *err);

// --- Agents that have dialled and wait for a host of that name to be wanted (await.c) ------------

typedef struct awaited awaited_t;

// Opens the door of --await-agents, and tells where it is.
hvd_status_t awaited_open(const options_t *options, awaited_t **awaited_p, err_t *err);
int awaited_fd(const awaited_t *awaited); // readable: there is something for awaited_progress
void awaited_progress(awaited_t *awaited);
void awaited_ping(awaited_t *awaited); // so that they know the launcher is there
// The agent of this host (NULL: of any), with the lowest slot if there are several; false: none has
// come. The channel, and what it said first, are the caller's.
typedef struct introduction {
    char version[32], host[256], about[8192];
    int slot;
} introduction_t;
bool awaited_take(awaited_t *awaited, const char *host, channel_t *channel_p,
                  introduction_t *introduction_p);
bool awaited_has(const awaited_t *awaited, const char *host); // an agent that could be taken
int awaited_port(const awaited_t *awaited);
void awaited_close(awaited_t *awaited); // safe on NULL

#endif
