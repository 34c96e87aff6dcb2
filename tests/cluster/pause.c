// SPDX-License-Identifier: Apache-2.0
//
// pause.c - holds the namespaces of a pod in the cluster that cluster.sh makes.
//
// The first process of every pod: reaps what the others leave behind, and ends when asked to.
// Linked statically; it is all there is in its image.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int number)
{
    (void)number;
    _exit(0);
}

static void reap(int number)
{
    (void)number;
    while (waitpid(-1, 0, WNOHANG) > 0) {
    }
}

int main(void)
{
    signal(SIGTERM, end);
    signal(SIGINT, end);
    signal(SIGCHLD, reap);
    for (;;) {
        pause();
    }
}
