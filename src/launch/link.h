// SPDX-License-Identifier: Apache-2.0
//
// link.h - the launcher's side of an agent, from starting it to its hello: agents that dial
// (await.c), and how any other is brought up (link.c).
//
// session.c watches the descriptors and calls these. Private to launch/. One thread.
#ifndef HVD_LAUNCH_LINK_H
#define HVD_LAUNCH_LINK_H

#include "agent/agent.h"
#include "launch/output.h"

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

// --- The agent of a host (link.c) ----------------------------------------------------------------

#define SSH_SAID_BYTES 2048

typedef enum link_phase {
    LINK_WAITING, // to be started, or started again
    LINK_AWAITED, // an agent of this host is to dial
    LINK_CONNECTING,
    LINK_READY, // has said hello
    LINK_DONE,  // nothing is left there
    LINK_FAILED,
} link_phase_t;

typedef struct agent_link {
    const host_t *host;
    host_t own;      // of an agent that nobody has named: host is this one
    int slot;        // that it has said
    char about[64];  // the same
    bool is_patient; // most faults pass
    bool is_shell;   // no agent, but somebody who asks for a command: carry.c
    link_phase_t phase;
    bool has_plan, is_stopping, is_watched; // what it was told
    child_t process;
    bool has_process;
    channel_t channel;
    int attempts;
    uint64_t started_ns, retry_at_ns, heard_ns;
    uint64_t deadline_ns;         // for its hello
    char said[SSH_SAID_BYTES];    // end of what ssh printed
    int exit_code;                // of the last attempt; -1: none, or by a signal
    char problem[HVD_TEXT_BYTES]; // when failed
    bool is_late;                 // failed because of --start-timeout
} agent_link_t;

// How a host is reached; a row each in link.c.
typedef enum reach {
    REACH_FORK,   // this host: a child
    REACH_SSH,    // or what --ssh-command names
    REACH_PORT,   // an agent that waits: --agent-port
    REACH_AWAITED // an agent that dials: --await-agents
} reach_t;

reach_t link_reach(const host_t *host, const options_t *options);
const char *reach_name(reach_t reach);

bool link_is_coming(const agent_link_t *link);                        // has not said hello yet
bool link_is_running(const agent_link_t *link);                       // has ranks, or may have
agent_link_t *link_new(const host_t *host, const options_t *options); // NULL: no memory
// One that waits: starts the agent.
void link_start(agent_link_t *link, const options_t *options, sink_t *sink);
// One that is awaited: the agent has come, and has said hello with this version. Takes the channel.
void link_welcome(agent_link_t *link, const channel_t *channel, const introduction_t *introduction);
// One that connects: something has come from it, or its time is over.
void link_hear_hello(agent_link_t *link, const options_t *options, sink_t *sink);
void link_expire(agent_link_t *link, const options_t *options);
// The last line of it that says anything; "": none does.
const char *link_last_words(agent_link_t *link);
// Why it has not come, if that is known; "": it is not. In a few words, without those of ssh where
// they are understood.
const char *link_reason(agent_link_t *link, const options_t *options);
// What its ssh prints is kept, and passed on where the user asked for it.
void link_read_errors(agent_link_t *link, bool is_verbose, sink_t *sink);
void link_close(agent_link_t *link); // ends its process
void link_free(agent_link_t *link);

#endif
