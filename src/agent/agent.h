// SPDX-License-Identifier: Apache-2.0
//
// agent.h - the agent of a host: starts ranks there, reports, and makes sure that they end.
//
// Owns what is started on a host (process.h), what launcher and agents say to each other (frame.h),
// and how they reach each other without ssh (dial.h). launch/ has the other end. An agent is one
// process with one thread.
#ifndef HVD_AGENT_H
#define HVD_AGENT_H

#include "agent/dial.h"
#include "agent/frame.h"
#include "agent/process.h"

int agent_main(const options_t *options);
// One that stays when its ranks have ended, until the launcher says how everything did: that exit
// code. *is_told_p false: the launcher is gone instead.
int agent_stay(const options_t *options, bool *is_told_p);

// Agents without ssh (relay.c); each returns an exit code.
int relay_serve(const options_t *options);  // that wait at a port
int relay_dial(const options_t *options);   // takes the place of ssh: knocks there
int relay_redial(const options_t *options); // an agent that dials, again and again

// Checks of the doctor on this host; a finding for each through report().
typedef void (*finding_fn)(void *arg, const finding_t *finding);
void examine_host(const frame_t *asked, finding_fn report, void *arg);
extern const char *const examined_packages[]; // those with a version; the last is NULL

#endif
