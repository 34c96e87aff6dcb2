// SPDX-License-Identifier: Apache-2.0
//
// info_gpu.c - hvd-info --gpu-selftest: every operation, type and some sizes on the GPUs of this
// machine, by NCCL and by the host, and how fast they are.
//
// Ranks are forked for each way (info_gpu_rank.c), and tell what they find in memory that is
// shared. This process itself never starts the driver: a forked child could not use it then.
#define _GNU_SOURCE
#include "tools/info_gpu.h"

#include "device/device.h"
#include "tools/info.h"
#include "tools/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT_S 60
#define NO_GPU 3 // the exit code

enum { BY_NCCL, BY_HOST, N_WAYS };

static const char *const way_names[N_WAYS] = {"by NCCL", "through the host"};

// Seen by all ranks.
typedef struct ground {
    int n_gpus;
    err_t err; // of counting them
    selftest_part_t parts[N_WAYS][SELFTEST_RANKS];
} ground_t;

// --- Who takes part ------------------------------------------------------------------------------

// In a child, for the reason above.
static bool count_gpus(ground_t *ground)
{
    int state;
    pid_t child = fork();
    if (child == 0) {
        alarm(COUNT_S);
        _exit(device_count(&ground->n_gpus, &ground->err) == HVD_OK ? 0 : 1);
    }
    if (child < 0 || waitpid(child, &state, 0) != child) {
        snprintf(ground->err.text, sizeof ground->err.text, "no process could be started");
        return false;
    }
    if (state != 0 && ground->err.text[0] == '\0') {
        snprintf(ground->err.text, sizeof ground->err.text,
                 "the driver has not said within %d s how many GPUs there are", COUNT_S);
    } else if (state == 0 && ground->n_gpus == 0) {
        snprintf(ground->err.text, sizeof ground->err.text,
                 "the driver finds none; nvidia-smi, or rocm-smi, shows what it sees, and "
                 "CUDA_VISIBLE_DEVICES may hide some");
    }
    return state == 0 && ground->n_gpus > 0;
}

static void run_way(ground_t *ground, int way, int ranks)
{
    config_t config;
    char library[512];
    selftest_t test = {.wants_nccl = way == BY_NCCL,
                       .ranks = ranks,
                       .n_gpus = ground->n_gpus,
                       .parts = ground->parts[way]};
    const char *env[] = {
        "HOROVOD_LOG_LEVEL=info",
        way == BY_NCCL ? "HOROVOD_GPU_OPERATIONS=NCCL" : "HOROVOD_GPU_OPERATIONS=HOST", library};
    if (!info_load_knobs(&config)) {
        exit(2);
    }
    snprintf(library, sizeof library, "HOROVOD_NCCL_LIBRARY=%s", config.nccl_library);
    config_free(&config);
    ranks_run(&(rank_job_t){.tool = "hvd-info",
                            .ranks = ranks,
                            .hosts = 1,
                            .env = env,
                            .n_env = (int)N_ELEMENTS(env),
                            .run = selftest_rank,
                            .arg = &test});
}

// --- What they tell ------------------------------------------------------------------------------

static void print_head(const ground_t *ground, int ranks)
{
    hvd_gpu_t gpu;
    hvd_gpu(NULL, &gpu);
    printf("self test on %d GPU%s, %d rank%s: libhvd %s, %s %d.%d", ground->n_gpus,
           plural(ground->n_gpus), ranks, plural(ranks), hvd_version(), gpu.driver,
           gpu.driver_version / 1000, gpu.driver_version % 1000 / 10);
    if (gpu.nccl_version != 0) {
        printf(", NCCL %d.%d.%d", gpu.nccl_version / 10000, gpu.nccl_version / 100 % 100,
               gpu.nccl_version % 100);
    }
    puts("");
    for (int r = 0; r < ranks; r++) {
        printf("  rank %d  GPU %d  %s\n", r, r % ground->n_gpus, ground->parts[BY_HOST][r].gpu);
    }
}

static const char *cell_text(const selftest_part_t *parts, int ranks, int row, int dtype)
{
    int worst = CELL_SKIPPED;
    for (int r = 0; r < ranks; r++) {
        worst = MAX(worst, parts[r].cells[row][dtype]);
    }
    return worst == CELL_WRONG ? "WRONG" : worst == CELL_RIGHT ? "ok" : "-";
}

static void print_matrix(const selftest_part_t *parts, int ranks)
{
    table_t table = {.n_columns = 1 + HVD_N_DTYPES};
    table_add(&table, " ");
    for (int dtype = 0; dtype < HVD_N_DTYPES; dtype++) {
        table_add(&table, "%s", hvd_dtype_name((hvd_dtype_t)dtype));
    }
    for (int row = 0; row < SELFTEST_ROWS; row++) {
        table_add(&table, "%s", selftest_rows[row].name);
        for (int dtype = 0; dtype < HVD_N_DTYPES; dtype++) {
            table_add(&table, "%s", cell_text(parts, ranks, row, dtype));
        }
    }
    table_print(&table);
}

static void print_speeds(const selftest_part_t *part)
{
    char size[32];
    for (int i = 0; i < SELFTEST_SPEEDS && part->speeds_us[i] > 0; i++) {
        printf("  allreduce of %-8s %10.1f us %8.2f GB/s\n",
               info_size_text(selftest_speeds[i], size), part->speeds_us[i],
               (double)selftest_speeds[i] / part->speeds_us[i] / 1e3);
    }
    if (part->to_device_gbs > 0) {
        printf("  copies to the device %.2f GB/s, to the host %.2f GB/s\n", part->to_device_gbs,
               part->to_host_gbs);
    }
}

// A rank that stayed away, was killed, or was ended because another one failed.
static void print_lost(const selftest_part_t *parts, int ranks, bool others_failed)
{
    for (int r = 0; r < ranks; r++) {
        if (!parts[r].is_over && parts[r].failure[0] == '\0' && !others_failed) {
            printf("  rank %d did not come back: %s\n", r,
                   parts[r].doing[0] != '\0' ? parts[r].doing : "it had not begun");
        }
    }
}

// What one way has given. Returns what is wrong.
static int print_way(const ground_t *ground, int way, int ranks)
{
    const selftest_part_t *parts = ground->parts[way];
    int n_wrong = 0, n_lost = 0, n_failed = 0;
    printf("\n%s\n", way_names[way]);
    for (int r = 0; r < ranks; r++) {
        n_wrong += parts[r].n_wrong;
        n_lost += !parts[r].is_over;
        n_failed += parts[r].failure[0] != '\0';
    }
    if (way == BY_NCCL && n_wrong + n_lost == 0 && !parts[0].by_nccl) {
        printf("  not tried: %s\n", ranks == 1                     ? "there is one rank only"
                                    : parts[0].why_host[0] != '\0' ? parts[0].why_host
                                                                   : "NCCL was not used");
        return 0;
    }
    print_matrix(parts, ranks);
    print_speeds(&parts[0]);
    for (int r = 0; r < ranks; r++) {
        if (parts[r].failure[0] != '\0') {
            printf("  %s\n", parts[r].failure);
        }
    }
    print_lost(parts, ranks, n_failed > 0);
    return n_wrong + n_lost;
}

int info_gpu_selftest(const info_options_t *options)
{
    ground_t *ground =
        mmap(NULL, sizeof *ground, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ground == MAP_FAILED) {
        fputs("hvd-info: out of memory\n", stderr);
        return 1;
    }
    if (!count_gpus(ground)) {
        printf("There is no GPU to test on this machine: %s.\n", ground->err.text);
        munmap(ground, sizeof *ground);
        return NO_GPU;
    }
    int ranks = options->has_ranks ? options->ranks : MAX(ground->n_gpus, 2);
    ranks = MIN(ranks, SELFTEST_RANKS);
    int n_wrong = 0, n_results = 0;
    for (int way = 0; way < N_WAYS; way++) {
        run_way(ground, way, ranks);
    }
    print_head(ground, ranks);
    for (int way = 0; way < N_WAYS; way++) {
        n_wrong += print_way(ground, way, ranks);
        n_results += ground->parts[way][0].n_results;
    }
    if (n_wrong == 0) {
        printf("\nAll %d results are right, on each of %d rank%s.\n", n_results, ranks,
               plural(ranks));
    } else {
        puts("\nSomething is wrong, see above.");
    }
    munmap(ground, sizeof *ground);
    return n_wrong == 0 ? 0 : 1;
}
