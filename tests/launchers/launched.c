// SPDX-License-Identifier: Apache-2.0
//
// launched.c - the rank that tests/launchers/run.py starts under every launcher.
//
//   launched [--inits N] [--kill RANK] [--report]
//
// Joins the job N times over and each time checks an allreduce and an allgather against what they
// must give; then says "rank R of S ok". With --kill that rank ends itself by SIGKILL in the middle
// of a job and the others say what they learn of it. With --report it waits for a line on no input:
// it prints its own arguments and environment, for the test to look for secrets in.
#include "hvd.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_VALUES 1000

extern char **environ;

static hvd_status_t run(hvd_ctx_t *ctx, const char *name, int32_t *values, char *text,
                        size_t text_bytes)
{
    const int64_t shape[] = {N_VALUES};
    const hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    const hvd_request_t request = {.op = HVD_ALLREDUCE,
                                   .name = name,
                                   .dtype = HVD_INT32,
                                   .reduce = HVD_SUM,
                                   .tensors = &tensor,
                                   .n_tensors = 1};
    hvd_handle_t handle;
    hvd_result_t result;
    hvd_status_t status = hvd_submit(ctx, &request, &handle, text, text_bytes);

    if (status != HVD_OK) {
        return status;
    }
    status = hvd_wait(ctx, handle, 60000);
    if (status != HVD_OK && hvd_result(ctx, handle, &result) == HVD_OK) {
        snprintf(text, text_bytes, "%s", result.text);
    }
    hvd_release(ctx, handle);
    return status;
}

// Rank r gives r + i at place i: the sum is size * i + 0 + 1 + ... + (size - 1).
static bool check_sum(hvd_ctx_t *ctx)
{
    int32_t values[N_VALUES];
    char text[HVD_TEXT_BYTES] = "";
    int size = hvd_size(ctx), rank = hvd_rank(ctx);

    for (int i = 0; i < N_VALUES; i++) {
        values[i] = rank + i;
    }
    if (run(ctx, "sum", values, text, sizeof text) != HVD_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, text);
        return false;
    }
    for (int i = 0; i < N_VALUES; i++) {
        if (values[i] != size * i + size * (size - 1) / 2) {
            fprintf(stderr, "rank %d: wrong sum %d at %d\n", rank, values[i], i);
            return false;
        }
    }
    return true;
}

// Until the peer is gone; a launcher may end us before we notice.
static int outlive(hvd_ctx_t *ctx, int victim)
{
    int32_t values[N_VALUES] = {0};
    char text[HVD_TEXT_BYTES] = "", name[32];

    for (int step = 0; step < 100000; step++) {
        if (step == 20 && hvd_rank(ctx) == victim) {
            kill(getpid(), SIGKILL);
        }
        snprintf(name, sizeof name, "step.%d", step);
        if (run(ctx, name, values, text, sizeof text) != HVD_OK) {
            fprintf(stderr, "rank %d learns: %s\n", hvd_rank(ctx), text);
            return 3;
        }
    }
    return 4;
}

int main(int argc, char **argv)
{
    int n_inits = 1, victim = -1;
    bool report = false;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--inits") == 0 && i + 1 < argc) {
            n_inits = (int)strtol(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--kill") == 0 && i + 1 < argc) {
            victim = (int)strtol(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--report") == 0) {
            report = true;
        } else {
            fprintf(stderr, "usage: %s [--inits N] [--kill RANK] [--report]\n", argv[0]);
            return 2;
        }
    }
    for (int n = 0; n < n_inits; n++) {
        char text[HVD_TEXT_BYTES] = "";
        hvd_ctx_t *ctx;
        if (hvd_init(NULL, &ctx, text, sizeof text) != HVD_OK) {
            fprintf(stderr, "init %d failed: %s\n", n, text);
            return 1;
        }
        if (victim >= 0) {
            return outlive(ctx, victim);
        }
        bool right = check_sum(ctx);
        if (n == n_inits - 1 && right) {
            printf("rank %d of %d, %d of %d here, ok\n", hvd_rank(ctx), hvd_size(ctx),
                   hvd_local_rank(ctx), hvd_local_size(ctx));
        }
        for (char **variable = environ; report && *variable != NULL; variable++) {
            printf("environment %s\n", *variable);
        }
        hvd_shutdown(ctx);
        if (!right) {
            return 1;
        }
    }
    return 0;
}
