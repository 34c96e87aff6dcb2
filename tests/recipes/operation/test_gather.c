// SPDX-License-Identifier: Apache-2.0
//
// test_gather.c - the operation that test_operation.py adds, used as any other is.
//
// Compiled in the tree with the operation only. Member m brings blocks of different length, some
// empty; every value tells member, tensor and place, so the root checks each without asking.
#include "harness.h"

#include <stdio.h>
#include <unistd.h>

#define COLUMNS 3
#define MAX_TENSORS 3
#define MANY 24

// One gather: who takes part, how long its blocks are, and the memory of this rank's part.
typedef struct gather {
    int set, n_members, root; // members are the ranks 0 .. n_members-1; root: a rank
    int n_tensors;
    int64_t scale; // rows of a block are a small multiple of it
    bool own_memory;
    int64_t shapes[MAX_TENSORS][2];
    hvd_tensor_t tensors[MAX_TENSORS];
    hvd_handle_t handle;
} gather_t;

static int64_t rows_of(const gather_t *g, int member, int t)
{
    return (member + t + g->root) % 3 * g->scale + (member > 0 ? member : 0);
}

static int64_t rows_of_all(const gather_t *g, int t)
{
    int64_t rows = 0;
    for (int m = 0; m < g->n_members; m++) {
        rows += rows_of(g, m, t);
    }
    return rows;
}

static int32_t value_of(int member, int t, int64_t i)
{
    return (int32_t)(member * 100000007 + t * 1000003 + i);
}

static void *memory(int64_t rows)
{
    return calloc((size_t)rows * COLUMNS + 1, sizeof(int32_t));
}

static hvd_request_t request_of(const gather_t *g, const char *name)
{
    return (hvd_request_t){.op = HVD_GATHER,
                           .name = name,
                           .dtype = HVD_INT32,
                           .root = g->root,
                           .process_set = g->set,
                           .tensors = g->tensors,
                           .n_tensors = g->n_tensors};
}

static void submit(rank_t *r, gather_t *g, const char *name)
{
    for (int t = 0; t < g->n_tensors; t++) {
        int64_t rows = rows_of(g, r->rank, t);
        int32_t *input = memory(rows);
        for (int64_t i = 0; i < rows * COLUMNS; i++) {
            input[i] = value_of(r->rank, t, i);
        }
        bool gives_output = g->own_memory && r->rank == g->root;
        g->shapes[t][0] = rows;
        g->shapes[t][1] = COLUMNS;
        g->tensors[t] = (hvd_tensor_t){.input = input,
                                       .output = gives_output ? memory(rows_of_all(g, t)) : NULL,
                                       .n_dims = 2,
                                       .shape = g->shapes[t]};
    }
    hvd_request_t request = request_of(g, name);
    CHECK_OK(r, hvd_submit(r->ctx, &request, &g->handle, r->text, sizeof r->text));
}

static void check_tensor(rank_t *r, const gather_t *g, int t)
{
    int64_t shape[HVD_MAX_DIMS];
    void *data;
    CHECK_OK(r, hvd_output(r->ctx, g->handle, t, &data, shape));
    CHECK_INT(r, shape[0], r->rank == g->root ? rows_of_all(g, t) : 0);
    CHECK_INT(r, shape[1], COLUMNS);
    const int32_t *at = data;
    for (int m = 0; r->rank == g->root && m < g->n_members; m++) {
        for (int64_t i = 0; i < rows_of(g, m, t) * COLUMNS; i++) {
            CHECK_INT(r, *at++, value_of(m, t, i));
        }
    }
}

static void finish(rank_t *r, gather_t *g)
{
    hvd_status_t status = hvd_wait(r->ctx, g->handle, 60000);
    hvd_result_t result;
    CHECK_OK(r, hvd_result(r->ctx, g->handle, &result));
    snprintf(r->text, sizeof r->text, "%s", result.text);
    CHECK_OK(r, status);
    for (int t = 0; t < g->n_tensors; t++) {
        check_tensor(r, g, t);
    }
    hvd_release(r->ctx, g->handle);
    for (int t = 0; t < g->n_tensors; t++) {
        free((void *)(uintptr_t)g->tensors[t].input);
        free(g->tensors[t].output);
    }
}

static void gather(rank_t *r, gather_t g, const char *name)
{
    rank_step(r, "%s: %d tensors of %lld rows to rank %d of %d", name, g.n_tensors,
              (long long)g.scale, g.root, g.n_members);
    submit(r, &g, name);
    finish(r, &g);
}

static uint64_t n_gathers(rank_t *r, uint64_t *bytes_p)
{
    hvd_counters_t counters;
    CHECK_OK(r, hvd_counters(r->ctx, &counters, sizeof counters));
    *bytes_p = counters.bytes[HVD_GATHER];
    return counters.operations[HVD_GATHER];
}

// --- Subtests -----------------------------------------------------------------------------------

static void every_root(rank_t *r, void *arg)
{
    (void)arg;
    static const int64_t scales[] = {0, 1, 100, 30000};
    rank_open(r);
    uint64_t n = 0, bytes = 0, counted;
    for (int root = 0; root < r->size; root++) {
        for (size_t i = 0; i < N_ELEMENTS(scales) * 4; i++) {
            gather_t g = {.n_members = r->size, .root = root, .scale = scales[i / 4]};
            g.n_tensors = i % 2 == 0 ? 1 : MAX_TENSORS;
            g.own_memory = i % 4 / 2 == 0;
            char name[32];
            snprintf(name, sizeof name, "gather.%d.%zu", root, i / 2); // some names come again
            gather(r, g, name);
            n++;
            for (int t = 0; t < g.n_tensors; t++) {
                bytes += (uint64_t)rows_of(&g, r->rank, t) * COLUMNS * sizeof(int32_t);
            }
        }
    }
    CHECK_INT(r, n_gathers(r, &counted), n);
    CHECK_INT(r, counted, bytes);
    rank_close(r);
}

static void fused(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    gather_t gathers[MANY];
    hvd_counters_t before, after;
    CHECK_OK(r, hvd_counters(r->ctx, &before, sizeof before));
    for (int i = 0; i < MANY; i++) {
        char name[32];
        gathers[i] = (gather_t){.n_members = r->size, .n_tensors = 1 + i % 2, .scale = i};
        gathers[i].root = i < MANY / 2 ? 0 : r->size - 1; // those of one root may go together
        snprintf(name, sizeof name, "fused.%d", i);
        rank_step(r, "%s", name);
        submit(r, &gathers[i], name);
    }
    for (int i = 0; i < MANY; i++) {
        finish(r, &gathers[i]);
    }
    CHECK_OK(r, hvd_counters(r->ctx, &after, sizeof after));
    CHECK_INT(r, after.batched - before.batched, MANY);
    CHECK(r, after.batches - before.batches < MANY);
    rank_close(r);
}

static void process_set(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    int ranks[MAX_RANKS], id;
    for (int i = 0; i < r->size - 1; i++) {
        ranks[i] = i;
    }
    CHECK_OK(r, hvd_process_set_add(r->ctx, ranks, r->size - 1, &id, r->text, sizeof r->text));
    for (int root = 0; r->rank < r->size - 1 && root < r->size - 1; root++) {
        gather_t g = {.set = id, .n_members = r->size - 1, .root = root, .n_tensors = 2};
        g.scale = 50;
        gather(r, g, "in a set");
        g.root = r->size - 1;
        hvd_request_t request = request_of(&g, "root outside");
        int32_t value = 1;
        int64_t shape[1] = {1};
        hvd_tensor_t tensor = {.input = &value, .n_dims = 1, .shape = shape};
        request.tensors = &tensor;
        request.n_tensors = 1;
        CHECK_STATUS(r, rank_call(r, &request), HVD_INVALID_ARGUMENT);
        CHECK_HAS(r, r->text, "gather received invalid root rank");
    }
    rank_close(r);
}

static void mismatches(rank_t *r, void *arg)
{
    (void)arg;
    rank_open(r);
    int32_t value = 1;
    int64_t shape[1] = {1};
    hvd_tensor_t tensor = {.input = &value, .n_dims = 1, .shape = shape};
    hvd_request_t request = {.op = HVD_GATHER,
                             .name = "roots",
                             .dtype = HVD_INT32,
                             .root = r->rank == 0 ? 0 : 1,
                             .tensors = &tensor,
                             .n_tensors = 1};
    rank_step(r, "different roots");
    CHECK_STATUS(r, rank_call(r, &request), HVD_MISMATCH);
    CHECK_STARTS(r, r->text, "Mismatched GATHER root ranks:");
    rank_step(r, "a scalar");
    request.root = 0;
    tensor.n_dims = 0;
    CHECK_STATUS(r, rank_call(r, &request), HVD_MISMATCH);
    CHECK_HAS(r, r->text, "tried to GATHER a rank-zero tensor");
    rank_step(r, "another operation");
    tensor.n_dims = 1;
    request.op = r->rank == 0 ? HVD_GATHER : HVD_ALLGATHER;
    CHECK_STATUS(r, rank_call(r, &request), HVD_MISMATCH);
    CHECK_HAS(r, r->text, "GATHER");
    rank_step(r, "while one has joined");
    if (r->rank == 0) {
        CHECK_OK(r, rank_call(r, &(hvd_request_t){.op = HVD_JOIN, .name = "join"}));
    } else {
        request.op = HVD_GATHER;
        CHECK_STATUS(r, rank_call(r, &request), HVD_JOINED);
        CHECK_STARTS(r, r->text, "Gather is not supported with Join");
        CHECK_OK(r, rank_call(r, &(hvd_request_t){.op = HVD_JOIN, .name = "join"}));
    }
    gather(r, (gather_t){.n_members = r->size, .n_tensors = 1, .scale = 5}, "afterwards");
    rank_close(r);
}

static void timeline(rank_t *r, void *arg)
{
    (void)arg;
    char path[64];
    snprintf(path, sizeof path, "/tmp/test_gather.%d.json", (int)getppid());
    if (r->rank == 0) {
        rank_setenv(r, "HOROVOD_TIMELINE", path);
    }
    rank_open(r);
    gather(r, (gather_t){.n_members = r->size, .n_tensors = 1, .scale = 50}, "seen");
    rank_close(r);
    if (r->rank == 0) {
        char text[16384];
        FILE *file = fopen(path, "r");
        CHECK(r, file != NULL);
        text[fread(text, 1, sizeof text - 1, file)] = '\0';
        fclose(file);
        unlink(path);
        CHECK_HAS(r, text, "\"NEGOTIATE_GATHER\"");
        CHECK_HAS(r, text, r->size == 1 ? "\"LOCAL_GATHER\"" : "\"PLAN_GATHER\"");
    }
}

static const subtest_t subtests[] = {
    {.name = "every root", .fn = every_root},
    {.name = "fused", .fn = fused, .env = {"HOROVOD_CYCLE_TIME=20"}},
    {.name = "process set",
     .fn = process_set,
     .min_ranks = 3,
     .env = {"HOROVOD_DYNAMIC_PROCESS_SETS=1"}},
    {.name = "mismatches", .fn = mismatches, .min_ranks = 2},
    {.name = "timeline", .fn = timeline},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
