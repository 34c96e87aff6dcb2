// SPDX-License-Identifier: Apache-2.0
//
// steps.c - a rank that adds up numbers until a file appears, and looks at every sum.
//
// Usage: steps FILE. Rank 0 looks for the file; all ranks stop at the same step. Built and started
// by the tests of horovodrun. Exit status 1 at the first sum that is not right.
#include "hvd.h"

#include <stdio.h>
#include <unistd.h>

#define N_NUMBERS 5000

static hvd_status_t sum(hvd_ctx_t *ctx, const char *name, int64_t *numbers, int64_t n)
{
    char text[HVD_TEXT_BYTES] = "";
    hvd_handle_t handle;
    hvd_tensor_t tensor = {.input = numbers, .output = numbers, .n_dims = 1, .shape = &n};
    hvd_request_t request = {.op = HVD_ALLREDUCE,
                             .name = name,
                             .dtype = HVD_INT64,
                             .reduce = HVD_SUM,
                             .tensors = &tensor,
                             .n_tensors = 1,
                             .flags = HVD_WAITS};
    hvd_status_t status = hvd_submit(ctx, &request, &handle, text, sizeof text);
    if (status == HVD_OK) {
        status = hvd_wait(ctx, handle, HVD_FOREVER);
        hvd_release(ctx, handle);
    }
    return status;
}

static hvd_status_t step(hvd_ctx_t *ctx, int64_t number)
{
    static int64_t numbers[N_NUMBERS];
    int64_t size = hvd_size(ctx);
    for (int64_t i = 0; i < N_NUMBERS; i++) {
        numbers[i] = number + i + hvd_rank(ctx);
    }
    hvd_status_t status = sum(ctx, "numbers", numbers, N_NUMBERS);
    for (int64_t i = 0; status == HVD_OK && i < N_NUMBERS; i++) {
        if (numbers[i] != size * (number + i) + size * (size - 1) / 2) {
            fprintf(stderr, "step %lld: number %lld is wrong\n", (long long)number, (long long)i);
            return HVD_MISMATCH;
        }
    }
    return status;
}

int main(int argc, char **argv)
{
    char text[HVD_TEXT_BYTES] = "";
    hvd_ctx_t *ctx;
    int64_t is_over = argc < 2, number = 0;
    if (hvd_init(NULL, &ctx, text, sizeof text) != HVD_OK) {
        fprintf(stderr, "cannot join the job: %s\n", text);
        return 1;
    }
    printf("ready\n");
    fflush(stdout);
    hvd_status_t status = HVD_OK;
    while (status == HVD_OK && is_over == 0) {
        status = step(ctx, number++);
        is_over = hvd_rank(ctx) == 0 && access(argv[1], F_OK) == 0;
        status = status == HVD_OK ? sum(ctx, "over", &is_over, 1) : status;
        usleep(2000); // a step of training would compute
    }
    printf("%lld steps, %s\n", (long long)number, hvd_status_name(status));
    hvd_shutdown(ctx);
    return status == HVD_OK ? 0 : 1;
}
