// SPDX-License-Identifier: Apache-2.0
//
// allreduce.c - a whole job in one file: ranks that average a vector, and what starts them.
//
//   cc -Iinclude examples/c/allreduce.c -Lbuild -lhvd -Wl,-rpath,"$PWD/build" -o allreduce
//   ./allreduce 4
//
//   mpirun -n 4 ./allreduce
//
// With a number it is the launcher: it makes the job's secret, runs the rendezvous server and
// starts copies of itself with HOROVOD_RANK set. Without one it is a rank, whoever launched it.
// docs/embedding.md explains the calls.
#include "hvd.h"

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_RANKS 1024
#define N_VALUES 4

extern char **environ;

// --- A rank --------------------------------------------------------------------------------------

static hvd_status_t average(hvd_ctx_t *ctx, float values[N_VALUES], char *text, size_t text_bytes)
{
    const int64_t shape[] = {N_VALUES};
    const hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    const hvd_request_t request = {
        .op = HVD_ALLREDUCE,
        .name = "values", // the same on all ranks: it says what belongs together
        .dtype = HVD_FLOAT32,
        .reduce = HVD_AVERAGE,
        .tensors = &tensor,
        .n_tensors = 1,
        .flags = HVD_WAITS, // hvd_wait() is the next call: this thread does the work
    };
    hvd_handle_t handle;
    hvd_status_t status = hvd_submit(ctx, &request, &handle, text, text_bytes);
    if (status != HVD_OK) {
        return status;
    }
    status = hvd_wait(ctx, handle, HVD_FOREVER);
    hvd_result_t result;
    if (status != HVD_OK && hvd_result(ctx, handle, &result) == HVD_OK) {
        snprintf(text, text_bytes, "%s", result.text);
    }
    hvd_release(ctx, handle);
    return status;
}

static int run_rank(void)
{
    char text[HVD_TEXT_BYTES] = "";
    hvd_ctx_t *ctx;
    if (hvd_init(NULL, &ctx, text, sizeof text) != HVD_OK) {
        fprintf(stderr, "cannot join the job: %s\n", text);
        return 1;
    }
    int rank = hvd_rank(ctx);
    int size = hvd_size(ctx);
    float values[N_VALUES];
    for (int i = 0; i < N_VALUES; i++) {
        values[i] = (float)(rank + i);
    }
    hvd_status_t status = average(ctx, values, text, sizeof text);
    if (status == HVD_OK) {
        printf("rank %d of %d: %g %g %g %g\n", rank, size, values[0], values[1], values[2],
               values[3]);
    } else {
        fprintf(stderr, "rank %d: %s: %s\n", rank, hvd_status_name(status), text);
    }
    hvd_shutdown(ctx);
    return status == HVD_OK ? 0 : 1;
}

// --- The launcher --------------------------------------------------------------------------------

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

// The secret goes through a pipe: arguments and environment can be read by others.
static int start_rank(char **argv, int rank, const char hex[65], pid_t *pid_p)
{
    int ends[2];
    if (pipe(ends) != 0 || write(ends[1], hex, 64) != 64) {
        return -1;
    }
    close(ends[1]);
    set_number("HOROVOD_RANK", rank);
    set_number("HOROVOD_SECRET_FD", ends[0]);
    char *const rank_argv[] = {argv[0], NULL};
    int code = posix_spawn(pid_p, "/proc/self/exe", NULL, NULL, rank_argv, environ);
    close(ends[0]);
    return code;
}

static int start_job(int size, char **argv)
{
    uint8_t secret[32];
    char hex[65];
    char text[HVD_TEXT_BYTES];
    hvd_rendezvous_t *server;
    if (getrandom(secret, sizeof secret, 0) != sizeof secret ||
        hvd_rendezvous_start(NULL, 0, secret, &server, text, sizeof text) != HVD_OK) {
        fprintf(stderr, "cannot start the rendezvous server\n");
        return 1;
    }
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", secret[i]);
    }
    set_number("HOROVOD_SIZE", size);
    setenv("HOROVOD_RENDEZVOUS_ADDR", "127.0.0.1", 1);
    set_number("HOROVOD_RENDEZVOUS_PORT", hvd_rendezvous_port(server));
    pid_t pids[MAX_RANKS];
    int n_started = 0;
    while (n_started < size && start_rank(argv, n_started, hex, &pids[n_started]) == 0) {
        n_started++;
    }
    int code = n_started == size ? 0 : 1;
    for (int i = 0; i < n_started; i++) { // a rank that misses another gives up by itself
        int state;
        code |= waitpid(pids[i], &state, 0) != pids[i] || state != 0;
    }
    hvd_rendezvous_stop(server);
    return code;
}

int main(int argc, char **argv)
{
    if (argc == 1) {
        return run_rank();
    }
    long size = strtol(argv[1], NULL, 10);
    if (size < 1 || size > MAX_RANKS) {
        fprintf(stderr, "usage: %s [ranks, 1 to %d]\n", argv[0], MAX_RANKS);
        return 2;
    }
    return start_job((int)size, argv);
}
