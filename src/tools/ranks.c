// SPDX-License-Identifier: Apache-2.0
//
// ranks.c - see ranks.h: forks the ranks, serves their rendezvous, and waits for their end.
//
// Nobody has threads yet when ranks are forked, so the rendezvous starts afterwards: each rank
// waits at a pipe for its port and the secret. Whoever kills the parent kills them too.
#define _GNU_SOURCE
#include "tools/ranks.h"

#include "engine/engine.h"
#include "wire/secret.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

// The child waits for the port, then is a rank.
static int child_main(const rank_job_t *job, int rank, int from_parent)
{
    char hello[128];
    ssize_t n = read(from_parent, hello, sizeof hello - 1);
    if (n <= 65) {
        return 1; // the parent is gone
    }
    hello[n] = '\0';
    int per_host = (job->ranks + job->hosts - 1) / job->hosts;
    int secret[2];
    if (pipe(secret) != 0 || write(secret[1], hello, 64) != 64) {
        return 1;
    }
    close(secret[1]);
    static char text[12][96];
    const char *env[64];
    int k = 0;
    int local_size = MIN(per_host, job->ranks - rank / per_host * per_host);
    snprintf(text[0], sizeof text[0], "HOROVOD_RANK=%d", rank);
    snprintf(text[1], sizeof text[1], "HOROVOD_SIZE=%d", job->ranks);
    snprintf(text[2], sizeof text[2], "HOROVOD_LOCAL_RANK=%d", rank % per_host);
    snprintf(text[3], sizeof text[3], "HOROVOD_LOCAL_SIZE=%d", local_size);
    snprintf(text[4], sizeof text[4], "HOROVOD_CROSS_RANK=%d", rank / per_host);
    snprintf(text[5], sizeof text[5], "HOROVOD_CROSS_SIZE=%d", job->hosts);
    snprintf(text[6], sizeof text[6], "HOROVOD_HOSTNAME=bench%d", rank / per_host);
    snprintf(text[7], sizeof text[7], "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1");
    snprintf(text[8], sizeof text[8], "HOROVOD_RENDEZVOUS_PORT=%s", hello + 65);
    snprintf(text[9], sizeof text[9], "HOROVOD_SECRET_FD=%d", secret[0]);
    while (k < 10) {
        env[k] = text[k];
        k++;
    }
    for (int i = 0; i < job->n_env; i++) {
        env[k++] = job->env[i];
    }
    env[k] = NULL;
    return job->run(job->arg, rank, env);
}

static int reap(const pid_t *pids, int n)
{
    int worst = 0;
    for (int left = n; left > 0; left--) {
        int state;
        pid_t pid = wait(&state);
        int code = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
        if (pid > 0 && code != 0 && worst == 0) {
            worst = code;
            for (int i = 0; i < n; i++) {
                if (pids[i] != pid) {
                    kill(pids[i], SIGTERM);
                }
            }
        }
    }
    return worst;
}

int ranks_run(const rank_job_t *job)
{
    uint8_t secret[32];
    char hex[SECRET_DIGITS + 1];
    err_t err;
    pid_t pids[RANKS_MOST];
    int to_child[RANKS_MOST];
    if (random_bytes(secret, sizeof secret, &err) != HVD_OK) {
        fprintf(stderr, "%s: %s\n", job->tool, err.text);
        return 1;
    }
    secret_encode(secret, hex);
    fflush(stdout); // once, not by each rank
    for (int i = 0; i < job->ranks; i++) {
        int ends[2];
        if (pipe(ends) != 0 || (pids[i] = fork()) < 0) {
            fprintf(stderr, "%s: cannot start rank %d: %s\n", job->tool, i, strerror(errno));
            return 1;
        }
        if (pids[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); // who kills us means them too
            close(ends[1]);
            exit(child_main(job, i, ends[0]));
        }
        close(ends[0]);
        to_child[i] = ends[1];
    }
    hvd_rendezvous_t *server;
    char text[HVD_TEXT_BYTES];
    if (hvd_rendezvous_start(NULL, 0, secret, &server, text, sizeof text) != HVD_OK) {
        fprintf(stderr, "%s: %s\n", job->tool, text);
        return 1;
    }
    for (int i = 0; i < job->ranks; i++) {
        char hello[128];
        int n = snprintf(hello, sizeof hello, "%s %d", hex, hvd_rendezvous_port(server));
        if (write(to_child[i], hello, (size_t)n) != n) {
            fprintf(stderr, "%s: rank %d has died\n", job->tool, i);
        }
        close(to_child[i]);
    }
    int code = reap(pids, job->ranks);
    hvd_rendezvous_stop(server);
    return code;
}
