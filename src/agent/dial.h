// SPDX-License-Identifier: Apache-2.0
//
// dial.h - connections between launcher and agents without ssh (dial.c).
//
// Both sides prove the secret that they share (--secret-file, --secret-fd) before anything else is
// said. One thread.
#ifndef HVD_AGENT_DIAL_H
#define HVD_AGENT_DIAL_H

#include "agent/frame.h"
#include "cli/cli.h"
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

#endif
