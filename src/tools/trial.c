// SPDX-License-Identifier: Apache-2.0
//
// trial.c - a rank of the trial job of horovodrun --doctor.
//
// Initializes as every rank does, so that secret, rendezvous, addresses and transports are tried;
// then each rank in turn broadcasts TRIAL_BYTES, and the first rank prints how fast that was.
#include "tools/trial.h"
#include "launch/launch.h"

#include <stdlib.h>

#define TRIAL_BYTES (8 * MIB)
#define TRIAL_ROUNDS 5

static hvd_status_t broadcast(hvd_ctx_t *ctx, int root, void *data, char *text, size_t bytes)
{
    const int64_t shape[] = {TRIAL_BYTES};
    const hvd_tensor_t tensor = {.input = data, .output = data, .n_dims = 1, .shape = shape};
    char name[32];
    hvd_handle_t handle;
    snprintf(name, sizeof name, "trial.%d", root);
    const hvd_request_t request = {.op = HVD_BROADCAST,
                                   .name = name,
                                   .dtype = HVD_UINT8,
                                   .root = root,
                                   .tensors = &tensor,
                                   .n_tensors = 1,
                                   .flags = HVD_WAITS};
    hvd_status_t status = hvd_submit(ctx, &request, &handle, text, bytes);
    if (status == HVD_OK) {
        status = hvd_wait(ctx, handle, HVD_FOREVER);
        hvd_release(ctx, handle);
    }
    return status;
}

static hvd_status_t try_roots(hvd_ctx_t *ctx, void *data, char *text, size_t bytes)
{
    hvd_status_t status = HVD_OK;
    for (int root = 0; root < hvd_size(ctx) && status == HVD_OK; root++) {
        uint64_t best_ns = UINT64_MAX;
        for (int i = 0; i < TRIAL_ROUNDS && status == HVD_OK; i++) {
            uint64_t start_ns = clock_ns();
            status = broadcast(ctx, root, data, text, bytes);
            best_ns = MIN(best_ns, clock_ns() - start_ns);
        }
        if (hvd_rank(ctx) == 0 && status == HVD_OK) {
            fprintf(stdout, "rank %d sends to the others: %.0f MB/s\n", root,
                    (double)TRIAL_BYTES * 1e3 / (double)MAX(best_ns, 1));
        }
    }
    return status;
}

int trial_rank(void)
{
    char text[HVD_TEXT_BYTES] = "";
    uint64_t start_ns = clock_ns();
    void *data = calloc(1, TRIAL_BYTES);
    hvd_ctx_t *ctx;
    if (data == NULL || hvd_init(NULL, &ctx, text, sizeof text) != HVD_OK) {
        say("the trial job cannot start: %s", text);
        free(data);
        return 1;
    }
    if (hvd_rank(ctx) == 0) {
        fprintf(stdout, "%d ranks met within %.2f s\n", hvd_size(ctx),
                (double)(clock_ns() - start_ns) / 1e9);
    }
    hvd_status_t status = try_roots(ctx, data, text, sizeof text);
    if (status != HVD_OK) {
        say("the trial job failed: %s: %s", hvd_status_name(status), text);
    }
    hvd_shutdown(ctx);
    free(data);
    return status == HVD_OK ? 0 : 1;
}
