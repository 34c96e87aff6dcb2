// SPDX-License-Identifier: Apache-2.0
//
// simulate.c - the job page of a job that is made up: N ranks on hosts of eight, with a straggler,
// a rank that failed, one that does not answer, and names that try to be HTML. Prints the address;
// ends with its stdin.
//
// simulate N
#define _GNU_SOURCE
#include "web/web.h"
#include "wire/secret.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { STRAGGLER = 5, FAILED = 11, SILENT = 13 };

static void tell(model_t *model, int rank, int second)
{
    char page[4096];
    int n = 0;
    double waiting = rank == STRAGGLER ? 0.02 : 0.15 + 0.05 * (rank % 5), moving = 0.2;
    if (rank == SILENT) {
        model_snapshot(model, rank, "state\tno answer\nprocess\tT\nmemory\t900000000\n");
        return;
    }
    hvd_counters_t counters = {.steps = (uint64_t)second * 4};
    counters.operations[HVD_ALLREDUCE] = (uint64_t)second * 640;
    counters.bytes[HVD_ALLREDUCE] = (uint64_t)second * 400000000;
    buf_t line = {0};
    metrics_pack(&line, &counters);
    n += snprintf(page, sizeof page,
                  "state\t%s\nin_flight\t1\nflight\twaiting\t0.01\tallreduce\t0\tlayer.%d<img "
                  "src=x onerror=alert(1)>\nnow\t%lld\nshare\t%.3f\t%.3f\t%.3f\nstep\t%d\t0.25\n"
                  "loss\t%.4f\nsamples\t%d\ncpu\t%d\nmemory\t%d\ncounters\t%.*s\n",
                  rank == STRAGGLER ? "running" : "waiting", second % 30,
                  (long long)model_now_ms() * 1000, 1 - waiting - moving, waiting, moving,
                  second * 4, 3.0 / (second + 1), second * 256, second, 900000000 + rank * 1000000,
                  (int)line.len, (const char *)line.data);
    buf_free(&line);
    if (rank == 0) {
        n += snprintf(page + n, sizeof page - (size_t)n, "late\t%d\t1\t%d\t%.3f\n", STRAGGLER,
                      second * 4, second * 0.3);
    }
    for (int i = 0; i < 8; i++) {
        n += snprintf(page + n, sizeof page - (size_t)n,
                      "op\t%d\t%d\t%d\t%d\t4000000\tallreduce\tlayer.%d\n", 90000 - i * 9000,
                      88000 - i * 9000, 86000 - i * 9000, 80000 - i * 9000, i);
    }
    model_snapshot(model, rank, page);
}

int main(int argc, char **argv)
{
    char *command[] = {"python", "train.py", "--name", "<script>alert(1)</script>"};
    char token[WEB_TOKEN_BYTES], host[64];
    int n = argc > 1 ? atoi(argv[1]) : 256, n_hosts = (n + 7) / 8;
    err_t err;
    web_t *web = NULL;
    model_t *model = model_new(command, 4);
    if (model == NULL || secret_make_token(token, sizeof token, &err) != HVD_OK) {
        return 1;
    }
    const web_rules_t rules = {.model = model,
                               .address = "127.0.0.1",
                               .certificate = "",
                               .host = "",
                               .token = token,
                               .local = ""};
    if (web_open(&rules, &web, &err) != HVD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    model_hosts(model, n_hosts, n_hosts, "");
    model_generation(model, 0, n);
    for (int i = 0; i < n; i++) {
        snprintf(host, sizeof host, i < 8 ? "<b>node</b>-%d" : "node-%d", i / 8);
        model_place(model, i, i, host, 1000 + i);
        model_output(model, i, "hello <script>alert(1)</script>\n", 32);
    }
    printf("http://127.0.0.1:%d/?token=%s\n", web_port(web), token);
    fflush(stdout);
    struct pollfd polled = {.fd = STDIN_FILENO, .events = POLLIN};
    for (int second = 1; second < 3600 && polled.revents == 0; second++) {
        for (int i = 0; i < n; i++) {
            tell(model, i, second);
        }
        if (second == 4 && n > FAILED) {
            model_end(model, FAILED, 1, 0);
            model_event(model, 'f', "rank %d on host <i>x</i>: exit code 1", FAILED);
        }
        poll(&polled, 1, 1000);
    }
    model_over(model, 0);
    web_close(web);
    model_free(model);
    return 0;
}
