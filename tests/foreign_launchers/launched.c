// SPDX-License-Identifier: Apache-2.0
//
// launched.c - the rank that tests/foreign_launchers/run.py starts under every launcher.
//
//   launched [--inits N] [--kill RANK | --hold FOLDER | --mpi LIBRARY]
//
// Joins the job N times over and each time checks an allreduce against what it must give; then says
// "rank R of S, L of M here, ok". With --kill that rank ends itself by SIGKILL in the middle of a
// job and the others say what they learn of it. With --hold the ranks leave a file each in FOLDER
// and stay in the job until there is one called "go", so that somebody may look at them. With --mpi
// the process initialises that MPI library first and finalises it last, as programs with mpi4py do.
#include "hvd.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_VALUES 1000
#define THREAD_MULTIPLE 3 // in Open MPI and the MPICH ABI

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

// A minute at most.
static void hold(const hvd_ctx_t *ctx, const char *folder)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", folder, hvd_rank(ctx));
    FILE *file = fopen(path, "w");
    if (file != NULL) {
        fclose(file);
    }
    snprintf(path, sizeof path, "%s/go", folder);
    for (int i = 0; i < 6000 && access(path, F_OK) != 0; i++) {
        usleep(10000);
    }
}

typedef struct options {
    int n_inits, victim;
    const char *folder, *mpi;
} options_t;

static bool parse(int argc, char **argv, options_t *options)
{
    *options = (options_t){.n_inits = 1, .victim = -1};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--inits") == 0) {
            options->n_inits = (int)strtol(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--kill") == 0) {
            options->victim = (int)strtol(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--hold") == 0) {
            options->folder = argv[i + 1];
        } else if (strcmp(argv[i], "--mpi") == 0) {
            options->mpi = argv[i + 1];
        } else {
            return false;
        }
    }
    return argc % 2 == 1;
}

// Calls MPI_Init_thread or MPI_Finalize, which MPI libraries declare alike for this use.
static bool call_mpi(void *library, const char *name)
{
    int (*init)(int *, char ***, int, int *) = NULL;
    int (*finalize)(void) = NULL;
    int given;
    void *symbol = library != NULL ? dlsym(library, name) : NULL;

    if (symbol == NULL) {
        fprintf(stderr, "no %s: %s\n", name, dlerror());
        return false;
    }
    memcpy(&init, &symbol, sizeof symbol);
    memcpy(&finalize, &symbol, sizeof symbol);
    return (strcmp(name, "MPI_Finalize") == 0 ? finalize()
                                              : init(NULL, NULL, THREAD_MULTIPLE, &given)) == 0;
}

static int run_job(const options_t *options)
{
    for (int n = 0; n < options->n_inits; n++) {
        char text[HVD_TEXT_BYTES] = "";
        hvd_ctx_t *ctx;
        if (hvd_init(NULL, &ctx, text, sizeof text) != HVD_OK) {
            fprintf(stderr, "init %d failed: %s\n", n, text);
            return 1;
        }
        if (options->victim >= 0) {
            return outlive(ctx, options->victim);
        }
        bool right = check_sum(ctx);
        if (options->folder != NULL) {
            hold(ctx, options->folder);
        }
        if (right && n == options->n_inits - 1) {
            printf("rank %d of %d, %d of %d here, ok\n", hvd_rank(ctx), hvd_size(ctx),
                   hvd_local_rank(ctx), hvd_local_size(ctx));
        }
        hvd_shutdown(ctx);
        if (!right) {
            return 1;
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    options_t options;
    if (!parse(argc, argv, &options)) {
        fprintf(stderr, "usage: %s [--inits N] [--kill RANK | --hold FOLDER | --mpi LIBRARY]\n",
                argv[0]);
        return 2;
    }
    void *library = options.mpi != NULL ? dlopen(options.mpi, RTLD_NOW | RTLD_GLOBAL) : NULL;
    if (options.mpi != NULL && !call_mpi(library, "MPI_Init_thread")) {
        return 1;
    }
    int code = run_job(&options);
    if (options.mpi != NULL && !call_mpi(library, "MPI_Finalize")) {
        return 1;
    }
    return code;
}
