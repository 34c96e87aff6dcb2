// SPDX-License-Identifier: Apache-2.0
//
// hosts.c - see hosts.h.
//
// A namespace lives as long as a process is in it: a child that only waits holds the second one.
// Interfaces are named differently on the two hosts on purpose, and the first address ranks try is
// one where nobody listens on the second host.
#define _GNU_SOURCE
#include "hosts.h"

#include "scene.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static pid_t holder; // of the second namespace

bool hosts_run(bool on_second, const char *command)
{
    return on_second ? fault_run("nsenter -t %d -n %s", (int)holder, command)
                     : fault_run("%s", command);
}

static bool make_holder(void)
{
    int ready[2];
    char byte = 0;
    if (pipe(ready) != 0) {
        return false;
    }
    holder = fork();
    if (holder == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        bool ok = unshare(CLONE_NEWNET) == 0 && write(ready[1], &byte, 1) == 1;
        close(ready[0]);
        close(ready[1]);
        while (ok) {
            pause();
        }
        _exit(1);
    }
    close(ready[1]);
    bool ok = holder > 0 && read(ready[0], &byte, 1) == 1;
    close(ready[0]);
    return ok;
}

static bool join_hosts(void)
{
    return fault_run("ip link add va type veth peer name vb netns %d", (int)holder) &&
           hosts_run(false, "ip addr add " HOSTS_ADDRESS_A "/24 dev va") &&
           hosts_run(false, "ip link set va up") &&
           hosts_run(true, "ip addr add " HOSTS_ADDRESS_B "/24 dev vb") &&
           hosts_run(true, "ip link set vb up");
}

bool hosts_make(const char *program)
{
    if (scene_make() && make_holder() && hosts_run(true, "ip link set lo up") && join_hosts()) {
        ranks_server_address = "*";
        return true;
    }
    fprintf(stderr,
            "%s needs root, or the right to make network namespaces, and the tools ip, nft, ss, tc "
            "and nsenter: nothing was tested\n",
            program);
    return false;
}

void hosts_remove(void)
{
    if (holder > 0) {
        kill(holder, SIGKILL);
        waitpid(holder, NULL, 0);
    }
}

bool hosts_mend(void)
{
    bool whole = hosts_run(false, "ip link show va >/dev/null 2>&1") || join_hosts();
    hosts_run(false, "tc qdisc del dev va root 2>/dev/null");
    return whole && hosts_run(false, "nft flush ruleset") && hosts_run(true, "nft flush ruleset");
}

void hosts_enter(rank_t *r)
{
    if (layout_host(r->layout, r->rank, r->size) == 1) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/ns/net", (int)holder);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        CHECK(r, fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
        close(fd);
    }
    rank_setenv(r, "HOROVOD_GLOO_IFACE", NULL); // all that are up
    rank_setenv(r, "HOROVOD_RENDEZVOUS_ADDR", "127.0.1.1," HOSTS_ADDRESS_A);
}
