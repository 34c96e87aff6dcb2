// SPDX-License-Identifier: Apache-2.0
//
// hosts.h - two hosts on one machine, for tests that break the network between them.
//
// The program's scene (scene.h) is the first host. A second network namespace is joined to it by a
// pair of virtual Ethernet ends: va in the first, vb in the second. Both namespaces have no name
// and vanish with the processes in them, so nothing stays behind even if a test is killed.
#ifndef TESTS_FAULT_HOSTS_H
#define TESTS_FAULT_HOSTS_H

#include "fault.h"

#define HOSTS_ADDRESS_A "10.77.0.1"
#define HOSTS_ADDRESS_B "10.77.0.2"

// A command that drops everything that comes in at an interface.
#define HOSTS_DROP(interface)                                                                      \
    "nft 'add table inet cut; add chain inet cut way { type filter hook input priority 0; }; "     \
    "add rule inet cut way iifname \"" interface "\" drop'"
// A command that drops what is larger than the path is said to take.
#define HOSTS_DROP_LARGE(interface)                                                                \
    "nft 'add table inet cut; add chain inet cut way { type filter hook input priority 0; }; "     \
    "add rule inet cut way iifname \"" interface "\" meta length > 1000 drop'"
// One in n packets.
#define HOSTS_LOSE(interface, n)                                                                   \
    "nft 'add table inet cut; add chain inet cut way { type filter hook input priority 0; }; "     \
    "add rule inet cut way iifname \"" interface "\" numgen random mod " n " < 1 drop'"

// Before anything is forked. False, and why on stderr: this machine does not let us.
bool hosts_make(const char *program);
void hosts_remove(void);
bool hosts_mend(void); // whole again, whatever was done to the network
// A shell command on the first host (false) or the second (true).
bool hosts_run(bool on_second, const char *command);
// Moves this process to the host its rank belongs to, and tells the rank how to reach the others.
void hosts_enter(rank_t *r);

#endif
