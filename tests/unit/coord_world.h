// SPDX-License-Identifier: Apache-2.0
//
// A small world of coordinators in one process, for tests of src/coord: ranks, a tree, messages
// that arrive at once and in order, a clock that moves when told to, and a list of everything each
// rank was told. The tester says who submits what; world_settle() lets all messages travel.
#ifndef HVD_TESTS_COORD_WORLD_H
#define HVD_TESTS_COORD_WORLD_H

#include "coord/testing.h"
#include "wire/control.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>

#define WORLD_MAX_RANKS 64
#define WORLD_MAX_ENTRIES 600
#define ALL_RANKS (-1)

#define REDUCE_AS(type)                                                                            \
    for (size_t i = 0; i < n; i++) {                                                               \
        type x = ((const type *)a)[i], y = ((const type *)b)[i];                                   \
        ((type *)dst)[i] = op == HVD_SUM   ? x + y                                                 \
                           : op == HVD_MIN ? MIN(x, y)                                             \
                           : op == HVD_MAX ? MAX(x, y)                                             \
                                           : x * y;                                                \
    }

// The obvious reduction, for the types the tests use.
static inline void plain_reduce(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, const void *a,
                                const void *b, size_t n)
{
    assert_true(op == HVD_SUM || op == HVD_MIN || op == HVD_MAX || op == HVD_PRODUCT);
    switch (dtype) {
    case HVD_UINT8:
        REDUCE_AS(uint8_t)
        break;
    case HVD_INT32:
        REDUCE_AS(int32_t)
        break;
    case HVD_INT64:
        REDUCE_AS(int64_t)
        break;
    case HVD_FLOAT32:
        REDUCE_AS(float)
        break;
    case HVD_FLOAT64:
        REDUCE_AS(double)
        break;
    default:
        fail_msg("accumulators of type %s", hvd_dtype_name(dtype));
    }
}

// parent of every rank in a tree of the given arity.
static inline void tree_of_arity(int *parent, int size, int arity)
{
    for (int rank = 0; rank < size; rank++) {
        parent[rank] = rank == 0 ? -1 : (rank - 1) / arity;
    }
}

// What a rank was told.
typedef struct seen {
    decision_kind_t kind;
    uint64_t batch;
    int set;
    uint64_t tag;
    hvd_status_t status;
    int last_joined;
    int rank; // DECIDE_SILENT
    uint64_t silent_ns;
    char last[64];
    char *text;
    int n_entries;
    uint64_t *tags;
    char **names;
    signature_t signature; // of the first entry; dims not kept
    int64_t *sizes;        // of the first entry
    int n_sizes;
    void **results;      // NULL: did not ride
    size_t result_bytes; // of the first entry
} seen_t;

typedef struct world {
    int size;
    coord_params_t params;
    coord_t *ranks[WORLD_MAX_RANKS];
    bool is_dead[WORLD_MAX_RANKS];
    seen_t *seen[WORLD_MAX_RANKS];
    int n_seen[WORLD_MAX_RANKS];
    bool holds_batches; // batches stay running until world_finish_batches()
    uint64_t now_ns;
    uint64_t next_tag;
    int n_frames; // delivered
    size_t n_bytes;
} world_t;

static inline coord_params_t world_params(void)
{
    return (coord_params_t){.fusion_bytes = 1 << 20,
                            .inline_bytes = 64,
                            .cache_capacity = 1000,
                            .dynamic_sets = true,
                            .reduce = plain_reduce};
}

static inline world_t *world_new_tree(int size, const int *parent, coord_params_t params)
{
    world_t *world = calloc(1, sizeof *world);
    err_t err;
    assert_non_null(world);
    world->size = size;
    world->params = params;
    world->now_ns = NS_PER_S;
    for (int rank = 0; rank < size; rank++) {
        params.rank = rank;
        params.size = size;
        params.parent = parent;
        assert_int_equal(coord_new(&params, &world->ranks[rank], &err), HVD_OK);
    }
    return world;
}

static inline world_t *world_new(int size, coord_params_t params)
{
    int parent[WORLD_MAX_RANKS];
    tree_of_arity(parent, size, 2);
    return world_new_tree(size, parent, params);
}

static inline void seen_free(seen_t *seen)
{
    for (int i = 0; i < seen->n_entries; i++) {
        free(seen->names[i]);
        free(seen->results[i]);
    }
    free(seen->results);
    free(seen->names);
    free(seen->tags);
    free(seen->sizes);
    free(seen->text);
}

static inline void world_forget(world_t *world)
{
    for (int rank = 0; rank < world->size; rank++) {
        for (int i = 0; i < world->n_seen[rank]; i++) {
            seen_free(&world->seen[rank][i]);
        }
        world->n_seen[rank] = 0;
    }
}

static inline void world_free(world_t *world)
{
    world_forget(world);
    for (int rank = 0; rank < world->size; rank++) {
        coord_free(world->ranks[rank]);
        free(world->seen[rank]);
    }
    free(world);
}

static inline void *copy_of(const void *data, size_t bytes)
{
    void *copy = malloc(MAX(bytes, 1));
    assert_non_null(copy);
    if (bytes > 0) {
        memcpy(copy, data, bytes);
    }
    return copy;
}

static inline void world_note(world_t *world, int rank, const decision_t *decision)
{
    int n = world->n_seen[rank];
    world->seen[rank] = realloc(world->seen[rank], ((size_t)n + 1) * sizeof(seen_t));
    assert_non_null(world->seen[rank]);
    seen_t *seen = &world->seen[rank][n];
    *seen = (seen_t){.kind = decision->kind,
                     .batch = decision->batch,
                     .set = decision->set,
                     .tag = decision->tag,
                     .status = decision->status,
                     .last_joined = decision->last_joined,
                     .rank = decision->rank,
                     .silent_ns = decision->silent_ns,
                     .n_entries = decision->n_entries};
    snprintf(seen->last, sizeof seen->last, "%s",
             decision->activity != NULL ? decision->activity->last : "");
    seen->text = strdup(decision->text != NULL ? decision->text : "");
    seen->tags = calloc((size_t)seen->n_entries + 1, sizeof(uint64_t));
    seen->names = calloc((size_t)seen->n_entries + 1, sizeof(char *));
    seen->results = calloc((size_t)seen->n_entries + 1, sizeof(void *));
    for (int i = 0; i < seen->n_entries; i++) {
        const decision_entry_t *entry = &decision->entries[i];
        seen->tags[i] = entry->tag;
        seen->names[i] = strdup(entry->name);
        seen->results[i] =
            entry->result != NULL ? copy_of(entry->result, entry->result_bytes) : NULL;
    }
    if (seen->n_entries > 0) {
        const decision_entry_t *first = &decision->entries[0];
        seen->signature = *first->signature;
        seen->n_sizes = first->n_sizes;
        seen->sizes = copy_of(first->sizes, (size_t)first->n_sizes * sizeof(int64_t));
        seen->result_bytes = first->result_bytes;
    }
    world->n_seen[rank]++;
}

// Delivers the whole frames rank has for its i-th neighbour.
static inline bool world_move(world_t *world, int rank, int i)
{
    coord_t *from = world->ranks[rank];
    const void *bytes;
    coord_form_batches(from);
    size_t n = coord_outgoing(from, i, &bytes);
    int to = coord_neighbour(from, i);
    err_t err = {0};
    if (n == 0) {
        return false;
    }
    uint8_t *copy = copy_of(bytes, n);
    coord_sent(from, i, n);
    for (size_t at = 0; at < n && !world->is_dead[to];) {
        size_t body_bytes;
        assert_int_equal(frame_read(copy + at, n - at, &body_bytes, &err), HVD_OK);
        // A body of its own, so that reading past its end is noticed.
        uint8_t *body = copy_of(copy + at + FRAME_HEADER_BYTES, body_bytes);
        if (coord_receive(world->ranks[to], rank, body, body_bytes, world->now_ns, &err) !=
            HVD_OK) {
            fail_msg("rank %d, frame from %d: %s", to, rank, err.text);
        }
        free(body);
        at += FRAME_HEADER_BYTES + body_bytes;
        world->n_frames++;
    }
    world->n_bytes += n;
    free(copy);
    return true;
}

static inline bool world_decide(world_t *world, int rank)
{
    const decision_t *decision;
    bool any = false;
    while (coord_form_batches(world->ranks[rank]),
           (decision = coord_next(world->ranks[rank])) != NULL) {
        world_note(world, rank, decision);
        bool rides = decision->n_entries > 0 && decision->entries[0].result != NULL;
        if (decision->kind == DECIDE_RUN && !rides && !world->holds_batches) {
            coord_batch_done(world->ranks[rank], decision->batch, world->now_ns);
        }
        any = true;
    }
    return any;
}

// Lets everything travel until nothing moves. Returns the number of rounds in which something did.
static inline int world_settle(world_t *world)
{
    bool moved = true;
    int n_rounds = 0;
    while (moved) {
        moved = false;
        for (int rank = 0; rank < world->size; rank++) {
            for (int i = 0; !world->is_dead[rank] && i < coord_n_neighbours(world->ranks[rank]);
                 i++) {
                moved |= world_move(world, rank, i);
            }
        }
        for (int rank = 0; rank < world->size; rank++) {
            moved |= !world->is_dead[rank] && world_decide(world, rank);
        }
        n_rounds += moved;
        assert_true(n_rounds < 10000);
    }
    return n_rounds;
}

static inline void world_tick(world_t *world, uint64_t later_ns)
{
    world->now_ns += later_ns;
    for (int rank = 0; rank < world->size; rank++) {
        if (!world->is_dead[rank]) {
            coord_tick(world->ranks[rank], world->now_ns);
        }
    }
    world_settle(world);
}

// --- Submitting ---------------------------------------------------------------------------------

// A request with defaults that suit most tests: one float32 tensor, allreduce, sum.
typedef struct ask {
    const char *name;
    int set;
    hvd_op_t op;
    hvd_dtype_t dtype;   // 0 stands for float32
    hvd_reduce_t reduce; // 0 stands for sum
    int root;
    double prescale, postscale; // 0 stands for 1
    int n_tensors;              // 0 stands for 1
    const int64_t *dims;        // of one tensor, as many as n_dims
    int n_dims;
    bool is_scalar;
    const int64_t *sizes;
    int n_sizes;
    double value; // of every element, if it rides
} ask_t;

static inline int ask_words(const ask_t *ask, int64_t *words)
{
    static const int64_t big[] = {1000};
    const int64_t *dims = ask->dims != NULL ? ask->dims : big;
    int n_dims = ask->is_scalar ? 0 : ask->dims != NULL ? ask->n_dims : 1, n = 0;
    for (int tensor = 0; tensor < MAX(ask->n_tensors, 1); tensor++) {
        words[n++] = n_dims;
        for (int d = 0; d < n_dims; d++) {
            words[n++] = dims[d];
        }
    }
    return n;
}

static inline size_t fill(hvd_dtype_t dtype, void *at, size_t bytes, double value)
{
    size_t each = dtype == HVD_INT64 || dtype == HVD_FLOAT64 ? 8 : 4;
    for (size_t i = 0; i < bytes / each; i++) {
        switch (dtype) {
        case HVD_INT32:
            ((int32_t *)at)[i] = (int32_t)value;
            break;
        case HVD_INT64:
            ((int64_t *)at)[i] = (int64_t)value;
            break;
        case HVD_FLOAT64:
            ((double *)at)[i] = value;
            break;
        default:
            ((float *)at)[i] = (float)value;
        }
    }
    return bytes;
}

static inline hvd_status_t try_submit(world_t *world, int rank, const ask_t *ask, uint64_t tag,
                                      err_t *err)
{
    static int64_t words[WORLD_MAX_ENTRIES * 4];
    static double payload[512];
    coord_request_t request = {.set = ask->set,
                               .name = ask->name,
                               .name_bytes = strlen(ask->name),
                               .sizes = ask->sizes,
                               .n_sizes = ask->n_sizes,
                               .tag = tag};
    bool plain = ask->op == HVD_BARRIER || ask->op == HVD_JOIN;
    signature_t signature = {.op = ask->op,
                             .dtype = ask->dtype == 0 ? HVD_FLOAT32 : ask->dtype,
                             .reduce = ask->reduce == 0 ? HVD_SUM : ask->reduce,
                             .root = ask->root,
                             .prescale = ask->prescale == 0 ? 1 : ask->prescale,
                             .postscale = ask->postscale == 0 ? 1 : ask->postscale,
                             .n_tensors = plain ? 0 : MAX(ask->n_tensors, 1),
                             .dims = words};
    signature.n_dims_words = plain ? 0 : ask_words(ask, words);
    size_t bytes;
    request.signature = &signature;
    if (signature_rides(&signature, world->params.inline_bytes, &bytes)) {
        assert_true(bytes <= sizeof payload);
        request.payload = payload;
        request.payload_bytes = fill(signature.dtype, payload, bytes, ask->value);
    }
    return coord_submit(world->ranks[rank], &request, world->now_ns, err);
}

// On one rank, or on ALL_RANKS (the same tag everywhere). Returns the tag.
static inline uint64_t submit(world_t *world, int rank, ask_t ask)
{
    uint64_t tag = ++world->next_tag;
    err_t err = {0};
    for (int each = 0; each < world->size; each++) {
        if (each == rank || rank == ALL_RANKS) {
            if (try_submit(world, each, &ask, tag, &err) != HVD_OK) {
                fail_msg("rank %d, %s: %s", each, ask.name, err.text);
            }
        }
    }
    return tag;
}

// The decision that ends a submission on a rank, or NULL.
static inline const seen_t *seen_tag(const world_t *world, int rank, uint64_t tag)
{
    const seen_t *found = NULL;
    for (int i = 0; i < world->n_seen[rank]; i++) {
        const seen_t *seen = &world->seen[rank][i];
        bool has = seen->tag == tag;
        for (int k = 0; k < seen->n_entries; k++) {
            has |= seen->tags[k] == tag;
        }
        if (has) {
            assert_null(found); // decided once
            found = seen;
        }
    }
    return found;
}

static inline void assert_starts(const char *text, const char *start)
{
    if (strncmp(text, start, strlen(start)) != 0) {
        fail_msg("\"%s\" does not start with \"%s\"", text, start);
    }
}

static inline void assert_has(const char *text, const char *part)
{
    if (strstr(text, part) == NULL) {
        fail_msg("\"%s\" does not contain \"%s\"", text, part);
    }
}

static inline void assert_ran(const world_t *world, int rank, uint64_t tag)
{
    const seen_t *seen = seen_tag(world, rank, tag);
    if (seen == NULL || seen->kind != DECIDE_RUN) {
        fail_msg("rank %d: %s", rank, seen == NULL ? "not decided" : seen->text);
    }
}

static inline void assert_failed(const world_t *world, int rank, uint64_t tag, hvd_status_t status,
                                 const char *start)
{
    const seen_t *seen = seen_tag(world, rank, tag);
    if (seen == NULL || seen->kind != DECIDE_FAIL) {
        fail_msg("rank %d: did not fail", rank);
    }
    assert_int_equal(seen->status, status);
    assert_starts(seen->text, start);
}

#endif
