// SPDX-License-Identifier: Apache-2.0
//
// cost_ops.c - runs one kind of operation N times, so that test_cost.py can count its instructions.
//
//   cost_ops OPERATION BYTES RANKS N
//
// Two ranks are two contexts of this process, and one thread makes the calls of both: both submit,
// then both wait. So they meet on the board without ever waiting, and every run executes the same
// instructions. One rank alone goes through the engine and its agreement.
#include "base/base.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_RANKS 2

typedef struct rank {
    int index, size, port;
    hvd_ctx_t *ctx;
    hvd_request_t request;
    hvd_tensor_t tensor;
    int64_t shape[1];
    hvd_handle_t handle;
} rank_t;

static const uint8_t secret[32] = {7};

static void die(const char *what, const char *text)
{
    fprintf(stderr, "cost_ops: %s: %s\n", what, text);
    exit(1);
}

static int secret_pipe(void)
{
    int ends[2];
    char hex[65];
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", secret[i]);
    }
    if (pipe(ends) != 0 || write(ends[1], hex, 64) != 64) {
        die("pipe", "cannot pass the secret");
    }
    close(ends[1]);
    return ends[0];
}

static void *join_job(void *arg)
{
    rank_t *r = arg;
    char text[HVD_TEXT_BYTES], values[8][64];
    snprintf(values[0], sizeof values[0], "HOROVOD_RANK=%d", r->index);
    snprintf(values[1], sizeof values[1], "HOROVOD_SIZE=%d", r->size);
    snprintf(values[2], sizeof values[2], "HOROVOD_LOCAL_RANK=%d", r->index);
    snprintf(values[3], sizeof values[3], "HOROVOD_LOCAL_SIZE=%d", r->size);
    snprintf(values[4], sizeof values[4], "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1");
    snprintf(values[5], sizeof values[5], "HOROVOD_RENDEZVOUS_PORT=%d", r->port);
    snprintf(values[6], sizeof values[6], "HOROVOD_SECRET_FD=%d", secret_pipe());
    const char *env[] = {values[0], values[1], values[2], values[3],
                         values[4], values[5], values[6], NULL};
    hvd_options_t options = {.env = env};
    if (hvd_init(&options, &r->ctx, text, sizeof text) != HVD_OK) {
        die("init", text);
    }
    return NULL;
}

static void *leave_job(void *arg)
{
    rank_t *r = arg;
    hvd_shutdown(r->ctx);
    return NULL;
}

static void prepare(rank_t *r, hvd_op_t op, size_t bytes)
{
    size_t room = bytes * MOST_RANKS;
    r->shape[0] = (int64_t)(bytes / sizeof(float));
    r->tensor = (hvd_tensor_t){
        .input = calloc(1, room), .output = calloc(1, room), .n_dims = 1, .shape = r->shape};
    r->request = (hvd_request_t){.op = op,
                                 .name = "cost",
                                 .dtype = HVD_FLOAT32,
                                 .reduce = HVD_SUM,
                                 .tensors = &r->tensor,
                                 .n_tensors = 1,
                                 .flags = HVD_WAITS};
    if (r->tensor.input == NULL || r->tensor.output == NULL) {
        die("memory", "none");
    }
}

static void run_once(rank_t *ranks, int size)
{
    char text[HVD_TEXT_BYTES];
    for (int i = 0; i < size; i++) {
        rank_t *r = &ranks[i];
        if (hvd_submit(r->ctx, &r->request, &r->handle, text, sizeof text) != HVD_OK) {
            die("submit", text);
        }
    }
    for (int i = 0; i < size; i++) {
        if (hvd_wait(ranks[i].ctx, ranks[i].handle, 60000) != HVD_OK) {
            hvd_result_t result = {.text = "it is not done"};
            hvd_result(ranks[i].ctx, ranks[i].handle, &result);
            die("wait", result.text);
        }
        hvd_release(ranks[i].ctx, ranks[i].handle);
    }
}

// What is counted: test_cost.py knows it by this name.
void measured(rank_t *ranks, int size, int n) __attribute__((noinline));
void measured(rank_t *ranks, int size, int n)
{
    for (int i = 0; i < n; i++) {
        run_once(ranks, size);
    }
}

// The first meeting of a name goes through the engines, which must both be driven.
static void *run_first(void *arg)
{
    run_once(arg, 1);
    return NULL;
}

static void in_threads(rank_t *ranks, int size, void *(*run)(void *))
{
    pthread_t threads[MOST_RANKS];
    for (int i = 0; i < size; i++) {
        if (pthread_create(&threads[i], NULL, run, &ranks[i]) != 0) {
            die("thread", "cannot be started");
        }
    }
    for (int i = 0; i < size; i++) {
        pthread_join(threads[i], NULL);
    }
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"allreduce", "allgather", "broadcast", "alltoall",
                                        "reducescatter"};
    rank_t ranks[MOST_RANKS] = {0};
    hvd_rendezvous_t *server;
    char text[HVD_TEXT_BYTES];
    int op = -1;
    for (int i = 0; argc == 5 && i < HVD_N_OPS; i++) {
        for (size_t k = 0; k < N_ELEMENTS(names); k++) {
            bool named = strcmp(hvd_op_name((hvd_op_t)i), names[k]) == 0;
            op = named && strcmp(argv[1], names[k]) == 0 ? i : op;
        }
    }
    if (op < 0) {
        die("usage", "cost_ops OPERATION BYTES RANKS N");
    }
    size_t bytes = strtoul(argv[2], NULL, 10);
    int size = atoi(argv[3]) == 1 ? 1 : MOST_RANKS;
    int n = atoi(argv[4]);
    if (hvd_rendezvous_start("127.0.0.1", 0, secret, &server, text, sizeof text) != HVD_OK) {
        die("rendezvous", text);
    }
    for (int i = 0; i < size; i++) {
        ranks[i].index = i;
        ranks[i].size = size;
        ranks[i].port = hvd_rendezvous_port(server);
        prepare(&ranks[i], (hvd_op_t)op, bytes);
    }
    in_threads(ranks, size, join_job);
    in_threads(ranks, size, run_first);
    measured(ranks, size, n);
    in_threads(ranks, size, leave_job);
    hvd_rendezvous_stop(server);
    return 0;
}
